"""Cases of the mixture's Triton kernels: on a GPU, or all of them in Triton's interpreter.

    python -m tests.magi2.triton_cases cuda

Each case is a function of a device that raises if a result is wrong.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch

from magi2.ops.backend import route_tokens, run_experts
from magi2.ops.expert_mlp import expert_mlp_torch
from magi2.ops.expert_tiles import ExpertTiles, FusedTile, ProductTile, choose_tiles
from magi2.ops.fused_experts import expert_mlp_triton, run_experts_triton, sum_routes_triton
from magi2.ops.token_permute import sum_routes_torch
from magi2.options import Options
from tests.magi2.golden import FOLDER, MODULE_RELATIVE_RMS, GoldenFile, rms_error
from tests.magi2.test_golden_modules import core_module
from tests.ranks import fill_empty_with_nan

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Case = Callable[[str], None]
CASES: dict[str, Case] = {}

# Norm of the difference over that of float64 without roundings: two roundings, and float32 sums.
FLOAT64_ERROR = {BF16: 4e-3, FP16: 5e-4, FP32: 2e-6}
# To the plain form, which rounds in the same places: only sums that fall on the other side differ.
TORCH_ERROR = {BF16: 1e-3, FP16: 2e-4, FP32: 2e-6}

SIGMOID = {"top_k": 3, "score_func": "sigmoid", "route_norm": True, "route_scale": 4.9}


def case(function: Case) -> Case:
    """Add a case under its name."""
    CASES[function.__name__] = function
    return function


def tiles(
    rows: int = 16, *, walk: int = 0, descriptors: bool = False, fused: bool = False
) -> ExpertTiles:
    """Small tiles, so that small cases have several of them in each direction."""
    if fused:
        inner = FusedTile(
            inner=32, num_warps=4, num_stages=2, programs_per_unit=walk, descriptors=descriptors
        )
        return ExpertTiles(block_rows=rows, fused=inner)
    one = ProductTile(
        columns=32,
        depth=32,
        num_warps=4,
        num_stages=2,
        group_blocks=2,
        programs_per_unit=walk,
        descriptors=descriptors,
    )
    return ExpertTiles(block_rows=rows, gate_up=one, down=one)


def all_tiles() -> Iterator[ExpertTiles]:
    for walk, descriptors, fused in product((0, 1), (False, True), (False, True)):
        yield tiles(walk=walk, descriptors=descriptors, fused=fused)


def expert_inputs(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Arguments of `expert_mlp_torch` for (tokens, heads, top_k, experts, head_dim, inner)."""
    tokens, heads, top_k, experts, dim, inner = sizes
    x = torch.randn(tokens, heads, dim)
    choice = torch.rand(heads, tokens, experts).argsort(-1)[..., :top_k]
    weights = torch.rand(heads, tokens, top_k)
    banks = [torch.randn(heads * experts, dim, inner) / dim**0.5 * 3 for _ in range(2)]
    banks.append(torch.randn(heads * experts, inner, dim) / inner**0.5)
    typed = [x.to(dtype), choice, weights, *(bank.to(dtype) for bank in banks)]
    return [tensor.to(device) for tensor in typed]


def head_major(run: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> torch.Tensor:
    """Routes of `run` numbered head after head, as an older layout had them, laid out as its own.

    Every token of every head is a token of one head that has all experts.
    """
    x, choice, weights, *banks = inputs
    heads, tokens, top_k = choice.shape
    first = torch.arange(heads, device=x.device)[:, None, None] * (banks[0].shape[0] // heads)
    rows = x.transpose(0, 1).reshape(heads * tokens, 1, x.shape[2])
    flat = [t.view(1, heads * tokens, top_k) for t in (choice + first, weights)]
    return run(rows, *flat, *banks).view(heads, tokens, top_k, x.shape[2]).transpose(0, 1)


def experts_oracle(x, choice, weights, gate, up, down) -> torch.Tensor:
    """Expert by expert in float64, nothing rounded."""
    heads, tokens, top_k = choice.shape
    first = torch.arange(heads, device=x.device)[:, None, None] * (gate.shape[0] // heads)
    expert = (choice + first).permute(1, 0, 2).flatten()
    rows = x.double().flatten(0, 1).repeat_interleave(top_k, dim=0)
    routes = torch.empty_like(rows)
    for number in expert.unique().tolist():
        mine = (expert == number).nonzero().squeeze(1)
        a = (rows[mine] @ gate[number].double()).clamp(max=7)
        b = (rows[mine] @ up[number].double()).clamp(-7, 7)
        routes[mine] = (a * torch.sigmoid(1.702 * a) * (b + 1)) @ down[number].double()
    routes = routes.view(tokens, heads, top_k, -1)
    return routes * weights.permute(1, 0, 2).double()[..., None]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN stays NaN."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def check_experts_case(inputs: list[torch.Tensor], cut: ExpertTiles) -> torch.Tensor:
    routes = expert_mlp_triton(*inputs, tiles=cut)
    plain, dtype = expert_mlp_torch(*inputs), inputs[0].dtype
    assert routes.dtype == dtype
    assert routes.shape == plain.shape
    if routes.numel():
        wide, near = error(routes, experts_oracle(*inputs)), error(routes, plain)
        assert wide < FLOAT64_ERROR[dtype], f"{wide:.1e} from float64, {cut}"
        assert near < TORCH_ERROR[dtype], f"{near:.1e} from the plain form, {cut}"
    return routes


@case
def experts_match_the_references_however_they_are_cut(device: str) -> None:
    # Neither width is a multiple of a tile, and there are blocks with empty slots.
    for dtype in (BF16, FP16, FP32):
        inputs = expert_inputs((13, 2, 2, 3, 40, 72), dtype, device)
        # The interpreter is slow, and takes the same way for every dtype but bfloat16.
        cuts = all_tiles() if dtype == BF16 or device != "cpu" else [tiles(walk=1)]
        for cut in cuts:
            check_experts_case(inputs, cut)


@case
def experts_match_the_references_at_awkward_sizes(device: str) -> None:
    for sizes in (
        (0, 3, 2, 4, 16, 32),
        (1, 1, 1, 1, 16, 16),
        (1, 3, 6, 8, 16, 24),
        (5, 1, 8, 8, 24, 40),
        (11, 1, 1, 20, 16, 16),  # most experts have nothing to do
        (3, 1, 3, 5, 256, 32),
    ):
        for dtype, fused in product((BF16, FP32), (False, True)):
            if device != "cpu" or (dtype == BF16) == fused:
                check_experts_case(expert_inputs(sizes, dtype, device), tiles(fused=fused))


@case
def experts_with_all_tokens_on_one_of_them(device: str) -> None:
    inputs = expert_inputs((50, 2, 1, 6, 16, 32), BF16, device)
    inputs[1].fill_(4)
    for fused in (False, True):
        check_experts_case(inputs, tiles(fused=fused))


@case
def experts_activate_before_they_round(device: str) -> None:
    x, choice, weights, gate, up, down = expert_inputs((40, 1, 1, 1, 32, 32), BF16, device)
    wide = x[:, 0].float()
    a, b = ((wide @ w[0].float()).bfloat16().float() for w in (gate, up))
    a, b = a.clamp(max=7), b.clamp(-7, 7)
    hidden = (a * torch.sigmoid(1.702 * a) * (b + 1)).bfloat16().float()
    early = (hidden @ down[0].float() * weights[0]).bfloat16()
    for fused in (False, True):
        routes = check_experts_case(
            [x, choice, weights, gate, up, down], tiles(fused=fused)
        ).flatten(1)
        plain = expert_mlp_torch(x, choice, weights, gate, up, down).flatten(1)
        assert error(routes, plain) < 0.2 * error(early, plain)


@case
def experts_read_a_slice_of_heads_as_it_lies(device: str) -> None:
    inputs = expert_inputs((13, 2, 2, 3, 32, 32), BF16, device)
    wider = torch.randn(13, 5, 32, device=device).bfloat16()
    wider[:, 1:3] = inputs[0]
    for fused in (False, True):
        dense = expert_mlp_triton(*inputs, tiles=tiles(fused=fused))
        sliced = expert_mlp_triton(wider[:, 1:3], *inputs[1:], tiles=tiles(fused=fused))
        assert torch.equal(dense, sliced)


@case
def bits_of_a_route_do_not_depend_on_its_block_or_batch(device: str) -> None:
    x, choice, weights, *banks = expert_inputs((35, 1, 2, 3, 32, 32), BF16, device)
    order = torch.randperm(35, device=device)
    for fused in (False, True):
        cut, walking = tiles(fused=fused), tiles(fused=fused, walk=1)
        routes = expert_mlp_triton(x, choice, weights, *banks, tiles=cut)
        again = expert_mlp_triton(x, choice, weights, *banks, tiles=walking)
        assert torch.equal(routes, again)
        shuffled = (x[order], choice[:, order], weights[:, order])
        assert torch.equal(expert_mlp_triton(*shuffled, *banks, tiles=cut), routes[order])
        few = (x[:5], choice[:, :5], weights[:, :5])
        assert torch.equal(expert_mlp_triton(*few, *banks, tiles=cut), routes[:5])


@case
def the_numbering_of_routes_changes_no_bit(device: str) -> None:
    few = [(1, 1, 2, 4, 64, 96), (17, 3, 2, 4, 64, 96)]
    many = [(129, 2, 6, 8, 256, 1280)]  # production widths: too slow for the interpreter
    for sizes, fused in product(few if device == "cpu" else few + many, (False, True)):
        inputs = expert_inputs(sizes, BF16, device)
        run = partial(expert_mlp_triton, tiles=tiles(fused=fused))
        routes = run(*inputs)
        assert routes.is_contiguous()
        assert torch.equal(routes, head_major(run, inputs))


@case
def tiles_of_every_table_match_the_references(device: str) -> None:
    musa, plain, fused = (
        choose_tiles(kind, BF16, fused=fused)
        for kind, fused in (("musa", False), ("cuda", False), ("cuda", True))
    )
    # Widths that are no multiple of a tile, with 16-byte rows, and whole tiles.
    for cut, (dim, inner) in ((musa, (72, 136)), (plain, (256, 192)), (fused, (72, 136))):
        check_experts_case(expert_inputs((21, 2, 2, 3, dim, inner), BF16, device), cut)


@case
def a_depth_repeats_its_bits_and_two_of_them_differ_by_roundings(device: str) -> None:
    inputs, routes = expert_inputs((21, 1, 2, 3, 256, 192), BF16, device), []
    table = choose_tiles("musa", BF16)
    for depth in (64, 32):
        gate_up, down = (dataclasses.replace(t, depth=depth) for t in (table.gate_up, table.down))
        cut = dataclasses.replace(table, gate_up=gate_up, down=down)
        routes.append(check_experts_case(inputs, cut))
        assert torch.equal(routes[-1], expert_mlp_triton(*inputs, tiles=cut))
    # Sums in another order: 2e-4 in the interpreter, where few results round to the other side.
    assert error(*routes) < 5e-4


@case
def a_nan_stays_in_its_token(device: str) -> None:
    inputs = expert_inputs((9, 2, 2, 3, 16, 32), BF16, device)
    inputs[0][4, 1, 3] = float("nan")
    for fused in (False, True):
        routes = expert_mlp_triton(*inputs, tiles=tiles(fused=fused))
        expected = torch.zeros_like(routes, dtype=torch.bool)
        expected[4, 1] = True
        assert torch.equal(routes.isnan(), expected)


@case
def sums_have_the_bits_of_the_plain_form(device: str) -> None:
    for tokens, heads, top_k, dim in ((0, 2, 2, 8), (1, 1, 1, 1), (33, 3, 3, 48), (2, 2, 8, 300)):
        choice = torch.rand(heads, tokens, 9, device=device).argsort(-1)[..., :top_k]
        for dtype in (BF16, FP16, FP32):
            routes = torch.randn(tokens, heads, top_k, dim, device=device).to(dtype)
            for order in ("choice", "expert"):
                narrow = choice.int() if dtype == FP32 else choice
                summed = sum_routes_triton(routes, narrow, order)
                assert torch.equal(summed, sum_routes_torch(routes, choice, order))


@case
def routed_experts_match_the_golden_files(device: str) -> None:
    files = [GoldenFile(path) for path in sorted(FOLDER.glob("*_moe_core*.safetensors"))]
    assert files
    for golden, (precision, route_sum) in product(files, (("fp32", "choice"), ("bf16", "expert"))):
        bf16 = precision == "bf16"
        options = Options(route_sum=route_sum, moe_backend="triton")
        module = core_module(golden, BF16 if bf16 else FP32, options).to(device)
        x = golden["in.x_bf16" if bf16 else "in.x"].unflatten(1, (golden.config["num_heads"], -1))
        with torch.no_grad():
            said = module.explain(x.to(device))
            assert said.startswith("triton: asked for; ")
            assert ", not hopper: " in said
            y = module(x.to(device)).flatten(1).cpu()
        name = "out.bf16.routed" if bf16 else "out.routed"
        golden.check(precision, name, y, None if bf16 else MODULE_RELATIVE_RMS)
        if bf16:
            assert rms_error(y, golden[name]) < 5e-3


@case
def default_tiles_and_the_sum_give_the_experts(device: str) -> None:
    for dtype in (BF16, FP32):
        inputs = expert_inputs((21, 1, 2, 3, 64, 64), dtype, device)
        for order in ("choice", "expert"):
            mine = run_experts_triton(*inputs, route_sum=order)
            plain = sum_routes_torch(expert_mlp_torch(*inputs), inputs[1], order)
            assert error(mine, plain) < TORCH_ERROR[dtype]


@case
def a_compiler_takes_the_mixture_whole(device: str) -> None:
    x, _, _, *banks = expert_inputs((12, 2, 2, 4, 16, 16), BF16, device)
    gate, bias = torch.randn(2, 4, 16, device=device), torch.zeros(2, 4, device=device)
    settings = {**SIGMOID, "top_k": 2}

    def mixture(x):
        choice, weights = route_tokens(x, gate, bias, "triton", **settings)
        return run_experts(x, choice, weights, tuple(banks), "choice", "triton") + 1

    with torch.no_grad():
        compiled = torch.compile(mixture, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), mixture(x))
    torch._dynamo.reset()


def run_interpreted(module: str = "tests.magi2.triton_cases") -> list[str]:
    """Run every case in a process where Triton interprets; the names of those that came right.

    Last come the errors. Another `module` is one with cases of its own and this file's `main`.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, "cpu"],
        cwd=Path(__file__).resolve().parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return [*done.stdout.splitlines(), done.stderr[-3000:]]


def main(cases: dict[str, Case]) -> None:
    """Run cases on the device that the command line names."""
    torch.set_num_threads(1)
    # Of float32 products on a GPU nothing may be lost to TF32 in what they are compared with.
    torch.backends.cuda.matmul.allow_tf32 = False
    fill_empty_with_nan()
    for name, function in cases.items():
        torch.manual_seed(0)
        function(sys.argv[1])
        print(name, flush=True)


if __name__ == "__main__":
    main(CASES)
