"""Compile the regions between a model's exchanges, each once for all layers of a kind.

Attention, routed experts and the exchanges stay outside: kernels and collectives of their own.
Every region is one graph (`fullgraph=True`). Under the backend "aot_eager" a compiled model has the
bits of the eager one; Inductor fuses, and its results are equal from run to run and among models
compiled in the same way, not to eager ones.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from magi2.modules.modality import ModalityOrder
from magi2.regions import Regions
from magi2.transformer import Magi2Transformer


class RegionCompiler:
    """Compiled regions, by what they have to be compiled anew for.

    Static graphs are kept for each kind of layer and each request shape. Dynamic ones serve all
    lengths: one for each kind, and for each pattern of absent, single and equally many tokens of
    the modalities, which a compiler treats apart. No graph is thus ever guarded out, and none has
    a limit on how often it is made again.

    Args:
        dynamic: Whether one graph serves every number of tokens.
        deterministic: Passed to Inductor with each compile: no benchmark on this machine chooses
            between kernels that round differently. torch's own switch for it would be reset after
            the first traced frame, and would not reach later compiles.
        backend: "inductor", "aot_eager", or any other that torch.compile takes.
    """

    def __init__(
        self,
        *,
        dynamic: bool,
        deterministic: bool,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        self.dynamic = dynamic
        self.deterministic = deterministic
        self.backend = backend
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._kinds: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()

    @property
    def num_graphs(self) -> int:
        """Regions compiled so far."""
        return len(self._compiled)

    @property
    def options(self) -> dict[str, str | int | bool | Callable[..., Any]] | None:
        """What every compile is given; None for backends without options."""
        if self.backend != "inductor":
            return None
        # Roundings between fused operations are kept, where eager code has them.
        return {"deterministic": self.deterministic, "emulate_precision_casts": True}

    def __call__(
        self,
        name: str,
        function: Callable[..., Any],
        module: nn.Module,
        order: ModalityOrder,
        *a: Any,
    ) -> Any:
        """Run a region, compiled; the first time for its kind and shape it is compiled."""
        if not sum(order.group_sizes):
            return function(module, *a)  # nothing to compute, only shapes to get right
        shape = length_pattern(order.group_sizes) if self.dynamic else order.group_sizes
        key = (name, self._kind(module), shape)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(function)
        if not torch.is_grad_enabled():
            # A view is compiled with what it is a view of: the first layer apart from the others,
            # this rank's rows apart from those of a longer request.
            a = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in a)
        return compiled(module, *a)

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        assert isinstance(function, types.FunctionType)
        compiled: Callable[..., Any] = torch.compile(
            _own_copy(function),
            fullgraph=True,
            dynamic=self.dynamic,
            backend=self.backend,
            options=self.options,
        )
        return compiled

    def _kind(self, module: nn.Module) -> Hashable:
        """Modules of a kind hold the same parameters; routed experts are in no region."""
        kind = self._kinds.get(module)
        if kind is None:
            kind = self._kinds[module] = tuple(
                (name, tuple(weight.shape), weight.dtype, weight.device)
                for name, weight in module.named_parameters()
                if ".moe_mlp." not in name
            )
        return kind


def compile_model(
    model: Magi2Transformer,
    *,
    dynamic: bool,
    deterministic: bool,
    backend: str | Callable[..., Any] = "inductor",
    compiler: RegionCompiler | None = None,
) -> RegionCompiler:
    """Let a model run compiled regions between its exchanges, from its next call on.

    Nothing is compiled yet: that happens when a kind of region first runs, seconds for each under
    Inductor. `magi2.regions.Regions.of(model).remove()` brings the eager model back.

    Args:
        model: On its device, with or without weights.
        dynamic: As in `RegionCompiler`.
        deterministic: As in `RegionCompiler`.
        backend: As in `RegionCompiler`.
        compiler: What another model was compiled with: ranks simulated in one process share it and
            compile once for all of them.

    Returns:
        What compiles, for other models of this process.

    Raises:
        ValueError: If the compiler given was made with other settings.
    """
    asked = (dynamic, deterministic, backend)
    if compiler is None:
        compiler = RegionCompiler(dynamic=dynamic, deterministic=deterministic, backend=backend)
    given = (compiler.dynamic, compiler.deterministic, compiler.backend)
    if given != asked:
        raise ValueError(
            f"compiler has dynamic, deterministic, backend = {given}, asked for is {asked}: "
            "expected the same. Leave compiler=None to compile this model by itself."
        )
    regions = Regions.of(model)
    if regions is None:
        Regions(model, compiler)
    else:
        regions.call = compiler
    return compiler


def length_pattern(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """What a compiler with dynamic shapes cannot help to see of some lengths.

    0 and 1 are compiled by themselves, and equal lengths become one symbol. (5, 0, 5) and (9, 0, 9)
    are alike, (5, 0, 6) is not: each longer length is named by the first place where it stands,
    from 2 on.
    """
    return tuple(size if size < 2 else sizes.index(size) + 2 for size in sizes)


def _own_copy(function: types.FunctionType) -> types.FunctionType:
    """The function with a code object of its own, by which Dynamo keeps compiled code."""
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy
