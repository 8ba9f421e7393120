"""Cases of the hyper-connections' Triton kernels: on a GPU, or all in Triton's interpreter.

    python -m tests.magi2.mhc_cases cuda

Each case is a function of a device that raises if a result is wrong.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import torch

from magi2 import presets
from magi2.initialise import random_weight
from magi2.modules.mhc import HyperConnections
from magi2.ops.fused_maps import ROW_SUMS, sinkhorn_triton, stream_maps_triton
from magi2.ops.fused_streams import (
    hyper_connect_triton,
    mix_streams_triton,
    stream_logits_triton,
)
from magi2.ops.stream_maps import MapWeights, split_logits, stream_logits_torch
from magi2.ops.stream_mix import hyper_connect_torch, mix_streams_torch
from magi2.ops.stream_tiles import LogitParts, LogitsTile, MapsTile, MixTile
from magi2.options import Options
from tests.magi2.triton_cases import Case, error, main

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES: dict[str, Case] = {}
EPS = 1e-12
# The logits' norm of the difference to float64: float32 sums of up to 12288 numbers.
LOGITS_ERROR = 2e-6
NAN, INF = float("nan"), float("inf")


def case(function: Case) -> Case:
    """Add a case under its name."""
    CASES[function.__name__] = function
    return function


def left(a, b, c, d):
    return ((a + b) + c) + d


def interleaved(a, b, c, d):
    return (a + c) + (b + d)


def pairwise(a, b, c, d):
    return (a + b) + (c + d)


def map_tiles(device: str) -> list[MapsTile]:
    """Ways to cut and divide, of which no bit depends; one that the interpreter is done with soon.

    The interpreter never shares reciprocals: it rounds fused multiply-adds twice.
    """
    if device == "cpu":
        return [MapsTile(tokens=1024)]
    return [MapsTile(), MapsTile(tokens=64, num_warps=2), MapsTile(fast=True)]


def iterate(weights: torch.Tensor, iterations: int, row_sum=left) -> torch.Tensor:
    """Sinkhorn iterations with sums written out, on a CPU, whose division is an IEEE one."""
    weights = weights.cpu()
    for _ in range(iterations):
        weights = weights / (left(*weights.unbind(-2))[..., None, :] + EPS)
        weights = weights / (row_sum(*weights.unbind(-1))[..., None] + EPS)
    return weights


def exponential(x: torch.Tensor) -> torch.Tensor:
    """What kernels on x's device call: numpy's under the interpreter, the library's on a GPU."""
    return torch.from_numpy(np.exp(x.numpy())) if x.device.type == "cpu" else torch.exp(x)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, wherever both lie, and NaN in the same places."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan())
    different = (actual != expected) & ~expected.isnan()
    assert not different.any(), f"{int(different.sum())} of {actual.numel()} differ"


def special_weights() -> torch.Tensor:
    """Matrices of numbers that roundings, zeros and subnormal numbers make awkward."""
    ones = torch.full((4, 4), 2.0**-24)
    ones[:, 0] = 1.0
    zeros = torch.zeros(4, 4)
    subnormal = torch.full((4, 4), 1e-40)
    subnormal[1] = 0.5
    nan = torch.rand(4, 4)
    nan[2, 1] = NAN
    infinite = torch.rand(4, 4)
    infinite[3, 0] = INF
    return torch.stack([ones, ones.t(), zeros, subnormal, nan, infinite, torch.rand(4, 4) * 1e30])


def uneven_weights(tokens: int) -> torch.Tensor:
    """Positive matrices, half of them tiny."""
    weights = torch.rand(tokens, 4, 4) ** 4
    weights[: tokens // 2] = weights[: tokens // 2].exp() * 1e-6
    return weights


@case
def iterations_have_the_bits_of_left_folds(device: str) -> None:
    for tokens, iterations, tile in product((1, 65, 3702), (0, 1, 20), map_tiles(device)):
        weights = uneven_weights(tokens)
        given = weights.to(device)
        mine = sinkhorn_triton(given, iterations, EPS, exponentiate=False, tile=tile)
        assert_same(mine, iterate(weights, iterations))
    assert not torch.equal(mine.cpu(), iterate(weights, 20, pairwise))
    assert not torch.equal(mine.cpu(), iterate(weights, 20, interleaved))


@case
def iterations_have_the_bits_of_interleaved_row_sums_if_asked(device: str) -> None:
    weights = torch.rand(200, 4, 4)
    for tile in map_tiles(device):
        mine = sinkhorn_triton(
            weights.to(device), 20, EPS, exponentiate=False, row_sums="interleaved", tile=tile
        )
        assert_same(mine, iterate(weights, 20, interleaved))


@case
def special_numbers_stay_in_their_token(device: str) -> None:
    special = special_weights()
    weights = torch.rand(2 * len(special), 4, 4)
    weights[::2] = special
    for tile, iterations in product(map_tiles(device), (1, 20)):
        mine = sinkhorn_triton(weights.to(device), iterations, EPS, exponentiate=False, tile=tile)
        assert_same(mine, iterate(weights, iterations))
        assert mine[1::2].isfinite().all()


@case
def logits_become_the_matrices_of_torch(device: str) -> None:
    # At most 80 apart: on a GPU the kernels have zero where torch has a subnormal exponential.
    for spread, dtype in product((0.01, 1.0, 20.0), (FP32, BF16, FP16)):
        logits = torch.randn(37, 4, 4).clamp(-2, 2) * spread
        logits[3, 1, 2], logits[5, 0, 0], logits[7], logits[9, 2] = NAN, INF, -INF, -INF
        logits[11, 0] = -500.0  # the exponential is zero
        wide = torch.full((37, 5, 4, 2), NAN, device=device)
        given = wide[:, 1:, :, 1].copy_(logits)
        weights = exponential(given - given.amax(dim=(-2, -1), keepdim=True))
        for tile in map_tiles(device):
            mine = sinkhorn_triton(given, 20, EPS, out_dtype=dtype, tile=tile)
            assert_same(mine, iterate(weights, 20).to(dtype))


def map_weights(channels: int, groups: int, device: str) -> MapWeights:
    width = 4 * channels
    shapes = ((4,), (4,), (4, 4))
    return MapWeights(
        norm=torch.randn(groups, width).to(device) * 0.2,
        phi=torch.randn(width, 24).to(device) * width**-0.5,
        alphas=[torch.rand(1).to(device) + 0.5 for _ in shapes],
        biases=[torch.randn(shape).to(device) for shape in shapes],
        norm_eps=1e-6,
    )


@case
def maps_have_the_bits_of_torch_but_for_the_exponential(device: str) -> None:
    weights, scale = map_weights(8, 1, device), 0.3
    wide = torch.randn(300, 30).to(device) * 4
    logits = wide[:, 2:26]  # strided
    pre, post, res = (
        alpha * scale * raw + bias
        for alpha, raw, bias in zip(
            weights.alphas, split_logits(logits, 4), weights.biases, strict=True
        )
    )
    pre, post = (torch.div(1.0, 1.0 + exponential(-z).cpu()) for z in (pre, post))
    res = iterate(exponential(res - res.amax(dim=(-2, -1), keepdim=True)), 20)
    for dtype, tile in product((FP32, BF16, FP16), map_tiles(device)):
        maps = stream_maps_triton(
            logits, weights, dtype, scale=scale, iterations=20, eps=EPS, tile=tile
        )
        for mine, expected in zip(maps, (pre, 2 * post, res), strict=True):
            assert_same(mine, expected.to(dtype))


def streams_of(tokens: int, channels: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Streams, a branch's output, post and res."""
    shapes = ((tokens, 4, channels), (tokens, channels), (tokens, 4), (tokens, 4, 4))
    return [torch.randn(shape).to(dtype).to(device) for shape in shapes]


@case
def mixing_and_connecting_have_the_bits_of_torch(device: str) -> None:
    for tokens, channels in ((0, 8), (1, 1), (3, 70)):
        for dtype, tile in product((BF16, FP16, FP32), (MixTile(), MixTile(tokens=2, channels=32))):
            x, y, post, res = streams_of(tokens, channels, dtype, device)
            assert_same(mix_streams_triton(x, post, tile), mix_streams_torch(x, post))
            mine = hyper_connect_triton(x, y, post, res, tile)
            assert_same(mine, hyper_connect_torch(x, y, post, res))
    x, y, post, res = streams_of(5, 24, BF16, device)
    x[1, 2, 3], y[2, 4], x[3, 0, 0] = NAN, INF, -INF
    wider = torch.zeros(5, 6, 24, dtype=BF16, device=device)
    wider[:, 1:5] = x
    mine = hyper_connect_triton(wider[:, 1:5], y.t().contiguous().t(), post, res)
    assert_same(mine, hyper_connect_torch(x, y, post, res))
    assert_same(mix_streams_triton(wider[:, 1:5], post), mix_streams_torch(x, post))


SMALL = LogitsTile(tokens=16, depth=16, parts=2)


def logits_of(parts: LogitParts) -> torch.Tensor:
    total = parts.parts.sum(0).t()
    mean = total[:, 24:] / parts.width
    return total[:, :24] * torch.rsqrt(mean + parts.eps)


def exact_logits(x: torch.Tensor, weights: MapWeights, sizes: tuple[int, ...]) -> torch.Tensor:
    wide = x.flatten(1).double()
    rows = torch.tensor([g for g, n in enumerate(sizes) for _ in range(n)], device=x.device)
    norm = weights.norm.double()[rows if len(weights.norm) > 1 else 0]
    scaled = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + weights.norm_eps)
    return (scaled * (1 + norm)) @ weights.phi.double()


@case
def logits_have_float32_accuracy(device: str) -> None:
    for sizes, channels in (
        ((37, 0, 0), 40),
        ((0, 37, 0), 16),
        ((25, 9, 3), 72),
        ((0, 0, 1), 8),
        ((0, 0, 0), 8),
    ):
        for dtype, groups in ((BF16, 3), (FP16, 1), (FP32, 3)):
            weights = map_weights(channels, groups, device)
            x = (torch.randn(sum(sizes), 4, channels) * 3).to(dtype).to(device)
            parts = stream_logits_triton(x, weights, sizes, SMALL)
            if x.numel():
                mine, exact = logits_of(parts), exact_logits(x, weights, sizes)
                plain = stream_logits_torch(x, weights, sizes)
                assert error(mine, exact) < max(LOGITS_ERROR, 2 * error(plain, exact))


@case
def bits_of_logits_depend_on_no_other_token(device: str) -> None:
    weights = map_weights(40, 3, device)
    x = torch.randn(50, 4, 40).to(BF16).to(device)
    parts = stream_logits_triton(x, weights, (20, 25, 5), SMALL).parts
    fewer = stream_logits_triton(x[3:47], weights, (17, 25, 2), SMALL).parts
    if device == "cpu":
        # The interpreter's products are numpy's, which round by where a row stands.
        torch.testing.assert_close(fewer, parts[:, :, 3:47], rtol=1e-5, atol=1e-6)
    else:
        assert_same(fewer, parts[:, :, 3:47])
    x[30, 2, 7] = NAN
    broken = stream_logits_triton(x, weights, (20, 25, 5), SMALL).parts
    assert broken[:, :, 30].isnan().any(0).all()
    broken[:, :, 30] = parts[:, :, 30]
    assert_same(broken, parts)


def hyper_connections(options: Options, device: str) -> HyperConnections:
    module = HyperConnections(presets.tiny_uneven(), 3, device, options)
    for name, weight in module.state_dict().items():
        weight.copy_(random_weight(name, tuple(weight.shape), 0))
    return module


@case
def modules_run_the_kernels_when_told_to(device: str) -> None:
    config, sizes = presets.tiny_uneven(), (7, 0, 4)
    mine, plain = (hyper_connections(Options(mhc_backend=b), device) for b in ("triton", "torch"))
    for dtype, bound in ((FP32, 3e-6), (BF16, 5e-3)):
        x = torch.randn(11, 4, config.hidden_size).to(dtype).to(device)
        with torch.no_grad():
            assert mine.explain("attn", x) == "triton: asked for"
            assert plain.explain("attn", x) == "torch: asked for"
            results = [m.connect("attn", x, lambda u: u.sin(), sizes) for m in (mine, plain)]
        assert results[0].dtype == dtype
        assert error(*results) < bound


@case
def a_compiler_takes_the_hyper_connections_whole(device: str) -> None:
    options = Options(mhc_backend="triton", sinkhorn_row_sums="interleaved")
    module = hyper_connections(options, device)

    def connect(x: torch.Tensor, first: int) -> torch.Tensor:
        sizes = (first, x.shape[0] - first, 0)
        return module.connect("mlp", x, lambda u: u * 2, sizes)

    for dynamic in (False, True):
        compiled = torch.compile(connect, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for tokens in (9, 12) if dynamic else (9,):
            x = torch.randn(tokens, 4, presets.tiny_uneven().hidden_size).to(device)
            for dtype in (FP32, BF16):
                with torch.no_grad():
                    assert_same(compiled(x.to(dtype), 5), connect(x.to(dtype), 5))
        torch._dynamo.reset()


@case
def rows_are_added_as_the_options_say(device: str) -> None:
    sizes, res = (30, 0, 20), {}
    x = torch.randn(50, 4, presets.tiny_uneven().hidden_size).to(device)
    for backend, row_sums in product(("triton", "torch"), ROW_SUMS):
        options = Options(mhc_backend=backend, sinkhorn_row_sums=row_sums)
        module = hyper_connections(options, device)
        with torch.no_grad():
            res[backend, row_sums] = module.maps("mlp", x, sizes).res
    for row_sums in ROW_SUMS:
        module = hyper_connections(Options(mhc_backend="triton"), device)
        weights, settings = module._map_weights("mlp"), {"iterations": 20, "eps": EPS}
        with torch.no_grad():
            parts = stream_logits_triton(x, weights, sizes)
            *_, expected = stream_maps_triton(
                parts, weights, FP32, scale=module.scale, row_sums=row_sums, **settings
            )
        assert_same(res["triton", row_sums], expected)
    assert not torch.equal(res["triton", "left"], res["triton", "interleaved"])
    assert_same(res["torch", "left"], res["torch", "interleaved"])


@case
def maps_take_two_launches_and_the_streams_one_each(device: str) -> None:
    if device != "cpu":
        return  # counted by the profiler, see the tests
    from triton.runtime.interpreter import InterpretedFunction

    module = hyper_connections(Options(mhc_backend="triton"), device)
    x = torch.randn(3, 4, presets.tiny_uneven().hidden_size)
    launched: list[str] = []
    before = InterpretedFunction.run

    def counted(self, *args, **kwargs):
        launched.append(self.fn.__name__)
        return before(self, *args, **kwargs)

    InterpretedFunction.run = counted
    with torch.no_grad():
        module.connect("attn", x, lambda u: u, (3, 0, 0))
    InterpretedFunction.run = before
    assert launched == [
        "stream_logits_kernel",
        "stream_maps_kernel",
        "mix_streams_kernel",
        "hyper_connect_kernel",
    ]


if __name__ == "__main__":
    main(CASES)
