"""What moves where: the rectangles of all ranks, carried out by torch, give the same bits."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
import torch

import ulysses_comm as uc
from tests.bits import assert_same_bits, random_bits
from ulysses_comm.checks import check_head_scatter, check_seqlen_scatter
from ulysses_comm.symmetric.moves import (
    Cut,
    Exchange,
    agreed,
    cut_moves,
    layout_of,
    rectangles,
)
from ulysses_comm.symmetric.push import movable

BF16 = torch.bfloat16

SPLITS = {
    1: [4],
    2: [3, 0],
    3: [0, 0, 5],
    4: [2, 0, 3, 1],
    5: [1, 2, 0, 1, 3],
    8: [1, 0, 2, 3, 0, 1, 2, 1],
}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of everything that a tensor's storage holds."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def carry_out(
    exchange: Exchange, inputs_of: list[list[torch.Tensor]], *, through_send: bool
) -> list[torch.Tensor]:
    """Return every rank's receive buffer, moved rectangle by rectangle."""
    world = exchange.world_size
    received = [
        torch.zeros(exchange.receive_bytes(rank), dtype=torch.uint8) for rank in range(world)
    ]
    for rank, inputs in enumerate(inputs_of):
        ready = movable(inputs, exchange.wire)
        send = torch.zeros(exchange.send_bytes(rank), dtype=torch.uint8)
        moves = rectangles(exchange, rank, [layout_of(t) for t in ready], pack=through_send)
        for target, pieces in enumerate(moves):
            into = send if through_send and target != rank else received[target]
            for move in pieces:
                tensor = ready[move.input]
                start = tensor.storage_offset() * tensor.element_size() + move.source
                size = (move.rows, move.length)
                source = raw(tensor).as_strided(size, (move.source_row, 1), start)
                into.as_strided(size, (move.target_row, 1), move.target).copy_(source)
        for target in range(world):
            if through_send and target != rank:
                size = exchange.block_bytes(rank, target)
                to, start = (
                    exchange.receive_offset(rank, target),
                    exchange.send_offset(rank, target),
                )
                received[target][to : to + size] = send[start : start + size]
    return received


def head_inputs(rank: int, world: int, tokens: int, form: str) -> dict[str, Any]:
    def made(heads: int, dim: int, dtype: torch.dtype, number: int) -> torch.Tensor:
        return random_bits((tokens, heads, dim), dtype, seed=10 * number + rank)

    if form == "q, k, v":
        return {"tensors": [made(world * h, 8, BF16, h) for h in (3, 1, 2)]}
    if form == "shards":
        tensors = [made(world * h, 8, BF16, h) for h in (3, 1)]
        return {"tensors": uc.pack_head_shards(tensors, world)}
    if form == "strided":
        return {
            "tensors": [
                made(world * 4, 16, BF16, 1)[:, ::2, :8],
                made(world, 8, BF16, 2).transpose(0, 1).contiguous().transpose(0, 1),
            ]
        }
    if form == "kept":
        dtypes = (BF16, torch.float32, torch.uint8)
        tensors = [made(world, 3, dtype, number) for number, dtype in enumerate(dtypes)]
        return {"tensors": tensors, "keep_dtypes": True}
    counts = [rank % 3 for rank in range(world)] if world > 1 else [2]
    uneven = uc.HeadSplit.of_counts(counts)
    shared = uc.HeadSplit(2, tuple((int(r > 0), 2) for r in range(world)))
    return {
        "tensors": [made(uneven.num_heads, 8, BF16, 1), made(2, 8, BF16, 2)],
        "head_splits": [uneven, shared],
    }


@pytest.mark.parametrize("through_send", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("world", sorted(SPLITS))
@pytest.mark.parametrize("form", ["q, k, v", "shards", "strided", "kept", "uneven"])
def test_scattered_heads_land_where_they_belong(form: str, world: int, through_send: bool) -> None:
    splits = SPLITS[world]
    given = [head_inputs(rank, world, splits[rank], form) for rank in range(world)]
    checked = [
        check_head_scatter(
            options["tensors"],
            splits,
            rank,
            world,
            head_splits=options.get("head_splits"),
            keep_dtypes=options.get("keep_dtypes", False),
        )
        for rank, options in enumerate(given)
    ]
    wire = checked[0].wire
    assert wire is not None
    exchange = Exchange("heads", wire, tuple(splits))
    received = carry_out(exchange, [c.inputs for c in checked], through_send=through_send)

    def step(group: Any) -> list[torch.Tensor]:
        options = dict(given[group.rank()])
        return uc.scatter_heads_gather_seqlen(options.pop("tensors"), splits, group, **options)

    expected = uc.simulate(world, step).results
    for rank in range(world):
        assert received[rank].numel() <= agreed(exchange).receive_bytes
        buffer = received[rank].view(wire.dtype).view(exchange.receive_shape(rank))
        for ours, theirs in zip(wire.gathered(buffer, rank), expected[rank], strict=True):
            assert_same_bits(ours.contiguous(), theirs.contiguous())


@pytest.mark.parametrize("through_send", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("world", sorted(SPLITS))
@pytest.mark.parametrize("form", ["alone", "uneven", "kept"])
def test_scattered_sequences_land_where_they_belong(
    form: str, world: int, through_send: bool
) -> None:
    splits = SPLITS[world]
    counts = [1 + rank % 3 for rank in range(world)] if form == "uneven" else [2] * world
    options: dict[str, Any] = {"head_splits": [uc.HeadSplit.of_counts(counts)]}
    if form == "kept":
        options = {"head_splits": None, "keep_dtypes": True}

    def inputs(rank: int) -> list[torch.Tensor]:
        made = [random_bits((sum(splits), counts[rank], 8), BF16, seed=rank)]
        if form == "kept":
            made.append(random_bits((sum(splits), 2, 1), torch.float32, seed=50 + rank))
        return made

    checked = [
        check_seqlen_scatter(
            inputs(rank), splits, rank, world, alone=False, **{"keep_dtypes": False, **options}
        )
        for rank in range(world)
    ]
    wire = checked[0].wire
    assert wire is not None
    exchange = Exchange("seqlen", wire, tuple(splits))
    received = carry_out(exchange, [c.inputs for c in checked], through_send=through_send)

    def step(group: Any) -> list[torch.Tensor]:
        return uc.scatter_seqlen_gather_heads_each(inputs(group.rank()), splits, group, **options)

    for rank, expected in enumerate(uc.simulate(world, step).results):
        buffer = received[rank].view(wire.dtype).view(exchange.receive_shape(rank))
        for index, theirs in enumerate(expected):
            parts = wire.scattered(buffer, splits[rank], index)
            ours = torch.empty_like(theirs)
            for run, view in parts:
                run.of_heads(ours).copy_(view)
            assert_same_bits(ours, theirs)


def cut_of(tokens: int, heads: tuple[int, ...], dim: int = 128, programs: int = 264) -> Cut:
    tensors = [torch.empty(tokens, 2 * h, dim, dtype=BF16) for h in heads]
    wire = check_head_scatter(
        tensors, [tokens, tokens], 0, 2, head_splits=None, keep_dtypes=False
    ).wire
    assert wire is not None
    exchange = Exchange("heads", wire, (tokens, tokens))
    layouts = tuple(layout_of(tensor)._replace(address=0) for tensor in tensors)
    return cut_moves(exchange, 0, layouts, pack=False, programs=programs)


def test_production_rows_are_cut_without_waste() -> None:
    # 12 heads of 128 bf16 are 3072 bytes: three pieces of 1024, in accesses of 16 bytes.
    cut = cut_of(16384, (12, 12, 12))
    assert (cut.word, cut.vec, cut.piece, cut.rows, cut.columns) == (8, 2, 64, 16, 9)
    assert cut.total == 2 * 9 * 1024
    assert cut_of(3702, (12, 12, 12)).total == 2 * 9 * 232
    # Few tokens: tiles are smaller, so that more programs have work.
    assert cut_of(64, (12, 12, 12)).rows == 4
    # Five heads and one: pieces of 256 bytes fit both.
    assert cut_of(4096, (5, 1)).piece == 16
    # An odd head dimension moves in words of two bytes.
    assert (cut_of(4096, (3,), dim=25).word, cut_of(4096, (3,), dim=25).vec) == (2, 1)


def test_every_byte_is_in_exactly_one_tile() -> None:
    cut = cut_of(100, (5, 1, 3), dim=24)
    group = cut.word * cut.vec
    for entries in cut.table:
        written = torch.zeros(200 * 9 * 24 * 2, dtype=torch.int32)
        for _, _, _, target, target_row, length, rows in entries:
            for row in range(rows):
                start = (target + row * target_row) * group
                written[start : start + length * group] += 1
        assert written.max() == 1
        assert int(written.sum()) == 100 * 9 * 24 * 2


def test_programs_take_every_tile_once_and_alternate_between_ranks() -> None:
    # The kernel's arithmetic, in Python.
    world, columns, blocks, programs, rank = 4, 3, 5, 8, 1
    total = world * columns * blocks
    seen = []
    for index in range(total):
        turn = index % world + index // programs
        rest = index // world
        seen.append(((rank + 1 + turn) % world, rest % columns, rest // columns))
    every = itertools.product(range(world), range(columns), range(blocks))
    assert sorted(seen) == sorted(every)
    mine = [place[0] for index, place in enumerate(seen) if index % programs == 0]
    assert len(set(mine[:world])) == world


def test_the_digest_differs_where_ranks_would_not_understand_each_other() -> None:
    split = uc.HeadSplit.of_counts([2, 2])
    from ulysses_comm.wire import plan_wire

    def digest(direction: Any, dtype: torch.dtype, dim: int, splits: tuple[int, ...]) -> int:
        return agreed(Exchange(direction, plan_wire((dtype,), (dim,), (split,)), splits)).digest

    digests = {
        digest("heads", BF16, 8, (2, 2)),
        digest("seqlen", BF16, 8, (2, 2)),
        digest("heads", torch.float16, 8, (2, 2)),
        digest("heads", BF16, 4, (2, 2)),
        digest("heads", BF16, 8, (1, 3)),
    }
    assert len(digests) == 5
    assert all(0 <= value < 1 << 23 for value in digests)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_compile_for_hopper_with_wide_accesses_and_system_scope() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ulysses_comm.kernels import push, signals

    def ptx(kernel: Any, constants: dict[str, object], warps: int) -> str:
        pointers = {"table", "bases", "pads", "pad", "words", "report", "addresses"}
        names = [parameter.name for parameter in kernel.params]
        kinds = {
            name: "constexpr"
            if name in constants
            else "*i64"
            if name in pointers
            else "i64"
            if name.startswith("source") or name in ("own", "others", "timeout", "offset", "base")
            else "i32"
            for name in names
        }
        source = ASTSource(kernel, signature=kinds, constexprs=constants, attrs={})
        built = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}
        )
        return str(built.asm["ptx"])

    move = {"WORLD": 2, "INPUTS": 3, "WORD": 8, "VEC": 2, "ROWS": 16, "PIECE": 64}
    text = ptx(push.push_kernel, {**move, "ON_GPU": True}, 8)
    assert text.count("st.global.v2.b64") == 4
    assert text.count("ld.global.v2.b64") == 4
    assert "atom.global.sys.release.exch.b64" in text
    assert "atom.global.sys.acq_rel.add.u64" in text
    assert "ld.global.sys.acquire.b64" in text
    assert "trap;" in text
    assert ".local" not in text
    assert ptx(push.pack_kernel, move, 8).count("st.global.v2.b64") == 4
    ring = {"WORLD": 2, "RING": 2, "ON_GPU": True}
    assert "sys.acquire" in ptx(signals.begin_kernel, ring, 1)
    assert "sys.acquire" in ptx(signals.await_kernel, ring, 1)
    begins, opens = (ptx(k, ring, 1) for k in (signals.begin_kernel, signals.open_send_kernel))
    assert opens.count("ld.global.sys.acquire") == begins.count("ld.global.sys.acquire") > 0
    assert opens.count("st.global.b64") == begins.count("st.global.b64") + 2  # the addresses
    assert ".local" not in opens
    assert "sys.release" in ptx(signals.packed_kernel, {"WORLD": 2}, 1)
    alone = {"WORLD": 2, "ON_GPU": True}
    for kernel in (signals.open_kernel, signals.close_kernel):
        text = ptx(kernel, alone, 1)
        assert text.index("atom.global.sys.release.exch.b64") < text.index("ld.global.sys.acquire")
        assert ".local" not in text
    assert "sys.release" in ptx(signals.done_kernel, {"WORLD": 2, "RING": 2}, 1)
