"""What the tests of compiled exchanges share: ranks that compile for themselves, and count it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.decorators import mark_unbacked


def own_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with code of its own.

    Dynamo keeps its graphs by code object. Simulated ranks share the process, so that without this
    they would share graphs, which real ranks do not.
    """
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_of_a_rank")
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class Counting:
    """A backend that counts what it compiles and keeps the graphs that Dynamo gave it."""

    def __init__(self, backend: str) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self._backend = lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return self._backend(graph, inputs)

    @property
    def count(self) -> int:
        return len(self.graphs)


class Compiled:
    """A function compiled whole, for one rank."""

    def __init__(
        self, function: Callable[..., Any], backend: str = "aot_eager", dynamic: bool | None = None
    ) -> None:
        self.backend = Counting(backend)
        self._call = torch.compile(
            own_copy(function), backend=self.backend, fullgraph=True, dynamic=dynamic
        )

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    @property
    def count(self) -> int:
        return self.backend.count


def of_any_length(*tensors: torch.Tensor) -> None:
    """Mark the tokens of each tensor as a size that a graph makes no assumption about."""
    for tensor in tensors:
        mark_unbacked(tensor, 0)


@contextmanager
def fresh_compiler(**settings: Any) -> Iterator[None]:
    """Start without graphs, leave none behind, and set Dynamo's configuration meanwhile."""
    torch._dynamo.reset()
    settings = {"capture_scalar_outputs": True, "recompile_limit": 8, **settings}
    with torch._dynamo.config.patch(settings):
        yield
    torch._dynamo.reset()
