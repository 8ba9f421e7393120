"""How much of the Q/K/V exchange hides behind attention over the gathered sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import Candidate, expect_bits
from benchmarks.nvlink.groups import Groups
from benchmarks.nvlink.ways import QkvExchange, Shape
from ulysses_comm import Workspace, scatter_heads_gather_seqlen, start_scatter_heads_gather_seqlen

ATTENTION, EXCHANGE = "attention", "exchange"
CHUNKS = (2, 3, 4)


def attend(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention of (S, H, D) tensors, by the kernel that torch chooses (flash or cuDNN)."""
    heads_first = [tensor.transpose(0, 1)[None] for tensor in tensors]
    return scaled_dot_product_attention(*heads_first)[0].transpose(0, 1)


class Overlap:
    """Attention of one layer and the exchange of another, apart and together."""

    def __init__(self, shape: Shape, groups: Groups) -> None:
        self.exchange = QkvExchange(shape, groups)
        self.groups = groups
        self.gathered = [tensor.clone() for tensor in self.exchange.expected]
        self.output = attend(self.gathered)

    def candidates(self) -> list[Candidate]:
        """Attention alone; for each transport the exchange alone, both started, and in chunks."""
        right = _near(self.output)
        found = [Candidate(ATTENTION, lambda: attend(self.gathered), right)]
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
            heads = self.output.shape[1]
            found += [
                Candidate(f"{chunks} head chunks, {name}", self._in_chunks(group, chunks), right)
                for chunks in CHUNKS
                if heads % chunks == 0
            ]
        return found

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

    def _in_chunks(self, group: dist.ProcessGroup, chunks: int) -> Callable[[], torch.Tensor]:
        """One layer: the heads of chunk n + 1 travel while those of chunk n attend."""
        size, splits, workspace = self.groups.size, self.exchange.splits, Workspace()
        shards = [tensor.unflatten(1, (size, -1)) for tensor in self.exchange.own]
        turns = list(zip(*(tensor.chunk(chunks, dim=2) for tensor in shards), strict=True))

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

    The exchange alone is the plain one, not the one that is started and waited for at once.
    """
    shares = {}
    for name, together in times.items():
        transport = name.rpartition(", ")[2]
        alone = times.get(f"{EXCHANGE}, {transport}")
        if alone and ATTENTION in times and not name.startswith((ATTENTION, EXCHANGE)):
            shares[name] = round((times[ATTENTION] + alone - together) / alone, 3)
    return shares


def _near(expected: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def check(result: torch.Tensor) -> None:
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)

    return check
