"""What a MAGI-2 checkpoint fixes: sizes, layer kinds and the mixture of experts.

The dataclasses mirror the released `config` JSON (its `arch_config` part) under names of our own;
`Magi2Config.from_dict` reads that JSON strictly and `to_dict` writes it again. Nothing here has a
default: a checkpoint fixes every value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from magi2.checks import is_finite_number, parse_json, whole_numbers

NUM_MODALITIES = 3
# Far beyond any model; what is larger would keep this program busy for hours before it fails.
_LARGEST = 1 << 20
_MOST_LAYERS = 1000
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """The multi-head mixture of experts, the same in every layer that has one.

    Args:
        layers: Indices of the layers whose MLP is the mixture.
        num_heads: Slices of the row that are routed independently.
        num_experts: Experts of one head.
        top_k: Experts chosen by each token in each head.
        score_func: "sigmoid" or "softmax", from router logit to score.
        route_norm: Whether the chosen scores are divided by their sum.
        route_scale: Factor on the routing weights, after normalisation.
        expert_intermediate_size: Width inside a routed expert.
        shared_intermediate_size: Width inside the expert that every token uses.
        modality_intermediate_size: Width inside the expert of a token's modality.
        split_merge_size: Width that the heads divide; None for the hidden size.
    """

    layers: tuple[int, ...]
    num_heads: int
    num_experts: int
    top_k: int
    score_func: str
    route_norm: bool
    route_scale: float
    expert_intermediate_size: int
    shared_intermediate_size: int
    modality_intermediate_size: int
    split_merge_size: int | None

    def __post_init__(self) -> None:
        for name in (
            "num_heads",
            "num_experts",
            "top_k",
            "expert_intermediate_size",
            "shared_intermediate_size",
            "modality_intermediate_size",
        ):
            _check_positive(f"moe.{name}", getattr(self, name))
        _check_number("moe.route_scale", self.route_scale)
        if not isinstance(self.route_norm, bool):
            raise ValueError(f"moe.route_norm={self.route_norm!r}: expected true or false.")
        if self.split_merge_size is not None:
            _check_positive("moe.split_merge_size", self.split_merge_size)
        if self.top_k > self.num_experts:
            raise ValueError(
                f"moe.top_k={self.top_k} exceeds moe.num_experts={self.num_experts}: expected at "
                "most one choice per expert. Lower top_k."
            )
        if self.score_func not in ("sigmoid", "softmax"):
            raise ValueError(
                f"moe.score_func={self.score_func!r}: expected 'sigmoid' or 'softmax'."
            )


@dataclass(frozen=True, kw_only=True)
class Magi2Config:
    """The diffusion transformer.

    Args:
        num_layers: Transformer layers.
        hidden_size: Channels of one residual stream.
        head_dim: Channels of an attention head; a multiple of 8 (rotary bands).
        num_kv_heads: Key and value heads; they divide the query heads.
        video_channels: Latent channels of a video token.
        audio_channels: Latent channels of an audio token.
        text_channels: Channels of a text feature.
        dtype: Of the residual streams, the linear layers and the experts.
        intermediate_factor: Sets the width of the dense MLP.
        multimodal_layers: Layers whose attention and dense MLP have one weight set per modality.
        attention_softcap: Cap of the scaled scores; zero or less for none.
        num_sinks: Learned sink logits per head.
        num_streams: Residual streams.
        alpha_init: Initial value of the hyper-connection gains.
        moe: The mixture of experts.
    """

    num_layers: int
    hidden_size: int
    head_dim: int
    num_kv_heads: int
    video_channels: int
    audio_channels: int
    text_channels: int
    dtype: torch.dtype
    intermediate_factor: float
    multimodal_layers: tuple[int, ...]
    attention_softcap: float
    num_sinks: int
    num_streams: int
    alpha_init: float
    moe: MoeConfig

    def __post_init__(self) -> None:
        _check_positive("num_layers", self.num_layers, _MOST_LAYERS)
        for name in (
            "hidden_size",
            "head_dim",
            "num_kv_heads",
            "video_channels",
            "audio_channels",
            "text_channels",
            "num_sinks",
            "num_streams",
        ):
            _check_positive(name, getattr(self, name))
        for name in ("intermediate_factor", "attention_softcap", "alpha_init"):
            _check_number(name, getattr(self, name))
        if self.dtype not in _DTYPES.values():
            raise ValueError(f"dtype={self.dtype}: expected torch.bfloat16 or torch.float32.")
        if self.head_dim % 8:
            raise ValueError(
                f"head_dim={self.head_dim} is no multiple of 8: three axes of head_dim/8 rotary "
                "bands, as sine and cosine, need it."
            )
        _check_divides("head_dim", self.head_dim, "hidden_size", self.hidden_size)
        _check_divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        _check_divides("moe.num_heads", self.moe.num_heads, "moe width", self.moe_hidden_size)
        if self.intermediate_size < 1:
            raise ValueError(
                f"hidden_size={self.hidden_size} and intermediate_factor="
                f"{self.intermediate_factor} give a dense MLP of width {self.intermediate_size}: "
                "expected "
                "hidden_size * intermediate_factor * 2 / 3 to be at least 128."
            )
        _check_layers("multimodal_layers", self.multimodal_layers, self.num_layers)
        _check_layers("moe.layers", self.moe.layers, self.num_layers)

    @property
    def num_heads(self) -> int:
        """Query heads of the attention."""
        return self.hidden_size // self.head_dim

    @property
    def stream_width(self) -> int:
        """Channels of all residual streams of a token together."""
        return self.num_streams * self.hidden_size

    @property
    def intermediate_size(self) -> int:
        """Width of the dense MLP: two thirds of the scaled hidden size, in steps of 128."""
        width = self.hidden_size * self.intermediate_factor * 2 / 3
        return int(width) // 128 * 128 if math.isfinite(width) else 0

    @property
    def moe_hidden_size(self) -> int:
        """Channels that the MoE heads divide among them."""
        return self.moe.split_merge_size or self.hidden_size

    @property
    def moe_head_dim(self) -> int:
        """Channels of one MoE head."""
        return self.moe_hidden_size // self.moe.num_heads

    @property
    def num_rotary_bands(self) -> int:
        """Frequencies of each of the three position axes."""
        return self.head_dim // 8

    @property
    def output_channels(self) -> int:
        """Columns of the model's output, wide enough for video and for audio."""
        return max(self.video_channels, self.audio_channels)

    @property
    def input_channels(self) -> int:
        """Columns of the packed input, wide enough for every modality."""
        return max(self.video_channels, self.audio_channels, self.text_channels)

    def num_modalities(self, layer: int) -> int:
        """Weight sets of a layer's attention, stream norm and dense MLP: 3 or 1."""
        return NUM_MODALITIES if layer in self.multimodal_layers else 1

    @classmethod
    def from_file(cls, path: str | Path) -> Magi2Config:
        """Read a released `config` JSON file.

        Raises:
            ValueError: If the file is no JSON object, or as `from_dict`.
        """
        try:
            document = parse_json(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise ValueError(f"{path} holds a {type(document).__name__}: expected a JSON object.")
        return cls.from_dict(document)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Magi2Config:
        """Read the released JSON: the whole document, or its `arch_config` part.

        Other top-level sections (engine, evaluation, data) say nothing about the weights and are
        left alone; inside `arch_config` every key must be known and none may be missing.

        Raises:
            ValueError: If a key is missing or unknown, or a value is one that the released model
                does not have.
        """
        sections = _Reader("config", document).values
        arch = _Reader("arch_config", sections.get("arch_config", document))
        moe = _Reader("moe_config", arch.take("moe_config"))
        mhc = _Reader("mhc_config", arch.take("mhc_config"))
        sinks = _Reader("attn_sinks", arch.take("attn_sinks"))
        gating = _Reader("attn_gating", arch.take("attn_gating"))
        for reader in (mhc, sinks, gating):
            reader.expect("enable", True)
        activations = arch.take("layer_activation_types", None) or {}
        kinds = _Reader("layer_activation_types", activations).values.values()
        if any(kind != "swiglu7" for kind in kinds):
            raise ValueError(
                f"layer_activation_types={activations!r}: only 'swiglu7' is part of the model."
            )
        arch.expect("activation_type", "swiglu7")
        dtype = arch.take("params_dtype")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError(f"params_dtype={dtype!r}: expected one of {sorted(_DTYPES)}.")
        derived = {name: arch.take(name, None) for name in ("num_heads_q", "num_heads_kv")}
        config = cls(
            num_layers=arch.take("num_layers"),
            hidden_size=arch.take("hidden_size"),
            head_dim=arch.take("head_dim"),
            num_kv_heads=arch.take("num_query_groups"),
            video_channels=arch.take("video_in_channels"),
            audio_channels=arch.take("audio_in_channels"),
            text_channels=arch.take("text_in_channels"),
            dtype=_DTYPES[dtype],
            intermediate_factor=arch.take("intermediate_factor"),
            multimodal_layers=whole_numbers("mm_layers", arch.take("mm_layers")),
            attention_softcap=arch.take("attn_softcap"),
            num_sinks=sinks.take("sink_token_num"),
            num_streams=mhc.take("num_stream"),
            alpha_init=mhc.take("alpha_init"),
            moe=MoeConfig(
                layers=whole_numbers("moe_layers", moe.take("moe_layers")),
                num_heads=moe.take("num_heads"),
                num_experts=moe.take("num_experts"),
                top_k=moe.take("top_k"),
                score_func=moe.take("score_func"),
                route_norm=moe.take("route_norm"),
                route_scale=moe.take("route_scale"),
                expert_intermediate_size=moe.take("expert_intermediate_size"),
                shared_intermediate_size=moe.take("shared_expert_intermediate_size"),
                modality_intermediate_size=moe.take("modality_specific_expert_intermediate_size"),
                split_merge_size=moe.take("split_merge_intermediate_size", None),
            ),
        )
        for reader in (arch, moe, mhc, sinks, gating):
            reader.finish()
        actual = {"num_heads_q": config.num_heads, "num_heads_kv": config.num_kv_heads}
        for name, value in derived.items():
            if value is not None and value != actual[name]:
                raise ValueError(
                    f"{name}={value} contradicts the sizes, which give {actual[name]} heads."
                )
        return config

    def to_dict(self) -> dict[str, Any]:
        """The released JSON document, `{"arch_config": {...}}`; `from_dict` is the inverse."""
        moe = self.moe
        return {
            "arch_config": {
                "num_layers": self.num_layers,
                "hidden_size": self.hidden_size,
                "head_dim": self.head_dim,
                "num_query_groups": self.num_kv_heads,
                "video_in_channels": self.video_channels,
                "audio_in_channels": self.audio_channels,
                "text_in_channels": self.text_channels,
                "params_dtype": str(self.dtype).removeprefix("torch."),
                "intermediate_factor": self.intermediate_factor,
                "mm_layers": list(self.multimodal_layers),
                "activation_type": "swiglu7",
                "layer_activation_types": {},
                "attn_softcap": self.attention_softcap,
                "attn_gating": {"enable": True},
                "attn_sinks": {"enable": True, "sink_token_num": self.num_sinks},
                "mhc_config": {
                    "enable": True,
                    "num_stream": self.num_streams,
                    "alpha_init": self.alpha_init,
                },
                "moe_config": {
                    "num_experts": moe.num_experts,
                    "top_k": moe.top_k,
                    "score_func": moe.score_func,
                    "route_norm": moe.route_norm,
                    "route_scale": moe.route_scale,
                    "moe_layers": list(moe.layers),
                    "expert_intermediate_size": moe.expert_intermediate_size,
                    "shared_expert_intermediate_size": moe.shared_intermediate_size,
                    "modality_specific_expert_intermediate_size": moe.modality_intermediate_size,
                    "num_heads": moe.num_heads,
                    "split_merge_intermediate_size": moe.split_merge_size,
                },
            }
        }


class _Reader:
    """Takes the keys of one JSON object and knows which nobody asked for."""

    _REQUIRED = object()

    def __init__(self, section: str, values: object) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{section} is {values!r}: expected a JSON object.")
        self.section = section
        self.values = dict(values)

    def take(self, key: str, default: object = _REQUIRED) -> Any:
        if key in self.values:
            return self.values.pop(key)
        if default is self._REQUIRED:
            raise ValueError(f"{self.section} lacks {key!r}: the model cannot be built without it.")
        return default

    def expect(self, key: str, value: object) -> None:
        given = self.take(key)
        if given != value:
            raise ValueError(f"{self.section}.{key}={given!r}: only {value!r} is supported.")

    def finish(self) -> None:
        if self.values:
            raise ValueError(
                f"{self.section} has unknown keys {sorted(self.values)}: expected the released "
                "keys only. Remove them, or teach the model what they mean."
            )


def _check_positive(name: str, value: object, largest: int = _LARGEST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a positive integer.")
    if value > largest:
        raise ValueError(f"{name}={value}: expected at most {largest}. The file is damaged.")


def _check_number(name: str, value: object) -> None:
    if not is_finite_number(value):
        raise ValueError(f"{name}={value!r}: expected a finite number.")


def _check_divides(name: str, divisor: int, of_name: str, value: int) -> None:
    if value % divisor:
        raise ValueError(f"{name}={divisor} does not divide {of_name}={value}: expected it to.")


def _check_layers(name: str, layers: Iterable[int], num_layers: int) -> None:
    given = whole_numbers(name, layers)
    if len(set(given)) != len(given) or any(not 0 <= layer < num_layers for layer in given):
        raise ValueError(
            f"{name}={list(given)}: expected distinct layer indices from 0 to {num_layers - 1}."
        )
