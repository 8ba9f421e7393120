"""Expert choice in Triton, with or without the product that gives the logits.

Letters: T tokens, H heads of the mixture, D channels of such a head, E experts of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from magi2.ops.launch import interprets, is_hopper, on_device

MAX_EXPERTS = 1024  # of a head: a program holds the scores of a few tokens for all of them
FORMS = ("fused", "apart")


@dataclass(frozen=True, kw_only=True)
class RouterTile:
    """How the router is cut into programs.

    Attributes:
        tokens: Of a program of the product, a power of two.
        depth: Channels that one step multiplies, a power of two from 16 on.
        num_warps: Warps of such a program.
        num_stages: Steps whose loads are in flight.
        form: "fused" takes the router rows apart in each program and stores no logits. "apart", for
            bfloat16 x only, does that in a launch before, stores logits, and chooses in a launch
            behind.
    """

    tokens: int
    depth: int = 32
    num_warps: int = 4
    num_stages: int = 3
    form: str = "fused"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form={self.form!r}: expected one of {FORMS}.")


_FUSED = RouterTile(tokens=32)
# 192 kB of shared memory; tried on Hopper.
_APART = RouterTile(tokens=128, depth=64, num_warps=8, num_stages=4, form="apart")
# More experts take the shared memory of several steps.
_WIDE = RouterTile(tokens=16, depth=16, num_warps=8, num_stages=1)
# Scores of a program that chooses from logits, and has one warp: rows of 256 experts by four.
_LOGITS = 1024


def padded_experts(experts: int) -> int:
    """Columns of a program's scores: a power of two that a matrix unit takes."""
    return max(16, 1 << (experts - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """What is chosen, and how it is weighed."""

    top_k: int
    score_func: str
    route_norm: bool
    route_scale: float

    def constants(self, heads: int, experts: int) -> dict[str, Any]:
        """Arguments that all kernels which choose have in common."""
        return {
            "HEADS": heads,
            "EXPERTS": experts,
            "TOP_K": self.top_k,
            "BLOCK_E": padded_experts(experts),
            "BLOCK_C": 1 << (self.top_k - 1).bit_length(),
            "SOFTMAX": self.score_func == "softmax",
            "NORM": self.route_norm,
        }


def choose_experts_triton(
    logits_HTE: torch.Tensor,
    bias_HE: torch.Tensor,
    *,
    top_k: int,
    score_func: str,
    route_norm: bool,
    route_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as `choose_experts_torch`, with defined ties: the lowest expert number first.

    Scores may differ by a unit in the last place, as another exponential rounds them, and so the
    choice between experts that close. NaN scores come first, as in `torch.topk`.

    Returns:
        Chosen experts, int32, and weights, float32; both (heads, tokens, top_k) views of memory in
        the order tokens, heads, choices, which is that of route numbers.
    """
    heads, tokens, experts = logits_HTE.shape
    _check(experts, top_k, score_func)
    rule = _Rule(top_k=top_k, score_func=score_func, route_norm=route_norm, route_scale=route_scale)
    out = _empty_choice(logits_HTE, tokens, heads, top_k)
    if out[0].numel():
        with on_device(logits_HTE):
            _launch_choice(logits_HTE.contiguous(), bias_HE, rule, out)
    return _head_major(out)


def route_tokens_triton(
    x_THD: torch.Tensor,
    gate_HED: torch.Tensor,
    bias_HE: torch.Tensor,
    *,
    top_k: int,
    score_func: str,
    route_norm: bool,
    route_scale: float,
    tile: RouterTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_experts_torch` of `router_logits_torch`, as `RouterTile` describes it.

    Args:
        x_THD: (tokens, heads, head_dim), channels adjacent; bfloat16 keeps to the matrix units.
        gate_HED: (heads, experts, head_dim) float32.
        bias_HE: (heads, experts) float32.
        top_k: As in `choose_experts_torch`, and so are the others.
        score_func: "sigmoid" or "softmax".
        route_norm: Whether chosen scores are divided by their sum.
        route_scale: Factor on the weights.
        tile: How to cut the work; the same choices and weights up to float32 roundings.

    Returns:
        As `choose_experts_triton`.

    Logits have float32 accuracy and another order of summation than a float32 product has.
    """
    heads, experts, _ = gate_HED.shape
    _check(experts, top_k, score_func)
    if x_THD.stride(2) != 1 and x_THD.shape[2] > 1:
        raise ValueError(f"x has strides {x_THD.stride()}: expected adjacent channels.")
    if tile is None or x_THD.dtype != torch.bfloat16:
        tile = _best_tile(x_THD, experts)
    rule = _Rule(top_k=top_k, score_func=score_func, route_norm=route_norm, route_scale=route_scale)
    out = _empty_choice(x_THD, x_THD.shape[0], heads, top_k)
    if out[0].numel():
        with on_device(x_THD):
            launch = _launch_fused if tile.form == "fused" else _launch_with_logits
            launch(x_THD, gate_HED.contiguous(), bias_HE, rule, tile, out)
    return _head_major(out)


def _best_tile(x_THD: torch.Tensor, experts: int) -> RouterTile:
    if experts > 256:
        return _WIDE
    if x_THD.dtype == torch.bfloat16 and is_hopper(x_THD.device):
        return _APART
    return _FUSED


def _check(experts: int, top_k: int, score_func: str) -> None:
    if not 0 < top_k <= experts <= MAX_EXPERTS:
        raise ValueError(
            f"top_k={top_k} of {experts} experts: expected 1 <= top_k <= experts <= {MAX_EXPERTS}."
        )
    if score_func not in ("sigmoid", "softmax"):
        raise ValueError(f"score_func={score_func!r}: expected 'sigmoid' or 'softmax'.")


def _empty_choice(
    like: torch.Tensor, tokens: int, heads: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choice and weights in the order of route numbers."""
    size = (tokens, heads, top_k)
    choice = torch.empty(size, dtype=torch.int32, device=like.device)
    return choice, torch.empty(size, dtype=torch.float32, device=like.device)


def _head_major(out: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return out[0].permute(1, 0, 2), out[1].permute(1, 0, 2)


def _launch_choice(
    logits_HTE: torch.Tensor,
    bias_HE: torch.Tensor,
    rule: _Rule,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    from magi2.kernels.router_choice import choose_from_logits_kernel

    heads, tokens, experts = logits_HTE.shape
    constants = rule.constants(heads, experts)
    rows = max(1, _LOGITS // constants["BLOCK_E"])
    choose_from_logits_kernel[(-(-tokens // rows), heads)](
        logits_HTE,
        bias_HE.contiguous(),
        *out,
        tokens,
        rule.route_scale,
        BLOCK_T=rows,
        num_warps=1,  # more would share a row, and meet at a barrier for each of its maxima
        **constants,
    )


def _launch_fused(
    x_THD: torch.Tensor,
    gate_HED: torch.Tensor,
    bias_HE: torch.Tensor,
    rule: _Rule,
    tile: RouterTile,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    from magi2.kernels.router import route_tokens_kernel

    tokens, heads, dim = x_THD.shape
    route_tokens_kernel[(-(-tokens // tile.tokens), heads)](
        x_THD,
        gate_HED,
        bias_HE.contiguous(),
        *out,
        tokens,
        x_THD.stride(0),
        x_THD.stride(1),
        rule.route_scale,
        D=dim,
        BLOCK_T=tile.tokens,
        BLOCK_K=tile.depth,
        INTERPRETED=interprets(x_THD),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **rule.constants(heads, gate_HED.shape[1]),
    )


def _launch_with_logits(
    x_THD: torch.Tensor,
    gate_HED: torch.Tensor,
    bias_HE: torch.Tensor,
    rule: _Rule,
    tile: RouterTile,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Parts of the router rows, then their product with x, then the choice."""
    from magi2.kernels import router_product as kernels

    tokens, heads, dim = x_THD.shape
    parts = torch.empty(3, gate_HED.numel(), dtype=torch.bfloat16, device=x_THD.device)
    logits_HTE = torch.empty(
        heads, tokens, gate_HED.shape[1], dtype=torch.float32, device=x_THD.device
    )
    kernels.split_gate_kernel[(-(-gate_HED.numel() // 1024),)](
        gate_HED, parts, SIZE=gate_HED.numel(), BLOCK=1024, INTERPRETED=interprets(x_THD)
    )
    kernels.router_product_kernel[(-(-tokens // tile.tokens), heads)](
        x_THD,
        parts,
        logits_HTE,
        tokens,
        x_THD.stride(0),
        x_THD.stride(1),
        HEADS=heads,
        EXPERTS=gate_HED.shape[1],
        D=dim,
        BLOCK_T=tile.tokens,
        BLOCK_E=padded_experts(gate_HED.shape[1]),
        BLOCK_K=tile.depth,
        INTERPRETED=interprets(x_THD),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    _launch_choice(logits_HTE, bias_HE, rule, out)
