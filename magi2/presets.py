"""Configurations with a name: the released model, and two that fit in a test."""

from __future__ import annotations

import torch

from magi2.config import Magi2Config, MoeConfig


def preview() -> Magi2Config:
    """The released MAGI-2 Preview: 114B parameters, about 6B of them active for a token."""
    return Magi2Config(
        num_layers=40,
        hidden_size=3072,
        head_dim=128,
        num_kv_heads=24,
        video_channels=48,
        audio_channels=64,
        text_channels=5120,
        dtype=torch.bfloat16,
        intermediate_factor=4,
        multimodal_layers=(0, 1, 38, 39),
        attention_softcap=-1.0,
        num_sinks=1,
        num_streams=4,
        alpha_init=0.01,
        moe=MoeConfig(
            layers=tuple(range(2, 38)),
            num_heads=12,
            num_experts=256,
            top_k=6,
            score_func="sigmoid",
            route_norm=True,
            route_scale=4.9,
            expert_intermediate_size=1280,
            shared_intermediate_size=1280,
            modality_intermediate_size=1280,
            split_merge_size=None,
        ),
    )


def tiny(dtype: torch.dtype = torch.bfloat16) -> Magi2Config:
    """Four layers of every kind, 8 attention heads, sizes that the expert kernels can tile."""
    return Magi2Config(
        num_layers=4,
        hidden_size=256,
        head_dim=32,
        num_kv_heads=8,
        video_channels=8,
        audio_channels=6,
        text_channels=24,
        dtype=dtype,
        intermediate_factor=4,
        multimodal_layers=(0, 3),
        attention_softcap=-1.0,
        num_sinks=1,
        num_streams=4,
        alpha_init=0.01,
        moe=MoeConfig(
            layers=(1, 2),
            num_heads=4,
            num_experts=8,
            top_k=2,
            score_func="sigmoid",
            route_norm=True,
            route_scale=4.9,
            expert_intermediate_size=64,
            shared_intermediate_size=64,
            modality_intermediate_size=32,
            split_merge_size=None,
        ),
    )


def tiny_uneven(dtype: torch.dtype = torch.bfloat16) -> Magi2Config:
    """Four layers of every kind, 6 attention heads and 3 MoE heads: counts that 2 and 4 miss."""
    return Magi2Config(
        num_layers=4,
        hidden_size=96,
        head_dim=16,
        num_kv_heads=6,
        video_channels=8,
        audio_channels=6,
        text_channels=24,
        dtype=dtype,
        intermediate_factor=4,
        multimodal_layers=(0, 3),
        attention_softcap=-1.0,
        num_sinks=1,
        num_streams=4,
        alpha_init=0.01,
        moe=MoeConfig(
            layers=(1, 2),
            num_heads=3,
            num_experts=8,
            top_k=2,
            score_func="sigmoid",
            route_norm=True,
            route_scale=4.9,
            expert_intermediate_size=32,
            shared_intermediate_size=32,
            modality_intermediate_size=32,
            split_merge_size=None,
        ),
    )
