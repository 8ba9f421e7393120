"""Hold what the ranks brought back against the unsharded model, and against the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ulysses_comm.demo.attention import Layout
from ulysses_comm.demo.encoder import NUM_HEADS, Reference
from ulysses_comm.demo.step import RankOutcome

# The exchanges move bits, so all error comes from float32 kernels that see other shapes: a matrix
# product over fewer rows may add its terms in another order. One product of 1536 terms is off by a
# few 1e-7 of its size, the state's values reach about 3, and six layers of four products each add
# up to a few 1e-6. A single token in the wrong place is off by more than 1e-1.
STATE_TOLERANCE = 2e-5
# A mean over hundreds of tokens, of length one: entries near 0.05, errors well below the state's.
EMBEDDING_TOLERANCE = 2e-6


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What was recorded of the exchanges of one run, in plain numbers.

    Attributes:
        bytes: bytes[source][destination], over all exchanges, a rank's share to itself included.
        copied: Payload bytes that the package copied outside the collective, per exchange, over
            all ranks.
        digests: digests[exchange][rank], of every send buffer.
        addresses: addresses[exchange][rank], where every send buffer starts.
    """

    bytes: list[list[int]]
    copied: list[int]
    digests: list[list[str]]
    addresses: list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One layout's run: every rank's outcome in rank order, and the record of what was sent."""

    layout: Layout
    outcomes: list[RankOutcome]
    sent: Sent

    @property
    def state(self) -> torch.Tensor:
        """(seqlen, hidden_size): the ranks' parts, put together."""
        return torch.cat([outcome.state for outcome in self.outcomes])

    @property
    def seconds(self) -> float:
        """Of the slowest rank."""
        return max(outcome.seconds for outcome in self.outcomes)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise, and whether it was kept."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came out for one group size and one way to split the sequence.

    Attributes:
        split_name: Which way to split.
        split_sizes: Tokens each rank owned.
        num_exchanges: All-to-alls of one run.
        sent: Each layout's record.
        state_error: Largest absolute error of the last hidden state, over both layouts.
        cosine: Of the sentence embedding with the reference's, the lower of both layouts.
        seconds: Of each layout's slowest rank.
        checks: Every promise.
    """

    split_name: str
    split_sizes: list[int]
    num_exchanges: int
    sent: dict[Layout, Sent]
    state_error: float
    cosine: float
    seconds: dict[Layout, float]
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether every promise was kept."""
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class Results:
    """What the demo found.

    Attributes:
        verdicts: One for each case, in the order in which they ran.
        isolated_error: See `encoder.Reference`.
    """

    verdicts: list[Verdict]
    isolated_error: float

    @property
    def passed(self) -> bool:
        """Whether there were cases, and every promise was kept in each."""
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)


def judge(
    split_name: str, split_sizes: list[int], packed: Run, in_place: Run, reference: Reference
) -> Verdict:
    """Check one case: both layouts against the reference, against each other and the contract."""
    runs = (packed, in_place)
    checks = [
        _close_state(runs, reference),
        _close_embedding(runs, reference),
        _one_embedding(runs),
        _same_received(packed, in_place),
        _same_sent(packed.sent, in_place.sent),
        _least_traffic(split_sizes, runs, reference),
        _copied_once(split_sizes, packed.sent, reference),
        _copied_nothing(in_place.sent),
        _sent_in_place(in_place),
    ]
    return Verdict(
        split_name=split_name,
        split_sizes=split_sizes,
        num_exchanges=len(packed.outcomes[0].received),
        sent={run.layout: run.sent for run in runs},
        state_error=max(_max_error(run.state, reference.state) for run in runs),
        cosine=min(_cosine(run.outcomes[0].embedding, reference.embedding) for run in runs),
        seconds={run.layout: run.seconds for run in runs},
        checks=checks,
    )


def expected_bytes(
    split_sizes: Sequence[int], hidden_size: int, num_layers: int
) -> list[list[int]]:
    """What each rank has to send each rank, if nothing is sent that need not be.

    A rank sends its tokens of the three inputs' heads that the destination owns, and gets back the
    destination's tokens of its own heads, in float32.
    """
    shard_bytes = num_layers * hidden_size // len(split_sizes) * 4
    return [[shard_bytes * (3 * source + own) for own in split_sizes] for source in split_sizes]


def _max_error(given: torch.Tensor, expected: torch.Tensor) -> float:
    # A NaN compares as no error at all; infinity fails every tolerance.
    error = (given - expected).abs().nan_to_num(nan=torch.inf)
    return float(error.max())


def _cosine(given: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.cosine_similarity(given.double(), expected.double(), dim=0))


def _close_state(runs: Sequence[Run], reference: Reference) -> Check:
    error = max(_max_error(run.state, reference.state) for run in runs)
    return Check(
        name="the last hidden state equals the unsharded model's",
        passed=error <= STATE_TOLERANCE,
        detail=f"max abs error {error:.1e}, allowed {STATE_TOLERANCE:.0e}",
    )


def _close_embedding(runs: Sequence[Run], reference: Reference) -> Check:
    error = max(_max_error(run.outcomes[0].embedding, reference.embedding) for run in runs)
    return Check(
        name="the sentence embedding equals the unsharded model's",
        passed=error <= EMBEDDING_TOLERANCE,
        detail=f"max abs error {error:.1e}, allowed {EMBEDDING_TOLERANCE:.0e}",
    )


def _one_embedding(runs: Sequence[Run]) -> Check:
    others = [
        f"{run.layout}: rank {rank}"
        for run in runs
        for rank, outcome in enumerate(run.outcomes)
        if not torch.equal(outcome.embedding, run.outcomes[0].embedding)
    ]
    return Check(
        name="every rank holds the same embedding, bit for bit",
        passed=not others,
        detail=f"differs from rank 0's on {', '.join(others)}" if others else "all equal",
    )


def _same_received(packed: Run, in_place: Run) -> Check:
    pairs = zip(packed.outcomes, in_place.outcomes, strict=True)
    others = [rank for rank, (one, two) in enumerate(pairs) if one.received != two.received]
    count = len(packed.outcomes[0].received)
    return Check(
        name="both layouts receive the same bits",
        passed=not others and count > 0,
        detail=f"differ on ranks {others}" if others else f"{count} exchanges on every rank",
    )


def _same_sent(packed: Sent, in_place: Sent) -> Check:
    others = [
        index
        for index, (one, two) in enumerate(zip(packed.digests, in_place.digests, strict=True))
        if one != two
    ]
    return Check(
        name="both layouts send the same bytes",
        passed=not others and len(packed.digests) > 0,
        detail=f"exchanges {others} differ"
        if others
        else f"{len(packed.digests)} exchanges, every rank's send buffer",
    )


def _least_traffic(split_sizes: list[int], runs: Sequence[Run], reference: Reference) -> Check:
    expected = expected_bytes(split_sizes, reference.state.shape[1], reference.num_layers)
    return Check(
        name="no byte travels that need not",
        passed=all(run.sent.bytes == expected for run in runs),
        detail=f"bytes[source][destination]: expected {expected}, sent "
        + " and ".join(str(run.sent.bytes) for run in runs),
    )


def _copied_once(split_sizes: list[int], packed: Sent, reference: Reference) -> Check:
    payload = sum(split_sizes) * reference.state.shape[1] * 4
    # One head a rank: the received output is flat already, nothing is left to copy.
    heads_per_rank = NUM_HEADS // len(split_sizes)
    expected = [3 * payload, payload if heads_per_rank > 1 else 0] * reference.num_layers
    return Check(
        name="the packed layout copies each payload once",
        passed=packed.copied == expected,
        detail=f"bytes per exchange: expected {expected}, copied {packed.copied}",
    )


def _copied_nothing(in_place: Sent) -> Check:
    return Check(
        name="the in-place layout copies nothing",
        passed=not any(in_place.copied),
        detail=f"{sum(in_place.copied)} bytes copied",
    )


def _sent_in_place(run: Run) -> Check:
    by_rank = [list(addresses) for addresses in zip(*run.sent.addresses, strict=True)]
    others = [
        rank
        for rank, (outcome, addresses) in enumerate(zip(run.outcomes, by_rank, strict=True))
        if outcome.send_addresses != addresses
    ]
    return Check(
        name="the in-place layout sends from where the data was stored",
        passed=not others and len(by_rank) == len(run.outcomes),
        detail=f"other addresses on ranks {others}" if others else "addresses equal on every rank",
    )
