"""Which implementation of the mixture runs, and why: the one place that decides.

"torch" is the plain reference, "triton" the fused kernels or an error that says why not, "auto"
takes Triton where it was measured to be faster, as long as no gradient is recorded, which only the
torch form has.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence

import torch

from magi2.ops import fused_experts, fused_router, traced
from magi2.ops.expert_mlp import expert_mlp_torch
from magi2.ops.routing import choose_experts_torch, router_logits_torch
from magi2.ops.token_permute import sum_routes_torch
from ulysses_comm.hardware import ACCELERATORS, Choice

MOE_BACKENDS = ("auto", "torch", "triton")

# Kinds of device on which the kernels were measured to be faster than torch, by
# `benchmarks/bench_experts.py`, and passed the tests marked `gpu`.
MEASURED_FASTER = frozenset({"cuda"})


def choose_backend(
    requested: str, x: torch.Tensor, weights: Sequence[torch.Tensor], num_experts: int
) -> Choice:
    """Decide for activations and the weights they meet.

    Args:
        requested: One of `MOE_BACKENDS`.
        x: (tokens, heads, head_dim).
        weights: Parameters of the operation; the last three are the experts' where there are any.
        num_experts: Experts of a head.

    Returns:
        "torch" or "triton", with the reason.

    Raises:
        ValueError: If `requested` is no backend.
        RuntimeError: If it is "triton" and Triton cannot do this.
    """
    if requested not in MOE_BACKENDS:
        raise ValueError(f"moe_backend={requested!r}: expected one of {MOE_BACKENDS}.")
    if requested == "torch":
        return Choice("torch", "asked for")
    obstacle = _obstacle(x, weights, num_experts, explicit=requested == "triton")
    if obstacle is None and requested == "auto" and x.device.type not in MEASURED_FASTER:
        obstacle = f"the kernels were not measured to be faster on {x.device.type}"
    if obstacle is None:
        reason = "asked for" if requested == "triton" else f"x is on {x.device}, without gradients"
        return Choice("triton", reason)
    if requested == "triton":
        raise RuntimeError(
            f"moe_backend='triton' cannot run: {obstacle}. Use 'auto', which takes torch then."
        )
    return Choice("torch", obstacle)


def check_device(option: str, requested: str, device: torch.device) -> None:
    """Find out before weights are read whether a model on a device can do as it is told.

    Args:
        option: Name of the option, such as "moe_backend".
        requested: Its value.
        device: Where the model will be.

    Raises:
        ValueError: If it is "triton", and no kernel can run there.
    """
    if requested != "triton":
        return
    obstacle = device_obstacle(torch.empty(0, device=device), explicit=True) or triton_obstacle()
    if obstacle is not None:
        raise ValueError(
            f"{option}='triton' cannot run on {device.type}: {obstacle}. Use 'auto', which "
            "takes torch then."
        )


def explain(choice: Choice) -> str:
    """A choice in one line."""
    return f"{choice.name}: {choice.reason}"


def route_tokens(
    x_THD: torch.Tensor,
    gate_HED: torch.Tensor,
    bias_HE: torch.Tensor,
    backend: str,
    *,
    top_k: int,
    score_func: str,
    route_norm: bool,
    route_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights of every token in each head, (heads, tokens, top_k) both.

    Arguments as in `route_tokens_triton` and `choose_experts_torch`; `backend` as in
    `choose_backend`. Expert numbers are int64 from torch, int32 from Triton.
    """
    chosen = choose_backend(backend, x_THD, [gate_HED], gate_HED.shape[1])
    if chosen.name == "triton":
        if torch.compiler.is_compiling():
            routed: tuple[torch.Tensor, torch.Tensor] = traced.route_tokens(
                x_THD, gate_HED, bias_HE, top_k, score_func, route_norm, route_scale
            )
            return routed
        return fused_router.route_tokens_triton(
            x_THD,
            gate_HED,
            bias_HE,
            top_k=top_k,
            score_func=score_func,
            route_norm=route_norm,
            route_scale=route_scale,
        )
    return choose_experts_torch(
        router_logits_torch(x_THD, gate_HED),
        bias_HE,
        top_k=top_k,
        score_func=score_func,
        route_norm=route_norm,
        route_scale=route_scale,
    )


def run_experts(
    x_THD: torch.Tensor,
    choice_HTK: torch.Tensor,
    weights_HTK: torch.Tensor,
    banks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    route_sum: str,
    backend: str,
) -> torch.Tensor:
    """Run every route through its expert and add a token's weighted results in each head.

    Args:
        x_THD: (tokens, heads, head_dim), at least one head.
        choice_HTK: As `route_tokens` gives them.
        weights_HTK: As `route_tokens` gives them.
        banks: W_gate, W_up and W_down as in `expert_mlp_torch`.
        route_sum: Order of the sum, as in `sum_routes_torch`.
        backend: As in `choose_backend`.

    Returns:
        x's shape and dtype.
    """
    chosen = choose_backend(backend, x_THD, banks, banks[0].shape[0] // x_THD.shape[1])
    if chosen.name == "triton":
        if torch.compiler.is_compiling():
            summed: torch.Tensor = traced.run_experts(
                x_THD, choice_HTK, weights_HTK, *banks, route_sum
            )
            return summed
        return fused_experts.run_experts_triton(
            x_THD, choice_HTK, weights_HTK, *banks, route_sum=route_sum
        )
    routes_THKD = expert_mlp_torch(x_THD, choice_HTK, weights_HTK, *banks)
    return sum_routes_torch(routes_THKD, choice_HTK, route_sum)


def device_obstacle(x: torch.Tensor, *, explicit: bool) -> str | None:
    """Why no Triton kernel can run where x is, or None; `explicit` as in `tensor_obstacle`."""
    kind = x.device.type
    if kind in ACCELERATORS or (explicit and kind == "cpu" and _interpreted()):
        return None
    return f"x is on {x.device}, and Triton serves {' and '.join(ACCELERATORS)}"


def triton_obstacle() -> str | None:
    """Why Triton does not import here, or None."""
    missing: str | None = _missing_triton()
    return missing


def tensor_obstacle(
    x: torch.Tensor, weights: Sequence[torch.Tensor], *, explicit: bool
) -> str | None:
    """Why no Triton kernel can take these tensors, whatever the kernel does, or None.

    `explicit` is set where the caller insists on Triton: only then does the interpreter, which is
    a debugging aid, count for tensors on a CPU.
    """
    elsewhere = device_obstacle(x, explicit=explicit)
    if elsewhere is not None:
        return elsewhere
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights)):
        return "gradients are recorded, which only the torch form has; torch.no_grad() stops that"
    # A compiler's own tensors stand for plain ones, and meet an operator instead of a kernel.
    for tensor in () if torch.compiler.is_compiling() else (x, *weights):
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if isinstance(tensor, torch.Tensor) and not plain:
            return f"{type(tensor).__name__} is a tensor subclass, which may hold no memory"
    if x.dtype not in fused_experts.DTYPES:
        return f"x is {x.dtype}, and the kernels take {fused_experts.DTYPES}"
    return triton_obstacle()


def _obstacle(
    x: torch.Tensor, weights: Sequence[torch.Tensor], num_experts: int, *, explicit: bool
) -> str | None:
    """Why Triton cannot do this, or None; `explicit` as in `tensor_obstacle`."""
    obstacle = tensor_obstacle(x, weights, explicit=explicit)
    if obstacle is not None:
        return obstacle
    if len(weights) == 3:
        for weight in weights:
            if weight.dtype != x.dtype or not weight.is_contiguous():
                return f"an expert weight is {weight.dtype} or strided: x is {x.dtype}"
    elif num_experts > fused_router.MAX_EXPERTS:
        return f"{num_experts} experts a head are more than {fused_router.MAX_EXPERTS}"
    if x.shape[2] > 1 and x.stride(2) != 1:
        return f"x has strides {x.stride()}, and the kernels read adjacent channels"
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _missing_triton() -> str | None:
    """Why Triton does not import here, or None."""
    return _import_error()


@functools.cache
def _import_error() -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton does not import ({error}); pip install 'ulysses-comm[triton]'"
    return None


def _interpreted() -> bool:
    """Whether kernels defined from now on run under Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
