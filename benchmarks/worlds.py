"""Whole exchanges, every rank of them, on the in-process simulator."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import Candidate, Row
from benchmarks.packs import Layout
from ulysses_comm import (
    pack_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
)
from ulysses_comm.simulate import simulate

FLOOR = "one plain copy of what all ranks send: the simulator's wire is this machine's memory"


def qkv_exchange_row(layout: Layout, device: torch.device, rounds: int) -> Row:
    """Time the exchange before attention: in place against a pack against the plain formulation."""
    world_size, splits = layout.world_size, [layout.tokens] * layout.world_size
    inputs = [[shards.flatten(1, 2) for shards in layout.inputs(device)] for _ in range(world_size)]
    packed = [pack_head_shards(tensors, world_size) for tensors in inputs]
    expected = [
        torch.cat([_plain_send_buffer(tensors, world_size)[rank] for tensors in inputs])
        for rank in range(world_size)
    ]

    def ours_of(rank_inputs: list[list[torch.Tensor]]) -> Callable[[], list[torch.Tensor]]:
        def step(group: dist.ProcessGroup) -> torch.Tensor:
            results = scatter_heads_gather_seqlen(rank_inputs[group.rank()], splits, group)
            # The results are views of one receive buffer; the check reads it whole.
            return results[0].as_strided(expected[0].shape, expected[0].stride())

        return lambda: simulate(world_size, step).results

    def plain_step(group: dist.ProcessGroup) -> torch.Tensor:
        send = _plain_send_buffer(inputs[group.rank()], world_size).flatten(0, 1)
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=group)
        return received

    check = _expect_each(expected)
    return harness.run_case(
        "exchange",
        f"q, k, v in place, all {world_size} ranks, {layout.name}",
        device=device,
        dtype=layout.dtype_name,
        shape=layout.shape,
        nbytes=world_size * layout.nbytes,
        ours=Candidate("ours", ours_of(packed), check),
        baselines=[
            Candidate(
                "permute and concatenate", lambda: simulate(world_size, plain_step).results, check
            ),
            Candidate("one copy per input", ours_of(inputs), check),
        ],
        floor=_copy_of_all(expected),
        floor_is=FLOOR,
        checked="every rank's receive buffer equals permute and concatenate, bit by bit",
        rounds=rounds,
    )


def output_exchange_row(layout: Layout, device: torch.device, rounds: int) -> Row:
    """Time the exchange after attention: its head-shard view against the flat form."""
    world_size, splits = layout.world_size, [layout.tokens] * layout.world_size
    heads = layout.heads[0]
    shape = (world_size * layout.tokens, heads, layout.head_dim)
    outputs = [torch.randn(shape, device=device).to(layout.dtype) for _ in range(world_size)]
    expected = [
        torch.cat([output.split(splits)[rank] for output in outputs], dim=1)
        for rank in range(world_size)
    ]

    def view_step(group: dist.ProcessGroup) -> torch.Tensor:
        return scatter_seqlen_gather_head_shards(outputs[group.rank()], splits, group)

    def flat_step(group: dist.ProcessGroup) -> torch.Tensor:
        return scatter_seqlen_gather_heads(outputs[group.rank()], splits, group)

    shards = [flat.unflatten(1, (world_size, heads)) for flat in expected]
    return harness.run_case(
        "exchange",
        f"output as a view, all {world_size} ranks, {layout.tokens} tokens, {heads} heads",
        device=device,
        dtype=str(layout.dtype).removeprefix("torch."),
        shape=[layout.tokens, world_size, heads, layout.head_dim],
        nbytes=2 * sum(output.nbytes for output in outputs),
        ours=Candidate(
            "ours", lambda: simulate(world_size, view_step).results, _expect_each(shards)
        ),
        baselines=[
            Candidate(
                "flat", lambda: simulate(world_size, flat_step).results, _expect_each(expected)
            )
        ],
        floor=_copy_of_all(outputs),
        floor_is=FLOOR,
        checked="every rank's result equals the concatenated token ranges, bit by bit",
        rounds=rounds,
    )


def _plain_send_buffer(tensors: list[torch.Tensor], world_size: int) -> torch.Tensor:
    shards = [tensor.unflatten(1, (world_size, -1)) for tensor in tensors]
    return torch.cat([shard.permute(1, 0, 2, 3).contiguous() for shard in shards], dim=2)


def _expect_each(expected: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], None]:
    def check(results: list[torch.Tensor]) -> None:
        assert len(results) == len(expected)
        for result, wanted in zip(results, expected, strict=True):
            harness.expect_bits(wanted)(result)

    return check


def _copy_of_all(tensors: list[torch.Tensor]) -> Candidate:
    source = torch.stack(tensors)
    target = torch.empty_like(source)
    return Candidate("plain copy", lambda: target.copy_(source), harness.expect_bits(source))
