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
class HopperTile:
    """Both products in one program whose warps have roles: CUDA, compute capability 9, Triton 3.6.

    Blocks have 128 rows; bfloat16 and float16; heads of 256 channels.

    Attributes:
        slots: Tiles of weights, of 32 kB each, that are in flight or in use.
    """

    slots: int


@dataclass(frozen=True, kw_only=True)
class ExpertTiles:
    """Rows of a block, and one form: both products, or one of the forms that fuse them.

    Attributes:
        block_rows: Routes of one expert that a program takes.
        gate_up: First product and activation, with `down`.
        down: Second product, with `gate_up`.
        fused: Both in one kernel.
        hopper: Both in one kernel for Hopper.
    """

    block_rows: int
    gate_up: ProductTile | None = None
    down: ProductTile | None = None
    fused: FusedTile | None = None
    hopper: HopperTile | None = None

    def __post_init__(self) -> None:
        forms = (self.gate_up or self.down, self.fused, self.hopper)
        if sum(form is not None for form in forms) != 1 or (not self.gate_up) != (not self.down):
            raise ValueError(
                f"gate_up={self.gate_up}, down={self.down}, fused={self.fused}, "
                f"hopper={self.hopper}: expected both products, or a fused form alone."
            )
        if self.hopper and self.block_rows != 128:
            raise ValueError(f"block_rows={self.block_rows}: expected 128 with a HopperTile.")
        sizes = [self.block_rows]
        sizes += [
            n for tile in (self.gate_up, self.down) if tile for n in (tile.columns, tile.depth)
        ]
        sizes += [self.fused.inner] if self.fused else []
        wrong = [n for n in sizes if n < 16 or n & (n - 1)]
        if wrong:
            raise ValueError(f"tile sizes {wrong}: expected powers of two from 16 on.")

    @property
    def form(self) -> str:
        """Its name: "hopper", "fused" or "two products"."""
        if self.hopper:
            return "hopper"
        return "fused" if self.fused else "two products"


# Few stages and narrow tiles: float32 operands take twice the room, and no matrix unit.
_FLOAT32 = ExpertTiles(
    block_rows=32,
    gate_up=ProductTile(columns=32, depth=32, num_warps=4, num_stages=2),
    down=ProductTile(columns=32, depth=32, num_warps=4, num_stages=2),
)
# The plain form for every CUDA device with 100 kB of shared memory; Triton 3.2 has all it needs. No
# such device was there to tune it for.
_CUDA = ExpertTiles(
    block_rows=64,
    gate_up=ProductTile(columns=64, depth=64, num_warps=4, num_stages=3),
    down=ProductTile(columns=128, depth=64, num_warps=4, num_stages=3),
)
# Untuned as well: the steps, warps and stages of a kernel that others tuned there.
_MUSA = ExpertTiles(
    block_rows=128,
    gate_up=ProductTile(columns=64, depth=64, num_warps=16, num_stages=1),
    down=ProductTile(columns=128, depth=64, num_warps=16, num_stages=1),
)


# One entry for all shapes: with about 90 and about 350 routes an expert, `HOPPER` and, of the fused
# ways without descriptors, `_FUSED` were the best at both. With descriptors, which want Triton 3.4,
# 64 rows are 1 to 8 % ahead at the first (benchmarks/results/experts-tune-nvidia-h200.jsonl).

# 208 kB of shared memory, heads of up to 256 channels: what Hopper takes where the next cannot run.
_FUSED = ExpertTiles(block_rows=128, fused=FusedTile(inner=32, num_warps=8, num_stages=3))
# Warps with roles, on the GPUs and the Triton that have what they need.
HOPPER = ExpertTiles(block_rows=128, hopper=HopperTile(slots=5))


def choose_tiles(
    kind: str, dtype: torch.dtype, *, hopper: bool = False, fused: bool = False
) -> ExpertTiles:
    """The table's entry for a kind of device and a dtype.

    Args:
        kind: Kind of device: cuda, musa, or cpu under the interpreter.
        dtype: Of activations and weights.
        hopper: Whether `HOPPER` can run there.
        fused: Whether the form that fuses both products fits there.
    """
    if hopper:
        return HOPPER
    if dtype == torch.float32:
        return _FLOAT32
    if fused:
        return _FUSED
    return _MUSA if kind == "musa" else _CUDA
