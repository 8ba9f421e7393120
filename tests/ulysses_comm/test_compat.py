"""Drop-in names: the signatures of the originals, the results of one process."""

from __future__ import annotations

import enum
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ulysses_comm.attention_cases import SPLITS, close, inputs, sdpa_of, shard
from ulysses_comm import compat, simulate

# As published: deepspeed 0.19.8 and yunchang 0.6.4.
SIGNATURES = {
    compat.DistributedAttention.__init__: [
        "self", "local_attention", "sequence_process_group", "scatter_idx=2", "gather_idx=0",
        "sp_stream=None", "num_kv_heads=None",
    ],
    compat.DistributedAttention.forward: [
        "self", "query", "key", "value", "batch_dim_idx", "rotary_pos_emb=None", "*args",
        "**kwargs",
    ],
    compat.UlyssesAttention.__init__: [
        "self", "sequence_process_group=None", "scatter_idx=2", "gather_idx=1", "use_sync=False",
        "attn_type='fa'",
    ],
    compat.UlyssesAttention.forward: [
        "self", "query", "key", "value", "dropout_p=0.0", "softmax_scale=None", "causal=False",
        "window_size=(-1, -1)", "softcap=0.0", "alibi_slopes=None", "deterministic=False",
        "return_attn_probs=False", "*args",
    ],
}  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signatures_are_the_originals(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    own = [p for p in parameters if p.name != "split_sizes"]  # an addition, by keyword only
    shown = [str(p.replace(annotation=inspect.Parameter.empty)) for p in own]
    assert shown == SIGNATURES[function]


@pytest.mark.parametrize(("layout", "batch_dim"), [("bshd", 0), ("sbhd", 1)])
@pytest.mark.parametrize("heads", [(8, 8), (7, 7), (6, 2)])
@pytest.mark.parametrize("flat", [False, True], ids=["heads", "flat"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_distributed_attention_equals_one_process(
    layout: str, batch_dim: int, heads: tuple[int, int], flat: bool, world_size: int
) -> None:
    """DeepSpeed #7384, #7868, #5177, #8291: odd lengths, odd heads, another model's heads."""

    class Local(nn.Module):
        def forward(self, q: Any, k: Any, v: Any, mask: Any, *, scale: float) -> torch.Tensor:
            output = sdpa_of(layout)(q, k, v, attn_mask=mask, scale=scale)
            return output.flatten(2) if flat else output

    whole = inputs(layout, heads)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    want = Local()(*whole, mask, scale=0.3)

    def step(group: dist.ProcessGroup) -> torch.Tensor:
        attention = compat.DistributedAttention(Local(), group, gather_idx=1 - batch_dim)
        local = [shard(t, SPLITS[world_size], group.rank(), layout) for t in whole]
        return attention(*local, batch_dim, None, mask, scale=0.3, split_sizes=SPLITS[world_size])

    close(torch.cat(simulate(world_size, step).results, dim=1 - batch_dim), want)


def test_flat_outputs_need_a_head_on_every_rank() -> None:
    def step(group: dist.ProcessGroup) -> None:
        layer = compat.DistributedAttention(lambda q, k, v: q.flatten(2), group)
        layer(*[torch.ones(2, 1, 2, 4)] * 3, 1)

    with pytest.raises(ValueError, match="2 heads are fewer than the ranks"):
        simulate(3, step)


class AttnType(enum.Enum):
    TORCH_MATH = "torch_math"


@pytest.mark.parametrize("attn_type", ["torch_math", AttnType.TORCH_MATH], ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (5, 1)])
def test_yunchang_s_layer_equals_one_process(attn_type: Any, heads: tuple[int, int]) -> None:
    whole = inputs("bshd", heads, length=8)
    want = sdpa_of("bshd")(*whole, is_causal=True, scale=0.3)
    default = sdpa_of("bshd")(*whole)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        attention = compat.UlyssesAttention(group, attn_type=attn_type)
        local = [t.chunk(4, dim=1)[group.rank()] for t in whole]
        return [attention(*local, 0.0, 0.3, True), attention(*local)]

    results = simulate(4, step).results
    close(torch.cat([causal for causal, _ in results], dim=1), want)
    close(torch.cat([plain for _, plain in results], dim=1), default)


def test_a_function_with_flash_attention_s_arguments_gets_its_slopes() -> None:
    slopes, seen = torch.arange(8.0), {}

    def attention(q: torch.Tensor, k: Any, v: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        seen[float(kwargs["alibi_slopes"][0])] = kwargs["alibi_slopes"].tolist()
        return q.clone(), None

    def step(group: dist.ProcessGroup) -> torch.Tensor:
        layer = compat.UlyssesAttention(group, attn_type=attention)
        tensors = [torch.ones(1, 2, 8, 4)] * 3
        return layer(*tensors, alibi_slopes=slopes, return_attn_probs=True)

    simulate(2, step)
    assert seen == {0.0: [0, 1, 2, 3], 4.0: [4, 5, 6, 7]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: compat.DistributedAttention(None, None, scatter_idx=1), "scatter_idx=1"),
        (lambda t: compat.UlyssesAttention(gather_idx=0), "gather_idx=0"),
        (lambda t: compat.UlyssesAttention(attn_type="sage"), "attn_type='sage': expected"),
        (lambda t: compat.DistributedAttention(None, None)(t, t, t, 2), "batch_dim_idx=2"),
        (lambda t: compat.DistributedAttention(None, None)(t, t, t, 0, (t, t)), "Rotate query"),
        (
            lambda t: compat.DistributedAttention(None, None, num_kv_heads=3)(t, t, t, 0),
            "num_kv_heads=3",
        ),
        (
            lambda t: compat.UlyssesAttention(attn_type="torch_math")(t, t, t, softcap=2.0),
            "softcap is given",
        ),
        (
            lambda t: compat.UlyssesAttention(attn_type="torch_math")(t, t, t, alibi_slopes=t),
            "alibi_slopes is given",
        ),
    ],
)
def test_refuses(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(1, 4, 2, 8))


def test_a_missing_kernel_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)
    with pytest.raises(ModuleNotFoundError, match="needs the package 'flash_attn'"):
        compat.UlyssesAttention()
