"""The mixture's Triton kernels: every case in the interpreter, and with real kernels on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from magi2.ops import expert_launches
from magi2.ops.expert_launches import best_tiles, explain_tiles, hopper_obstacle
from magi2.ops.expert_mlp import expert_mlp_torch
from magi2.ops.expert_tiles import ExpertTiles, FusedTile, HopperTile, ProductTile, choose_tiles
from magi2.ops.fused_experts import check_experts, expert_mlp_triton
from tests.magi2.triton_cases import (
    BF16,
    CASES,
    FLOAT64_ERROR,
    check_experts_case,
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


HOPPER = [HopperTile(slots=5), HopperTile(slots=3)]


@pytest.mark.gpu
@pytest.mark.parametrize("hopper", HOPPER, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 256, 64),
        (1, 3, 6, 8, 256, 1280),
        (40, 1, 1, 64, 256, 192),
        (70, 2, 2, 3, 256, 64),
        (2000, 3, 6, 8, 256, 1280),
    ],
)
def test_hopper_form_matches_the_references(sizes, dtype, hopper):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a GPU of compute capability 9")
    inputs = expert_inputs(sizes, dtype, "cuda")
    cut = ExpertTiles(block_rows=128, hopper=hopper)
    routes = check_experts_case(inputs, cut)
    x, choice, weights, *banks = inputs
    order = torch.randperm(sizes[0], device="cuda")
    shuffled = (x[order], choice[:, order], weights[:, order])
    assert torch.equal(expert_mlp_triton(*shuffled, *banks, tiles=cut), routes[order])
    wider = torch.randn(sizes[0], sizes[1] + 2, sizes[4], device="cuda").to(dtype)
    wider[:, 1:-1] = x
    sliced = (wider[:, 1:-1], choice, weights)
    assert torch.equal(expert_mlp_triton(*sliced, *banks, tiles=cut), routes)


@pytest.mark.gpu
def test_hopper_form_keeps_a_nan_in_its_token():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a GPU of compute capability 9")
    inputs = expert_inputs((300, 2, 2, 3, 256, 128), BF16, "cuda")
    inputs[1].fill_(1)  # more rows than a block has, all for one expert
    inputs[0][4, 1, 3] = float("nan")
    routes = expert_mlp_triton(*inputs, tiles=ExpertTiles(block_rows=128, hopper=HOPPER[0]))
    assert routes[4, 1].isnan().all()
    routes[4, 1] = 0.0
    assert not routes.isnan().any()


@pytest.mark.parametrize("hopper", HOPPER, ids=str)
def test_hopper_form_compiles_with_running_products_and_fits_the_shared_memory(hopper):
    pytest.importorskip("triton.experimental.gluon", reason="needs triton 3.6")
    assembly, shared = compile_hopper(hopper)
    # In steps of 16: the products with gate and up start a block, run in its loop and end there;
    # those with down run in the loop and behind it. All of it for both groups.
    assert assembly.count("wgmma.mma_async") == 2 * (2 * 256 // 16 + 2 * 64 // 16)
    assert assembly.count("st.local") == 0
    assert shared <= 232448


def compile_hopper(hopper: HopperTile) -> tuple[str, int]:
    """Assembly and shared memory of the kernel at production widths; needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from magi2.kernels.hopper_experts import hopper_experts_kernel as kernel

    def descriptor(*block: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)
        return f"tensordesc<bf16[{block[0]}, {block[1]}],{layout!r}>"

    wide = descriptor(128, 64)
    types = dict.fromkeys(("slots", "block_expert", "padded_total", "cursor"), "*i32")
    types |= dict.fromkeys(("num_routes", "token_stride", "head_stride"), "i32")
    types |= {"x": "*bf16", "out": "*bf16", "weights": "*fp32", "w_gate": wide, "w_up": wide}
    types["w_down"] = descriptor(64, 256)
    constants = {"HEADS": 3, "TOP_K": 6, "F": 1280, "SLOTS": hopper.slots}
    names = kernel.arg_names
    aligned = [n for n, kind in types.items() if kind.startswith("*") or n.endswith("stride")]
    source = GluonASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": 4, "maxnreg": 168}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return built.asm["ptx"], built.metadata.shared


def test_hopper_form_says_what_it_needs():
    x = torch.randn(3, 1, 64).bfloat16()
    assert "compute capability 9" in str(hopper_obstacle(x, 64))
    with pytest.raises(ValueError, match="block_rows=64: expected 128"):
        ExpertTiles(block_rows=64, hopper=HOPPER[0])


def test_says_which_form_runs_and_why_not_the_hopper_form(monkeypatch):
    wide = torch.randn(3, 2, 260).bfloat16()
    x, misaligned = wide[..., :256].contiguous(), wide[..., 1:257]
    assert explain_tiles(x, 1280).startswith("two products, not hopper: x is on cpu: expected")
    monkeypatch.setattr(expert_launches, "is_hopper", lambda device: True)
    for version, given, inner, said in (
        ("3.6", x, 1280, "hopper"),
        ("3.7", x, 1280, "fused, not hopper: Triton is 3.7: expected one of"),
        ("3.6", misaligned, 1280, "fused, not hopper: x has strides (520, 260, 1): expected rows"),
        ("3.6", x, 1200, "fused, not hopper: head_dim=256 and inner=1200"),
        ("3.6", x.float(), 1280, "two products, not hopper: x is torch.float32"),
        ("3.6", x.repeat(1, 1, 2), 1280, "two products, not hopper: head_dim=512"),
    ):
        monkeypatch.setattr(expert_launches, "_triton_version", lambda version=version: version)
        text = explain_tiles(given, inner)
        assert text == said if said == "hopper" else text.startswith(said)


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
            chosen = choose_tiles(kind, dtype)
            parts = (chosen.gate_up, chosen.down, chosen.fused)
            assert not any(part.descriptors for part in parts if part)
            assert chosen.hopper is None
            if kind == "musa" and dtype != torch.float32:
                assert chosen.gate_up.depth == chosen.down.depth == 64
    assert choose_tiles("cuda", torch.bfloat16, hopper=True).hopper is not None
    assert best_tiles(torch.randn(3, 1, 256), 1280) == choose_tiles("cpu", torch.float32)
