"""A process group that is alone in this process: it notes what one rank sends.

It knows nothing of the simulator and nothing of the exchanges, so it can testify about both: which
tensor a rank hands to the collective (its address, its bits), with which split sizes, how often.
Two passes deliver too: the first notes every rank's send, the second fills every receive buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")


@dataclass(frozen=True)
class Sent:
    """One all-to-all as one rank called it."""

    address: int  # of the first element sent
    content: torch.Tensor  # a copy, in the shape and dtype that was passed
    contiguous: bool
    input_split_sizes: list[int]
    output_split_sizes: list[int]
    received: torch.Tensor  # the very tensor that was passed to receive into


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@dataclass
class Script:
    """What a spy notes and what it delivers, for one rank."""

    sent: list[Sent] = field(default_factory=list)
    deliver: Sequence[torch.Tensor] | None = None  # chunks of rows by source rank
    copied_bytes: list[tuple[int, bool]] = field(default_factory=list)


class SpyGroup(dist.ProcessGroup):
    """Rank `rank` of `world_size` ranks, of which only this one exists."""

    def __init__(
        self, rank: int, world_size: int, deliver: Sequence[torch.Tensor] | None = None
    ) -> None:
        super().__init__(rank, world_size)
        self._rank = rank
        self._size = world_size
        self.script = Script(deliver=deliver)

    @property
    def sent(self) -> list[Sent]:
        return self.script.sent

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "spy"

    @property
    def group_name(self) -> str:
        return f"spy of rank {self._rank}"

    def get_group_store(self) -> dist.Store:
        raise AssertionError("the group's store was touched though checking is off")

    def record_copied_bytes(self, nbytes: int, *, after: bool) -> None:
        self.script.copied_bytes.append((nbytes, after))

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        assert output.is_contiguous(), "the receive buffer is not contiguous"
        assert input.dtype == output.dtype, f"{input.dtype} sent, {output.dtype} received"
        assert input.shape[1:] == output.shape[1:]
        assert sum(input_split_sizes) == input.shape[0], (input_split_sizes, input.shape)
        assert sum(output_split_sizes) == output.shape[0], (output_split_sizes, output.shape)
        with torch.no_grad(), OperatorLog.paused():
            self.sent.append(
                Sent(
                    address=input.data_ptr(),
                    content=input.detach().clone(),
                    contiguous=input.is_contiguous(),
                    input_split_sizes=list(input_split_sizes),
                    output_split_sizes=list(output_split_sizes),
                    received=output,
                )
            )
            if self.script.deliver is not None:
                chunks = output.detach().split(list(output_split_sizes))
                for chunk, rows in zip(chunks, self.script.deliver, strict=True):
                    chunk.copy_(rows)
        return _Done()

    all_to_all_single = alltoall_base


def exchange_with_spies(
    world_size: int, step: Callable[[dist.ProcessGroup], Result]
) -> tuple[list[Result], list[Sent]]:
    """Run `step(group)` of one collective for every rank twice: note what is sent, then deliver.

    Returns:
        What the second pass returned and what it sent, in rank order.
    """
    first = [SpyGroup(rank, world_size) for rank in range(world_size)]
    for group in first:
        step(group)
        assert len(group.sent) == 1, f"{len(group.sent)} collectives instead of one"
    chunks = [group.sent[0].content.split(group.sent[0].input_split_sizes) for group in first]
    results, sent = [], []
    for rank in range(world_size):
        group = SpyGroup(
            rank, world_size, deliver=[chunks[source][rank] for source in range(world_size)]
        )
        results.append(step(group))
        assert len(group.sent) == 1
        sent.append(group.sent[0])
    return results, sent


class OperatorLog(TorchDispatchMode):
    """Notes every operator that runs in its scope, and the bytes that each one writes anew."""

    # Operators that move no byte: allocation and views.
    FREE = ("empty", "view", "permute", "transpose", "slice", "select", "split", "detach", "alias",
            "as_strided", "reshape", "unflatten", "flatten", "narrow", "t", "expand", "unbind",
            "_unsafe_view", "lift_fresh", "new_empty", "unsqueeze", "squeeze")  # fmt: skip

    _paused = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not OperatorLog._paused:
            self.calls.append((func._schema.name, args, result))
        return result

    @classmethod
    @contextmanager
    def paused(cls) -> Iterator[None]:
        """Note nothing in this scope: what a spy does to take notes is not the library's doing."""
        before, cls._paused = cls._paused, True
        try:
            yield
        finally:
            cls._paused = before

    def names(self) -> list[str]:
        """Return the names of all operators, such as `aten::copy_`."""
        return [name for name, _, _ in self.calls]

    def moved(self) -> list[tuple[str, int]]:
        """Return (name, bytes written) of every aten operator that is no allocation and no view."""
        moved = []
        for name, _, result in self.calls:
            space, _, short = name.partition("::")
            if space != "aten" or short in self.FREE or short.startswith("empty"):
                continue
            if isinstance(result, torch.Tensor):
                moved.append((short, result.nbytes))
        return moved

    def allocated_bytes(self) -> list[int]:
        """Return the bytes of every buffer that was allocated empty."""
        return [
            result.nbytes
            for name, _, result in self.calls
            if isinstance(result, torch.Tensor) and "empty" in name
        ]
