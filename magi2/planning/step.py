"""A request on a topology: tokens, exchanges, memory and predicted time of one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magi2.config import Magi2Config
from magi2.modules.embeddings import NUM_COORDINATES
from magi2.planning.devices import DeviceProfile
from magi2.planning.layout import RankLayout
from magi2.planning.traffic import ExchangePlan, plan_exchanges
from magi2.planning.weights import WeightGroup, weight_groups
from magi2.planning.work import Work, plan_work

# Peak memory of a layer in units of its streams, in and out: measured on an H200 at 3702 tokens and
# the released width (tests/magi2/test_memory.py). In float32 no widened copies are made.
_LAYER_UNITS = {torch.bfloat16: {"dense": 5.1, "mixture": 4.4}, torch.float32: {"dense": 4.0}}
_FLOAT32 = torch.float32.itemsize


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one step takes on the busiest rank. A step is one call of the model.

    Attributes:
        config: The model's.
        layout: Of the ranks.
        device: Whose rates the times are of.
        weights: The model's parts.
        request_bytes: What every rank keeps of the whole request: packed input, time columns,
            coordinates.
        activation_bytes: Peak of a layer, an estimate.
        exchanges: Between ranks.
        work: Of each region.
    """

    config: Magi2Config
    layout: RankLayout
    device: DeviceProfile
    weights: list[WeightGroup]
    request_bytes: int
    activation_bytes: int
    exchanges: list[ExchangePlan]
    work: dict[str, Work]

    @property
    def expert_bytes(self) -> int:
        """Of the routed experts, on the rank with the most heads."""
        return sum(self._local(group) for group in self.weights if group.sharded)

    @property
    def other_weight_bytes(self) -> int:
        """Of all other weights, which every rank holds whole."""
        return sum(group.nbytes for group in self.weights if not group.sharded)

    @property
    def memory_bytes(self) -> int:
        """All together."""
        weights = self.expert_bytes + self.other_weight_bytes
        return weights + self.request_bytes + self.activation_bytes

    @property
    def fits(self) -> bool:
        """Whether that is less than the device has."""
        return self.memory_bytes < self.device.memory_bytes

    @property
    def component_seconds(self) -> dict[str, float]:
        """Predicted time of each region."""
        return {name: work.seconds(self.device) for name, work in self.work.items()}

    @property
    def exchange_seconds(self) -> dict[str, float]:
        """Predicted time of each kind of exchange."""
        links = self.device.links
        return {exchange.name: exchange.seconds(links) for exchange in self.exchanges}

    @property
    def seconds(self) -> float:
        """Predicted time of a step: nothing overlaps, no kernel waits to be launched."""
        return sum(self.component_seconds.values()) + sum(self.exchange_seconds.values())

    def _local(self, group: WeightGroup) -> int:
        heads = self.config.moe.num_heads
        return group.nbytes_local(self.layout.heads_local(heads), heads)


def plan_step(
    config: Magi2Config,
    layout: RankLayout,
    device: DeviceProfile,
    *,
    text_tokens: int,
    time_channels: int = 64,
    weights: list[WeightGroup] | None = None,
) -> StepPlan:
    """Plan a step.

    Args:
        config: The model's.
        layout: Of the ranks, with the request's tokens.
        device: One for each rank.
        text_tokens: Of both branches.
        time_channels: Columns of the time embedding.
        weights: From `weight_groups(config)`, if known.
    """
    total = sum(layout.tokens)
    columns = config.input_channels + time_channels + NUM_COORDINATES + 1
    share = min(layout.tokens_local, -(-text_tokens // layout.world_size))
    return StepPlan(
        config=config,
        layout=layout,
        device=device,
        weights=weights or weight_groups(config),
        request_bytes=total * columns * _FLOAT32,
        activation_bytes=_activation_bytes(config, layout.tokens_local),
        exchanges=plan_exchanges(config, layout),
        work=plan_work(config, layout, share),
    )


def _activation_bytes(config: Magi2Config, tokens: int) -> int:
    kinds = set()
    if config.moe.layers:
        kinds.add("mixture")
    if len(config.moe.layers) < config.num_layers:
        kinds.add("dense")
    measured = _LAYER_UNITS[config.dtype]
    units = max(measured.get(kind, measured["dense"]) for kind in kinds)
    return int(units * 2 * tokens * config.stream_width * config.dtype.itemsize)
