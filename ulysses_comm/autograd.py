"""Gradients of the exchanges in eager mode: each one's backward is the other, with the same copies.

Under `torch.compile` these functions are not used: torch 2.11 traces an autograd.Function around a
collective into silently wrong gradients. `traced.py` serves there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ulysses_comm.collective import is_tracked
from ulysses_comm.route import Buffers, Route
from ulysses_comm.transfer import (
    finish_scatter_heads,
    finish_scatter_seqlen_apart,
    start_scatter_heads,
    start_scatter_seqlen_apart,
)
from ulysses_comm.wire import Wire
from ulysses_comm.workspace import Workspace

Finish = Callable[[], list[torch.Tensor]]


def track_scatter_heads(
    finish: Finish,
    wire: Wire,
    route: Route,
    workspace: Workspace | None,
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Finish a Q/K/V exchange and tie its results to the inputs that were sent.

    Args:
        finish: Waits for the exchange and returns its results, untracked.
        wire: The layout.
        route: The ranks and their tokens.
        workspace: Where backward takes its buffers from; None allocates them.
        inputs: What was sent, as autograd knows it.
    """
    results: tuple[torch.Tensor, ...] = _ScatterHeads.apply(  # type: ignore[no-untyped-call]
        finish, wire, route, workspace, *inputs
    )
    return list(results)


def track_scatter_seqlen(
    finish: Finish,
    wire: Wire,
    route: Route,
    workspace: Workspace | None,
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Finish an output exchange and tie its results to the inputs that were sent."""
    results: tuple[torch.Tensor, ...] = _ScatterSeqlen.apply(  # type: ignore[no-untyped-call]
        finish, wire, route, workspace, *inputs
    )
    return list(results)


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        finish: Finish,
        wire: Wire,
        route: Route,
        workspace: Workspace | None,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.wire, ctx.route, ctx.workspace = wire, route, workspace
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        ctx.as_shards = [tensor.dim() == 4 for tensor in inputs]
        results = finish()
        ctx.mark_non_differentiable(*[r for r in results if not _is_differentiable(r)])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        chosen = [i for i, grad in enumerate(grads) if _is_differentiable(grad)]
        wire, route, workspace = ctx.wire.of_inputs(chosen), ctx.route, ctx.workspace
        sent = [grads[i].to(wire.dtypes[place]) for place, i in enumerate(chosen)]
        transfers = start_scatter_seqlen_apart(
            [grad.detach() for grad in sent], wire, route, Buffers(workspace)
        )

        def finish() -> list[torch.Tensor]:
            return finish_scatter_seqlen_apart(transfers, [ctx.as_shards[i] for i in chosen])

        tracked = is_tracked(sent)
        back = track_scatter_seqlen(finish, wire, route, workspace, sent) if tracked else finish()
        return (None, None, None, None, *_in_places(back, chosen, ctx.dtypes))


class _ScatterSeqlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        finish: Finish,
        wire: Wire,
        route: Route,
        workspace: Workspace | None,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.wire, ctx.route, ctx.workspace = wire, route, workspace
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        results = finish()
        ctx.mark_non_differentiable(*[r for r in results if not _is_differentiable(r)])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        chosen = [i for i, grad in enumerate(grads) if _is_differentiable(grad)]
        wire, route, workspace = ctx.wire.of_inputs(chosen), ctx.route, ctx.workspace
        sent = [grads[i].to(wire.dtypes[place]) for place, i in enumerate(chosen)]
        transfer = start_scatter_heads(
            [grad.detach() for grad in sent], wire, route, Buffers(workspace)
        )

        def finish() -> list[torch.Tensor]:
            return finish_scatter_heads(transfer)

        tracked = is_tracked(sent)
        back = track_scatter_heads(finish, wire, route, workspace, sent) if tracked else finish()
        return (None, None, None, None, *_in_places(back, chosen, ctx.dtypes))


def _in_places(
    grads: Sequence[torch.Tensor], chosen: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor | None]:
    """Put each gradient where its input stood, in the input's dtype; None for the others."""
    placed: list[torch.Tensor | None] = [None] * len(dtypes)
    for index, grad in zip(chosen, grads, strict=True):
        placed[index] = grad.to(dtypes[index])
    return placed


class PackHeadShards(torch.autograd.Function):
    """A pack that autograd follows, and that the exchange knows as its own and sends in place."""

    @staticmethod
    def forward(
        ctx: Any, pack: Callable[[], list[torch.Tensor]], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run `pack`, which copies the tensors into a send buffer, and return its head shards."""
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        views = pack()
        ctx.mark_non_differentiable(*[view for view in views if not _is_differentiable(view)])
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Flatten each view's gradient into the shape of its input."""
        return (
            None,
            *(
                grad.flatten(1, 2).to(dtype)
                if dtype.is_floating_point or dtype.is_complex
                else None
                for grad, dtype in zip(grads, ctx.dtypes, strict=True)
            ),
        )


def is_own_pack(views: Sequence[torch.Tensor]) -> bool:
    """Whether all views come from one `PackHeadShards`, and nothing has been done to them since."""
    node = views[0].grad_fn
    return isinstance(node, PackHeadShards._backward_cls) and all(
        view.grad_fn is node for view in views
    )
