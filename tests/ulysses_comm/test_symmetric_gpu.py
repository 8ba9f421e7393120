"""Exchanges through symmetric memory on real GPUs: two processes, NCCL as the oracle.

Each test starts ranks of its own; a kernel that traps takes its process with it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ulysses_comm as uc
from benchmarks.nvlink.stored import open_started, store_rows
from magi2.ops.attention_heads import (
    send_buffer_views,
    store_heads_at_triton,
    store_heads_triton,
)
from tests.bits import assert_same_bits, random_bits
from tests.magi2.head_cases import store_inputs
from ulysses_comm.symmetric import choice
from ulysses_comm.symmetric.state import GroupState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

WORLD = 2
BF16 = torch.bfloat16
PATIENCE = 90.0  # seconds until ranks that still run say where, and a little later are killed


def _rank_main(
    rank: int,
    port: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    transport: str,
    options: dict[str, Any],
    queue: Any,
) -> None:
    faulthandler.dump_traceback_later(PATIENCE)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=WORLD,
        device_id=device,
        timeout=timedelta(seconds=60),
    )
    group = dist.group.WORLD
    answer: tuple[str, Any]
    try:
        uc.use_transport(group, transport, **options)
        answer = ("result", function(group, *args))
        torch.cuda.synchronize()
    except Exception as error:
        answer = ("error", f"{type(error).__name__}: {error}")
    queue.put((rank, *answer))
    queue.close()
    queue.join_thread()
    os._exit(0)  # leaving in order would wait for peers that may be gone


def outcomes(
    function: Callable[..., Any], *args: Any, transport: str = "symm_mem", **options: Any
) -> tuple[dict[int, tuple[str, Any]], dict[int, int | None], float]:
    """Run `function(group, *args)` on two ranks; answers, exit codes and seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(
            target=_rank_main, args=(rank, port, function, args, transport, options, queue)
        )
        for rank in range(WORLD)
    ]
    start = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, start + PATIENCE + 5 - time.monotonic()))
    seconds = time.monotonic() - start
    codes = {rank: process.exitcode for rank, process in enumerate(processes)}
    for process in processes:
        if process.exitcode is None:
            process.kill()
    answers = {}
    while not queue.empty():
        rank, kind, value = queue.get()
        answers[rank] = (kind, value)
    return answers, codes, seconds


def run(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    answers, codes, _ = outcomes(function, *args, **options)
    assert {rank: kind for rank, (kind, _) in answers.items()} == {0: "result", 1: "result"}, (
        answers,
        codes,
    )
    return [answers[rank][1] for rank in range(WORLD)]


def both(group: dist.ProcessGroup, exchange: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what an exchange gives through symmetric memory, and over NCCL."""
    ours = exchange()
    kept = choice._CHOSEN.pop(group)
    theirs = exchange()
    torch.cuda.synchronize()
    choice._CHOSEN[group] = kept
    return ours, theirs


def compare(ours: Any, theirs: Any, name: str) -> None:
    torch.cuda.synchronize()
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape, name
        assert one.dtype == other.dtype, name
        assert_same_bits(one.contiguous().cpu(), other.contiguous().cpu())


def state_of(group: dist.ProcessGroup) -> GroupState:
    state = choice.state_of(group)
    assert state is not None
    return state


def bits(shape: tuple[int, ...], rank: int, number: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return random_bits(shape, dtype, seed=100 * number + rank).cuda()


def in_slot(group: dist.ProcessGroup, tensor: torch.Tensor) -> bool:
    places = {slot._storage.data_ptr() for pool in state_of(group)._pools for slot in pool.slots}
    return tensor.untyped_storage().data_ptr() in places


# Bits


def exchanges(group: dist.ProcessGroup, splits: list[int], dim: int) -> dict[str, Any]:
    rank = group.rank()
    tokens, seqlen = splits[rank], sum(splits)
    q, k, v = (bits((tokens, WORLD * heads, dim), rank, heads) for heads in (12, 12, 4))
    gapped = bits((tokens, WORLD * 3, dim), rank, 9)[:, ::3]
    backwards = bits((tokens, dim, WORLD), rank, 10).transpose(1, 2)
    packed = uc.pack_head_shards([q, k], WORLD)
    odd = bits((tokens, WORLD, 3), rank, 11, torch.uint8)
    lse = bits((seqlen, 2, 1), rank, 12, torch.float32)
    out = bits((seqlen, 12, dim), rank, 13)
    uneven, shared = uc.HeadSplit.of_counts([3, 2]), uc.HeadSplit(2, ((0, 2), (1, 2)))
    many, few = bits((tokens, 5, dim), rank, 14), bits((tokens, 2, dim), rank, 15)
    own = bits((seqlen, uneven.counts[rank], dim), rank, 16)
    few_back = torch.randn(seqlen, shared.counts[rank], dim, device="cuda").to(BF16)

    def heads(*inputs: torch.Tensor, start: bool = False, **options: Any) -> Any:
        if start:
            return lambda: uc.start_scatter_heads_gather_seqlen(
                list(inputs), splits, group, **options
            ).wait()
        return lambda: uc.scatter_heads_gather_seqlen(list(inputs), splits, group, **options)

    forms = {
        "q, k, v": heads(q, k, v),
        "strided": heads(gapped, backwards),
        "packed": heads(*packed),
        "promoted": heads(q, v.float()),
        "kept": heads(q, odd, keep_dtypes=True),
        "bytes": heads(odd),
        "uneven heads": heads(many, many, head_splits=[uneven, uneven]),
        "grouped": heads(many, few, few, head_splits=[uneven, shared, shared]),
        "q, k, v started": heads(q, k, v, start=True),
        "kept started": heads(q, odd, keep_dtypes=True, start=True),
        "grouped started": heads(many, few, head_splits=[uneven, shared], start=True),
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
        "flat each": lambda: uc.scatter_seqlen_gather_heads_each(
            [out, lse], splits, group, keep_dtypes=True
        ),
    }
    return forms


def same_bits(group: dist.ProcessGroup) -> str:
    for splits in ([300, 211], [0, 64], [64, 0], [1, 1], [3702, 3702]):
        for dim in (128, 20) if sum(splits) < 1000 else (128,):
            for name, exchange in exchanges(group, splits, dim).items():
                compare(*both(group, exchange), f"{name}, {splits}, {dim}")
    return uc.explain_transport(group)


def test_every_exchange_gives_the_bits_of_nccl() -> None:
    texts = run(same_bits)
    assert all(text.startswith("symm_mem: the caller asked for symm_mem") for text in texts), texts


def test_auto_takes_symmetric_memory_where_nvlink_is() -> None:
    expected = {"symm_mem": "symm_mem: ", "collective": "collective: no symmetric memory"}
    start = expected[choice.choice_on_this_machine().name]
    texts = run(uc.explain_transport, transport="auto")
    assert all(text.startswith(start) for text in texts), texts


def gradients(group: dist.ProcessGroup) -> None:
    rank, splits = group.rank(), [200, 56]

    def step() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        q, k = (
            torch.randn(splits[rank], 8, 128, generator=generator).cuda().requires_grad_()
            for _ in range(2)
        )
        a, b = uc.scatter_heads_gather_seqlen([q, k], splits, group)
        back = uc.scatter_seqlen_gather_head_shards((a * b).exp() + a, splits, group)
        for _ in range(8):
            uc.scatter_heads_gather_seqlen([q.detach() + 1], splits, group)
        (back.sin() * (rank + 1)).sum().backward()
        assert q.grad is not None
        assert k.grad is not None
        return [back.detach(), q.grad, k.grad]

    compare(*both(group, step), "gradients")


def test_gradients_have_the_bits_of_nccl() -> None:
    run(gradients)


# Kernels that store to the slots themselves


def produced(group: dist.ProcessGroup, cases: Sequence[Sequence[int]]) -> None:
    """The attention's kernel, straight to the peers: bits of its send buffer, exchanged by NCCL."""
    rank, device = group.rank(), state_of(group).device
    heads, kv_heads, dim = 24, 8, 128
    for splits in cases:
        torch.manual_seed(7 + rank)
        inputs = store_inputs(splits[rank], heads, kv_heads, dim, 3, BF16, device)

        def by_kernel(splits: Any = splits, inputs: Any = inputs) -> list[torch.Tensor]:
            counts = (heads, kv_heads, kv_heads)
            target = uc.open_head_scatter(counts, dim, BF16, splits, group, device=device)
            assert target.is_direct
            store_heads_at_triton(*inputs, target.addresses)
            return target.finish()

        def plainly(splits: Any = splits, inputs: Any = inputs) -> list[torch.Tensor]:
            shards = send_buffer_views(store_heads_triton(*inputs, WORLD), heads, kv_heads)
            return uc.scatter_heads_gather_seqlen(shards, splits, group)

        pushed, expected = both(group, plainly)
        compare(pushed, expected, f"pushed, {splits}")
        del pushed
        for number in range(6):  # one rank by its kernel, the other by the plain exchange
            mine = by_kernel() if number == 0 or number % 2 == rank else plainly()
            compare(mine, expected, f"{number}, {splits}")
        # The last ones find all slots lent.
        held = [by_kernel() for _ in range(5)]
        for results in held:
            compare(results, expected, f"held, {splits}")
        del held, mine, results


def test_a_kernel_stores_to_the_slots_of_all_ranks() -> None:
    run(produced, [[300, 211], [0, 64], [64, 0], [1, 1], [3702, 3702]], slots=3)


def captured_by_kernel(group: dist.ProcessGroup) -> None:
    rank, splits = group.rank(), [700, 600]
    inputs = store_inputs(splits[rank], 8, 8, 128, 1, BF16, "cuda")

    def step() -> list[torch.Tensor]:
        target = uc.open_head_scatter([8] * 3, 128, BF16, splits, group, device="cuda")
        store_heads_at_triton(*inputs, target.addresses)
        return target.finish()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(4):
        inputs[0].copy_(torch.randn_like(inputs[0]))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [tensor.clone() for tensor in results]
        compare(replayed, step(), "replayed")


def test_a_captured_kernel_stores_to_the_slots_again() -> None:
    run(captured_by_kernel)


def produced_and_started(group: dist.ProcessGroup, cases: Sequence[Sequence[int]]) -> None:
    """The attention's kernel, to where the peers read: bits of its send buffer, sent by NCCL."""
    rank, device = group.rank(), state_of(group).device
    heads, kv_heads, dim = 24, 8, 128
    for splits in cases:
        torch.manual_seed(7 + rank)
        inputs = store_inputs(splits[rank], heads, kv_heads, dim, 3, BF16, device)

        def by_kernel(splits: Any = splits, inputs: Any = inputs) -> Any:
            counts = (heads, kv_heads, kv_heads)
            target = uc.open_head_scatter(
                counts, dim, BF16, splits, group, device=device, started=True
            )
            assert target.is_direct
            store_heads_at_triton(*inputs, target.addresses)
            return target.start()

        def shards(inputs: Any = inputs) -> Any:
            return send_buffer_views(store_heads_triton(*inputs, WORLD), heads, kv_heads)

        def plainly(splits: Any = splits, shards: Any = shards) -> Any:
            return uc.start_scatter_heads_gather_seqlen(shards(), splits, group)

        pulled, expected = both(group, lambda plainly=plainly: plainly().wait())
        compare(pulled, expected, f"pulled, {splits}")
        # One rank by its kernel, the other by the plain form; many under way, and others between.
        handles = [
            by_kernel() if number % 4 == 0 or number % 2 == rank else plainly()
            for number in range(8)
        ]
        between = uc.scatter_heads_gather_seqlen(shards(), splits, group)
        compare(between, expected, f"between, {splits}")
        for number, handle in enumerate(handles):
            compare(handle.wait(), expected, f"{number}, {splits}")
        by_kernel()  # nobody waits for it; the next ones do not mind
        compare(by_kernel().wait(), expected, f"after one that was dropped, {splits}")


def test_a_kernel_stores_to_where_the_peers_read() -> None:
    run(produced_and_started, [[300, 211], [0, 64], [64, 0], [1, 1], [3702, 3702]], slots=3)


def open_and_store(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], splits: Sequence[int]
) -> uc.HeadScatterTarget:
    shards = [tensor.unflatten(1, (WORLD, -1)) for tensor in tensors]
    target = open_started(shards, splits, group)
    store_rows(shards, target.addresses)
    return target


def stored_again(group: dist.ProcessGroup) -> None:
    """Buffers are stored to again once all have read them; other data each time, two opened."""
    rank, splits = group.rank(), [1500, 900]
    shape = (splits[rank], 16, 128)
    sent = [[bits(shape, rank, 3 * number + i) for i in range(3)] for number in range(12)]
    torch.cuda.synchronize()
    side, targets, handles = torch.cuda.Stream(), [], []
    for number, tensors in enumerate(sent):
        # Two streams of the user's, and a rank that is late by turns.
        with torch.cuda.stream(side if number % 3 == 2 else torch.cuda.current_stream()):
            if number % 2 == rank:
                torch.cuda._sleep(2_000_000)
            targets.append(open_and_store(group, tensors, splits))
        if len(targets) == 2:
            torch.cuda.current_stream().wait_stream(side)
            handles.append(targets.pop(0).start())
    torch.cuda.current_stream().wait_stream(side)
    handles.append(targets.pop(0).start())
    for number, handle in enumerate(handles):
        for i, result in enumerate(handle.wait()):
            whole = torch.cat(
                [bits((size, 16, 128), r, 3 * number + i) for r, size in enumerate(splits)]
            )
            want = whole[:, 8 * rank : 8 * rank + 8].contiguous()
            torch.cuda.synchronize()
            assert_same_bits(result.contiguous(), want)


def test_a_kernel_stores_again_once_all_have_read() -> None:
    run(stored_again)


def captured_and_started(group: dist.ProcessGroup) -> None:
    """Three targets in one graph: the third waits for the first one's buffer."""
    rank, splits = group.rank(), [700, 600]
    static = [bits((splits[rank], 8, 128), rank, i) for i in range(3)]

    def step() -> list[torch.Tensor]:
        first, second = (open_and_store(group, static, splits) for _ in range(2))
        handles = [first.start(), second.start(), open_and_store(group, static, splits).start()]
        return [result for handle in handles for result in handle.wait()]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for number in range(4):
        for i, tensor in enumerate(static):
            tensor.copy_(bits(tuple(tensor.shape), rank, 10 * number + i))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [tensor.clone() for tensor in results]
        compare(replayed, step(), "replayed")
        started = uc.start_scatter_heads_gather_seqlen(static, splits, group).wait()
        compare(replayed, started * 3, "replayed, against the plain form")


def test_a_captured_kernel_stores_to_where_the_peers_read_again() -> None:
    run(captured_and_started)


# Lifetimes


def held(group: dist.ProcessGroup) -> None:
    rank, splits = group.rank(), [500, 300]

    def send(number: int) -> torch.Tensor:
        return bits((splits[rank], 8, 128), rank, number)

    def expected(number: int) -> torch.Tensor:
        whole = torch.cat([bits((size, 8, 128), r, number) for r, size in enumerate(splits)])
        return whole[:, 4 * rank : 4 * rank + 4]

    def exchange(number: int, **options: Any) -> torch.Tensor:
        return uc.scatter_heads_gather_seqlen([send(number)], splits, group, **options)[0]

    kept = [exchange(number) for number in range(4)]
    assert [in_slot(group, tensor) for tensor in kept] == [True, True, True, False]
    for number in range(10, 60):
        assert_same_bits(exchange(number).contiguous(), expected(number).contiguous())
    for number, tensor in enumerate(kept):
        assert_same_bits(tensor.contiguous(), expected(number).contiguous())
    if rank == 0:
        kept.clear()
    result = exchange(60)
    assert in_slot(group, result) == (rank == 0)
    # Each wrote where the other said, not where it receives itself.
    assert_same_bits(result.contiguous(), expected(60).contiguous())
    for number, tensor in enumerate(kept):
        assert_same_bits(tensor.contiguous(), expected(number).contiguous())
    del result
    kept.clear()
    out = torch.empty(800, 4, 128, dtype=BF16, device="cuda")
    assert exchange(61, out=out).untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    assert_same_bits(out, expected(61).contiguous())
    pending = [
        uc.start_scatter_heads_gather_seqlen([send(number)], splits, group)
        for number in range(70, 75)
    ]
    between = exchange(80)
    for number, handle in zip(range(70, 75), pending, strict=True):
        assert_same_bits(handle.wait()[0].contiguous(), expected(number).contiguous())
    assert_same_bits(between.contiguous(), expected(80).contiguous())


def test_held_results_are_not_overwritten() -> None:
    run(held, slots=3)


def two_streams(group: dist.ProcessGroup) -> None:
    rank, splits = group.rank(), [2000, 2000]
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [bits((2000, 16, 128), rank, number) for number in range(12)]
    torch.cuda.synchronize()
    sums = []
    for number, tensor in enumerate(inputs):
        with torch.cuda.stream(streams[number % 2]):
            result = uc.scatter_heads_gather_seqlen([tensor], splits, group)[0]
            torch.cuda._sleep(200_000)
            sums.append(result.view(torch.int16).long().sum())
            del result  # its slot may be lent on the other stream, after this one's reads
    torch.cuda.synchronize()
    for number, total in enumerate(sums):
        whole = torch.cat([bits((2000, 16, 128), r, number) for r in range(WORLD)])
        part = whole[:, 8 * rank : 8 * rank + 8].contiguous().view(torch.int16)
        assert int(total) == int(part.long().sum()), number


def test_exchanges_of_two_streams_keep_their_order() -> None:
    run(two_streams, slots=2)


def late_reads(group: dist.ProcessGroup) -> None:
    rank, splits = group.rank(), [2000, 2000]
    one, other = (torch.cuda.Stream() for _ in range(2))
    inputs = [bits((2000, 16, 128), rank, number) for number in range(3)]
    torch.cuda.synchronize()

    def exchange(number: int) -> torch.Tensor:
        return uc.scatter_heads_gather_seqlen([inputs[number]], splits, group)[0]

    with torch.cuda.stream(one):
        first = exchange(0)
    with torch.cuda.stream(other):
        held = exchange(1)
    with torch.cuda.stream(one):  # after the last exchange was launched, on a stream of its own
        torch.cuda._sleep(50_000_000)
        total = first.view(torch.int16).long().sum()
    place = first.data_ptr()
    del first
    with torch.cuda.stream(other):
        again = exchange(2)
    assert again.data_ptr() == place, "the slot that is still being read is the free one"
    torch.cuda.synchronize()
    for number, sum_of in ((0, total), (1, held), (2, again)):
        whole = torch.cat([bits((2000, 16, 128), r, number) for r in range(WORLD)])
        part = whole[:, 8 * rank : 8 * rank + 8].contiguous().view(torch.int16).long().sum()
        found = sum_of if sum_of.dim() == 0 else sum_of.view(torch.int16).long().sum()
        assert int(found) == int(part), number


def test_a_slot_is_not_written_before_another_stream_has_read_it() -> None:
    run(late_reads, slots=2)


def captured(group: dist.ProcessGroup, asynchronous: bool) -> None:
    rank, splits = group.rank(), [700, 600]
    static = bits((splits[rank], 8, 128), rank, 0)

    def step() -> torch.Tensor:
        if asynchronous:
            handle = uc.start_scatter_heads_gather_seqlen([static, static], splits, group)
            a, b = handle.wait()
        else:
            a, b = uc.scatter_heads_gather_seqlen([static, static], splits, group)
        mixed = (a.view(torch.int16) ^ b.view(torch.int16) ^ a.view(torch.int16)).view(BF16)
        return uc.scatter_seqlen_gather_heads(mixed, splits, group)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    lent = uc.scatter_heads_gather_seqlen([static], splits, group)[0]
    before = lent.clone()
    for number in range(1, 6):
        static.copy_(bits((splits[rank], 8, 128), rank, number))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(result, static)
    assert_same_bits(lent.contiguous(), before.contiguous())  # a replay does not write there
    again = uc.scatter_heads_gather_seqlen([static], splits, group)[0]
    whole = torch.cat([bits((size, 8, 128), r, 5) for r, size in enumerate(splits)])
    assert_same_bits(again.contiguous(), whole[:, 4 * rank : 4 * rank + 4].contiguous())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_captured_exchange_replays(asynchronous: bool) -> None:
    run(captured, asynchronous)


def unprepared(group: dist.ProcessGroup) -> str:
    graph = torch.cuda.CUDAGraph()
    static = torch.ones(64, 4, 128, device="cuda")
    try:
        with torch.cuda.graph(graph):
            uc.scatter_heads_gather_seqlen([static], [64, 64], group)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_capture_without_a_first_run_is_refused() -> None:
    assert all("Run the same exchange once" in text for text in run(unprepared))


def compiled(group: dist.ProcessGroup) -> None:
    splits = [100, 28]
    q = torch.randn(splits[group.rank()], 8, 64, device="cuda")

    def step(tensor: torch.Tensor) -> torch.Tensor:
        (gathered,) = uc.scatter_heads_gather_seqlen([tensor], splits, group)
        return uc.scatter_seqlen_gather_heads(gathered * 2, splits, group)

    result = torch.compile(step, backend="aot_eager", fullgraph=True)(q)
    assert_same_bits(result, step(q))


def test_a_compiled_exchange_takes_the_collective() -> None:
    run(compiled)


# Faults


def loses_a_peer(group: dist.ProcessGroup) -> None:
    q = torch.ones(64, 4, 128, device="cuda")
    uc.scatter_heads_gather_seqlen([q], [64, 64], group)
    torch.cuda.synchronize()
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    uc.scatter_heads_gather_seqlen([q], [64, 64], group)
    torch.cuda.synchronize()


def loses_a_peer_later(group: dist.ProcessGroup) -> None:
    q = torch.ones(64, 4, 128, device="cuda")
    uc.start_scatter_heads_gather_seqlen([q], [64, 64], group).wait()
    torch.cuda.synchronize()
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    uc.start_scatter_heads_gather_seqlen([q], [64, 64], group).wait()
    torch.cuda.synchronize()


def loses_a_peer_that_reads(group: dist.ProcessGroup) -> None:
    tensors, splits = [torch.ones(64, 4, 128, device="cuda")] * 3, [64, 64]
    open_and_store(group, tensors, splits).start().wait()
    torch.cuda.synchronize()
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        open_and_store(group, tensors, splits).start().wait()
    torch.cuda.synchronize()


@pytest.mark.parametrize("function", [loses_a_peer, loses_a_peer_later, loses_a_peer_that_reads])
def test_a_killed_rank_ends_the_other_in_time(
    function: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    answers, codes, seconds = outcomes(function, timeout=timedelta(seconds=15))
    assert codes[1] == -signal.SIGKILL
    assert codes[0] is not None
    assert 0 not in answers or answers[0][0] == "error", answers
    assert seconds < PATIENCE
    said = capfd.readouterr().err
    assert "rank 0 gave up exchange " in said, said[-2000:]


def disagrees(group: dist.ProcessGroup, asynchronous: bool) -> None:
    rank = group.rank()
    q = torch.ones(64, 4, 128, device="cuda")
    splits = [64, 64] if rank == 0 else [65, 64]
    function = (
        uc.start_scatter_heads_gather_seqlen if asynchronous else uc.scatter_heads_gather_seqlen
    )
    handle = function([q], splits, group)
    if asynchronous:
        handle.wait()
    torch.cuda.synchronize()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_disagree_end_in_time(
    asynchronous: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    answers, codes, seconds = outcomes(disagrees, asynchronous, timeout=timedelta(seconds=15))
    assert all(code is not None for code in codes.values())
    assert all(kind == "error" for kind, _ in answers.values()), answers
    assert seconds < PATIENCE
    assert "means another exchange" in capfd.readouterr().err
