"""Let a kernel that makes Q, K and V store them where the exchange would bring them.

    target = open_head_scatter((24, 8, 8), 128, torch.bfloat16, split_sizes, group, device=device)
    my_kernel[grid](..., target.addresses, target.row_elements)
    q, k, v = target.finish()

or, to compute something else while the rows travel,

    target = open_head_scatter(..., device=device, started=True)
    my_kernel[grid](..., target.addresses, target.row_elements)
    pending = target.start()
    ...
    q, k, v = pending.wait()

Token t, head h of an input goes to rank r = h // heads_per_rank, at element
t * row_elements + (first_slot + h % heads_per_rank) * head_dim after addresses[r], where first_slot
counts the heads per rank of the inputs before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import torch

from ulysses_comm.agreement import Validate, agree
from ulysses_comm.checks import HeadScatter
from ulysses_comm.group import Group, rank_and_world_size, resolve_group
from ulysses_comm.layout import check_split_sizes, whole_number
from ulysses_comm.memory import empty_buffer
from ulysses_comm.pending import Pending
from ulysses_comm.route import Buffers, Route
from ulysses_comm.symmetric.choice import state_of, way_of
from ulysses_comm.symmetric.moves import Exchange, agreed
from ulysses_comm.symmetric.opened import OpenedExchange
from ulysses_comm.symmetric.opened_pull import OpenedPull
from ulysses_comm.symmetric.state import GroupState
from ulysses_comm.transfer import finish_scatter_heads, start_scatter_heads
from ulysses_comm.wire import Wire, even_split, plan_wire

Results = list[torch.Tensor]


class HeadScatterTarget:
    """Where a kernel stores the heads of this rank's tokens, for each rank the heads that it gets.

    Attributes:
        addresses: (world_size,) int64 on the device: where this rank's rows for each rank begin.
            They are there for what follows `open_head_scatter` on its stream, until the group's
            next target is opened, or, with `started`, as long as the tensor is. A row is dense:
            all heads of one token that one rank gets.
        tokens: Rows for each rank: tokens of this rank.
        row_elements: Elements of a row, and from one row to the next.
        nbytes: Bytes of all rows of this rank.
        is_direct: Whether the addresses lie where the exchange has the rows without a copy: in the
            ranks' receive slots, or, with `started`, in memory that the other ranks read. Else they
            lie in a send buffer for the collective.
    """

    def __init__(
        self,
        addresses: torch.Tensor,
        own: torch.Tensor,
        finish: Callable[[], Results] | None,
        abandon: Callable[[], None] | None,
        *,
        start: Callable[[], Pending[Results]] | None = None,
    ) -> None:
        """Made by `open_head_scatter`.

        Args:
            addresses: As the attribute.
            own: This rank's rows for itself, (tokens, heads, head_dim).
            finish: Returns the results; None for a target that is started.
            abandon: Called if the target is dropped before; None where that does no harm.
            start: Starts the exchange; None for a target that is finished.
        """
        self.addresses = addresses
        self.tokens, self.row_elements = own.shape[0], own.shape[1] * own.shape[2]
        self.nbytes = own.nbytes * addresses.shape[0]
        self.is_direct = abandon is not None
        self._own: torch.Tensor | None = own
        self._finish, self._start = finish, start
        self._abandon = abandon
        # The one call that it takes, and the other, which it refuses.
        self._call, self._other = ("start()", "finish()") if start else ("finish()", "start()")

    @property
    def own(self) -> torch.Tensor:
        """The rows for this rank itself, (tokens, heads of this rank of all inputs, head_dim).

        Raises:
            RuntimeError: If the exchange is finished or started: the memory may be another's.
        """
        if self._own is None:
            raise RuntimeError(f"{self._call} was called: use the tensors of its result.")
        return self._own

    def finish(self) -> Results:
        """Return the results of the exchange, as `scatter_heads_gather_seqlen` does.

        Called once, on the stream that the rows were stored on, or one that waits for it; every
        rank calls it, or the plain exchange.

        Raises:
            RuntimeError: If it was called before, the target was opened with `started`, or the
                exchange has failed.
        """
        if self._finish is None:
            raise self._refusal("finish()")
        results = self._finish()
        self._close()
        return results

    def start(self) -> Pending[Results]:
        """Start the exchange, as `start_scatter_heads_gather_seqlen` does.

        Called once, on the stream that the rows were stored on, or one that waits for it; every
        rank calls it, or `start_scatter_heads_gather_seqlen`. Targets are started in the order in
        which they were opened.

        Returns:
            The exchange under way. `wait()` makes the current stream wait, and returns the results.

        Raises:
            RuntimeError: If it was called before, another target that was opened before is not
                started yet, this one was opened without `started`, or the exchange has failed.
        """
        if self._start is None:
            raise self._refusal("start()")
        pending = self._start()
        self._close()
        return pending

    def _refusal(self, call: str) -> RuntimeError:
        if call == self._call:
            return RuntimeError(f"{call} was called before: expected one call for each target.")
        how = "without started=True" if self._call == "finish()" else "with started=True"
        return RuntimeError(
            f"{call} on a target that open_head_scatter opened {how}: expected {self._call}, or a "
            "target opened the other way."
        )

    def _close(self) -> None:
        self._finish = self._start = self._own = self._abandon = None

    def __del__(self) -> None:
        # To finish here would send what nobody has stored.
        if getattr(self, "_abandon", None) is not None:
            self._abandon()  # type: ignore[misc]


def open_head_scatter(
    head_counts: Sequence[int],
    head_dim: int,
    dtype: torch.dtype,
    split_sizes: Sequence[int],
    group: Group,
    *,
    device: torch.device | str,
    started: bool = False,
    validate: Validate = False,
) -> HeadScatterTarget:
    """Open a `scatter_heads_gather_seqlen` whose data a kernel of the caller's stores by itself.

    Args:
        head_counts: Heads of each input, of the whole model; world_size divides each.
        head_dim: Channels of a head of every input.
        dtype: Of every input.
        split_sizes: Tokens each rank owns, in rank order; zero is allowed.
        group: As in `scatter_heads_gather_seqlen`.
        device: Of the kernel.
        started: Open a `start_scatter_heads_gather_seqlen` instead, which `start()` starts.
        validate: As in `scatter_heads_gather_seqlen`.

    Returns:
        Where to store, and `finish()`, which has to be called before the group's next exchange; or
        `start()`, before the group's next `start_...`, while other exchanges may go on. A rank may
        take part by the plain form, or the `start_...` form, while others open a target.

    Raises:
        ValueError: For bad input, on the rank at fault, before anything is sent.
        RuntimeError: Inside torch.compile; if another target of the group is open or was dropped.
            With `started`, two may be open and not started.
        RankDisagreementError: If validate is on and the ranks disagree or one is missing.

    Over symmetric memory the addresses are the ranks' receive slots: nothing is packed, nor copied
    after, and opening waits until all peers have begun. With `started` they are a send buffer that
    the peers' copy engines read, and the receive buffer for this rank's own rows: nothing is packed
    either, and opening waits, in the order of the stream, until the buffer's last use has been read
    by all. Otherwise they lie in a send buffer, which is sent in place. Not differentiable.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "open_head_scatter cannot be traced by torch.compile, which knows no addresses: call "
            "it outside of the compiled region."
        )
    process_group = resolve_group(group)
    rank, world_size = rank_and_world_size(process_group)

    def way(checked: HeadScatter) -> str | None:  # that of the plain form, which it meets
        return way_of(process_group, checked.inputs, async_op=started) if process_group else None

    checked = agree(
        lambda: _check(head_counts, head_dim, dtype, split_sizes, world_size, device),
        process_group,
        validate,
        way=way,
    )
    wire = checked.wire
    assert wire is not None
    exchange = Exchange("heads", wire, tuple(checked.split_sizes))
    if process_group is not None and world_size > 1 and agreed(exchange).receive_bytes:
        state = state_of(process_group)
        if state is not None and state.serves(checked.inputs):
            return _open_pull(state, exchange) if started else _open_slots(state, exchange)
    route = None
    if process_group is not None and world_size > 1:
        route = Route(process_group, rank, exchange.split_sizes)
    return _open_send_buffer(exchange, rank, route, checked.inputs[0].device, started=started)


def _open_slots(state: GroupState, exchange: Exchange) -> HeadScatterTarget:
    opened = OpenedExchange(state, exchange)
    rank, sizes, wire = state.rank, exchange.split_sizes, exchange.wire

    def own() -> torch.Tensor:
        shape = exchange.receive_shape(rank)
        return torch.empty(shape, dtype=wire.dtype, device=state.device)

    rows = opened.received.narrow(0, sum(sizes[:rank]), sizes[rank])
    return HeadScatterTarget(
        opened.addresses, rows, lambda: wire.gathered(opened.close(own), rank), opened.abandon
    )


def _open_pull(state: GroupState, exchange: Exchange) -> HeadScatterTarget:
    opened = OpenedPull(state, exchange)
    rank, sizes, wire = state.rank, exchange.split_sizes, exchange.wire

    def start() -> Pending[Results]:
        work = opened.start()

        def wait() -> Results:
            work.wait()
            return wire.gathered(opened.received, rank)

        return Pending(wait)

    rows = opened.received.narrow(0, sum(sizes[:rank]), sizes[rank])
    return HeadScatterTarget(opened.addresses, rows, None, opened.abandon, start=start)


def _open_send_buffer(
    exchange: Exchange, rank: int, route: Route | None, device: torch.device, *, started: bool
) -> HeadScatterTarget:
    """Open an exchange through the collective; without a route that of a lone rank."""
    wire, world_size = exchange.wire, exchange.world_size
    send = empty_buffer(wire.scattered_shape(exchange.split_sizes[rank]), wire.dtype, device)
    shards = send.transpose(0, 1).split([split.counts[0] for split in wire.splits], dim=2)
    base, step = send.data_ptr(), send[0].nbytes
    # Made on the device: a copy from the host would wait, and could not be captured.
    addresses = (
        torch.arange(base, base + world_size * step, step, dtype=torch.int64, device=device)
        if step
        else torch.full((world_size,), base, dtype=torch.int64, device=device)
    )

    def start() -> Pending[Results]:
        # Not by the public function: the ranks have agreed on this exchange when it was opened.
        if route is None:
            return Pending.of([tensor.flatten(1, 2) for tensor in shards])
        transfer = start_scatter_heads(shards, wire, route, Buffers(), async_op=started)
        return Pending(lambda: finish_scatter_heads(transfer))

    if started:
        return HeadScatterTarget(addresses, send[rank], None, None, start=start)
    return HeadScatterTarget(addresses, send[rank], lambda: start().wait(), None)


def _check(
    head_counts: Sequence[int],
    head_dim: int,
    dtype: torch.dtype,
    split_sizes: Sequence[int],
    world_size: int,
    device: torch.device | str,
) -> HeadScatter:
    """Check the arguments; the same facts as those of the plain exchange."""
    if isinstance(head_counts, (str, bytes, Set, Mapping)) or not isinstance(head_counts, Iterable):
        raise ValueError(
            f"head_counts={head_counts!r}: expected a sequence, the heads of each input."
        )
    counts = tuple(whole_number("head_counts", count) for count in head_counts)
    sizes = check_split_sizes(split_sizes, world_size)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={dtype!r}: expected a torch.dtype, such as torch.bfloat16.")
    wire = _plan(counts, whole_number("head_dim", head_dim), dtype, world_size)
    nothing = torch.empty(0, dtype=dtype, device=_device(device))
    return HeadScatter([nothing] * len(counts), sizes, wire, 0)


@functools.lru_cache(maxsize=512)
def _plan(head_counts: tuple[int, ...], head_dim: int, dtype: torch.dtype, world_size: int) -> Wire:
    if not head_counts or head_dim < 1 or any(n < 1 or n % world_size for n in head_counts):
        raise ValueError(
            f"head_counts={list(head_counts)}, head_dim={head_dim} over {world_size} ranks: "
            "expected one input at least, head counts that are positive multiples of "
            f"{world_size}, and one channel at least. scatter_heads_gather_seqlen takes uneven "
            "shares, by head_splits."
        )
    splits = tuple(even_split(count // world_size, world_size) for count in head_counts)
    return plan_wire((dtype,) * len(head_counts), (head_dim,) * len(head_counts), splits)


def _device(given: torch.device | str) -> torch.device:
    """Return a device; a GPU with its number."""
    try:
        device = torch.device(given)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"device={given!r}: expected a torch.device or its name.") from error
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
