"""How the Triton experts are cut into programs: the choices, and the tables of what measured best.

Every choice computes the same sums; a depth tile changes the order of float32 additions, nothing
else does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ProductTile:
    """One grouped product.

    Attributes:
        columns: Output columns of a program.
        depth: Channels that one step multiplies.
        num_warps: Warps of a program.
        num_stages: Steps whose loads are in flight.
        group_blocks: Row blocks that share a sweep over the columns.
        programs_per_unit: Programs for each multiprocessor, each walking over tiles; 0 starts one
            program a tile.
        descriptors: Read the weights through tensor descriptors: Triton 3.4 and later, and on
            Hopper and later by the bulk copy engine.
    """

    columns: int
    depth: int
    num_warps: int
    num_stages: int
    group_blocks: int = 16
    programs_per_unit: int = 0
    descriptors: bool = False


@dataclass(frozen=True, kw_only=True)
class FusedTile:
    """Both products in one program; head widths up to 256.

    Attributes:
        inner: Inner channels of a step.
        num_warps: Warps of a program.
        num_stages: Steps whose weights are in flight.
        programs_per_unit: As in `ProductTile`.
        descriptors: As in `ProductTile`.
    """

    inner: int
    num_warps: int
    num_stages: int
    programs_per_unit: int = 0
    descriptors: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertTiles:
    """Rows of a block, and either both products or the fused form.

    Attributes:
        block_rows: Routes of one expert that a program takes.
        gate_up: First product and activation; None with `fused`.
        down: Second product; None with `fused`.
        fused: Both in one kernel.
    """

    block_rows: int
    gate_up: ProductTile | None = None
    down: ProductTile | None = None
    fused: FusedTile | None = None

    def __post_init__(self) -> None:
        products = (self.gate_up is not None, self.down is not None)
        if products != ((False, False) if self.fused else (True, True)):
            raise ValueError(
                f"gate_up={self.gate_up}, down={self.down}, fused={self.fused}: expected both "
                "products, or the fused form alone."
            )
        sizes = [self.block_rows]
        sizes += [
            n for tile in (self.gate_up, self.down) if tile for n in (tile.columns, tile.depth)
        ]
        sizes += [self.fused.inner] if self.fused else []
        wrong = [n for n in sizes if n < 16 or n & (n - 1)]
        if wrong:
            raise ValueError(f"tile sizes {wrong}: expected powers of two from 16 on.")


# Few stages and narrow tiles: float32 operands take twice the room, and no matrix unit.
_FLOAT32 = ExpertTiles(
    block_rows=32,
    gate_up=ProductTile(columns=32, depth=32, num_warps=4, num_stages=2),
    down=ProductTile(columns=32, depth=32, num_warps=4, num_stages=2),
)
# The plain form for every CUDA device with 100 kB of shared memory; Triton 3.2 has all it needs.
_CUDA = ExpertTiles(
    block_rows=64,
    gate_up=ProductTile(columns=64, depth=64, num_warps=4, num_stages=3),
    down=ProductTile(columns=128, depth=64, num_warps=4, num_stages=3),
)
_MUSA = ExpertTiles(
    block_rows=128,
    gate_up=ProductTile(columns=64, depth=64, num_warps=16, num_stages=1),
    down=ProductTile(columns=128, depth=64, num_warps=16, num_stages=1),
)


def choose_tiles(kind: str, dtype: torch.dtype, routes_per_expert: float) -> ExpertTiles:
    """The table's entry for a kind of device, a dtype and how full the experts are.

    Args:
        kind: Kind of device: cuda, musa, or cpu under the interpreter.
        dtype: Of activations and weights.
        routes_per_expert: Mean over all experts, which decides how many rows a block should have.
    """
    if dtype == torch.float32:
        return _FLOAT32
    if kind == "musa":
        return _MUSA
    return _CUDA
