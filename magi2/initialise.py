"""Random weights for tests and examples, each tensor drawn from its own name.

Every term of the model gets a say: gains far from zero, norm offsets and biases of visible size,
two router biases that choose different experts. Training from scratch wants other values.
"""

from __future__ import annotations

import math
import re
import zlib

import torch

from magi2.checkpoint.slices import full_shape, rows_to_read
from magi2.config import Magi2Config
from magi2.ops.rotary import rotary_bands
from magi2.transformer import Magi2Transformer

# Uniform ranges by the end of the name; anything else is a matrix, normal with variance 1/inputs.
_RANGES = (
    (r"norm(_video|_audio)?\.weight", -0.2, 0.2),
    (r"sinks", -1.5, 1.5),
    (r"mhc_alpha_\w+", 0.4, 1.2),
    (r"mhc_bias_\w+", -0.5, 0.5),
    (r"expert_bias(_ema)?", -0.15, 0.15),
    (r"embedder\.bias", -0.1, 0.1),
)
# Matrices that rows multiply from the left as they are stored: dimension -2 is the input.
_INPUT_MAJOR = re.compile(r"(moe_mlp\.W_\w+|mhc_phi_fused_\w+)$")


def initialise(model: Magi2Transformer, seed: int = 0) -> None:
    """Fill every parameter and buffer of a model in place with random values.

    The same seed gives a tensor of the same name and shape the same values, whatever the rest of
    the model; ranks that share the experts get their rows of the same whole.
    """
    moe = model.config.moe
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            shape = full_shape(name, tuple(tensor.shape), moe.num_heads, moe.num_experts)
            whole = random_weight(name, shape, seed)
            rows = rows_to_read(name, model.expert_heads, moe.num_experts)
            tensor.copy_(whole if rows is None else whole[rows.start : rows.stop])


def random_state_dict(config: Magi2Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """A whole random checkpoint in the released names, shapes and dtypes, on the CPU."""
    shapes = Magi2Transformer(config, device="meta").state_dict()
    return {
        name: random_weight(name, tuple(meta.shape), seed).to(meta.dtype)
        for name, meta in shapes.items()
    }


def random_weight(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Float32 values for the tensor of this name."""
    if name.endswith("rope.bands"):
        return rotary_bands(shape[0])
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    for pattern, low, high in _RANGES:
        if re.search(pattern + "$", name):
            return torch.rand(shape, generator=generator) * (high - low) + low
    inputs = shape[-2] if _INPUT_MAJOR.search(name) else shape[-1]
    return torch.randn(shape, generator=generator) / math.sqrt(inputs)
