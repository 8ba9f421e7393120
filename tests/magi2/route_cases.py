"""Cases of the Triton kernels that route: on a GPU, or all of them in Triton's interpreter.

    python -m tests.magi2.route_cases cuda

Each case is a function of a device that raises if a result is wrong.
"""

from __future__ import annotations

from itertools import product

import torch

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
from tests.magi2.triton_cases import SIGMOID, Case, main

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Add a case under its name."""
    CASES[function.__name__] = function
    return function


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
        choice = torch.rand(2, 29, 9).argsort(-1)[..., :top_k]
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


# Of each form: several steps and programs, and the last of each with a rest.
ROUTER_TILES = tuple(
    RouterTile(tokens=tokens, depth=16, num_stages=2, form=form)
    for form, tokens in zip(FORMS, (16, 64), strict=True)
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


if __name__ == "__main__":
    main(CASES)
