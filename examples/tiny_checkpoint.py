"""Write a tiny random MAGI-2 checkpoint in the released layout: shards, index, config.json.

python examples/tiny_checkpoint.py /path/to/folder
python examples/tiny_checkpoint.py /path/to/folder --preset tiny_uneven --seed 1 --shard-mib 1
"""

from __future__ import annotations

import argparse

from magi2 import presets
from magi2.checkpoint import load_checkpoint, save_checkpoint
from magi2.config import Magi2Config
from magi2.initialise import random_state_dict
from magi2.transformer import Magi2Transformer

PRESETS = {"tiny": presets.tiny, "tiny_uneven": presets.tiny_uneven}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random MAGI-2 checkpoint.")
    parser.add_argument("folder", help="made if absent; must not hold a checkpoint yet")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-mib", type=float, default=4.0, help="largest shard, in MiB")
    arguments = parser.parse_args()

    config = PRESETS[arguments.preset]()
    weights = random_state_dict(config, arguments.seed)
    save_checkpoint(weights, config, arguments.folder, int(arguments.shard_mib * 2**20))

    model = Magi2Transformer(
        Magi2Config.from_file(f"{arguments.folder}/config.json"), device="meta"
    )
    load_checkpoint(model, arguments.folder)
    elements = sum(tensor.numel() for tensor in weights.values())
    print(f"{arguments.folder}: {len(weights)} tensors, {elements:,} elements; loads back.")


if __name__ == "__main__":
    main()
