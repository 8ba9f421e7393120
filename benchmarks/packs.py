"""The packs that are timed: layouts, their inputs, and every way to fill a send buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import Candidate
from ulysses_comm import as_send_buffer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CHECKED = "bits equal permute and concatenate, output poisoned before; in place by address"
PLAIN_COPY = "a plain copy that reads and writes as many bytes, same run"


@dataclasses.dataclass(frozen=True)
class Layout:
    """One pack: `tokens` of this rank, heads per rank and dtype of each input.

    `sources` says where the inputs lie: "separate" tensors, "fused" slices of one projection's
    output, or "heads first" in memory.
    """

    tokens: int
    world_size: int
    heads: tuple[int, ...] = (3, 3, 3)
    dtypes: tuple[torch.dtype, ...] = (BF16, BF16, BF16)
    head_dim: int = 128
    sources: str = "separate"

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.dtypes[0]
        for other in self.dtypes[1:]:
            dtype = torch.promote_types(dtype, other)
        return dtype

    @property
    def name(self) -> str:
        heads = "+".join(map(str, self.heads))
        where = "" if self.sources == "separate" else f", {self.sources}"
        return f"{self.tokens} tokens, W {self.world_size}, {heads} heads{where}"

    @property
    def dtype_name(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        return names[0] if len(set(names)) == 1 else "+".join(names)

    @property
    def shape(self) -> list[int]:
        return [self.tokens, self.world_size, sum(self.heads), self.head_dim]

    @property
    def nbytes(self) -> int:
        """Bytes that a pack reads plus those that it writes."""
        row = self.tokens * self.world_size * self.head_dim
        pairs = zip(self.heads, self.dtypes, strict=True)
        return sum(row * heads * (dtype.itemsize + self.dtype.itemsize) for heads, dtype in pairs)

    def inputs(self, device: torch.device) -> list[torch.Tensor]:
        """Head shards `[S, W, H_i, D]` of random inputs, lying as `sources` says."""
        widths = [self.world_size * heads for heads in self.heads]
        if self.sources == "fused":
            shape = (self.tokens, sum(widths), self.head_dim)
            whole = torch.randn(shape, device=device).to(self.dtypes[0])
            tensors = list(whole.split(widths, dim=1))
        elif self.sources == "heads first":
            tensors = [
                torch.randn((width, self.tokens, self.head_dim), device=device).to(dtype)
                for width, dtype in zip(widths, self.dtypes, strict=True)
            ]
            tensors = [tensor.transpose(0, 1) for tensor in tensors]
        else:
            tensors = [
                torch.randn((self.tokens, width, self.head_dim), device=device).to(dtype)
                for width, dtype in zip(widths, self.dtypes, strict=True)
            ]
        pairs = zip(tensors, self.heads, strict=True)
        return [tensor.unflatten(1, (self.world_size, heads)) for tensor, heads in pairs]


class Pack:
    """The inputs of a layout, a send buffer kept over calls, and the ways to fill one."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.inputs = layout.inputs(device)
        self.send = self.empty()
        self.views = self.split(self.send)
        self.expected = self.permute_and_concatenate()

    def empty(self) -> torch.Tensor:
        tokens, world_size, heads, head_dim = self.layout.shape
        shape = (world_size, tokens, heads, head_dim)
        return torch.empty(shape, dtype=self.layout.dtype, device=self.device)

    def split(self, send: torch.Tensor) -> list[torch.Tensor]:
        return list(send.transpose(0, 1).split(list(self.layout.heads), dim=2))

    def poison(self) -> None:
        self.send.view(torch.uint8).fill_(0xA5)

    def permute_and_concatenate(self, out: torch.Tensor | None = None) -> torch.Tensor:
        permuted = [shard.permute(1, 0, 2, 3).contiguous() for shard in self.inputs]
        return torch.cat(permuted, dim=2, out=out)

    def candidate(self, name: str, run: Callable[[], torch.Tensor]) -> Candidate:
        return Candidate(name, run, harness.expect_bits(self.expected), self.poison)

    def kept(self, copy: Callable[..., None], **options: Any) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            copy(self.views, self.inputs, **options)
            return self.send

        return run

    def fresh(self, copy: Callable[..., None]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            send = self.empty()
            copy(self.split(send), self.inputs)
            return send

        return run

    def in_place(self) -> Candidate:
        """What head shards that tile a send buffer cost: finding that out."""

        def check(send: torch.Tensor | None) -> None:
            assert send is not None, "the views were not recognised"
            assert send.data_ptr() == self.send.data_ptr(), "the buffer was copied"

        return Candidate(
            "in place", lambda: as_send_buffer(self.views, self.layout.world_size), check
        )

    def plain_copy(self) -> Candidate:
        """The floor: one contiguous copy of as many bytes."""
        half = self.layout.nbytes // 4
        source = torch.randint(-9999, 9999, (half,), dtype=torch.int16, device=self.device)
        target = torch.empty_like(source)
        return Candidate("plain copy", lambda: target.copy_(source), harness.expect_bits(source))
