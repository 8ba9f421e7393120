"""Choices that a checkpoint leaves open: they change roundings or layouts, not the model."""

from __future__ import annotations

from dataclasses import dataclass

from magi2.ops.token_permute import SUM_ORDERS

ROUTER_BIASES = ("ema", "raw")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run a model, decided once when it is built.

    Args:
        route_sum: Order in which a token's expert outputs are added: "choice" in float32 from the
            best choice on, rounded once; "expert" in ascending expert number, rounded to the
            activation dtype each time, as the reference's deterministic mode does.
        router_bias: Which of the checkpoint's two biases chooses experts: "ema", as the released
            loader does, or "raw".
    """

    route_sum: str = "choice"
    router_bias: str = "ema"

    def __post_init__(self) -> None:
        if self.route_sum not in SUM_ORDERS:
            raise ValueError(f"route_sum={self.route_sum!r}: expected one of {SUM_ORDERS}.")
        if self.router_bias not in ROUTER_BIASES:
            raise ValueError(f"router_bias={self.router_bias!r}: expected one of {ROUTER_BIASES}.")
