"""Cases of the Triton kernels around the attention: on a GPU, or all in Triton's interpreter.

    python -m tests.magi2.head_cases cuda

Each case is a function of a device that raises if a result is wrong.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from magi2 import presets
from magi2.modules.attention import Attention
from magi2.ops.attention import sink_totals_torch, sink_weights_torch
from magi2.ops.attention_backends import attend_with_sinks
from magi2.ops.attention_heads import (
    HeadTile,
    gate_heads_torch,
    gate_heads_triton,
    rotated_heads_torch,
    send_buffer_views,
    store_heads_at_triton,
    store_heads_triton,
    weigh_heads_triton,
)
from magi2.ops.packed_sequences import PackedSequences
from magi2.options import Options
from magi2.topology import Topology
from tests.bits import assert_same_bits
from tests.magi2.packed import packed_pair
from tests.magi2.sharded import model_of
from tests.ranks import fill_empty_with_nan
from ulysses_comm import as_send_buffer
from ulysses_comm.simulate import simulate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES: dict[str, Callable[[str], None]] = {}

# Norm of the difference to float64: one rounding, or a few of float32.
FLOAT64_ERROR = {BF16: 2.5e-3, FP16: 3e-4, FP32: 3e-7}
# Share of 16-bit results that may be a neighbour, where float32 fell on the other side of a middle.
NEIGHBOURS = {BF16: 2e-3, FP16: 1e-2}
EPS = 1e-6


def case(function: Callable[[str], None]) -> Callable[[str], None]:
    """Add a case under its name."""
    CASES[function.__name__] = function
    return function


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def assert_neighbours(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits but for a few results that are the next number; float32: a few units."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype == FP32:
        torch.testing.assert_close(actual, expected, rtol=5e-6, atol=1e-6)
        return
    unit = 2.0**-7 if actual.dtype == BF16 else 2.0**-10
    torch.testing.assert_close(actual.float(), expected.float(), rtol=unit, atol=1e-6)
    assert actual.numel() == 0 or (actual != expected).float().mean() < NEIGHBOURS[actual.dtype]


def store_inputs(tokens, heads, kv_heads, dim, groups, dtype, device):
    """Arguments of `rotated_heads_torch`; with three groups one of them is empty."""
    columns = (heads + 2 * kv_heads) * dim
    wider = torch.randn(tokens, columns + 16).to(device, dtype)
    weights = [(torch.randn(groups, dim) * 0.2).to(device) for _ in range(2)]
    sizes = (tokens // 3, 0, tokens - tokens // 3)
    inverse = torch.randperm(tokens).to(device)
    rotary = torch.randn(tokens, 6 * (dim // 8)).to(device)
    return wider[:, :columns], *weights, sizes, inverse, rotary, heads, kv_heads, EPS


def stored(inputs, world_size, tile=None):
    """What the kernel stores, as (T, heads, D) views."""
    heads, kv_heads = inputs[6:8]
    send = store_heads_triton(*inputs, world_size, tile)
    views = send_buffer_views(send, heads, kv_heads)
    if world_size > 1:
        if inputs[0].shape[0]:
            assert as_send_buffer(views, world_size).data_ptr() == send.data_ptr()
        assert [view.shape[1] for view in views] == [world_size] * 3
        views = [view.flatten(1, 2) for view in views]
    return views


@case
def heads_are_stored_where_the_exchange_sends_them_from(device: str) -> None:
    for dtype, (tokens, heads, kv_heads, dim, groups, world_size, tile) in zip(
        (BF16, BF16, FP32, BF16, FP16, FP32, BF16),
        (
            (0, 4, 4, 16, 3, 2, HeadTile()),
            (1, 4, 2, 16, 1, 1, HeadTile()),
            (13, 8, 4, 24, 3, 4, HeadTile(tokens=4, heads=3)),
            (13, 8, 4, 24, 3, 4, HeadTile(tokens=4, heads=3)),
            (9, 2, 2, 128, 1, 2, HeadTile(tokens=2, heads=8)),
            (7, 3, 3, 8, 3, 1, HeadTile(tokens=8, heads=1)),
            (21, 6, 6, 40, 1, 3, HeadTile()),
        ),
        strict=True,
    ):
        inputs = store_inputs(tokens, heads, kv_heads, dim, groups, dtype, device)
        plain = rotated_heads_torch(*inputs)
        exact = rotated_heads_torch(inputs[0].float(), *inputs[1:])
        for index, mine in enumerate(stored(inputs, world_size, tile)):
            assert mine.shape == plain[index].shape
            if index == 2:
                assert_same_bits(mine, plain[index])
            elif tokens:
                assert error(mine, exact[index]) < FLOAT64_ERROR[dtype]
                assert_neighbours(mine, plain[index])


@case
def heads_have_the_plain_bits_where_the_sum_of_squares_is_exact(device: str) -> None:
    for dtype in (BF16, FP32):
        inputs = store_inputs(33, 4, 4, 32, 3, dtype, device)
        whole = torch.randint(-5, 6, inputs[0].shape, device=device).to(dtype)
        for mine, plain in zip(
            stored((whole, *inputs[1:]), 2), rotated_heads_torch(whole, *inputs[1:]), strict=True
        ):
            assert_same_bits(mine.contiguous(), plain)


@case
def heads_are_stored_at_addresses_with_the_same_bits(device: str) -> None:
    for dtype, (tokens, heads, kv_heads, dim, groups, world_size, tile) in zip(
        (BF16, BF16, FP32, FP16),
        (
            (0, 4, 4, 16, 3, 2, HeadTile()),
            (13, 8, 4, 24, 3, 4, HeadTile(tokens=4, heads=3)),
            (9, 6, 2, 20, 1, 2, None),
            (21, 3, 3, 6, 3, 3, HeadTile(tokens=8, heads=2)),
        ),
        strict=True,
    ):
        inputs = store_inputs(tokens, heads, kv_heads, dim, groups, dtype, device)
        send = store_heads_triton(*inputs, world_size, tile)
        # Memory of their own for each rank, some rows in, and a guard behind.
        parts = [torch.full((tokens + 5, *send.shape[2:]), 7).to(send) for _ in range(world_size)]
        places = torch.tensor([part[3:].data_ptr() for part in parts], device=device)
        store_heads_at_triton(*inputs, places, tile)
        for part, expected in zip(parts, send, strict=True):
            assert_same_bits(part[3 : 3 + tokens].contiguous(), expected.contiguous())
            assert bool((part[:3] == 7).all())
            assert bool((part[3 + tokens :] == 7).all())


@case
def a_nan_stays_in_its_head(device: str) -> None:
    inputs = store_inputs(11, 2, 2, 16, 1, BF16, device)
    inputs[0][4, 16 + 3] = torch.nan  # of the second query head
    q, k, v = stored(inputs, 1)
    token = int((inputs[4] == 4).nonzero())
    assert q[token, 1].isnan().all()
    q[token, 1] = 0
    assert not torch.cat([q, k, v], dim=1).isnan().any()


@case
def gates_read_what_was_received_as_it_lies(device: str) -> None:
    for tokens, world_size, local, dim in (
        (0, 2, 2, 8),
        (1, 1, 3, 16),
        (37, 4, 3, 24),
        (9, 2, 1, 128),
    ):
        for dtype in (BF16, FP16, FP32):
            shards = torch.randn(world_size, tokens, local, dim).to(device, dtype).transpose(0, 1)
            gate = (torch.randn(tokens, world_size * local) * 4).to(device, dtype)
            permutation = torch.randperm(tokens).to(device)
            tile = HeadTile(tokens=4, heads=3)
            for received in (shards, shards.flatten(1, 2), shards[:, :, :, : dim // 2]):
                mine = gate_heads_triton(received, permutation, gate, tile)
                assert_neighbours(mine, gate_heads_torch(received, permutation, gate))


@case
def sinks_take_their_part_in_one_pass(device: str) -> None:
    for tokens, heads, dim in ((0, 2, 8), (1, 1, 16), (13, 3, 24)):
        for dtype in (BF16, FP32) if tokens == 13 else (FP16,):
            attended = torch.randn(heads, tokens, dim).to(device, dtype).transpose(0, 1)
            lse = (torch.randn(heads, tokens) * 3).to(device).t()
            total = torch.randn(heads, device=device) * 3
            weight = sink_weights_torch(lse, total)
            expected = (attended.float() * weight.unsqueeze(-1)).to(dtype)
            out = torch.empty(tokens, heads, dim, dtype=dtype, device=device)
            weigh_heads_triton(attended, lse, total, out, HeadTile(tokens=4, heads=2))
            assert_neighbours(out, expected)
            inside = attended.contiguous()
            weigh_heads_triton(inside, lse, total, inside)
            assert_same_bits(inside, out)


@case
def special_sinks_take_all_or_nothing(device: str) -> None:
    attended = torch.randn(9, 6, 16, device=device)
    lse = torch.randn(9, 6, device=device)
    total = torch.tensor([-torch.inf, torch.inf, 3e38, -3e38, -0.0, 88.0], device=device)
    out = torch.empty_like(attended)
    weigh_heads_triton(attended, lse, total, out)
    assert_same_bits(out[:, [0, 3]].contiguous(), attended[:, [0, 3]].contiguous())
    assert not out[:, 1:3].any()
    expected = attended * sink_weights_torch(lse, total).unsqueeze(-1)
    torch.testing.assert_close(out, expected, rtol=5e-6, atol=1e-37)


def special_sums(device: str, num_sinks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-sum-exps x totals of sinks, finite and not, and the weights that the sinks leave."""
    inf, nan = torch.inf, torch.nan
    lse = torch.tensor([-inf, inf, nan, -0.0, 0.0, 1e-40, 0.5, 88.0, -104.0, 1e4, 3e38, -3e38])
    sinks = torch.tensor([-inf, inf, nan, -0.0, 1e-40, 1.5, 87.0, -103.0, 2e4, 2e38, -2e38])
    if num_sinks == 2:
        sinks = torch.cartesian_prod(sinks, torch.tensor([-inf, inf, -0.5])).t()
    total = sink_totals_torch(sinks.view(num_sinks, -1))
    difference = lse.double()[:, None] - total.double()
    gone = ~lse.isfinite()[:, None] | total.isnan()
    weight = difference.sigmoid().masked_fill(gone, 0).float()
    return lse[:, None].repeat(1, len(total)).to(device), total.to(device), weight.to(device)


@case
def special_log_sum_exps_leave_what_the_plain_form_leaves(device: str) -> None:
    for num_sinks in (1, 2):
        lse, total, weight = special_sums(device, num_sinks)
        attended = torch.randn(*lse.shape, 16, device=device)
        out = torch.empty_like(attended)
        weigh_heads_triton(attended, lse, total, out)
        assert_same_bits(out.isnan(), torch.zeros_like(out, dtype=torch.bool))
        expected = attended * weight.unsqueeze(-1)
        torch.testing.assert_close(out, expected, rtol=5e-6, atol=1e-37)
        plain = attended * sink_weights_torch(lse, total).unsqueeze(-1)
        torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-37)


@case
def attention_with_kernels_is_attention_without(device: str) -> None:
    packed = packed_pair(presets.tiny(FP32))
    attention = "cpu_flash" if device == "cpu" else "auto"
    for layout in (True, False):

        def step(group, backend, shards=layout):
            options = Options(
                qkv_backend=backend,
                attention_backend=attention,
                qkv_head_shards=shards,
                output_head_shards=shards,
            )
            model = model_of(presets.tiny(FP32), Topology.of_group(group), options).to(device)
            plan = model.plan(
                packed.coords.to(device), packed.modality.to(device), packed.cu_seqlens
            )
            torch.manual_seed(1)
            rows = torch.randn(plan.sequence.seqlen_local, 256).to(device)
            return model.block.layers[0].attention(rows, plan)

        with torch.no_grad():
            plain, mine = (
                simulate(2, functools.partial(step, backend=backend)).results
                for backend in ("torch", "triton")
            )
        for one, other in zip(mine, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            assert not torch.equal(one, other)  # kernels did run


@case
def a_compiler_takes_the_kernels_whole(device: str) -> None:
    config = presets.tiny(FP32)
    packed = packed_pair(config)
    model = model_of(config, Topology(), Options(qkv_backend="triton")).to(device)
    plan = model.plan(packed.coords.to(device), packed.modality.to(device), packed.cu_seqlens)
    attention = model.block.layers[0].attention
    rows = torch.randn(len(packed.x), config.hidden_size).to(device)
    torch._dynamo.reset()
    with torch.no_grad():
        options = {"backend": "aot_eager", "fullgraph": True, "dynamic": True}
        (q, k, v), gate = torch.compile(Attention.project, **options)(attention, rows, plan)
        expected, expected_gate = attention.project(rows, plan)
        for one, other in zip((q, k, v, gate), (*expected, expected_gate), strict=True):
            assert_same_bits(one.contiguous(), other.contiguous())
        received = torch.randn(len(packed.x), config.num_heads, config.head_dim).to(device)
        compiled = torch.compile(Attention.output, **options)(attention, received, gate, plan)
        assert_same_bits(compiled, attention.output(received, gate, plan))
    torch._dynamo.reset()


@case
def attention_weighs_by_the_kernel_where_it_is_told_to(device: str) -> None:
    q, k, v = torch.randn(40, 9, 32).to(device).split(3, dim=1)
    total, packed = torch.randn(3).to(device), PackedSequences((0, 17, 18, 40))
    results = [
        attend_with_sinks(q, k, v, packed, total, -1.0, "torch", weigh)
        for weigh in ("torch", "triton")
    ]
    torch.testing.assert_close(*results, rtol=5e-6, atol=1e-6)
    assert not torch.equal(*results)


def run_interpreted() -> list[str]:
    """Run every case in a process where Triton interprets; the names of those that came right."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.magi2.head_cases", "cpu"],
        cwd=Path(__file__).resolve().parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return [*done.stdout.splitlines(), done.stderr[-3000:]]


def main() -> None:
    torch.set_num_threads(1)
    # Of float32 products on a GPU nothing may be lost to TF32 in what they are compared with.
    torch.backends.cuda.matmul.allow_tf32 = False
    fill_empty_with_nan()
    for name, function in CASES.items():
        torch.manual_seed(0)
        function(sys.argv[1])
        print(name, flush=True)


if __name__ == "__main__":
    main()
