"""Elementwise work around the attention: norms, rotation and send layout, sinks, gates.

Letters: T tokens, H query heads, G key/value heads, W ranks, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from magi2.ops.grouped_norm import grouped_norm_torch
from magi2.ops.launch import interprets, on_device
from magi2.ops.rotary import apply_rotary_torch
from ulysses_comm import flatten_head_shards


@dataclass(frozen=True, kw_only=True)
class HeadTile:
    """How this work is cut into programs; no bit depends on it.

    Attributes:
        tokens: Of a program, a power of two.
        heads: Of a program, one after the other.
        num_warps: Warps of a program.
    """

    tokens: int = 8
    heads: int = 8
    num_warps: int = 4


# Weighing and gating read one rank's heads at a time, of which the model has three on eight ranks.
_ONE_RANK = HeadTile(heads=3)
# Over links smaller pieces keep more of them busy.
_TO_PEERS = HeadTile(heads=4)


def rotated_heads_torch(
    qkv_TF: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    group_sizes: Sequence[int],
    inverse: torch.Tensor,
    rotary: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> list[torch.Tensor]:
    """Queries and keys normed and rotated, and values, of the rows of one product.

    Args:
        qkv_TF: (tokens, (H + 2 G) * D) in modality order: q, then k, then v, each head by head.
        q_weight: (groups, D) float32 of the queries' norm, as in `grouped_norm_torch`.
        k_weight: (groups, D) float32 of the keys'.
        group_sizes: Tokens of each group.
        inverse: (tokens,) rows that bring modality order into packed order.
        rotary: (tokens, 2 * half) float32, in packed order.
        num_heads: H.
        num_kv_heads: G.
        eps: Of the norms.

    Returns:
        (T, H, D), (T, G, D) and (T, G, D) in packed order and qkv's dtype. The norms and the
        rotation are float32: one rounding, at the end.
    """
    heads = qkv_TF.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    rotated = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        normed = grouped_norm_torch(x, weight, group_sizes, eps, torch.float32)
        turned = apply_rotary_torch(normed.index_select(0, inverse), rotary)
        rotated.append(turned.to(qkv_TF.dtype))
    return [*rotated, v.index_select(0, inverse)]


def store_heads_triton(
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
    tile: HeadTile | None = None,
) -> torch.Tensor:
    """`rotated_heads_torch` in one launch, stored where the exchange sends it from.

    Args:
        qkv_TF: As there, with adjacent columns; and so are the others.
        q_weight: As there.
        k_weight: As there.
        group_sizes: As there.
        inverse: As there.
        rotary: As there.
        num_heads: As there; world_size divides it.
        num_kv_heads: As there; world_size divides it.
        eps: As there.
        world_size: Ranks that the heads are spread over.
        tile: How to cut the work.

    Returns:
        The send buffer, (W, T, (H + 2 G) / W, D): see `send_buffer_views`. v has the bits of the
        plain form. q and k have them but for the order in which squares are added.
    """
    tokens, features = qkv_TF.shape
    heads = num_heads + 2 * num_kv_heads
    _check_heads(qkv_TF, heads, num_heads, num_kv_heads, world_size)
    send = qkv_TF.new_empty(world_size, tokens, heads // world_size, features // heads)
    _store_heads(
        qkv_TF, q_weight, k_weight, group_sizes, inverse, rotary, num_heads, num_kv_heads, eps,
        world_size, tile or HeadTile(), send, alignment=0,
    )  # fmt: skip
    return send


def store_heads_at_triton(
    qkv_TF: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    group_sizes: Sequence[int],
    inverse: torch.Tensor,
    rotary: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    addresses_W: torch.Tensor,
    tile: HeadTile | None = None,
) -> None:
    """`store_heads_triton` without a send buffer: each rank's part goes where it is wanted.

    Args:
        qkv_TF: As there, and so are the others.
        q_weight: As there.
        k_weight: As there.
        group_sizes: As there.
        inverse: As there.
        rotary: As there.
        num_heads: As there.
        num_kv_heads: As there.
        eps: As there.
        addresses_W: int64, on qkv's device: for each rank the address of what would be send[rank],
            dense, of qkv's dtype, aligned to 16 bytes or else to a head. As those of
            `ulysses_comm.open_head_scatter`, they may be of other GPUs' memory.
        tile: As there.

    The bits are those of `store_heads_triton`.
    """
    heads, world_size = num_heads + 2 * num_kv_heads, addresses_W.shape[0]
    _check_heads(qkv_TF, heads, num_heads, num_kv_heads, world_size)
    head_bytes = qkv_TF.shape[1] // heads * qkv_TF.element_size()
    # The largest power of two that divides 16 and a head's bytes, and with it every address.
    alignment = (head_bytes | 16) & -(head_bytes | 16)
    _store_heads(
        qkv_TF, q_weight, k_weight, group_sizes, inverse, rotary, num_heads, num_kv_heads, eps,
        world_size, tile or _TO_PEERS, addresses_W, alignment=alignment,
    )  # fmt: skip


def _store_heads(
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
    tile: HeadTile,
    send: torch.Tensor,
    *,
    alignment: int,
) -> None:
    """Launch the kernel, if there is anything to store."""
    from magi2.kernels.attention_heads import store_heads_kernel

    tokens, groups = qkv_TF.shape[0], q_weight.shape[0]
    if not qkv_TF.numel():
        return
    parts = -(-num_heads // tile.heads) - 2 * (-num_kv_heads // tile.heads)
    blocks = -(-tokens // tile.tokens)
    with on_device(qkv_TF):
        store_heads_kernel[(blocks * parts,) if alignment else (blocks, parts)](
            qkv_TF,
            send,
            q_weight.contiguous(),
            k_weight.contiguous(),
            inverse,
            rotary.contiguous(),
            tokens,
            group_sizes[0] if groups > 1 else 0,
            group_sizes[0] + group_sizes[1] if groups > 1 else 0,
            qkv_TF.stride(0),
            eps,
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            WORLD=world_size,
            HALF=rotary.shape[1] // 2,
            GROUPS=groups,
            ALIGNMENT=alignment,
            **_launch(tile, qkv_TF.shape[1] // (num_heads + 2 * num_kv_heads), qkv_TF),
        )


def send_buffer_views(
    send_WTFD: torch.Tensor, num_heads: int, num_kv_heads: int
) -> list[torch.Tensor]:
    """Queries, keys and values of `store_heads_triton`'s buffer.

    Returns:
        Head shards (T, W, H / W, D) and so on, which the exchange sends in place; where there is
        one rank, (T, H, D) and so on.
    """
    world_size = send_WTFD.shape[0]
    counts = [n // world_size for n in (num_heads, num_kv_heads, num_kv_heads)]
    shards = send_WTFD.transpose(0, 1).split(counts, dim=2)
    return [shard.squeeze(1) for shard in shards] if world_size == 1 else list(shards)


def weigh_heads_triton(
    attended_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    sink_total_H: torch.Tensor,
    out_THD: torch.Tensor,
    tile: HeadTile | None = None,
) -> None:
    """Multiply by `sink_weights_torch(lse, sink_total)` and round once, in one launch.

    Args:
        attended_THD: Attention without sinks, adjacent channels, any other strides.
        lse_TH: Its log-sum-exp, float32, any strides.
        sink_total_H: float32.
        out_THD: Dense; written. May be attended_THD.
        tile: How to cut the work.

    The weight is a few units of float32 from the plain form's.
    """
    from magi2.kernels.attention_heads import weigh_heads_kernel

    tokens, heads, dim = attended_THD.shape
    if not out_THD.is_contiguous() or out_THD.shape != attended_THD.shape:
        raise ValueError(
            f"out is {list(out_THD.shape)} with strides {out_THD.stride()}: expected "
            f"{list(attended_THD.shape)}, dense."
        )
    tile = tile or _ONE_RANK
    if attended_THD.numel():
        with on_device(attended_THD):
            weigh_heads_kernel[(-(-tokens // tile.tokens), -(-heads // tile.heads))](
                attended_THD,
                lse_TH,
                sink_total_H.contiguous(),
                out_THD,
                tokens,
                *attended_THD.stride()[:2],
                *lse_TH.stride(),
                HEADS=heads,
                **_launch(tile, dim, attended_THD),
            )


def gate_heads_torch(
    received: torch.Tensor, permutation: torch.Tensor, gate_TH: torch.Tensor
) -> torch.Tensor:
    """Heads into modality order, times the sigmoids of their gates.

    Args:
        received: (T, H, D), or the head shards (T, W, H / W, D) as they were received, in packed
            order.
        permutation: (T,) rows that bring packed order into modality order.
        gate_TH: Logits in modality order and received's dtype.

    Returns:
        (T, H * D). The sigmoid is rounded, and the product.
    """
    # Gathered first: the copy that brings rows into modality order also flattens the shards.
    out_THD = received.index_select(0, permutation)
    if out_THD.dim() == 4:
        out_THD = flatten_head_shards(out_THD)
    return (out_THD * torch.sigmoid(gate_TH).unsqueeze(-1)).flatten(1)


def gate_heads_triton(
    received: torch.Tensor,
    permutation: torch.Tensor,
    gate_TH: torch.Tensor,
    tile: HeadTile | None = None,
) -> torch.Tensor:
    """`gate_heads_torch` in one launch, which reads the receive buffer as it lies.

    A gate may be rounded to its neighbour where another exponential moves it across the middle.
    """
    from magi2.kernels.attention_heads import gate_heads_kernel

    shards = received.unsqueeze(1) if received.dim() == 3 else received
    tokens, ranks, local, dim = shards.shape
    heads = ranks * local
    if gate_TH.shape != (tokens, heads) or (received.stride(-1) != 1 and dim > 1):
        raise ValueError(
            f"received is {list(received.shape)} with strides {received.stride()}, the gates are "
            f"{list(gate_TH.shape)}: expected adjacent channels, and ({tokens}, {heads}) gates."
        )
    gate_TH = gate_TH if gate_TH.stride(1) == 1 else gate_TH.contiguous()
    out = received.new_empty(tokens, heads * dim)
    tile = tile or _ONE_RANK
    if out.numel():
        with on_device(received):
            gate_heads_kernel[(-(-tokens // tile.tokens), -(-heads // tile.heads))](
                shards,
                permutation,
                gate_TH,
                out,
                tokens,
                *shards.stride()[:3],
                gate_TH.stride(0),
                HEADS=heads,
                LOCAL=local,
                **_launch(tile, dim, received),
            )
    return out


def _launch(tile: HeadTile, dim: int, tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "D": dim,
        "HEADS_STEP": tile.heads,
        "BLOCK_T": tile.tokens,
        "BLOCK_D": 1 << (dim - 1).bit_length(),
        "INTERPRETED": interprets(tensor),
        "num_warps": tile.num_warps,
        # Eager code rounds a product before it adds to it.
        "enable_fp_fusion": False,
    }


def _check_heads(
    qkv_TF: torch.Tensor, heads: int, num_heads: int, num_kv_heads: int, world_size: int
) -> None:
    if qkv_TF.dim() != 2 or qkv_TF.shape[1] % heads or qkv_TF.stride(1) != 1:
        raise ValueError(
            f"qkv is {list(qkv_TF.shape)} with strides {qkv_TF.stride()}: expected (tokens, "
            f"{heads} heads * head_dim), columns adjacent."
        )
    if num_heads % world_size or num_kv_heads % world_size:
        raise ValueError(
            f"{num_heads} query and {num_kv_heads} key/value heads over {world_size} ranks: "
            "expected a number of ranks that divides both."
        )
