"""The turbo decoder once more, straight from the written rules, on weights by their names."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def norm(x, eps):
    return x * torch.rsqrt((x**2).mean(dim=1, keepdim=True) + eps)


class Oracle:
    """Float64; `weights` by the checkpoint's names under `decoder.`."""

    def __init__(self, weights, config):
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.config = config

    def conv3d(self, name, x):
        weight = self.weights[f"{name}.conv.weight"]
        time = (weight.shape[2] - 1) // 2
        x = torch.cat([x[:, :, :1]] * time + [x] + [x[:, :, -1:]] * time, dim=2)
        bias = self.weights[f"{name}.conv.bias"]
        return F.conv3d(x, weight, bias, padding=(0, weight.shape[3] // 2, weight.shape[4] // 2))

    def res_block(self, name, x, act=F.silu):
        y = self.conv3d(f"{name}.conv1", act(norm(x, 1e-8)))
        y = self.conv3d(f"{name}.conv2", F.silu(norm(y, 1e-8)))
        if f"{name}.conv_shortcut.conv.weight" in self.weights:
            x = self.conv3d(f"{name}.conv_shortcut", norm(x, 1e-6))
        return y + x

    def upsample(self, name, x, is_first):
        if f"{name}.time_conv.conv.weight" in self.weights:
            doubled = self.conv3d(f"{name}.time_conv", x)
            channels = x.shape[1]
            frames = []
            for index in range(x.shape[2]):
                frames += [doubled[:, :channels, index], doubled[:, channels:, index]]
            x = torch.stack(frames[1:] if is_first else frames, dim=2)
        weight = self.weights[f"{name}.resample.1.weight"]
        bias = self.weights[f"{name}.resample.1.bias"]
        frames = []
        for frame in x.unbind(dim=2):
            large = F.interpolate(frame, scale_factor=2, mode="nearest")
            frames.append(F.conv2d(large, weight, bias, padding=1))
        return torch.stack(frames, dim=2)

    def __call__(self, z, is_first):
        """(1, latent channels, f, rows, columns) to (1, 3, frames, height, width)."""
        x = self.conv3d("conv_in", z.double())
        layers = self.config.layers_per_block[::-1]
        for index in range(layers[0]):
            x = self.res_block(f"mid_block.resnets.{index}", x)
        for block, num_layers in enumerate(layers[1:]):
            name = f"up_blocks.{block}"
            if f"{name}.conv_in.conv1.conv.weight" in self.weights:
                x = self.res_block(f"{name}.conv_in", x)
            upsamples = f"{name}.upsamplers.0.resample.1.weight" in self.weights
            if upsamples:
                x = self.upsample(f"{name}.upsamplers.0", x, is_first)
            for index in range(num_layers):
                x = self.res_block(f"{name}.resnets.{index}", x, F.relu if upsamples else F.silu)
        x = self.conv3d("conv_out", F.silu(norm(x, 1e-8)))
        patch = self.config.patch_size
        batch, _, frames, height, width = x.shape
        out = x.new_zeros(batch, 3, frames, height * patch, width * patch)
        for colour in range(3):
            for column in range(patch):
                for row in range(patch):
                    channel = (colour * patch + column) * patch + row
                    out[:, colour, :, row::patch, column::patch] = x[:, channel]
        return out


def windowed(decode, z, chunk=7):
    """The written rules of the windowed decode; (1, channels, frames, rows, columns) in."""
    num_latents, pad = z.shape[2], 0
    while (num_latents + pad) % chunk or num_latents + pad < chunk:
        pad += 1
    z = torch.cat([z] + [z[:, :, -1:]] * pad, dim=2)
    total = z.shape[2]
    if total == chunk:
        out = decode(z, True)
    else:
        parts = [decode(z[:, :, : chunk + 1], True)[:, :, :-4]]
        for i in range(chunk, total, chunk):
            last = i + chunk == total
            part = decode(z[:, :, i - 1 : i + chunk + (0 if last else 1)], False)[:, :, 4:]
            parts.append(part if last else part[:, :, :-4])
        out = torch.cat(parts, dim=2)
    return out[:, :, : out.shape[2] - 4 * pad]
