"""Sequence parallelism for any transformers model that looks attention up by name.

    sequence = parallelize(model, group)
    logits = sequence.gather(model(**sequence.shard(input_ids=ids)).logits)

The model's own attention (sdpa, eager, flash) runs between the two exchanges; everything else in
the model works on this rank's tokens. Nothing of transformers is patched: its registries of
attention and mask functions get an entry for this model.
"""

from __future__ import annotations

import copy
import inspect
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ulysses_comm.agreement import Validate
from ulysses_comm.attention import UlyssesAttention
from ulysses_comm.group import Group, rank_and_world_size, resolve_group
from ulysses_comm.integrations.transformers_functions import (
    Request,
    ShardedLayer,
    attention_function,
    make_mask,
    segments_of,
)
from ulysses_comm.layout import balanced_split_sizes, check_split_sizes
from ulysses_comm.per_head import PerHead, Rule
from ulysses_comm.sequence import LossRule, gather_sequence, shard_sequence, sum_losses
from ulysses_comm.workspace import Workspace

IGNORED_LABEL = -100
"""What transformers' losses leave out."""

_TOKEN_INPUTS = ("input_ids", "inputs_embeds", "token_type_ids")

# Parameters of an attention layer that have a value for each head and that its function reads off
# the layer instead of getting them passed.
_PER_HEAD_ATTRIBUTES = ("sinks",)


def parallelize(
    model: torch.nn.Module,
    group: Group,
    *,
    attention: str = "sdpa",
    per_head: Mapping[str, Rule | None] | None = None,
    chunks: int = 1,
    workspace: Workspace | None = None,
    validate: Validate = False,
) -> SequenceParallel:
    """Let a model attend over a sequence that the ranks of a group share.

    Args:
        model: A `transformers.PreTrainedModel` whose class supports the attention interface. Every
            rank has its own object, with the same weights.
        group: As in `scatter_heads_gather_seqlen`.
        attention: The implementation that attends on each rank: "sdpa", "eager",
            "flash_attention_2" or any other registered name.
        per_head: As in `UlyssesAttention`.
        chunks: As in `UlyssesAttention`.
        workspace: As in `UlyssesAttention`.
        validate: As in `UlyssesAttention`.

    Returns:
        What shards the inputs and gathers the outputs; `close()` gives the model its attention
        back.

    Raises:
        ValueError: If the model can't be switched, or cannot be told positions.
    """
    sequence = SequenceParallel(
        model,
        group,
        attention=attention,
        per_head=per_head,
        chunks=chunks,
        workspace=workspace,
        validate=validate,
    )
    sequence.open()
    return sequence


class SequenceParallel:
    """One model's way to its rank's tokens and back. Made by `parallelize`.

    Attributes:
        model: The model.
        group: The ranks that share the sequence.
        name: Under which the attention is registered, for `attn_implementation`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        group: Group,
        *,
        attention: str = "sdpa",
        per_head: Mapping[str, Rule | None] | None = None,
        chunks: int = 1,
        workspace: Workspace | None = None,
        validate: Validate = False,
    ) -> None:
        self.model: Any = model
        self.group = group
        # One entry for each model and rank: the registries are common to all of a process.
        self.name = f"ulysses_comm_{uuid.uuid4().hex[:12]}"
        self._inner = attention
        self._attention = UlyssesAttention(
            self._attend_locally,
            group=group,
            layout="bhsd",
            per_head={**{n: PerHead(-1) for n in _PER_HEAD_ATTRIBUTES}, **(per_head or {})},
            chunks=chunks,
            workspace=workspace,
            validate=validate,
        )
        self._request: Request | None = None
        self._calls = 0
        # What close() undoes: (module, attribute, the configuration that it had), and a hook.
        self._before: list[tuple[torch.nn.Module, str, Any]] = []
        self._hook: Any = None

    def open(self) -> None:
        """Register the attention and switch the model to it."""
        from transformers import AttentionInterface, AttentionMaskInterface

        if self._hook is not None:
            return
        self._check_model()
        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, self._make_mask)
        self._take_own_config()
        config = self.model.config
        self.model.set_attn_implementation(self.name)
        if config._attn_implementation != self.name:
            kept = config._attn_implementation
            self._restore()
            raise ValueError(
                f"{type(self.model).__name__} keeps attn_implementation={kept!r}: expected a model "
                "that takes any registered attention. Use UlyssesAttention inside its attention "
                "layer instead."
            )
        if getattr(config, "use_cache", None):
            # A cache would hold this rank's tokens only, of all heads.
            config.use_cache = False
        self._hook = self.model.register_forward_hook(self._check_exchanged)

    def close(self) -> None:
        """Give the model its attention back."""
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = self._request = None
        self._restore()

    def __enter__(self) -> SequenceParallel:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def split_sizes(self) -> list[int]:
        """Tokens each rank owns of the sequence that was sharded last."""
        return list(self._current.split_sizes)

    def shard(
        self, *, split_sizes: Sequence[int] | None = None, **inputs: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Return this rank's part of a model's inputs, to be passed to the model as they are.

        Args:
            split_sizes: Tokens each rank owns, in rank order; None for `balanced_split_sizes`.
            inputs: Of the whole sequence, the same on every rank: input_ids (batch, seqlen) or
                inputs_embeds, and token_type_ids, attention_mask, position_ids, labels. Positions
                count from 0 unless they are given; those that start anew mark sequences packed into
                one.

        Returns:
            The same names for this rank's tokens, with position_ids. For labels of a causal
            language model also what makes its loss this rank's part of the whole loss: the sum over
            the ranks is the loss of one process, see `total_loss`.

        Raises:
            ValueError: If an input is unknown or has another number of tokens than the others.
        """
        whole = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        first = next((whole[name] for name in _TOKEN_INPUTS if name in whole), None)
        if first is None:
            raise ValueError(f"inputs are {sorted(whole)}: expected input_ids or inputs_embeds.")
        batch, length = first.shape[:2]
        rank, world_size = rank_and_world_size(resolve_group(self.group))
        sizes = split_sizes or balanced_split_sizes(length, world_size)
        sizes = check_split_sizes(sizes, world_size)
        positions = whole.pop("position_ids", None)
        if positions is None:
            positions = self._default_positions(first)
        mask, labels = whole.pop("attention_mask", None), whole.pop("labels", None)
        for name, tensor in whole.items():
            self._check_token_input(name, tensor, batch, length)
        segments = None if mask is not None else segments_of(positions)
        padding = mask.bool() if mask is not None and mask.dim() == 2 else None
        self._request = Request(tuple(sizes), positions, padding, segments)
        local = {name: self._own_rows(tensor, 1) for name, tensor in whole.items()}
        local["position_ids"] = self._own_rows(positions, -1)
        if mask is not None:
            # A mask of (batch, heads or 1, queries, keys) is used as it is, by every rank.
            local["attention_mask"] = self._own_rows(mask, 1) if mask.dim() == 2 else mask
        elif segments is not None:
            # Keeps transformers from looking for packed sequences in this rank's part alone.
            local["attention_mask"] = local["position_ids"].new_ones((batch, max(sizes[rank], 1)))
        if labels is not None:
            local.update(self._own_labels(labels))
        return local

    def gather(
        self, tensor: torch.Tensor, *, dim: int = 1, loss: LossRule | None = None
    ) -> torch.Tensor:
        """Return the whole of a model's output on every rank.

        Args:
            tensor: The rank's tokens on `dim`, such as logits or hidden states.
            dim: The dimension of tokens.
            loss: As in `gather_sequence`; needed if autograd tracks the tensor.
        """
        sizes = self._current.split_sizes
        own = sizes[rank_and_world_size(resolve_group(self.group))[0]]
        return gather_sequence(tensor.narrow(dim, 0, own), self.group, sizes, dim=dim, loss=loss)

    def total_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of the whole sequence; `sum_losses` of the ranks' parts."""
        return sum_losses(loss, self.group)

    @property
    def _current(self) -> Request:
        if self._request is None:
            raise RuntimeError(
                "No sequence is sharded: call shard(input_ids=...) and pass what it returns to the "
                "model, or close() to use the model on one rank."
            )
        return self._request

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Serve as transformers' attention: (batch, heads, rows, channels) each."""
        request = self._current
        self._calls += 1
        own = request.split_sizes[rank_and_world_size(resolve_group(self.group))[0]]
        rows = max(own, 1)
        if query.shape[2] != rows or key.shape[2] != rows:
            raise ValueError(
                f"{type(module).__name__} attends from {query.shape[2]} tokens to {key.shape[2]}: "
                f"expected {rows}, this rank's share of the sequence that was sharded last, in "
                "both. Pass the model what shard() returns. Attention to another sequence and "
                "caches of earlier tokens (use_cache, generate) are not supported."
            )
        for name in _PER_HEAD_ATTRIBUTES:
            if isinstance(getattr(module, name, None), torch.Tensor):
                kwargs[name] = getattr(module, name)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = request.position_ids
        result = self._attention(
            *(tensor[:, :, :own] for tensor in (query, key, value)),
            split_sizes=request.split_sizes,
            module=module,
            attention_mask=attention_mask,
            **kwargs,
        )
        assert isinstance(result, torch.Tensor), "no log-sum-exp is asked for"
        output = result.transpose(1, 2)
        if own == 0:
            # The stand-in row gets an output that leads back to the exchange, as backward must.
            output = torch.nn.functional.pad(output, (0, 0, 0, 0, 0, rows))
        return output, None

    def _attend_locally(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        module: torch.nn.Module,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the model's own attention on the whole sequence and this rank's heads."""
        own = {name: kwargs.pop(name) for name in _PER_HEAD_ATTRIBUTES if name in kwargs}
        own["num_key_value_groups"] = query.shape[1] // key.shape[1]
        inner = attention_function(self._inner, module)
        output, _ = inner(ShardedLayer(module, own), query, key, value, attention_mask, **kwargs)
        result: torch.Tensor = output.transpose(1, 2)
        return result

    def _make_mask(self, **kwargs: Any) -> Any:
        """Serve as transformers' mask function."""
        return make_mask(self._inner, self._current, **kwargs)

    def _own_rows(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's tokens, or a stand-in if it owns none.

        transformers cannot view zero tokens as heads. The stand-in reaches no exchange and no
        result.
        """
        own = shard_sequence(tensor, self.group, self._current.split_sizes, dim=dim)
        if own.shape[dim] == 0:
            return tensor.narrow(dim, 0, 1)
        return own

    def _own_labels(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if getattr(self.model, "loss_type", None) != "ForCausalLM":
            raise ValueError(
                f"labels for {type(self.model).__name__}: expected a causal language model, whose "
                "loss is a sum over tokens. Compute the loss from the model's output, and weigh "
                "each rank's part so that their sum is the whole one."
            )
        # The next token of a rank's last one is another rank's first: shift before cutting.
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        own = self._own_rows(shifted, 1)
        if shard_sequence(shifted, self.group, self._current.split_sizes).shape[1] == 0:
            own = torch.full_like(own, IGNORED_LABEL)
        return {
            "labels": own,
            "shift_labels": own.contiguous(),
            "num_items_in_batch": (shifted != IGNORED_LABEL).sum(),
        }

    def _check_token_input(self, name: str, tensor: torch.Tensor, batch: int, length: int) -> None:
        if name not in _TOKEN_INPUTS:
            raise ValueError(
                f"{name} is unknown: expected {', '.join(_TOKEN_INPUTS)}, attention_mask, "
                "position_ids or labels. Pass other arguments to the model yourself, whole or with "
                "shard_sequence, as it needs them."
            )
        if tuple(tensor.shape[:2]) != (batch, length):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: expected (batch, seqlen) = "
                f"({batch}, {length}) first, as the other inputs."
            )

    def _default_positions(self, first: torch.Tensor) -> torch.Tensor:
        for module in self.model.modules():
            if hasattr(module, "create_position_ids_from_input_ids"):
                raise ValueError(
                    f"{type(module).__name__} does not count positions from 0: expected "
                    "position_ids of the whole sequence, as its "
                    "create_position_ids_from_input_ids makes them."
                )
        return torch.arange(first.shape[1], device=first.device)[None]

    def _check_model(self) -> None:
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            raise ValueError(
                f"{type(self.model).__name__}.forward takes no position_ids: expected a model that "
                "can be told the positions of its tokens, since a rank holds a part from the "
                "middle. Use UlyssesAttention inside its attention layer instead."
            )

    def _take_own_config(self) -> None:
        """Give the model a copy of its configuration, which other models may share."""
        import transformers

        copied: dict[int, Any] = {}
        copy.deepcopy(self.model.config, copied)
        for module in self.model.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, transformers.PreTrainedConfig) and id(value) in copied:
                    self._before.append((module, name, value))
                    setattr(module, name, copied[id(value)])

    def _restore(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        for module, name, config in self._before:
            setattr(module, name, config)
        self._before = []
        for registry in (AttentionInterface, AttentionMaskInterface):
            registry._global_mapping.pop(self.name, None)

    def _check_exchanged(self, *_: Any) -> None:
        """Notice layers that attend by other means: ranks would see their own tokens only."""
        if self._calls == 0:
            raise RuntimeError(
                f"{type(self.model).__name__} has run without an exchange: its attention layers do "
                "not look attention up in its configuration. Use UlyssesAttention inside them."
            )
        self._calls = 0
