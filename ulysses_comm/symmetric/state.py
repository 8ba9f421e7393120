"""What a rank keeps for a group that exchanges through symmetric memory."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from ulysses_comm.symmetric.capture import capture_of, wait_for
from ulysses_comm.symmetric.memory import Block, SymmetricMemory
from ulysses_comm.symmetric.moves import (
    DEFAULT_TUNING,
    Cut,
    Exchange,
    Layout,
    Tuning,
    cut_moves,
)
from ulysses_comm.symmetric.pool import Pool, fitting, size_class
from ulysses_comm.symmetric.report import Report

# Send buffers that asynchronous exchanges take in turn.
RING = 2

MAX_INPUTS = 8  # of the kernels, which are not imported here

_MOST_PLANS = 1024

_LONGEST_NS = 2**63 - 1  # of the kernels' clock: 292 years


class Plan(NamedTuple):
    """How to move one layout, and its table on the device."""

    cut: Cut
    table: torch.Tensor


class SendBuffers(NamedTuple):
    """The ring of send buffers of one size."""

    nbytes: int
    blocks: list[Block]


class Use(NamedTuple):
    """When a send buffer of the ring was last read out on this rank.

    Attributes:
        event: Comes after the copies and the words that tell of them.
        capture: The CUDA graph that was being captured; None if none was.
    """

    event: torch.cuda.Event
    capture: int | None


class GroupState:
    """Memory, signals and counters of one rank of a group.

    Attributes:
        rank: This rank.
        world_size: Ranks of the group.
        device: Their memory's kind; on this rank its GPU.
        slots: Slots of each pool.
        timeout_ns: How long kernels wait for a peer.
        programs: Programs of a launch.
        tuning: How moves are cut.
        pad: This rank's signal pad, int64.
        pads: (world_size,) addresses of all ranks' pads, on the device.
        words: This rank's counters, see `kernels/signals.py`.
        report: What a failed kernel says.
        side: The stream of asynchronous copies; None on the CPU.
        started: Asynchronous exchanges so far, opened ones included, which says whose turn in the
            ring it is.
        unstarted: Numbers of those that were opened for kernels of the user's and are not started.
        uses: For each turn in the ring its last use; None before the first and on the CPU.
        targets: (world_size,) addresses that an opened exchange's own kernels store to, on the
            device; those of the exchange that was opened last.
        opened: How an exchange stands that was opened for kernels of the user's: "open" until it is
            finished, "dropped" if it never will be, else empty.
        forgotten: What should have been called on the target that was dropped.
        lock: Held while an exchange is launched.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        memory: SymmetricMemory,
        slots: int,
        seconds: float,
    ) -> None:
        """Set up; every rank has to, and none may exchange before all have.

        Args:
            group: The ranks; not kept.
            device: Of this rank.
            memory: Where symmetric memory comes from.
            slots: Results of a size class that can be lent at a time.
            seconds: How long kernels wait for a peer.
        """
        self.rank, self.world_size = group.rank(), group.size()
        self.device, self.slots = device, slots
        self.timeout_ns = min(int(seconds * 1e9), _LONGEST_NS)
        on_gpu = device.type == "cuda"
        self._memory, self._seconds = memory, seconds
        self._pools: list[Pool] = []
        self._sends: list[SendBuffers] = []
        self._plans: dict[tuple[Exchange, tuple[Layout, ...], bool], Plan] = {}
        self._planned_in_capture: set[tuple[Exchange, tuple[Layout, ...], bool]] = set()
        self._last: torch.cuda.Stream | None = None
        self.lock = threading.RLock()
        self.started = 0
        self.unstarted: list[int] = []
        self.uses: list[Use | None] = [None] * RING
        self.opened: Literal["", "open", "dropped"] = ""
        self.forgotten = "finish()"
        with self.on_device():
            self._block = memory.allocate(8 * self.world_size * (2 + 2 * RING))
            self.pad = self._block.tensor.view(torch.int64)
            self.pad.zero_()
            self.words = torch.zeros(2 + 2 * RING, dtype=torch.int64, device=device)
            self.pads = self.to_device(list(self._block.addresses))
            self.targets = self.to_device([0] * self.world_size)
            self.side = torch.cuda.Stream(device, priority=-1) if on_gpu else None
            self.tune(DEFAULT_TUNING)
        self.report = Report(self.rank, seconds, pinned=on_gpu)
        if on_gpu:
            self.report.watch(self)
            # What the peers' memory is mapped by must outlive the kernels that use it.
            weakref.finalize(self, _settle, device)

    def tune(self, tuning: Tuning) -> None:
        """Cut moves in another way from now on; every rank may do as it likes."""
        self.tuning = tuning
        self.programs = 2 * self.world_size
        if self.device.type == "cuda":
            count = torch.cuda.get_device_properties(self.device).multi_processor_count
            share = max(1, count * tuning.programs_per_sm // self.world_size)
            self.programs = share * self.world_size
            torch.cuda.synchronize(self.device)
        self._plans.clear()

    def settle(self) -> None:
        """Wait until this rank's launches are over."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fits(self, slots: int, seconds: float) -> bool:
        """Whether it was made for these arguments."""
        return (self.slots, self._seconds) == (slots, seconds)

    def serves(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether an exchange of these inputs goes this way, which depends on the program alone.

        Raises:
            ValueError: If they lie on another device of the kind, which is this rank's mistake: the
                others would wait for it in vain.
        """
        if not 0 < len(inputs) <= MAX_INPUTS or not all(
            type(t) in (torch.Tensor, torch.nn.Parameter) for t in inputs
        ):
            return False
        self.check_device(inputs[0].device)
        return inputs[0].device.type == self.device.type

    def check_device(self, device: torch.device) -> None:
        """Refuse another device of the kind that the group exchanges on.

        Raises:
            ValueError: If it is one.
        """
        if device.type == self.device.type and device != self.device:
            raise ValueError(
                f"The inputs are on {device}: expected {self.device}, on which rank {self.rank} "
                "chose its transport. Move them there, or call use_transport with the other GPU "
                "as the current one (torch.cuda.set_device)."
            )

    def check(self) -> None:
        """Raise what a kernel has written down.

        Raises:
            RuntimeError: If an exchange of this group has failed, or was opened and never finished.
        """
        text = self.report.text()
        if text:
            raise RuntimeError(text)
        if self.opened == "dropped":
            raise RuntimeError(
                f"Rank {self.rank} dropped a HeadScatterTarget without {self.forgotten}, so that "
                f"the other ranks wait for data that never comes: expected {self.forgotten} on "
                "every target that was opened. The group cannot exchange any more; end the run."
            )

    def check_turn(self) -> None:
        """Raise unless an exchange may be launched, as `check` does.

        Raises:
            RuntimeError: Also if one was opened and is not finished yet.
        """
        self.check()
        if self.opened:
            raise RuntimeError(
                "An exchange of this group was opened by open_head_scatter and is not finished: "
                "expected finish() on its target before the next exchange of the group."
            )

    def check_start(self) -> None:
        """Raise unless an asynchronous exchange may be started, as `check` does.

        Raises:
            RuntimeError: Also if one that was opened before is not started yet. All of them share
                a stream: behind one that a peer makes later, it would wait for that peer in vain.
        """
        self.check()
        if self.unstarted:
            raise RuntimeError(
                f"{len(self.unstarted)} exchange(s) of this group were opened by "
                "open_head_scatter(started=True) and are not started: expected start() on their "
                "targets, in the order in which they were opened, before the group's next "
                "start_... exchange."
            )

    def check_room(self) -> None:
        """Raise unless an asynchronous exchange may be opened, as `check` does.

        Raises:
            RuntimeError: Also if as many are open and not started as there are send buffers.
        """
        self.check()
        if len(self.unstarted) >= RING:
            raise RuntimeError(
                f"{RING} targets of open_head_scatter(started=True) are open and not started, and "
                f"a group has {RING} send buffers: expected start() on the one that was opened "
                "first before the next is opened."
            )

    def on_device(self) -> AbstractContextManager[object]:
        """Make this rank's GPU the current one, on which Triton launches."""
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()

    def enter(self) -> torch.cuda.Stream | None:
        """Return the current stream, after all launches of this group on other streams.

        Exchanges of a group happen one after another; signals are counted in their order.
        """
        if self.device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(self.device)
        wait_for(stream, self._last)
        self._last = stream
        return stream

    def pool(self, nbytes: int) -> Pool:
        """Return the pool whose slots hold this many bytes; makes it, together with all ranks."""
        pool = fitting(self._pools, nbytes)
        if pool is None:
            self._refuse_in_capture("a receive buffer")
            size = size_class(nbytes)
            pool = Pool(size, self.slots, self._memory, self.to_device)
            self._pools.append(pool)
        return pool

    def send_buffers(self, nbytes: int) -> list[Block]:
        """Return the ring whose buffers hold this many bytes; makes it, together with all ranks."""
        ring = fitting(self._sends, nbytes)
        if ring is None:
            self._refuse_in_capture("a send buffer")
            size = size_class(nbytes)
            ring = SendBuffers(size, [self._memory.allocate(size) for _ in range(RING)])
            self._sends.append(ring)
        return ring.blocks

    def note_use(self, ring: int) -> torch.cuda.Event:
        """Return an event of the current stream, after which a send buffer has been read out."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        self.uses[ring] = Use(event, capture_of(self.device))
        return event

    def await_use(self, ring: int) -> None:
        """Let the current stream wait until this rank has read out the last use of a send buffer.

        Not for one inside another CUDA graph, which CUDA forbids: starting a capture has
        synchronised the device, and replays are put in order by the caller.
        """
        use = self.uses[ring]
        if use is not None and use.capture == capture_of(self.device):
            torch.cuda.current_stream(self.device).wait_event(use.event)

    def plan(self, exchange: Exchange, layouts: tuple[Layout, ...], *, pack: bool) -> Plan:
        """Return how inputs of these layouts move."""
        key = (exchange, layouts, pack)
        plan = self._plans.get(key)
        if plan is None:
            self._refuse_in_capture("a table")
            self._make_room()
            cut = cut_moves(
                exchange,
                self.rank,
                layouts,
                pack=pack,
                programs=self.programs,
                tuning=self.tuning,
            )
            plan = Plan(cut, self.to_device([list(row) for part in cut.table for row in part]))
            self._plans[key] = plan
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._planned_in_capture.add(key)
        return plan

    def to_device(self, numbers: Sequence[object]) -> torch.Tensor:
        """Return numbers as an int64 tensor that is on the device when this returns."""
        with torch.inference_mode(False):
            tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        if self.device.type == "cuda":
            # Kernels of any stream may read it.
            torch.cuda.current_stream(self.device).synchronize()
        return tensor

    def describe(self) -> str:
        """Say what is kept, in a few words."""
        slots = ", ".join(
            f"{pool.lent} of {len(pool.slots)} slots of {pool.nbytes >> 20} MiB lent"
            for pool in self._pools
        )
        failed = self.report.text()
        text = f"gives up after {self._seconds:g} s; {slots or 'no slots yet'}"
        return f"{text}; {failed}" if failed else text

    def _make_room(self) -> None:
        if len(self._plans) < _MOST_PLANS:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        kept = self._planned_in_capture  # graphs hold the addresses of their tables
        self._plans = {key: plan for key, plan in self._plans.items() if key in kept}

    def _refuse_in_capture(self, what: str) -> None:
        if capture_of(self.device) is not None:
            raise RuntimeError(
                f"A CUDA graph is being captured, and {what} for an exchange of this size and "
                "layout has to be made, which CUDA forbids there. Run the same exchange once on "
                "every rank before the capture."
            )


def _settle(device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # the GPU may have trapped
        torch.cuda.synchronize(device)
