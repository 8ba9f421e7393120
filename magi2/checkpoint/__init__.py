"""Checkpoints in the released layout: safetensors shards, an index, the released names."""

from magi2.checkpoint.load import load_checkpoint
from magi2.checkpoint.save import save_checkpoint, save_model

__all__ = ["load_checkpoint", "save_checkpoint", "save_model"]
