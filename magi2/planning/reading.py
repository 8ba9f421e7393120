"""What each rank of a topology would read from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from magi2.checkpoint.index import Checkpoint
from magi2.checkpoint.slices import is_sharded
from magi2.config import Magi2Config
from magi2.planning.layout import RankLayout
from magi2.planning.weights import WeightGroup
from magi2.topology import heads_per_rank


@dataclass(frozen=True, kw_only=True)
class RankReading:
    """Ranks that hold the same heads of the mixture read the same.

    Attributes:
        ranks: Those ranks of the world.
        heads: Heads of the mixture that they hold; perhaps none.
        nbytes: What each of them reads, in stored dtypes.
        num_shards: Files that it comes from; None without a checkpoint.
    """

    ranks: tuple[int, ...]
    heads: range
    nbytes: int
    num_shards: int | None


def plan_reading(
    config: Magi2Config,
    layout: RankLayout,
    weights: list[WeightGroup],
    checkpoint: Checkpoint | None = None,
) -> list[RankReading]:
    """What the ranks read, by expert rank.

    Args:
        config: The model's.
        layout: Of the ranks.
        weights: The model's parts, whose dtypes count without a checkpoint.
        checkpoint: An opened one: its stored bytes count, and its shards.
    """
    total = config.moe.num_heads
    run = heads_per_rank(total, layout.expert)
    readings = []
    for place in range(layout.expert):
        start = min(place * run, total)
        heads = range(start, start + layout.heads_local(total, place))
        if checkpoint is None:
            nbytes = sum(group.nbytes_local(len(heads), total) for group in weights)
            shards = None
        else:
            nbytes, shards = _stored(checkpoint, len(heads), total)
        ranks = tuple(range(place, layout.world_size, layout.expert))
        readings.append(RankReading(ranks=ranks, heads=heads, nbytes=nbytes, num_shards=shards))
    return readings


def _stored(checkpoint: Checkpoint, heads: int, num_heads: int) -> tuple[int, int]:
    nbytes, files = 0, set()
    for name, shard in checkpoint.file_of.items():
        if is_sharded(name):
            if not heads:
                continue
            nbytes += shard.tensors[name].num_bytes * heads // num_heads
        else:
            nbytes += shard.tensors[name].num_bytes
        files.add(shard.path)
    return nbytes, len(files)
