"""What the mixture costs: router, route build, experts, and the sum over a token's choices.

    python benchmarks/bench_experts.py --device cuda     # two production shapes; about a minute
    python benchmarks/bench_experts.py --device cuda --rounds 50 --plain

Baselines of the experts are grouped products of torch, with gate and up side by side in one and a
compiled activation: "products and sum" leaves sorting, gathering, weights and sum out of their
time, "experts" has all of it. `--plain` adds the reference, which runs expert by expert.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a bare checkout

from benchmarks import harness
from benchmarks.expert_cases import MAX_GROUPS, SHAPES, TINY, ExpertInputs
from benchmarks.harness import Candidate, Row
from magi2.ops.expert_launches import best_tiles, run_blocks
from magi2.ops.expert_mlp import expert_mlp_torch
from magi2.ops.fused_experts import run_experts_triton, sum_routes_triton
from magi2.ops.fused_router import RouterTile, choose_experts_triton, route_tokens_triton
from magi2.ops.route_build import build_routes_torch, build_routes_triton, number_experts
from magi2.ops.routing import choose_experts_torch
from magi2.ops.token_permute import sum_routes_torch

BOUND = 4e-3  # to the plain form: another order of sums, and one rounding of the sum
GROUPED_BOUND = 1e-2  # torch rounds gate and up as well, before the activation

# The forms of the router, each with a tile that suits it. Graphs leave the host out of their times.
ROUTERS = (
    RouterTile(tokens=32),
    RouterTile(tokens=128, depth=64, num_warps=8, num_stages=4, form="apart"),
)


def row(
    inputs: ExpertInputs,
    case: str,
    ours: Candidate,
    baselines: Sequence[Candidate],
    rounds: int,
    nbytes: int,
    floor_is: str,
) -> Row:
    shape = inputs.shape
    return harness.run_case(
        "experts",
        f"{case}, {shape.name}: {shape.tokens} tokens, {shape.heads} heads",
        device=inputs.device,
        dtype="bfloat16",
        shape=[shape.tokens, shape.heads, shape.top_k, shape.experts, shape.dim, shape.inner],
        nbytes=nbytes,
        ours=ours,
        baselines=baselines,
        floor_is=floor_is,
        checked="relative norm to the plain form, or equal integers",
        rounds=rounds,
    )


def captured(run: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """The same work as one launch of a graph, which leaves the host out; as it is on a CPU."""
    if device.type != "cuda":
        return run
    run()
    harness.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def product_rows(inputs: ExpertInputs, rounds: int) -> list[Row]:
    """Time the products with their sum, for routes that are laid out already, and each alone."""
    shape = inputs.shape
    tiles = best_tiles(inputs.x, shape.inner)
    print(f"{shape.name}: floor {shape.floor}; {tiles}", flush=True)
    routes = build_routes_triton(inputs.choice, shape.heads * shape.experts, tiles.block_rows)
    weights = inputs.weights.permute(1, 0, 2).contiguous()
    out = torch.empty_like(inputs.routed)

    def products() -> torch.Tensor:
        run_blocks(out, inputs.x, weights, routes, *inputs.banks, tiles)
        return out

    def products_and_sum() -> torch.Tensor:
        return sum_routes_triton(products(), inputs.choice, "choice")

    def summed() -> torch.Tensor:
        return sum_routes_triton(inputs.routed, inputs.choice, "choice")

    def poison() -> None:
        out.fill_(float("nan"))

    check = inputs.close_to(inputs.summed, BOUND)
    ours = Candidate("ours", products_and_sum, check, prepare=poison)
    parts = [
        Candidate("products", products, inputs.close_to(inputs.routed, BOUND), prepare=poison),
        Candidate("sum", summed, check),
        Candidate("sum by torch", lambda: inputs.routed.sum(2), check),
    ]
    if inputs.device.type == "cuda":
        layout, bound = inputs.laid_out, inputs.close_to(inputs.routed, GROUPED_BOUND)
        parts.append(
            Candidate(
                f"grouped_mm products, {MAX_GROUPS} a call",
                lambda: inputs.grouped_products(MAX_GROUPS, layout),
                lambda result: bound(inputs.put_back(result, layout)),
            )
        )
    case = "products and sum"
    return [row(inputs, case, ours, parts, rounds, shape.weight_bytes, shape.floor)]


def expert_rows(inputs: ExpertInputs, rounds: int, plain: bool) -> list[Row]:
    """Time everything behind the router against other ways to do it."""
    shape = inputs.shape
    arguments = (inputs.x, inputs.choice, inputs.weights, *inputs.banks)
    check = inputs.close_to(inputs.summed, BOUND)

    def ours() -> torch.Tensor:
        return run_experts_triton(*arguments, route_sum="choice")

    def plainly() -> torch.Tensor:
        return sum_routes_torch(expert_mlp_torch(*arguments), inputs.choice, "choice")

    baselines = []
    if inputs.device.type == "cuda":
        loose = inputs.close_to(inputs.summed, GROUPED_BOUND)
        baselines = [
            Candidate(
                f"grouped_mm, {MAX_GROUPS} a call", lambda: inputs.grouped_mm(MAX_GROUPS), loose
            )
        ]
        baselines.append(Candidate("ours, graph", captured(ours, inputs.device), check))
    if plain:
        baselines.append(Candidate("plain", plainly, check))
    mine = Candidate("ours", ours, check)
    return [row(inputs, "experts", mine, baselines, rounds, shape.weight_bytes, shape.floor)]


def route_rows(inputs: ExpertInputs, rounds: int) -> Iterator[Row]:
    """Time the router, the route build, and both."""
    shape = inputs.shape
    all_experts, block = shape.heads * shape.experts, 128
    expected = build_routes_torch(number_experts(inputs.choice, shape.experts), all_experts, block)

    def built_torch() -> torch.Tensor:
        expert = number_experts(inputs.choice, shape.experts)
        return build_routes_torch(expert, all_experts, block).slots

    def built() -> torch.Tensor:
        return build_routes_triton(inputs.choice, all_experts, block).slots

    def router(tile: RouterTile | None = None) -> torch.Tensor:
        return route_tokens_triton(inputs.x, inputs.gate, inputs.bias, **inputs.router, tile=tile)[
            1
        ]

    def from_logits() -> torch.Tensor:
        return choose_experts_triton(inputs.logits(), inputs.bias, **inputs.router)[1]

    def router_torch() -> torch.Tensor:
        return choose_experts_torch(inputs.logits(), inputs.bias, **inputs.router)[1]

    def all_torch() -> torch.Tensor:
        choice, weights = choose_experts_torch(inputs.logits(), inputs.bias, **inputs.router)
        build_routes_torch(number_experts(choice, shape.experts), all_experts, block)
        return weights

    def everything() -> torch.Tensor:
        choice, weights = route_tokens_triton(inputs.x, inputs.gate, inputs.bias, **inputs.router)
        build_routes_triton(choice, all_experts, block)
        return weights

    slots, weights = harness.expect_bits(expected.slots), inputs.close_to(inputs.weights, 1e-3)
    target = "target for router, top-k and route build together: 150 us"

    def one(
        case: str,
        ours: Callable[[], torch.Tensor],
        check: Callable[[torch.Tensor], None],
        **others: Callable[[], torch.Tensor],
    ) -> Row:
        baselines = [Candidate(name.replace("_", " "), run, check) for name, run in others.items()]
        nbytes = inputs.x.nbytes + inputs.gate.nbytes
        return row(inputs, case, Candidate("ours", ours, check), baselines, rounds, nbytes, target)

    def graph(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return captured(run, inputs.device)

    # One by one: what came before is kept where a form does not compile.
    yield one(
        "route build",
        built,
        slots,
        before=lambda: before(inputs, block),
        torch=built_torch,
        ours_graph=graph(built),
    )
    yield one(
        "router and route build", everything, weights, torch=all_torch, ours_graph=graph(everything)
    )
    yield one("router", router, weights, logits_by_torch=from_logits, torch=router_torch)
    forms = {f"{tile.form}_graph": graph(partial(router, tile)) for tile in ROUTERS}
    logits = inputs.logits()
    forms["choice_from_logits_graph"] = graph(
        lambda: choose_experts_triton(logits, inputs.bias, **inputs.router)[1]
    )
    yield one("forms of the router", router, weights, **forms)


def before(inputs: ExpertInputs, block: int) -> torch.Tensor:
    """The route build with an atomic histogram and three prefix sums, head-major as it once was.

    Its slots hold the numbers of today, so that the result can be compared.
    """
    shape = inputs.shape
    experts = shape.heads * shape.experts
    first = torch.arange(shape.heads, device=inputs.device)[:, None, None] * shape.experts
    expert = (inputs.choice + first).permute(1, 0, 2).flatten()
    order = torch.argsort(expert, stable=True)
    ids = expert[order]
    counts = torch.zeros(experts, dtype=torch.int32, device=inputs.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
    padded = (counts + (block - 1)) // block * block
    begin, start = counts.cumsum(0) - counts, padded.cumsum(0) - padded
    slot = start[ids] + torch.arange(ids.numel(), device=ids.device) - begin[ids]
    capacity = -(-(ids.numel() + min(experts, ids.numel()) * (block - 1)) // block) * block
    slots = torch.full((capacity,), ids.numel(), dtype=torch.int32, device=ids.device)
    slots[slot] = order.to(torch.int32)
    blocks = torch.arange(capacity // block, device=ids.device) * block
    torch.searchsorted((padded // block).cumsum(0) * block, blocks, right=True)
    return slots


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda (default); cpu needs TRITON_INTERPRET"
    )
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the results")
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each candidate")
    parser.add_argument(
        "--plain", action="store_true", help="time the plain form of the experts too"
    )
    options = parser.parse_args(arguments)
    device = harness.usable_device(options.device)
    failed: list[str] = []
    with harness.Results("experts", device, options.out) as results, torch.no_grad():
        for shape in SHAPES if device.type == "cuda" else TINY:
            inputs = ExpertInputs(shape, device)
            for rows in (
                partial(route_rows, inputs, options.rounds),
                partial(product_rows, inputs, options.rounds),
                partial(expert_rows, inputs, options.rounds, options.plain),
            ):
                # Each in its own attempt: what the others measured is worth having.
                try:
                    for made in rows():
                        results.add(made)
                        print(f"{made.case}: {made.ours_us:.0f} us, {made.baselines}", flush=True)
                except Exception as error:
                    failed.append(f"{type(error).__name__}: {error}")
                    print(f"{shape.name} failed: {error}", flush=True)
        harness.print_table(
            f"experts on {harness.device_name(device)}, medians of {options.rounds}",
            *harness.table_of(results.rows),
        )
        for shape in SHAPES:
            print(f"floor, {shape.name}: {shape.floor}")
        print(f"written to {results.path}")
    if failed:
        raise SystemExit(f"{len(failed)} groups of cases failed: {failed}")


if __name__ == "__main__":
    main()
