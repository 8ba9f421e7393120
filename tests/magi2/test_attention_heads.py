"""The Triton kernels around the attention, and who chooses them."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from magi2.ops import head_backend
from magi2.ops.attention_heads import (
    gate_heads_torch,
    gate_heads_triton,
    rotated_heads_torch,
    send_buffer_views,
    store_heads_triton,
    weigh_heads_triton,
)
from magi2.ops.head_backend import choose_heads
from magi2.options import Options
from tests.magi2.compiled_code import compile_for_hopper
from tests.magi2.head_cases import (
    BF16,
    CASES,
    assert_neighbours,
    run_interpreted,
    store_inputs,
)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton: pip install --no-deps triton==3.6.0 adds it to a CPU build of torch",
)


@needs_triton
def test_every_case_is_right_in_the_interpreter():
    *right, errors = run_interpreted()
    assert right == list(CASES), errors


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_case_is_right_on_a_gpu(name):
    CASES[name]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 3])
def test_released_sizes_on_a_gpu(groups):
    inputs = store_inputs(3702, 24, 24, 128, groups, BF16, "cuda")
    views = send_buffer_views(store_heads_triton(*inputs, 8), 24, 24)
    for mine, plain in zip(views, rotated_heads_torch(*inputs), strict=True):
        assert_neighbours(mine.flatten(1, 2), plain)
    received = torch.randn(8, 3702, 3, 128, device="cuda").to(BF16).transpose(0, 1)
    gate, rows = torch.randn(3702, 24, device="cuda").to(BF16), torch.randperm(3702, device="cuda")
    expected = gate_heads_torch(received, rows, gate)
    assert_neighbours(gate_heads_triton(received, rows, gate), expected)


@pytest.mark.gpu
@pytest.mark.long
def test_offsets_beyond_two_to_the_31_on_a_gpu():
    tokens = 2**31 // 3072 + 1000
    qkv = torch.zeros(tokens, 3 * 1024, dtype=BF16, device="cuda")
    qkv[-100:].normal_()
    weights = [torch.zeros(1, 128, device="cuda")] * 2
    rotary, rows = torch.randn(tokens, 96, device="cuda"), torch.arange(tokens, device="cuda")
    sizes = (tokens, 0, 0)
    send = store_heads_triton(qkv, *weights, sizes, rows, rotary, 8, 8, 1e-6, 2)
    last = rotated_heads_torch(
        qkv[-100:], *weights, (100, 0, 0), rows[:100], rotary[-100:], 8, 8, 1e-6
    )
    for mine, plain in zip(send_buffer_views(send, 8, 8), last, strict=True):
        assert_neighbours(mine[-100:].flatten(1, 2), plain)
    heads = qkv.unflatten(1, (24, 128))
    gate = torch.randn(tokens, 24, device="cuda").to(BF16)
    gated = gate_heads_triton(heads, rows, gate)[-100:]
    assert_neighbours(gated, gate_heads_torch(heads[-100:], rows[:100], gate[-100:]))


@needs_triton
@pytest.mark.parametrize("name", ["store", "weigh", "gate"])
def test_kernels_compile_for_a_gpu_without_fused_multiply_add(name):
    assembly = compile_kernel(name)
    assert "fma.rn.f32" not in assembly
    assert ("div.rn.f32" in assembly) or ("div.full.f32" not in assembly)
    assert "fma.rn.f32" in compile_kernel(name, fused=True) or name != "store"


@needs_triton
def test_heads_are_stored_to_peers_sixteen_bytes_at_a_time():
    plain, direct, narrow = (store_heads_assembly(alignment) for alignment in (0, 16, 8))
    for assembly in (plain, direct):
        assert len(re.findall(r"st\.global\.v4\.b32", assembly)) == 2  # v, and q and k
        assert len(re.findall(r"st\.global", assembly)) == 2
        assert "fma.rn.f32" not in assembly
        assert "st.local" not in assembly
    assert "st.global.v4.b32" not in narrow


def store_heads_assembly(alignment: int) -> str:
    """PTX at production widths, pointers aligned as torch's are."""
    from magi2.kernels.attention_heads import store_heads_kernel

    types = {"qkv": "*bf16", "send": "*i64" if alignment else "*bf16", "inverse": "*i64"}
    types |= dict.fromkeys(("q_weight", "k_weight", "rotary"), "*fp32")
    types |= dict.fromkeys(("num_tokens", "first_audio", "first_text", "row_stride"), "i32")
    types["eps"] = "fp32"
    constants = {"HEADS": 24, "KV_HEADS": 24, "WORLD": 2, "D": 128, "HALF": 48, "GROUPS": 3}
    constants |= {"HEADS_STEP": 8, "BLOCK_T": 8, "BLOCK_D": 128, "INTERPRETED": False}
    constants |= {"ALIGNMENT": alignment}
    return compile_for_hopper(store_heads_kernel, types, constants, num_warps=4)


def compile_kernel(name: str, *, fused: bool = False) -> str:
    """PTX of a kernel at production widths; needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    from magi2.kernels import attention_heads

    kernel = getattr(attention_heads, f"{name}_heads_kernel")
    constants = {"HEADS": 24, "KV_HEADS": 8, "WORLD": 8, "D": 128, "HALF": 48, "GROUPS": 3}
    constants |= {"LOCAL": 3, "HEADS_STEP": 8, "BLOCK_T": 8, "BLOCK_D": 128, "INTERPRETED": False}
    constants["ALIGNMENT"] = 0
    types = dict.fromkeys(("qkv", "send", "attended", "out", "received", "gate"), "*bf16")
    types |= dict.fromkeys(("q_weight", "k_weight", "rotary", "lse", "sink_total"), "*fp32")
    types |= dict.fromkeys(("inverse", "permutation"), "*i64") | {"eps": "fp32"}
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
    )
    options = {"enable_fp_fusion": fused}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return built.asm["ptx"]


def test_torch_is_taken_until_a_device_is_known_to_gain(monkeypatch):
    x = torch.randn(3, 2, 8)
    for operation in head_backend.OPERATIONS:
        choice = choose_heads("auto", operation, x)
        assert choice.name == "torch"
        assert f"not known to be faster for '{operation}' on cpu" in choice.reason
    assert choose_heads("torch", "gate", x).reason == "asked for"
    with pytest.raises(ValueError, match="qkv_backend='fast': expected one of"):
        Options(qkv_backend="fast")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="qkv_backend='triton' cannot run: x is on cpu"):
        choose_heads("triton", "gate", x)
    monkeypatch.setattr(head_backend, "_MEASURED_FASTER", {"cpu": ("gate",)})
    assert "x is on cpu" in choose_heads("auto", "gate", x).reason
    monkeypatch.setattr(head_backend, "tensor_obstacle", lambda *a, explicit: None)
    choice = choose_heads("auto", "gate", x)
    assert (choice.name, choice.reason) == ("triton", "measured to be faster on cpu")
    assert choose_heads("auto", "store", x).name == "torch"
    with pytest.raises(RuntimeError, match=r"has strides .* adjacent channels"):
        choose_heads("triton", "gate", x.transpose(1, 2))


@needs_triton
def test_refuses_what_does_not_fit():
    inputs = store_inputs(5, 4, 2, 16, 1, BF16, "cpu")
    with pytest.raises(ValueError, match="4 query and 2 key/value heads over 4 ranks"):
        store_heads_triton(*inputs, 4)
    with pytest.raises(ValueError, match=r"expected \(tokens, 8 heads \* head_dim\)"):
        store_heads_triton(inputs[0][:, 1:], *inputs[1:], 2)
    rows = torch.arange(5)
    with pytest.raises(ValueError, match=r"expected adjacent channels, and \(5, 4\) gates"):
        gate_heads_triton(torch.randn(5, 2, 2, 8), rows, torch.randn(5, 3))
    x = torch.randn(5, 2, 8)
    with pytest.raises(ValueError, match=r"expected \[5, 2, 8\], dense"):
        weigh_heads_triton(x, x[..., 0], x[0, :, 0], x.transpose(0, 1))
