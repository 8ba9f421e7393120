"""UlyssesAttention on real processes: eager, started ahead, compiled, killed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bits import assert_same_bits
from tests.ranks import run_ranks
from tests.ulysses_comm.attention_cases import (
    attention_with_lse,
    close,
    inputs,
    sdpa_of,
    shard,
    token_axis,
)
from ulysses_comm import RankDisagreementError, UlyssesAttention, Workspace

pytestmark = pytest.mark.gloo

CASES = [
    (layout, heads, chunks, splits)
    for layout in ("shd", "bshd", "bhsd")
    for heads in ((8, 8), (7, 7), (8, 2), (2, 1))
    for chunks in (1, 3)
    for splits in ((3, 2, 0, 4), (0, 0, 9, 0))
]


def attend_everything(group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
    """Every case once, outputs and gradients; a workspace throughout."""
    results = []
    workspace = Workspace()
    for layout, heads, chunks, splits in CASES:
        layer = UlyssesAttention(
            sdpa_of(layout), group=group, layout=layout, chunks=chunks, workspace=workspace
        )
        leaves = [
            shard(t, splits, group.rank(), layout).clone().requires_grad_()
            for t in inputs(layout, heads)
        ]
        output = layer(*leaves, split_sizes=splits)
        output.square().sum().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    return results


def test_outputs_and_gradients_equal_one_process() -> None:
    """verl #1226, prime-rl #3042: 8 query and 2 key heads on 4 ranks, forward and backward."""
    by_rank = run_ranks(attend_everything, 4)
    for index, (layout, heads, _, _) in enumerate(CASES):
        leaves = [tensor.requires_grad_() for tensor in inputs(layout, heads)]
        output = sdpa_of(layout)(*leaves)
        output.square().sum().backward()
        expected = [output, *(leaf.grad for leaf in leaves)]
        for place, want in enumerate(expected):
            joined = torch.cat([rank[index][place] for rank in by_rank], dim=token_axis(layout))
            close(joined, want)


def lse_and_joint(group: dist.ProcessGroup) -> list[torch.Tensor]:
    splits = (4, 5)
    layer = UlyssesAttention(attention_with_lse, group=group, layout="bshd", lse_layout="bhs")
    bf16 = torch.bfloat16
    whole = inputs("bshd", (6, 2), dtype=bf16)
    joint = inputs("bshd", (6, 2), length=3, seed=1, dtype=bf16)
    local = [t.split(splits, dim=1)[group.rank()] for t in whole]
    own, extra = layer.joint(*local, *joint, split_sizes=splits)
    return [*own, *extra]


def test_log_sum_exp_and_joint_tokens() -> None:
    bf16 = torch.bfloat16
    whole = inputs("bshd", (6, 2), dtype=bf16)
    joint = inputs("bshd", (6, 2), length=3, seed=1, dtype=bf16)
    pairs = zip(whole, joint, strict=True)
    output, lse = attention_with_lse(*(torch.cat([j, w], dim=1) for w, j in pairs))
    by_rank = run_ranks(lse_and_joint, 2)
    torch.testing.assert_close(torch.cat([r[0] for r in by_rank], dim=1), output[:, 3:])
    torch.testing.assert_close(torch.cat([r[1] for r in by_rank], dim=2), lse[:, :, 3:])
    for _, _, joint_output, joint_lse in by_rank:
        torch.testing.assert_close(joint_output, output[:, :3])
        torch.testing.assert_close(joint_lse, lse[:, :, :3])


def compiled_layer(group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
    """One compiled function for all lengths; returns compiled and eager results."""
    layer = UlyssesAttention(sdpa_of("bshd"), group=group, layout="bshd")

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, splits: list[int]
    ) -> torch.Tensor:
        return layer(q, k, v, split_sizes=splits) * 2

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    results = []
    for function in (compiled, attend):
        for splits in ((5, 4), (2, 7)):
            whole = inputs("bshd", (5, 1), length=sum(splits))
            leaves = [t.split(splits, dim=1)[group.rank()].clone().requires_grad_() for t in whole]
            output = function(*leaves, list(splits))
            output.square().sum().backward()
            results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    return results


def test_a_compiled_layer_is_one_graph_and_equals_the_eager_one() -> None:
    for results in run_ranks(compiled_layer, 2, timeout=300):
        for traced, eager in zip(results[:2], results[2:], strict=True):
            for one, other in zip(traced, eager, strict=True):
                assert other.abs().max() > 0
                close(one, other)


def disagree(group: dist.ProcessGroup) -> str:
    heads = 4 if group.rank() else 2
    tensors = [torch.zeros(3, heads, 4)] * 3
    layer = UlyssesAttention(sdpa_of("shd"), group=group, validate=True)
    with pytest.raises(RankDisagreementError) as caught:
        layer(*tensors)
    return str(caught.value)


def test_ranks_that_disagree_get_one_error_and_no_abort() -> None:
    (text,) = set(run_ranks(disagree, 2))
    assert "heads per rank" in text


def same_bits_in_chunks(group: dist.ProcessGroup) -> None:
    whole = inputs("bshd", (8, 8), dtype=torch.float32, length=64)
    local = [t.chunk(2, dim=1)[group.rank()] for t in whole]
    plain = UlyssesAttention(sdpa_of("bshd"), group=group, layout="bshd")(*local)
    for chunks in (2, 4):
        layer = UlyssesAttention(sdpa_of("bshd"), group=group, layout="bshd", chunks=chunks)
        assert_same_bits(layer(*local), plain)


def test_chunks_do_not_change_a_bit() -> None:
    run_ranks(same_bits_in_chunks, 2)
