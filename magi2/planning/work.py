"""How much the busiest rank computes, reads and writes in one call of the model, by region.

Only matrix products count as operations, two for each multiply and add. Bytes are those of kernels
that read what they need and write what they make once: weights, the residual streams, and the rows
between matrix products. Eager torch moves more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magi2.config import NUM_MODALITIES, Magi2Config
from magi2.planning.devices import DeviceProfile
from magi2.planning.layout import RankLayout

_FLOAT32 = torch.float32.itemsize


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of one region, all its occurrences together.

    Attributes:
        bf16: Operations in the activation dtype, if that is bfloat16.
        fp32: Operations in float32.
        nbytes: Read and written.
    """

    bf16: float = 0.0
    fp32: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            bf16=self.bf16 + other.bf16,
            fp32=self.fp32 + other.fp32,
            nbytes=self.nbytes + other.nbytes,
        )

    @property
    def flops(self) -> float:
        """Operations of both kinds."""
        return self.bf16 + self.fp32

    def seconds(self, device: DeviceProfile) -> float:
        """How long a device takes."""
        return device.seconds(bf16=self.bf16, fp32=self.fp32, nbytes=self.nbytes)


def plan_work(config: Magi2Config, layout: RankLayout, text_tokens: int) -> dict[str, Work]:
    """The work of each region and of what runs between exchanges, named as in a run's timing.

    Args:
        config: The model's.
        layout: Of the ranks.
        text_tokens: Of this rank's, which the adapters treat apart.
    """
    regions = dict.fromkeys(
        ("adapter-in", "attention-in", "attention", "dense-out", "moe-in", "experts", "moe-out"),
        Work(),
    )
    regions["adapter-in"] = _adapter_in(config, layout.tokens_local, text_tokens)
    for layer in range(config.num_layers):
        parts = _attention_parts(config, layout, config.num_modalities(layer))
        if layer in config.moe.layers:
            parts |= _mixture_parts(config, layout, config.num_modalities(layer))
        else:
            parts["dense-out"] = _output(config, layout, config.num_modalities(layer)) + _dense(
                config, layout.tokens_local, config.num_modalities(layer)
            )
        for name, work in parts.items():
            regions[name] = regions[name] + work
    regions["adapter-out"] = _adapter_out(config, layout.tokens_local - text_tokens)
    return {name: work for name, work in regions.items() if work != Work()}


def _attention_parts(config: Magi2Config, layout: RankLayout, sets: int) -> dict[str, Work]:
    tokens, hidden, width = layout.tokens_local, config.hidden_size, config.dtype.itemsize
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    project = _linear(config, tokens, hidden, qkv + config.num_heads, sets)
    # Norm, rotary and the send order read and write q, k and v once more.
    again = Work(nbytes=2 * tokens * qkv * width)
    heads = config.num_heads // layout.ulysses
    area = sum(length**2 for length in layout.sequences)
    moved = sum(layout.sequences) * (qkv + config.num_heads * config.head_dim) // layout.ulysses
    attend = _operations(config, 4 * area * heads * config.head_dim, moved * width)
    return {"attention-in": _maps(config, tokens) + project + again, "attention": attend}


def _mixture_parts(config: Magi2Config, layout: RankLayout, sets: int) -> dict[str, Work]:
    moe, tokens, hidden = config.moe, layout.tokens_local, config.hidden_size
    width, mixture = config.dtype.itemsize, config.moe_hidden_size
    entry = _output(config, layout, sets) + _maps(config, tokens)
    entry += _linear(config, tokens, hidden, mixture, 1)
    for inner, own in (
        (moe.shared_intermediate_size, 1),
        (moe.modality_intermediate_size, NUM_MODALITIES),
    ):
        entry += _linear(config, tokens, hidden, 2 * inner, own)
        entry += _linear(config, tokens, inner, hidden, own)
    heads, dim, inner = (
        layout.heads_local(moe.num_heads),
        config.moe_head_dim,
        moe.expert_intermediate_size,
    )
    rows = layout.expert_tokens * heads
    routes = rows * moe.top_k
    weights = heads * moe.num_experts * 3 * dim * inner
    experts = _operations(
        config,
        routes * 6 * dim * inner,
        (weights + routes * (2 * inner + 3 * dim) + rows * dim) * width,
    )
    router = Work(
        fp32=2 * rows * dim * moe.num_experts,
        nbytes=(rows * (dim + 2 * moe.num_experts) + heads * moe.num_experts * dim) * _FLOAT32,
    )
    leave = _linear(config, tokens, mixture, hidden, 1) + _streams(config, tokens, 2)
    return {"moe-in": entry, "experts": experts + router, "moe-out": leave}


def _output(config: Magi2Config, layout: RankLayout, sets: int) -> Work:
    """Gates, the output projection, and the new streams."""
    tokens, inputs = layout.tokens_local, config.num_heads * config.head_dim
    gated = Work(nbytes=2 * tokens * inputs * config.dtype.itemsize)
    return (
        gated
        + _linear(config, tokens, inputs, config.hidden_size, sets)
        + _streams(config, tokens, 2)
    )


def _dense(config: Magi2Config, tokens: int, sets: int) -> Work:
    hidden, inner = config.hidden_size, config.intermediate_size
    return (
        _maps(config, tokens)
        + _linear(config, tokens, hidden, 2 * inner, sets)
        + _linear(config, tokens, inner, hidden, sets)
        + _streams(config, tokens, 2)
    )


def _maps(config: Magi2Config, tokens: int) -> Work:
    """The stream maps and the branch's input: the streams are read twice."""
    streams, width = config.num_streams, config.stream_width
    columns = 2 * streams + streams**2
    product = Work(fp32=2 * tokens * width * columns, nbytes=width * columns * _FLOAT32)
    return product + _streams(config, tokens, 2)


def _streams(config: Magi2Config, tokens: int, times: int) -> Work:
    return Work(nbytes=times * tokens * config.stream_width * config.dtype.itemsize)


def _linear(config: Magi2Config, tokens: int, inputs: int, outputs: int, sets: int) -> Work:
    """A matrix product, with as many weight sets as rows of every modality need."""
    nbytes = (tokens * (inputs + outputs) + sets * inputs * outputs) * config.dtype.itemsize
    return _operations(config, 2 * tokens * inputs * outputs, nbytes)


def _operations(config: Magi2Config, flops: float, nbytes: float) -> Work:
    if config.dtype == torch.bfloat16:
        return Work(bf16=flops, nbytes=nbytes)
    return Work(fp32=flops, nbytes=nbytes)


def _adapter_in(config: Magi2Config, tokens: int, text_tokens: int) -> Work:
    width, latents = config.stream_width, max(config.video_channels, config.audio_channels)
    channels = text_tokens * config.text_channels + (tokens - text_tokens) * latents
    weights = (config.text_channels + config.video_channels + config.audio_channels) * width
    moved = channels + weights + 2 * tokens * width
    return Work(fp32=2 * channels * width, nbytes=moved * _FLOAT32)


def _adapter_out(config: Magi2Config, tokens: int) -> Work:
    width, columns = config.stream_width, config.output_channels
    weights = (config.video_channels + config.audio_channels) * width
    return Work(fp32=2 * tokens * width * columns, nbytes=(weights + 2 * tokens * width) * _FLOAT32)
