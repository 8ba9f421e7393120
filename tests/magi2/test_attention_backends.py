"""Which kernel attends, and that each gives what the plain form gives, sinks included."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from magi2 import presets
from magi2.cli.bench_step import bench_step
from magi2.initialise import initialise
from magi2.modules import sinks as sinks_module
from magi2.modules.sinks import SinkTotals
from magi2.ops import attention_backends, attention_kernels
from magi2.ops.attention import (
    apply_sinks_torch,
    packed_attention_torch,
    sink_totals_torch,
    sink_weights_torch,
)
from magi2.ops.attention_backends import attend_with_sinks, choose_attention
from magi2.ops.packed_sequences import PackedSequences
from magi2.options import Options
from magi2.timing.bench import keep_layers
from magi2.transformer import Magi2Transformer
from tests.bits import assert_same_bits
from tests.magi2.head_cases import special_sums
from tests.magi2.packed import packed_pair

BF16, FP32 = torch.bfloat16, torch.float32
ENDS = (0, 0, 37, 38, 38, 101)  # empty ones at the start and inside, one of a single token
# Norm of the difference over that of float64: two roundings, or float32 sums.
BOUND = {BF16: 5e-3, torch.float16: 6e-4, FP32: 2e-6}


def received(heads, kv_heads, dim, dtype=FP32, device="cpu", ends=ENDS, spread=1.0):
    """q, k and v as the exchange leaves them: slices of one buffer; and sinks."""
    torch.manual_seed(ends[-1])
    buffer = torch.randn(ends[-1], heads + 2 * kv_heads, dim) * spread
    q, k, v = buffer.to(device, dtype).split([heads, kv_heads, kv_heads], dim=1)
    return q, k, v, torch.randn(2, heads, device=device)


def oracle(q, k, v, sinks, ends, softcap=-1.0):
    """In float64, query by query's own sequence."""
    shared = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for start, end in PackedSequences(ends).spans:
        a, b, c = (x[start:end].double().transpose(0, 1) for x in (q, k, v))
        b, c = (x.repeat_interleave(shared, dim=0) for x in (b, c))
        scores = a @ b.transpose(1, 2) * q.shape[2] ** -0.5
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        logits = sinks.double().t()[:, None].expand(-1, end - start, -1)
        weights = torch.cat([scores, logits], dim=2).softmax(dim=2)[..., : end - start]
        out[start:end] = (weights @ c).transpose(0, 1)
    return out


def error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


def check(backend, q, k, v, sinks, ends=ENDS, softcap=-1.0):
    packed = PackedSequences(ends)
    out = attend_with_sinks(q, k, v, packed, sink_totals_torch(sinks), softcap, backend)
    assert out.dtype == q.dtype
    assert out.shape == q.shape
    assert out.is_contiguous()
    wrong = error(out, oracle(q, k, v, sinks, ends, softcap))
    bound = 1e-5 if (q.dtype, q.device.type) == (FP32, "cuda") else BOUND[q.dtype]
    assert wrong < bound, f"{backend}: {wrong:.1e} from float64"
    return out


CPU = ["torch", "cpu_flash", "flex"]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("backend", CPU)
def test_backends_of_a_cpu_match_float64(backend, dtype):
    for heads, kv_heads in ((3, 3), (6, 2)):
        with torch.no_grad():
            check(backend, *received(heads, kv_heads, 32, dtype))


def test_scores_are_capped_where_a_backend_can():
    inputs = received(2, 2, 16, spread=3.0)
    for backend in ("torch", "flex"):
        check(backend, *inputs, softcap=2.0)
    with pytest.raises(RuntimeError, match=r"softcap is 2\.0, and it caps no scores"):
        check("cpu_flash", *inputs, softcap=2.0)


def test_no_tokens_give_no_rows():
    for backend in CPU:
        q, k, v, sinks = received(2, 2, 16, ends=(0, 0))
        packed = PackedSequences((0, 0))
        out = attend_with_sinks(q, k, v, packed, sink_totals_torch(sinks), -1.0, backend)
        assert out.shape == (0, 2, 16)


@pytest.mark.parametrize("num_sinks", [1, 2])
def test_auto_on_a_cpu_keeps_the_bits_of_the_plain_form_and_its_gradients(num_sinks):
    for dtype in (FP32, BF16):
        q, k, v, sinks = received(3, 3, 16, dtype)
        sinks = sinks[:num_sinks].requires_grad_()
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend_with_sinks(*tensors, PackedSequences(ENDS), sink_totals_torch(sinks))
        plain, lse = packed_attention_torch(*tensors, ENDS, 0.0)
        total = sinks.logsumexp(dim=0)
        weight = torch.exp(lse - torch.logaddexp(lse, total)).unsqueeze(-1)
        expected = (plain.float() * weight).to(dtype)
        assert_same_bits(out, expected)
        assert_same_bits(out, apply_sinks_torch(plain, lse, sinks)[0])
        seeds = torch.randn_like(out)
        mine = torch.autograd.grad(out, [*tensors, sinks], seeds)
        theirs = torch.autograd.grad(expected, [*tensors, sinks], seeds)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other)


def test_the_product_with_the_weight_is_rounded_once():
    q, k, v, sinks = received(3, 3, 16, BF16)
    pieces = list(attention_kernels.attend_cpu_flash(q, k, v, PackedSequences(ENDS), 0.0))
    assert [(p.start, p.end) for p in pieces] == [(0, 37), (37, 38), (38, 101)]
    out = check("cpu_flash", q, k, v, sinks)
    for start, end, attended, lse in pieces:
        weight = torch.sigmoid(lse - sink_totals_torch(sinks)).unsqueeze(-1)
        assert_same_bits(out[start:end], (attended.float() * weight).to(BF16))


def spied(seen, function):
    """The same, after noting where q, k and v lie."""

    def spy(*arguments, **options):
        seen.append([(x.data_ptr(), x.stride()[-3:]) for x in arguments[:3]])
        return function(*arguments, **options)

    return spy


@pytest.mark.parametrize("name", ["cpu_flash", "cudnn", "musa", "flash", "varlen", "flash_attn"])
def test_kernels_read_the_receive_buffer_in_place(name, monkeypatch):
    q, k, v, _ = received(3, 3, 16, BF16)
    flash, seen = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, []

    def one(q, k, v, *_, scale):
        return flash(q, k, v, scale=scale)

    def all_at_once(*arguments, scale):
        return varlen(*arguments[:7], scale=scale)

    def by_torch(*arguments, return_aux, scale):
        return varlen(*arguments, scale=scale)[:2]

    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    module, attribute, stand_in = {
        "cpu_flash": ("", "_scaled_dot_product_flash_attention_for_cpu", flash),
        "cudnn": ("", "_scaled_dot_product_cudnn_attention", one),
        "musa": ("", "_scaled_dot_product_attention_flash_musa", one),
        "flash": ("", "_flash_attention_forward", all_at_once),
        "varlen": ("torch.nn.attention.varlen", "varlen_attn", by_torch),
        "flash_attn": ("flash_attn", "flash_attn_varlen_func", varlen),
    }[name]
    where = pytest.importorskip(module) if module else torch.ops.aten
    monkeypatch.setattr(where, attribute, spied(seen, stand_in), raising=False)
    list(attention_backends._BACKENDS[name].run(q, k, v, PackedSequences(ENDS), 0.0))
    if stand_in in (flash, one):
        strides, starts = (16, 9 * 16, 1), (0, 38)
    else:
        strides, starts = (9 * 16, 16, 1), (0,)
    assert seen == [[(x[start].data_ptr(), strides) for x in (q, k, v)] for start in starts]


@pytest.mark.parametrize("special", [-torch.inf, torch.inf, 3e38, 88.0, -104.0, -0.0, 1e-40])
def test_special_sinks_take_all_or_nothing(special):
    q, k, v, sinks = received(2, 2, 16)
    for count in (1, 2):
        mine = sinks[:count].clone()
        mine[:, 0] = special
        for backend in ("torch", "cpu_flash"):
            total = sink_totals_torch(mine)
            out = attend_with_sinks(q, k, v, PackedSequences(ENDS), total, -1.0, backend)
            assert not out.isnan().any()
            assert error(out[:, 1], oracle(q, k, v, mine, ENDS)[:, 1]) < BOUND[FP32]
            if special > 100:
                assert not out[:, 0].any()
            elif special < -100:
                bare = torch.full_like(mine, -torch.inf)
                assert error(out[:, 0], oracle(q, k, v, bare, ENDS)[:, 0]) < BOUND[FP32]


@pytest.mark.parametrize("num_sinks", [1, 2])
def test_a_log_sum_exp_that_is_not_finite_leaves_nothing(num_sinks):
    lse, total, weight = special_sums("cpu", num_sinks)
    mine = sink_weights_torch(lse, total)
    torch.testing.assert_close(mine, weight, rtol=1e-5, atol=1e-37)
    assert_same_bits(mine == 0, weight == 0)
    attended = torch.randn(*lse.shape, 4)
    out, sums = apply_sinks_torch(attended, lse, total[None])
    assert_same_bits(out, attended * mine.unsqueeze(-1))
    assert_same_bits(sums.isnan(), lse.isnan() | total.isnan())
    pieces = iter([attention_kernels.Attended(0, len(lse), attended, lse)])
    out = attention_backends._joined(pieces, attended, total, "torch")
    torch.testing.assert_close(out, attended * weight.unsqueeze(-1), rtol=1e-6, atol=1e-37)


def test_a_nan_stays_in_its_sequence_and_head():
    q, k, v, sinks = received(2, 2, 16)
    q[50, 1, 3] = torch.nan
    for backend in ("torch", "cpu_flash"):
        total = sink_totals_torch(sinks)
        out = attend_with_sinks(q, k, v, PackedSequences(ENDS), total, -1.0, backend)
        assert out[50, 1].isnan().all()
        out[50, 1] = 0
        assert not out.isnan().any()


def test_gradients_are_left_to_backends_that_have_them():
    q, k, v, _ = received(2, 2, 16)
    q = q.clone().requires_grad_()
    for backend in ("cpu_flash", "flex"):
        with pytest.raises(RuntimeError, match="gradients are recorded"):
            choose_attention(backend, q, k, v, -1.0)
    with torch.no_grad():
        assert choose_attention("cpu_flash", q, k, v, -1.0).name == "cpu_flash"


def test_says_what_it_takes_and_why_not(monkeypatch):
    q, k, v, _ = received(2, 2, 12)
    assert choose_attention("auto", q, k, v, -1.0).name == "torch"
    assert "q is on cpu" in choose_attention("auto", q, k, v, -1.0).reason
    with pytest.raises(ValueError, match="expected one of"):
        choose_attention("fast", q, k, v, -1.0)
    with pytest.raises(ValueError, match="attention_backend='fast': expected one of"):
        Options(attention_backend="fast")
    for name in ("cudnn", "flash", "varlen", "flash_attn", "musa"):
        with pytest.raises(RuntimeError, match=f"'{name}' cannot run: q is on cpu"):
            choose_attention(name, q, k, v, -1.0)
    with pytest.raises(RuntimeError, match="head_dim is 12, and it takes multiples of 16"):
        choose_attention("flex", q, k, v, -1.0)
    monkeypatch.setattr(attention_backends, "_kind_of", lambda tensor: "cuda")
    # Whatever this torch was built with, and whether there is a GPU.
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    choice = choose_attention("auto", *received(2, 2, 16, BF16)[:3], -1.0)
    assert choice.name == "torch"
    assert "not cudnn: this torch has no cuDNN; not flash: this torch was built" in choice.reason
    for dtype, dim, softcap, reason in (
        (FP32, 16, -1.0, "not cudnn: q, k and v are"),
        (BF16, 12, -1.0, "not cudnn: head_dim is 12"),
        (BF16, 16, 5.0, "not cudnn: softcap is 5.0"),
    ):
        choice = choose_attention("auto", *received(2, 2, dim, dtype)[:3], softcap)
        assert choice.name == "torch"
        assert choice.reason.startswith(reason)


def test_auto_takes_the_first_of_its_kernels_that_can(monkeypatch):
    monkeypatch.setattr(attention_backends, "_kind_of", lambda tensor: "cuda")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for dim, name in ((128, "cudnn"), (192, "flash"), (320, "torch")):
        assert choose_attention("auto", *received(2, 2, dim, BF16)[:3], -1.0).name == name
    q, k, v, _ = received(2, 2, 128, BF16)
    q = q.clone().requires_grad_()
    assert choose_attention("auto", q, k, v, -1.0).name == "torch"
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert choose_attention("auto", q.detach(), k, v, -1.0).name == "flash"
    with pytest.raises(RuntimeError, match=r"enable_cudnn_sdp\(False\) forbids it"):
        choose_attention("cudnn", q.detach(), k, v, -1.0)
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    assert choose_attention("auto", q.detach(), k, v, -1.0).name == "torch"
    monkeypatch.undo()
    monkeypatch.setattr(attention_backends, "_kind_of", lambda tensor: "cuda")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    choice = choose_attention("auto", q.detach(), k, v, -1.0)
    assert choice.name == "torch"
    assert "compute capability 7.5" in choice.reason


def test_musa_takes_what_torch_musa_has_if_a_trial_comes_right(monkeypatch):
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def theirs(q, k, v, mask, dropout, causal, *, scale):
        assert mask is None
        return (*flash(q, k, v, dropout, causal, scale=scale), torch.empty(0))

    q, k, v, sinks = received(3, 3, 16, BF16)
    monkeypatch.setattr(attention_backends, "_kind_of", lambda tensor: "musa")
    monkeypatch.setitem(attention_backends._AUTO, "musa", ("musa",))
    choice = choose_attention("auto", q, k, v, -1.0)
    assert choice.name == "torch"
    assert "no attention that returns a log-sum-exp" in choice.reason
    monkeypatch.setattr(attention_kernels, "musa_operator", lambda: theirs)
    attention_backends._musa_mismatch.cache_clear()
    assert choose_attention("auto", q, k, v, -1.0).name == "musa"
    check("auto", q, k, v, sinks)

    def base_two(*a, **b):
        out, lse, mask = theirs(*a, **b)
        return out, lse / 0.6931, mask

    monkeypatch.setattr(attention_kernels, "musa_operator", lambda: base_two)
    attention_backends._musa_mismatch.cache_clear()
    choice = choose_attention("auto", q, k, v, -1.0)
    assert choice.name == "torch"
    assert "failed a trial" in choice.reason
    attention_backends._musa_mismatch.cache_clear()


def varlen(q, k, v, ends, other_ends, longest, other, **options):
    """flash-attn's function by the plain form, with what it is passed."""
    assert ends.dtype == torch.int32
    assert ends.tolist() == [0, 37, 38, 101]
    assert (longest, other) == (63, 63)
    assert options.pop("softmax_scale", options.pop("scale", None)) == q.shape[2] ** -0.5
    softcap = options.pop("softcap", 0.0)
    out, lse = packed_attention_torch(q, k, v, ends.tolist(), softcap)
    return out, lse.t().contiguous(), None


@pytest.mark.parametrize("newer", [False, True])
def test_varlen_of_torch_gets_all_sequences_at_once(newer, monkeypatch):
    module = pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.10 brought it")

    def older(*tensors_and_sizes, return_aux, scale):
        assert return_aux.lse
        return varlen(*tensors_and_sizes, scale=scale)[:2]

    def told(*tensors_and_sizes, return_aux, scale, enable_gqa=False):
        assert enable_gqa
        return older(*tensors_and_sizes, return_aux=return_aux, scale=scale)

    monkeypatch.setattr(module, "varlen_attn", told if newer else older)
    monkeypatch.setattr(attention_backends, "_kind_of", lambda tensor: "cuda")
    backend = replace(attention_backends._BACKENDS["varlen"], missing=lambda q: None)
    monkeypatch.setitem(attention_backends._BACKENDS, "varlen", backend)
    check("varlen", *received(6, 2, 16, BF16))


def test_varlen_kernels_get_all_sequences_at_once(monkeypatch):
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = varlen
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(attention_backends, "_kind_of", lambda tensor: "cuda")
    backend = attention_backends._BACKENDS["flash_attn"]
    monkeypatch.setitem(
        attention_backends._BACKENDS,
        "flash_attn",
        replace(backend, missing=lambda q: None),
    )
    for softcap in (-1.0, 4.0):
        check("flash_attn", *received(6, 2, 16, BF16), softcap=softcap)
    old = ModuleType("flash_attn")
    old.flash_attn_varlen_func = lambda q, *a, **b: (q, torch.zeros(3, q.shape[1], 63))
    monkeypatch.setitem(sys.modules, "flash_attn", old)
    with pytest.raises(RuntimeError, match="expected \\(6, 101\\), heads and tokens"):
        check("flash_attn", *received(6, 2, 16, BF16))


def test_ends_are_brought_to_a_device_once():
    packed = PackedSequences(ENDS)
    first = packed.ends_on(torch.device("cpu"))
    assert packed.ends_on(torch.device("cpu")) is first
    assert packed.longest == 63
    assert PackedSequences((0, 0)).longest == 0


@pytest.mark.parametrize("backend", ["auto", "cpu_flash"])
def test_a_compiler_takes_it_whole(backend):
    q, k, v, sinks = received(3, 3, 16)
    packed = PackedSequences(ENDS)

    def attend(q, k, v, sinks):
        return attend_with_sinks(q, k, v, packed, sinks, -1.0, backend) + 1

    total = sink_totals_torch(sinks)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        assert_same_bits(compiled(q, k, v, total), attend(q, k, v, total))
    torch._dynamo.reset()


class Layer(torch.nn.Module):
    def __init__(self, sinks):
        super().__init__()
        self.sinks = torch.nn.Parameter(sinks, requires_grad=False)


def test_sinks_are_summed_up_once_and_again_after_they_change():
    layer, totals = Layer(torch.randn(2, 6)), SinkTotals()

    def total(rank=1, world_size=3):
        return totals.of(layer, layer.sinks, rank, world_size)

    def expected():
        return layer.sinks.chunk(3, dim=1)[1].logsumexp(dim=0)

    first = total()
    assert_same_bits(first, expected())
    assert all(total() is first for _ in range(3))  # three steps
    layer.sinks.add_(1)  # a reload
    assert_same_bits(total(), expected())
    layer.sinks = torch.nn.Parameter(torch.randn(2, 6), requires_grad=False)  # a rebind
    assert_same_bits(total(), expected())
    layer.sinks.data = torch.randn(2, 6)  # staged elsewhere
    assert_same_bits(total(), expected())
    alias = layer.sinks.view(-1)
    alias.mul_(2)
    assert_same_bits(total(), expected())
    assert_same_bits(total(0), layer.sinks.chunk(3, dim=1)[0].logsumexp(dim=0))
    layer.sinks = torch.nn.Parameter(layer.sinks.double(), requires_grad=False)
    assert total().dtype == torch.float64
    with torch.inference_mode():
        assert total().is_inference()
    assert not total().is_inference()
    layer.sinks.requires_grad_()
    assert total() is not total()
    assert total().requires_grad


def test_totals_keep_no_layer_alive():
    totals, layer = SinkTotals(), Layer(torch.randn(2, 6))
    totals.of(layer, layer.sinks, 0, 1)
    assert len(totals._kept) == 1
    del layer
    assert len(totals._kept) == 0


def test_a_single_sink_costs_nothing():
    layer, totals = Layer(torch.randn(1, 6)), SinkTotals()
    total = totals.of(layer, layer.sinks, 1, 3)
    assert total.data_ptr() == layer.sinks[0, 2:].data_ptr()
    assert_same_bits(total, layer.sinks.chunk(3, dim=1)[1].logsumexp(dim=0))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "backend", ["auto", "torch", "cudnn", "flash", "varlen", "flash_attn", "flex"]
)
def test_backends_of_a_gpu_match_float64(backend):
    for dtype in (BF16, torch.float16, FP32):
        for heads, kv_heads, dim, ends in (
            (3, 3, 128, ENDS),
            (6, 2, 64, ENDS),
            (3, 3, 128, (0, 700, 1401)),
        ):
            inputs = received(heads, kv_heads, dim, dtype, "cuda", ends)
            with torch.no_grad():
                try:
                    choose_attention(backend, *inputs[:3], -1.0)
                except RuntimeError as error:
                    pytest.skip(str(error)) if dtype == BF16 else None
                    continue
                check(backend, *inputs, ends=ends)


@pytest.mark.gpu
def test_flex_has_the_gradients_of_the_plain_form():
    q, k, v, sinks = received(2, 2, 64, FP32, "cuda")
    tensors, packed = [x.clone().requires_grad_() for x in (q, k, v)], PackedSequences(ENDS)
    grads = []
    for backend in ("torch", "flex"):
        out = attend_with_sinks(*tensors, packed, sink_totals_torch(sinks), -1.0, backend)
        grads.append(torch.autograd.grad(out.square().sum(), tensors))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2)  # TF32 inside flex


@pytest.mark.gpu
def test_cudnn_serves_the_released_sizes_from_the_receive_buffer_without_a_copy(monkeypatch):
    ends, seen = (0, 14601, 29616), []
    for name in ("_scaled_dot_product_cudnn_attention", "_flash_attention_forward"):
        kernel = spied(seen, getattr(torch.ops.aten, name))
        monkeypatch.setattr(torch.ops.aten, name, kernel, raising=False)
    q, k, v, sinks = received(3, 3, 128, BF16, "cuda", ends)
    packed, total = PackedSequences(ends), sink_totals_torch(sinks)
    with torch.no_grad():
        strided = attend_with_sinks(q, k, v, packed, total, -1.0, "cudnn")
        dense = attend_with_sinks(
            *(x.contiguous() for x in (q, k, v)), packed, total, -1.0, "cudnn"
        )
        flash = attend_with_sinks(q, k, v, packed, total, -1.0, "flash")
    assert_same_bits(strided, dense)
    assert error(strided, flash.double()) < 5e-3
    by_cudnn, by_flash = seen[:2], seen[-1]
    assert by_cudnn == [
        [(x[start].data_ptr(), (128, 9 * 128, 1)) for x in (q, k, v)] for start in ends[:2]
    ]
    assert by_flash == [(x.data_ptr(), (9 * 128, 128, 1)) for x in (q, k, v)]


def test_sinks_of_a_request_are_summed_up_at_its_first_step_with_the_same_bits(monkeypatch):
    config = replace(keep_layers(presets.tiny(FP32), 2), num_sinks=2)
    packed = packed_pair(config)
    model = Magi2Transformer(config, device="cpu")
    initialise(model)
    layout = (packed.coords, packed.modality, packed.cu_seqlens)
    calls = []

    def counted(sinks):
        calls.append(sinks)
        return sink_totals_torch(sinks)

    monkeypatch.setattr(sinks_module, "sink_totals_torch", counted)
    with torch.no_grad():
        plan = model.plan(*layout)
        steps = [model.run(packed.x, plan, packed.time_tokens) for _ in range(3)]
        assert len(calls) == config.num_layers
        rebuilt = model(packed.x, *layout, packed.time_tokens)
        assert len(calls) == 2 * config.num_layers
    for step in steps:
        assert_same_bits(step, rebuilt)


def test_the_command_line_passes_the_name_on():
    with pytest.raises(ValueError, match="attention_backend='fast': expected one of"):
        bench_step(attention_backend="fast")


def test_a_backend_that_cannot_run_on_a_device_is_refused_before_there_are_tensors(monkeypatch):
    cpu = torch.device("cpu")
    for name in ("auto", "torch", "flex", "cpu_flash"):
        attention_backends.check_attention_device(name, cpu)
    with pytest.raises(ValueError, match="'musa' cannot run on cpu: it serves musa"):
        attention_backends.check_attention_device("musa", cpu)
    lacking = replace(attention_backends._BACKENDS["flex"], missing=lambda q: f"no {q.dtype} here")
    monkeypatch.setitem(attention_backends._BACKENDS, "flex", lacking)
    with pytest.raises(ValueError, match=r"'flex' cannot run on cpu: no torch\.bfloat16"):
        attention_backends.check_attention_device("flex", cpu)
