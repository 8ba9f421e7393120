"""What the benchmark times: one way to do one of the two exchanges."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

Exchange = Literal["qkv", "output"]
QKV: Exchange = "qkv"
OUTPUT: Exchange = "output"

# (tensors, split_sizes, group) -> results
Call = Callable[[Sequence[torch.Tensor], Sequence[int], dist.ProcessGroup], Sequence[torch.Tensor]]
# (tensors, gradients of the results, split_sizes, group) -> (results, gradients of the tensors)
CallWithGradients = Callable[
    [Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[int], dist.ProcessGroup],
    tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
]


class Missing(Exception):  # noqa: N818  # no error: the benchmark goes on and says so
    """A peer that is not installed or does not import; the message says why."""


@dataclass(frozen=True)
class Way:
    """One way to do one exchange.

    Attributes:
        name: What the table calls it.
        exchange: Which of the two.
        call: Does it. The Q/K/V exchange gets three tensors and returns three, the output exchange
            gets one and returns one.
        takes: The layout in which `call` is handed its tensors: "shd" (tokens, heads, head_dim),
            "bshd" (1, tokens, heads, head_dim), or "shards" for a packed send buffer's head shards.
        with_gradients: Forward and backward in one, for a way that does without autograd.
        has_backward: Why it has no backward, or None if it has one.
    """

    name: str
    exchange: Exchange
    call: Call
    takes: Literal["shd", "bshd", "shards"] = "shd"
    with_gradients: CallWithGradients | None = None
    lacks_backward: str | None = None

    def forward_backward(
        self,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        split_sizes: Sequence[int],
        group: dist.ProcessGroup,
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Do the exchange and its backward; return results and gradients of the tensors."""
        if self.with_gradients is not None:
            return self.with_gradients(tensors, gradients, split_sizes, group)
        results = self.call(tensors, split_sizes, group)
        return results, torch.autograd.grad(results, tensors, gradients)


@dataclass(frozen=True)
class Peer:
    """Another library's exchanges.

    Attributes:
        name: What the table calls it.
        package: What pip calls it.
        version: Of the installed package.
        calls: Which of its functions are called, and how.
        ways: Its ways to do the exchanges.
    """

    name: str
    package: str
    version: str
    calls: str
    ways: tuple[Way, ...]


def version_of(package: str) -> str:
    """Return the installed version of a package.

    Raises:
        Missing: If there is none.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise Missing(
            f"{package} is not installed; pip install 'ulysses-comm[bench-peers]'"
        ) from None
