"""How much of a model's weights is what, and how much of it a rank holds."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from magi2.checkpoint.slices import is_sharded
from magi2.config import Magi2Config
from magi2.transformer import Magi2Transformer

# Parts by their released names; the first that matches.
_GROUPS = (
    ("adapters", r"^(pre|post)_adapter\."),
    ("hyper-connections", r"\.mhc_"),
    ("attention", r"\.attention\."),
    ("routed experts", r"\.moe_mlp\."),
    ("mixture: shared and modality experts", r"shared_expert"),
    ("mixture: norm, split and merge", r"\.mlp\.(split_linear|merge_linear)"),
    ("dense MLP", r"\.mlp\.(up_gate|down)_proj"),
)
_MIXTURE_REST = "mixture: norm, split and merge"


@dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """Tensors of one part of the model.

    Attributes:
        name: The part.
        tensors: How many.
        elements: Of all of them in the checkpoint, buffers included.
        nbytes: In the model's dtypes.
        sharded: Whether expert ranks divide them by heads of the mixture.
        dtypes: Elements of each dtype.
    """

    name: str
    tensors: int
    elements: int
    nbytes: int
    sharded: bool
    dtypes: dict[torch.dtype, int]

    def nbytes_local(self, heads_local: int, num_heads: int) -> int:
        """Bytes on a rank that holds so many heads of the mixture."""
        return self.nbytes * heads_local // num_heads if self.sharded else self.nbytes


def weight_groups(config: Magi2Config) -> list[WeightGroup]:
    """The parts of a model, from the shapes and dtypes of its state dict."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name, _ in _GROUPS}
    sharded: set[str] = set()
    for name, tensor in Magi2Transformer(config, device="meta").state_dict().items():
        group = _group_of(name, config)
        found[group].append(tensor)
        if is_sharded(name):
            sharded.add(group)
    return [_group(name, tensors, name in sharded) for name, tensors in found.items() if tensors]


def _group_of(name: str, config: Magi2Config) -> str:
    for group, pattern in _GROUPS:
        if re.search(pattern, name):
            return group
    layer = int(name.split(".")[2])  # block.layers.N.mlp.pre_norm.weight, of either kind
    return _MIXTURE_REST if layer in config.moe.layers else "dense MLP"


def _group(name: str, tensors: list[torch.Tensor], sharded: bool) -> WeightGroup:
    dtypes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.numel()
    return WeightGroup(
        name=name,
        tensors=len(tensors),
        elements=sum(dtypes.values()),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        sharded=sharded,
        dtypes=dtypes,
    )
