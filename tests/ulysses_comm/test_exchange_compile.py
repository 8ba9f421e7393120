"""The exchanges inside torch.compile: one whole graph, the bits and the gradients of eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from tests.bits import assert_same_bits, quiet_nans, random_bits
from tests.ranks import run_ranks
from tests.traffic import calls_of
from tests.ulysses_comm.compiling import Compiled, fresh_compiler, of_any_length
from ulysses_comm import (
    LONE_RANK,
    HeadSplit,
    pack_head_shards,
    read_split_sizes,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
    scatter_seqlen_gather_heads_each,
    simulate,
    simulate_world,
    split_query_groups,
)

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def nan_filled_empty() -> None:
    """Leave `torch.empty` alone: deterministic algorithms are part of a graph's guards."""


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    with fresh_compiler():
        yield


@dataclass(frozen=True)
class Case:
    """One exchange: inputs of (heads, head_dim, dtype), and how they are passed."""

    name: str
    splits: tuple[int, ...]
    inputs: tuple[tuple[int, int, torch.dtype], ...]
    head_splits: tuple[HeadSplit, ...] | None = None
    keep_dtypes: bool = False
    form: str = "3-D"
    outwards: bool = False  # the output exchange; `inputs` are then the heads of all ranks
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def world_size(self) -> int:
        return len(self.splits)

    def shapes(self, rank: int, splits: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shape of each input on a rank."""
        shapes = []
        for index, (heads, head_dim, _) in enumerate(self.inputs):
            if self.outwards:
                split = self.head_splits[index] if self.head_splits else None
                own = split.counts[rank] if split else heads // self.world_size
                shapes.append((sum(splits), own, head_dim))
            elif self.form == "head shards":
                shapes.append((splits[rank], self.world_size, heads // self.world_size, head_dim))
            else:
                shapes.append((splits[rank], heads, head_dim))
        return shapes

    def make(self, rank: int, splits: Sequence[int]) -> list[torch.Tensor]:
        """Return the inputs of a rank: random bits with every special value."""
        return [
            # Sums and promotions may quieten a signalling NaN, moves may not.
            quiet_nans(random_bits(shape, dtype, seed=100 * rank + i))
            for i, (shape, (_, _, dtype)) in enumerate(
                zip(self.shapes(rank, splits), self.inputs, strict=True)
            )
        ]

    def finite(self, rank: int, splits: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
        """Return inputs of a rank to differentiate by."""
        generator = torch.Generator().manual_seed(seed + rank)
        return [
            torch.randn(shape, generator=generator).to(dtype)
            for shape, (_, _, dtype) in zip(self.shapes(rank, splits), self.inputs, strict=True)
        ]

    def run(
        self, tensors: list[torch.Tensor], splits: Sequence[int], group: Any
    ) -> list[torch.Tensor]:
        """Exchange the tensors; what a test compiles."""
        if self.outwards:
            return self._run_outwards(tensors, splits, group)
        if self.form == "packed":
            tensors = pack_head_shards(tensors, self.world_size)
        return scatter_heads_gather_seqlen(
            tensors, splits, group, head_splits=self.head_splits, keep_dtypes=self.keep_dtypes
        )

    def _run_outwards(
        self, tensors: list[torch.Tensor], splits: Sequence[int], group: Any
    ) -> list[torch.Tensor]:
        if self.form == "head shards":
            return [scatter_seqlen_gather_head_shards(tensors[0], splits, group)]
        if len(tensors) == 1:
            split = None if self.head_splits is None else self.head_splits[0]
            return [scatter_seqlen_gather_heads(tensors[0], splits, group, head_split=split)]
        return scatter_seqlen_gather_heads_each(
            tensors, splits, group, head_splits=self.head_splits, keep_dtypes=self.keep_dtypes
        )


QKV = ((8, 4, FP32), (4, 4, FP32), (4, 4, FP32))
GROUPED = split_query_groups(6, 2, 3)  # the middle rank reads both key/value heads
SEVEN = HeadSplit.balanced(7, 3)
CASES = [
    Case("3-D", (3, 5), QKV),
    Case("head shards", (3, 5), QKV, form="head shards"),
    Case("packed", (3, 5), QKV, form="packed"),
    Case("bf16, one rank empty", (2, 0, 4), ((6, 4, BF16), (3, 4, BF16))),
    Case("promoted", (2, 3), ((4, 4, BF16), (4, 4, FP32))),
    Case("uneven heads", (2, 3, 1), ((7, 4, FP32), (7, 4, FP32)), (SEVEN, SEVEN)),
    Case("shared key/value heads", (2, 3, 1), ((6, 4, BF16), (2, 4, BF16)), GROUPED),
    Case(
        "one key/value head", (2, 3), ((4, 4, FP32), (1, 4, FP32)), split_query_groups(4, 1, 2)
    ),
    Case("kept dtypes", (2, 3), ((4, 4, BF16), (4, 4, FP32), (2, 8, BF16)), keep_dtypes=True),
    Case(
        "kept dtypes, shared heads",
        (2, 3, 1),
        ((6, 4, BF16), (2, 6, FP32)),
        GROUPED,
        keep_dtypes=True,
    ),
    Case("output", (3, 5), ((4, 4, FP32),), outwards=True),
    Case("output as head shards", (3, 0, 4), ((6, 4, BF16),), outwards=True, form="head shards"),
    Case("output of uneven heads", (2, 3, 1), ((7, 4, FP32),), (SEVEN,), outwards=True),
    Case("output of shared heads", (2, 3, 1), ((2, 4, BF16),), GROUPED[1:], outwards=True),
    Case(
        "output and log-sum-exp",
        (2, 3, 1),
        ((7, 4, BF16), (7, 1, FP32)),
        (SEVEN, SEVEN),
        keep_dtypes=True,
        outwards=True,
    ),
]  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def turn(tensor: torch.Tensor) -> torch.Tensor:
    """Move the first channel to the end: work for a compiler that keeps every bit."""
    return torch.cat([tensor[..., 1:], tensor[..., :1]], dim=-1)


def program_of(case: Case) -> Callable[..., list[torch.Tensor]]:
    """Return the function to compile: an exchange, with moves for the compiler on either side."""

    def program(tensors: list[torch.Tensor], splits: Any, group: Any) -> list[torch.Tensor]:
        if isinstance(splits, torch.Tensor):
            name = "seqlen" if case.outwards else "tokens"
            splits = read_split_sizes(splits, group, **{name: tensors[0].shape[0]})
        turned = [turn(tensor) for tensor in tensors]
        return [turn(result) for result in case.run(turned, splits, group)]

    return program


def loss_of(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """A loss whose gradient differs from element to element and from result to result."""
    total = torch.zeros((), dtype=torch.float64)
    for index, result in enumerate(results):
        weight = torch.linspace(0.5, 1.5 + index, result.numel(), dtype=torch.float64)
        total = total + (result.double().flatten() * weight).sum()
    return total


def gradients(
    call: Callable[..., list[torch.Tensor]], leaves: list[torch.Tensor], *args: Any
) -> list[torch.Tensor | None]:
    for leaf in leaves:
        leaf.grad = None
    loss_of(call(leaves, *args)).backward()
    return [leaf.grad for leaf in leaves]


def assert_all_same_bits(
    actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None], what: str
) -> None:
    assert len(actual) == len(expected)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert (one is None) == (other is None), f"{what} {index}: {one} {other}"
        if one is not None and other is not None:
            assert_same_bits(one, other, f"{what} {index}")


@pytest.mark.filterwarnings("error::UserWarning")
@every_case
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_one_graph_has_the_bits_and_the_gradients_of_eager_mode(case: Case, dynamic: bool) -> None:
    program = program_of(case)

    def step(group: dist.ProcessGroup) -> int:
        rank = group.rank()
        compiled = Compiled(program, dynamic=dynamic)
        leaves = [t.requires_grad_() for t in case.make(rank, case.splits)]
        expected = program(leaves, case.splits, group)
        assert_all_same_bits(compiled(leaves, case.splits, group), expected, "result")

        leaves = [t.requires_grad_() for t in case.finite(rank, case.splits)]
        expected_gradients = gradients(program, leaves, case.splits, group)
        actual = gradients(compiled, leaves, case.splits, group)
        assert_all_same_bits(actual, expected_gradients, "gradient")
        for grad, leaf in zip(expected_gradients, leaves, strict=True):
            assert grad is not None
            assert leaf.numel() == 0 or grad.abs().max() > 0.1
        return compiled.count

    simulation = simulate(case.world_size, step)
    assert simulation.results == [1] * case.world_size
    # Forward twice, forward and backward twice, each in one collective.
    assert len(calls_of(simulation)) == 6


@pytest.mark.parametrize("tracked", range(3))
@pytest.mark.parametrize("keep_dtypes", [False, True], ids=["promoted", "kept dtypes"])
def test_each_tensor_alone_gets_its_gradient(tracked: int, keep_dtypes: bool) -> None:
    """DeepSpeed #8491: zero for one tensor and right for the next, without an error."""
    splits = (3, 1)
    inputs = ((4, 4, BF16), (4, 4, FP32), (2, 4, BF16))
    case = Case("one of three", splits, inputs, keep_dtypes=keep_dtypes)
    program = program_of(case)

    def step(group: dist.ProcessGroup) -> None:
        leaves = case.finite(group.rank(), splits)
        leaves[tracked].requires_grad_()
        expected = gradients(program, leaves, splits, group)
        assert [grad is not None for grad in expected] == [i == tracked for i in range(3)]
        actual = gradients(Compiled(program), leaves, splits, group)
        assert_all_same_bits(actual, expected, "gradient")
        grad = actual[tracked]
        assert grad is not None
        assert grad.abs().min() > 0.1

    simulate(2, step)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int16, torch.float16], ids=str
)
def test_dtypes_that_no_backend_knows_travel_as_bytes(dtype: torch.dtype) -> None:
    splits = (3, 2)

    def step(group: dist.ProcessGroup) -> None:
        tensors = [random_bits((splits[group.rank()], 4, 2), dtype, seed=i) for i in range(2)]
        expected = scatter_heads_gather_seqlen(tensors, splits, group)
        actual = Compiled(scatter_heads_gather_seqlen)(tensors, splits, group)
        assert_all_same_bits(actual, expected, "result")

    simulate(2, step)


def test_integers_travel_beside_tracked_tensors() -> None:
    splits = (3, 2)
    inputs = ((4, 4, FP32), (2, 1, torch.int64), (2, 4, BF16))
    case = Case("integers", splits, inputs, keep_dtypes=True)
    program = program_of(case)

    def step(group: dist.ProcessGroup) -> None:
        leaves = case.make(group.rank(), splits)
        expected = program(leaves, splits, group)
        leaves = [t if t.dtype == torch.int64 else t.requires_grad_() for t in leaves]
        compiled = Compiled(program)
        actual = compiled(leaves, splits, group)
        assert_all_same_bits(actual, expected, "result")
        assert [result.requires_grad for result in actual] == [True, False, True]
        (actual[0].sum() + actual[2].float().sum()).backward()
        assert (leaves[0].grad == 1).all()
        assert leaves[1].grad is None
        assert (leaves[2].grad == 1).all()

    simulate(2, step)


# One graph for every token count: split sizes that come as a tensor, tokens marked as unbacked.

ANY_LENGTH = [case for case in CASES if case.name not in ("promoted", "output")]
ORDERS = [
    [(7, 9), (0, 9), (1, 9), (9, 0), (1, 1), (0, 0)],
    [(0, 9), (7, 9), (1, 0)],
    [(1, 9), (5, 5), (0, 1)],
]


def check_one_graph(case: Case, order: Sequence[Sequence[int]], world_size: int) -> list[int]:
    """Run every split of `order` through one compiled function; return the compiles per rank."""
    program = program_of(case)

    def step(group: dist.ProcessGroup) -> int:
        compiled = Compiled(program)
        for splits in order:
            leaves = [t.requires_grad_() for t in case.finite(group.rank(), splits)]
            expected = program(leaves, splits, group)
            expected_gradients = gradients(program, leaves, splits, group)
            for leaf in leaves:
                leaf.grad = None  # it would be an input of the graph, of sizes of its own
            of_any_length(*leaves)
            actual = compiled(leaves, torch.tensor(splits), group)
            assert_all_same_bits(actual, expected, f"result for {splits},")
            actual_gradients = gradients(compiled, leaves, torch.tensor(splits), group)
            assert_all_same_bits(actual_gradients, expected_gradients, f"gradient for {splits},")
        return compiled.count

    with torch._dynamo.config.patch(error_on_recompile=True):
        return simulate(world_size, step).results


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(map(str, order[0])))
@pytest.mark.parametrize("name", ["3-D", "head shards", "output as head shards"])
def test_one_graph_serves_every_token_count_on_every_rank(
    name: str, order: list[tuple[int, int]]
) -> None:
    case = next(case for case in CASES if case.name == name)
    if case.world_size == 3:
        case = Case(name, (3, 5), ((6, 4, BF16),), outwards=True, form="head shards")
    assert check_one_graph(case, order, 2) == [1, 1]


@pytest.mark.parametrize("case", ANY_LENGTH, ids=str)
def test_one_graph_serves_every_split_of_every_form(case: Case) -> None:
    splits = case.splits
    moved = [splits, splits[::-1], (0,) * len(splits), (1,) * len(splits), (*splits[1:], 9)]
    assert check_one_graph(case, moved, case.world_size) == [1] * case.world_size


@pytest.mark.parametrize("name", ["3-D", "kept dtypes", "output"])
def test_wrong_sizes_are_an_error_before_anything_is_sent(name: str) -> None:
    """What only run time knows is checked there, by operators in front of the collective."""
    case = next(case for case in CASES if case.name == name)
    case = replace(case, splits=(3, 5))
    program = program_of(case)

    def step(group: dist.ProcessGroup) -> list[str]:
        compiled = Compiled(program)
        texts = []
        wrong = [(5, 4), (2, 2), (-3, 11)]  # on both ranks: neither must wait for the other
        for given in [(3, 5), *wrong]:
            tensors = case.finite(group.rank(), (3, 5))
            of_any_length(*tensors)
            try:
                compiled(tensors, torch.tensor(given), group)
                texts.append("")
            except (RuntimeError, ValueError) as error:
                texts.append(str(error))
        assert compiled.count == 1
        return texts

    simulation = simulate(2, step)
    assert len(calls_of(simulation)) == 1
    for good, *bad in simulation.results:
        assert good == ""
        assert all("split_sizes" in text or "ssertion failed" in text for text in bad), bad


def test_split_sizes_have_to_be_read_once() -> None:
    """Inductor cannot place several reads of them in one graph."""

    def step(group: dist.ProcessGroup) -> None:
        tensor, sizes = torch.zeros((3, 5)[group.rank()], 4, 4), torch.tensor([3, 5])
        with pytest.raises(RuntimeError, match=r"ulysses_comm\.read_split_sizes"):
            Compiled(head_scatter)(tensor, sizes, group)
        for wrong in (torch.tensor([3, 5, 1]), torch.tensor([3.0, 5.0])):
            with pytest.raises(ValueError, match="int64 of shape"):
                read_split_sizes(wrong, group)
        assert read_split_sizes(sizes, group, tokens=tensor.shape[0], seqlen=8) == [3, 5]
        with pytest.raises(ValueError, match=r"seqlen=9, but split_sizes=\[3, 5\]"):
            read_split_sizes(sizes, group, seqlen=9)

    simulate(2, step)


def test_bad_input_that_a_trace_can_see_says_what_was_expected() -> None:
    def program(tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return scatter_heads_gather_seqlen([tensor], [3, 5], group)[0]

    def step(group: dist.ProcessGroup) -> str:
        with pytest.raises(RuntimeError) as caught:
            Compiled(program)(torch.zeros(4, 8, 4), group)
        return str(caught.value)

    simulation = simulate(2, step)
    assert calls_of(simulation) == []
    assert "4 tokens: expected split_sizes[0]=3" in simulation.results[0]


def test_a_buffer_of_the_callers_own_is_refused() -> None:
    def program(tensor: torch.Tensor, out: torch.Tensor, group: Any) -> torch.Tensor:
        return scatter_seqlen_gather_heads(tensor, [3, 5], group, out=out)

    def step(group: dist.ProcessGroup) -> None:
        out = torch.zeros(8, 4, 4)
        with pytest.raises(RuntimeError, match="out cannot be used inside"):
            Compiled(program)(torch.zeros(8, 2, 4), out, group)

    simulate(2, step)


# Groups: a graph is right for one group alone.


def head_scatter(tensor: torch.Tensor, splits: list[int], group: Any) -> torch.Tensor:
    return scatter_heads_gather_seqlen([tensor], splits, group)[0].clone()


def test_each_group_gets_a_graph_of_its_own_and_new_groups_get_new_ones() -> None:
    """torch 2.13 would serve a second group with the first one's rank, size and name."""
    torch._dynamo.config.recompile_limit = 32  # restored by the fixture
    compiled = Compiled(head_scatter)
    tensor = torch.zeros(3, 12, 4)

    def heads(splits: list[int], group: Any) -> int:
        return compiled(tensor, splits, group).shape[1]

    assert heads([3], None) == 12, "torch.distributed is not initialised: a lone rank"
    with fake_world(1, 4):
        assert heads([1, 3, 2, 2], None) == 3, "now None is the default group"
        first, second = dist.new_group([0, 1]), dist.new_group([1, 2, 3])
        name = first.group_name
        assert heads([2, 3], first) == 6
        assert heads([3, 1, 1], second) == 4
        assert heads([2, 3], first) == 6
        assert heads([2, 3], DeviceMesh.from_group(first, "cpu")) == 6
        assert heads([3, 1, 1], DeviceMesh.from_group(second, "cpu")) == 4
        assert heads([3], LONE_RANK) == 12
    assert heads([3], None) == 12
    with fake_world(0, 3):
        again = dist.new_group([0, 1, 2])
        assert again.group_name == name, "another group under a name that was used before"
        assert heads([3, 1, 1], again) == 4
        assert heads([3, 1, 1], None) == 4


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Initialise torch.distributed as one rank of several that do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_ranks_of_a_simulated_world_do_not_share_graphs() -> None:
    """They share the process, the code, and the name of the default group."""
    compiled = torch.compile(head_scatter, backend="aot_eager", fullgraph=True)
    splits = [3, 2]

    def program() -> list[torch.Tensor]:
        tokens = splits[dist.get_rank()]
        tensor = torch.full((tokens, 4, 4), float(dist.get_rank())) + torch.arange(4.0)[:, None]
        return [compiled(tensor, splits, group) for group in (None, dist.group.WORLD)]

    for rank, results in enumerate(simulate_world(2, program).results):
        for result in results:
            assert result[:, :, 0].tolist() == [
                [2 * rank + 0.0, 2 * rank + 1.0] if token < 3 else [2 * rank + 1.0, 2 * rank + 2.0]
                for token in range(5)
            ]


# What a compiler may do to calls that look like pure functions: drop one, swap two, merge equals.


def hazards(tensor: torch.Tensor, splits: list[int], group: Any) -> list[torch.Tensor]:
    """Five exchanges of different row widths, so that the record tells them apart."""
    first = scatter_heads_gather_seqlen([tensor[..., :1] * 2], splits, group)[0]
    second = scatter_heads_gather_seqlen([tensor[..., :2] * 2], splits, group)[0]
    same = scatter_heads_gather_seqlen([tensor[..., :1] * 2], splits, group)[0]
    scatter_heads_gather_seqlen([tensor[..., :3].sin()], splits, group)  # nobody reads it
    last = scatter_heads_gather_seqlen([tensor[..., :4].cos()], splits, group)[0]
    return [first + same, last * 3, second]


def widths_sent(backend: str, dynamic: bool, tracked: bool) -> list[int]:
    """Return the row width of each collective that a compiled `hazards` comes to."""
    splits = [2, 3]

    def step(group: dist.ProcessGroup) -> None:
        compiled = Compiled(hazards, backend, dynamic)
        tensor = torch.ones(splits[group.rank()], 2, 4, requires_grad=tracked)
        results = compiled(tensor, splits, group)
        if tracked:
            sum(result.sum() for result in results).backward()

    # The simulator refuses ranks that do not agree on the order.
    return [call.send_shapes[0][-1] for call in calls_of(simulate(2, step))]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_every_exchange_takes_place_in_order(dynamic: bool) -> None:
    assert widths_sent("aot_eager", dynamic, tracked=False) == [1, 2, 1, 3, 4]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_with_gradients_equal_exchanges_are_one_on_every_rank(dynamic: bool) -> None:
    """torch merges equal nodes of graphs that have a backward; order and the rest are kept."""
    assert widths_sent("aot_eager", dynamic, tracked=True) == [1, 2, 3, 4, 4, 1, 2]


def checkpointed(x: torch.Tensor, splits: Any, group: Any) -> torch.Tensor:
    if isinstance(splits, torch.Tensor):
        splits = read_split_sizes(splits, group, tokens=x.shape[0])
    q = scatter_heads_gather_seqlen([x.sin()], splits, group)[0]
    return scatter_seqlen_gather_heads(q.cos(), splits, group).sin()


@pytest.mark.parametrize("any_length", [False, True])
def test_a_compiled_checkpoint_exchanges_again_and_keeps_the_gradients(any_length: bool) -> None:
    def program(x: torch.Tensor, splits: Any, group: Any) -> torch.Tensor:
        return checkpoint(checkpointed, x, splits, group, use_reentrant=False)

    def step(group: dist.ProcessGroup) -> None:
        x = torch.randn((3, 2)[group.rank()], 4, 2, requires_grad=True)
        (expected,) = torch.autograd.grad(loss_of([checkpointed(x, (3, 2), group)]), x)
        if any_length:
            of_any_length(x)
        splits = torch.tensor([3, 2]) if any_length else (3, 2)
        (actual,) = torch.autograd.grad(loss_of([Compiled(program)(x, splits, group)]), x)
        torch.testing.assert_close(actual, expected)

    assert len(calls_of(simulate(2, step, seed=0))) == 4 + 6


def test_differentiating_a_compiled_exchange_twice_is_refused() -> None:
    def program(x: torch.Tensor, group: Any) -> torch.Tensor:
        return scatter_heads_gather_seqlen([x.sin()], (3, 2), group)[0]

    def step(group: dist.ProcessGroup) -> None:
        x = torch.randn((3, 2)[group.rank()], 4, 2, requires_grad=True)
        result = Compiled(program)(x, group).sin().sum()
        (first,) = torch.autograd.grad(result, x, create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            first.sum().backward()

    simulate(2, step)


# The same between real processes.


def compiles_on_gloo(group: dist.ProcessGroup) -> int:
    """Run every length through one graph; return how often this rank compiled."""
    with fresh_compiler(error_on_recompile=True):
        case = CASES[0]
        program = program_of(case)
        compiled = Compiled(program)
        for splits in [(7, 9), (0, 9), (1, 9), (9, 0)]:
            leaves = [t.requires_grad_() for t in case.finite(group.rank(), splits)]
            expected = gradients(program, leaves, splits, group)
            for leaf in leaves:
                leaf.grad = None
            of_any_length(*leaves)
            actual = gradients(compiled, leaves, torch.tensor(splits), group)
            assert_all_same_bits(actual, expected, f"gradient for {splits},")
        return compiled.count


@pytest.mark.gloo
def test_real_ranks_compile_once_each() -> None:
    assert run_ranks(compiles_on_gloo, 2) == [1, 1]
