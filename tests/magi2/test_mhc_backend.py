"""Which implementation of the hyper-connections runs, and what the plain form's bits are."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from magi2 import presets
from magi2.modules.block import TransformerLayer
from magi2.modules.mhc import HyperConnections
from magi2.ops import backend, fused_streams
from magi2.ops.fused_maps import sinkhorn_triton, stream_maps_triton
from magi2.ops.sinkhorn import sinkhorn_torch
from magi2.ops.stream_backend import choose_stream_backend
from magi2.ops.stream_maps import stream_logits_torch
from magi2.ops.stream_mix import hyper_connect_torch, mix_streams_torch
from magi2.options import Options
from magi2.topology import Topology
from tests.magi2.mhc_cases import (
    BF16,
    EPS,
    FP16,
    FP32,
    LOGITS_ERROR,
    assert_same,
    error,
    exact_logits,
    hyper_connections,
    iterate,
    map_weights,
    pairwise,
    special_weights,
    streams_of,
    uneven_weights,
)
from tests.magi2.test_moe_backend import Device
from ulysses_comm.hardware import Choice

LONG = pytest.mark.long


class Streams:
    """What the choice looks at, on a device that this machine may lack."""

    def __init__(self, kind, dtype=BF16, streams=4, token_stride=32, requires_grad=False):
        self.device, self.dtype, self.requires_grad = Device(kind), dtype, requires_grad
        self.shape, self.strides = (3, streams, 8), (token_stride, token_stride // 4, 1)

    def stride(self, dim=None):
        return self.strides if dim is None else self.strides[dim]

    def numel(self):
        return 1


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(backend, "_missing_triton", lambda: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["cpu", "musa"])
def test_auto_takes_torch_until_the_kernels_are_measured_to_be_faster(kind):
    choice = choose_stream_backend("auto", Streams(kind), [])
    assert choice == Choice("torch", f"the kernels were not measured to be faster on {kind}")
    assert choose_stream_backend("torch", Streams(kind), []) == Choice("torch", "asked for")


@pytest.mark.usefixtures("with_triton")
def test_auto_takes_triton_where_it_was_and_says_why_not_otherwise():
    choice = choose_stream_backend("auto", Streams("cuda"), [])
    assert choice == Choice("triton", "measured to be faster on cuda")
    assert choose_stream_backend("auto", Streams("musa"), []).name == "torch"
    for x, others, reason in [
        (Streams("cuda", torch.float64), [], "x is torch.float64"),
        (Streams("cuda", streams=2), [], "x has 2 streams"),
        (Streams("cuda", token_stride=64), [], "x has strides"),
        (Streams("cuda"), [Streams("cuda", requires_grad=True)], "gradients are recorded"),
    ]:
        choice = choose_stream_backend("auto", x, others)
        assert choice.name == "torch"
        assert reason in choice.reason
        with pytest.raises(RuntimeError, match=f"mhc_backend='triton' cannot run: .*{reason}"):
            choose_stream_backend("triton", x, others)


@pytest.mark.usefixtures("with_triton")
def test_triton_asked_for_is_triton_or_an_error(monkeypatch):
    with pytest.raises(RuntimeError, match="mhc_backend='triton' cannot run: x is on cpu"):
        choose_stream_backend("triton", Streams("cpu"), [])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_stream_backend("triton", Streams("cpu"), []).name == "triton"

    def broken(*args):
        raise RuntimeError("the kernel is broken")

    monkeypatch.setattr(fused_streams, "hyper_connect_triton", broken)
    with torch.no_grad(), pytest.raises(RuntimeError, match="the kernel is broken"):
        hyper_connections(Options(mhc_backend="triton"), "cpu").hyper_connect(
            *streams_of(3, 8, BF16, "cpu")
        )


def test_names_are_checked_and_reach_the_layers():
    with pytest.raises(ValueError, match="mhc_backend='cutlass': expected one of"):
        Options(mhc_backend="cutlass")
    with pytest.raises(ValueError, match="mhc_backend='cutlass': expected one of"):
        choose_stream_backend("cutlass", Streams("cpu"), [])
    with pytest.raises(ValueError, match="logits_by_stream=1: expected True, False or None"):
        Options(logits_by_stream=1)
    with pytest.raises(ValueError, match="sinkhorn_row_sums='right': expected one of"):
        Options(sinkhorn_row_sums="right")
    options = Options(mhc_backend="triton", logits_by_stream=True, sinkhorn_row_sums="interleaved")
    layer = TransformerLayer(presets.tiny_uneven(), options, Topology(), 1, "cpu")
    assert (layer.mhc_backend, layer.logits_by_stream) == ("triton", True)
    assert layer.sinkhorn_row_sums == "interleaved"
    with torch.no_grad(), pytest.raises(RuntimeError, match="x is on cpu"):
        layer.explain("attn", torch.randn(2, 4, 96))
    plain = HyperConnections(presets.tiny_uneven(), 1, "cpu")
    assert (plain.mhc_backend, plain.logits_by_stream) == ("auto", False)
    assert plain.sinkhorn_row_sums == "left"


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("requested", ["auto", "torch"])
def test_on_a_cpu_the_bits_are_those_of_the_plain_form(requested, dtype):
    module = hyper_connections(Options(mhc_backend=requested), "cpu")
    x, y, *_ = (t.to(dtype) for t in streams_of(11, 96, FP32, "cpu"))
    sizes = (6, 0, 5)
    with torch.no_grad():
        fused = module.mhc_norm(x.float().flatten(1), sizes) @ module.mhc_phi_fused_mlp
        pre, post, res = fused.split([4, 4, 16], dim=1)
        pre = module.mhc_alpha_pre_mlp * module.scale * pre + module.mhc_bias_pre_mlp
        post = module.mhc_alpha_post_mlp * module.scale * post + module.mhc_bias_post_mlp
        res = module.mhc_alpha_res_mlp * module.scale * res.view(-1, 4, 4)
        res = sinkhorn_torch(res + module.mhc_bias_res_mlp, 20, EPS).to(dtype)
        pre, post = pre.sigmoid().to(dtype), (2 * post.sigmoid()).to(dtype)
        maps = module.maps("mlp", x, sizes)
        for mine, expected in zip((maps.pre, maps.post, maps.res), (pre, post, res), strict=True):
            assert torch.equal(mine, expected)
        inputs = []
        streams = module.connect("mlp", x, lambda u: inputs.append(u) or y, sizes)
        assert torch.equal(inputs[0], mix_streams_torch(x, pre))
        assert torch.equal(streams, hyper_connect_torch(x, y, post, res))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("sizes", [(37,), (37, 0, 0), (0, 37, 0), (25, 9, 3), (1,), (0,)])
def test_logits_by_stream_have_float32_accuracy(sizes, dtype):
    weights = map_weights(96, len(sizes), "cpu")
    x = (torch.randn(sum(sizes), 4, 96) * 3).to(dtype)
    mine, exact = stream_logits_torch(x, weights, sizes, True), exact_logits(x, weights, sizes)
    assert mine.dtype == FP32
    norms = (x.flatten(1).double().norm(dim=1) / 384**0.5)[:, None]
    groups = torch.tensor([g for g, n in enumerate(sizes) for _ in range(n)], dtype=torch.long)
    scaled = x.flatten(1).double().abs() / norms * (1 + weights.norm.double()).abs()[groups]
    # A float32 unit for the result, and one for each of the terms, in both directions.
    bound = 2.0**-23 * exact.abs() + 2 * 384 * 2.0**-24 * (scaled @ weights.phi.double().abs())
    assert ((mine.double() - exact).abs() <= bound).all()
    plain = stream_logits_torch(x, weights, sizes)
    assert torch.equal(plain, stream_logits_torch(x, weights, sizes, False))
    torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)


GROUPS = [(37,), (37, 0, 0), (0, 37, 0), (20, 0, 17), (25, 9, 3)]


@pytest.mark.parametrize("sizes", [*GROUPS, (1,), (0,)], ids=str)
def test_logits_by_stream_multiply_a_dense_operand_when_compiled(sizes, monkeypatch):
    weights, operands = map_weights(96, len(sizes), "cpu"), []
    x, product = torch.randn(sum(sizes), 4, 96).bfloat16(), torch.bmm

    def watched(left, right):
        operands.append(left)
        return product(left, right)

    monkeypatch.setattr(torch, "bmm", watched)
    strided = stream_logits_torch(x, weights, sizes, True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    dense = stream_logits_torch(x, weights, sizes, True)
    assert torch.equal(strided, dense)
    assert torch.equal(*operands)
    assert operands[0].stride() == (96, 384, 1)
    assert operands[1].is_contiguous()


# The options under which the bits of a compiled region are promised.
STRICT = {"deterministic": True, "emulate_precision_casts": True}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "sizes", [*(pytest.param(sizes, marks=LONG) for sizes in GROUPS[:-1]), GROUPS[-1]], ids=str
)
def test_inductor_stores_the_operand_of_logits_by_stream_dense(sizes):
    weights, x = map_weights(96, len(sizes), "cpu"), torch.randn(37, 4, 96).bfloat16()
    run = torch.compile(stream_logits_torch, fullgraph=True, dynamic=False, options=STRICT)
    logits, (code, *_) = run_and_get_code(run, x, weights, sizes, True)
    (operand,) = re.findall(r"extern_kernels\.bmm\((\w+), ", code)
    assert f"{operand} = empty_strided_cpu((4, 37, 96), (3552, 96, 1), torch.float32)" in code
    expected = stream_logits_torch(x, weights, sizes, True)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def any_length(matrices: torch.Tensor) -> torch.Tensor:
    """Marked: only the first dimension is dynamic."""
    torch._dynamo.mark_dynamic(matrices, 0)
    torch._dynamo.mark_static(matrices, 1)
    torch._dynamo.mark_static(matrices, 2)
    return matrices


def check_iterations_of_every_length(device: str) -> None:
    """One graph for all lengths, streams fixed, gives the bits of a graph for one length."""

    def iterate(logits):
        return sinkhorn_torch(logits, 20, EPS)

    one_graph = torch.compile(iterate, fullgraph=True, dynamic=True, options=STRICT)
    for tokens in (2, 65, 3702):
        logits = torch.randn(tokens, 4, 4, device=device) * 5
        everywhere = one_graph(any_length(logits.clone()))
        fixed = torch.compile(iterate, fullgraph=True, dynamic=False, options=STRICT)
        assert_same(everywhere, fixed(logits))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_iterations_have_the_same_bits_for_any_length():
    check_iterations_of_every_length("cpu")


def weights_with_special_ones(tokens: int) -> torch.Tensor:
    """Where there is room, every second matrix at the start is a special one."""
    weights, special = uneven_weights(tokens), special_weights()
    if tokens > 2 * len(special):
        weights[: 2 * len(special) : 2] = special
    return weights


@pytest.mark.parametrize("tokens", [1, 65, 3702])
@pytest.mark.parametrize("iterations", [0, 1, 20])
def test_plain_iterations_have_the_bits_of_left_folds(tokens, iterations):
    weights = weights_with_special_ones(tokens)
    mine = sinkhorn_torch(weights, iterations, EPS, exponentiate=False)
    assert_same(mine, iterate(weights, iterations))
    assert mine[1:14:2].isfinite().all()
    logits = torch.randn(tokens, 4, 4) * 5
    weights = torch.exp(logits - logits.amax(dim=(-2, -1), keepdim=True))
    mine = sinkhorn_torch(logits, iterations, EPS)
    assert_same(mine, iterate(weights, iterations))
    if iterations:
        assert not torch.equal(mine, iterate(weights, iterations, pairwise))


def loop(weights):
    """The iterations without the exponential: Inductor's is not eager torch's."""
    return sinkhorn_torch(weights, 20, EPS, exponentiate=False)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("tokens", [65, *(pytest.param(n, marks=LONG) for n in (1, 3702))])
def test_iterations_compiled_for_one_length_have_the_bits_of_left_folds(tokens):
    weights = weights_with_special_ones(tokens)
    fixed = torch.compile(loop, fullgraph=True, dynamic=False, options=STRICT)
    assert_same(fixed(weights), iterate(weights, 20))


@pytest.mark.usefixtures("fresh_compiler")
def test_iterations_compiled_for_any_length_have_the_bits_of_left_folds():
    one_graph = torch.compile(loop, fullgraph=True, dynamic=True, options=STRICT)
    for tokens in (2, 65, 3702):  # a length of one is a graph of its own
        weights = weights_with_special_ones(tokens)
        assert_same(one_graph(any_length(weights)), iterate(weights, 20))


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_iterations_have_the_same_bits_for_any_length_on_a_gpu():
    check_iterations_of_every_length("cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("tokens", [1031, 3702])
def test_logits_by_stream_with_what_makes_the_streams_compiled_on_a_gpu(tokens, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    x, y, post, res = streams_of(tokens, 3072, BF16, "cuda")
    sizes, weights = (tokens - 31, 9, 22), map_weights(3072, 3, "cuda")

    def connect_and_project(by_stream):
        streams = hyper_connect_torch(x, y, post, res)
        return streams, stream_logits_torch(streams, weights, sizes, by_stream)

    run = torch.compile(connect_and_project, fullgraph=True, dynamic=False, options=STRICT)
    streams, logits = run(True)
    strided_streams, strided_logits = run(False)
    assert_same(streams, hyper_connect_torch(x, y, post, res))
    assert_same(strided_streams, streams)
    exact = exact_logits(streams, weights, sizes)
    for result in (logits, strided_logits):
        assert error(result, exact) < LOGITS_ERROR


def test_float64_streams_are_mixed_in_float64():
    x, y, post, res = (t.double() for t in streams_of(5, 8, FP32, "cpu"))
    streams = torch.einsum("tij,tjc->tic", res, x) + post[:, :, None] * y[:, None]
    torch.testing.assert_close(
        hyper_connect_torch(x, y, post, res), streams, rtol=1e-14, atol=1e-14
    )
    mixed = torch.einsum("tj,tjc->tc", post, x)
    torch.testing.assert_close(mix_streams_torch(x, post), mixed, rtol=1e-14, atol=1e-14)


def test_plain_iterations_are_doubly_stochastic_and_have_gradients():
    weights = sinkhorn_torch(torch.randn(50, 4, 4) * 3, 20, EPS)
    torch.testing.assert_close(weights.sum(-1), torch.ones(50, 4), rtol=0, atol=1e-6)
    assert (weights.sum(-2) - 1).abs().median() < 1e-3
    logits = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sinkhorn_torch(x, 3, EPS), logits)


def test_kernels_refuse_what_does_not_fit():
    x, y, post, res = streams_of(5, 8, BF16, "cpu")
    weights, logits = map_weights(8, 3, "cpu"), torch.randn(5, 24)
    settings = {"scale": 1.0, "iterations": 20, "eps": EPS}
    narrow = dataclasses.replace(weights, phi=weights.phi[:, :20])
    for call, message in [
        (lambda: sinkhorn_triton(torch.randn(5, 4), 20, EPS), "expected .* float32"),
        (lambda: sinkhorn_triton(torch.randn(5, 3, 4), 20, EPS), "expected .* float32"),
        (lambda: sinkhorn_triton(res, 20, EPS), "torch.bfloat16.*expected float32"),
        (lambda: sinkhorn_triton(res.float(), 20, EPS, row_sums="right"), "row_sums='right'"),
        (lambda: stream_maps_triton(logits[:, :20], weights, BF16, **settings), "24.*float32"),
        (lambda: fused_streams.mix_streams_triton(x[:, :3], post), "expected .tokens, 4"),
        (lambda: fused_streams.mix_streams_triton(x.double(), post), "float64"),
        (lambda: fused_streams.mix_streams_triton(x[..., ::2], post), "strides"),
        (lambda: fused_streams.mix_streams_triton(x, post[1:]), "pre is .4, 4."),
        (lambda: fused_streams.hyper_connect_triton(x, y[:2], post, res), "y is .2, 8."),
        (lambda: fused_streams.hyper_connect_triton(x, y, res[..., 0][:2], res), "post is"),
        (lambda: fused_streams.hyper_connect_triton(x, y, post, res[:, 0]), "res is"),
        (lambda: fused_streams.stream_logits_triton(x, weights, (5,)), "expected a size"),
        (lambda: fused_streams.stream_logits_triton(x, weights, (5, 1, 1)), "expected a size"),
        (lambda: fused_streams.stream_logits_triton(x, narrow, (5, 0, 0)), "phi is .32, 20."),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
