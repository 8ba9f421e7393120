"""Expert choice in one Triton launch, with or without the product that gives the logits.

Letters: T tokens, H heads of the mixture, D channels of such a head, E experts of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magi2.ops.launch import interprets, on_device

MAX_EXPERTS = 1024  # of a head: a program holds the scores of a few tokens for all of them


@dataclass(frozen=True, kw_only=True)
class RouterTile:
    """How the router is cut into programs.

    Attributes:
        tokens: Of a program, a power of two.
        depth: Channels that one step multiplies, a power of two from 16 on.
        num_warps: Warps of a program.
        num_stages: Steps whose loads are in flight.
    """

    tokens: int
    depth: int = 32
    num_warps: int = 8
    num_stages: int = 3


# 64 rows fill an instruction of the matrix unit, and 64 x 256 scores fit the registers of 8 warps.
_PRODUCT = RouterTile(tokens=64)
# More experts take the shared memory of several steps.
_WIDE = RouterTile(tokens=16, depth=16, num_stages=1)
_LOGITS = RouterTile(tokens=16, num_warps=4)


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
    return _launch(
        logits_HTE.contiguous(),
        None,
        bias_HE,
        (tokens, heads, experts),
        (top_k, score_func, route_norm, route_scale),
        _LOGITS,
    )


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
    """`choose_experts_torch` of `router_logits_torch`, in one launch and without stored logits.

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
    return _launch(
        x_THD,
        gate_HED.contiguous(),
        bias_HE,
        (x_THD.shape[0], heads, experts),
        (top_k, score_func, route_norm, route_scale),
        tile or (_PRODUCT if experts <= 256 else _WIDE),
    )


def _check(experts: int, top_k: int, score_func: str) -> None:
    if not 0 < top_k <= experts <= MAX_EXPERTS:
        raise ValueError(
            f"top_k={top_k} of {experts} experts: expected 1 <= top_k <= experts <= {MAX_EXPERTS}."
        )
    if score_func not in ("sigmoid", "softmax"):
        raise ValueError(f"score_func={score_func!r}: expected 'sigmoid' or 'softmax'.")


def _launch(
    operand: torch.Tensor,
    gate: torch.Tensor | None,
    bias_HE: torch.Tensor,
    sizes: tuple[int, int, int],
    settings: tuple[int, str, bool, float],
    tile: RouterTile,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch on logits, or on x where a gate is given."""
    from magi2.kernels.router import choose_experts_kernel

    tokens, heads, experts = sizes
    top_k, score_func, route_norm, route_scale = settings
    block_e = max(16, 1 << (experts - 1).bit_length())
    choice = operand.new_empty(tokens, heads, top_k, dtype=torch.int32)
    weights = operand.new_empty(tokens, heads, top_k, dtype=torch.float32)
    if choice.numel():
        with on_device(operand):
            choose_experts_kernel[(-(-tokens // tile.tokens), heads)](
                operand,
                operand,
                operand if gate is None else gate,
                bias_HE.contiguous(),
                choice,
                weights,
                tokens,
                operand.stride(0),
                operand.stride(1),
                route_scale,
                HEADS=heads,
                D=operand.shape[2],
                EXPERTS=experts,
                TOP_K=top_k,
                BLOCK_T=tile.tokens,
                BLOCK_E=block_e,
                BLOCK_K=tile.depth,
                BLOCK_C=1 << (top_k - 1).bit_length(),
                PRODUCT=gate is not None,
                SOFTMAX=score_func == "softmax",
                NORM=route_norm,
                INTERPRETED=interprets(operand),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
    return choice.permute(1, 0, 2), weights.permute(1, 0, 2)
