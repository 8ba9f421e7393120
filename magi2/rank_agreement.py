"""Whether all ranks were asked for the same, and came to the same: else the odd ones are named."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from magi2.hashes import raw_sha256

_MAX_SHOWN = 40


class UnlikeRanksError(ValueError):
    """Raised on every rank, with one text, when they were not started for the same."""


def check_alike(facts: Mapping[str, str], world_size: int) -> None:
    """Compare what the ranks were started with; all of the default group call this.

    Args:
        facts: Names and values, of which every rank must have the same.
        world_size: Their number; nothing is compared for 1.

    Raises:
        UnlikeRanksError: On every rank, if they differ; names each difference and who has it.
    """
    if world_size == 1:
        return
    gathered: list[Mapping[str, str] | None] = [None] * world_size
    dist.all_gather_object(gathered, dict(facts))
    everyone = [theirs or {} for theirs in gathered]
    differences = []
    for name in sorted(set().union(*everyone)):
        ranks_of: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            ranks_of.setdefault(theirs.get(name, "(not stated)"), []).append(rank)
        if len(ranks_of) > 1:
            told = ", ".join(f"{_short(v)} on rank(s) {ranks}" for v, ranks in ranks_of.items())
            differences.append(f"{name}: {told}")
    if differences:
        raise UnlikeRanksError(
            "the ranks were not started for the same run:\n  "
            + "\n  ".join(differences)
            + "\nStart every rank with the same options, on the same files and versions."
        )


def check_latents(video: torch.Tensor, audio: torch.Tensor, world_size: int) -> None:
    """Every rank steps the latents itself; where one computes other bits, its machine is at fault.

    Raises:
        RuntimeError: On every rank, if they differ.
    """
    if world_size == 1:
        return
    mine = (raw_sha256(video), raw_sha256(audio))
    gathered: list[tuple[str, str] | None] = [None] * world_size
    dist.all_gather_object(gathered, mine)
    odd = [rank for rank, theirs in enumerate(gathered) if theirs != gathered[0]]
    if odd:
        raise RuntimeError(
            f"rank(s) {odd} have other latents than rank 0 after the last step: expected the same "
            "bits, for all computed them from the same velocities. Look for a faulty device or "
            "mixed library versions there."
        )


def _short(value: str) -> str:
    return value if len(value) <= _MAX_SHOWN else value[: _MAX_SHOWN - 3] + "..."
