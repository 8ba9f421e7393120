"""Names and call signatures of other libraries' Ulysses layers, on this package's exchanges.

For a first run of code that was written for them: change the import, keep the rest.
`UlyssesAttention` of this package does more; docs/migration.md says what replaces what.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ulysses_comm.attention import UlyssesAttention as _UlyssesAttention
from ulysses_comm.group import Group, rank_and_world_size, resolve_group


class DistributedAttention(torch.nn.Module):
    """DeepSpeed's `deepspeed.sequence.layer.DistributedAttention`.

    Any number of heads over any number of ranks, grouped key/value heads included; nothing is
    remembered between layers or models. With `split_sizes=` in the call ranks may hold unequal
    shares of the sequence.
    """

    def __init__(
        self,
        local_attention: Callable[..., Any],
        sequence_process_group: Group,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        """Wrap a local attention.

        Args:
            local_attention: (query, key, value, *args, **kwargs) to the context, in the layout of
                the query or with heads and channels flattened.
            sequence_process_group: The ranks that share the sequence.
            scatter_idx: Dimension of heads; 2.
            gather_idx: Dimension of tokens; what the call's batch_dim_idx leaves.
            sp_stream: Not needed: an exchange overlaps with attention by `UlyssesAttention(chunks=
                ...)`.
            num_kv_heads: Not needed: read from each call's key.

        Raises:
            ValueError: If scatter_idx or gather_idx is another dimension.
        """
        super().__init__()
        _check_dims(scatter_idx, gather_idx, allowed=(0, 1))
        self.local_attn = local_attention
        self.num_kv_heads = num_kv_heads
        self._layers = torch.nn.ModuleDict(
            {
                layout: _UlyssesAttention(
                    _WithPositional(local_attention), group=sequence_process_group, layout=layout
                )
                for layout in ("bshd", "sbhd")
            }
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        split_sizes: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend from this rank's tokens to the whole sequence.

        Args:
            query: (batch, tokens, heads, head_dim) with batch_dim_idx 0, (tokens, batch, ...) with
                1; so are key and value.
            key: See query.
            value: See query.
            batch_dim_idx: Dimension of the batch.
            rotary_pos_emb: Must be None: rotate query and key before the call, where each rank
                knows the positions of its own tokens.
            args: For the local attention.
            split_sizes: Tokens each rank owns, in rank order; None if all own as many.
            kwargs: For the local attention.

        Returns:
            The context for this rank's tokens, in the form that the local attention returns.

        Raises:
            ValueError: If an argument is not as said here.
        """
        if batch_dim_idx not in (0, 1):
            raise ValueError(f"batch_dim_idx={batch_dim_idx!r}: expected 0 or 1.")
        if rotary_pos_emb is not None:
            raise ValueError(
                "rotary_pos_emb is given: expected None. Rotate query and key before the call, "
                "each rank at the positions of its own tokens; the result is the same."
            )
        heads = key.shape[2] if key.dim() == 4 else None
        if self.num_kv_heads not in (None, heads):
            raise ValueError(
                f"key of shape {tuple(key.shape)} beside num_kv_heads={self.num_kv_heads}: "
                "expected as many heads. Leave num_kv_heads out."
            )
        layer: Any = self._layers["bshd" if batch_dim_idx == 0 else "sbhd"]
        shape: list[int] = []
        context: torch.Tensor = layer(
            query, key, value, split_sizes=split_sizes, positional=args, shape=shape, **kwargs
        )
        if shape != [3]:
            return context
        if query.shape[2] < rank_and_world_size(resolve_group(layer.group))[1]:
            raise ValueError(
                f"The local attention flattens heads and channels, and {query.shape[2]} heads are "
                "fewer than the ranks: expected an output with heads and channels apart, since "
                "ranks without a head return that. Unflatten it in the local attention."
            )
        return context.flatten(2, 3)


class UlyssesAttention(torch.nn.Module):
    """yunchang's `yunchang.UlyssesAttention`, the part of its long-context attention without rings.

    With `split_sizes=` in the call ranks may hold unequal shares of the sequence.
    """

    def __init__(
        self,
        sequence_process_group: Group = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: Any = "fa",
    ) -> None:
        """Choose the local attention.

        Args:
            sequence_process_group: The ranks that share the sequence.
            scatter_idx: Dimension of heads; 2.
            gather_idx: Dimension of tokens; 1.
            use_sync: Not needed: results are ready for the current stream.
            attn_type: yunchang's AttnType or its value: "fa" (flash_attn), "fa3"
                (flash_attn_interface), "torch_math", "torch_flash", "torch_efficient" or
                "torch_cudnn"; or a function with flash-attention's arguments.

        Raises:
            ValueError: If a dimension or attn_type is another one.
            ModuleNotFoundError: If the attention's package is not installed.
        """
        super().__init__()
        _check_dims(scatter_idx, gather_idx, allowed=(1,))
        attend = attn_type if callable(attn_type) else _attention_of(attn_type)
        self._layer = _UlyssesAttention(
            _FirstOnly(attend), group=sequence_process_group, layout="bshd"
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        *args: Any,
        split_sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Attend from this rank's tokens to the whole sequence.

        Args:
            query: (batch, tokens, heads, head_dim), as key and value.
            key: See query; with as many heads or a divisor of them.
            value: See key.
            dropout_p: As in flash-attention; so are the others.
            softmax_scale: None for 1 / sqrt(head_dim).
            causal: Whether a token sees only those up to itself.
            window_size: How many tokens to the left and right it sees; -1 for all.
            softcap: Bound of the scores; 0 for none.
            alibi_slopes: (heads,) or (batch, heads), of all heads.
            deterministic: Whether the backward is.
            return_attn_probs: Passed on; the output alone is returned.
            args: Ignored, as there.
            split_sizes: Tokens each rank owns, in rank order; None if all own as many.

        Returns:
            As query.
        """
        if softmax_scale is None:
            softmax_scale = query.shape[-1] ** -0.5
        output: torch.Tensor = self._layer(
            query,
            key,
            value,
            split_sizes=split_sizes,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            deterministic=deterministic,
            return_attn_probs=return_attn_probs,
        )
        return output


class _WithPositional(torch.nn.Module):
    """A local attention that takes positional arguments, and may flatten heads and channels."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        positional: Sequence[Any],
        shape: list[int],
        **kwargs: Any,
    ) -> torch.Tensor:
        context: torch.Tensor = self.attention(q, k, v, *positional, **kwargs)
        shape[:] = [context.dim()]
        return context.unflatten(2, (q.shape[2], -1)) if context.dim() == 3 else context


class _FirstOnly(torch.nn.Module):
    """An attention whose first result counts."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *tensors: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result = self.attention(*tensors, **kwargs)
        output: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return output


_TORCH_BACKENDS = {
    "torch_math": SDPBackend.MATH,
    "torch_flash": SDPBackend.FLASH_ATTENTION,
    "torch_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch_cudnn": SDPBackend.CUDNN_ATTENTION,
}
_FLASH_MODULES = {"fa": "flash_attn", "fa3": "flash_attn_interface"}


def _attention_of(attn_type: Any) -> Callable[..., Any]:
    name = getattr(attn_type, "value", attn_type)
    if name in _TORCH_BACKENDS:
        return _torch_attention(_TORCH_BACKENDS[name])
    if name in _FLASH_MODULES:
        try:
            module = importlib.import_module(_FLASH_MODULES[name])
        except ImportError as error:
            raise ModuleNotFoundError(
                f"attn_type={name!r} needs the package {_FLASH_MODULES[name]!r}, which does not "
                f"import ({error}). Install it, or pass attn_type='torch_flash' or another one of "
                f"{sorted(_TORCH_BACKENDS)}.",
                name=_FLASH_MODULES[name],
            ) from error
        function: Callable[..., Any] = module.flash_attn_func
        return function
    raise ValueError(
        f"attn_type={attn_type!r}: expected one of {[*_FLASH_MODULES, *_TORCH_BACKENDS]}, or a "
        "function (query, key, value, **kwargs) with flash-attention's keyword arguments."
    )


def _torch_attention(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        return_attn_probs: bool,
        **others: Any,
    ) -> torch.Tensor:
        unset = {"window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None}
        for name, value in unset.items():
            given = others.get(name, value)
            if given is not value and (isinstance(given, torch.Tensor) or given != value):
                raise ValueError(
                    f"{name} is given: torch's attention has none, expected {value!r}. Use "
                    "attn_type='fa' or a function of your own."
                )
        with sdpa_kernel(backend):
            output = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                dropout_p=dropout_p,
                is_causal=causal,
                scale=softmax_scale,
                enable_gqa=q.shape[2] != k.shape[2],
            )
        return output.transpose(1, 2)

    return attend


def _check_dims(scatter_idx: int, gather_idx: int, *, allowed: tuple[int, ...]) -> None:
    if scatter_idx != 2 or gather_idx not in allowed:
        raise ValueError(
            f"scatter_idx={scatter_idx}, gather_idx={gather_idx}: expected 2, the dimension of "
            f"heads, and one of {allowed}, the dimension of tokens. ulysses_comm.UlyssesAttention "
            "takes other layouts."
        )
