"""Process groups of one world, one for each transport, and the peers' packages."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)


@dataclass
class Groups:
    """What the candidates exchange over.

    Attributes:
        device: Of this rank.
        nccl: Torch's collectives; gloo on a CPU.
        lent: Symmetric memory whose results are lent; None where it is missing.
        owned: Symmetric memory whose results belong to the caller.
        left_out: Why a transport or a package is missing.
    """

    device: torch.device
    nccl: dist.ProcessGroup
    lent: dist.ProcessGroup | None = None
    owned: dist.ProcessGroup | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.nccl.rank()

    @property
    def size(self) -> int:
        return self.nccl.size()

    @classmethod
    def make(cls, device: torch.device) -> Groups:
        """Make all groups; every rank of the world calls this."""
        world = dist.group.WORLD
        assert world is not None
        groups = cls(device, world)
        for mode in ("lent", "owned"):
            group = dist.new_group(timeout=PATIENCE)
            assert isinstance(group, dist.ProcessGroup)
            # The first collective makes the communicator; not while something is timed.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            reason = use_symmetric_memory(group, mode)
            if everyone_agrees(reason == ""):
                setattr(groups, mode, group)
            else:
                groups.left_out[f"ours symmetric, {mode}"] = reason or "another rank cannot"
        return groups


def use_symmetric_memory(group: dist.ProcessGroup, mode: str) -> str:
    """Choose the transport for a group; return why it cannot be, or an empty text."""
    try:
        from ulysses_comm import use_transport
    except ImportError:
        return "this ulysses_comm has no use_transport"
    try:
        # Without slots every result is copied to memory of the caller's.
        options = {"slots": 0} if mode == "owned" else {}
        choice = use_transport(group, "symm_mem", timeout=PATIENCE, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if choice.name == "symm_mem" else f"{choice.name} instead: {choice.reason}"


def everyone_agrees(this_rank: bool) -> bool:
    """Whether it holds on every rank."""
    answers: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(answers, this_rank)
    return all(answers)


def load_fast_ulysses(groups: Groups) -> Any:
    """Its group over these ranks, or None; the reason is noted."""
    made, reason = None, ""
    try:
        import fast_ulysses

        made = fast_ulysses.UlyssesGroup(groups.nccl, groups.device)
    except Exception as error:
        reason = "not installed" if isinstance(error, ModuleNotFoundError) else repr(error)[:300]
    if everyone_agrees(made is not None):
        return made
    groups.left_out["fast-ulysses"] = reason or "another rank cannot"
    return None


def note_flashinfer(groups: Groups) -> None:
    """Say whether FlashInfer is there.

    It compiles its communicator on the machine, from sources that want packages of several hundred
    MB; no candidate here calls it.
    """
    try:
        import flashinfer

        said = f"{flashinfer.__version__} is installed, but no candidate calls it"
    except Exception as error:
        said = "not installed" if isinstance(error, ModuleNotFoundError) else repr(error)[:200]
    groups.left_out["flashinfer"] = said
