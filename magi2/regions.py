"""The transformer cut at its exchanges: regions that work on this rank's tokens alone.

    adapter-in     packed latents and text features to streams
    attention-in   stream maps, branch input, norm, projections, rotary, send layout
        exchange, attention of whole sequences, exchange
    dense-out      gate, output projection, new streams, the dense MLP, new streams
    moe-in         gate, output projection, new streams; then the mixture's norm and projections
        exchange, routed experts, exchange
    moe-out        merge, new streams
    adapter-out    streams to velocities

A model that runs region by region does the operations of its own forward in their order, so it has
its bits. What it gains is one place where a region can be compiled, and where time can be taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from magi2.modules.adapters import PostAdapter, PreAdapter
from magi2.modules.block import TransformerLayer
from magi2.modules.experts import RoutedExperts
from magi2.modules.modality import ModalityOrder
from magi2.modules.moe import MultiHeadMoe
from magi2.modules.request import RequestPlan
from magi2.transformer import Magi2Transformer
from ulysses_comm import HeadScatterTarget

REGIONS = ("adapter-in", "attention-in", "dense-out", "moe-in", "moe-out", "adapter-out")

# How a region runs: its name, function, module, the order of its tokens, and its arguments.
CallRegion = Callable[..., Any]
# What to enter around a region, or around what lies between exchanges, of this name.
Watch = Callable[[str], AbstractContextManager[None]]


def call_directly(
    name: str, function: Callable[..., Any], module: nn.Module, order: ModalityOrder, *args: Any
) -> Any:
    """Run a region as it is."""
    return function(module, *args)


def unwatched(name: str) -> AbstractContextManager[None]:
    """Nothing around a region."""
    return nullcontext()


class Regions:
    """Runs one model region by region, until it is removed again.

    Args:
        model: Its adapters and its block are told to run through this object.
        call: How a region runs.
    """

    def __init__(self, model: Magi2Transformer, call: CallRegion = call_directly) -> None:
        self.model = model
        self.call = call
        self.watch: Watch = unwatched
        # On the instances: the classes, state dicts and other models know nothing of it.
        for module, forward in (
            (model.pre_adapter, self._embed),
            (model.block, self._run_block),
            (model.post_adapter, self._velocities),
        ):
            vars(module)["forward"] = forward
        for experts in self._experts():
            vars(experts)["forward"] = functools.partial(self._run_experts, experts)

    @classmethod
    def of(cls, model: Magi2Transformer) -> Regions | None:
        """What runs this model region by region; None if nothing does."""
        owner = getattr(model.block.forward, "__self__", None)
        return owner if isinstance(owner, cls) else None

    def remove(self) -> None:
        """Let the model run by its own forward again."""
        for module in (self.model.pre_adapter, self.model.block, self.model.post_adapter):
            vars(module).pop("forward", None)
        for experts in self._experts():
            vars(experts).pop("forward", None)

    def _experts(self) -> list[RoutedExperts]:
        mlps = (layer.mlp for layer in self.model.block.layers)
        return [mlp.moe_mlp for mlp in mlps if isinstance(mlp, MultiHeadMoe)]

    def _run_experts(self, experts: RoutedExperts, x_THD: torch.Tensor) -> torch.Tensor:
        with self.watch("experts"):
            return RoutedExperts.forward(experts, x_THD)

    def _run(
        self, name: str, function: Callable[..., Any], module: nn.Module, plan: RequestPlan, *a: Any
    ) -> Any:
        with self.watch(name):
            return self.call(name, function, module, plan.order, *a, plan)

    def _embed(self, x: torch.Tensor, order: ModalityOrder) -> Any:
        with self.watch("adapter-in"):
            return self.call("adapter-in", embed, self.model.pre_adapter, order, x, order)

    def _velocities(self, x: torch.Tensor, order: ModalityOrder) -> Any:
        with self.watch("adapter-out"):
            return self.call("adapter-out", velocities, self.model.post_adapter, order, x, order)

    def _run_block(self, x: torch.Tensor, plan: RequestPlan) -> torch.Tensor:
        block = self.model.block
        x_TSC = plan.order.group(x).unflatten(1, (block.num_streams, -1))
        for layer in block.layers:
            assert isinstance(layer, TransformerLayer)
            x_TSC = self._run_layer(layer, x_TSC, plan)
        return plan.order.ungroup(x_TSC.flatten(1))

    def _run_layer(
        self, layer: TransformerLayer, x_TSC: torch.Tensor, plan: RequestPlan
    ) -> torch.Tensor:
        mlp = layer.mlp
        if not isinstance(mlp, MultiHeadMoe):
            received = self._attend(layer, x_TSC, plan)
            streams: torch.Tensor = self._run("dense-out", dense_out, layer, plan, x_TSC, *received)
            return streams
        # No name for what was received: it would live through the experts.
        x_TSC, split, common, post, res = self._run(
            "moe-in", moe_in, layer, plan, x_TSC, *self._attend(layer, x_TSC, plan)
        )
        routed = mlp.route(split, plan)
        del split
        streams = self._run("moe-out", moe_out, layer, plan, x_TSC, routed, common, post, res)
        return streams

    def _attend(
        self, layer: TransformerLayer, x_TSC: torch.Tensor, plan: RequestPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The attention as received, gate logits, `post` and `res` maps."""
        attention = layer.attention
        qkv, gate, post, res = self._run("attention-in", attention_in, layer, plan, x_TSC)
        q, k, v = plan.sequence.scatter_heads(qkv)
        with self.watch("attention"):
            out = attention.attend(q, k, v, plan)
        if attention.output_head_shards:
            return plan.sequence.gather_head_shards(out), gate, post, res
        return plan.sequence.gather_heads(out), gate, post, res


def embed(adapter: PreAdapter, x: torch.Tensor, order: ModalityOrder) -> torch.Tensor:
    """(tokens, channels) to (tokens, stream_width), float32, both in packed order."""
    embedders = (adapter.video_embedder, adapter.audio_embedder, adapter.text_embedder)
    _pin(x, max(embedder.in_features for embedder in embedders))
    return PreAdapter.forward(adapter, x, order)


def velocities(adapter: PostAdapter, x: torch.Tensor, order: ModalityOrder) -> torch.Tensor:
    """(tokens, stream_width) to (tokens, output_channels) float32, both in packed order."""
    _pin(x, adapter.final_norm_video.weight.shape[0])
    return PostAdapter.forward(adapter, x, order)


def attention_in(
    layer: TransformerLayer, x_TSC: torch.Tensor, plan: RequestPlan
) -> tuple[list[torch.Tensor] | HeadScatterTarget, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Streams to what the attention sends: q, k and v; and gate logits, `post` and `res` maps."""
    attention = layer.attention
    _pin_streams(layer, x_TSC)
    _pin(plan.rotary, 6 * (attention.head_dim // 8))
    maps = layer.maps("attn", x_TSC, plan.order.group_sizes)
    qkv, gate = attention.project(layer.mix(x_TSC, maps.pre), plan)
    return qkv, gate, maps.post, maps.res


def dense_out(
    layer: TransformerLayer,
    x_TSC: torch.Tensor,
    out: torch.Tensor,
    gate_TH: torch.Tensor,
    post_TS: torch.Tensor,
    res_TSS: torch.Tensor,
    plan: RequestPlan,
) -> torch.Tensor:
    """What the attention received to the next layer's streams."""
    x_TSC = _attention_out(layer, x_TSC, out, gate_TH, post_TS, res_TSS, plan)
    return layer.connect("mlp", x_TSC, lambda u: layer.mlp(u, plan), plan.order.group_sizes)


def moe_in(
    layer: TransformerLayer,
    x_TSC: torch.Tensor,
    out: torch.Tensor,
    gate_TH: torch.Tensor,
    post_TS: torch.Tensor,
    res_TSS: torch.Tensor,
    plan: RequestPlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the attention received to what the experts are sent.

    Returns:
        The streams, (tokens, moe_hidden) for the experts, what the others add, `post` and `res`.
    """
    mlp = layer.mlp
    assert isinstance(mlp, MultiHeadMoe)
    x_TSC = _attention_out(layer, x_TSC, out, gate_TH, post_TS, res_TSS, plan)
    maps = layer.maps("mlp", x_TSC, plan.order.group_sizes)
    split, common = mlp.project(layer.mix(x_TSC, maps.pre), plan)
    return x_TSC, split, common, maps.post, maps.res


def moe_out(
    layer: TransformerLayer,
    x_TSC: torch.Tensor,
    routed: torch.Tensor,
    common_TC: torch.Tensor,
    post_TS: torch.Tensor,
    res_TSS: torch.Tensor,
    plan: RequestPlan,
) -> torch.Tensor:
    """What the experts returned to the next layer's streams."""
    mlp = layer.mlp
    assert isinstance(mlp, MultiHeadMoe)
    _pin_streams(layer, x_TSC, post_TS, res_TSS)
    _pin(routed, mlp.split_linear.weight.shape[0])
    _pin(common_TC, _hidden_size(layer))
    y_TC = mlp.output(routed, common_TC, plan)
    return layer.hyper_connect(x_TSC, y_TC, post_TS, res_TSS)


def _attention_out(
    layer: TransformerLayer,
    x_TSC: torch.Tensor,
    out: torch.Tensor,
    gate_TH: torch.Tensor,
    post_TS: torch.Tensor,
    res_TSS: torch.Tensor,
    plan: RequestPlan,
) -> torch.Tensor:
    _pin_streams(layer, x_TSC, post_TS, res_TSS)
    _pin(gate_TH, layer.attention.num_heads)
    y_TC = layer.attention.output(out, gate_TH, plan)
    return layer.hyper_connect(x_TSC, y_TC, post_TS, res_TSS)


def _hidden_size(layer: TransformerLayer) -> int:
    return layer.attention.linear_g.weight.shape[1]


def _pin_streams(layer: TransformerLayer, x_TSC: torch.Tensor, *maps: torch.Tensor) -> None:
    streams = layer.num_streams
    _pin(x_TSC, streams, _hidden_size(layer))
    for weights in maps:
        _pin(weights, *[streams] * (weights.dim() - 1))


def _pin(tensor: torch.Tensor, *sizes: int) -> None:
    """Tell a compile with dynamic shapes all sizes of a tensor but its first, the tokens.

    As symbols they would keep loops over streams from being unrolled, and put 64-bit divisions into
    every address. Eagerly nothing.
    """
    if torch.compiler.is_compiling():
        for dim, size in enumerate(sizes, start=1):
            torch._check(tensor.shape[dim] == size)
