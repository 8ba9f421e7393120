"""A small Wan2.2 VAE with random weights, and the names of the original file."""

from __future__ import annotations

import torch

from magi2.decoders.wan import WAN22_VAE_CONFIG

CONFIG = {
    **WAN22_VAE_CONFIG,
    "base_dim": 8,
    "decoder_base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 2, 2],
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [0.5, 1.1, 0.7, 0.9],
}


def make(config=CONFIG, device=None):
    """diffusers' class with reproducible weights."""
    import diffusers

    torch.manual_seed(0)
    with torch.device(device or "cpu"):
        vae = diffusers.AutoencoderKLWan(**config)
    return vae.requires_grad_(False).eval()


def original_names():
    """diffusers' name for every name of the original file, by the structure of both."""
    names = {"conv1": "quant_conv", "conv2": "post_quant_conv"}
    inner = {"residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2"}
    inner |= {"residual.6": "conv2", "shortcut": "conv_shortcut"}
    for side, way, layers in (("encoder", "down", 2), ("decoder", "up", 3)):
        names[f"{side}.conv1"] = f"{side}.conv_in"
        names[f"{side}.head.0"] = f"{side}.norm_out"
        names[f"{side}.head.2"] = f"{side}.conv_out"
        for number, resnet in ((0, 0), (2, 1)):
            for theirs, ours in inner.items():
                name = f"{side}.mid_block.resnets.{resnet}.{ours}"
                names[f"{side}.middle.{number}.{theirs}"] = name
        for layer in ("norm", "to_qkv", "proj"):
            names[f"{side}.middle.1.{layer}"] = f"{side}.mid_block.attentions.0.{layer}"
        for block in range(4):
            theirs_block = f"{side}.{way}samples.{block}.{way}samples"
            ours_block = f"{side}.{way}_blocks.{block}"
            for layer in range(layers):
                for theirs, ours in inner.items():
                    name = f"{ours_block}.resnets.{layer}.{ours}"
                    names[f"{theirs_block}.{layer}.{theirs}"] = name
            for layer in ("resample.1", "time_conv"):
                names[f"{theirs_block}.{layers}.{layer}"] = f"{ours_block}.{way}sampler.{layer}"
    return names


def as_original(state):
    """A state dict under the original file's names."""
    theirs = {ours: original for original, ours in original_names().items()}
    renamed = {}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        renamed[f"{theirs[module]}.{leaf}"] = tensor
    return renamed
