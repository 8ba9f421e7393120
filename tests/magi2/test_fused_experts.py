"""The mixture's Triton kernels: every case in the interpreter, and with real kernels on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from magi2.ops.expert_mlp import expert_mlp_torch
from magi2.ops.expert_tiles import ExpertTiles, FusedTile, ProductTile, choose_tiles
from magi2.ops.fused_experts import check_experts, expert_mlp_triton
from magi2.ops.route_build import build_routes_torch, build_routes_triton, number_experts
from tests.magi2.triton_cases import (
    BF16,
    CASES,
    FLOAT64_ERROR,
    error,
    expert_inputs,
    run_interpreted,
)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton: pip install --no-deps triton==3.6.0 adds it to a CPU build of torch",
)


@needs_triton
def test_every_case_is_right_in_the_interpreter():
    *right, errors = run_interpreted()
    assert right == list(CASES), errors


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_case_is_right_on_a_gpu(name):
    CASES[name]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 129, 3000])
def test_production_widths_on_a_gpu(tokens):
    inputs = expert_inputs((tokens, 3, 6, 64, 256, 1280), BF16, "cuda")
    routes = expert_mlp_triton(*inputs)
    assert error(routes, expert_mlp_torch(*inputs)) < 1e-3
    assert torch.equal(routes, expert_mlp_triton(*inputs))


@pytest.mark.gpu
def test_routes_of_a_production_layer_on_a_gpu():
    choice = torch.rand(3, 14808, 256, device="cuda").pow(3).topk(6).indices
    built = build_routes_triton(choice, 768, 128)
    expected = build_routes_torch(number_experts(choice, 256), 768, 128)
    for name in ("slots", "block_expert", "padded_total"):
        assert torch.equal(getattr(built, name), getattr(expected, name)), name


@pytest.mark.gpu
def test_a_captured_graph_replays_another_routing(nan_filled_empty):
    torch.utils.deterministic.fill_uninitialized_memory = False
    inputs = expert_inputs((300, 3, 6, 32, 64, 128), BF16, "cuda")
    expert_mlp_triton(*inputs)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routes = expert_mlp_triton(*inputs)
    other = expert_inputs((300, 3, 6, 32, 64, 128), BF16, "cuda")
    for static, fresh in zip(inputs, other, strict=True):
        static.copy_(fresh)
    graph.replay()
    assert torch.equal(routes, expert_mlp_triton(*other))


@pytest.mark.gpu
@pytest.mark.long
def test_offsets_beyond_two_to_the_31_on_a_gpu():
    tokens = 2**31 // (2 * 1280) + 4000  # routes of 1280 inner channels
    inputs = expert_inputs((tokens, 1, 2, 2, 16, 1280), BF16, "cuda")
    routes = expert_mlp_triton(*inputs)[-100:]
    last = [inputs[0][-100:], inputs[1][:, -100:], inputs[2][:, -100:], *inputs[3:]]
    assert error(routes, expert_mlp_torch(*last)) < FLOAT64_ERROR[BF16]


def test_refuses_what_does_not_fit():
    x, choice, weights, gate, up, down = expert_inputs((5, 2, 2, 3, 8, 12), BF16, "cpu")
    check_experts(x, choice, weights, gate, up, down)
    wrong = [
        ((x.double(), choice, weights, gate, up, down), "x is torch.float64"),
        ((x[0], choice, weights, gate, up, down), "expected \\(T, H, D\\)"),
        ((x, choice[:, :4], weights, gate, up, down), "choice is \\[2, 4, 2\\]"),
        ((x, choice, weights[..., :1], gate, up, down), "weights is \\[2, 5, 1\\]"),
        ((x, choice, weights, gate[..., :4], up, down), "w_gate is .* with strides"),
        ((x, choice, weights, gate, up[:, :4], down), "w_up is \\[6, 4, 12\\]"),
        ((x, choice, weights, gate, up, down.transpose(1, 2)), "w_down is"),
        ((x, choice, weights, gate, up.float(), down), "w_up is torch.float32"),
        ((x, choice, weights, gate, up, down.to("meta")), "w_down is on meta"),
        ((x, choice, weights.double(), gate, up, down), "weights are torch.float64"),
        ((x, choice.short(), weights, gate, up, down), "choice is torch.int16"),
        ((x, choice, weights, gate[:5], up[:5], down[:5]), "5 experts for 2 heads"),
        (
            (x.transpose(0, 2).contiguous().transpose(0, 2), choice, weights, gate, up, down),
            "adjac",
        ),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            check_experts(*arguments)


def test_tiles_are_whole_and_of_one_form():
    product = ProductTile(columns=64, depth=64, num_warps=4, num_stages=3)
    fused = FusedTile(inner=32, num_warps=8, num_stages=3)
    with pytest.raises(ValueError, match="expected both products"):
        ExpertTiles(block_rows=64, gate_up=product)
    with pytest.raises(ValueError, match="expected both products"):
        ExpertTiles(block_rows=64, gate_up=product, down=product, fused=fused)
    with pytest.raises(ValueError, match=r"tile sizes \[48\]"):
        ExpertTiles(block_rows=48, fused=fused)


def test_every_device_has_tiles_that_the_oldest_triton_can_build():
    for kind in ("cpu", "cuda", "musa"):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for mean in (0.1, 87.0, 347.0):
                chosen = choose_tiles(kind, dtype, mean)
                if kind != "cuda":
                    parts = (chosen.gate_up, chosen.down, chosen.fused)
                    assert not any(part.descriptors for part in parts if part)
                if kind == "musa" and dtype != torch.float32:
                    assert chosen.gate_up.depth == chosen.down.depth == 64
