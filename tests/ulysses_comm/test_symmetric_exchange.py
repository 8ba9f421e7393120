"""Exchanges through symmetric memory give the bits of the collective; results are not overwritten.

Real processes, kernels under Triton's interpreter; see `symmetric_ranks`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ulysses_comm as uc
from tests.bits import assert_same_bits
from tests.ulysses_comm.symmetric_ranks import (
    bits,
    both,
    collectively,
    folder_of,
    run_interpreted,
    use_files,
)
from ulysses_comm.symmetric import choice, pool
from ulysses_comm.symmetric.ask import ask_all

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="needs triton: pip install --no-deps triton==3.6.0 adds it to a CPU build of torch",
    ),
]

SPLITS = {2: [(3, 5), (0, 4)], 3: [(2, 0, 3), (1, 1, 1)]}


def exchanges_both_ways(group: dist.ProcessGroup, folder: str) -> int:
    """Every form, every layout; returns how many exchanges were compared."""
    use_files(group, folder)
    compared = 0
    for splits in SPLITS[group.size()]:
        for name, exchange in exchanges(group, splits).items():
            ours, theirs = both(group, exchange)
            for one, other in zip(ours, theirs, strict=True):
                assert one.shape == other.shape, name
                assert one.stride() == other.stride() or "flat" in name, name
                assert_same_bits(one.contiguous(), other.contiguous())
            compared += 1
    return compared


def exchanges(group: dist.ProcessGroup, splits: tuple[int, ...]) -> dict[str, Any]:
    rank, world = group.rank(), group.size()
    tokens, seqlen = splits[rank], sum(splits)
    bf16, fp32, fp8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    q, k, v = (bits((tokens, world * heads, 8), bf16, rank, heads) for heads in (3, 1, 2))
    wide = bits((tokens, world * 3, 16), bf16, rank, 7)
    strided, transposed = (
        wide[:, :, :8],
        bits((world * 2, tokens, 8), bf16, rank, 8).transpose(0, 1),
    )
    gapped = bits((tokens, world * 3, 8), bf16, rank, 9)[:, ::3]
    backwards = bits((tokens, 8, world), bf16, rank, 10).transpose(1, 2)
    packed = uc.pack_head_shards([q, k], world)
    odd = bits((tokens, world, 3), torch.uint8, rank, 11)
    lse = bits((seqlen, 2, 1), fp32, rank, 12)
    out = bits((seqlen, 2, 8), bf16, rank, 13)
    uneven = uc.HeadSplit.of_counts([world + 1 - r for r in range(world)])
    shared = uc.HeadSplit(2, tuple((0, 2) if r == 0 else (1, 2) for r in range(world)))
    many = bits((tokens, uneven.num_heads, 8), bf16, rank, 14)
    few = bits((tokens, 2, 8), bf16, rank, 15)
    own = bits((seqlen, uneven.counts[rank], 8), bf16, rank, 16)
    few_back = torch.randn(seqlen, shared.counts[rank], 8).to(bf16)
    lazy = torch.randn(tokens, world, 4, dtype=torch.complex64)

    def heads(*inputs: torch.Tensor, **options: Any) -> Any:
        return lambda: uc.scatter_heads_gather_seqlen(list(inputs), splits, group, **options)

    def started(*inputs: torch.Tensor, **options: Any) -> Any:
        return lambda: uc.start_scatter_heads_gather_seqlen(
            list(inputs), splits, group, **options
        ).wait()

    def each(*inputs: torch.Tensor, **options: Any) -> Any:
        return lambda: uc.scatter_seqlen_gather_heads_each(list(inputs), splits, group, **options)

    return {
        "q, k, v": heads(q, k, v),
        "q, k, v started": started(q, k, v),
        "one": heads(q),
        "strided": heads(strided, transposed, gapped, backwards),
        "strided started": started(strided, transposed, gapped, backwards),
        "packed": heads(*packed),
        "shards of another order": heads(packed[1], packed[0]),
        "promoted": heads(q, v.float()),
        "kept": heads(q, bits((tokens, world, 5), fp32, rank, 17), odd, keep_dtypes=True),
        "kept started": started(q, bits((tokens, world, 5), fp32, rank, 17), keep_dtypes=True),
        "bytes": heads(odd),
        "float8": heads(q.view(fp8)),
        "uneven heads": heads(many, many, head_splits=[uneven, uneven]),
        "grouped": heads(many, few, few, head_splits=[uneven, shared, shared]),
        "grouped started": started(many, few, head_splits=[uneven, shared]),
        "shards": lambda: [uc.scatter_seqlen_gather_head_shards(out, splits, group)],
        "shards started": lambda: [
            uc.start_scatter_seqlen_gather_head_shards(out, splits, group).wait()
        ],
        "flat": lambda: [uc.scatter_seqlen_gather_heads(out, splits, group)],
        "flat uneven": lambda: [
            uc.scatter_seqlen_gather_heads(own, splits, group, head_split=uneven)
        ],
        "flat shared": lambda: [
            uc.scatter_seqlen_gather_heads(few_back, splits, group, head_split=shared)
        ],
        "flat each kept": each(out, lse, keep_dtypes=True),
        "flat each promoted": each(out, lse[:, :, :1].expand(-1, -1, 8)),
        "conjugated": heads(lazy.conj()),
        "conjugated, started": started(lazy.conj()),
        "negated": heads(lazy.conj().imag),
        "expanded": heads(q[:, :1].expand(-1, world, -1)),
        "nine": heads(*[q] * 9),
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_both_transports_give_the_same_bits(world_size: int, tmp_path: Path) -> None:
    counts = run_interpreted(exchanges_both_ways, world_size, folder_of(tmp_path))
    assert set(counts) == {54}


def lends_and_copies(group: dist.ProcessGroup, folder: str) -> None:
    pool._SMALLEST = 4096  # so that two sizes can be small
    state = use_files(group, folder, slots=2)
    rank, world = group.rank(), group.size()
    splits = [3] * world

    def exchange(number: int, **options: Any) -> torch.Tensor:
        q = bits((3, 2 * world, 8), torch.bfloat16, rank, number)
        return uc.scatter_heads_gather_seqlen([q], splits, group, **options)[0]

    def expected(number: int) -> torch.Tensor:
        whole = [bits((3, 2 * world, 8), torch.bfloat16, r, number) for r in range(world)]
        return torch.cat(whole)[:, 2 * rank : 2 * rank + 2]

    def in_slot(tensor: torch.Tensor) -> bool:
        storages = {slot._storage.data_ptr() for slot in state._pools[0].slots}
        return tensor.untyped_storage().data_ptr() in storages

    # Held results stay as they are; the third has no slot left and is a copy.
    held = [exchange(0), exchange(1)[:, 1:], exchange(2)]
    assert [in_slot(tensor) for tensor in held] == [True, True, False]
    assert state._pools[0].lent == 2
    for number in range(3, 7):
        assert_same_bits(exchange(number), expected(number))
    assert_same_bits(held[0], expected(0))
    assert_same_bits(held[1].contiguous(), expected(1)[:, 1:].contiguous())
    assert_same_bits(held[2], expected(2))
    # A slot is lent again once nothing refers to it, even where only this rank let go.
    if rank == 0:
        held.clear()
    result = exchange(9)
    assert in_slot(result) == (rank == 0)
    # Each wrote where the other said, not where it receives itself.
    assert_same_bits(result, expected(9))
    for number, tensor in enumerate(held):
        whole = expected(number)
        assert_same_bits(tensor.contiguous(), whole[:, number % 2 :].contiguous())
    del result
    held.clear()
    # Memory that the caller names gets a copy.
    out = torch.empty(3 * world, 2, 8, dtype=torch.bfloat16)
    result = exchange(10, out=out)
    assert result.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    assert_same_bits(out, expected(10))
    # Where there is no slot to lend, a workspace gives its memory.
    kept, workspace = [exchange(number) for number in (11, 12)], uc.Workspace()
    assert_same_bits(exchange(13, workspace=workspace), expected(13))
    assert workspace.allocations == 1
    assert_same_bits(kept[0], expected(11))
    # The smaller exchange finds room in the same slots; a far larger one gets its own.
    assert len(state._pools) == 1
    del kept
    big = torch.ones(3, world, 2_000)
    uc.scatter_heads_gather_seqlen([big], splits, group)
    assert len(state._pools) == 2
    assert in_slot(exchange(14))


def test_held_results_are_not_overwritten(tmp_path: Path) -> None:
    run_interpreted(lends_and_copies, 2, folder_of(tmp_path))


def gradients(group: dist.ProcessGroup, folder: str) -> None:
    use_files(group, folder, slots=2)
    rank, world = group.rank(), group.size()
    splits = [2, 3][:world]

    def step() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        q, k = (
            torch.randn(splits[rank], 2 * world, 4, generator=generator, requires_grad=True)
            for _ in range(2)
        )
        a, b = uc.scatter_heads_gather_seqlen([q, k], splits, group)
        mixed = (a * b).exp() + a
        back = uc.scatter_seqlen_gather_head_shards(mixed, splits, group)
        # What autograd saved lies in lent slots; these exchanges must leave it alone.
        for _ in range(4):
            uc.scatter_heads_gather_seqlen([q.detach() + 1], splits, group)
        (back.sin() * (rank + 1)).sum().backward()
        return [back.detach(), q.grad, k.grad]

    for one, other in zip(*both(group, step), strict=True):
        assert_same_bits(one.contiguous(), other.contiguous())


def test_gradients_are_the_same_bits(tmp_path: Path) -> None:
    run_interpreted(gradients, 2, folder_of(tmp_path))


def attends_in_chunks(group: dist.ProcessGroup, folder: str) -> None:
    use_files(group, folder)
    rank, world = group.rank(), group.size()
    q, k, v = (torch.randn(4, 4 * world, 8) for _ in range(3))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("shd,thd->hst", q, k).softmax(-1)
        return torch.einsum("hst,thd->shd", scores, v)

    attend = uc.UlyssesAttention(attention, group=group, layout="shd", chunks=2)
    one, other = both(group, lambda: attend(q, k, v))
    assert_same_bits(one.contiguous(), other.contiguous())
    assert rank < world


def test_attention_in_chunks_is_the_same_bits(tmp_path: Path) -> None:
    run_interpreted(attends_in_chunks, 2, folder_of(tmp_path))


def means_something_else(group: dist.ProcessGroup, folder: str) -> str:
    use_files(group, folder)
    q = torch.ones(2, 2 * group.size(), 8)
    splits = [2, 2]
    wrong = q if group.rank() == 0 else q[:, :, :4]
    try:
        uc.scatter_heads_gather_seqlen([wrong], splits, group)
    except Exception as error:
        return str(error)
    return ""


def test_ranks_that_differ_get_an_error_and_no_data(tmp_path: Path) -> None:
    texts = run_interpreted(means_something_else, 2, folder_of(tmp_path))
    assert all("the ranks mean different exchanges" in text for text in texts), texts


# What must not bring ranks out of step


def counters_wrap(group: dist.ProcessGroup, folder: str) -> None:
    """Exchanges are numbered in 32 bits of a word: signed and unsigned ends are passed."""
    state = use_files(group, folder)
    rank, world = group.rank(), group.size()
    q = bits((2, 2 * world, 8), torch.bfloat16, rank)
    whole = torch.cat([bits((2, 2 * world, 8), torch.bfloat16, r) for r in range(world)])
    for start in (2**31 - 2, 2**32 - 2):
        ask_all(group, "the last exchange is over")
        state.words[0] = start
        state.words[2:] = start
        state.pad.fill_(start & 0xFFFFFFFF)
        ask_all(group, "counters are set")
        for _ in range(3):
            (pushed,) = uc.scatter_heads_gather_seqlen([q], [2] * world, group)
            (pulled,) = uc.start_scatter_heads_gather_seqlen([q], [2] * world, group).wait()
            for result in (pushed, pulled):
                assert_same_bits(result, whole[:, 2 * rank : 2 * rank + 2])
        assert int(state.words[0]) == start + 3


def memory_runs_out_once(group: dist.ProcessGroup, folder: str) -> None:
    """A rank without memory for its result has not taken part, and may try again."""
    state = use_files(group, folder, slots=0)
    rank, world = group.rank(), group.size()
    q = bits((2, world, 8), torch.bfloat16, rank, 1)

    class Full(uc.Workspace):
        def take(self, *args: Any) -> torch.Tensor:
            raise MemoryError("no room for the result")

    if rank == 0:
        with pytest.raises(MemoryError, match="no room"):
            uc.scatter_heads_gather_seqlen([q], [2] * world, group, workspace=Full())
        assert int(state.words[0]) == 0
    (result,) = uc.scatter_heads_gather_seqlen([q], [2] * world, group)
    whole = torch.cat([bits((2, world, 8), torch.bfloat16, r, 1) for r in range(world)])
    assert_same_bits(result, whole[:, rank : rank + 1])
    # Likewise where rank 0 stores its rows by itself.
    if rank == 0:
        target = uc.open_head_scatter([world], 8, torch.bfloat16, [2] * world, group, device="cpu")
        for place, address in enumerate(target.addresses.tolist()):
            rows = q[:, place].contiguous()
            ctypes.memmove(address, rows.data_ptr(), rows.nbytes)
        full = mock.patch.object(torch, "empty", side_effect=MemoryError("no room"))
        with full, pytest.raises(MemoryError, match="no room"):
            target.finish()
        (result,) = target.finish()
    else:
        (result,) = uc.scatter_heads_gather_seqlen([q], [2] * world, group)
    assert_same_bits(result, whole[:, rank : rank + 1])
    assert int(state.words[0]) == 2


def forms_differ(group: dist.ProcessGroup, folder: str) -> None:
    """`validate` sees what the two forms cannot say to each other, and only where it matters."""
    plain, start = uc.scatter_heads_gather_seqlen, uc.start_scatter_heads_gather_seqlen
    world = group.size()
    q = torch.ones(2, world, 8)

    def exchange(validate: Any) -> Any:
        if group.rank() == 0:
            return plain([q], [2] * world, group, validate=validate)
        return start([q], [2] * world, group, validate=validate).wait()

    assert_same_bits(
        exchange(True)[0], torch.ones(2 * world, 1, 8)
    )  # over the collective they meet
    use_files(group, folder)
    agreement = uc.Agreement()
    for validate in (True, agreement):
        with pytest.raises(
            uc.RankDisagreementError, match=r"transport: .*push.* on rank 0, .*pull"
        ):
            exchange(validate)
    for form in (plain, start):
        result = form([q], [2] * world, group, validate=agreement)
        assert_same_bits(
            (result if form is plain else result.wait())[0], torch.ones(2 * world, 1, 8)
        )


class Late:
    """A kernel after which the host takes its time."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def call(*args: Any, **options: Any) -> None:
            self.kernel[grid](*args, **options)
            time.sleep(0.3)

        return call


def send_buffers_are_read_first(group: dist.ProcessGroup, folder: str) -> None:
    """A send buffer is written again once the slowest rank has read it.

    In a row the ring alone sees to that; a graph that is replayed takes one buffer every time.
    """
    from ulysses_comm.kernels import signals

    state = use_files(group, folder)
    rank, world = group.rank(), group.size()
    late = mock.patch.object(signals, "await_kernel", Late(signals.await_kernel))
    for number in range(3):
        q = bits((2, world, 8), torch.bfloat16, rank, number)
        whole = torch.cat([bits((2, world, 8), torch.bfloat16, r, number) for r in range(world)])
        state.started = 0
        with late if rank == 1 else contextlib.nullcontext():
            (result,) = uc.start_scatter_heads_gather_seqlen([q], [2] * world, group).wait()
        assert_same_bits(result, whole[:, rank : rank + 1])


def gaps_are_cleared(group: dist.ProcessGroup, folder: str) -> None:
    """The whole of `out` is what the collective writes: bytes between inputs are zero."""
    use_files(group, folder)
    rank, world = group.rank(), group.size()
    odd = bits((2, world, 3), torch.uint8, rank, 1)
    wide = bits((2, world, 5), torch.float32, rank, 2)
    with collectively(group):
        (first, _) = uc.scatter_heads_gather_seqlen(
            [odd, wide], [2] * world, group, keep_dtypes=True
        )
    row = first.untyped_storage().nbytes() // (2 * world)
    assert row > 3 + 4 * 5
    full = torch.full((2, world, row), 255, dtype=torch.uint8)

    def exchange(start: bool) -> list[torch.Tensor]:
        out = torch.full((2 * world, row), 255, dtype=torch.uint8)
        # What was received before, in the same place, left no zeros.
        uc.scatter_heads_gather_seqlen([full], [2] * world, group, out=out.view(-1, 1, row))
        call = uc.start_scatter_heads_gather_seqlen if start else uc.scatter_heads_gather_seqlen
        got = call([odd, wide], [2] * world, group, keep_dtypes=True, out=out)
        if start:
            got.wait()
        return [out]

    for start in (False, True):
        (ours,), (theirs,) = both(group, lambda start=start: exchange(start))
        assert_same_bits(ours, theirs)


def groups_share_ranks(group: dist.ProcessGroup, folder: str) -> None:
    """Groups of the same ranks, one of them of another transport, in turn."""
    rank = group.rank()
    groups = {name: dist.new_group() for name in ("first", "second", "collective")}
    for name, one in groups.items():
        if name != "collective":
            (Path(folder) / name).mkdir(exist_ok=True)
            use_files(one, f"{folder}/{name}", slots=1)
    held = []
    for number in range(2):
        for one in groups.values():
            size = one.size()
            q = bits((2, size, 8), torch.bfloat16, rank, number)
            for start in (False, True):
                if start:
                    pending = uc.start_scatter_heads_gather_seqlen([q], [2] * size, one)
                    (result,) = pending.wait()
                else:
                    (result,) = uc.scatter_heads_gather_seqlen([q], [2] * size, one)
                whole = torch.cat(
                    [bits((2, size, 8), torch.bfloat16, r, number) for r in range(size)]
                )
                held.append((result, whole[:, rank : rank + 1]))
    for result, want in held:
        assert_same_bits(result, want)


def stays_in_step(group: dist.ProcessGroup, folder: str) -> None:
    for number, attack in enumerate(
        (
            forms_differ,
            counters_wrap,
            memory_runs_out_once,
            gaps_are_cleared,
            send_buffers_are_read_first,
            groups_share_ranks,
        )
    ):
        own = Path(folder) / str(number)
        own.mkdir(exist_ok=True)
        choice._CHOSEN.pop(group, None)
        attack(group, str(own))


def test_ranks_stay_in_step(tmp_path: Path) -> None:
    run_interpreted(stays_in_step, 2, folder_of(tmp_path))
