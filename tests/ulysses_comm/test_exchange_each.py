"""The output exchange of several tensors at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bits import assert_same_bits, random_bits
from tests.traffic import calls_of
from ulysses_comm import (
    LONE_RANK,
    HeadSplit,
    Workspace,
    scatter_seqlen_gather_heads,
    scatter_seqlen_gather_heads_each,
    simulate,
    start_scatter_seqlen_gather_heads_each,
)

SPLITS = (3, 0, 4)
UNEVEN = HeadSplit.of_counts([2, 1, 0])
SHAPES = {
    "one dtype": [(HeadSplit.of_counts([2, 2, 2]), 8, torch.bfloat16)] * 2,
    "output and log-sum-exp": [(UNEVEN, 8, torch.bfloat16), (UNEVEN, 1, torch.float32)],
    "another head_dim": [(UNEVEN, 8, torch.float32), (UNEVEN, 4, torch.float32)],
}


def whole_of(case: str) -> list[torch.Tensor]:
    return [
        random_bits((sum(SPLITS), split.num_heads, head_dim), dtype, seed=i)
        for i, (split, head_dim, dtype) in enumerate(SHAPES[case])
    ]


def heads_of(case: str, rank: int) -> list[torch.Tensor]:
    """What rank `rank` computed: all tokens of its heads, with awkward strides."""
    return [
        tensor[:, slice(*split.ranges[rank])].transpose(0, 1).contiguous().transpose(0, 1)
        for tensor, (split, _, _) in zip(whole_of(case), SHAPES[case], strict=True)
    ]


def splits_of(case: str) -> list[HeadSplit]:
    return [split for split, _, _ in SHAPES[case]]


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("start", [False, True], ids=["plain", "started"])
def test_every_tensor_comes_back_bit_for_bit_in_one_collective(case: str, start: bool) -> None:
    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        arguments = (heads_of(case, group.rank()), SPLITS, group)
        options = {"head_splits": splits_of(case), "keep_dtypes": True}
        if start:
            return start_scatter_seqlen_gather_heads_each(*arguments, **options).wait()
        return scatter_seqlen_gather_heads_each(*arguments, **options)

    simulation = simulate(3, step)
    assert len(calls_of(simulation)) == 1
    for rank, results in enumerate(simulation.results):
        for result, whole in zip(results, whole_of(case), strict=True):
            assert_same_bits(result, whole.split(SPLITS)[rank])


def test_tensors_side_by_side_in_one_buffer_are_sent_in_place() -> None:
    def step(group: dist.ProcessGroup) -> int:
        buffer = torch.zeros(sum(SPLITS), 5, 4)
        views = [buffer[:, :2], buffer[:, 2:]]
        scatter_seqlen_gather_heads_each(views, SPLITS, group)
        return buffer.data_ptr()

    simulation = simulate(3, step)
    (call,) = calls_of(simulation)
    assert call.send_addresses == simulation.results


def test_dtypes_promote_unless_they_are_kept() -> None:
    def step(group: dist.ProcessGroup) -> list[torch.dtype]:
        tensors = [torch.ones(7, 2, 4, dtype=d) for d in (torch.bfloat16, torch.float32)]
        return [r.dtype for r in scatter_seqlen_gather_heads_each(tensors, SPLITS, group)]

    assert simulate(3, step).results == [[torch.float32] * 2] * 3
    assert simulate(1, lambda g: step_alone(g)).results == [[torch.float32] * 2]


def step_alone(group: dist.ProcessGroup) -> list[torch.dtype]:
    tensors = [torch.ones(7, 2, 4, dtype=d) for d in (torch.bfloat16, torch.float32)]
    return [r.dtype for r in scatter_seqlen_gather_heads_each(tensors, [7], group)]


@pytest.mark.parametrize("case", SHAPES)
def test_results_are_written_to_out(case: str) -> None:
    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        own = SPLITS[group.rank()]
        out = [whole.new_empty(own, *whole.shape[1:]) for whole in whole_of(case)]
        results = scatter_seqlen_gather_heads_each(
            heads_of(case, group.rank()),
            SPLITS,
            group,
            head_splits=splits_of(case),
            keep_dtypes=True,
            workspace=Workspace(),
            out=out,
        )
        assert [r.data_ptr() for r in results] == [o.data_ptr() for o in out]
        return out

    for rank, results in enumerate(simulate(3, step).results):
        for result, whole in zip(results, whole_of(case), strict=True):
            assert_same_bits(result, whole.split(SPLITS)[rank])


def test_a_lone_rank_gets_its_tensors_back() -> None:
    tensors = [torch.ones(3, 2, 4), torch.ones(3, 2, 1, dtype=torch.float16)]
    results = scatter_seqlen_gather_heads_each(tensors, [3], LONE_RANK, keep_dtypes=True)
    assert [r.data_ptr() for r in results] == [t.data_ptr() for t in tensors]
    assert scatter_seqlen_gather_heads_each([], [3], LONE_RANK) == []


def test_each_tensor_gets_its_own_gradient() -> None:
    case = "output and log-sum-exp"

    def step(group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        tensors = [torch.ones_like(t).requires_grad_() for t in heads_of(case, group.rank())]
        out, lse = scatter_seqlen_gather_heads_each(
            tensors, SPLITS, group, head_splits=splits_of(case), keep_dtypes=True
        )
        ((1 + group.rank()) * (out.float().sum() + 10 * lse.sum())).backward()
        return [tensor.grad for tensor in tensors]

    scale = torch.tensor([1.0, 3.0]).repeat_interleave(torch.tensor([3, 4])).view(-1, 1, 1)
    for out_grad, lse_grad in simulate(3, step).results:
        assert out_grad is not None
        assert lse_grad is not None
        assert (out_grad.float().cpu() == scale).all()
        assert (lse_grad.cpu() == 10 * scale).all()


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ([torch.zeros(6, 1, 4)], {}, r"tensors\[0\] has 6 tokens.*add up to 7"),
        ([torch.zeros(7, 4)], {}, r"tensors\[0\] has shape \(7, 4\): expected 3"),
        ([torch.zeros(7, 1, 4), torch.zeros(7, 1, 2)], {}, "keep_dtypes=True"),
        ([torch.zeros(7, 1, 4)] * 2, {"head_splits": [UNEVEN]}, "1 entries for 2 tensors"),
        ([torch.zeros(7, 5, 4)], {"head_splits": [UNEVEN]}, r"5 heads: expected 2.*head_splits"),
        ([torch.zeros(7, 1, 4)], {"out": []}, "out has 0 tensors for 1"),
        ([torch.zeros(7, 1, 4)], {"out": [torch.zeros(3, 2, 4)]}, r"expected \(3, 3, 4\)"),
    ],
)
def test_refuses(tensors: list[torch.Tensor], options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(3, lambda g: scatter_seqlen_gather_heads_each(tensors, SPLITS, g, **options))


def test_the_plain_exchange_still_refuses_what_is_not_contiguous() -> None:
    tensor = torch.zeros(3, 7, 4).transpose(0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        simulate(3, lambda group: scatter_seqlen_gather_heads(tensor, SPLITS, group))


UNADDABLE = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


@pytest.mark.parametrize("dtype", [*UNADDABLE, torch.int8, torch.bool, torch.complex64], ids=str)
def test_shared_heads_are_summed_in_every_dtype(dtype: torch.dtype) -> None:
    """torch has no sum of float8 and wide unsigned integers: it failed once the data had moved."""
    shared = HeadSplit(2, ((0, 1), (0, 1), (1, 2)))

    def step(group: dist.ProcessGroup) -> torch.Tensor:
        mine = torch.full((7, shared.counts[group.rank()], 4), 1.0).to(dtype)
        return scatter_seqlen_gather_heads(mine, SPLITS, group, head_split=shared)

    expected = torch.tensor([2.0, 1.0])[:, None].expand(7, 2, 4).to(dtype)
    for rank, result in enumerate(simulate(3, step).results):
        assert_same_bits(result, expected.split(SPLITS)[rank])


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint64, torch.complex64, torch.bool], ids=str)
def test_strides_that_address_nothing_do_not_matter(dtype: torch.dtype) -> None:
    """Torch calls these tensors contiguous, and refuses to view them as the bytes that are sent."""
    whole = random_bits((7, 6), dtype, seed=0)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        empty = torch.empty((0, 3, 2), dtype=dtype).transpose(1, 2)
        heads = whole[None, :, 2 * group.rank() : 2 * group.rank() + 2].contiguous()
        one_channel = heads.permute(1, 2, 0)
        for tensor in (empty, one_channel):
            assert tensor.is_contiguous()
            assert tensor.stride(-1) != 1
        return [
            scatter_seqlen_gather_heads(empty, [0, 0, 0], group),
            scatter_seqlen_gather_heads(one_channel, SPLITS, group),
            *scatter_seqlen_gather_heads_each([one_channel], SPLITS, group),
        ]

    for rank, results in enumerate(simulate(3, step).results):
        assert results[0].shape == (0, 6, 3)
        for result in results[1:]:
            assert_same_bits(result, whole.split(SPLITS)[rank][:, :, None])
