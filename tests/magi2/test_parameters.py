"""The arithmetic of the released model's size, on shapes alone."""

from __future__ import annotations

import pytest
import torch

from magi2 import presets
from magi2.config import NUM_MODALITIES
from magi2.transformer import Magi2Transformer


@pytest.fixture(scope="module")
def preview():
    return Magi2Transformer(presets.preview(), device="meta")


def test_preview_has_the_released_totals(preview):
    state = preview.state_dict()
    assert len(state) == 1371
    assert sum(t.numel() for t in state.values()) == 113_934_953_536
    assert sum(t.numel() * t.element_size() for t in state.values()) == 228_107_858_176
    assert sum(p.numel() for p in preview.parameters()) == 113_934_732_336
    by_dtype = dict.fromkeys((torch.float32, torch.bfloat16), 0)
    for tensor in state.values():
        by_dtype[tensor.dtype] += tensor.numel()
    assert by_dtype == {torch.float32: 118_975_552, torch.bfloat16: 113_815_977_984}


@pytest.mark.parametrize(
    ("preset", "totals"),
    [
        (presets.tiny, (131, 6_630_268, 13_807_088)),
        (presets.tiny_uneven, (131, 1_102_674, 2_410_824)),
    ],
)
def test_tiny_presets_have_their_totals(preset, totals):
    state = Magi2Transformer(preset(), device="meta").state_dict()
    elements = sum(t.numel() for t in state.values())
    size = sum(t.numel() * t.element_size() for t in state.values())
    assert (len(state), elements, size) == totals


# Released names and shapes: `block.layers.N.` before each, N in multimodal layers or not.
MHC = {f"mhc_alpha_{k}_{b}": [1] for k in ("pre", "post", "res") for b in ("attn", "mlp")}
MHC |= {f"mhc_bias_{k}_{b}": [4] for k in ("pre", "post") for b in ("attn", "mlp")}
MHC |= {f"mhc_bias_res_{b}": [4, 4] for b in ("attn", "mlp")}
MHC |= {f"mhc_phi_fused_{b}": [12288, 24] for b in ("attn", "mlp")}
MULTIMODAL = MHC | {
    "mhc_norm.weight": [36864],
    "attention.pre_norm.weight": [9216],
    "attention.linear_g.weight": [72, 3072],
    "attention.linear_qkv.weight": [27648, 3072],
    "attention.linear_proj.weight": [9216, 3072],
    "attention.q_norm.weight": [384],
    "attention.k_norm.weight": [384],
    "attention.sinks": [1, 24],
    "mlp.pre_norm.weight": [9216],
    "mlp.up_gate_proj.weight": [49152, 3072],
    "mlp.down_proj.weight": [9216, 8192],
}
MIXTURE = MHC | {
    "mhc_norm.weight": [12288],
    "attention.pre_norm.weight": [3072],
    "attention.linear_g.weight": [24, 3072],
    "attention.linear_qkv.weight": [9216, 3072],
    "attention.linear_proj.weight": [3072, 3072],
    "attention.q_norm.weight": [128],
    "attention.k_norm.weight": [128],
    "attention.sinks": [1, 24],
    "mlp.pre_norm.weight": [9216],
    "mlp.split_linear.weight": [3072, 3072],
    "mlp.merge_linear.weight": [3072, 3072],
    "mlp.moe_mlp.gate": [3072, 256],
    "mlp.moe_mlp.W_gate": [3072, 256, 1280],
    "mlp.moe_mlp.W_up": [3072, 256, 1280],
    "mlp.moe_mlp.W_down": [3072, 1280, 256],
    "mlp.moe_mlp.router.expert_bias": [3072],
    "mlp.moe_mlp.router.expert_bias_ema": [3072],
    "mlp.shared_expert_fc1.weight": [2560, 3072],
    "mlp.shared_expert_fc2.weight": [3072, 1280],
    "mlp.modality_specific_shared_expert_fc1.weight": [7680, 3072],
    "mlp.modality_specific_shared_expert_fc2.weight": [9216, 1280],
}
ADAPTERS = {
    "pre_adapter.video_embedder.weight": [12288, 48],
    "pre_adapter.video_embedder.bias": [12288],
    "pre_adapter.audio_embedder.weight": [12288, 64],
    "pre_adapter.audio_embedder.bias": [12288],
    "pre_adapter.text_embedder.weight": [12288, 5120],
    "pre_adapter.text_embedder.bias": [12288],
    "pre_adapter.rope.bands": [16],
    "post_adapter.final_norm_video.weight": [12288],
    "post_adapter.final_norm_audio.weight": [12288],
    "post_adapter.final_linear_video.weight": [48, 12288],
    "post_adapter.final_linear_audio.weight": [64, 12288],
}
BFLOAT16 = ("linear_", "_proj", "_fc1", "_fc2", "W_", "split_", "merge_")


def test_preview_has_every_released_name_shape_and_dtype(preview):
    expected = dict(ADAPTERS)
    for layer in range(40):
        tensors = MULTIMODAL if layer in (0, 1, 38, 39) else MIXTURE
        expected |= {f"block.layers.{layer}.{name}": shape for name, shape in tensors.items()}
    state = preview.state_dict()
    assert {name: list(tensor.shape) for name, tensor in state.items()} == expected
    for name, tensor in state.items():
        narrow = name.startswith("block.") and any(
            part in name.split(".", 3)[-1] for part in BFLOAT16
        )
        assert tensor.dtype == (torch.bfloat16 if narrow else torch.float32), name


def active_elements(model, modality: str) -> int:
    """Parameters that one token of a modality meets: its weight set, its top-k experts."""
    config, active = model.config, 0
    for name, parameter in model.named_parameters():
        share = parameter.numel()
        if name.startswith(("pre_adapter.", "post_adapter.")):
            # Text has no output head.
            share = share if f"_{modality}" in name or f".{modality}_" in name else 0
        elif ".moe_mlp.W_" in name:
            share = share * config.moe.top_k // config.moe.num_experts
        elif is_per_modality(model, name):
            share //= NUM_MODALITIES
        active += share
    return active


def is_per_modality(model, name: str) -> bool:
    owner = model.get_submodule(name.rsplit(".", 1)[0])
    return getattr(owner, "num_groups", 1) == NUM_MODALITIES


@pytest.mark.parametrize(
    ("modality", "elements"),
    [("video", 5_945_611_312), ("audio", 5_946_004_528), ("text", 6_007_333_936)],
)
def test_about_six_billion_parameters_are_active_for_a_token(preview, modality, elements):
    assert active_elements(preview, modality) == elements
