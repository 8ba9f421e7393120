"""The Triton kernels that route: every case in the interpreter, and with real kernels on a GPU."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from magi2.ops.fused_router import FORMS, RouterTile, route_tokens_triton
from magi2.ops.route_build import (
    RouteTile,
    build_routes_torch,
    build_routes_triton,
    number_experts,
)
from magi2.ops.routing import choose_experts_torch, router_logits_torch
from tests.magi2.compiled_code import compile_for_hopper
from tests.magi2.route_cases import CASES, assert_same_choice
from tests.magi2.triton_cases import BF16, SIGMOID, run_interpreted

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton: pip install --no-deps triton==3.6.0 adds it to a CPU build of torch",
)
FORM_TILES = [
    RouterTile(tokens=32),
    RouterTile(tokens=128, depth=64, num_warps=8, form="apart"),
]
TYPES = {
    "x": "*bf16",
    "parts": "*bf16",
    "bias": "*fp32",
    "logits": "*fp32",
    "choice": "*i32",
    "weights": "*fp32",
    "num_tokens": "i32",
    "token_stride": "i32",
    "head_stride": "i32",
    "route_scale": "fp32",
}


def types_of(kernel) -> dict[str, str]:
    return {name: kind for name, kind in TYPES.items() if name in kernel.arg_names}


@needs_triton
def test_every_case_is_right_in_the_interpreter():
    *right, errors = run_interpreted("tests.magi2.route_cases")
    assert right == list(CASES), errors


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_case_is_right_on_a_gpu(name):
    CASES[name]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [None, RouteTile(routes=128, scan=8192), RouteTile(routes=32)])
@pytest.mark.parametrize("sizes", [(3, 14808), (12, 3702)])
def test_routes_of_a_production_layer_on_a_gpu(sizes, tile):
    heads, tokens = sizes
    choice = torch.rand(heads, tokens, 256, device="cuda").pow(3).topk(6).indices
    choice[1, :3000] = torch.arange(6, device="cuda")  # as many routes as ever for a few experts
    built = build_routes_triton(choice, heads * 256, 128, tile=tile)
    expected = build_routes_torch(number_experts(choice, 256), heads * 256, 128)
    for name in ("slots", "block_expert", "padded_total"):
        assert torch.equal(getattr(built, name), getattr(expected, name)), name


@pytest.mark.gpu
@pytest.mark.parametrize("tile", FORM_TILES, ids=FORMS)
@pytest.mark.parametrize("tokens", [1, 129, 3702])
def test_router_of_a_production_layer_on_a_gpu(tokens, tile):
    settings = {**SIGMOID, "top_k": 6}
    x = torch.randn(tokens, 3, 256, device="cuda").bfloat16()
    gate = torch.randn(3, 256, 256, device="cuda") / 16
    bias = torch.randn(3, 256, device="cuda") * 0.02
    logits = router_logits_torch(x, gate)
    mine = route_tokens_triton(x, gate, bias, **settings, tile=tile)
    assert_same_choice(
        mine, choose_experts_torch(logits, bias, **settings), bias, logits, "sigmoid"
    )
    again = route_tokens_triton(x, gate, bias, **settings, tile=tile)
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", FORM_TILES, ids=FORMS)
def test_a_captured_graph_routes_other_tokens(tile, nan_filled_empty):
    torch.utils.deterministic.fill_uninitialized_memory = False
    gate, bias = torch.randn(2, 64, 64, device="cuda"), torch.zeros(2, 64, device="cuda")

    def route(x):
        choice, weights = route_tokens_triton(x, gate, bias, **SIGMOID, tile=tile)
        built = build_routes_triton(choice, 128, 64)
        return choice, weights, built.slots, built.block_expert, built.padded_total

    x, other = (torch.randn(300, 2, 64, device="cuda").to(BF16) for _ in range(2))
    route(x)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = route(x)
    x.copy_(other)
    graph.replay()
    for mine, fresh in zip(result, route(other), strict=True):
        assert torch.equal(mine, fresh)


def test_tiles_are_refused_that_no_kernel_takes():
    with pytest.raises(ValueError, match="expected one of"):
        RouterTile(tokens=32, form="split")
    for wrong in ({"routes": 48}, {"routes": 2048}, {"blocks": 0}, {"scan": 4}):
        with pytest.raises(ValueError, match="expected powers of two"):
            RouteTile(**wrong)


@needs_triton
def test_the_router_product_keeps_matrix_units_busy_on_hopper():
    from magi2.kernels.router_product import router_product_kernel

    sizes = {"HEADS": 3, "D": 256, "EXPERTS": 256, "BLOCK_T": 128, "BLOCK_E": 256}
    sizes |= {"BLOCK_K": 64, "INTERPRETED": False}
    types = types_of(router_product_kernel)
    assembly = compile_for_hopper(router_product_kernel, types, sizes, num_warps=8, num_stages=4)
    # Steps of 64 by instructions of 16; the loop's wait leaves the last step's product running.
    assert assembly.count("wgmma.mma_async") == 64 // 16
    assert "wgmma.wait_group.sync.aligned 1;" in assembly


@needs_triton
def test_a_warp_chooses_without_barriers_on_hopper():
    from magi2.kernels.router_choice import choose_from_logits_kernel

    types = types_of(choose_from_logits_kernel)
    sizes = {"HEADS": 3, "EXPERTS": 256, "TOP_K": 6, "BLOCK_T": 4, "BLOCK_E": 256, "BLOCK_C": 8}
    sizes |= {"SOFTMAX": False, "NORM": True}
    assembly = compile_for_hopper(choose_from_logits_kernel, types, sizes, num_warps=1)
    # A row's highest key, and its first expert, in an instruction of the warp each.
    assert assembly.count("redux.sync") == 4 * 6 * 2


# What each launch of the route build is given in a production layer.
BUILD_SIZES = {
    "rank_routes_kernel": {"HEADS": 3, "TOP_K": 6, "EXPERTS": 256, "BLOCK_E": 256}
    | {"TOKENS": 10, "ROUTES": 64},
    "scan_counts_kernel": {"ALL_EXPERTS": 768, "BLOCK_E": 8, "STEP": 512},
    "place_experts_kernel": {"ALL_EXPERTS": 768, "BLOCK_E": 1024, "BLOCK_ROWS": 128},
    "fill_slots_kernel": {"HEADS": 3, "TOP_K": 6, "EXPERTS": 256, "TOKENS": 10, "BLOCK_ROWS": 128}
    | {"BLOCKS": 32, "STEPS": 10, "PLACES": 512},
}


@needs_triton
@pytest.mark.parametrize("name", BUILD_SIZES)
def test_the_route_build_compiles_without_atomics(name):
    from magi2.kernels import route_build

    kernel = getattr(route_build, name)
    names = set(kernel.arg_names) - BUILD_SIZES[name].keys()
    buffers = {"choice", "ranks", "ledger", "padded_total", "slots", "block_expert"}
    types = {argument: "*i32" if argument in buffers else "i32" for argument in names}
    assembly = compile_for_hopper(kernel, types, BUILD_SIZES[name], num_warps=4)
    assert "st.global" in assembly
    assert not re.search(r"\b(atom|red)\.", assembly)
