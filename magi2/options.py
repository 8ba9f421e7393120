"""Choices that a checkpoint leaves open: they change roundings or layouts, not the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magi2.ops.attention_backends import check_attention_backend
from magi2.ops.backend import MOE_BACKENDS
from magi2.ops.fused_maps import ROW_SUMS
from magi2.ops.head_backend import check_qkv_backend
from magi2.ops.stream_backend import MHC_BACKENDS
from magi2.ops.token_permute import SUM_ORDERS

ROUTER_BIASES = ("ema", "raw")

# Whether a kind of device uses the head-shard layouts when nobody says. Packed queries, keys and
# values cost the one copy that the exchange would make, and none once a compiler stores them in
# place; the output as head shards always saves a copy. A device not listed is not known to read
# the strided views well and gets the flat layouts.
_HEAD_SHARDS_BY_DEVICE = {"cpu": True, "cuda": True, "musa": True}

# Whether experts that several runs of ranks hold are reached over all of them. A rank then sends
# (n - 1) / n of its rows with n the sequence's ranks, not the run's: more, in more and smaller
# messages, over the links to all ranks. On only where that is known to be used, which is MUSA.
_REPLICATED_EXCHANGE_BY_DEVICE = {"musa": True}

# Whether the streams are projected to logits by one product for each stream, instead of a long one
# with 24 columns. On only where that is known to be used, which is MUSA.
_LOGITS_BY_STREAM_BY_DEVICE = {"musa": True}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run a model, decided once when it is built.

    Args:
        route_sum: Order in which a token's expert outputs are added: "choice" in float32 from the
            best choice on, rounded once; "expert" in ascending expert number, rounded to the
            activation dtype each time, as the reference's deterministic mode does.
        router_bias: Which of the checkpoint's two biases chooses experts: "ema", as the released
            loader does, or "raw".
        qkv_head_shards: Whether the attention stores its queries, keys and values as head shards
            of one send buffer; None for the device's default. The same bits either way.
        output_head_shards: Whether it reads its output as the head shards that were received;
            None for the device's default. The same bits either way.
        qkv_to_peers: Whether the kernel of `qkv_backend` stores queries, keys and values straight
            into the ranks' receive buffers, where the sequence's group exchanges through symmetric
            memory (docs/nvlink.md) and the attention's projections are not compiled. The same bits.
        replicated_expert_exchange: Whether the way to the experts goes over all ranks of the
            sequence where consecutive runs of them each hold all experts; None for the device's
            default. Every row is moved unchanged; its experts meet it beside other rows.
        moe_backend: What runs the mixture's router and experts: "torch", "triton", or "auto" for
            Triton where it was measured to be faster and no gradient is recorded. Float32 sums
            differ in their order.
        attention_backend: What runs the attention, as `magi2.ops.attention_backends` lists them;
            "auto" for a kernel where it was measured, else the plain form. Sums differ in their
            order.
        qkv_backend: What runs the elementwise work around the attention (norms, rotation and send
            layout of q, k and v; the sinks' part; gather and gates): "torch", "triton", or "auto"
            for Triton where that was measured to be faster.
        mhc_backend: What runs the hyper-connections: "torch", "triton", or "auto" for Triton where
            it was measured to be faster and no gradient is recorded. Mixing has the same bits, the
            sums behind the maps another order.
        logits_by_stream: Whether their torch form projects each stream by itself and adds the
            results in float32; None for the device's default. Sums differ in their order.
        sinkhorn_row_sums: Order in which their Triton form adds rows of four in the Sinkhorn
            iterations: "left" folds, as torch does on a CPU, or "interleaved", as eager torch does
            on CUDA. The torch form adds as torch does, whatever is given here.
    """

    route_sum: str = "choice"
    router_bias: str = "ema"
    qkv_head_shards: bool | None = None
    output_head_shards: bool | None = None
    qkv_to_peers: bool = True
    replicated_expert_exchange: bool | None = None
    moe_backend: str = "auto"
    attention_backend: str = "auto"
    qkv_backend: str = "auto"
    mhc_backend: str = "auto"
    logits_by_stream: bool | None = None
    sinkhorn_row_sums: str = "left"

    def __post_init__(self) -> None:
        if self.route_sum not in SUM_ORDERS:
            raise ValueError(f"route_sum={self.route_sum!r}: expected one of {SUM_ORDERS}.")
        if self.router_bias not in ROUTER_BIASES:
            raise ValueError(f"router_bias={self.router_bias!r}: expected one of {ROUTER_BIASES}.")
        if self.moe_backend not in MOE_BACKENDS:
            raise ValueError(f"moe_backend={self.moe_backend!r}: expected one of {MOE_BACKENDS}.")
        if not isinstance(self.qkv_to_peers, bool):
            raise ValueError(f"qkv_to_peers={self.qkv_to_peers!r}: expected True or False.")
        check_attention_backend(self.attention_backend)
        check_qkv_backend(self.qkv_backend)
        if self.mhc_backend not in MHC_BACKENDS:
            raise ValueError(f"mhc_backend={self.mhc_backend!r}: expected one of {MHC_BACKENDS}.")
        if self.sinkhorn_row_sums not in ROW_SUMS:
            raise ValueError(
                f"sinkhorn_row_sums={self.sinkhorn_row_sums!r}: expected one of {ROW_SUMS}."
            )
        for name in (
            "qkv_head_shards",
            "output_head_shards",
            "replicated_expert_exchange",
            "logits_by_stream",
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ValueError(
                    f"{name}={value!r}: expected True, False or None, the device's default."
                )


def head_shards_by_default(device: torch.device | str | None) -> bool:
    """Whether modules on this device use the head-shard layouts when nobody says.

    For "meta" the device that this machine computes on decides; None is torch's default device.
    """
    return _HEAD_SHARDS_BY_DEVICE.get(_kind_of(device), False)


def replicated_exchange_by_default(device: torch.device | str | None) -> bool:
    """Whether a model on this device reaches replicated experts over all ranks when nobody says.

    Devices as in `head_shards_by_default`.
    """
    return _REPLICATED_EXCHANGE_BY_DEVICE.get(_kind_of(device), False)


def logits_by_stream_by_default(device: torch.device | str | None) -> bool:
    """Whether modules on this device project each stream by itself when nobody says.

    Devices as in `head_shards_by_default`.
    """
    return _LOGITS_BY_STREAM_BY_DEVICE.get(_kind_of(device), False)


def _kind_of(device: torch.device | str | None) -> str:
    kind = torch.get_default_device().type if device is None else torch.device(device).type
    if kind == "meta":
        accelerator = torch.accelerator.current_accelerator()
        kind = "cpu" if accelerator is None else accelerator.type
    return kind
