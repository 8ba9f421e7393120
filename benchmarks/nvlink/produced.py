"""MAGI-2's kernel for norms, rotation and layout, with the exchange behind attention.

What `stored.py` copies, this kernel makes: the candidates of a real layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.harness import Candidate
from benchmarks.nvlink.epilogue import STORE, EpilogueExchange
from benchmarks.nvlink.groups import Groups
from benchmarks.nvlink.ways import Shape
from magi2.ops.attention_heads import store_heads_at_triton
from ulysses_comm import Pending, open_head_scatter

PRODUCE = STORE

Results = Sequence[torch.Tensor]


class ProducedExchange:
    """The exchange of what the kernel makes, by itself and behind attention."""

    def __init__(
        self,
        shape: Shape,
        groups: Groups,
        attend: Callable[[], torch.Tensor],
        check: Callable[[torch.Tensor], None],
    ) -> None:
        """Make the kernel's inputs.

        Args:
            shape: Of the exchange.
            groups: The ranks.
            attend: The attention, of other tensors.
            check: Of its result.
        """
        self.epilogue, self.groups = EpilogueExchange(shape, groups), groups
        self._attend, self._check_output = attend, check

    def candidates(self, transports: dict[str, dist.ProcessGroup | None]) -> list[Candidate]:
        """The kernel alone; for each transport the exchange waited for at once, and behind."""
        found = [one for one in self.epilogue.candidates() if one.name == PRODUCE]
        for name, group in transports.items():
            if group is None:
                continue
            waited, ahead = self._waited(group), self._ahead(group)
            found += [
                Candidate(
                    f"exchange produced and waited for, {name}",
                    waited,
                    self.epilogue.check,
                    self.epilogue.stale(waited),
                ),
                Candidate(
                    f"produced ahead, {name}", ahead, self._check, self.epilogue.stale(ahead)
                ),
            ]
        return found

    def _start(self, group: dist.ProcessGroup) -> Pending[list[torch.Tensor]]:
        shape, epilogue = self.epilogue.shape, self.epilogue
        target = open_head_scatter(
            [shape.heads] * 3,
            shape.head_dim,
            shape.dtype,
            epilogue.splits,
            group,
            device=self.groups.device,
            started=True,
        )
        store_heads_at_triton(*epilogue.arguments, target.addresses)
        return target.start()

    def _waited(self, group: dist.ProcessGroup) -> Callable[[], Results]:
        return lambda: self._start(group).wait()

    def _ahead(self, group: dist.ProcessGroup) -> Callable[[], tuple[torch.Tensor, Results]]:
        def run() -> tuple[torch.Tensor, Results]:
            pending = self._start(group)
            output = self._attend()
            return output, pending.wait()

        return run

    def _check(self, result: tuple[torch.Tensor, Results]) -> None:
        self._check_output(result[0])
        self.epilogue.check(result[1])
