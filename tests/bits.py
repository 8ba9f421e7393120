"""Bits as integers: equality that sees NaN payloads, signed zeros and subnormals."""

from __future__ import annotations

import os

import torch

# Where `random_bits` puts its tensors: with "cuda" the exchange tests run on a GPU, all ranks on
# the same one.
TEST_DEVICE = os.environ.get("ULYSSES_COMM_TEST_DEVICE", "cpu")

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Bit patterns worth moving, per floating point dtype: zero, -0.0, 1, inf, -inf, a quiet NaN with a
# payload, a negative NaN with another one, the smallest and the largest subnormal (and a negative
# one), the smallest normal, the largest finite value and its negative.
SPECIAL_PATTERNS = {
    torch.float64: [
        0, 1 << 63, 0x3FF0000000000000, 0x7FF0000000000000, 0xFFF0000000000000,
        0x7FF8000000ABCDEF, 0xFFF8123456789ABC, 1, 0x000FFFFFFFFFFFFF, 0x8000000000000001,
        0x0010000000000000, 0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF,
    ],
    torch.float32: [
        0, 1 << 31, 0x3F800000, 0x7F800000, 0xFF800000, 0x7FC12345, 0xFFC54321, 1, 0x007FFFFF,
        0x80000001, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF,
    ],
    torch.bfloat16: [
        0, 1 << 15, 0x3F80, 0x7F80, 0xFF80, 0x7FC5, 0xFFDA, 1, 0x007F, 0x8001, 0x0080, 0x7F7F,
        0xFF7F,
    ],
    torch.float16: [
        0, 1 << 15, 0x3C00, 0x7C00, 0xFC00, 0x7E15, 0xFF2A, 1, 0x03FF, 0x8001, 0x0400, 0x7BFF,
        0xFBFF,
    ],
    torch.float8_e4m3fn: [0, 0x80, 0x38, 0x7F, 0xFF, 1, 0x07, 0x81, 0x08, 0x7E, 0xFE],
    torch.float8_e5m2: [0, 0x80, 0x3C, 0x7C, 0xFC, 0x7D, 0xFE, 1, 0x03, 0x81, 0x04, 0x7B, 0xFB],
}  # fmt: skip


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of every element as an integer, in a new contiguous tensor.

    Args:
        tensor: Any shape, strides and dtype, complex included.

    Returns:
        The shape of `tensor` (with a trailing 2 if complex), int16/32/64 or uint8.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(INTEGER_OF_SIZE[tensor.element_size()])


def long_axes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return (axis, stride) of the axes longer than 1: the strides that decide an address."""
    return [(axis, tensor.stride(axis)) for axis, size in enumerate(tensor.shape) if size > 1]


def assert_same_bits(
    actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor", *, strides: bool = False
) -> None:
    """Assert equal dtype, shape and bits, and equal strides too if asked for."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    if strides and actual.numel():
        assert long_axes(actual) == long_axes(expected), (
            f"{what}: strides {actual.stride()}, expected {expected.stride()}"
        )
    actual_bits, expected_bits = bits_of(actual), bits_of(expected)
    if torch.equal(actual_bits, expected_bits):
        return
    differs = actual_bits != expected_bits
    first = tuple(differs.nonzero()[0].tolist())
    raise AssertionError(
        f"{what}: {int(differs.sum())} of {differs.numel()} elements differ, the first at {first}: "
        f"bits {int(actual_bits[first]):#x}, expected {int(expected_bits[first]):#x}"
    )


def random_bits(shape: tuple[int, ...] | list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor whose bits are all random, so that every bit pattern can appear.

    Floating point tensors get every special pattern of their dtype too, at random places, as long
    as there is room; booleans are 0 or 1, as torch demands. On `TEST_DEVICE`.
    """
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.Size(shape).numel())
    size = dtype.itemsize
    if dtype == torch.bool:
        flags = torch.randint(0, 2, tuple(shape), generator=generator, dtype=torch.uint8)
        return flags.bool().to(TEST_DEVICE)
    raw = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8)
    tensor = raw.view(dtype)
    patterns = SPECIAL_PATTERNS.get(dtype, [])[:count]
    if patterns:
        # The integer views are signed from 16 bits up: fold the pattern into their range.
        limit = 1 << (8 * size)
        folded = [p - limit if size > 1 and p >= limit // 2 else p for p in patterns]
        places = torch.randperm(count, generator=generator)[: len(patterns)]
        integers = tensor.view(INTEGER_OF_SIZE[size])
        integers[places] = torch.tensor(folded, dtype=INTEGER_OF_SIZE[size])
    return tensor.view(tuple(shape)).to(TEST_DEVICE)


def quiet_nans(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with every NaN made quiet (its top mantissa bit set), payloads kept.

    A conversion between dtypes may quieten a signalling NaN or not, depending on the instruction
    that the compiler chose, so tests of promotion start from quiet ones.
    """
    quiet_bit = {torch.float16: 1 << 9, torch.bfloat16: 1 << 6, torch.float32: 1 << 22}
    bit = quiet_bit.get(tensor.dtype)
    if bit is None:
        return tensor
    integers = bits_of(tensor)
    return torch.where(tensor.isnan(), integers | bit, integers).view(tensor.dtype)
