"""The hyper-connections' kernels: every case in the interpreter, and with real kernels on a GPU."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from magi2.ops.fused_maps import sinkhorn_triton, stream_maps_triton
from magi2.ops.fused_streams import (
    hyper_connect_triton,
    mix_streams_triton,
    stream_logits_triton,
)
from magi2.ops.sinkhorn import sinkhorn_torch
from magi2.ops.stream_maps import stream_logits_torch, stream_maps_torch
from magi2.ops.stream_mix import hyper_connect_torch, mix_streams_torch
from magi2.ops.stream_tiles import LogitsTile, MapsTile
from tests.magi2.compiled_code import compile_for_hopper
from tests.magi2.mhc_cases import (
    BF16,
    CASES,
    EPS,
    FP16,
    FP32,
    LOGITS_ERROR,
    assert_same,
    exact_logits,
    logits_of,
    map_weights,
    streams_of,
)
from tests.magi2.triton_cases import error, run_interpreted

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton: pip install --no-deps triton==3.6.0 adds it to a CPU build of torch",
)


@needs_triton
def test_every_case_is_right_in_the_interpreter():
    *right, errors = run_interpreted("tests.magi2.mhc_cases")
    assert right == list(CASES), errors


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_case_is_right_on_a_gpu(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    CASES[name]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_interleaved_row_sums_are_those_of_eager_torch_on_a_gpu(dtype, fast):
    for tokens in (1, 3, 31, 32, 33, 127, 129, 1023, 4097, 65537):
        logits = torch.randn(tokens, 4, 4, device="cuda").clamp(-4, 4) * 10
        expected = sinkhorn_torch(logits, 20, EPS).to(dtype)
        mine = sinkhorn_triton(
            logits, 20, EPS, row_sums="interleaved", out_dtype=dtype, tile=MapsTile(fast=fast)
        )
        assert_same(mine, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [1.0, 5.0, 12.0])
def test_shared_reciprocals_give_the_bits_of_divisions_on_a_gpu(spread):
    logits = torch.randn(1 << 20, 4, 4, device="cuda") * spread
    results = [sinkhorn_triton(logits, 20, EPS, tile=MapsTile(fast=fast)) for fast in (False, True)]
    assert_same(*results)


@pytest.mark.gpu
def test_production_widths_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    x, y, post, res = streams_of(3702, 3072, BF16, "cuda")
    sizes, weights = (3500, 0, 202), map_weights(3072, 3, "cuda")
    streams = hyper_connect_torch(x, y, post, res)
    assert_same(hyper_connect_triton(x, y, post, res), streams)
    assert_same(mix_streams_triton(x, post), mix_streams_torch(x, post))
    exact, plain = exact_logits(x, weights, sizes), stream_logits_torch(x, weights, sizes)
    parts = stream_logits_triton(x, weights, sizes)
    assert error(logits_of(parts), exact) < max(LOGITS_ERROR, 2 * error(plain, exact))
    assert_same(stream_logits_triton(x, weights, sizes).parts, parts.parts)
    settings = {"scale": 0.01, "iterations": 20, "eps": EPS}
    maps = stream_maps_triton(parts, weights, FP32, **settings)
    expected = stream_maps_torch(exact.float(), weights, FP32, **settings)
    for mine, theirs in zip(maps, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.long
def test_offsets_beyond_two_to_the_31_on_a_gpu():
    tokens = 2**31 // (4 * 3072) + 50
    x, y, post, res = streams_of(1, 3072, BF16, "cuda")
    many = [t.expand(tokens, *t.shape[1:]).contiguous() for t in (x, y, post, res)]
    assert_same(hyper_connect_triton(*many)[-1:], hyper_connect_torch(x, y, post, res))
    assert_same(mix_streams_triton(many[0], many[2])[-1:], mix_streams_torch(x, post))
    weights = map_weights(3072, 1, "cuda")
    parts = stream_logits_triton(many[0], weights, ()).parts
    assert_same(parts[:, :, -1], stream_logits_triton(x, weights, ()).parts[:, :, 0])


@pytest.mark.gpu
def test_launches_on_a_gpu(monkeypatch):
    torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel too
    x, weights = streams_of(64, 256, BF16, "cuda")[0], map_weights(256, 1, "cuda")
    settings = {"scale": 0.01, "iterations": 20, "eps": EPS}

    def ours():
        return stream_maps_triton(stream_logits_triton(x, weights, ()), weights, BF16, **settings)

    def plain():
        return stream_maps_torch(stream_logits_torch(x, weights, ()), weights, BF16, **settings)

    counts = []
    for run in (ours, plain):
        run()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            run()
            torch.cuda.synchronize()
        names = [e.name for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        counts.append(len(names))
    assert counts[0] == 3  # the matrix in parts, the product, the maps
    assert counts[1] >= 40


@needs_triton
@pytest.mark.parametrize("fast", [False, True])
def test_maps_compile_to_true_divisions_without_contractions(fast):
    from magi2.kernels.stream_maps import stream_maps_kernel

    types = dict.fromkeys(("logits", "alpha_pre", "alpha_post", "alpha_res"), "*fp32")
    types |= dict.fromkeys(("bias_pre", "bias_post", "bias_res"), "*fp32")
    types |= dict.fromkeys(("pre", "post", "res"), "*bf16") | {"num_tokens": "i32"}
    types |= dict.fromkeys(("token_stride", "column_stride", "part_stride"), "i32")
    types["scale"] = "fp32"
    constants = {"WIDTH": 12288, "NORM_EPS": 1e-6, "EPS": EPS, "PARTS": 4, "BLOCK_T": 32}
    constants |= {"ITERATIONS": 20, "INTERLEAVED": False, "FAST": fast, "INTERPRETED": False}
    assembly = compile_for_hopper(stream_maps_kernel, types, constants, num_warps=1)
    # 32 of the loop, 8 sigmoids and the mean; the approximate ones are the shared reciprocals.
    assert len(re.findall(r"div\.rn\.f32", assembly)) == 41
    assert len(re.findall(r"div\.full\.f32", assembly)) == (8 if fast else 0)
    # 2 for each reciprocal and 4 for each quotient. The exponential's are another instruction.
    assert len(re.findall(r"fma\.rn\.f32", assembly)) == (8 * 2 + 32 * 4 if fast else 0)
    assert "st.local" not in assembly


@needs_triton
def test_mixing_compiles_without_contractions():
    from magi2.kernels.stream_mix import hyper_connect_kernel, mix_streams_kernel

    constants = {"C": 3072, "TOKENS": 1, "BLOCK_C": 1024, "INTERPRETED": False}
    types = dict.fromkeys(("x", "pre", "out"), "*bf16") | {"num_tokens": "i32"}
    types["token_stride"] = "i32"
    mix = compile_for_hopper(mix_streams_kernel, types, constants, num_warps=4)
    types = dict.fromkeys(("x", "y", "post", "res", "out"), "*bf16") | {"num_tokens": "i32"}
    types |= dict.fromkeys(("token_stride", "branch_stride"), "i32")
    connect = compile_for_hopper(hyper_connect_kernel, types, constants, num_warps=4)
    for assembly, weights, tiles in ((mix, 4, 4), (connect, 20, 5)):
        assert "fma.rn" not in assembly
        # 16 bytes a thread for every tile, and each weight once.
        assert len(re.findall(r"ld\.global\.v4", assembly)) == tiles
        assert len(re.findall(r"ld\.global", assembly)) == tiles + weights


@needs_triton
def test_projection_compiles_to_running_products():
    from magi2.kernels.stream_logits import stream_logits_kernel

    tile = LogitsTile()
    types = {"x": "*bf16", "token_stride": "i32"}
    types |= dict.fromkeys(("weight", "phi", "parts"), "*fp32") | {"split": "*bf16"}
    types |= dict.fromkeys(("num_tokens", "size_0", "size_1", "size_2"), "i32")
    constants = {"C": 3072, "N": 24, "CHANNELS": 384, "BLOCK_T": tile.tokens, "BLOCK_N": 32}
    constants |= {"BLOCK_K": tile.depth, "INTERPRETED": False}
    settings = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    assembly = compile_for_hopper(stream_logits_kernel, types, constants, **settings)
    assert "wgmma.mma_async" in assembly
    assert "st.local" not in assembly
