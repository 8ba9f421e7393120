"""From a public call to an exchange under way: resolve the group, check, agree, choose the form."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ulysses_comm.agreement import Validate, agree
from ulysses_comm.autograd import is_own_pack, track_scatter_heads, track_scatter_seqlen
from ulysses_comm.checks import (
    HeadScatter,
    SeqlenScatter,
    check_head_scatter,
    check_out,
    check_results,
    check_seqlen_scatter,
)
from ulysses_comm.collective import is_tracked
from ulysses_comm.group import Group, rank_and_world_size, resolve_group
from ulysses_comm.head_split import HeadSplit
from ulysses_comm.layout import shares_memory
from ulysses_comm.pending import Pending
from ulysses_comm.route import Buffers, Route
from ulysses_comm.symmetric.choice import way_of
from ulysses_comm.traced import scatter_heads_traced, scatter_seqlen_traced
from ulysses_comm.transfer import (
    finish_scatter_heads,
    finish_scatter_seqlen,
    record_copy,
    start_scatter_heads,
    start_scatter_seqlen,
)
from ulysses_comm.wire import Wire
from ulysses_comm.workspace import Workspace


def launch_scatter_heads(
    tensors: Sequence[torch.Tensor],
    split_sizes: Sequence[int],
    group: Group,
    *,
    head_splits: Sequence[HeadSplit] | None,
    keep_dtypes: bool,
    validate: Validate,
    workspace: Workspace | None,
    out: torch.Tensor | None,
    async_op: bool,
) -> Pending[list[torch.Tensor]]:
    """Check and start a Q/K/V exchange; see `scatter_heads_gather_seqlen` for the arguments."""
    process_group = resolve_group(group)
    rank, world_size = rank_and_world_size(process_group)

    def check() -> HeadScatter:
        _check_memory(workspace, None if out is None else [out])
        checked = check_head_scatter(
            tensors, split_sizes, rank, world_size, head_splits=head_splits, keep_dtypes=keep_dtypes
        )
        if checked.wire is not None:
            shape = (sum(checked.split_sizes), *checked.wire.row_shape(rank))
            check_out(out, shape, checked.wire.dtype, checked.inputs)
            # Rows of several dtypes are seen as each of them.
            alignment = (
                1 if checked.wire.is_uniform else max(d.itemsize for d in checked.wire.dtypes)
            )
            _check_places([] if out is None else [out], alignment)
        return checked

    def way(checked: HeadScatter) -> str | None:
        return way_of(process_group, checked.inputs, async_op=async_op) if process_group else None

    checked = agree(check, process_group, validate, way=way)
    inputs, wire = checked.inputs, checked.wire
    if wire is None:
        return Pending.of([])
    if process_group is None or world_size == 1:
        return Pending.of(
            _alone([t if t.dim() == 3 else t.flatten(1, 2) for t in inputs], wire, out)
        )
    route = Route(process_group, rank, tuple(checked.split_sizes))
    if torch.compiler.is_compiling():
        return Pending.of(scatter_heads_traced(inputs, wire, route))
    record_copy(process_group, checked.copied_bytes, after=False)
    _note_write(out)
    return _start_heads(inputs, wire, route, Buffers(workspace, receive=out), async_op)


def launch_scatter_seqlen(
    tensor: torch.Tensor,
    split_sizes: Sequence[int],
    group: Group,
    *,
    head_split: HeadSplit | None,
    as_shards: bool,
    validate: Validate,
    workspace: Workspace | None,
    out: torch.Tensor | None,
    async_op: bool,
) -> Pending[torch.Tensor]:
    """Check and start an output exchange; see `scatter_seqlen_gather_heads` for the arguments."""
    return launch_scatter_seqlen_each(
        [tensor],
        split_sizes,
        group,
        head_splits=None if head_split is None else [head_split],
        keep_dtypes=False,
        as_shards=as_shards,
        validate=validate,
        workspace=workspace,
        out=None if out is None else [out],
        async_op=async_op,
        alone=True,
    ).then(lambda results: results[0])


def launch_scatter_seqlen_each(
    tensors: Sequence[torch.Tensor],
    split_sizes: Sequence[int],
    group: Group,
    *,
    head_splits: Sequence[HeadSplit] | None,
    keep_dtypes: bool,
    as_shards: bool,
    validate: Validate,
    workspace: Workspace | None,
    out: Sequence[torch.Tensor] | None,
    async_op: bool,
    alone: bool = False,
    results: Sequence[torch.Tensor] | None = None,
) -> Pending[list[torch.Tensor]]:
    """Check and start an output exchange of several tensors.

    See `scatter_seqlen_gather_heads_each` for the arguments. `as_shards` asks for views (tokens,
    world_size, heads per rank, head_dim); `alone` says that there is one tensor, which is to be
    contiguous; `results` is as `out`, but of any strides, for tracked tensors too, and not checked:
    memory that nothing else sees.
    """
    process_group = resolve_group(group)
    rank, world_size = rank_and_world_size(process_group)

    def check() -> SeqlenScatter:
        _check_memory(workspace, out)
        checked = check_seqlen_scatter(
            tensors,
            split_sizes,
            rank,
            world_size,
            head_splits=head_splits,
            keep_dtypes=keep_dtypes,
            alone=alone,
        )
        if out is not None:
            check_results(out, checked, rank, as_shards=as_shards)
            _check_places(out)
        return checked

    def way(checked: SeqlenScatter) -> str | None:
        return way_of(process_group, checked.inputs, async_op=async_op) if process_group else None

    checked = agree(check, process_group, validate, way=way)
    inputs, wire = checked.inputs, checked.wire
    if wire is None:
        return Pending.of([])
    if process_group is None or world_size == 1:
        kept = [t.to(dtype) for t, dtype in zip(inputs, wire.dtypes, strict=True)]
        if results is not None or out is not None:
            kept = _copied(kept, results or out or [])
        return Pending.of([t.unsqueeze(1) for t in kept] if as_shards else kept)
    route = Route(process_group, rank, tuple(checked.split_sizes))
    shards = [as_shards] * len(inputs)
    if torch.compiler.is_compiling():
        return Pending.of(scatter_seqlen_traced(inputs, wire, route, shards))
    if as_shards and out is not None:
        _note_write(out[0])
        buffers = Buffers(workspace, receive=out[0])
    else:
        buffers = Buffers(workspace, results=out if results is None else results)
    return _start_seqlen(inputs, wire, route, buffers, shards, async_op)


def _start_heads(
    inputs: list[torch.Tensor], wire: Wire, route: Route, buffers: Buffers, async_op: bool
) -> Pending[list[torch.Tensor]]:
    tracked = is_tracked(inputs)
    transfer = start_scatter_heads(
        [tensor.detach() for tensor in inputs] if tracked else inputs,
        wire,
        route,
        buffers,
        # A tracked view may be changed in place behind the send; our own pack's views cannot.
        in_place=not tracked or is_own_pack(inputs),
        async_op=async_op,
    )

    def finish() -> list[torch.Tensor]:
        return finish_scatter_heads(transfer)

    def finish_tracked() -> list[torch.Tensor]:
        with torch.inference_mode(False), torch.enable_grad():  # as when it was started
            return track_scatter_heads(finish, wire, route, buffers.workspace, inputs)

    return Pending(finish_tracked if tracked else finish)


def _start_seqlen(
    inputs: list[torch.Tensor],
    wire: Wire,
    route: Route,
    buffers: Buffers,
    as_shards: list[bool],
    async_op: bool,
) -> Pending[list[torch.Tensor]]:
    tracked = is_tracked(inputs)
    sent = [tensor.detach() for tensor in inputs] if tracked else inputs
    transfer = start_scatter_seqlen(sent, wire, route, buffers, async_op=async_op)

    def finish() -> list[torch.Tensor]:
        return finish_scatter_seqlen(transfer, as_shards)

    def finish_tracked() -> list[torch.Tensor]:
        with torch.inference_mode(False), torch.enable_grad():  # as when it was started
            return track_scatter_seqlen(finish, wire, route, buffers.workspace, inputs)

    return Pending(finish_tracked if tracked else finish)


def _check_memory(workspace: object, out: object) -> None:
    """Check what is used only once other ranks may have started to send.

    Raises:
        ValueError: If workspace is no `Workspace`, or out holds something that is no tensor.
    """
    if not (workspace is None or isinstance(workspace, Workspace)):
        raise ValueError(
            f"workspace is a {type(workspace).__name__}: expected a ulysses_comm.Workspace(), or "
            "None for fresh buffers."
        )
    if out is None:
        return
    if not isinstance(out, (list, tuple)):
        raise ValueError(
            f"out is a {type(out).__name__}: expected a list of tensors, one for each input."
        )
    for place in out:
        if not isinstance(place, torch.Tensor):
            raise ValueError(f"out has a {type(place).__name__}: expected a torch.Tensor.")


def _check_places(out: Sequence[torch.Tensor], alignment: int = 1) -> None:
    """Check that results can be written and read where the caller wants them.

    Raises:
        ValueError: If two of them overlap, if one is not what its memory says (a lazy conjugate or
            negation), or if a buffer of bytes is not aligned to the elements that it receives.
    """
    for index, place in enumerate(out):
        if place.is_conj() or place.is_neg():
            raise ValueError(
                "out is the view of a tensor that is conjugated or negated when it is read: "
                "expected one that is written as it lies. Pass the tensor itself."
            )
        offset = place.storage_offset() * place.element_size()
        if offset % alignment:
            raise ValueError(
                f"out begins at byte {offset} of its storage: expected a multiple of {alignment}, "
                f"since it receives elements of {alignment} bytes."
            )
        if any(_overlap(place, other) for other in out[:index]):
            raise ValueError(
                f"out[{index}] lies in the memory of another result: expected memory of its own "
                "for each."
            )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors have an element in common."""
    if not shares_memory(one, other):
        return False
    spans = [(t.storage_offset() * t.element_size(), t.nbytes) for t in (one, other)]
    (first, size), (second, other_size) = spans
    return first < second + other_size and second < first + size


def _note_write(out: torch.Tensor | None) -> None:
    """Tell autograd that a buffer is overwritten, which a collective does not do by itself.

    Without this a graph that has saved its old content would compute gradients from the new one.
    """
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _copied(tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [place.view_as(t).copy_(t) for place, t in zip(places, tensors, strict=True)]


def _alone(tensors: list[torch.Tensor], wire: Wire, out: torch.Tensor | None) -> list[torch.Tensor]:
    """Return a lone rank's tensors as they are, or in the buffer that it asked for."""
    if out is None:
        return tensors
    views = wire.gathered(out.view(-1, *wire.row_shape(0)), 0)
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    return views
