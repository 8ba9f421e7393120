"""Inputs of the mixture at production widths, and other ways to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from magi2.ops.expert_mlp import expert_mlp_torch
from magi2.ops.routing import choose_experts_torch, router_logits_torch
from magi2.ops.swiglu import gated_swiglu7_torch

BF16 = torch.bfloat16
MAX_GROUPS = 768  # of a call of torch._grouped_mm, which refuses 1024: a quarter of all heads


@dataclass(frozen=True)
class Shape:
    """Sizes of one rank's mixture; the defaults are the released model's."""

    name: str
    tokens: int
    heads: int
    top_k: int = 6
    experts: int = 256
    dim: int = 256
    inner: int = 1280

    @property
    def routes(self) -> int:
        return self.tokens * self.heads * self.top_k

    @property
    def weight_bytes(self) -> int:
        return self.heads * self.experts * 3 * self.dim * self.inner * BF16.itemsize

    @property
    def flops(self) -> int:
        return 2 * self.routes * 3 * self.dim * self.inner

    @property
    def floor(self) -> str:
        """What bounds the experts on an H200, in words."""
        memory, matrix = self.floor_us
        return (
            f"{self.weight_bytes / 1e9:.2f} GB of weights at 4.2 TB/s = {memory / 1e3:.2f} ms; "
            f"{self.flops / 1e12:.3f} TFLOP at 790 TFLOP/s = {matrix / 1e3:.2f} ms"
        )

    @property
    def floor_us(self) -> tuple[float, float]:
        """Microseconds of reading the weights, and of the products, on an H200."""
        return self.weight_bytes / 4.2e6, self.flops / 790e6


SHAPES = (Shape("all heads on a rank", 3702, 12), Shape("EP4 in SP8", 14808, 3))
TINY = (Shape("tiny", 70, 2, 2, 5, 32, 48),)  # for the interpreter

ROUTER = {"top_k": 6, "score_func": "sigmoid", "route_norm": True, "route_scale": 4.9}


class ExpertInputs:
    """Random weights and tokens of a shape; routes from the model's own router."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        self.shape, self.device = shape, device
        self.x = torch.randn(shape.tokens, shape.heads, shape.dim, device=device).to(BF16)
        gate = torch.randn(shape.heads, shape.experts, shape.dim, device=device)
        self.gate = gate * shape.dim**-0.5
        self.bias = torch.randn(shape.heads, shape.experts, device=device) * 0.02
        self.router = {**ROUTER, "top_k": shape.top_k}
        self.choice, self.weights = choose_experts_torch(self.logits(), self.bias, **self.router)

    @cached_property
    def banks(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """W_gate, W_up and W_down of all experts."""
        shape = self.shape

        def bank(rows: int, columns: int) -> torch.Tensor:
            size = (shape.heads * shape.experts, rows, columns)
            weight = torch.empty(size, dtype=BF16, device=self.device)
            return weight.normal_(std=rows**-0.5)

        wide = bank(shape.dim, shape.inner), bank(shape.dim, shape.inner)
        return (*wide, bank(shape.inner, shape.dim))

    def logits(self) -> torch.Tensor:
        return router_logits_torch(self.x, self.gate)

    @cached_property
    def routed(self) -> torch.Tensor:
        """Weighted results of all routes by the plain form, (T, H, K, D)."""
        return expert_mlp_torch(self.x, self.choice, self.weights, *self.banks)

    @cached_property
    def summed(self) -> torch.Tensor:
        """Sum of `routed` over the choices, float32."""
        return self.routed.float().sum(2)

    def close_to(self, expected: torch.Tensor, bound: float) -> Callable[[torch.Tensor], None]:
        """Check the norm of the difference; NaN fails."""
        scale = float(expected.float().norm())

        def check(result: torch.Tensor) -> None:
            error = float((result.float() - expected.float()).norm()) / scale
            assert error < bound, f"relative error {error:.1e}, expected less than {bound:.0e}"

        return check

    @cached_property
    def _bounds(self) -> list[int]:
        """First row of each expert in expert order, and the number of rows, on the host."""
        shape = self.shape
        first = torch.arange(shape.heads, device=self.device)[:, None, None] * shape.experts
        counts = torch.bincount(
            (self.choice + first).flatten(), minlength=shape.heads * shape.experts
        )
        return [0, *counts.cumsum(0).tolist()]

    @cached_property
    def gate_up(self) -> torch.Tensor:
        """W_gate and W_up side by side, so that one grouped product takes both."""
        return torch.cat(self.banks[:2], dim=2)

    @cached_property
    def laid_out(self) -> Layout:
        """`lay_out`, made before the time is taken."""
        return self.lay_out()

    def lay_out(self) -> Layout:
        """Sort the routes by expert and gather their rows, in plain torch."""
        shape = self.shape
        first = torch.arange(shape.heads, dtype=torch.int32, device=self.device) * shape.experts
        expert = (self.choice.int() + first[:, None, None]).permute(1, 0, 2).flatten()
        ids, order = torch.sort(expert, stable=True)
        experts = torch.arange(1, shape.heads * shape.experts + 1, device=self.device)
        ends = torch.searchsorted(ids, experts.int(), out_int32=True)
        return Layout(self.x.flatten(0, 1)[order // shape.top_k], order, ends)

    def grouped_products(self, groups: int, laid_out: Layout) -> torch.Tensor:
        """`torch._grouped_mm` of at most `groups` experts a call; unweighted, in expert order.

        Where the calls cut the rows is known beforehand, so that no call waits for the device.
        """
        rows = self.shape.heads * self.shape.experts
        activate = fused_by_compiler(_activate, self.device)
        down, routes = self.banks[2], []
        for start in range(0, rows, groups):
            here = slice(start, min(start + groups, rows))
            low, high = self._bounds[here.start], self._bounds[here.stop]
            offsets = laid_out.ends[here] - low if low else laid_out.ends[here]
            both = torch._grouped_mm(laid_out.rows[low:high], self.gate_up[here], offs=offsets)
            routes.append(torch._grouped_mm(activate(both), down[here], offs=offsets))
        return routes[0] if len(routes) == 1 else torch.cat(routes)

    def put_back(self, routes: torch.Tensor, laid_out: Layout) -> torch.Tensor:
        """Weighted results by route number, (T, H, K, D), of results in expert order."""
        shape = self.shape
        weight = self.weights.permute(1, 0, 2).flatten()[laid_out.order]
        result = torch.empty(shape.routes, shape.dim, dtype=BF16, device=self.device)
        result[laid_out.order] = fused_by_compiler(_weigh, self.device)(routes, weight)
        return result.view(shape.tokens, shape.heads, shape.top_k, shape.dim)

    def grouped_mm(self, groups: int) -> torch.Tensor:
        """Everything by torch: sort, gather, grouped products, weights, and the sum."""
        laid_out = self.lay_out()
        return self.put_back(self.grouped_products(groups, laid_out), laid_out).sum(2)


@dataclass(frozen=True)
class Layout:
    """Routes in expert order: their rows of x, their numbers, and where each expert's end."""

    rows: torch.Tensor
    order: torch.Tensor
    ends: torch.Tensor


def _activate(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=1)
    return gated_swiglu7_torch(gate, up).to(BF16)


def _weigh(routes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (routes.float() * weight[:, None]).to(BF16)


@cache
def fused_by_compiler(
    function: Callable[..., torch.Tensor], device: torch.device
) -> Callable[..., torch.Tensor]:
    """One pass over memory instead of one for each operation, on a GPU."""
    return torch.compile(function) if device.type == "cuda" else function
