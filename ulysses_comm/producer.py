"""Let a kernel that makes Q, K and V store them where the exchange would bring them.

    target = open_head_scatter((24, 8, 8), 128, torch.bfloat16, split_sizes, group, device=device)
    my_kernel[grid](..., target.addresses, target.row_elements)
    q, k, v = target.finish()

Token t, head h of an input goes to rank r = h // heads_per_rank, at element
t * row_elements + (first_slot + h % heads_per_rank) * head_dim after addresses[r], where first_slot
counts the heads per rank of the inputs before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ulysses_comm.agreement import Validate, agree
from ulysses_comm.checks import HeadScatter
from ulysses_comm.exchange import scatter_heads_gather_seqlen
from ulysses_comm.group import Group, rank_and_world_size, resolve_group
from ulysses_comm.layout import check_split_sizes, whole_number
from ulysses_comm.memory import empty_buffer
from ulysses_comm.symmetric.choice import state_of, way_of
from ulysses_comm.symmetric.moves import Exchange, agreed
from ulysses_comm.symmetric.opened import OpenedExchange
from ulysses_comm.symmetric.state import GroupState
from ulysses_comm.wire import Wire, even_split, plan_wire

Results = list[torch.Tensor]


class HeadScatterTarget:
    """Where a kernel stores the heads of this rank's tokens, for each rank the heads that it gets.

    Attributes:
        addresses: (world_size,) int64 on the device: where this rank's rows for each rank begin.
            They are there for what follows `open_head_scatter` on its stream, until the group's
            next target is opened. A row is dense: all heads of one token that one rank gets.
        tokens: Rows for each rank: tokens of this rank.
        row_elements: Elements of a row, and from one row to the next.
        nbytes: Bytes of all rows of this rank.
        is_direct: Whether the addresses lie in the ranks' receive slots, not in a send buffer.
    """

    def __init__(
        self,
        addresses: torch.Tensor,
        own: torch.Tensor,
        finish: Callable[[], Results],
        abandon: Callable[[], None] | None,
    ) -> None:
        """Made by `open_head_scatter`.

        Args:
            addresses: As the attribute.
            own: This rank's rows for itself, (tokens, heads, head_dim).
            finish: Returns the results.
            abandon: Called if the target is dropped before; None where that does no harm.
        """
        self.addresses = addresses
        self.tokens, self.row_elements = own.shape[0], own.shape[1] * own.shape[2]
        self.nbytes = own.nbytes * addresses.shape[0]
        self.is_direct = abandon is not None
        self._own: torch.Tensor | None = own
        self._finish: Callable[[], Results] | None = finish
        self._abandon = abandon

    @property
    def own(self) -> torch.Tensor:
        """The rows for this rank itself, (tokens, heads of this rank of all inputs, head_dim).

        Raises:
            RuntimeError: If the exchange is finished: the memory may be another's by now.
        """
        if self._own is None:
            raise RuntimeError("finish() was called: use the tensors that it returned.")
        return self._own

    def finish(self) -> Results:
        """Return the results of the exchange, as `scatter_heads_gather_seqlen` does.

        Called once, on the stream that the rows were stored on, or one that waits for it; every
        rank calls it, or the plain exchange.

        Raises:
            RuntimeError: If it was called before, or the exchange has failed.
        """
        if self._finish is None:
            raise RuntimeError("finish() was called before: expected one call for each target.")
        results = self._finish()
        self._finish = self._own = self._abandon = None
        return results

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
        validate: As in `scatter_heads_gather_seqlen`.

    Returns:
        Where to store, and `finish()`, which has to be called before the group's next exchange. A
        rank may take part by the plain form while others open a target.

    Raises:
        ValueError: For bad input, on the rank at fault, before anything is sent.
        RuntimeError: Inside torch.compile; if another target of the group is open or was dropped.
        RankDisagreementError: If validate is on and the ranks disagree or one is missing.

    Over symmetric memory the addresses are the ranks' receive slots: nothing is packed, nor copied
    after, and opening waits until all peers have begun. Otherwise they lie in a send buffer, which
    `finish()` sends in place. Not differentiable.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "open_head_scatter cannot be traced by torch.compile, which knows no addresses: call "
            "it outside of the compiled region."
        )
    process_group = resolve_group(group)
    rank, world_size = rank_and_world_size(process_group)
    counts, sizes, place = tuple(head_counts), tuple(split_sizes), _indexed(torch.device(device))

    def way(checked: HeadScatter) -> str | None:  # that of the plain form, which it meets
        return way_of(process_group, checked.inputs, async_op=False) if process_group else None

    checked = agree(
        lambda: _check(counts, head_dim, dtype, sizes, world_size, place),
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
            return _open_slots(state, exchange)
    return _open_send_buffer(wire, exchange.split_sizes, rank, group, place)


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


def _open_send_buffer(
    wire: Wire, split_sizes: tuple[int, ...], rank: int, group: Group, device: torch.device
) -> HeadScatterTarget:
    world_size, tokens = len(split_sizes), split_sizes[rank]
    send = empty_buffer(wire.scattered_shape(tokens), wire.dtype, device)
    shards = send.transpose(0, 1).split([split.counts[0] for split in wire.splits], dim=2)
    base, step = send.data_ptr(), send[0].nbytes
    # Made on the device: a copy from the host would wait, and could not be captured.
    addresses = (
        torch.arange(base, base + world_size * step, step, dtype=torch.int64, device=device)
        if step
        else torch.full((world_size,), base, dtype=torch.int64, device=device)
    )
    return HeadScatterTarget(
        addresses,
        send[rank],
        lambda: scatter_heads_gather_seqlen(shards, split_sizes, group),
        None,
    )


@functools.lru_cache(maxsize=512)
def _check(
    head_counts: tuple[int, ...],
    head_dim: int,
    dtype: torch.dtype,
    split_sizes: tuple[int, ...],
    world_size: int,
    device: torch.device,
) -> HeadScatter:
    """Check the arguments; the same facts as those of the plain exchange."""
    counts = [whole_number("head_counts", count) for count in head_counts]
    head_dim = whole_number("head_dim", head_dim)
    if not counts or head_dim < 1 or any(n < 1 or n % world_size for n in counts):
        raise ValueError(
            f"head_counts={counts}, head_dim={head_dim} over {world_size} ranks: expected one "
            f"input at least, head counts that are positive multiples of {world_size}, and one "
            "channel at least. scatter_heads_gather_seqlen takes uneven shares, by head_splits."
        )
    sizes = check_split_sizes(split_sizes, world_size)
    splits = tuple(even_split(count // world_size, world_size) for count in counts)
    wire = plan_wire((dtype,) * len(counts), (head_dim,) * len(counts), splits)
    nothing = torch.empty(0, dtype=dtype, device=device)
    return HeadScatter([nothing] * len(counts), sizes, wire, 0)


def _indexed(device: torch.device) -> torch.device:
    """Return a GPU with its number."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
