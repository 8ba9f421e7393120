"""Where each route goes, so that a grouped product can take whole blocks of one expert's rows.

A route is one choice of one token in one head and has the number `(t * heads + h) * top_k + k`:
rows are read and written as tokens store them. The experts of all heads are numbered head-major,
`head * num_experts + expert`. Routes are laid out expert after expert, in ascending number inside
an expert, each expert's run filled up to whole blocks.

Example: 2 experts, blocks of 4 slots, 5 routes (R = 5 marks an empty slot); expert 0 has routes
1 and 4, expert 1 has 0, 2, 3:

    slots          1 4 R R | 0 2 3 R | R R R R | ...
    block_expert   0         1         2         ...     2 = behind the last expert
    padded_total   8
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from magi2.ops.launch import on_device


@dataclass(frozen=True, kw_only=True)
class RouteTile:
    """How `build_routes_triton` is cut into programs; all are powers of two.

    Attributes:
        routes: Of a program that ranks: as many tokens of a head as have no more choices, and at
            least one. The work of a route grows with it, the counts that are kept shrink.
        scan: Counts that a program of the scan takes at a time.
        scan_experts: Experts of such a program.
        scan_warps: Warps of such a program.
        place_warps: Warps of the one program that places the experts.
        blocks: Whose empty slots a program fills.
        places: Routes that a program puts into their slots.
    """

    routes: int = 64
    scan: int = 4096
    scan_experts: int = 8
    scan_warps: int = 8
    place_warps: int = 16
    blocks: int = 32
    places: int = 512

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        wrong = {name: size for name, size in sizes.items() if size < 1 or size & (size - 1)}
        if wrong or self.routes > 1024 or self.scan < self.scan_experts:
            raise ValueError(
                f"{sizes}: expected powers of two, at most 1024 routes, and scan_experts no more "
                "than scan."
            )


_TILE = RouteTile()


@dataclass(frozen=True, kw_only=True)
class BlockRoutes:
    """Routes in blocks of one expert each; all of it stays on the device.

    Attributes:
        slots: (capacity,) int32 route numbers; `num_routes` where a slot is empty.
        block_expert: (capacity / block_rows,) int32 expert of each block; the number of experts
            behind the last block that holds a route.
        padded_total: (1,) int32, slots up to the end of the last such block.
        block_rows: Slots of a block.
        num_routes: Routes in all.
    """

    slots: torch.Tensor
    block_expert: torch.Tensor
    padded_total: torch.Tensor
    block_rows: int
    num_routes: int

    @property
    def num_blocks(self) -> int:
        """Blocks that the buffers hold, live or not: what a launch has to cover."""
        return self.block_expert.shape[0]


def route_capacity(num_routes: int, num_experts: int, block_rows: int) -> int:
    """Most slots that the routes can need, whatever the routing, in whole blocks."""
    # An expert wastes at most a block less one slot, and only experts with routes waste any.
    most = num_routes + min(num_experts, num_routes) * (block_rows - 1)
    return -(-most // block_rows) * block_rows


def number_experts(choice_HTK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Experts of all heads by route number: (tokens, heads, top_k) int32, contiguous, one copy.

    Args:
        choice_HTK: (heads, tokens, top_k) expert numbers within the head, any integer dtype.
        num_experts: Experts of a head.
    """
    heads = choice_HTK.shape[0]
    first = torch.arange(heads, dtype=torch.int32, device=choice_HTK.device) * num_experts
    # A copy also where nothing has to move: the sum is taken in place.
    expert_THK = choice_HTK.permute(1, 0, 2).to(
        torch.int32, copy=True, memory_format=torch.contiguous_format
    )
    return expert_THK.add_(first[:, None])


def empty_block_routes(
    num_routes: int, num_experts: int, block_rows: int, device: torch.device | str
) -> BlockRoutes:
    """Buffers for `build_routes_torch` or its Triton form, which overwrite all of them.

    Args:
        num_routes: tokens * heads * top_k.
        num_experts: Experts of all heads together.
        block_rows: Rows of a block, the row tile of the grouped products.
        device: Where the routes are.
    """
    capacity = route_capacity(num_routes, num_experts, block_rows)
    # Route numbers, the sentinel and slots are int32.
    if capacity >= 2**31:
        raise ValueError(
            f"num_routes={num_routes} with blocks of {block_rows} rows needs {capacity} slots: "
            "expected less than 2**31. Run the experts on fewer tokens at a time."
        )
    slots, block_expert, total = (
        torch.empty(size, dtype=torch.int32, device=device)
        for size in (capacity, capacity // block_rows, 1)
    )
    return BlockRoutes(
        slots=slots,
        block_expert=block_expert,
        padded_total=total,
        block_rows=block_rows,
        num_routes=num_routes,
    )


def build_routes_torch(
    expert: torch.Tensor, num_experts: int, block_rows: int, out: BlockRoutes | None = None
) -> BlockRoutes:
    """Lay out the routes in blocks, from one stable sort, without atomics or a host sync.

    Args:
        expert: Expert of every route in order of route number, any shape, int32 or int64, each in
            `[0, num_experts)`.
        num_experts: Experts of all heads together.
        block_rows: Rows of a block.
        out: Buffers of at least the capacity to overwrite, for instance kept between calls; a new
            set by default.

    Returns:
        `out`, or the new set.

    Raises:
        ValueError: If `out` was made for other sizes, or ids are no integers.
    """
    num_routes = expert.numel()
    if expert.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expert is {expert.dtype}: expected int32 or int64.")
    if out is None:
        out = empty_block_routes(num_routes, num_experts, block_rows, expert.device)
    check_buffers(out, num_routes, num_experts, block_rows)
    ids, order = torch.sort(expert.flatten(), stable=True)
    experts = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
    bounds = torch.searchsorted(ids, experts)
    begin, count = bounds[:-1], bounds.diff()
    padded = (count + (block_rows - 1)) // block_rows * block_rows
    end = padded.cumsum(0)
    # Position i of the sort lies `i - begin` behind the first slot of its expert.
    shift = end - padded - begin
    slot = shift[ids] + torch.arange(num_routes, device=ids.device)
    out.slots.fill_(num_routes).scatter_(0, slot, order.to(torch.int32))
    first_slot = torch.arange(out.num_blocks, device=ids.device) * block_rows
    out.block_expert.copy_(torch.searchsorted(end, first_slot, right=True))
    out.padded_total.copy_(end[-1:])
    return out


def check_buffers(out: BlockRoutes, num_routes: int, num_experts: int, block_rows: int) -> None:
    """Refuse buffers that do not fit these routes.

    Raises:
        ValueError: If sizes, dtypes or the routes they were made for differ.
    """
    capacity = route_capacity(num_routes, num_experts, block_rows)
    slots = out.slots.numel()
    fits = (
        slots >= capacity
        and slots == out.num_blocks * block_rows
        and out.block_rows == block_rows
        and out.num_routes == num_routes
        and out.padded_total.numel() == 1
    )
    if not fits:
        raise ValueError(
            f"out holds {slots} slots in {out.num_blocks} blocks of {out.block_rows} for "
            f"{out.num_routes} routes: expected at least {capacity} slots in blocks of "
            f"{block_rows} for {num_routes} routes. Make it with empty_block_routes."
        )
    for tensor in (out.slots, out.block_expert, out.padded_total):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"out holds a {tensor.dtype} tensor: expected contiguous int32.")


def build_routes_triton(
    choice_HTK: torch.Tensor,
    num_experts: int,
    block_rows: int,
    out: BlockRoutes | None = None,
    *,
    tile: RouteTile | None = None,
) -> BlockRoutes:
    """Same integers as `build_routes_torch(number_experts(choice, ...), ...)`, in four launches.

    Args:
        choice_HTK: (heads, tokens, top_k) expert numbers within the head, int32 or int64, any
            strides.
        num_experts: Experts of all heads together.
        block_rows: Rows of a block, a power of two.
        out: As in `build_routes_torch`.
        tile: How to cut the work; the same integers whatever it is.

    Counts instead of sorting: cheaper by far, since the experts of a head are few.
    """
    _, tokens, top_k = choice_HTK.shape
    if out is None:
        out = empty_block_routes(choice_HTK.numel(), num_experts, block_rows, choice_HTK.device)
    check_buffers(out, choice_HTK.numel(), num_experts, block_rows)
    if not num_experts:
        out.padded_total.zero_()
        out.block_expert.zero_()
        out.slots.fill_(out.num_routes)
        return out
    tile = tile or _TILE
    chunk_tokens = max(1, tile.routes // max(top_k, 1))
    chunks = -(-tokens // chunk_tokens) if choice_HTK.numel() else 0
    ranks, ledger = (
        torch.empty(shape, dtype=torch.int32, device=choice_HTK.device)
        for shape in ((choice_HTK.numel(),), (chunks + 3, num_experts))
    )
    with on_device(choice_HTK):
        _launch(choice_HTK, ranks, ledger, out, chunk_tokens, tile)
    return out


def _launch(
    choice_HTK: torch.Tensor,
    ranks: torch.Tensor,
    ledger: torch.Tensor,
    out: BlockRoutes,
    chunk_tokens: int,
    tile: RouteTile,
) -> None:
    """The four launches; `ranks` and `ledger` are scratch, what they hold the kernels say."""
    from magi2.kernels import route_build as kernels

    heads, tokens, top_k = choice_HTK.shape
    chunks, num_experts = ledger.shape[0] - 3, ledger.shape[1]
    sizes = {"HEADS": heads, "TOP_K": max(top_k, 1), "EXPERTS": num_experts // heads}
    if chunks:
        routes = _power(chunk_tokens * top_k)
        kernels.rank_routes_kernel[(chunks, heads)](
            choice_HTK,
            ranks,
            ledger,
            tokens,
            *choice_HTK.stride(),
            BLOCK_E=_power(num_experts // heads),
            TOKENS=chunk_tokens,
            ROUTES=routes,
            num_warps=min(max(routes // 32, 1), 8),  # a thread counts for one route
            **sizes,
        )
    # At least 64: one kernel then serves every short batch.
    step = min(max(_power(chunks), 64), tile.scan // tile.scan_experts)
    kernels.scan_counts_kernel[(-(-num_experts // tile.scan_experts),)](
        ledger,
        chunks,
        ALL_EXPERTS=num_experts,
        BLOCK_E=tile.scan_experts,
        STEP=step,
        num_warps=tile.scan_warps,
    )
    kernels.place_experts_kernel[(1,)](
        ledger,
        out.padded_total,
        chunks,
        ALL_EXPERTS=num_experts,
        BLOCK_E=_power(num_experts),
        BLOCK_ROWS=out.block_rows,
        num_warps=tile.place_warps,
    )
    programs = -(-out.num_blocks // tile.blocks) + -(-out.num_routes // tile.places)
    if programs:
        kernels.fill_slots_kernel[(programs,)](
            choice_HTK,
            ranks,
            ledger,
            out.slots,
            out.block_expert,
            chunks,
            out.num_routes,
            out.num_blocks,
            *choice_HTK.stride(),
            TOKENS=chunk_tokens,
            BLOCK_ROWS=out.block_rows,
            BLOCKS=tile.blocks,
            STEPS=num_experts.bit_length(),
            PLACES=tile.places,
            **sizes,
        )


def _power(size: int) -> int:
    """The power of two from `size` on."""
    return 1 << (max(size, 1) - 1).bit_length()
