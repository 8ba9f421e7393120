"""Cases of the mixture's Triton kernels: on a GPU, or all of them in Triton's interpreter.

    python -m tests.magi2.triton_cases cuda

Each case is a function of a device that raises if a result is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch

from magi2.ops.backend import route_tokens, run_experts
from magi2.ops.expert_mlp import expert_mlp_torch
from magi2.ops.expert_tiles import ExpertTiles, FusedTile, ProductTile
from magi2.ops.fused_experts import expert_mlp_triton, run_experts_triton, sum_routes_triton
from magi2.ops.fused_router import (
    FORMS,
    RouterTile,
    choose_experts_triton,
    route_tokens_triton,
)
from magi2.ops.route_build import (
    BlockRoutes,
    RouteTile,
    build_routes_torch,
    build_routes_triton,
    empty_block_routes,
    number_experts,
)
from magi2.ops.routing import choose_experts_torch, router_logits_torch
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


def histogram_routes(expert: torch.Tensor, num_experts: int, block: int) -> BlockRoutes:
    """The layout that `build_routes_torch` promises, one route at a time."""
    out = empty_block_routes(expert.numel(), num_experts, block, "cpu")
    lists: list[list[int]] = [[] for _ in range(num_experts)]
    for route, owner in enumerate(expert.flatten().tolist()):
        lists[owner].append(route)
    slots, blocks = [], []
    for owner, routes in enumerate(lists):
        count = -(-len(routes) // block)
        slots += routes + [expert.numel()] * (count * block - len(routes))
        blocks += [owner] * count
    out.padded_total.fill_(len(slots))
    out.slots.copy_(torch.tensor(slots + [expert.numel()] * (out.slots.numel() - len(slots))))
    out.block_expert.copy_(torch.tensor(blocks + [num_experts] * (out.num_blocks - len(blocks))))
    return out


def assert_same_routes(actual: BlockRoutes, expected: BlockRoutes) -> None:
    for name in ("slots", "block_expert", "padded_total"):
        mine, theirs = getattr(actual, name), getattr(expected, name)
        assert mine.dtype == torch.int32, name
        assert torch.equal(mine.cpu(), theirs), name
    assert (actual.block_rows, actual.num_routes) == (expected.block_rows, expected.num_routes)


def junk_routes(like: BlockRoutes, device: str) -> BlockRoutes:
    sizes = (like.slots.numel(), like.num_blocks, 1)
    slots, blocks, total = (
        torch.full((size,), -7, dtype=torch.int32, device=device) for size in sizes
    )
    return BlockRoutes(
        slots=slots,
        block_expert=blocks,
        padded_total=total,
        block_rows=like.block_rows,
        num_routes=like.num_routes,
    )


# Chunks, steps of the scan and programs end in other places than by default, or all within one.
ROUTE_TILES = (
    None,
    RouteTile(routes=16, scan=512, scan_experts=8, blocks=4, places=16),
    RouteTile(routes=128, scan=1024, scan_experts=16, scan_warps=4, place_warps=4, blocks=1),
)


@case
def routes_are_counted_as_they_are_sorted(device: str) -> None:
    for heads, tokens, top_k, experts, block in (
        (2, 0, 2, 4, 16),
        (1, 1, 1, 1, 16),
        (3, 1, 6, 8, 16),
        (2, 129, 2, 5, 16),
        (3, 70, 6, 40, 32),
        (1, 40, 8, 8, 128),  # every token takes every expert
        (2, 11, 7, 300, 16),  # most experts have nothing to do
    ):
        choice = torch.rand(heads, tokens, experts).argsort(-1)[..., :top_k]
        if tokens == 70:
            choice[1] = torch.arange(top_k)  # a head whose tokens agree
        # The interpreter is slow, and chunks are as many as the routes of a head.
        for tile in ROUTE_TILES[: 3 if choice[0].numel() < 50 or device != "cpu" else 1]:
            check_built_routes(choice, experts, block, tile, device)


def check_built_routes(
    choice: torch.Tensor, experts: int, block: int, tile: RouteTile | None, device: str
) -> None:
    """Against the histogram: into fresh buffers, and into longer ones that hold junk."""
    num_experts = choice.shape[0] * experts
    expected = histogram_routes(number_experts(choice, experts), num_experts, block)
    on_device = choice.to(device)
    built = build_routes_triton(on_device, num_experts, block, tile=tile)
    assert_same_routes(built, expected)
    # What a router gives: int32 in the order tokens, heads, choices.
    given = on_device.permute(1, 0, 2).int().contiguous().permute(1, 0, 2)
    junk = junk_routes(expected, device)
    assert build_routes_triton(given, num_experts, block, junk, tile=tile) is junk
    assert_same_routes(junk, expected)
    sorted_ = build_routes_torch(number_experts(on_device, experts), num_experts, block)
    assert_same_routes(sorted_, expected)


@case
def routes_of_one_expert_at_every_number_of_choices(device: str) -> None:
    for top_k in range(1, 9):
        choice = torch.rand(2, 45, 9).argsort(-1)[..., :top_k]
        choice[..., 0] = 4
        # A routing may name an expert twice, though a router does not.
        choice[0] = 4 if top_k in (1, 5) else choice[0]
        check_built_routes(choice, 9, 16, ROUTE_TILES[top_k % 3], device)


@case
def longer_buffers_of_routes_are_filled_to_their_end(device: str) -> None:
    for tokens in (0, 3):
        like = empty_block_routes(tokens, 5, 4, device)
        sizes = {"block_rows": 4, "num_routes": tokens}
        junk = [torch.full((n,), -7, dtype=torch.int32, device=device) for n in (40, 10)]
        wide = BlockRoutes(
            slots=junk[0], block_expert=junk[1], padded_total=like.padded_total, **sizes
        )
        choice = torch.tensor([2, 0, 2], device=device)[None, :tokens, None]
        build_routes_triton(choice, 5, 4, wide)
        live, blocks = ([1, 3, 3, 3, 0, 2, 3, 3], [0, 2]) if tokens else ([], [])
        assert wide.slots.tolist() == live + [tokens] * (40 - len(live))
        assert wide.block_expert.tolist() == blocks + [5] * (10 - len(blocks))
        assert wide.padded_total.item() == len(live)


SIGMOID = {"top_k": 3, "score_func": "sigmoid", "route_norm": True, "route_scale": 4.9}


# Of each form: several steps and programs, and the last of each with a rest.
ROUTER_TILES = tuple(
    RouterTile(tokens=tokens, depth=16, num_stages=2, form=form)
    for form, tokens in zip(FORMS, (16, 64, 64), strict=True)
)


@case
def router_chooses_as_the_plain_form(device: str) -> None:
    ways = list(product(("sigmoid", "softmax"), (True, False)))
    # Every kind of score at one size: a GPU's compiler takes a second or more for each of them.
    for (heads, tokens, top_k, experts, dim), scores in (
        ((2, 70, 6, 40, 48), ways),
        ((2, 0, 2, 4, 16), ways[:1]),
        ((1, 1, 1, 1, 16), ways[:1]),
        ((1, 19, 8, 256, 24), ways[1:3]),
        ((1, 5, 2, 600, 16), ways[:1]),
    ):
        # Of more experts than 256 the tiles are the caller's to find.
        cuts = ROUTER_TILES if experts <= 256 else ROUTER_TILES[:1]
        for score_func, norm in scores:
            settings = {**SIGMOID, "top_k": top_k, "score_func": score_func, "route_norm": norm}
            x = torch.randn(tokens, heads, dim, device=device).bfloat16()
            gate = torch.randn(heads, experts, dim, device=device) * dim**-0.5
            bias = torch.randn(heads, experts, device=device) * 0.1
            logits = router_logits_torch(x, gate)
            plain = choose_experts_torch(logits, bias, **settings)
            for mine in (
                choose_experts_triton(logits, bias, **settings),
                route_tokens_triton(x, gate, bias, **settings),
                route_tokens_triton(x.float(), gate, bias, **settings, tile=cuts[-1]),
                *(route_tokens_triton(x, gate, bias, **settings, tile=cut) for cut in cuts),
            ):
                assert_same_choice(mine, plain, bias, logits, score_func)


def assert_same_choice(mine, plain, bias, logits, score_func) -> None:
    """Equal experts but for scores that rounding may swap, and weights to a few roundings."""
    scores = logits.double().sigmoid() if score_func == "sigmoid" else logits.double().softmax(-1)
    biased = scores + bias.double()[:, None]
    chosen = [biased.gather(-1, choice.long()) for choice in (mine[0], plain[0])]
    torch.testing.assert_close(chosen[0], chosen[1], rtol=0, atol=1e-6)
    same = mine[0] == plain[0]
    assert same.numel() == 0 or same.float().mean() > 0.99
    assert mine[0].dtype == torch.int32
    torch.testing.assert_close(mine[1][same], plain[1][same], rtol=2e-5, atol=1e-6)


@case
def router_product_has_float32_accuracy(device: str) -> None:
    x = torch.randn(64, 1, 256, device=device).bfloat16()
    gate, bias = torch.randn(1, 32, 256, device=device), torch.zeros(1, 32, device=device)
    settings = {"top_k": 1, "score_func": "sigmoid", "route_norm": False, "route_scale": 1.0}
    gate[:, 1:] = gate[:, :1] - 100.0 * x[0, 0].sign().float()  # expert 0 wins for the first token
    exact = torch.einsum("td,d->t", x[:, 0].double(), gate[0, 0].double())
    bias[0, 0] = 2.0  # and now for all of them
    # A bfloat16 product of the same numbers is off by 0.01 and more.
    inner = exact.abs() * 2.0**-5 < 3
    for tile in (None, *ROUTER_TILES):
        choice, weights = route_tokens_triton(x, gate * 2.0**-5, bias, **settings, tile=tile)
        assert (choice == 0).all()
        logit = torch.logit(weights[0, :, 0].double())
        torch.testing.assert_close(logit[inner], exact[inner] * 2.0**-5, rtol=0, atol=1e-5)


@case
def every_form_of_the_router_orders_as_the_choice_from_logits(device: str) -> None:
    settings = {**SIGMOID, "top_k": 5}
    # One channel a token: logits are exact, and most of them tie.
    x = torch.eye(16, device=device)[torch.arange(70, device=device) % 16]
    x = x[:, None].expand(-1, 2, -1).bfloat16().contiguous()
    gate = torch.randint(-1, 2, (2, 24, 16), device=device).float()
    bias = torch.zeros(2, 24, device=device)
    bias[:, 7:9] = torch.tensor([float("-inf"), float("nan")], device=device)
    x[9, 1, 3] = float("nan")
    logits = router_logits_torch(x, gate)
    expected = choose_experts_triton(logits, bias, **settings)
    order = torch.sort(logits + bias[:, None].nan_to_num(100), descending=True, stable=True, dim=-1)
    plain = order.indices[..., :5]
    plain[1, 9] = torch.arange(5, device=device)
    assert torch.equal(expected[0].long(), plain)
    for tile in ROUTER_TILES:
        choice, weights = route_tokens_triton(x, gate, bias, **settings, tile=tile)
        assert torch.equal(choice, expected[0]), tile
        torch.testing.assert_close(weights, expected[1], rtol=1e-6, atol=0, equal_nan=True)


@case
def router_reads_a_slice_of_heads_as_it_lies(device: str) -> None:
    wider = torch.randn(19, 5, 32, device=device).bfloat16()
    gate, bias = torch.randn(2, 24, 32, device=device), torch.randn(2, 24, device=device)
    for tile in ROUTER_TILES:
        sliced = route_tokens_triton(wider[:, 1:3], gate, bias, **SIGMOID, tile=tile)
        dense = route_tokens_triton(wider[:, 1:3].contiguous(), gate, bias, **SIGMOID, tile=tile)
        assert all(torch.equal(a, b) for a, b in zip(sliced, dense, strict=True))


@case
def router_breaks_ties_by_number_and_puts_nan_first(device: str) -> None:
    settings = {**SIGMOID, "top_k": 4}
    logits = torch.randint(-1, 2, (2, 33, 24), device=device).float()
    bias = torch.zeros(2, 24, device=device)
    choice, _ = choose_experts_triton(logits, bias, **settings)
    expected = torch.sort(logits, dim=-1, descending=True, stable=True).indices[..., :4]
    assert torch.equal(choice.long(), expected)
    logits[0, 3, 7] = float("nan")
    logits[1, 5] = float("nan")
    choice, weights = choose_experts_triton(logits, bias, **settings)
    assert choice[0, 3, 0] == 7
    assert choice[1, 5].tolist() == [0, 1, 2, 3]
    assert weights.isnan().sum() == 8
    bias[1, 9] = torch.copysign(torch.tensor(float("nan")), torch.tensor(-1.0))
    choice, _ = choose_experts_triton(torch.zeros_like(logits), bias, **settings)
    assert (choice[1, :, 0] == 9).all()
    bias.fill_(float("-inf"))
    choice, _ = choose_experts_triton(torch.randn_like(logits), bias, **settings)
    assert torch.equal(choice.long(), torch.arange(4, device=device).expand_as(choice))
    bias[0, :6] = -0.0
    bias[0, 2] = 0.0
    choice, _ = choose_experts_triton(torch.full_like(logits, -200.0), bias, **settings)
    assert torch.equal(choice[0].long(), torch.arange(4, device=device).expand_as(choice[0]))


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
            assert module.explain(x.to(device)).startswith("triton")
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
