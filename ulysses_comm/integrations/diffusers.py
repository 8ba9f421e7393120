"""Sequence parallelism for diffusers transformers.

    parallelize(pipeline.transformer, group)

The model is then called as before, with whole inputs and a whole output on every rank; in between,
every rank works on its own tokens. Each attention processor keeps its code: it runs with an
attention call of ours in place of diffusers' own, which still does the attending. Prompt tokens
that attend together with the image (Flux, Stable Diffusion 3) stay whole on every rank.
"""

from __future__ import annotations

import copy
import fnmatch
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch

from ulysses_comm.agreement import Validate
from ulysses_comm.attention import UlyssesAttention
from ulysses_comm.group import Group, rank_and_world_size, resolve_group
from ulysses_comm.sequence import LossRule, SequenceDispatcher
from ulysses_comm.token_layouts import TokenLayout
from ulysses_comm.workspace import Workspace

_DISPATCH, _SDPA = "dispatch_attention_fn", "scaled_dot_product_attention"


@dataclass(frozen=True)
class TokenAxis:
    """Where a tensor has its tokens.

    Attributes:
        dim: The dimension of tokens.
        ndim: Only tensors of so many dimensions have it; None: all.
    """

    dim: int
    ndim: int | None = None


@dataclass(frozen=True, kw_only=True)
class TokenPlan:
    """Where a model's tokens come from and go to. Modules are named as in `named_modules()`.

    Attributes:
        inputs: For modules, which inputs are cut to the rank's tokens, by name.
        outputs: For modules, which outputs are cut, by index; 0 for the only one.
        gathered: Modules whose output is made whole.
        attention: Names, with wildcards, of the attention layers over sharded tokens. Others, such
            as those that attend to a prompt that every rank holds, stay as they are.
        joint: Where prompt tokens stand in joint attention; None if there are none.
        joint_input: The model's input with the prompt, tokens on dimension 1.
    """

    inputs: Mapping[str, Mapping[str, TokenAxis]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[int, TokenAxis]] = field(default_factory=dict)
    gathered: Mapping[str, TokenAxis] = field(default_factory=dict)
    attention: str = "*"
    joint: Literal["front", "rear"] | None = None
    joint_input: str = "encoder_hidden_states"


_WAN = TokenPlan(
    # One time step for each token, where there are two dimensions.
    inputs={"": {"timestep": TokenAxis(1, ndim=2)}, "blocks.0": {"hidden_states": TokenAxis(1)}},
    outputs={"rope": {0: TokenAxis(1), 1: TokenAxis(1)}},
    gathered={"proj_out": TokenAxis(1)},
    attention="*.attn1",
)

_FLUX = TokenPlan(
    inputs={"": {"hidden_states": TokenAxis(1), "img_ids": TokenAxis(-2)}},
    gathered={"proj_out": TokenAxis(1)},
    joint="front",
)

PLANS: Mapping[str, TokenPlan] = MappingProxyType(
    {
        "FluxTransformer2DModel": _FLUX,
        "Flux2Transformer2DModel": _FLUX,
        "SD3Transformer2DModel": TokenPlan(
            outputs={"pos_embed": {0: TokenAxis(1)}},
            gathered={"proj_out": TokenAxis(1)},
            joint="rear",
        ),
        "WanTransformer3DModel": _WAN,
    }
)
"""Plans by the name of a model's class."""


def parallelize(
    model: torch.nn.Module,
    group: Group,
    *,
    plan: TokenPlan | None = None,
    split_sizes: Sequence[int] | None = None,
    loss: LossRule | None = None,
    chunks: int = 1,
    workspace: Workspace | None = None,
    validate: Validate = False,
) -> ShardedTransformer:
    """Let a diffusers transformer share its tokens with the ranks of a group.

    Args:
        model: A transformer of diffusers. Every rank has its own object, with the same weights, and
            calls it with the same whole inputs.
        group: As in `scatter_heads_gather_seqlen`.
        plan: Where the tokens are; None for the one in `PLANS`.
        split_sizes: Tokens each rank owns, in rank order; None for `balanced_split_sizes`.
        loss: What every rank makes of the whole output, as in `gather_sequence`; needed for
            training.
        chunks: As in `UlyssesAttention`.
        workspace: As in `UlyssesAttention`.
        validate: As in `UlyssesAttention`.

    Returns:
        A handle; `close()` gives the model its own forward back.

    Raises:
        ValueError: If there is no plan for the model, or one of its attention processors calls
            neither diffusers' nor torch's attention.
    """
    if plan is None:
        plan = _plan_of(model)
    attention = _Attention(group, plan, loss, chunks, workspace, validate)
    attention.split_sizes = None if split_sizes is None else list(split_sizes)
    sharded = ShardedTransformer(model, plan, attention)
    sharded.open()
    return sharded


class ShardedTransformer:
    """A transformer whose tokens are shared out. Made by `parallelize`.

    Attributes:
        model: The transformer.
    """

    def __init__(self, model: torch.nn.Module, plan: TokenPlan, attention: _Attention) -> None:
        self.model = model
        self._plan = plan
        self._attention = attention
        self._hooks: list[Any] = []
        self._processors: list[tuple[Any, Any]] = []

    def open(self) -> None:
        """Put hooks on the model, and processors of ours into its attention layers."""
        if self._hooks:
            return
        layers = [
            (name, module)
            for name, module in self.model.named_modules()
            if getattr(module, "processor", None) is not None
            and fnmatch.fnmatchcase(name, self._plan.attention)
        ]
        if not layers:
            raise ValueError(
                f"{type(self.model).__name__} has no attention layer with a processor named like "
                f"{self._plan.attention!r}: expected the plan's `attention` to name some."
            )
        exchanging = [self._attention.put_into(module.processor) for _, module in layers]
        for (_, module), processor in zip(layers, exchanging, strict=True):
            self._processors.append((module, module.processor))
            module.processor = processor
        self._add_hooks()

    def close(self) -> None:
        """Give the model its own forward back."""
        for hook in self._hooks:
            hook.remove()
        for module, processor in self._processors:
            module.processor = processor
        self._hooks, self._processors = [], []

    def __enter__(self) -> ShardedTransformer:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_hooks(self) -> None:
        cut, whole = self._attention.cut, self._attention.whole

        def begin(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            self._attention.begin(_bind(module, args, kwargs).arguments)

        def cut_inputs(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            bound = _bind(module, args, kwargs)
            for name, axis in axes_of[id(module)].items():
                bound.arguments[name] = cut(bound.arguments.get(name), axis)
            return bound.args, bound.kwargs

        def cut_outputs(module: torch.nn.Module, args: Any, output: Any) -> Any:
            axes = axes_of[id(module)]
            if isinstance(output, torch.Tensor):
                return cut(output, axes[0])
            parts = [cut(part, axes[i]) if i in axes else part for i, part in enumerate(output)]
            return type(output)(parts)

        def make_whole(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return whole(output, axes_of[id(module)])

        axes_of: dict[int, Any] = {}
        hooks = self._hooks
        hooks.append(self.model.register_forward_pre_hook(begin, with_kwargs=True))
        for name, axes in self._plan.inputs.items():
            module = self.model.get_submodule(name)
            axes_of[id(module)] = axes
            hooks.append(module.register_forward_pre_hook(cut_inputs, with_kwargs=True))
        for name, by_index in self._plan.outputs.items():
            module = self.model.get_submodule(name)
            axes_of[id(module)] = by_index
            hooks.append(module.register_forward_hook(cut_outputs))
        for name, axis in self._plan.gathered.items():
            module = self.model.get_submodule(name)
            axes_of[id(module)] = axis
            hooks.append(module.register_forward_hook(make_whole))


class _Attention:
    """The attention that processors call, and the request that it is about."""

    def __init__(
        self,
        group: Group,
        plan: TokenPlan,
        loss: LossRule | None,
        chunks: int,
        workspace: Workspace | None,
        validate: Validate,
    ) -> None:
        self.split_sizes: list[int] | None = None
        self._group = group
        self._plan = plan
        self._loss = loss
        self._dispatcher = SequenceDispatcher(group)
        self._joint_tokens = 0

        def local(*tensors: torch.Tensor, run: Callable[..., Any], **kwargs: Any) -> Any:
            return run(*tensors, **kwargs)

        self._by_layout = {
            layout: UlyssesAttention(
                local,
                group=group,
                layout=layout,
                chunks=chunks,
                workspace=workspace,
                validate=validate,
            )
            for layout in _LAYOUT_OF.values()
        }

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Forget the request before, and see how long this one's prompt is."""
        self._dispatcher.release()
        if self.split_sizes is not None:
            self._dispatcher.begin(self.split_sizes)
        prompt = arguments.get(self._plan.joint_input) if self._plan.joint else None
        self._joint_tokens = 0 if prompt is None else prompt.shape[1]

    def cut(self, tensor: Any, axis: TokenAxis) -> Any:
        """Return this rank's tokens of a tensor that has some."""
        if not isinstance(tensor, torch.Tensor) or axis.ndim not in (None, tensor.dim()):
            return tensor
        own = self._dispatcher.dispatch(tensor, dim=axis.dim)
        if 0 in self._dispatcher.split_sizes:
            raise ValueError(
                f"split_sizes={self._dispatcher.split_sizes}: expected one token or more on every "
                "rank; models of diffusers take no empty sequences. Use a smaller group."
            )
        return own

    def whole(self, tensor: torch.Tensor, axis: TokenAxis) -> torch.Tensor:
        """Return the whole of an output."""
        return self._dispatcher.combine(tensor, dim=axis.dim, loss=self._loss)

    def put_into(self, processor: Any) -> Any:
        """Return a processor of the same code that calls this attention."""
        function = type(processor).__call__
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        called = {_DISPATCH, _SDPA} & set(function.__code__.co_names)
        if not called:
            raise ValueError(
                f"{type(processor).__name__} calls neither {_DISPATCH} nor {_SDPA}: expected a "
                "processor that does, so that the exchanges can go around it. Set another one with "
                "set_attn_processor, or leave its layer out of the plan's `attention`."
            )
        own = dict(function.__globals__)
        if _DISPATCH in called:
            own[_DISPATCH] = self._around(own[_DISPATCH], "bshd", drop=("parallel_config",))
        if _SDPA in called:
            torch_attention = self._around(torch.nn.functional.scaled_dot_product_attention, "bhsd")
            own["F"] = _Functional(torch_attention)
        call = types.FunctionType(
            function.__code__, own, function.__name__, function.__defaults__, function.__closure__
        )
        call.__kwdefaults__ = function.__kwdefaults__
        exchanging = copy.copy(processor)
        cls = type(processor)
        exchanging.__class__ = type(
            cls.__name__, (cls,), {"__call__": call, "__doc__": cls.__doc__}
        )
        return exchanging

    def _around(
        self, run: Callable[..., Any], layout: TokenLayout, drop: Sequence[str] = ()
    ) -> Callable[..., torch.Tensor]:
        """Return a function to be called in place of `run`."""

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            if args:
                kwargs = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
            kwargs = {name: given for name, given in kwargs.items() if name not in drop}
            return self._exchange((query, key, value), layout, {**kwargs, "run": run})

        return attend

    def _exchange(
        self, tensors: tuple[torch.Tensor, ...], layout: TokenLayout, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        axis = layout.index("s")
        sizes = self._dispatcher.split_sizes
        rank, _ = rank_and_world_size(resolve_group(self._group))
        own, joint = sizes[rank], self._joint_tokens
        lengths = [tensor.shape[axis] for tensor in tensors]
        layer = self._by_layout[layout]
        self._check_mask(kwargs.get("attn_mask"), lengths[1], sum(sizes) + lengths[1] - own)
        if lengths == [own] * 3:
            result = layer(*tensors, split_sizes=sizes, **kwargs)
            assert isinstance(result, torch.Tensor), "no log-sum-exp is asked for"
            return result
        if lengths != [own + joint] * 3 or not joint or self._plan.joint is None:
            raise ValueError(
                f"An attention layer attends from {lengths[0]} tokens to {lengths[1]}: expected "
                f"{own} of this rank, with {joint} of the prompt or without, in both. Leave layers "
                "that attend to something else out of the plan's `attention`."
            )
        is_front = self._plan.joint == "front"
        parts = [t.split([joint, own] if is_front else [own, joint], dim=axis) for t in tensors]
        prompt, image = ([part[i] for part in parts] for i in ((0, 1) if is_front else (1, 0)))
        image_out, prompt_out = layer.joint(
            *image, *prompt, place=self._plan.joint, split_sizes=sizes, **kwargs
        )
        pair = [prompt_out, image_out] if is_front else [image_out, prompt_out]
        return torch.cat(pair, dim=axis)  # type: ignore[arg-type]  # no log-sum-exp

    def _check_mask(self, mask: torch.Tensor | None, length: int, whole: int) -> None:
        if mask is not None and mask.shape[-1] == length != whole:
            raise ValueError(
                f"attn_mask of shape {tuple(mask.shape)} is for the {length} tokens of this rank: "
                f"expected one for all {whole}, or none. Leave out the model's input that the mask "
                "is made of (such as encoder_hidden_states_mask), and pass no padding."
            )


# What `dispatch_attention_fn` and torch's attention take by position, after the tensors.
_POSITIONAL = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_LAYOUT_OF: dict[str, TokenLayout] = {_DISPATCH: "bshd", _SDPA: "bhsd"}


class _Functional:
    """torch.nn.functional with another attention."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        self.scaled_dot_product_attention = attention

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)


def _plan_of(model: torch.nn.Module) -> TokenPlan:
    for cls in type(model).__mro__:
        if cls.__name__ in PLANS:
            return PLANS[cls.__name__]
    raise ValueError(
        f"No plan for {type(model).__name__}: expected one of {', '.join(PLANS)}. Pass "
        "plan=TokenPlan(...) that says where this model's tokens come from and go to."
    )


def _bind(module: torch.nn.Module, args: Any, kwargs: Any) -> inspect.BoundArguments:
    return inspect.signature(module.forward).bind(*args, **kwargs)
