"""Head shards under torch.compile: one fused region stores in send order; pins leave one symbol.

Kernels are counted in the code that Inductor generates for the CPU. Everything compiles with
`fullgraph=True`. Most cases use a backend that only keeps the traced graph: Inductor is slow here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.symbolic_shapes import free_symbols

from tests import reference
from tests.bits import assert_same_bits
from tests.spy import SpyGroup
from ulysses_comm import (
    as_send_buffer,
    flatten_head_shards,
    pack_head_shards,
    pin_head_layout,
    scatter_heads_gather_seqlen,
)

WORLD, HEAD_DIM, WIDTH = 4, 16, 48
Q_HEADS, KV_HEADS = 8, 4


@pytest.fixture(autouse=True)
def nan_filled_empty() -> None:
    """Leave `torch.empty` alone here: filling it is one more kernel."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    # A cached result would come without its code.
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    torch._dynamo.reset()


class KeptGraphs:
    """A backend that keeps every graph it is given and runs it as it is."""

    def __init__(self) -> None:
        self.modules: list[torch.fx.GraphModule] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.modules.append(module)
        return module.forward

    def inputs(self, index: int = 0) -> list[Any]:
        """Return what the placeholders of a graph stand for: fake tensors and symbols."""
        return [
            node.meta["example_value"]
            for node in self.modules[index].graph.nodes
            if node.op == "placeholder"
        ]

    def symbolic_dims(self, index: int = 0) -> list[list[int]]:
        """For every tensor input that has any, the dimensions whose size is still a symbol."""
        dims = [
            [i for i, size in enumerate(value.shape) if free_symbols(size)]
            for value in self.inputs(index)
            if isinstance(value, torch.Tensor)
        ]
        return [found for found in dims if found]

    def symbols(self, index: int = 0) -> int:
        """Number of different symbols among the sizes of a graph's inputs."""
        return len({symbol for value in self.inputs(index) for symbol in free_symbols(value)})


class Projections(torch.nn.Module):
    """Q, K and V from one linear layer, normalised per head, in the layout asked for."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], *, packs: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.weight = torch.nn.Parameter(torch.rand(HEAD_DIM) + 0.5)
        self.requires_grad_(False)
        self.dtypes, self.packs = dtypes, packs

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = self.linear(x).unflatten(-1, (-1, HEAD_DIM)).split([Q_HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = (
            part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6) * self.weight
            for part in parts[:2]
        )
        tensors = [t.to(dtype) for t, dtype in zip((q, k, parts[2] * 2), self.dtypes, strict=True)]
        return pack_head_shards(tensors, WORLD) if self.packs else tensors


def both_projections(dtypes: tuple[torch.dtype, ...]) -> tuple[Projections, Projections]:
    """Return a module that returns plain tensors and its twin, of equal weights, that packs."""
    plain, packed = (Projections(dtypes, packs=packs) for packs in (False, True))
    packed.load_state_dict(plain.state_dict())
    return plain, packed


def kernel_calls(code: str) -> list[str]:
    """Return the names of the kernels that a generated wrapper calls, in order."""
    return re.findall(r"^ +(cpp_fused\w*|extern_kernels\.\w+)\(", code, re.MULTILINE)


def allocations(code: str) -> int:
    return len(re.findall(r"= empty_strided_cpu\(", code))


def kernel_size_arguments(code: str) -> list[int]:
    """Return for each generated kernel how many sizes it is given at run time."""
    signatures = re.findall(r'extern "C"\s+void\s+\w+\(([^)]*)\)', code)
    return [len(re.findall(r"const int64_t \w+", signature)) for signature in signatures]


def compiled_code(
    function: Callable[..., Any], *args: torch.Tensor, dynamic: bool
) -> tuple[Any, str, Callable[..., Any]]:
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    result, codes = run_and_get_code(compiled, *args)
    assert len(codes) == 1, f"{len(codes)} pieces of code instead of one region"
    return result, codes[0], compiled


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.bfloat16, torch.float32, torch.bfloat16)],
    ids=["float32", "bfloat16", "mixed"],
)
def test_projection_and_pack_are_one_fused_kernel_into_one_send_buffer(
    dtypes: tuple[torch.dtype, ...], dynamic: bool
) -> None:
    plain, packed = both_projections(dtypes)
    _, code, compiled = compiled_code(packed, torch.randn(5, WIDTH), dynamic=dynamic)
    # One matrix product and one fused kernel, which normalises, casts and packs.
    assert len(kernel_calls(code)) == 2, kernel_calls(code)

    for tokens in (5, 9) if dynamic else (5,):
        x = torch.randn(tokens, WIDTH)
        with torch._dynamo.config.patch(error_on_recompile=True):
            views = compiled(x)
        buffer = as_send_buffer(views, WORLD)
        assert buffer is not None
        assert buffer.shape == (WORLD, tokens, (Q_HEADS + 2 * KV_HEADS) // WORLD, HEAD_DIM)
        expected = reference.scatter_heads_send_buffer(plain(x), WORLD)
        # Sums in another order: float32 rounding, or one unit in the last place of bfloat16.
        tolerance = 1e-5 if dtypes[0] == torch.float32 else 0.01
        torch.testing.assert_close(buffer, expected, rtol=tolerance, atol=tolerance)

        group = SpyGroup(0, WORLD)
        scatter_heads_gather_seqlen(views, [tokens, 0, 1, 2], group)
        assert group.sent[0].address == views[0].data_ptr()


def test_packing_replaces_one_buffer_per_result_by_one_in_all() -> None:
    plain, packed = both_projections((torch.float32,) * 3)
    x = torch.randn(5, WIDTH)
    _, plain_code, _ = compiled_code(plain, x, dynamic=False)
    torch._dynamo.reset()
    _, code, _ = compiled_code(packed, x, dynamic=False)
    assert len(kernel_calls(code)) == len(kernel_calls(plain_code))
    assert allocations(code) == allocations(plain_code) - 2


def exact_producers(x: torch.Tensor) -> list[torch.Tensor]:
    """Three tensors by operations that do not round, so that bits can be compared."""
    return [x * 2, x[:, :WORLD].neg(), (x[:, WORLD:] * 0.5).abs()]


def pack_exact(x: torch.Tensor) -> list[torch.Tensor]:
    return pack_head_shards(exact_producers(x), WORLD)


def test_pack_is_one_concatenation_in_the_graph() -> None:
    graphs = KeptGraphs()
    compiled = torch.compile(pack_exact, backend=graphs, fullgraph=True, dynamic=True)
    for tokens in (5, 9, 2):
        x = torch.randn(tokens, 2 * WORLD, HEAD_DIM)
        for view, want in zip(compiled(x), pack_exact(x), strict=True):
            assert_same_bits(view, want, strides=True)
    (module,) = graphs.modules
    called = [str(node.target) for node in module.graph.nodes if node.op.startswith("call")]
    assert len([name for name in called if "cat" in name]) == 1, called
    assert not [name for name in called if "copy" in name or "clone" in name], called


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_compiled_pack_of_few_tokens_has_the_eager_bits(dynamic: bool, tokens: int) -> None:
    compiled = torch.compile(pack_exact, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    x = torch.randn(tokens, 2 * WORLD, HEAD_DIM)
    for view, want in zip(compiled(x), pack_exact(x), strict=True):
        assert_same_bits(view, want, strides=True)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_inductor_pack_has_the_eager_bits_in_one_kernel(dynamic: bool) -> None:
    x = torch.randn(5, 2 * WORLD, HEAD_DIM)
    views, code, _ = compiled_code(pack_exact, x, dynamic=dynamic)
    assert len(kernel_calls(code)) == 1, kernel_calls(code)
    assert allocations(code) == 1
    for view, want in zip(views, pack_exact(x), strict=True):
        assert_same_bits(view, want, strides=True)
    assert as_send_buffer(views, WORLD) is not None


def test_gradient_flows_through_a_compiled_pack() -> None:
    compiled = torch.compile(pack_exact, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 2 * WORLD, HEAD_DIM)
    grads = []
    for function in (pack_exact, compiled):
        leaf = x.clone().requires_grad_()
        sum(4**i * view.sum() for i, view in enumerate(function(leaf))).backward()
        grads.append(leaf.grad)
    assert grads[0].abs().min() > 0
    assert_same_bits(grads[1], grads[0])


# --- Pins. `Output` is what follows attention: gate, flatten, project.


class Output(torch.nn.Module):
    """Gated output projection of attention results, as `[T, H, D]` or as head shards.

    Without the projection nothing but the pin can tell the compiler how many channels there are.
    """

    def __init__(
        self, *, pinned: bool, shard_count: int | None = None, projects: bool = True
    ) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(Q_HEADS * HEAD_DIM, WIDTH, bias=False)
        self.requires_grad_(False)
        self.pinned, self.shard_count, self.projects = pinned, shard_count, projects

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pinned:
            pin_head_layout(x, Q_HEADS, HEAD_DIM, self.shard_count)
        flat = torch.sigmoid(x).flatten(1)
        return self.linear(flat) if self.projects else flat


def head_shards(tokens: int, shards: int) -> torch.Tensor:
    """A received `[T, W, H/W, D]` view, strides of the receive buffer."""
    return torch.randn(shards, tokens, Q_HEADS // shards, HEAD_DIM).transpose(0, 1)


def traced(module: torch.nn.Module, inputs: list[torch.Tensor]) -> KeptGraphs:
    """Compile with dynamic shapes, compare every input's result with eager, return the graphs."""
    graphs = KeptGraphs()
    compiled = torch.compile(module, backend=graphs, fullgraph=True, dynamic=True)
    for x in inputs:
        assert_same_bits(compiled(x), module(x))
    return graphs


every_use = pytest.mark.parametrize("projects", [True, False], ids=["projected", "gated"])


@every_use
def test_pin_leaves_only_the_token_count_symbolic_in_3d(projects: bool) -> None:
    inputs = [torch.randn(tokens, Q_HEADS, HEAD_DIM) for tokens in (5, 9, 3702)]
    graphs = traced(Output(pinned=True, projects=projects), inputs)
    assert len(graphs.modules) == 1, "one graph serves every token count"
    assert graphs.symbolic_dims() == [[0]]
    assert graphs.symbols() == 1


@every_use
def test_without_the_pin_heads_and_channels_stay_symbolic_in_3d(projects: bool) -> None:
    """The counterpart of the test above: what it asserts is the pin's doing."""
    inputs = [torch.randn(tokens, Q_HEADS, HEAD_DIM) for tokens in (5, 9)]
    graphs = traced(Output(pinned=False, projects=projects), inputs)
    assert graphs.symbolic_dims() == [[0, 1, 2]]
    assert graphs.symbols() == 3


@every_use
def test_pin_leaves_only_the_token_count_symbolic_in_4d(projects: bool) -> None:
    inputs = [head_shards(tokens, WORLD) for tokens in (5, 9, 3702)]
    graphs = traced(Output(pinned=True, shard_count=WORLD, projects=projects), inputs)
    assert len(graphs.modules) == 1, "one graph serves every token count"
    assert graphs.symbolic_dims() == [[0]]
    assert graphs.symbols() == 1


def test_without_the_shard_count_the_two_head_dimensions_stay_symbolic() -> None:
    """The product alone fixes head_dim, not how the heads are spread."""
    graphs = traced(Output(pinned=True), [head_shards(tokens, WORLD) for tokens in (5, 9)])
    assert 0 in graphs.symbolic_dims()[0]
    assert 3 not in graphs.symbolic_dims()[0]
    assert graphs.symbols() > 1
    unpinned = traced(Output(pinned=False), [head_shards(tokens, WORLD) for tokens in (5, 9)])
    assert unpinned.symbols() > 1


@pytest.mark.parametrize("shards", [2, 8, 1])
def test_other_shard_counts_take_the_path_that_is_not_pinned(shards: int) -> None:
    module = Output(pinned=True, shard_count=WORLD)
    graphs = traced(module, [head_shards(tokens, shards) for tokens in (5, 9)])
    assert len(graphs.modules) == 1
    assert 0 in graphs.symbolic_dims()[0]


def test_one_module_serves_matching_and_other_shard_counts_and_3d() -> None:
    module = Output(pinned=True, shard_count=WORLD)
    inputs = [
        head_shards(5, WORLD),
        head_shards(5, 2),
        torch.randn(5, Q_HEADS, HEAD_DIM),
        head_shards(9, WORLD),
        head_shards(9, 2),
        torch.randn(9, Q_HEADS, HEAD_DIM),
    ]
    graphs = traced(module, inputs)
    assert len(graphs.modules) == 3, "one graph for each layout, none for a token count"


@pytest.mark.parametrize("layout", ["3-D", "4-D"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_pinned_static_graph_is_the_unpinned_one(layout: str, tokens: int) -> None:
    """Under static compile the pin is a tautology: the graph has the same nodes."""
    x = torch.randn(tokens, Q_HEADS, HEAD_DIM) if layout == "3-D" else head_shards(tokens, WORLD)
    texts = []
    for pinned in (False, True):
        torch._dynamo.reset()
        graphs = KeptGraphs()
        module = Output(pinned=pinned, shard_count=WORLD)
        compiled = torch.compile(module, backend=graphs, fullgraph=True, dynamic=False)
        assert_same_bits(compiled(x), module(x))
        texts.append([f"{node.op} {node.target}" for node in graphs.modules[0].graph.nodes])
    assert texts[0] == texts[1]


def without_comments(code: str) -> str:
    return "\n".join(
        line for line in code.splitlines() if not line.lstrip().startswith(("#", "//"))
    )


def test_pin_does_not_change_static_code_and_frees_dynamic_code_of_sizes() -> None:
    """In generated code: static equal with and without; dynamic gets the token count alone."""
    module, unpinned = Output(pinned=True, shard_count=WORLD), Output(pinned=False)
    unpinned.load_state_dict(module.state_dict())
    x = torch.randn(5, Q_HEADS, HEAD_DIM)
    codes = {}
    for name, function, dynamic in (
        ("static", module, False),
        ("static unpinned", unpinned, False),
        ("dynamic", module, True),
        ("dynamic unpinned", unpinned, True),
    ):
        torch._dynamo.reset()
        result, codes[name], _ = compiled_code(function, x, dynamic=dynamic)
        torch.testing.assert_close(result, module(x))
    assert without_comments(codes["static"]) == without_comments(codes["static unpinned"])
    assert kernel_size_arguments(codes["static"]) == [0]
    assert kernel_size_arguments(codes["dynamic"]) == [1]
    assert kernel_size_arguments(codes["dynamic unpinned"]) > [1]
    assert len(kernel_calls(codes["dynamic"])) == len(kernel_calls(codes["static"]))


def test_pinned_head_shards_are_read_in_place_by_one_kernel() -> None:
    """Dynamic, 4-D: the kernel gets the token count alone and no symbolic division remains."""
    module = Output(pinned=True, shard_count=WORLD)
    x = head_shards(5, WORLD)
    result, code, compiled = compiled_code(module, x, dynamic=True)
    torch.testing.assert_close(result, module(x))
    assert kernel_size_arguments(code) == [1]
    # Sizes are known, so indices come from constants: nothing divides by a run-time size.
    assert not re.search(r"(div_floor_integer|c10::div_floor\w*|/|%)\s*\(?.*\bks\d", code), code
    with torch._dynamo.config.patch(error_on_recompile=True):
        other = head_shards(9, WORLD)
        torch.testing.assert_close(compiled(other), module(other))


def test_contradicting_pin_is_an_error_under_compile_too() -> None:
    module = Output(pinned=True)
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    with pytest.raises(Exception, match=r"."):
        compiled(torch.randn(5, Q_HEADS // 2, 2 * HEAD_DIM))


def test_flatten_of_head_shards_compiles_and_has_the_eager_bits() -> None:
    compiled = torch.compile(flatten_head_shards, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 9, 1, 0):
        x = head_shards(tokens, WORLD)
        assert_same_bits(compiled(x), flatten_head_shards(x))
