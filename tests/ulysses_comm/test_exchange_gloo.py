"""The same cases over real gloo processes: bits, splits, addresses, copies.

Starting processes costs seconds, so each world checks everything in one go. Every rank can make
every rank's inputs, hence checks its own results against the plain formulation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import bits, cases, reference
from tests.bits import SPECIAL_PATTERNS, assert_same_bits
from tests.cases import BF16, FP16, FP32, HEAD_DIM
from tests.ranks import run_ranks
from tests.spy import OperatorLog
from ulysses_comm import (
    pack_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
)

pytestmark = pytest.mark.gloo

WORLDS = [2, 4]


class Sends:
    """What this rank hands to the collective, read off the operators that torch dispatches."""

    def __init__(self) -> None:
        self.log = OperatorLog()

    def assert_one(self, address: int | None = None, *, moves_nothing: bool = False) -> None:
        """One collective, of the buffer at that address, with nothing copied beside it."""
        assert len(self.addresses) == 1, self.log.names()
        if address is not None:
            assert self.addresses == [address]
        if moves_nothing:
            assert self.log.moved() == []

    def __enter__(self) -> Sends:
        self.log.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.log.__exit__(*error)

    @property
    def addresses(self) -> list[int]:
        return [
            args[1].data_ptr()
            for name, args, _ in self.log.calls
            if "alltoall" in name or ("all_to_all" in name and name.startswith("c10d"))
        ]


def check_head_scatters(group: dist.ProcessGroup, *, by_collective: bool = True) -> int:
    """Bits; and, where a collective of torch's carries them, which buffer it is given."""
    rank, world_size = group.rank(), group.size()
    count = 0
    for splits in cases.SPLITS[world_size]:
        for heads in cases.HEADS:
            inputs = cases.inputs_of_all(splits, heads)
            expected = reference.scatter_heads_results(inputs, rank)
            with Sends() as sends:
                results = scatter_heads_gather_seqlen(inputs[rank], splits, group)
            if by_collective:
                sends.assert_one()
            for index, (result, want) in enumerate(zip(results, expected, strict=True)):
                what = f"{splits}, {heads}, input {index}, rank {rank}"
                assert_same_bits(result, want, what, strides=True)

            views = pack_head_shards(inputs[rank], world_size)
            with Sends() as sends:
                results = scatter_heads_gather_seqlen(views, splits, group)
            if by_collective:
                own = views[0].data_ptr() if splits[rank] else None
                sends.assert_one(own, moves_nothing=True)
            for result, want in zip(results, expected, strict=True):
                assert_same_bits(result, want, f"packed, {splits}, {heads}", strides=True)

            results = scatter_heads_gather_seqlen(inputs[rank], splits, group, keep_dtypes=True)
            one_by_one = reference.scatter_heads_one_by_one(inputs, rank)
            for result, want in zip(results, one_by_one, strict=True):
                assert_same_bits(result, want, f"kept dtypes, {splits}, {heads}")
            count += 3
    return count


def check_output_exchanges(group: dist.ProcessGroup, *, by_collective: bool = True) -> None:
    rank, world_size = group.rank(), group.size()
    for splits in cases.SPLITS[world_size]:
        for num_heads, dtype in ((3, BF16), (6, BF16), (1, FP32), (2, FP16)):
            outputs = cases.attention_outputs(splits, num_heads, dtype)
            with Sends() as sends:
                shards = scatter_seqlen_gather_head_shards(outputs[rank], splits, group)
            if by_collective:
                own = outputs[rank].data_ptr() if sum(splits) else None
                sends.assert_one(own, moves_nothing=True)
            expected = reference.scatter_seqlen_head_shards(outputs, splits, rank)
            assert_same_bits(shards, expected, f"{splits}, rank {rank}", strides=True)
            flat = scatter_seqlen_gather_heads(outputs[rank], splits, group)
            assert_same_bits(flat, expected.flatten(1, 2), f"{splits}, rank {rank}", strides=True)


def check_layouts(group: dist.ProcessGroup) -> None:
    """Ranks may lay their inputs out differently: the bytes on the wire are the same."""
    rank, world_size = group.rank(), group.size()
    splits = cases.SPLITS[world_size][0]
    for heads in cases.PACKED_HEADS:
        inputs = cases.inputs_of_all(splits, heads)
        own = inputs[rank]
        layouts = [
            own,
            pack_head_shards(own, world_size),
            [t.transpose(0, 1).contiguous().transpose(0, 1) for t in own],
            [t.unflatten(1, (world_size, -1)) for t in own],
            pack_head_shards(own[::-1], world_size)[::-1],
            pack_head_shards(own, 1),
        ]
        for shift in range(len(layouts)):
            passed = layouts[(rank + shift) % len(layouts)]
            results = scatter_heads_gather_seqlen(passed, splits, group)
            for result, want in zip(
                results, reference.scatter_heads_results(inputs, rank), strict=True
            ):
                assert_same_bits(result, want, f"{heads}, shift {shift}, rank {rank}")


def check_special_values(group: dist.ProcessGroup) -> None:
    """Every dtype there is, float8 included, which gloo itself refuses."""
    rank, world_size = group.rank(), group.size()
    splits = (2, 3, 0, 1)[:world_size]
    for dtype in [*SPECIAL_PATTERNS, torch.int8, torch.int16, torch.bool, torch.complex64]:
        inputs = cases.inputs_of_all(splits, cases.of_one_dtype((2, 1), dtype))
        received = scatter_heads_gather_seqlen(inputs[rank], splits, group)
        expected = reference.scatter_heads_results(inputs, rank)
        for result, want, tensor in zip(received, expected, inputs[rank], strict=True):
            assert_same_bits(result, want, f"{dtype}, rank {rank}")
            back = scatter_seqlen_gather_heads(result.contiguous(), splits, group)
            assert_same_bits(back, tensor, f"{dtype} and back, rank {rank}")


def check_zero_tokens(group: dist.ProcessGroup) -> None:
    """Nobody's first, middle or last rank, nor all of them, may hang or leak unwritten memory."""
    rank, world_size = group.rank(), group.size()
    for empty in [*({r} for r in range(world_size)), set(range(world_size))]:
        splits = tuple(0 if r in empty else 2 for r in range(world_size))
        shape = (splits[rank], world_size, HEAD_DIM)
        ones = torch.ones(shape, dtype=BF16, device=bits.TEST_DEVICE)
        received = scatter_heads_gather_seqlen([ones, ones], splits, group)
        for result in received:
            assert result.shape == (sum(splits), 1, HEAD_DIM)
            assert (result == 1).all()
        flat = scatter_seqlen_gather_heads(received[0].contiguous(), splits, group)
        assert_same_bits(flat, ones)


def check_everything(group: dist.ProcessGroup) -> int:
    assert torch.empty(2).isnan().all(), "unwritten memory must show"
    count = check_head_scatters(group)
    check_output_exchanges(group)
    check_layouts(group)
    check_special_values(group)
    check_zero_tokens(group)
    return count


@pytest.mark.parametrize("world_size", WORLDS)
def test_exchanges_match_the_reference_on_real_processes(world_size: int) -> None:
    counts = run_ranks(check_everything, world_size)
    assert counts == [3 * len(cases.SPLITS[world_size]) * len(cases.HEADS)] * world_size
