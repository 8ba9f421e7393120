"""Unmodified diffusers transformers over sharded tokens equal themselves on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.traffic import calls_of
from ulysses_comm import simulate, sum_gradients
from ulysses_comm.integrations.diffusers import PLANS, TokenAxis, TokenPlan, parallelize

diffusers = pytest.importorskip("diffusers")

CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.double().eval()


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def flux() -> tuple[torch.nn.Module, dict[str, torch.Tensor], int]:
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=6,
        joint_attention_dim=10,
        pooled_projection_dim=12,
        axes_dims_rope=(2, 2, 4),
    )
    inputs = {
        "hidden_states": noise(2, 14, 4),
        "encoder_hidden_states": noise(2, 5, 10),
        "pooled_projections": noise(2, 12),
        "timestep": torch.tensor([0.3, 0.6], dtype=torch.float64),
        "img_ids": torch.stack([torch.zeros(14), torch.arange(14) // 7, torch.arange(14) % 7], 1),
        "txt_ids": torch.zeros(5, 3),
    }
    return randomised(model), inputs, 3


def flux2() -> tuple[torch.nn.Module, dict[str, torch.Tensor], int]:
    model = diffusers.Flux2Transformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=5,
        joint_attention_dim=10,
        timestep_guidance_channels=16,
        axes_dims_rope=(2, 2, 2, 2),
    )
    inputs = {
        "hidden_states": noise(2, 9, 4),
        "encoder_hidden_states": noise(2, 5, 10),
        "timestep": torch.tensor([0.3, 0.6], dtype=torch.float64),
        "guidance": torch.tensor([1.0, 2.0], dtype=torch.float64),
        "img_ids": torch.arange(9)[:, None].expand(9, 4),
        "txt_ids": torch.zeros(5, 4),
    }
    return randomised(model), inputs, 2


def sd3() -> tuple[torch.nn.Module, dict[str, torch.Tensor], int]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=24,
        caption_projection_dim=24,
        pooled_projection_dim=12,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
    )
    inputs = {
        "hidden_states": noise(2, 4, 6, 10),
        "encoder_hidden_states": noise(2, 7, 24),
        "pooled_projections": noise(2, 12),
        "timestep": torch.tensor([3, 600]),
    }
    return randomised(model), inputs, 3


def wan(steps_per_token: bool = False) -> tuple[torch.nn.Module, dict[str, torch.Tensor], int]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=10,
        freq_dim=16,
        ffn_dim=24,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=16,
    )
    inputs = {
        "hidden_states": noise(2, 4, 3, 4, 6),  # 3 * 2 * 3 tokens
        "timestep": torch.tensor([3, 600]),
        "encoder_hidden_states": noise(2, 9, 10),  # as many as a rank of two has
    }
    if steps_per_token:
        inputs["timestep"] = torch.arange(36).view(2, 18) * 20
    return randomised(model), inputs, 2


MODELS: dict[str, Callable[[], Any]] = {
    "Flux": flux,
    "Flux 2": flux2,
    "Stable Diffusion 3": sd3,
    "Wan": wan,
    "Wan, a time step for each token": lambda: wan(steps_per_token=True),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_output_and_gradients_equal_one_process(name: str, world_size: int) -> None:
    model, inputs, layers = MODELS[name]()
    want = model(**inputs).sample
    want.square().sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters()}

    def step(group: dist.ProcessGroup) -> Any:
        own = copy.deepcopy(model)
        own.zero_grad()
        parallelize(own, group, loss="same")
        output = own(**inputs).sample
        output.square().sum().backward()
        sum_gradients(own.parameters(), group)
        return output.detach(), {n: p.grad for n, p in own.named_parameters()}

    simulation = simulate(world_size, step)
    for output, grads in simulation.results:
        torch.testing.assert_close(output, want, **CLOSE)
        for parameter, grad in grads.items():
            reference = expected[parameter]
            if reference is None:  # not used; the sum over ranks is a zero
                assert grad is None or not grad.any()
                continue
            # Wan normalises in float32
            torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-6)
    if world_size > 1:
        kinds = [call.kind for call in calls_of(simulation)]
        assert kinds[: 2 * layers + 1] == ["all_to_all_single"] * (2 * layers + 1), (
            "two exchanges a layer, and the gather"
        )


@pytest.mark.parametrize("options", [{"chunks": 2}, {"split_sizes": [1, 13]}], ids=str)
def test_options_do_not_change_the_output(options: dict[str, Any]) -> None:
    model, inputs, _ = flux()
    with torch.no_grad():
        want = model(**inputs).sample

    def step(group: dist.ProcessGroup) -> torch.Tensor:
        own = copy.deepcopy(model)
        parallelize(own, group, **options)
        with torch.no_grad():
            own(**{**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"][:, :3],
                   "txt_ids": inputs["txt_ids"][:3]})  # fmt: skip
            return own(**inputs, return_dict=False)[0]

    for output in simulate(2, step).results:
        torch.testing.assert_close(output, want, **CLOSE)


def test_closing_gives_the_model_its_forward_back() -> None:
    model, inputs, _ = flux()
    processors = model.attn_processors
    with torch.no_grad():
        want = model(**inputs).sample

    def step(group: dist.ProcessGroup) -> None:
        own = copy.deepcopy(model)
        with parallelize(own, group) as sharded:
            assert {type(p).__name__ for p in own.attn_processors.values()} == {"FluxAttnProcessor"}
            with torch.no_grad():
                own(**inputs)
        sharded.close()
        assert {n: type(p) for n, p in own.attn_processors.items()} == {
            n: type(p) for n, p in processors.items()
        }
        with torch.no_grad():
            assert torch.equal(own(**inputs).sample, want)

    assert sum(call.kind == "all_to_all_single" for call in calls_of(simulate(2, step))) == 7


class Unknown:
    def __call__(self, attn: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


def test_refuses_what_it_cannot_shard() -> None:
    model, inputs, _ = flux()

    def step(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="No plan for Linear: expected one of Flux"):
            parallelize(torch.nn.Linear(1, 1), group)
        with pytest.raises(ValueError, match="no attention layer with a processor"):
            parallelize(torch.nn.Linear(1, 1), group, plan=TokenPlan())
        own = copy.deepcopy(model)
        with (
            parallelize(own, group),
            pytest.raises(ValueError, match=r"loss=None.*'same'"),
        ):
            own(**inputs)
        with (
            torch.no_grad(),
            parallelize(own, group, split_sizes=[0, 14]),
            pytest.raises(ValueError, match="one token or more on every rank"),
        ):
            own(**inputs)
        mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
        hook = own.transformer_blocks[0].attn.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
        )
        with (
            torch.no_grad(),
            parallelize(own, group),
            pytest.raises(ValueError, match="for the 12 tokens of this rank: expected one for all"),
        ):
            own(**inputs)
        hook.remove()
        mistaken = TokenPlan(
            inputs={"": {"hidden_states": TokenAxis(1), "img_ids": TokenAxis(0)}},
            gathered=PLANS["FluxTransformer2DModel"].gathered,
        )
        with (
            torch.no_grad(),
            parallelize(own, group, plan=mistaken),
            pytest.raises(ValueError, match="attends from 12 tokens to 12: expected 7"),
        ):
            own(**inputs)
        own.transformer_blocks[0].attn.processor = Unknown()
        with pytest.raises(ValueError, match="Unknown calls neither dispatch_attention_fn"):
            parallelize(own, group)

    simulate(2, step)
