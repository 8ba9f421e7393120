"""A model that runs compiled regions: eager bits where nothing is fused, its own bits where it is.

Ranks are simulated and share what is compiled, as `compile_model` lets them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import free_symbols

from magi2 import presets
from magi2.compiling import RegionCompiler, compile_model, length_pattern
from magi2.config import Magi2Config
from magi2.regions import REGIONS, Regions, call_directly
from magi2.topology import Topology
from tests.magi2.live_memory import LiveMemory
from tests.magi2.packed import Packed, packed_pair
from tests.magi2.sharded import LAYOUTS, model_of
from ulysses_comm import as_send_buffer
from ulysses_comm.simulate import simulate

GRAPHS = 7  # attention-in of two kinds of layer, and each other region


@pytest.fixture(autouse=True)
def nan_filled_empty():
    """No filling: it would be part of what is traced."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def _few_iterations(monkeypatch):
    """Sinkhorn's loop is unrolled when traced; two rounds say what twenty do, sooner."""
    monkeypatch.setattr("magi2.modules.mhc.SINKHORN_ITERATIONS", 2)


def small(dtype: torch.dtype = torch.bfloat16) -> Magi2Config:
    """Two layers: three weight sets with the dense MLP, one set with the mixture."""
    config = presets.tiny_uneven(dtype)
    moe = dataclasses.replace(config.moe, layers=(1,))
    return dataclasses.replace(config, num_layers=2, multimodal_layers=(0,), moe=moe)


def on_ranks(
    config: Magi2Config,
    requests: Sequence[tuple[Packed, Sequence[int] | None]],
    compiler: RegionCompiler | None,
    world_size: int = 1,
    layout: str = "packed",
) -> list[list[torch.Tensor]]:
    """For each rank the results of all requests."""

    def step(group: Any) -> list[torch.Tensor]:
        topology = None if world_size == 1 else Topology.of_group(group)
        model = model_of(config, topology, LAYOUTS[layout])
        if compiler is not None:
            compile_model(
                model,
                dynamic=compiler.dynamic,
                deterministic=compiler.deterministic,
                backend=compiler.backend,
                compiler=compiler,
            )
        with torch.no_grad():
            return [model(*packed, splits) for packed, splits in requests]

    return [step(None)] if world_size == 1 else simulate(world_size, step).results


def assert_same_bits(actual, expected):
    for rank, (mine, its) in enumerate(zip(actual, expected, strict=True)):
        for request, (one, other) in enumerate(zip(mine, its, strict=True)):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32)), (rank, request)


@pytest.mark.usefixtures("_few_iterations")
def test_static_regions_have_eager_bits_and_serve_all_layers_of_a_kind():
    config = presets.tiny_uneven()
    compiler = RegionCompiler(dynamic=False, deterministic=True, backend="aot_eager")
    requests = [(packed_pair(config), None)]
    actual = on_ranks(config, requests, compiler)
    assert_same_bits(actual, on_ranks(config, requests, None))
    assert compiler.num_graphs == traced_graphs() == GRAPHS


def traced_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


LONG_GRID = [
    (world_size, layout, dynamic)
    for world_size in (2, 3, 6)
    for layout in ("packed", "flat", "packed in")
    for dynamic in (False, True)
]


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "layout", "dynamic"), LONG_GRID)
def test_regions_have_eager_bits_in_every_layout(world_size, layout, dynamic):
    config = presets.tiny_uneven()
    compiler = RegionCompiler(dynamic=dynamic, deterministic=True, backend="aot_eager")
    shares = {2: [31], 3: [1, 0], 6: [1, 0, 25, 9, 20]}[world_size]
    videos = [packed_pair(config, video=video) for video in [(2, 3, 4), (2, 4, 4)]]
    requests = [(video, [*shares, len(video.x) - sum(shares)]) for video in videos]
    actual = on_ranks(config, requests, compiler, world_size, layout)
    assert_same_bits(actual, on_ranks(config, requests, None, world_size, layout))


class Watched:
    """A backend that keeps the symbols in each graph's tensor inputs, and runs the graph."""

    def __init__(self) -> None:
        self.symbols: list[set[Any]] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        values = [
            node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"
        ]
        shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        self.symbols.append({s for shape in shapes for n in shape for s in free_symbols(n)})
        return module.forward


@pytest.mark.usefixtures("_few_iterations")
def test_dynamic_regions_serve_all_lengths_and_only_tokens_are_symbolic(monkeypatch):
    config, watched = presets.tiny_uneven(), Watched()
    compiler = RegionCompiler(dynamic=True, deterministic=True, backend=watched)
    requests = [  # one rank has no token
        (packed_pair(config), [0, 75]),
        (packed_pair(config, video=(3, 3, 4), audio=7), [0, 103]),
    ]
    actual = on_ranks(config, requests, compiler, world_size=2)
    assert_same_bits(actual, on_ranks(config, requests, None, world_size=2))
    assert compiler.num_graphs == traced_graphs() == GRAPHS
    assert [len(symbols) for symbols in watched.symbols] == [1] * GRAPHS

    monkeypatch.setattr("magi2.regions._pin", lambda *a: None)
    unpinned = Watched()
    compiler = RegionCompiler(dynamic=True, deterministic=True, backend=unpinned)
    monkeypatch.setattr(RegionCompiler, "__call__", only("adapter-in", RegionCompiler.__call__))
    on_ranks(config, requests[:1], compiler, world_size=2)
    assert len(unpinned.symbols[0]) > 1


def only(region: str, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Compile regions of this name; the others run as they are."""

    def call(compiler, name, function, module, order, *arguments):
        if name == region:
            return compiled(compiler, name, function, module, order, *arguments)
        return function(module, *arguments)

    return call


def test_a_compiled_region_stores_q_k_and_v_in_one_send_buffer():
    config = small()

    def step(group: Any) -> list[bool]:
        model, recognised = model_of(config, Topology.of_group(group), LAYOUTS["packed"]), []
        compile_model(model, dynamic=False, deterministic=True, backend="aot_eager")
        regions = Regions.of(model)
        compiled = regions.call

        def call(name, *arguments):
            if name != "attention-in":
                return call_directly(name, *arguments)
            result = compiled(name, *arguments)
            recognised.append(as_send_buffer(result[0], 2) is not None)
            return result

        regions.call = call
        with torch.no_grad():
            model(*packed_pair(config), [0, 75])
        return recognised

    assert simulate(2, step).results == [[True, True]] * 2


def test_regions_run_in_order_and_can_be_removed():
    config, seen = small(), []
    model, plain = model_of(config), model_of(config)
    packed = packed_pair(config)

    def call(name, function, module, order, *arguments):
        seen.append(name)
        return function(module, *arguments)

    regions = Regions(model, call)
    assert Regions.of(model) is regions
    with torch.no_grad():
        assert torch.equal(model(*packed), plain(*packed))
        dense, mixture = ["attention-in", "dense-out"], ["attention-in", "moe-in", "moe-out"]
        assert seen == ["adapter-in", *dense, *mixture, "adapter-out"]
        assert set(seen) == set(REGIONS)
        regions.remove()
        assert Regions.of(model) is None
        model(*packed)
    assert len(seen) == 7
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("moe_layers", [(), (0, 1)], ids=["dense", "mixture"])
def test_regions_take_little_more_memory_than_the_model_itself(moe_layers):
    config = presets.tiny_uneven()
    moe = dataclasses.replace(config.moe, layers=moe_layers)
    config = dataclasses.replace(config, num_layers=2, multimodal_layers=(0,), moe=moe)
    model, packed, peaks = model_of(config), packed_pair(config, video=(8, 8, 8), audio=30), []
    with torch.no_grad():
        plan = model.plan(packed.coords, packed.modality, packed.cu_seqlens)
        for _ in range(2):
            with LiveMemory() as memory:
                model.run(packed.x, plan, packed.time_tokens)
            peaks.append(memory.peak)
            Regions(model)
    # What a region is given lives to its end: two rows at most, gates and maps.
    streams, tokens = config.num_streams, len(packed.x)
    columns = 2 * config.hidden_size + config.num_heads + streams * (1 + streams)
    more = peaks[1] - peaks[0]
    assert more <= tokens * columns * config.dtype.itemsize


def test_a_compiler_of_other_settings_is_refused():
    compiler = RegionCompiler(dynamic=True, deterministic=True)
    with pytest.raises(ValueError, match="expected the same"):
        compile_model(model_of(small()), dynamic=False, deterministic=True, compiler=compiler)


@pytest.mark.parametrize(
    ("sizes", "pattern"),
    [
        ((9, 5, 7), (2, 3, 4)),
        ((5, 0, 5), (2, 0, 2)),
        ((5, 5, 1), (2, 2, 1)),
        ((0, 0, 2), (0, 0, 4)),
        ((1, 1, 1), (1, 1, 1)),
    ],
)
def test_lengths_that_a_compiler_takes_alike_have_one_pattern(sizes, pattern):
    assert length_pattern(sizes) == pattern


def recording(seen: list[bool]) -> Callable[..., None]:
    """A pass of Inductor that notes whether it compiles deterministically."""

    def note(graph: torch.fx.Graph) -> None:
        seen.append(torch._inductor.config.deterministic)

    return note


def test_inductor_is_told_to_be_deterministic_at_every_compile_and_repeats_its_bits(monkeypatch):
    monkeypatch.setattr(RegionCompiler, "__call__", only("moe-out", RegionCompiler.__call__))
    config, seen = small(), []
    requests = [(packed_pair(config, video=video), None) for video in [(2, 3, 4), (3, 3, 5)]]
    results = []
    with torch._inductor.config.patch(post_grad_custom_pre_pass=recording(seen)):
        for _ in range(2):
            torch._dynamo.reset()
            compiler = RegionCompiler(dynamic=False, deterministic=True)
            results.append(on_ranks(config, requests, compiler))
    assert_same_bits(*results)
    assert seen == [True] * 4
    eager = on_ranks(config, requests, None)[0][0]
    assert torch.linalg.vector_norm(results[0][0][0] - eager) < 2e-2 * eager.norm()


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("world_size", "videos"), [(1, [(2, 3, 4), (3, 3, 5)]), (2, [(2, 3, 4)])])
def test_inductor_repeats_its_bits_from_a_fresh_compile(world_size, videos, dynamic):
    config = small()
    requests = [(packed_pair(config, video=video), None) for video in videos]
    results = []
    for _ in range(2):
        torch._dynamo.reset()
        with torch._inductor.utils.fresh_cache():
            compiler = RegionCompiler(dynamic=dynamic, deterministic=True)
            results.append(on_ranks(config, requests, compiler, world_size))
    assert_same_bits(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_repeats_its_bits_on_a_gpu(dynamic):
    config = presets.tiny()
    packed, results = packed_pair(config, video=(4, 6, 8)).to("cuda"), []
    for _ in range(2):
        torch._dynamo.reset()
        with torch._inductor.utils.fresh_cache(), torch.no_grad():
            model = model_of(config).to("cuda")
            compile_model(model, dynamic=dynamic, deterministic=True)
            results.append([model(*packed) for _ in range(2)])
    assert_same_bits(*results)
    assert torch.equal(*results[0])
    with torch.no_grad():
        eager = model_of(config).to("cuda")(*packed)
    assert torch.linalg.vector_norm(results[0][0] - eager) < 5e-2 * eager.norm()
