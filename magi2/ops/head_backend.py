"""What runs the elementwise work around the attention, and why: the one place that decides.

"torch" is the plain form, "triton" the kernels or an error that says why not, and "auto" takes
Triton for the operations that are known to be faster with it on a kind of device, as long as no
gradient is recorded, which only the torch form has. Under torch.compile a kernel is one operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi2.ops import attention_heads as heads
from magi2.ops.attention_heads import gate_heads_torch, send_buffer_views
from magi2.ops.backend import tensor_obstacle
from ulysses_comm.hardware import Choice

QKV_BACKENDS = ("auto", "torch", "triton")
OPERATIONS = ("store", "weigh", "gate")

# Operations that were measured to be faster with Triton, by kind of device:
# `benchmarks/bench_attention.py`.
_MEASURED_FASTER: dict[str, tuple[str, ...]] = {"cuda": OPERATIONS}


def check_qkv_backend(requested: str) -> None:
    """Refuse a name that is none.

    Raises:
        ValueError: As said.
    """
    if requested not in QKV_BACKENDS:
        raise ValueError(f"qkv_backend={requested!r}: expected one of {QKV_BACKENDS}.")


def choose_heads(
    requested: str, operation: str, x: torch.Tensor, others: Sequence[torch.Tensor] = ()
) -> Choice:
    """Decide for one operation.

    Args:
        requested: One of `QKV_BACKENDS`.
        operation: One of `OPERATIONS`: norms, rotation and send layout; the product with what the
            sinks leave; gather and gate.
        x: What it reads.
        others: What it reads besides and may have gradients: weights, gates.

    Returns:
        "torch" or "triton", with the reason.

    Raises:
        ValueError: If `requested` is no backend.
        RuntimeError: If it is "triton" and Triton cannot do this.
    """
    check_qkv_backend(requested)
    if requested == "torch":
        return Choice("torch", "asked for")
    kind = x.device.type
    if requested == "auto" and operation not in _MEASURED_FASTER.get(kind, ()):
        return Choice("torch", f"Triton is not known to be faster for {operation!r} on {kind}")
    obstacle = _obstacle(x, others, explicit=requested == "triton")
    if obstacle is None:
        reason = "asked for" if requested == "triton" else f"measured to be faster on {kind}"
        return Choice("triton", reason)
    if requested == "triton":
        raise RuntimeError(
            f"qkv_backend='triton' cannot run: {obstacle}. Use 'auto', which takes torch then."
        )
    return Choice("torch", obstacle)


def store_heads(
    qkv_TF: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    group_sizes: Sequence[int],
    inverse: torch.Tensor,
    rotary: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    world_size: int,
) -> list[torch.Tensor]:
    """`store_heads_triton`, as views of its buffer: see `send_buffer_views`."""
    store = store_heads_op if torch.compiler.is_compiling() else heads.store_heads_triton
    send: torch.Tensor = store(
        qkv_TF,
        q_weight,
        k_weight,
        list(group_sizes),
        inverse,
        rotary,
        num_heads,
        num_kv_heads,
        eps,
        world_size,
    )
    return send_buffer_views(send, num_heads, num_kv_heads)


def gate_heads(
    received: torch.Tensor, permutation: torch.Tensor, gate_TH: torch.Tensor, backend: str
) -> torch.Tensor:
    """`gate_heads_torch`, by `backend`: one of `QKV_BACKENDS`."""
    chosen = choose_heads(backend, "gate", received, [gate_TH])
    if chosen.name == "torch":
        return gate_heads_torch(received, permutation, gate_TH)
    if torch.compiler.is_compiling():
        gated: torch.Tensor = gate_heads_op(received, permutation, gate_TH)
        return gated
    return heads.gate_heads_triton(received, permutation, gate_TH)


@torch.library.custom_op("magi2::store_heads", mutates_args=())
def store_heads_op(
    qkv_TF: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    group_sizes: Sequence[int],
    inverse: torch.Tensor,
    rotary: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    world_size: int,
) -> torch.Tensor:
    """`store_heads_triton` as an operator that a compiler takes whole."""
    return heads.store_heads_triton(
        qkv_TF,
        q_weight,
        k_weight,
        group_sizes,
        inverse,
        rotary,
        num_heads,
        num_kv_heads,
        eps,
        world_size,
    )


@store_heads_op.register_fake
def _(
    qkv_TF: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    group_sizes: Sequence[int],
    inverse: torch.Tensor,
    rotary: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    world_size: int,
) -> torch.Tensor:
    tokens, features = qkv_TF.shape
    slots = (num_heads + 2 * num_kv_heads) // world_size
    return qkv_TF.new_empty(world_size, tokens, slots, features // (slots * world_size))


@torch.library.custom_op("magi2::gate_heads", mutates_args=())
def gate_heads_op(
    received: torch.Tensor, permutation: torch.Tensor, gate_TH: torch.Tensor
) -> torch.Tensor:
    """`gate_heads_triton` as an operator that a compiler takes whole."""
    return heads.gate_heads_triton(received, permutation, gate_TH)


@gate_heads_op.register_fake
def _(received: torch.Tensor, permutation: torch.Tensor, gate_TH: torch.Tensor) -> torch.Tensor:
    return received.new_empty(received.shape[0], gate_TH.shape[1] * received.shape[-1])


def _obstacle(x: torch.Tensor, others: Sequence[torch.Tensor], *, explicit: bool) -> str | None:
    """Why Triton cannot do this, or None; `explicit` where the caller insists on Triton."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return f"x has strides {x.stride()}, and the kernels read adjacent channels"
    return tensor_obstacle(x, others, explicit=explicit)
