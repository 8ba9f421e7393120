"""What is checked on MPI ranks: `mpirun -n N python -m tests.ulysses_comm.mpi_checks FOLDER`.

Starting ranks costs seconds, so one start runs every check. Each is a function of the default
group; every rank can make every rank's inputs, hence judges its own results. A rank writes what
became of each check to a file of the folder it is given.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from mpi4py import MPI
from torch.distributed.device_mesh import init_device_mesh

from tests import cases, faults, reference
from tests.bits import assert_same_bits, random_bits
from tests.ranks import fill_empty_with_nan
from tests.ulysses_comm import mpi_collectives
from tests.ulysses_comm.mpi_collectives import (
    DTYPES,
    check_gathers_and_broadcasts,
    check_reductions,
)
from tests.ulysses_comm.test_exchange_faults_gloo import every_fault_in_turn
from ulysses_comm import (
    LONE_RANK,
    pack_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
)
from ulysses_comm.bootstrap import init_distributed
from ulysses_comm.collective import all_to_all_rows
from ulysses_comm.mpi import MPIOptions, buffers, reductions

BF16 = torch.bfloat16


class SpyCommunicator:
    """Passes every call on to a communicator, and notes the messages of Ialltoallv."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.addresses: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def Ialltoallv(self, sent: Any, received: Any) -> Any:  # noqa: N802
        self.addresses.append((sent[0].address, received[0].address))
        return self._communicator.Ialltoallv(sent, received)


@contextmanager
def spied(group: Any) -> Any:
    real = group._communicator
    group._communicator = spy = SpyCommunicator(real)
    try:
        yield spy
    finally:
        group._communicator = real


def row_counts(world_size: int, source: int) -> list[int]:
    """Rows that `source` sends to each rank: uneven, and none to some."""
    return [(3 * source + 2 * target) % 5 for target in range(world_size)]


def check_rank_numbers(group: Any) -> None:
    assert dist.get_rank() == group.rank() == MPI.COMM_WORLD.rank
    assert dist.get_world_size() == group.size() == MPI.COMM_WORLD.size
    assert dist.get_backend() == "ulysses_mpi"
    assert group.name() == "ulysses_mpi"
    assert "MASTER_ADDR" not in os.environ, "bootstrap wrote to the environment"


def check_all_to_all_single_moves_every_dtype(group: Any) -> None:
    rank, size = group.rank(), group.size()
    for dtype in DTYPES:
        for tail in ((), (3,), (2, 5), (0,)):
            sends = [random_bits((sum(row_counts(size, r)), *tail), dtype, r) for r in range(size)]
            receives = [row_counts(size, source)[rank] for source in range(size)]
            expected = torch.cat([sends[r].split(row_counts(size, r))[rank] for r in range(size)])
            for async_op in (False, True):
                output = torch.empty_like(expected)
                work = dist.all_to_all_single(
                    output, sends[rank], receives, row_counts(size, rank), group, async_op
                )
                if async_op:
                    assert work.wait()
                    assert work.is_completed()
                assert_same_bits(output, expected, f"{dtype}, rows of {tail}")
            untouched = random_bits((sum(row_counts(size, rank)), *tail), dtype, rank)
            assert_same_bits(sends[rank], untouched, f"what was sent, {dtype}")


def check_even_splits_and_the_same_buffer(group: Any) -> None:
    rank, size = group.rank(), group.size()
    whole = torch.arange(size * size * 6.0).view(size, size * 2, 3)
    expected = torch.cat([rows.chunk(size)[rank] for rows in whole])
    output = torch.empty_like(whole[rank])
    dist.all_to_all_single(output, whole[rank])
    assert_same_bits(output, expected)
    buffer = whole[rank].clone()
    dist.all_to_all_single(buffer, buffer)
    assert_same_bits(buffer, expected)


def check_exchanges_equal_the_reference(group: Any) -> None:
    rank, size = group.rank(), group.size()
    for splits in cases.SPLITS[size]:
        for heads in cases.HEADS:
            inputs = cases.inputs_of_all(splits, heads)
            expected = reference.scatter_heads_results(inputs, rank)
            results = scatter_heads_gather_seqlen(inputs[rank], splits, group)
            for result, want in zip(results, expected, strict=True):
                assert_same_bits(result, want, f"{splits}, {heads}", strides=True)
            views = pack_head_shards(inputs[rank], size)
            with spied(group) as spy:
                results = scatter_heads_gather_seqlen(views, splits, group)
            ((sent_from, received_at),) = spy.addresses
            assert sent_from == (views[0].data_ptr() if views[0].numel() else sent_from)
            assert received_at == results[0].untyped_storage().data_ptr()
            for result, want in zip(results, expected, strict=True):
                assert_same_bits(result, want, f"packed, {splits}, {heads}", strides=True)
            results = scatter_heads_gather_seqlen(inputs[rank], splits, group, keep_dtypes=True)
            for result, want in zip(
                results, reference.scatter_heads_one_by_one(inputs, rank), strict=True
            ):
                assert_same_bits(result, want, f"kept dtypes, {splits}, {heads}")


def check_output_exchanges_equal_the_reference(group: Any) -> None:
    rank = group.rank()
    for splits in cases.SPLITS[group.size()]:
        for num_heads, dtype in ((3, BF16), (1, torch.float32), (2, torch.float16)):
            outputs = cases.attention_outputs(splits, num_heads, dtype)
            with spied(group) as spy:
                shards = scatter_seqlen_gather_head_shards(outputs[rank], splits, group)
            ((sent_from, received_at),) = spy.addresses
            assert sent_from == outputs[rank].data_ptr()
            assert received_at == shards.untyped_storage().data_ptr()
            expected = reference.scatter_seqlen_head_shards(outputs, splits, rank)
            assert_same_bits(shards, expected, f"{splits}", strides=True)
            flat = scatter_seqlen_gather_heads(outputs[rank], splits, group)
            assert_same_bits(flat, expected.flatten(1, 2), f"{splits}")


def check_counts_past_the_limit(group: Any) -> None:
    """With small limits every path for large messages runs on small ones."""
    before = buffers.COUNT_LIMIT, buffers._BLOCK, reductions.ELEMENTS_AT_ONCE
    buffers.COUNT_LIMIT, buffers._BLOCK, reductions.ELEMENTS_AT_ONCE = 10, 5, 4
    try:
        rank, size = group.rank(), group.size()
        for unit, row in ((5, (7,)), (3, ())):  # 5 or 3 rows become one unit
            counts = [[unit * rows for rows in row_counts(size, r)] for r in range(size)]
            sends = [random_bits((sum(counts[r]), *row), BF16, r) for r in range(size)]
            expected = torch.cat([sends[r].split(counts[r])[rank] for r in range(size)])
            output = torch.empty_like(expected)
            dist.all_to_all_single(
                output, sends[rank], [counts[r][rank] for r in range(size)], counts[rank]
            )
            assert_same_bits(output, expected, f"{unit} rows of {row}")
        check_reductions(group)
        check_gathers_and_broadcasts(group)
    finally:
        buffers.COUNT_LIMIT, buffers._BLOCK, reductions.ELEMENTS_AT_ONCE = before


def check_counts_are_planned(group: Any) -> None:
    plan = buffers.count_rows
    assert plan(6, [1, 0], [2, 3]) == (6, [1, 0], [2, 3])
    assert plan(0, [1, 0], [2, 3]) == (1, [0, 0], [0, 0])
    large = 3 * 2**30
    assert plan(2, [large, 0], [6, 9]) == (6, [2**30, 0], [2, 3])
    assert plan(1, [2**31 - 1], [0]) == (1, [2**31 - 1], [0])
    assert plan(1, [2**31], [0]) == (2**31, [1], [0])
    with mock.patch.object(buffers.MPI, "VERSION", 4):
        assert plan(1, [large, 1], [0, 0]) == (1, [large, 1], [0, 0])
    refused = pytest.raises(ValueError, match=f"{large + 1} rows of 1 bytes.*MPI of version 4")
    with mock.patch.object(buffers.MPI, "VERSION", 3), refused:
        plan(1, [large, 1], [0, 0])
    large_type = buffers.byte_type(5 * 2**30 + 7)
    assert large_type.Get_size() == large_type.Get_extent()[1] == 5 * 2**30 + 7
    large_type.Free()


def check_async_work_keeps_its_buffers(group: Any) -> None:
    """The sender forgets its tensor at once, and memory of that size is written over."""
    rank, size = group.rank(), group.size()
    count = 1 << 18
    for _ in range(3):
        outputs, handles = [], []
        for index in range(4):
            send = torch.full((size * count,), rank * 10.0 + index)
            output = torch.empty(size * count)
            handles.append(dist.all_to_all_single(output, send, async_op=True))
            outputs.append(output)
            del send
            gc.collect()
            torch.full((size * count,), float("nan"))
        for index in reversed(range(4)):  # waited for in another order than started
            handles[index].wait()
            for source, chunk in enumerate(outputs[index].chunk(size)):
                assert bool((chunk == source * 10.0 + index).all())
    # Nobody waits for it at all: the group does, before it starts something else.
    dist.all_reduce(torch.ones(4, dtype=BF16), async_op=True)
    gc.collect()
    dist.barrier()
    for forgotten in list(group._channel._pending.values()):
        while not forgotten.poll():
            pass
    assert not group._channel._pending, "operations that have completed are kept"


def check_async_reduction_and_future(group: Any) -> None:
    tensor = torch.ones(3, dtype=BF16)
    work = dist.all_reduce(tensor, async_op=True)
    (result,) = work.get_future().wait()
    assert result is tensor
    assert tensor.tolist() == [group.size()] * 3
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0] is tensor


def check_gradients(group: Any) -> None:
    """The exchanges send gradients back, and the traced ones find the group by name."""
    rank, size = group.rank(), group.size()
    splits = cases.SPLITS[size][2]
    weights = torch.arange(float(sum(splits) * size * 2 * 4)).view(sum(splits), size * 2, 4)
    full = torch.sin(weights).requires_grad_()
    local = full.detach().split(splits)[rank].clone().requires_grad_()
    (full * full * weights).sum().backward()

    def attention(tensor: torch.Tensor) -> torch.Tensor:
        (gathered,) = scatter_heads_gather_seqlen([tensor], splits, group)
        scaled = gathered * gathered * weights[:, rank * 2 : rank * 2 + 2]
        return scatter_seqlen_gather_heads(scaled.contiguous(), splits, group)

    attention(local).sum().backward()
    assert full.grad is not None
    assert torch.allclose(local.grad, full.grad.split(splits)[rank], rtol=1e-6)

    traced = local.detach().clone().requires_grad_()
    torch.compile(attention, backend="aot_eager", fullgraph=True)(traced).sum().backward()
    assert_same_bits(traced.grad, local.grad, "compiled")


def check_compiled_all_to_all(group: Any) -> None:
    """The all-to-all for compilers, traced whole, forward and backward, against eager."""
    rank, size = group.rank(), group.size()
    sends, receives = row_counts(size, rank), [row_counts(size, r)[rank] for r in range(size)]

    def step(rows: torch.Tensor) -> torch.Tensor:
        return all_to_all_rows(rows * 2, receives, sends, group).square()

    eager = random_bits((sum(sends), 3), torch.int32, rank).div(2.0**31).requires_grad_()
    traced = eager.detach().clone().requires_grad_()
    expected = step(eager)
    expected.sum().backward()
    actual = torch.compile(step, backend="aot_eager", fullgraph=True)(traced)
    actual.sum().backward()
    assert_same_bits(actual, expected)
    assert eager.grad is not None
    assert bool(eager.grad.any())
    assert_same_bits(traced.grad, eager.grad)


def check_functional_collectives(group: Any) -> None:
    rank, size = group.rank(), group.size()
    send = torch.full((size * 2, 3), float(rank), requires_grad=True)
    received = functional.all_to_all_single_autograd(send, None, None, group)
    received = received.wait() if hasattr(received, "wait") else received
    assert_same_bits(received, torch.arange(size).repeat_interleave(2)[:, None].expand(-1, 3) * 1.0)
    (received * (rank + 1)).sum().backward()
    factors = torch.arange(1.0, size + 1).repeat_interleave(2)[:, None].expand(-1, 3)
    assert_same_bits(send.grad, factors.contiguous())
    total = functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", group))
    assert total.tolist() == [size] * 3
    part = functional.reduce_scatter_tensor(torch.ones(size, 2), "sum", 0, group)
    assert functional.wait_tensor(part).tolist() == [[size, size]]
    whole = functional.all_gather_tensor(torch.tensor([float(rank)]), 0, group)
    assert functional.wait_tensor(whole).tolist() == list(range(size))
    root = functional.wait_tensor(functional.broadcast(torch.tensor([float(rank)]), 1, group))
    assert root.tolist() == [1.0]


def check_sub_groups(group: Any) -> None:
    rank, size = group.rank(), group.size()
    pairs = [[first, first + 1] for first in range(0, size, 2)]
    own: Any = None
    for ranks in pairs:
        made = dist.new_group(ranks)
        if rank in ranks:
            own = made
    backwards = dist.new_group(list(reversed(range(size))))
    assert (own.rank(), own.size()) == (rank % 2, 2)
    for first in (own, backwards), (backwards, own):  # two groups under way at once
        tensors = [torch.full((3,), float(rank)) for _ in first]
        handles = [
            dist.all_reduce(tensor, group=made, async_op=True)
            for made, tensor in zip(first, tensors, strict=True)
        ]
        for handle in reversed(handles):
            handle.wait()
        sums = {own: float(2 * (rank // 2 * 2) + 1), backwards: float(sum(range(size)))}
        for made, tensor in zip(first, tensors, strict=True):
            assert tensor.tolist() == [sums[made]] * 3
    splits = [5, 2]
    inputs = cases.inputs_of_all(splits, cases.HEADS[0])
    results = scatter_heads_gather_seqlen(inputs[own.rank()], splits, own, validate=True)
    for result, want in zip(
        results, reference.scatter_heads_results(inputs, own.rank()), strict=True
    ):
        assert_same_bits(result, want)
    lone = scatter_heads_gather_seqlen(inputs[0], [5], LONE_RANK)
    assert all(result is given for result, given in zip(lone, inputs[0], strict=True))
    dist.destroy_process_group(own)
    dist.destroy_process_group(backwards)


def check_device_mesh(group: Any) -> None:
    rank, size = group.rank(), group.size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "ulysses"))
    splits = [0, 4]
    outputs = cases.attention_outputs(splits, 3, BF16)
    place = mesh["ulysses"].get_local_rank()
    shards = scatter_seqlen_gather_head_shards(outputs[place], splits, mesh["ulysses"])
    assert_same_bits(shards, reference.scatter_seqlen_head_shards(outputs, splits, place))
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mesh["data"].get_group())
    assert float(tensor) == sum(range(rank % 2, size, 2))


def check_data_parallel_wrappers(group: Any) -> None:
    """DDP and FSDP2 train one step as one rank does with the mean of all losses."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rank, size = group.rank(), group.size()
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 5))
    batches = torch.randn(size, 3, 6)
    copies = copy.deepcopy(plain), copy.deepcopy(plain)
    sum(plain(batch).square().sum() for batch in batches).div(size).backward()
    wanted = [parameter.grad for parameter in plain.parameters()]

    ddp = DistributedDataParallel(copies[0])
    ddp(batches[rank]).square().sum().backward()
    for parameter, want in zip(ddp.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad, want, rtol=1e-4, atol=1e-6)

    sharded = fully_shard(copies[1], mesh=init_device_mesh("cpu", (size,)))
    sharded(batches[rank]).square().sum().backward()
    for parameter, want in zip(sharded.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad.full_tensor(), want, rtol=1e-4, atol=1e-6)


def check_bad_arguments_are_refused(group: Any) -> None:
    size = group.size()
    rows = torch.zeros(size * 2, 3)
    for output, input, splits, words in [
        (rows, rows.t().contiguous().t(), None, ["input must be contiguous", "strides (1, "]),
        (rows.t().contiguous().t(), rows, None, ["output must be contiguous"]),
        (rows, rows.bfloat16(), None, ["torch.float32", "torch.bfloat16"]),
        (rows, torch.zeros(size * 2, 4), None, ["rows of equal size"]),
        (rows, torch.zeros(size * 2 + 1, 3), None, [f"{size * 2 + 1} rows", "evenly"]),
        (rows, rows, [2] * (size - 1) + [3], ["input split sizes", f"adding up to {size * 2}"]),
        (rows, rows, [2] * (size + 1), ["input split sizes", f"{size} ranks"]),
        (rows, torch.zeros(()), None, ["no dimension 0"]),
        (rows, rows.to("meta"), None, ["on meta", "expected the CPU"]),
    ]:
        with pytest.raises(ValueError, match="all_to_all_single: ") as caught:
            group.alltoall_base(output, input, [], splits or [])
        assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    for tensor, op, word in [
        (torch.ones(2), dist.ReduceOp.BAND, "integer"),
        (torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG, "floating-point"),
        (torch.ones(2, dtype=torch.complex64), dist.ReduceOp.PRODUCT, "complex"),
        (torch.ones(2), dist._make_nccl_premul_sum(2.0), "PREMUL_SUM"),
    ]:
        with pytest.raises(ValueError, match=word):
            dist.all_reduce(tensor, op)
    dist.barrier()  # nothing was sent, so the group still works


def check_ranks_that_disagree(group: Any) -> None:
    """Every fault is one error on all ranks, and the group goes on."""
    ranks = list(range(faults.WORLD))
    if group.size() < len(ranks):
        return
    part = dist.new_group(ranks)
    if group.rank() in ranks:
        reports = every_fault_in_turn(part, True)
        told: list[Any] = [None] * len(ranks)
        dist.all_gather_object(told, [(kind, text) for kind, text, _ in reports], group=part)
        assert all(kind in ("RankDisagreementError", "ValueError") for kind, _ in told[0]), told
        for by_rank in zip(*told, strict=True):
            texts = {text for kind, text in by_rank if kind == "RankDisagreementError"}
            assert len(texts) == 1, texts
        assert max(seconds for *_, seconds in reports) < 5
    dist.barrier()


def check_groups_that_cannot_work(group: Any) -> None:
    """The last check: it ends the default group, is refused twice, and makes a new one."""
    rank, size, store = group.rank(), group.size(), group.get_group_store()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="that failed: it was destroyed"):
        group.barrier()
    with pytest.raises(ValueError, match=r"HashStore.*TCPStore.*init_distributed"):
        dist.init_process_group("ulysses_mpi", store=dist.HashStore(), rank=rank, world_size=size)
    with pytest.raises(RuntimeError, match=f"MPI calls it rank {rank} of {size}"):
        dist.init_process_group("ulysses_mpi", store=store, rank=(rank + 1) % size, world_size=size)
    with pytest.raises(ValueError, match="MPIOptions"):
        dist.init_process_group(
            "ulysses_mpi", store=store, rank=rank, world_size=size, pg_options=object()
        )
    # A communicator of the program's own: the ranks the other way round.
    communicator = MPI.COMM_WORLD.Split(key=-rank)
    dist.init_process_group(
        "ulysses_mpi",
        store=dist.PrefixStore("again", store),
        rank=size - 1 - rank,
        world_size=size,
        pg_options=MPIOptions(communicator),
    )
    ranks = [torch.empty(1) for _ in range(size)]
    dist.all_gather(ranks, torch.tensor([float(rank)]))
    assert torch.cat(ranks).tolist() == list(range(size))[::-1]
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(ranks[0], group=pair)
        assert float(ranks[0]) == 2 * (size - 1)


CHECKS: dict[str, Callable[[Any], None]] = {
    name.removeprefix("check_"): function
    for name, function in [*vars(mpi_collectives).items(), *globals().items()]
    if name.startswith("check_")
}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    init_distributed(timeout=timedelta(seconds=60))
    fill_empty_with_nan()
    group = dist.group.WORLD
    outcome = {}
    for name, check in CHECKS.items():
        try:
            torch.manual_seed(0)
            check(group)
            outcome[name] = "passed"
        except Exception:
            outcome[name] = traceback.format_exc()
            break  # ranks are out of step from here on
    Path(folder, f"rank-{group.rank()}.json").write_text(json.dumps(outcome))
    if set(outcome.values()) != {"passed"}:
        os._exit(0)  # the other ranks have stopped elsewhere; the files say what happened
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
