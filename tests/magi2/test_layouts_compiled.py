"""The attention's two regions around its exchanges, traced and compiled, in both layouts.

The exchanges and the attention run eagerly between them on simulated ranks; what each rank fed to
a region is fed to the compiled region afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import free_symbols

from magi2 import presets
from magi2.modules.attention import Attention
from magi2.modules.request import RequestPlan
from magi2.topology import Topology
from tests.magi2.packed import packed_pair
from tests.magi2.sharded import LAYOUTS, model_of
from ulysses_comm import as_send_buffer
from ulysses_comm.simulate import simulate

MULTIMODAL, SINGLE = 0, 1  # layers with three weight sets and with one
SPLITS = {2: [0, 75], 4: [30, 0, 44, 1], 8: [20, 1, 0, 30, 0, 4, 20, 0]}


@pytest.fixture(autouse=True)
def nan_filled_empty():
    """No filling: it would be part of what is traced."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@dataclass
class Regions:
    """What went through one rank's two regions."""

    attention: Attention
    plan: RequestPlan
    rows: torch.Tensor
    qkv: list[torch.Tensor]
    gate: torch.Tensor
    received: torch.Tensor
    result: torch.Tensor


def run_eagerly(world_size: int, layer: int, dtype: torch.dtype, layout: str) -> list[Regions]:
    config = presets.tiny(dtype)
    packed = packed_pair(config)
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(len(packed.x), config.hidden_size, generator=generator).to(dtype)

    def step(group):
        model = model_of(config, Topology.of_group(group), LAYOUTS[layout])
        plan = model.plan(packed.coords, packed.modality, packed.cu_seqlens, SPLITS[world_size])
        attention = model.block.layers[layer].attention
        rows = plan.order.group(plan.sequence.shard(whole))
        qkv, gate = attention.project(rows, plan)
        out = attention.attend(*plan.sequence.scatter_heads(qkv), plan)
        if attention.output_head_shards:
            received = plan.sequence.gather_head_shards(out)
        else:
            received = plan.sequence.gather_heads(out)
        result = attention.output(received, gate, plan)
        return Regions(attention, plan, rows, qkv, gate, received, result)

    with torch.no_grad():
        return simulate(world_size, step).results


def compiled(rank: Regions, **options: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Queries, keys and values, and the branch's output, from compiled regions."""
    with torch.no_grad():
        project = torch.compile(rank.attention.project, fullgraph=True, **options)
        output = torch.compile(rank.attention.output, fullgraph=True, **options)
        return project(rank.rows, rank.plan)[0], output(rank.received, rank.gate, rank.plan)


def flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.flatten(1, 2) if t.dim() == 4 else t for t in tensors]


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    words = torch.int32 if actual.dtype == torch.float32 else torch.int16
    assert torch.equal(actual.contiguous().view(words), expected.contiguous().view(words))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [MULTIMODAL, SINGLE])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_layouts_have_the_same_bits_and_packed_ones_tile_the_send_buffer(world_size, layer, dtype):
    packed, plain = (run_eagerly(world_size, layer, dtype, name) for name in ("packed", "flat"))
    for one, other in zip(packed, plain, strict=True):
        assert as_send_buffer(one.qkv, world_size) is not None
        for shards, whole in zip(flat(one.qkv), other.qkv, strict=True):
            assert_same_bits(shards, whole)
        assert_same_bits(flat([one.received])[0], other.received)
        assert_same_bits(one.result, other.result)


GRID = list(product([2, 4, 8], [MULTIMODAL, SINGLE], [torch.float32, torch.bfloat16]))
EVERY_DAY = [(4, MULTIMODAL, torch.bfloat16), (8, SINGLE, torch.float32)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["packed", "flat"])
@pytest.mark.parametrize(
    ("world_size", "layer", "dtype"),
    [pytest.param(*case, marks=[] if case in EVERY_DAY else [pytest.mark.long]) for case in GRID],
)
def test_traced_regions_equal_eager_ones(world_size, layer, dtype, layout, dynamic):
    # The rank with the most tokens; in the larger world one without any, too.
    ranks, sizes = run_eagerly(world_size, layer, dtype, layout), SPLITS[world_size]
    for number in [sizes.index(max(sizes)), 2][: 2 if world_size == 8 else 1]:
        rank = ranks[number]
        qkv, result = compiled(rank, backend="aot_eager", dynamic=dynamic)
        for actual, expected in zip(qkv, rank.qkv, strict=True):
            assert actual.shape == expected.shape
            assert_same_bits(actual, expected)
        if layout == "packed" and rank.rows.shape[0]:
            assert as_send_buffer(qkv, world_size) is not None
        assert_same_bits(result, rank.result)


class Traced:
    """A backend that keeps the shapes of each graph's inputs by name, and runs the graph."""

    def __init__(self) -> None:
        self.shapes: list[dict[str, torch.Size]] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        values = {
            node.name: node.meta["example_value"]
            for node in module.graph.nodes
            if node.op == "placeholder"
        }
        tensors = {name: v.shape for name, v in values.items() if isinstance(v, torch.Tensor)}
        self.shapes.append(tensors)
        return module.forward

    def symbols(self) -> set[Any]:
        """Of the one graph's inputs."""
        (shapes,) = self.shapes
        return {symbol for shape in shapes.values() for n in shape for symbol in free_symbols(n)}


@pytest.mark.parametrize("layer", [MULTIMODAL, SINGLE])
@pytest.mark.parametrize("layout", ["packed", "flat"])
def test_one_graph_serves_every_length_and_only_tokens_are_symbolic(layer, layout, monkeypatch):
    ranks, traced = run_eagerly(4, layer, torch.bfloat16, layout), Traced()
    output = torch.compile(Attention.output, fullgraph=True, dynamic=True, backend=traced)
    with torch.no_grad():
        for rank in (ranks[0], ranks[2]):
            result = output(rank.attention, rank.received, rank.gate, rank.plan)
            assert_same_bits(result, rank.result)
        assert len(traced.symbols()) == 1
        torch._dynamo.reset()
        monkeypatch.setattr("magi2.modules.attention.pin_head_layout", lambda *a: None)
        unpinned = Traced()
        output = torch.compile(Attention.output, fullgraph=True, dynamic=True, backend=unpinned)
        output(ranks[0].attention, ranks[0].received, ranks[0].gate, ranks[0].plan)
    assert len(unpinned.symbols()) > 1


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_shards_of_another_group_compile_and_agree(shards):
    rank, traced = run_eagerly(4, SINGLE, torch.bfloat16, "packed")[0], Traced()
    heads = rank.attention.num_heads // shards
    received = rank.received.reshape(-1, shards, heads, rank.attention.head_dim)
    output = torch.compile(Attention.output, fullgraph=True, dynamic=True, backend=traced)
    with torch.no_grad():
        result = output(rank.attention, received, rank.gate, rank.plan)
    assert_same_bits(result, rank.result)


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("world_size", "layer", "dtype"), GRID)
def test_compiled_layouts_have_the_same_bits(world_size, layer, dtype, dynamic):
    busiest = SPLITS[world_size].index(max(SPLITS[world_size]))
    packed, plain = (
        run_eagerly(world_size, layer, dtype, name)[busiest] for name in ("packed", "flat")
    )
    options = {"dynamic": dynamic, "options": {"deterministic": True}}
    (qkv, result), (qkv_flat, result_flat) = (compiled(r, **options) for r in (packed, plain))
    assert as_send_buffer(qkv, world_size) is not None
    for shards, whole in zip(flat(qkv), qkv_flat, strict=True):
        assert_same_bits(shards, whole)
    assert_same_bits(result, result_flat)
