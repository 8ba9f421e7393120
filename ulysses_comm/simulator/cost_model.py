"""Predict how long recorded traffic takes on links that are not at hand.

Each rank has one port per level (inside its node, between nodes), which sends and receives at the
same time; different ranks and different levels do not disturb each other. All messages of a phase
start together, so a phase pays the latency once, and a port is busy with its messages one after
another. A phase in which rank r sends b(r, d) bytes to rank d takes

    max over ranks r and levels l of
        latency_l + per_message_l * max(messages sent, messages received)
                  + max(bytes sent, bytes received) / bandwidth_l

where only messages of that level count, empty ones are not sent, and a level without messages costs
nothing. docs/simulator.md has a worked example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ulysses_comm.simulator.reductions import balanced_sizes
from ulysses_comm.simulator.traffic import CollectiveRecord, Traffic

Matrix = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One rank's port to the ranks of one level.

    Attributes:
        latency: Seconds until the first byte arrives.
        bandwidth: Bytes per second in each direction.
        per_message: Seconds that the port is busy with a message beyond its bytes.
    """

    latency: float
    bandwidth: float
    per_message: float = 0.0

    def __post_init__(self) -> None:
        if self.latency < 0 or self.per_message < 0 or not self.bandwidth > 0:
            raise ValueError(
                f"{self}: expected latency and per_message in seconds, at least 0, and bandwidth "
                f"in bytes per second, above 0"
            )


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """A topology of one or two levels.

    Attributes:
        inter: The link between nodes; of a one-level topology, the only link.
        intra: The link inside a node.
        ranks_per_node: Ranks 0 to ranks_per_node - 1 form the first node, and so on.
    """

    inter: Link
    intra: Link | None = None
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or (self.intra is None) != (self.ranks_per_node == 1):
            raise ValueError(
                f"ranks_per_node={self.ranks_per_node} with intra={self.intra}: two levels need "
                f"both a link inside a node and at least 2 ranks per node; one level needs neither"
            )

    @classmethod
    def one_level(cls, link: Link) -> CostModel:
        """Return a topology in which every two ranks are joined alike."""
        return cls(inter=link)

    @classmethod
    def two_level(cls, *, ranks_per_node: int, intra: Link, inter: Link) -> CostModel:
        """Return a topology of nodes, with one link inside and another one between them."""
        return cls(inter=inter, intra=intra, ranks_per_node=ranks_per_node)

    def all_to_all_seconds(self, sent: Matrix, ranks: Sequence[int] | None = None) -> float:
        """Predict one exchange.

        Args:
            sent: Bytes from each rank (row) to each rank (column); the diagonal is ignored.
            ranks: Which ranks of the world these are; by default 0, 1, 2 and so on.

        Raises:
            ValueError: If `sent` is not square or does not match `ranks`.
        """
        ranks = range(len(sent)) if ranks is None else ranks
        if len(ranks) != len(sent) or any(len(row) != len(sent) for row in sent):
            raise ValueError(
                f"expected one row and one column per rank, got {len(ranks)} ranks, {len(sent)} "
                f"rows with lengths {sorted({len(row) for row in sent})}"
            )
        messages = [[int(nbytes > 0) for nbytes in row] for row in sent]
        return self._phase_seconds(sent, messages, ranks)

    def collective_seconds(self, record: CollectiveRecord) -> float:
        """Predict one recorded collective, alone on the links.

        Reductions and broadcasts run as two phases, as large ones do: an all-reduce scatters and
        reduces, then gathers; a broadcast scatters, then gathers; a reduce scatters and reduces,
        then collects on its root. A barrier is one empty message between every two ranks.
        """
        if record.kind == "barrier":
            size = len(record.ranks)
            nothing = [[0] * size for _ in range(size)]
            return self._phase_seconds(nothing, [[1] * size for _ in range(size)], record.ranks)
        return sum(self.all_to_all_seconds(phase, record.ranks) for phase in _phases(record))

    def _phase_seconds(self, sent: Matrix, messages: Matrix, ranks: Sequence[int]) -> float:
        longest = 0.0
        for here, rank in enumerate(ranks):
            for link, inside in ((self.inter, False), (self.intra, True)):
                peers = [
                    there
                    for there, other in enumerate(ranks)
                    if there != here and self._same_node(rank, other) is inside
                ]
                count = max(
                    sum(messages[here][peer] for peer in peers),
                    sum(messages[peer][here] for peer in peers),
                )
                if link is None or count == 0:
                    continue
                nbytes = max(
                    sum(sent[here][peer] for peer in peers),
                    sum(sent[peer][here] for peer in peers),
                )
                seconds = link.latency + link.per_message * count + nbytes / link.bandwidth
                longest = max(longest, seconds)
        return longest

    def _same_node(self, rank: int, other: int) -> bool:
        return self.intra is not None and (
            rank // self.ranks_per_node == other // self.ranks_per_node
        )


@dataclass(frozen=True)
class Prediction:
    """How long recorded traffic would take.

    Attributes:
        seconds: Each collective by itself, in the order of the record.
        total: From the start of the first to the end of the last one. Collectives that share no
            rank run at the same time.
    """

    seconds: list[float]
    total: float


def predict(traffic: Traffic, model: CostModel) -> Prediction:
    """Predict how long the collectives of a record take on the links of a model.

    A rank starts a collective when the one that it completed before has ended, and computing takes
    no time; so this is the time spent in communication when nothing is overlapped.
    """
    clocks = [0.0] * traffic.world_size
    seconds = []
    for record in traffic:
        duration = model.collective_seconds(record)
        seconds.append(duration)
        end = max(clocks[rank] for rank in record.ranks) + duration
        for rank in record.ranks:
            clocks[rank] = end
    return Prediction(seconds, max(clocks, default=0.0))


def head_exchange_bytes(split_sizes: Sequence[int], shard_bytes: int) -> list[list[int]]:
    """Return who sends how much in a Q/K/V exchange, for `all_to_all_seconds`.

    Args:
        split_sizes: Tokens that each rank owns.
        shard_bytes: Bytes of one token's head shard for one rank, all inputs together:
            `sum(H_i) * D * itemsize`.

    Returns:
        Bytes from each rank (row) to each rank (column). The output exchange sends the transpose.
    """
    return [[tokens * shard_bytes] * len(split_sizes) for tokens in split_sizes]


def _phases(record: CollectiveRecord) -> list[Matrix]:
    size = len(record.ranks)
    if record.kind not in ("all_reduce", "reduce", "broadcast"):
        return [record.sent]
    nbytes = max(sum(buffer.nbytes for buffer in call.buffers) for call in record.calls)
    shares = balanced_sizes(nbytes, size)
    to_owner = [shares] * size
    to_all = [[share] * size for share in shares]
    if record.kind == "all_reduce":
        return [to_owner, to_all]
    # Of a broadcast only the root sends, of a reduce only the root receives.
    sends = [sum(row) for row in record.sent]
    received = [sum(column) for column in zip(*record.sent, strict=True)]
    if record.kind == "broadcast":
        root = sends.index(max(sends))
        from_root = [shares if rank == root else [0] * size for rank in range(size)]
        return [from_root, [[0 if d == root else s for d in range(size)] for s in shares]]
    root = received.index(max(received))
    return [to_owner, [[s if d == root else 0 for d in range(size)] for s in shares]]
