"""What every transport has to do, as a table of cases that one world of processes runs in turn.

Starting processes on GPUs takes seconds, so a world runs all cases. Each writes down where it is,
so that one that hangs or aborts the process is named, and the rest runs in a new world:

    reports = run_cases(2, "collective", "cpu")       # {case: Report}

A case gets a `World` and returns tensors; their digests tell whether two transports gave the same
bits.
"""

from __future__ import annotations

import hashlib
import json
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.nvlink.stored import store_rows
from tests import bits, cases, reference
from tests.bits import assert_same_bits, bits_of
from tests.cases import BF16, FP32, HEAD_DIM
from tests.ranks import Outcome, rank_outcomes
from tests.ulysses_comm import test_exchange_gloo as shared
from tests.ulysses_comm import test_exchange_uneven_heads as uneven
from tests.ulysses_comm.attention_cases import inputs as attention_inputs
from tests.ulysses_comm.attention_cases import sdpa_of, shard
from tests.ulysses_comm.compiling import Compiled, fresh_compiler
from tests.ulysses_comm.test_exchange_gradients import expected_input_gradients, values
from ulysses_comm import (
    Agreement,
    HeadSplit,
    UlyssesAttention,
    Workspace,
    open_head_scatter,
    pack_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
    scatter_seqlen_gather_heads_each,
    split_query_groups,
    start_scatter_heads_gather_seqlen,
    start_scatter_seqlen_gather_head_shards,
    start_scatter_seqlen_gather_heads,
    start_scatter_seqlen_gather_heads_each,
    use_transport,
)
from ulysses_comm.symmetric.choice import choice_on_this_machine

TRANSPORTS = ("collective", "symm_mem")
# Symmetric memory out of files, its kernels interpreted: the same protocol on any machine.
FILES = "symm_mem on files"
PATIENCE = timedelta(seconds=30)  # what a rank waits for others, in a backend and between cases
SPAWNS = 4  # worlds at most, where cases end the processes

# NCCL's watchdog ends a process whose collective does not end. Before that it gives all ranks four
# times this long to write down what they were doing, a minute by default, dump or no dump.
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no further processes under those of the ranks
}


@dataclass(frozen=True)
class World:
    """One rank's view of the processes that run the cases."""

    group: dist.ProcessGroup
    device: torch.device
    transport: str

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def splits(self) -> tuple[int, ...]:
        """Uneven, for cases that need but one."""
        return cases.SPLITS[self.size][2]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


Case = Callable[[World], "list[torch.Tensor] | None"]


def head_scatters(world: World) -> None:
    shared.check_head_scatters(world.group, by_collective=world.transport == "collective")


def output_exchanges(world: World) -> None:
    shared.check_output_exchanges(world.group, by_collective=world.transport == "collective")


def layouts(world: World) -> None:
    shared.check_layouts(world.group)


def special_values(world: World) -> None:
    shared.check_special_values(world.group)


def ranks_without_tokens(world: World) -> None:
    shared.check_zero_tokens(world.group)


def uneven_heads(world: World) -> list[torch.Tensor]:
    """Head counts that the ranks do not divide, grouped queries, kept dtypes, and back."""
    splits, collected = uneven.SPLITS[world.size], []
    for heads in uneven.HEADS:
        query, key_value = split_query_groups(*heads, world.size)
        head_splits = [query, key_value, key_value]
        for keep in (False, True):
            dtypes, dims = (uneven.MIXED, (3, 3, 5)) if keep else ((BF16,) * 3, (4, 4, 4))
            whole = uneven.whole_tensors(splits, heads, dtypes, dims)
            mine = [uneven.own(tensor, splits, world.rank) for tensor in whole]
            got = scatter_heads_gather_seqlen(
                mine, splits, world.group, head_splits=head_splits, keep_dtypes=keep
            )
            for tensor, split, result in zip(whole, head_splits, got, strict=True):
                assert_same_bits(result, tensor[:, slice(*split.ranges[world.rank])], str(heads))
            back = scatter_seqlen_gather_heads(
                got[0].contiguous(), splits, world.group, head_split=query
            )
            assert_same_bits(back, mine[0], f"{heads}, back")
            collected += [*got, back]
    return collected


def several_outputs(world: World) -> list[torch.Tensor]:
    """The output and its log-sum-exp in one exchange, waited for and started."""
    splits = world.splits
    split = HeadSplit.balanced(2 * world.size + 1, world.size)
    whole = [
        bits.random_bits((sum(splits), split.num_heads, width), dtype, seed=index)
        for index, (width, dtype) in enumerate(((8, BF16), (1, FP32)))
    ]
    mine = [tensor[:, slice(*split.ranges[world.rank])] for tensor in whole]
    options: dict[str, Any] = {"head_splits": [split, split], "keep_dtypes": True}
    results = scatter_seqlen_gather_heads_each(mine, splits, world.group, **options)
    started = start_scatter_seqlen_gather_heads_each(mine, splits, world.group, **options).wait()
    for result, again, tensor in zip(results, started, whole, strict=True):
        assert_same_bits(result, tensor.split(splits)[world.rank])
        assert_same_bits(again, result)
    return results


def started_ahead(world: World) -> list[torch.Tensor]:
    """Several exchanges under way at once, waited for in another order; none overwrites another."""
    splits, heads = world.splits, cases.of_one_dtype((3, 3, 3), BF16)
    wanted, pending = [], []
    for seed in range(4):
        inputs = cases.inputs_of_all(splits, heads, seed=seed)
        outputs = cases.attention_outputs(splits, 3, BF16, seed=seed)
        wanted.append(
            [
                *reference.scatter_heads_results(inputs, world.rank),
                reference.scatter_seqlen_head_shards(outputs, splits, world.rank),
                reference.scatter_seqlen_heads(outputs, splits, world.rank),
            ]
        )
        own, output = inputs[world.rank], outputs[world.rank]
        passed = pack_head_shards(own, world.size) if seed % 2 else own
        pending.append(
            (
                start_scatter_heads_gather_seqlen(passed, splits, world.group),
                start_scatter_seqlen_gather_head_shards(output, splits, world.group),
                start_scatter_seqlen_gather_heads(output, splits, world.group),
                (passed, output),  # inputs live until the results are there
            )
        )
    results: list[list[torch.Tensor]] = [[] for _ in pending]
    for index in (3, 0, 2, 1):
        qkv, shards, flat, _ = pending[index]
        last = [flat.wait(), shards.wait()]
        results[index] = [*qkv.wait(), last[1], last[0]]
    # Read only now: by then every buffer that could be reused has been.
    for got, want in zip(results, wanted, strict=True):
        for result, expected in zip(got, want, strict=True):
            assert_same_bits(result, expected, "started ahead")
    return [tensor for got in results for tensor in got]


def many_in_a_row(world: World) -> list[torch.Tensor]:
    """Layers that keep every result while later ones run, then layers that keep none."""
    splits, heads = world.splits, cases.of_one_dtype((6, 6, 6), BF16)
    inputs = [cases.inputs_of_all(splits, heads, seed=seed) for seed in range(3)]
    kept = [
        scatter_heads_gather_seqlen(inputs[n % 3][world.rank], splits, world.group)
        for n in range(12)
    ]
    for _ in range(40):
        results = scatter_heads_gather_seqlen(inputs[0][world.rank], splits, world.group)
        scatter_seqlen_gather_head_shards(results[0].contiguous(), splits, world.group)
    for n, layer in enumerate(kept):
        expected = reference.scatter_heads_results(inputs[n % 3], world.rank)
        for result, want in zip(layer, expected, strict=True):
            assert_same_bits(result, want, f"layer {n}")
    return [tensor for layer in kept for tensor in layer]


def into_buffers_of_the_caller(world: World) -> list[torch.Tensor]:
    """`out=` is what is written, for every exchange."""
    splits, rank, tokens = world.splits, world.rank, world.splits[world.rank]
    heads = cases.of_one_dtype((2, 1, 1), FP32)
    inputs = cases.inputs_of_all(splits, heads)
    outputs = cases.attention_outputs(splits, 2, BF16)

    def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=world.device)

    received = buffer(sum(splits), 4, HEAD_DIM, dtype=FP32)
    results = scatter_heads_gather_seqlen(inputs[rank], splits, world.group, out=received)
    assert results[0].data_ptr() == received.data_ptr()
    for result, want in zip(results, reference.scatter_heads_results(inputs, rank), strict=True):
        assert_same_bits(result, want, "out", strides=True)
    own = outputs[rank]
    shards_out = buffer(world.size, tokens, 2, HEAD_DIM, dtype=BF16)
    shards = scatter_seqlen_gather_head_shards(own, splits, world.group, out=shards_out)
    assert shards.data_ptr() == shards_out.data_ptr()
    assert_same_bits(shards, reference.scatter_seqlen_head_shards(outputs, splits, rank))
    flat_out = buffer(tokens, 2 * world.size, HEAD_DIM, dtype=BF16)
    flat = scatter_seqlen_gather_heads(own, splits, world.group, out=flat_out)
    assert flat.data_ptr() == flat_out.data_ptr()
    assert_same_bits(flat_out, reference.scatter_seqlen_heads(outputs, splits, rank))
    each_out = [torch.empty_like(flat_out) for _ in range(2)]
    scatter_seqlen_gather_heads_each([own, own], splits, world.group, out=each_out)
    for result in each_out:
        assert_same_bits(result, flat)
    return [*results, shards, flat]


def views_of_one_buffer(world: World) -> list[torch.Tensor]:
    """Results are views of one receive buffer, by address; nothing copies them apart."""
    splits, rank = cases.SPLITS[world.size][0], world.rank
    inputs = cases.inputs_of_all(splits, cases.of_one_dtype((1, 3, 2), BF16))
    for passed in (inputs[rank], pack_head_shards(inputs[rank], world.size)):
        results = scatter_heads_gather_seqlen(passed, splits, world.group)
        head = HEAD_DIM * BF16.itemsize
        starts = [result.data_ptr() - results[0].data_ptr() for result in results]
        assert starts == [0, head, 4 * head]
        assert {result.stride() for result in results} == {(6 * HEAD_DIM, HEAD_DIM, 1)}
    output = cases.attention_outputs(splits, 3, BF16)[rank]
    shards = scatter_seqlen_gather_head_shards(output, splits, world.group)
    width = 3 * HEAD_DIM
    assert shards.stride() == (width, splits[rank] * width, HEAD_DIM, 1)
    return [*results, shards]


def kept_workspace(world: World) -> list[torch.Tensor]:
    """A loop settles on a few buffers, and a result that is kept is not overwritten."""
    splits, heads = world.splits, cases.of_one_dtype((3, 3, 3), BF16)
    inputs = [cases.inputs_of_all(splits, heads, seed=seed) for seed in range(2)]
    workspace = Workspace()
    kept = scatter_heads_gather_seqlen(
        inputs[1][world.rank], splits, world.group, workspace=workspace
    )
    for _ in range(30):
        results = scatter_heads_gather_seqlen(
            inputs[0][world.rank], splits, world.group, workspace=workspace
        )
    # Two buffers for each result alive, and those that a backend held on to for a moment.
    assert workspace.allocations <= 20, workspace.allocations
    for seed, layer in ((1, kept), (0, results)):
        expected = reference.scatter_heads_results(inputs[seed], world.rank)
        for result, want in zip(layer, expected, strict=True):
            assert_same_bits(result, want, f"seed {seed}")
    return [*kept, *results]


def stored_by_the_caller(world: World) -> list[torch.Tensor]:
    """Rows stored where `open_head_scatter` wants them, finished at once and started."""
    splits, rank, collected = world.splits, world.rank, []
    inputs = cases.inputs_of_all(splits, cases.of_one_dtype((3, 3, 3), BF16))
    shards = [tensor.unflatten(1, (world.size, -1)) for tensor in inputs[rank]]
    for started in (False, True, True, False):
        target = open_head_scatter(
            [3 * world.size] * 3,
            HEAD_DIM,
            BF16,
            splits,
            world.group,
            device=world.device,
            started=started,
        )
        store_rows(shards, target.addresses)
        results = target.start().wait() if started else target.finish()
        for result, want in zip(
            results, reference.scatter_heads_results(inputs, rank), strict=True
        ):
            assert_same_bits(result, want, f"started={started}")
        collected += results
    return collected


def checked_by_the_ranks(world: World) -> list[torch.Tensor]:
    """`validate` at every call, and once for each layout."""
    splits, heads = world.splits, cases.of_one_dtype((2, 1, 1), FP32)
    inputs = cases.inputs_of_all(splits, heads)
    expected = reference.scatter_heads_results(inputs, world.rank)
    agreement = Agreement()
    for validate in (True, PATIENCE, agreement, agreement):
        results = scatter_heads_gather_seqlen(
            inputs[world.rank], splits, world.group, validate=validate
        )
        for result, want in zip(results, expected, strict=True):
            assert_same_bits(result, want, "validated")
    return results


def backward(world: World) -> list[torch.Tensor]:
    """Gradients are the upstream moved back, bit for bit; `DTYPES` promote on the way."""
    collected = []
    for splits in cases.SPLITS[world.size]:
        for dtypes in ((BF16,) * 3, (BF16, FP32, BF16)):
            for form in ("separate", "packed"):
                collected += _head_scatter_gradients(world, splits, dtypes, form)
        collected += _output_gradients(world, splits)
    return collected


def _head_scatter_gradients(
    world: World, splits: tuple[int, ...], dtypes: tuple[torch.dtype, ...], form: str
) -> list[torch.Tensor]:
    counts, rank = (2, 1, 1), world.rank
    common = FP32 if FP32 in dtypes else BF16
    upstream = [
        [
            values(sum(splits), n, HEAD_DIM, seed=900 + 10 * r + i, dtype=common).to(world.device)
            for i, n in enumerate(counts)
        ]
        for r in range(world.size)
    ]
    leaves = [
        values(splits[rank], world.size * n, HEAD_DIM, seed=i, dtype=dtype)
        .to(world.device)
        .requires_grad_()
        for i, (n, dtype) in enumerate(zip(counts, dtypes, strict=True))
    ]
    passed = pack_head_shards(leaves, world.size) if form == "packed" else leaves
    results = scatter_heads_gather_seqlen(passed, splits, world.group)
    torch.autograd.backward(results, upstream[rank])
    expected = expected_input_gradients(upstream, splits, rank)
    grads = [leaf.grad for leaf in leaves]
    for grad, want, dtype in zip(grads, expected, dtypes, strict=True):
        assert grad is not None
        assert_same_bits(grad, want.to(dtype), f"{splits}, {form}")
    return [grad for grad in grads if grad is not None]


def _output_gradients(world: World, splits: tuple[int, ...]) -> list[torch.Tensor]:
    upstream = [
        values(splits[r], world.size * 3, HEAD_DIM, seed=700 + r).to(world.device)
        for r in range(world.size)
    ]
    (want,) = reference.scatter_heads_results([[u] for u in upstream], world.rank)
    grads = []
    for exchange in (scatter_seqlen_gather_heads, scatter_seqlen_gather_head_shards):
        output = values(sum(splits), 3, HEAD_DIM, seed=world.rank).to(world.device)
        output.requires_grad_()
        result = exchange(output, splits, world.group)
        result.backward(upstream[world.rank].reshape(result.shape))
        assert output.grad is not None
        assert_same_bits(output.grad, want, f"{exchange.__name__}, {splits}")
        grads.append(output.grad)
    return grads


def attention_layer(world: World) -> list[torch.Tensor]:
    """`UlyssesAttention` with head chunks, forward and backward, against one process."""
    splits = uneven.SPLITS[world.size]
    whole = [
        tensor.to(world.device) for tensor in attention_inputs("bshd", (8, 2), length=sum(splits))
    ]
    joined = [tensor.clone().requires_grad_() for tensor in whole]
    expected = sdpa_of("bshd")(*joined)
    expected.square().sum().backward()
    collected = []
    for chunks in (1, 2):
        leaves = [
            shard(tensor, splits, world.rank, "bshd").clone().requires_grad_() for tensor in whole
        ]
        layer = UlyssesAttention(sdpa_of("bshd"), group=world.group, layout="bshd", chunks=chunks)
        output = layer(*leaves, split_sizes=splits)
        output.square().sum().backward()
        results = [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        wanted = [expected.detach(), *(leaf.grad for leaf in joined if leaf.grad is not None)]
        for result, want in zip(results, wanted, strict=True):
            own = shard(want, splits, world.rank, "bshd")
            torch.testing.assert_close(result, own, rtol=1e-4, atol=1e-4)
        collected += results
    return collected


def compiled(world: World) -> list[torch.Tensor]:
    """Both exchanges in one full graph for all lengths, by Inductor where there is a GPU."""

    def layer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        splits = [q.shape[0]] * group.size()
        got = scatter_heads_gather_seqlen([q * 2, k * 2, v * 2], splits, group)
        return scatter_seqlen_gather_heads((got[0] + got[1] - got[2]).contiguous(), splits, group)

    collected = []
    with fresh_compiler():
        backend = "inductor" if world.device.type == "cuda" else "aot_eager"
        call = Compiled(layer, backend, dynamic=True)
        for tokens in (5, 7):
            leaves = [
                values(tokens, 2 * world.size, HEAD_DIM, seed=10 * world.rank + n).to(world.device)
                for n in range(3)
            ]
            for leaf in leaves:
                leaf.requires_grad_()
            result = call(*leaves, world.group)
            result.sum().backward()
            q, k, v = leaves
            assert torch.equal(result, q * 2 + k * 2 - v * 2)
            for leaf, slope in zip(leaves, (2.0, 2.0, -2.0), strict=True):
                assert leaf.grad is not None
                assert torch.equal(leaf.grad, torch.full_like(leaf, slope))
            collected.append(result.detach())
        assert call.count == 1, f"{call.count} graphs for two lengths"
    return collected


def on_another_stream(world: World) -> list[torch.Tensor]:
    """Inputs made late on a side stream, results read there, buffers reused on the main one."""
    if world.device.type != "cuda":
        return []
    splits, heads = world.splits, cases.of_one_dtype((6, 6, 6), BF16)
    inputs = cases.inputs_of_all(splits, heads, seed=5)
    stream = torch.cuda.Stream()
    collected = []
    world.synchronize()
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(tensor) for tensor in inputs[world.rank]]
        torch.cuda._sleep(20_000_000 * (1 + world.rank % 2))
        for target, tensor in zip(late, inputs[world.rank], strict=True):
            target.copy_(tensor)
        results = scatter_heads_gather_seqlen(late, splits, world.group)
        collected = [result.clone() for result in results]
        for target in late:
            target.fill_(-1)
    torch.cuda.current_stream().wait_stream(stream)
    scatter_heads_gather_seqlen(inputs[world.rank], splits, world.group)
    for got, want in zip(
        collected, reference.scatter_heads_results(inputs, world.rank), strict=True
    ):
        assert_same_bits(got, want, "side stream")
    return collected


def replayed_by_a_graph(world: World) -> list[torch.Tensor]:
    """Captured once, replayed with other inputs, the plain call in between."""
    if world.device.type != "cuda":
        return []
    splits, heads = world.splits, cases.of_one_dtype((3, 3, 3), BF16)
    inputs = [cases.inputs_of_all(splits, heads, seed=seed) for seed in range(3)]
    fixed = [tensor.clone() for tensor in inputs[0][world.rank]]

    def exchange() -> list[torch.Tensor]:
        got = scatter_heads_gather_seqlen(fixed, splits, world.group)
        back = scatter_seqlen_gather_heads(got[0].contiguous(), splits, world.group)
        return [*got, back]

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            exchange()
    torch.cuda.current_stream().wait_stream(warm)
    world.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog queries events meanwhile, on a thread of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = exchange()
    collected = []
    for seed in (1, 2, 1):
        for target, tensor in zip(fixed, inputs[seed][world.rank], strict=True):
            target.copy_(tensor)
        graph.replay()
        got = [tensor.clone() for tensor in captured]
        exchange()
        expected = reference.scatter_heads_results(inputs[seed], world.rank)
        for result, want in zip(got, [*expected, inputs[seed][world.rank][0]], strict=True):
            assert_same_bits(result, want, f"replay with inputs {seed}")
        collected += got
    return collected


CASES: dict[str, Case] = {
    case.__name__.replace("_", " "): case
    for case in (
        head_scatters,
        output_exchanges,
        layouts,
        special_values,
        ranks_without_tokens,
        uneven_heads,
        several_outputs,
        started_ahead,
        many_in_a_row,
        into_buffers_of_the_caller,
        views_of_one_buffer,
        kept_workspace,
        stored_by_the_caller,
        checked_by_the_ranks,
        backward,
        attention_layer,
        on_another_stream,
        compiled,
        replayed_by_a_graph,  # last: a capture that fails may leave its process in disorder
    )
}


@dataclass(frozen=True)
class Report:
    """What became of one case, over all ranks."""

    problem: str = ""  # empty: it passed on every rank
    digests: tuple[str, ...] = ()  # of what each rank's case returned
    seconds: float = 0.0


class TransportMissingError(Exception):
    """The transport cannot be used here; the message says why."""


def use(transport: str, group: dist.ProcessGroup, folder: str = "", **options: Any) -> str:
    """Choose the transport for a group; return why it cannot be, or an empty text.

    Where the machine has what it takes, a refusal is a failure, not a reason to skip tests.

    Args:
        transport: One of `TRANSPORTS`, or `FILES`.
        group: The ranks.
        folder: For the files.
        **options: For `use_transport`.
    """
    if transport == FILES:
        try:
            from tests.ulysses_comm.symmetric_ranks import use_files
        except ImportError as error:
            return str(error)
        use_files(group, folder)
        return ""
    try:
        choice = use_transport(group, transport, **options)
    except RuntimeError as error:
        if choice_on_this_machine().name == transport:
            raise
        return str(error)
    return "" if choice.name == transport else f"{choice.name} instead: {choice.reason}"


def world_of(group: dist.ProcessGroup, device: str, transport: str, folder: str = "") -> World:
    """This rank's world, with the transport chosen and test tensors on the device.

    Raises:
        TransportMissingError: If the transport cannot be used.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of a process with a GPU it takes minutes
    bits.TEST_DEVICE = device
    place = torch.device(device, group.rank()) if device == "cuda" else torch.device(device)
    reason = use(transport, group, folder)
    if reason:
        raise TransportMissingError(reason)
    return World(group, place, transport)


def run_cases(
    world_size: int,
    transport: str,
    device: str,
    names: Sequence[str] | None = None,
    patience: timedelta = PATIENCE,
) -> dict[str, Report]:
    """Run cases in a world of processes, and in further ones after a case that ends it.

    Args:
        world_size: Number of ranks, each on its own GPU where the device is one.
        transport: One of `TRANSPORTS`, or `FILES` on the CPU.
        device: "cpu" over gloo, or "cuda" over NCCL.
        names: Of the cases; None for all.
        patience: What a rank waits for others.

    Raises:
        TransportMissingError: If the transport cannot be used here.
    """
    environment = dict(NCCL_ENVIRONMENT)
    if transport == FILES:
        environment["TRITON_INTERPRET"] = "1"
    remaining = list(CASES if names is None else names)
    reports: dict[str, Report] = {}
    for _ in range(SPAWNS):
        if not remaining:
            break
        with tempfile.TemporaryDirectory(prefix="transport-cases-") as folder:
            outcomes = rank_outcomes(
                _run_on_rank, world_size, transport, device, remaining, folder, patience,
                timeout=60 + 12 * len(remaining), group_timeout=patience, meet="tcp",
                backend="nccl" if device == "cuda" else "gloo", environment=environment,
            )  # fmt: skip
            _raise_if_missing(outcomes)
            reports |= _read_reports(Path(folder), world_size, remaining, outcomes)
        remaining = [name for name in remaining if name not in reports]
    return reports | {name: Report("never got its turn") for name in remaining}


def _run_on_rank(
    group: dist.ProcessGroup,
    transport: str,
    device: str,
    names: list[str],
    folder: str,
    patience: timedelta,
) -> None:
    world = world_of(group, device, transport, folder)
    store = dist.PrefixStore("cases", dist.distributed_c10d._get_default_store())
    store.set_timeout(patience)
    with (Path(folder) / f"{group.rank()}.jsonl").open("w") as file:

        def say(**facts: Any) -> None:
            file.write(json.dumps(facts) + "\n")
            file.flush()

        for name in names:
            say(begins=name)
            start = time.monotonic()
            problem, digest = "", ""
            try:
                torch.manual_seed(0)
                results = CASES[name](world) or []
                world.synchronize()
                digest = _digest(results)
            except Exception:
                problem = traceback.format_exc(limit=-4)
            seconds = time.monotonic() - start
            say(ends=name, problem=problem, digest=digest, seconds=seconds)
            # Ranks start the next case together; one that is stuck ends this world.
            store.set(f"{name}/{group.rank()}", "done")
            store.wait([f"{name}/{rank}" for rank in range(group.size())])


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        total.update(bits_of(tensor).cpu().numpy().tobytes())
    return total.hexdigest()


def _raise_if_missing(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.error is not None and "TransportMissingError" in outcome.error.types:
            raise TransportMissingError(outcome.error.message)


def _read_reports(
    folder: Path, world_size: int, names: Sequence[str], outcomes: Sequence[Outcome]
) -> dict[str, Report]:
    """What the ranks wrote; the case that some began and not all ended has failed."""
    lines: list[list[dict[str, Any]]] = []
    for rank in range(world_size):
        path = folder / f"{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        lines.append([json.loads(line) for line in text.splitlines()])
    ends = [{line["ends"]: line for line in rank if "ends" in line} for rank in lines]
    begun = {line["begins"] for rank in lines for line in rank if "begins" in line}
    reports = {}
    for name in names:
        ended = [rank[name] for rank in ends if name in rank]
        problems = [f"rank {n}: {r[name]['problem']}" for n, r in enumerate(ends)
                    if name in r and r[name]["problem"]]  # fmt: skip
        if len(ended) < world_size and (name in begun or not begun):
            problems.append(f"did not end on every rank; {_how_ranks_ended(outcomes)}")
        elif len(ended) < world_size:
            continue
        digests = tuple(line["digest"] for line in ended)
        seconds = max((line["seconds"] for line in ended), default=0.0)
        reports[name] = Report("\n".join(problems), digests, seconds)
        if len(ended) < world_size and not begun:
            break  # the world did not even start: one case takes the blame, the next one tries
    return reports


def _how_ranks_ended(outcomes: Sequence[Outcome]) -> str:
    said = []
    for outcome in outcomes:
        if outcome.error is not None:
            said.append(f"rank {outcome.rank} raised {outcome.error.message.splitlines()[:1]}")
        elif outcome.exit_code != 0:
            code = "was killed after the time limit" if outcome.exit_code is None else (
                f"ended with {outcome.exit_code}"
            )  # fmt: skip
            said.append(f"rank {outcome.rank} {code}")
    return "; ".join(said) or "every rank returned"
