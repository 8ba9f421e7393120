"""Checks of the collectives around the exchanges, for ranks that mpirun started."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.bits import assert_same_bits, random_bits

BF16 = torch.bfloat16
DTYPES = [
    torch.float64, torch.float32, BF16, torch.float16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


def operand(dtype: torch.dtype, rank: int, shape: tuple[int, ...] = (11, 3)) -> torch.Tensor:
    """Small integers, so that sums are exact in every dtype, whatever their order."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(0, 3, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(values.double(), 2 * values.double()).to(dtype)
    return values.to(dtype)


def check_reductions(group: Any) -> None:
    rank, size = group.rank(), group.size()
    op = dist.ReduceOp
    for dtype in DTYPES:
        parts = [operand(dtype, r) for r in range(size)]
        stack = torch.stack([part.to(torch.complex128) for part in parts])
        if dtype == torch.bool:
            total = torch.stack(parts).any(0)
        else:
            total = stack.sum(0) if dtype.is_complex else stack.real.sum(0).to(dtype)
        total = total.to(dtype)

        tensor = parts[rank].clone()
        dist.all_reduce(tensor)
        assert_same_bits(tensor, total, f"all_reduce {dtype}")
        tensor = parts[rank].t().contiguous().t()  # the same values, not contiguous
        dist.all_reduce(tensor)
        assert_same_bits(tensor, total, f"all_reduce of a transposed {dtype}")

        tensor = parts[rank].clone()
        dist.reduce(tensor, dst=size - 1)
        expected = total if rank == size - 1 else parts[rank]
        assert_same_bits(tensor, expected, f"reduce {dtype}")

        if dtype.is_floating_point:
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, op.AVG)
            average = (stack.real.float().sum(0) / size).to(dtype)
            assert torch.allclose(tensor.float(), average.float(), rtol=1e-6), f"average {dtype}"
        if not dtype.is_complex:
            for reduce_op, fold in ((op.MAX, "amax"), (op.MIN, "amin"), (op.PRODUCT, "prod")):
                tensor = parts[rank].clone()
                dist.all_reduce(tensor, reduce_op)
                expected = getattr(stack.real, fold)(0).to(dtype)
                assert_same_bits(tensor, expected, f"{fold} {dtype}")
    bits = [torch.tensor([r + 1, 12]) for r in range(size)]
    for reduce_op, fold in ((op.BAND, "and"), (op.BOR, "or"), (op.BXOR, "xor")):
        tensor = bits[rank].clone()
        dist.all_reduce(tensor, reduce_op)
        expected = bits[0]
        for other in bits[1:]:
            expected = getattr(torch, f"bitwise_{fold}")(expected, other)
        assert_same_bits(tensor, expected, fold)
    check_reduce_scatters(group)


def check_reduce_scatters(group: Any) -> None:
    rank, size = group.rank(), group.size()
    for dtype in (torch.float32, BF16, torch.int64):
        wholes = [operand(dtype, r, (size * 2, 3)) for r in range(size)]
        total = torch.stack([whole.double() for whole in wholes]).sum(0).to(dtype)
        expected = total.chunk(size)[rank]
        output = torch.empty_like(expected)
        dist.reduce_scatter_tensor(output, wholes[rank])
        assert_same_bits(output, expected, f"reduce_scatter_tensor {dtype}")
        output = torch.empty_like(expected)
        dist.reduce_scatter(output, list(wholes[rank].clone().chunk(size)))
        assert_same_bits(output, expected, f"reduce_scatter {dtype}")
        own = wholes[rank].clone()  # the output is a part of the input
        dist.reduce_scatter_tensor(own.chunk(size)[rank], own)
        assert_same_bits(own.chunk(size)[rank], expected, f"in place {dtype}")
    # Parts of other sizes, which gloo refuses.
    parts = [[operand(BF16, 7 * r + part, (part,)) for part in range(size)] for r in range(size)]
    output = torch.empty(rank, dtype=BF16)
    dist.reduce_scatter(output, parts[rank])
    total = torch.stack([parts[r][rank].double() for r in range(size)]).sum(0).to(BF16)
    assert_same_bits(output, total, "uneven reduce_scatter")


def check_sums_of_16_bits_round_once(group: Any) -> None:
    """256 + 1 is 256 in bfloat16: added one by one, ones would be lost."""
    tensor = torch.full((3,), 256.0 if group.rank() == 0 else 1.0, dtype=BF16)
    dist.all_reduce(tensor)
    want = torch.full((3,), 256.0 + group.size() - 1).to(BF16)
    assert_same_bits(tensor, want)
    assert group.size() < 3 or float(want[0]) != 256.0


def check_gathers_and_broadcasts(group: Any) -> None:
    rank, size = group.rank(), group.size()
    for dtype in DTYPES:
        parts = [random_bits((4, 3), dtype, r) for r in range(size)]
        output = torch.empty(size * 4, 3, dtype=dtype)
        dist.all_gather_into_tensor(output, parts[rank])
        assert_same_bits(output, torch.cat(parts), f"all_gather_into_tensor {dtype}")
        output = torch.empty(size * 4, 3, dtype=dtype)
        output.chunk(size)[rank].copy_(parts[rank])
        dist.all_gather_into_tensor(output, output.chunk(size)[rank])  # as FSDP does
        assert_same_bits(output, torch.cat(parts), f"all_gather in place {dtype}")
        gathered = [torch.empty(4, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(gathered, parts[rank])
        assert_same_bits(torch.cat(gathered), torch.cat(parts), f"all_gather {dtype}")
        for root in range(size):
            tensor = parts[rank].t().contiguous().t()
            dist.broadcast(tensor, root)
            assert_same_bits(tensor, parts[root], f"broadcast {dtype}")

            into = [torch.empty(4, 3, dtype=dtype) for _ in range(size)]
            dist.gather(parts[rank], into if rank == root else None, dst=root)
            if rank == root:
                assert_same_bits(torch.cat(into), torch.cat(parts), f"gather {dtype}")
            tensor = torch.empty(4, 3, dtype=dtype)
            dist.scatter(tensor, parts if rank == root else None, src=root)
            assert_same_bits(tensor, parts[rank], f"scatter {dtype}")
    own = torch.arange(size * 2.0)
    gathered = list(own.chunk(size))
    gathered[rank].fill_(rank)
    dist.all_gather(gathered, gathered[rank])  # the input is one of the outputs
    assert_same_bits(own, torch.arange(size).repeat_interleave(2).float())
    # Lists of any sizes, which gloo refuses.
    uneven = [torch.full((3 * r,), float(r)) for r in range(size)]
    gathered = [torch.empty(3 * r) for r in range(size)]
    dist.all_gather(gathered, uneven[rank])
    for r in range(size):
        assert_same_bits(gathered[r], uneven[r])
    sends = [[random_bits((source + 2 * target,), BF16, source) for target in range(size)]
             for source in range(size)]  # fmt: skip
    receives = [torch.empty(source + 2 * rank, dtype=BF16) for source in range(size)]
    dist.all_to_all(receives, sends[rank])
    for source in range(size):
        assert_same_bits(receives[source], sends[source][rank])
    if hasattr(dist, "gather_single"):
        into = torch.empty(size * 2) if rank == 0 else None
        dist.gather_single(torch.full((2,), float(rank)), into, dst=0)
        if rank == 0:
            assert into.tolist() == own.tolist()


def check_point_to_point(group: Any) -> None:
    rank, size = group.rank(), group.size()
    following, preceding = (rank + 1) % size, (rank - 1) % size
    for dtype in DTYPES:
        tensor = torch.empty(5, dtype=dtype)
        handles = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, random_bits((5,), dtype, rank), following),
                dist.P2POp(dist.irecv, tensor, preceding),
            ]
        )
        for handle in handles:
            handle.wait()
        assert_same_bits(tensor, random_bits((5,), dtype, preceding), str(dtype))
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            tensor = torch.empty(1)
            source = dist.recv(tensor)
            assert int(tensor) == source
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0)
    tags = (5, 3)
    if rank == 0:
        for tag in tags:
            dist.send(torch.tensor([tag]), 1, tag=tag)
    if rank == 1:
        for tag in reversed(tags):  # received in another order than sent
            tensor = torch.empty(1, dtype=torch.int64)
            dist.recv(tensor, 0, tag=tag)
            assert int(tensor) == tag
    dist.barrier()


def check_objects_and_coalescing(group: Any) -> None:
    rank, size = group.rank(), group.size()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert [entry["rank"] for entry in objects] == list(range(size))
    box = [f"from {rank}"]
    dist.broadcast_object_list(box, src=1)
    assert box == ["from 1"]
    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), 1, dtype=torch.int64)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    assert tensors[0].tolist() == [sum(range(size))] * 3
    assert tensors[1].tolist() == [[size, size]] * 2
