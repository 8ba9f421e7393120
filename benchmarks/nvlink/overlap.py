"""How much of the Q/K/V exchange hides behind attention over the gathered sequence."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import Candidate, expect_bits
from benchmarks.nvlink.groups import Groups
from benchmarks.nvlink.produced import PRODUCE, ProducedExchange
from benchmarks.nvlink.stored import open_started, store_rows
from benchmarks.nvlink.ways import QkvExchange, Shape, floor_of
from ulysses_comm import (
    Pending,
    Workspace,
    scatter_heads_gather_seqlen,
    start_scatter_heads_gather_seqlen,
)

ATTENTION, EXCHANGE = "attention", "exchange"
CHUNKS = (2, 3, 4)

# q, k and v copied to where an exchange wants them, in place of the kernel that makes them; and
# attention while copy engines bring as many bytes to the peers, without kernels or signals.
STORE, BESIDE = "store", f"{ATTENTION}, copies beside it"
_STORED = "stored"

# What is done before the exchange alone, by the word in the names of those that do it.
_BEFORE = {_STORED: STORE, "produced": PRODUCE}


def attend(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention of (S, H, D) tensors, by the kernel that torch chooses (flash or cuDNN)."""
    heads_first = [tensor.transpose(0, 1)[None] for tensor in tensors]
    return scaled_dot_product_attention(*heads_first)[0].transpose(0, 1)


class Overlap:
    """Attention of one layer and the exchange of another, apart and together."""

    def __init__(self, shape: Shape, groups: Groups, *, produces: bool | None = None) -> None:
        """Make the inputs.

        Args:
            shape: Of the exchange.
            groups: The ranks.
            produces: Whether MAGI-2's kernel takes part, which wants a GPU or Triton's interpreter;
                None for where there is a GPU.
        """
        self.produces = groups.device.type == "cuda" if produces is None else produces
        self.exchange = QkvExchange(shape, groups)
        self.groups = groups
        self.gathered = [tensor.clone() for tensor in self.exchange.expected]
        self.output = attend(self.gathered)

    def candidates(self) -> list[Candidate]:
        """Attention alone; for each transport the exchange alone, both started, and in chunks."""
        right = _near(self.output)
        found = [Candidate(ATTENTION, lambda: attend(self.gathered), right), *self._apart()]
        transports = {"NCCL": self.groups.nccl, "symmetric": self.groups.lent}
        for name, group in transports.items():
            if group is None:
                continue
            found += [
                Candidate(f"{EXCHANGE}, {name}", self._alone(group), self._check_exchange),
                Candidate(
                    f"{EXCHANGE} started and waited for, {name}",
                    self._waited(group),
                    self._check_exchange,
                ),
                Candidate(f"started, {name}", self._started(group), self._check_both),
            ]
            found += [
                Candidate(f"{chunks}, {name}", self._in_chunks(group, sizes), right)
                for chunks, sizes in self._chunks().items()
            ]
            found += self._stored_ways(name, group)
        if self.produces:
            produced = ProducedExchange(
                self.exchange.shape, self.groups, lambda: attend(self.gathered), right
            )
            found += produced.candidates(transports)
        return found

    def _apart(self) -> list[Candidate]:
        """What an overlap is made of: storing alone, and copies beside the attention."""
        shards = self._shards()
        send = torch.empty_like(self.exchange.send)
        step = send[0].nbytes
        addresses = torch.tensor(
            [send.data_ptr() + rank * step for rank in range(self.groups.size)],
            device=self.groups.device,
        )

        def store() -> torch.Tensor:
            store_rows(shards, addresses)
            return send

        want = torch.cat([tensor.transpose(0, 1) for tensor in shards], dim=2)
        found = [Candidate(STORE, store, expect_bits(want), lambda: _poison(send))]
        if self.groups.lent is not None or self.groups.device.type == "cpu":
            found.append(Candidate(BESIDE, self._beside(), _near(self.output)))
        return found

    def _beside(self) -> Callable[[], torch.Tensor]:
        copies = floor_of(self.exchange).run
        if self.groups.device.type == "cpu":

            def one_by_one() -> torch.Tensor:
                copies()
                return attend(self.gathered)

            return one_by_one
        side = torch.cuda.Stream(priority=-1)

        def run() -> torch.Tensor:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                copies()
            output = attend(self.gathered)
            current.wait_stream(side)
            return output

        return run

    def _stored_ways(self, name: str, group: dist.ProcessGroup) -> list[Candidate]:
        """The exchange started by `start()`, of rows that were stored where it wants them."""
        waited, ahead = self._stored_and_waited(group), self._stored_ahead(group)
        found = [
            Candidate(
                f"{EXCHANGE} {_STORED} and waited for, {name}",
                waited,
                self._check_exchange,
                self.exchange.stale(waited),
            ),
            Candidate(
                f"{_STORED} ahead, {name}", ahead, self._check_both, self.exchange.stale(ahead)
            ),
        ]
        for chunks, sizes in self._chunks().items():
            run = self._stored_in_chunks(group, sizes)
            found.append(Candidate(f"{chunks} {_STORED}, {name}", run, _near(self.output)))
        return found

    def _stored_and_waited(self, group: dist.ProcessGroup) -> Callable[[], list[torch.Tensor]]:
        shards, splits = self._shards(), self.exchange.splits

        def run() -> list[torch.Tensor]:
            target = open_started(shards, splits, group)
            store_rows(shards, target.addresses)
            return target.start().wait()

        return run

    def _stored_ahead(self, group: dist.ProcessGroup) -> Callable[[], Any]:
        shards, splits = self._shards(), self.exchange.splits

        def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
            target = open_started(shards, splits, group)
            store_rows(shards, target.addresses)
            pending = target.start()
            output = attend(self.gathered)
            return output, pending.wait()

        return run

    def _stored_in_chunks(
        self, group: dist.ProcessGroup, sizes: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """One layer: two chunks are stored and under way before the first one's heads attend."""
        splits, turns = self.exchange.splits, self._turns(sizes)

        def start(turn: Sequence[torch.Tensor]) -> Pending[list[torch.Tensor]]:
            target = open_started(turn, splits, group)
            store_rows(turn, target.addresses)
            return target.start()

        def run() -> torch.Tensor:
            outputs, pending = [], [start(turn) for turn in turns[:2]]
            for number in range(len(turns)):
                gathered = pending[number].wait()
                if number + 2 < len(turns):
                    pending.append(start(turns[number + 2]))
                outputs.append(attend(gathered))
            return torch.cat(outputs, dim=1)

        return run

    def _shards(self) -> list[torch.Tensor]:
        return [tensor.unflatten(1, (self.groups.size, -1)) for tensor in self.exchange.own]

    def _chunks(self) -> dict[str, tuple[int, ...]]:
        """Ways to cut a rank's heads: evenly, and one head before the others, which hide more."""
        heads = self.output.shape[1]
        found = {
            f"{count} head chunks": (heads // count,) * count
            for count in CHUNKS
            if heads % count == 0
        }
        if heads > 2:
            found[f"1 head and then {heads - 1}"] = (1, heads - 1)
        return found

    def _turns(self, sizes: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        cut = list(sizes)
        return list(zip(*(tensor.split(cut, dim=2) for tensor in self._shards()), strict=True))

    def _alone(self, group: dist.ProcessGroup) -> Callable[[], Any]:
        workspace, own, splits = Workspace(), self.exchange.own, self.exchange.splits
        return lambda: scatter_heads_gather_seqlen(own, splits, group, workspace=workspace)

    def _waited(self, group: dist.ProcessGroup) -> Callable[[], Any]:
        workspace, own, splits = Workspace(), self.exchange.own, self.exchange.splits
        return lambda: start_scatter_heads_gather_seqlen(
            own, splits, group, workspace=workspace
        ).wait()

    def _started(self, group: dist.ProcessGroup) -> Callable[[], Any]:
        """The next layer's exchange under way while this layer attends."""
        workspace, own, splits = Workspace(), self.exchange.own, self.exchange.splits

        def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
            pending = start_scatter_heads_gather_seqlen(own, splits, group, workspace=workspace)
            output = attend(self.gathered)
            return output, pending.wait()

        return run

    def _in_chunks(
        self, group: dist.ProcessGroup, sizes: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """One layer: the heads of chunk n + 1 travel while those of chunk n attend."""
        splits, workspace, turns = self.exchange.splits, Workspace(), self._turns(sizes)

        def run() -> torch.Tensor:
            outputs = []
            pending = start_scatter_heads_gather_seqlen(
                turns[0], splits, group, workspace=workspace
            )
            for turn in [*turns[1:], None]:
                gathered = pending.wait()
                if turn is not None:
                    pending = start_scatter_heads_gather_seqlen(
                        turn, splits, group, workspace=workspace
                    )
                outputs.append(attend(gathered))
            return torch.cat(outputs, dim=1)

        return run

    def _check_exchange(self, results: Sequence[torch.Tensor]) -> None:
        for result, want in zip(results, self.exchange.expected, strict=True):
            expect_bits(want)(result)

    def _check_both(self, result: tuple[torch.Tensor, Sequence[torch.Tensor]]) -> None:
        _near(self.output)(result[0])
        self._check_exchange(result[1])


def hidden_shares(times: dict[str, float]) -> dict[str, float]:
    """The share of the exchange that costs nothing, for each candidate that does both.

    The exchange alone is the plain one, not the one that is started and waited for at once. Where
    the candidate stores q, k and v itself, the time of storing alone is taken off: whatever makes
    them stores them somewhere.
    """
    shares = {}
    for name, together in times.items():
        alone = times.get(f"{EXCHANGE}, {_transport_of(name)}")
        before = _time_before(name, times)
        if not alone or before is None or ATTENTION not in times:
            continue
        if not name.startswith((ATTENTION, EXCHANGE)):
            shares[name] = (times[ATTENTION] + alone + before - together) / alone
    return shares


def other_shares(times: dict[str, float]) -> dict[str, float]:
    """What else the times tell of candidates, by name.

    Of one that stores ahead, the share that hides of the same exchange waited for at once, which
    packs nothing either. Of the copies beside the attention, how much of a plain exchange could
    hide at best: what they cost the attention is lost by any overlap.
    """
    shares = {}
    attention = times.get(ATTENTION)
    for name, together in times.items():
        word, before = _word_of(name), _time_before(name, times)
        waited = times.get(f"{EXCHANGE} {word} and waited for, {_transport_of(name)}")
        if not word or name.startswith((ATTENTION, EXCHANGE)):
            continue
        if waited and attention and before is not None and waited > before:
            shares[name] = (attention + waited - together) / (waited - before)
    exchange = times.get(f"{EXCHANGE}, symmetric") or times.get(f"{EXCHANGE}, NCCL")
    if exchange and attention and BESIDE in times:
        shares[BESIDE] = 1 - (times[BESIDE] - attention) / exchange
    return shares


def paired_shares(
    by_round: dict[str, Sequence[float]],
) -> tuple[dict[str, float], dict[str, str]]:
    """Medians of the shares that hide, and what else is to be said, by candidate.

    A share is worked out within each round: between rounds the GPU's clock moves the attention's
    time by more than an exchange takes.

    Args:
        by_round: Times of each candidate, round by round.
    """
    rounds = [
        dict(zip(by_round, times, strict=True)) for times in zip(*by_round.values(), strict=True)
    ]
    hidden = {name: _quartiles(shares) for name, shares in _each(hidden_shares, rounds).items()}
    notes = {name: f"{low:.0%} to {high:.0%}" for name, (low, _, high) in hidden.items()}
    for name, shares in _each(other_shares, rounds).items():
        low, middle, high = _quartiles(shares)
        if name == BESIDE:
            notes[name] = f"at most {middle:.0%}, {low:.0%} to {high:.0%}"
        else:
            notes[name] = ", ".join([notes[name], f"{middle:.0%} of it without a pack"])
    return {name: round(middle, 3) for name, (_, middle, _) in hidden.items()}, notes


def _each(
    function: Callable[[dict[str, float]], dict[str, float]], rounds: Sequence[dict[str, float]]
) -> dict[str, list[float]]:
    """The shares of all rounds, by candidate."""
    found: dict[str, list[float]] = {}
    for times in rounds:
        for name, share in function(times).items():
            found.setdefault(name, []).append(share)
    return found


def _quartiles(shares: Sequence[float]) -> tuple[float, float, float]:
    many = list(shares) if len(shares) > 1 else list(shares) * 2
    low, middle, high = statistics.quantiles(many, n=4, method="inclusive")
    return low, middle, high


def _word_of(name: str) -> str:
    """Return the word that says what is done before the exchange; empty if nothing is."""
    return next((word for word in _BEFORE if word in name), "")


def _time_before(name: str, times: dict[str, float]) -> float | None:
    """Return what is to be taken off a candidate's time; None if it was not measured."""
    word = _word_of(name)
    return times.get(_BEFORE[word]) if word else 0.0


def _transport_of(name: str) -> str:
    return name.rpartition(", ")[2]


def _poison(send: torch.Tensor) -> None:
    send.fill_(-77.0)


def _near(expected: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def check(result: torch.Tensor) -> None:
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)

    return check
