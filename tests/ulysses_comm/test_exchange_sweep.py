"""A property-based sweep over world sizes 1 to 9, splits, head counts, dtypes and layouts.

Each case runs all ranks on the simulator and compares every rank's bits with the plain formulation.
CI runs a few thousand cases, always the same; `-m long` runs many more, others each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests import cases, reference
from tests.bits import assert_same_bits, random_bits
from tests.traffic import calls_of
from ulysses_comm import (
    as_send_buffer,
    pack_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
    simulate,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int64,
          torch.bool, torch.float8_e4m3fn, torch.complex64]  # fmt: skip
PROMOTABLE = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
LAYOUTS = ["dense", "transposed", "sliced", "separate shards", "rank-major shards"]
PACKS = ["packed", "packed, reordered", "packed for one rank more", "packed, one flattened"]

world_sizes = st.integers(1, 9)


def split_lists(world_size: int) -> st.SearchStrategy[list[int]]:
    """Small token counts; often a rank without tokens, sometimes one rank with all of them."""
    free = st.lists(st.integers(0, 6), min_size=world_size, max_size=world_size)
    lonely = st.tuples(st.integers(0, world_size - 1), st.integers(0, 9)).map(
        lambda at: [at[1] if rank == at[0] else 0 for rank in range(world_size)]
    )
    return st.one_of(free, free, lonely)


@dataclass(frozen=True)
class Case:
    """One exchange before attention: `layouts` says how each rank lays its inputs out."""

    splits: list[int]
    heads: cases.Heads
    head_dim: int
    layouts: list[str]
    seed: int

    @property
    def world_size(self) -> int:
        return len(self.splits)

    def inputs(self) -> list[list[torch.Tensor]]:
        return cases.inputs_of_all(self.splits, self.heads, self.head_dim, self.seed)


@st.composite
def head_scatters(draw: st.DrawFn, dtypes: str = "one or promotable") -> Case:
    world_size = draw(world_sizes)
    counts = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    if dtypes == "any":
        chosen = draw(st.lists(st.sampled_from(DTYPES), min_size=len(counts), max_size=len(counts)))
    elif draw(st.booleans()):
        chosen = [draw(st.sampled_from(DTYPES))] * len(counts)
    else:
        chosen = draw(
            st.lists(st.sampled_from(PROMOTABLE), min_size=len(counts), max_size=len(counts))
        )
    layouts = st.sampled_from([*LAYOUTS, *PACKS, *PACKS])
    return Case(
        splits=draw(split_lists(world_size)),
        heads=cases.Heads(counts, tuple(chosen)),
        head_dim=draw(st.sampled_from([1, 2, 3, 8])),
        layouts=draw(st.lists(layouts, min_size=world_size, max_size=world_size)),
        seed=draw(st.integers(0, 99)),
    )


def laid_out(tensors: list[torch.Tensor], layout: str, world_size: int) -> list[torch.Tensor]:
    """Return the same values in another memory layout."""
    if layout in PACKS:
        if len({tensor.dtype for tensor in tensors}) > 1:
            return tensors  # a pack would promote them
        if layout == "packed, reordered":
            return pack_head_shards(tensors[::-1], world_size)[::-1]
        if layout == "packed for one rank more":
            if any(tensor.shape[1] % (world_size + 1) for tensor in tensors):
                return pack_head_shards(tensors, 1)
            return pack_head_shards(tensors, world_size + 1)
        views = pack_head_shards(tensors, world_size)
        if layout == "packed, one flattened":
            views[-1] = views[-1].flatten(1, 2)
        return views
    return [one_laid_out(tensor, layout, world_size) for tensor in tensors]


def one_laid_out(tensor: torch.Tensor, layout: str, world_size: int) -> torch.Tensor:
    if layout == "transposed":
        return tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    if layout == "sliced":
        wide = tensor.new_zeros(tensor.shape[0] + 1, tensor.shape[1] + 2, tensor.shape[2])
        wide[1:, 1:-1] = tensor
        return wide[1:, 1:-1]
    if layout == "separate shards":
        return tensor.unflatten(1, (world_size, -1))
    if layout == "rank-major shards":
        shards = tensor.unflatten(1, (world_size, -1))
        return shards.transpose(0, 1).contiguous().transpose(0, 1)
    return tensor


def check_head_scatter(case: Case) -> None:
    inputs = case.inputs()
    passed = [
        laid_out(tensors, layout, case.world_size)
        for tensors, layout in zip(inputs, case.layouts, strict=True)
    ]
    in_place = [as_send_buffer(tensors, case.world_size) is not None for tensors in passed]
    note(f"sent in place on ranks {[rank for rank, yes in enumerate(in_place) if yes]}")

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        return scatter_heads_gather_seqlen(passed[group.rank()], case.splits, group)

    simulation = simulate(case.world_size, step)
    if case.world_size == 1:
        assert calls_of(simulation) == []
        for result, tensor in zip(simulation.results[0], inputs[0], strict=True):
            assert_same_bits(result, tensor)
        return
    (call,) = calls_of(simulation)
    for rank, results in enumerate(simulation.results):
        expected = reference.scatter_heads_results(inputs, rank)
        for result, want in zip(results, expected, strict=True):
            assert_same_bits(result, want, f"rank {rank}", strides=True)
        if in_place[rank]:
            assert call.copied_bytes[rank] == 0
            if case.splits[rank]:
                assert call.send_addresses[rank] == passed[rank][0].data_ptr()


def check_dtype_keeping(case: Case) -> None:
    inputs = case.inputs()
    passed = [
        laid_out(tensors, layout, case.world_size)
        for tensors, layout in zip(inputs, case.layouts, strict=True)
    ]

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        return scatter_heads_gather_seqlen(
            passed[group.rank()], case.splits, group, keep_dtypes=True
        )

    simulation = simulate(case.world_size, step)
    assert len(calls_of(simulation)) == (case.world_size > 1)
    for rank, results in enumerate(simulation.results):
        expected = reference.scatter_heads_one_by_one(inputs, rank)
        for result, want in zip(results, expected, strict=True):
            assert_same_bits(result, want, f"rank {rank}")


@dataclass(frozen=True)
class OutputCase:
    """One exchange after attention."""

    splits: list[int]
    heads: int
    head_dim: int
    dtype: torch.dtype
    seed: int


output_cases = world_sizes.flatmap(
    lambda world_size: st.builds(
        OutputCase,
        splits=split_lists(world_size),
        heads=st.integers(1, 4),
        head_dim=st.sampled_from([1, 2, 3, 8]),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 99),
    )
)


def check_output_exchange(case: OutputCase) -> None:
    outputs = cases.attention_outputs(case.splits, case.heads, case.dtype, case.head_dim, case.seed)

    def step(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        output = outputs[group.rank()]
        shards = scatter_seqlen_gather_head_shards(output, case.splits, group)
        return shards, scatter_seqlen_gather_heads(output, case.splits, group)

    for rank, (shards, flat) in enumerate(simulate(len(case.splits), step).results):
        expected = reference.scatter_seqlen_head_shards(outputs, case.splits, rank)
        assert_same_bits(shards, expected, f"shards of rank {rank}", strides=True)
        assert_same_bits(flat, expected.flatten(1, 2), f"flat of rank {rank}", strides=True)
        assert_same_bits(flat, reference.scatter_seqlen_heads(outputs, case.splits, rank))


def check_round_trips(case: OutputCase) -> None:
    """There and back is the identity from both ends, and the way back needs no copy."""
    world_size = len(case.splits)
    inputs = [
        random_bits((tokens, world_size * case.heads, case.head_dim), case.dtype, case.seed + rank)
        for rank, tokens in enumerate(case.splits)
    ]
    outputs = cases.attention_outputs(case.splits, case.heads, case.dtype, case.head_dim, case.seed)

    def step(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        rank = group.rank()
        (received,) = scatter_heads_gather_seqlen([inputs[rank]], case.splits, group)
        home = scatter_seqlen_gather_heads(received, case.splits, group)
        shards = scatter_seqlen_gather_head_shards(outputs[rank], case.splits, group)
        (whole,) = scatter_heads_gather_seqlen([shards], case.splits, group)
        return home, whole

    simulation = simulate(world_size, step)
    for rank, (home, whole) in enumerate(simulation.results):
        assert_same_bits(home, inputs[rank], f"heads of rank {rank}")
        assert_same_bits(whole, outputs[rank], f"tokens of rank {rank}")
    if world_size > 1:
        # What the output exchange received lies in send order: it goes back as it is.
        assert calls_of(simulation)[3].copied_bytes == [0] * world_size


def sweep(
    check: Callable[[Any], None], drawn: st.SearchStrategy[Any], max_examples: int
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the sweep of a property for CI and the long one."""

    @settings(max_examples=max_examples)
    @given(case=drawn)
    def in_ci(case: Any) -> None:
        check(case)

    @pytest.mark.long
    @settings(max_examples=40 * max_examples, derandomize=False)
    @given(case=drawn)
    def for_long(case: Any) -> None:
        check(case)

    return in_ci, for_long


test_head_scatter_matches_the_reference, test_head_scatter_matches_the_reference_long = sweep(
    check_head_scatter, head_scatters(), 1500
)
test_output_exchange_matches_the_reference, test_output_exchange_matches_the_reference_long = sweep(
    check_output_exchange, output_cases, 800
)
test_round_trips_are_the_identity, test_round_trips_are_the_identity_long = sweep(
    check_round_trips, output_cases, 800
)
test_dtype_keeping_matches_the_reference, test_dtype_keeping_matches_the_reference_long = sweep(
    check_dtype_keeping, head_scatters(dtypes="any"), 800
)
