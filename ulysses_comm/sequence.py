"""Cutting a sequence into the ranks' shards, and putting it together again.

What holds for gradients here and in every exchange: the ranks are one program, whose loss is the
sum of the ranks' losses, and the gradient of a parameter is the sum of the ranks' gradients.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from ulysses_comm.collective import all_to_all_rows, is_tracked
from ulysses_comm.group import Group, rank_and_world_size, resolve_group
from ulysses_comm.layout import balanced_split_sizes, check_split_sizes

LossRule = Literal["same", "own"]
"""What each rank makes of a gathered sequence: the same loss on every rank, or one of its own."""


def shard_sequence(
    tensor: torch.Tensor,
    group: Group,
    split_sizes: Sequence[int] | None = None,
    *,
    dim: int = 1,
) -> torch.Tensor:
    """Return this rank's tokens of a tensor that every rank holds whole.

    Args:
        tensor: Any shape, with seqlen tokens on `dim`; the same on every rank.
        group: As in `scatter_heads_gather_seqlen`.
        split_sizes: Tokens each rank owns, in rank order; None for `balanced_split_sizes`.
        dim: The dimension of tokens.

    Returns:
        The view with split_sizes[rank] tokens on `dim`. Nothing is sent, forward or backward; the
        gradient of `tensor` is zero outside the rank's tokens.

    Raises:
        ValueError: If split_sizes does not add up to the tokens of `tensor`.
    """
    rank, world_size = rank_and_world_size(resolve_group(group))
    length = tensor.shape[_check_dim(tensor, dim)]
    if split_sizes is None:
        split_sizes = balanced_split_sizes(length, world_size)
    sizes = check_split_sizes(split_sizes, world_size)
    if sum(sizes) != length:
        raise ValueError(
            f"tensor of shape {tuple(tensor.shape)} has {length} tokens on dim {dim}: expected "
            f"{sum(sizes)}, the sum of split_sizes={sizes}. Pass the whole sequence."
        )
    return tensor.narrow(dim, sum(sizes[:rank]), sizes[rank])


def gather_sequence(
    tensor: torch.Tensor,
    group: Group,
    split_sizes: Sequence[int] | None = None,
    *,
    dim: int = 1,
    loss: LossRule | None = None,
) -> torch.Tensor:
    """Return the whole sequence on every rank; the opposite of `shard_sequence`.

    Args:
        tensor: This rank's tokens, split_sizes[rank] of them on `dim`.
        group: As in `scatter_heads_gather_seqlen`.
        split_sizes: Tokens each rank owns, in rank order; None if all own as many as this rank.
        dim: The dimension of tokens.
        loss: Needed if autograd tracks the tensor, since no default would be right for all. "same":
            every rank computes the same loss of the whole, which counts once; backward takes the
            rank's own slice and sends nothing. "own": every rank computes a loss of its own, and
            they add up; backward sums the ranks' gradients.

    Returns:
        The tensor with all tokens on `dim`, in global order; contiguous if `dim` is the first
        dimension or all before it are of size one.

    Raises:
        ValueError: If the tensor has another number of tokens than split_sizes says, or autograd
            tracks it and `loss` is not given.

    One all-to-all, which carries uneven lengths on every backend; gloo refuses an uneven
    all-gather.
    """
    process_group = resolve_group(group)
    rank, world_size = rank_and_world_size(process_group)
    dim = _check_dim(tensor, dim)
    sizes = _sizes_around(tensor, dim, rank, world_size, split_sizes)
    if is_tracked([tensor]) and loss not in ("same", "own"):
        raise ValueError(
            f"loss={loss!r} for a tensor that requires grad: expected 'same' if every rank "
            "computes the same loss of the gathered sequence (its gradient then counts once), or "
            "'own' if every rank's loss is a part of the whole one (the gradients then add up)."
        )
    if process_group is None or world_size == 1:
        return tensor
    whole = _all_rows(
        tensor.detach() if loss == "same" else tensor, dim, sizes, rank, process_group
    )
    if loss != "same" or not is_tracked([tensor]):
        return whole
    # The other ranks' tokens are constants, this rank's are the tensor itself.
    before, _, after = whole.split(
        [sum(sizes[:rank]), sizes[rank], sum(sizes[rank + 1 :])], dim=dim
    )
    return torch.cat([before, tensor, after], dim=dim)


def sum_losses(loss: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of the ranks' losses, the same on every rank.

    Args:
        loss: This rank's part, any shape, floating point.
        group: As in `scatter_heads_gather_seqlen`.

    Returns:
        The sum. Its gradient is that of this rank's part, so that `backward()` on every rank gives
        each its share of the gradients, to be summed like all others.
    """
    process_group = resolve_group(group)
    if process_group is None or process_group.size() == 1:
        return loss
    # Contiguous on every rank: an all-reduce adds up memory, whatever strides say.
    total = loss.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=process_group)
    if not is_tracked([loss]):
        return total
    summed: torch.Tensor = _OfSum.apply(loss, total)  # type: ignore[no-untyped-call]
    return summed


class _OfSum(torch.autograd.Function):
    """A sum over ranks that has been made, as a function of this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: Group) -> None:
    """Replace each parameter's gradient by the sum over the ranks, in place.

    Args:
        parameters: Of a model that every rank has whole; those that need no gradient are left out.
            A rank without a gradient for one adds zeros.
        group: As in `scatter_heads_gather_seqlen`.

    Raises:
        ValueError: If a gradient is sparse, before anything is sent.

    One all-reduce for each dtype and device. DistributedDataParallel and FSDP average over their
    ranks instead: multiply the loss by this group's size there, and leave this out.
    """
    process_group = resolve_group(group)
    if process_group is None or process_group.size() == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for index, parameter in enumerate(parameters):
        if not parameter.requires_grad:
            continue
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                f"parameters[{index}] of shape {tuple(parameter.shape)} has a gradient of layout "
                f"{parameter.grad.layout}: expected a dense one. Turn sparse=True off in its "
                "embedding, or assign grad.to_dense() on every rank."
            )
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter.grad)
    for grads in kinds.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=process_group)
        for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(total.view_as(grad))


class SequenceDispatcher:
    """Holds the split sizes of one request, and hands out and takes back its tokens.

    The first tensor that is dispatched, or `begin`, decides the split; everything else has to be
    of the same request until `release`. One object serves one rank.

    Attributes:
        group: The ranks that share the sequence.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._split_sizes: list[int] | None = None

    @property
    def split_sizes(self) -> list[int]:
        """Tokens each rank owns in the request that is held.

        Raises:
            RuntimeError: If none is held.
        """
        if self._split_sizes is None:
            raise RuntimeError(
                "No request is held: expected begin(split_sizes) or dispatch(tensor) before."
            )
        return list(self._split_sizes)

    @property
    def is_held(self) -> bool:
        """Whether a request is held."""
        return self._split_sizes is not None

    def begin(self, split_sizes: Sequence[int] | int) -> list[int]:
        """Hold a request of these tokens per rank, or of so many tokens, balanced.

        Returns:
            Its split sizes.

        Raises:
            ValueError: If another request is held, or split_sizes does not fit the group.
        """
        _, world_size = rank_and_world_size(resolve_group(self.group))
        if isinstance(split_sizes, (int, numbers.Integral)):
            split_sizes = balanced_split_sizes(operator.index(split_sizes), world_size)
        sizes = check_split_sizes(split_sizes, world_size)
        if self._split_sizes is not None and sizes != self._split_sizes:
            raise ValueError(
                f"split_sizes={sizes} ({sum(sizes)} tokens) while a request of "
                f"{self._split_sizes} ({sum(self._split_sizes)} tokens) is held: expected the same "
                "request. Call release() when one is done, or use a dispatcher for each."
            )
        self._split_sizes = sizes
        return list(sizes)

    def dispatch(self, tensor: torch.Tensor, *, dim: int = 1) -> torch.Tensor:
        """Return this rank's tokens of a whole tensor; `shard_sequence` with the held split."""
        if self._split_sizes is None:
            self.begin(tensor.shape[_check_dim(tensor, dim)])
        if sum(self.split_sizes) != tensor.shape[_check_dim(tensor, dim)]:
            self.begin(tensor.shape[dim])  # says that it is another request
        return shard_sequence(tensor, self.group, self.split_sizes, dim=dim)

    def combine(
        self, tensor: torch.Tensor, *, dim: int = 1, loss: LossRule | None = None
    ) -> torch.Tensor:
        """Return the whole of this rank's tokens; `gather_sequence` with the held split."""
        return gather_sequence(tensor, self.group, self.split_sizes, dim=dim, loss=loss)

    def release(self) -> None:
        """Let go of the request; the next one may be another."""
        self._split_sizes = None


def _all_rows(
    tensor: torch.Tensor, dim: int, sizes: list[int], rank: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Send this rank's tokens to every rank, differentiably: backward sums what comes back."""
    rows = tensor.movedim(dim, 0)
    sent = rows.expand(len(sizes), *rows.shape).flatten(0, 1)
    received = all_to_all_rows(sent, sizes, [sizes[rank]] * len(sizes), group)
    return received.movedim(0, dim)


def _sizes_around(
    tensor: torch.Tensor, dim: int, rank: int, world_size: int, split_sizes: Sequence[int] | None
) -> list[int]:
    length = tensor.shape[dim]
    if split_sizes is None:
        return [length] * world_size
    sizes = check_split_sizes(split_sizes, world_size)
    if sizes[rank] != length:
        raise ValueError(
            f"tensor of shape {tuple(tensor.shape)} has {length} tokens on dim {dim}: expected "
            f"split_sizes[{rank}]={sizes[rank]}, those of rank {rank}."
        )
    return sizes


def _check_dim(tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"dim={dim} for a tensor of shape {tuple(tensor.shape)}: expected one of its "
            f"{tensor.dim()} dimensions, the one of tokens."
        )
    return dim % tensor.dim()
