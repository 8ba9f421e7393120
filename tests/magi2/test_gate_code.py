"""The code that Inductor writes for gather and gate, and for the pack of Q, K and V.

In dynamic mode only the token count may be symbolic: an index divided by a symbol is a 64-bit
division for every element.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from magi2 import presets
from magi2.modules import attention as attention_module
from magi2.modules.attention import Attention
from magi2.ops import attention_heads
from magi2.ops.attention_heads import gate_heads_torch
from magi2.options import Options
from magi2.topology import Topology
from tests.bits import assert_same_bits
from tests.magi2.packed import packed_pair
from tests.magi2.sharded import model_of
from ulysses_comm import pin_head_layout
from ulysses_comm.hardware import Choice

OPTIONS = {"deterministic": True, "emulate_precision_casts": True}
DIVIDED_BY_SYMBOL = {
    "cpu": r"(div_floor_integer\([^;]*?, |% )static_cast<int64_t>\([^()]*ks\d",
    "cuda": r"(//|%)\s*\(?\s*ks\d",
}
KERNEL = {"cpu": r"= async_compile\.cpp_pybinding\(", "cuda": r"^def triton_"}
CALL = {"cpu": r"^\s+cpp_fused\w*\(", "cuda": r"^\s+triton_\w+\.run\("}


@pytest.fixture(autouse=True)
def nan_filled_empty():
    """No filling: it would be part of what is compiled."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def count(pattern: str, code: str) -> int:
    return len(re.findall(pattern, code, flags=re.MULTILINE))


def pinned_gate(out, permutation, gate):
    """As the region does it: a module knows its heads, a compiler does not."""
    pin_head_layout(out, 24, 128, 8)
    torch._check(gate.shape[1] == 24)
    return gate_heads_torch(out, permutation, gate)


def gate_code(device: str, dims: int, *, dynamic: bool, pinned: bool = True) -> str:
    """What is written for head shards of 8 ranks, or flat heads, after its bits were compared."""
    torch.manual_seed(0)
    received = torch.randn(8, 37, 3, 128).to(device, torch.bfloat16).transpose(0, 1)
    out = received if dims == 4 else received.flatten(1, 2)
    gate = torch.randn(37, 24).to(device, torch.bfloat16)
    permutation = torch.randperm(37).to(device)
    function = pinned_gate if pinned else gate_heads_torch
    run = torch.compile(function, fullgraph=True, dynamic=dynamic, options=OPTIONS)
    result, (code, *_) = run_and_get_code(run, out, permutation, gate)
    assert_same_bits(result, gate_heads_torch(out, permutation, gate))
    return code


def check_gate_code(device: str, dims: int) -> None:
    code = gate_code(device, dims, dynamic=True)
    assert not re.search(DIVIDED_BY_SYMBOL[device], code)
    assert "ks1" not in code  # the tokens alone
    # One kernel, launched once: no copy in front of it or behind.
    assert count(KERNEL[device], code) == count(CALL[device], code) == 1
    torch._dynamo.reset()
    static = gate_code(device, dims, dynamic=False)
    assert "ks0" not in static
    assert count(CALL[device], static) == 1


def check_that_the_pin_is_needed(device: str) -> None:
    code = gate_code(device, 4, dynamic=True, pinned=False)
    assert re.search(DIVIDED_BY_SYMBOL[device], code)
    assert "ks1" in code


@pytest.mark.parametrize("dims", [4, pytest.param(3, marks=pytest.mark.long)])
def test_only_tokens_are_symbolic_in_the_gate_kernel(dims):
    check_gate_code("cpu", dims)


@pytest.mark.long
def test_without_the_pin_indices_are_divided_by_symbols():
    check_that_the_pin_is_needed("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [3, 4])
def test_only_tokens_are_symbolic_in_the_gate_kernel_on_a_gpu(dims):
    check_gate_code("cuda", dims)


@pytest.mark.gpu
def test_without_the_pin_indices_are_divided_by_symbols_on_a_gpu():
    check_that_the_pin_is_needed("cuda")


def products(attention, rows, plan):
    """What makes q, k and v, and the gates: all of `project` but their norms, rotation and pack."""
    sizes = plan.order.group_sizes
    x = attention.pre_norm(rows, sizes)
    return attention.linear_g(x, sizes), attention.linear_qkv(x, sizes)


def project_code(device, layer, dynamic, backend="auto", shards=True, function=Attention.project):
    """What is written for one rank that packs for eight: it stops before the exchange."""
    torch._dynamo.reset()
    config = presets.tiny(torch.bfloat16)
    packed = packed_pair(config)
    model = model_of(config, Topology(), Options(qkv_backend=backend)).to(device)
    plan = model.plan(packed.coords.to(device), packed.modality.to(device), packed.cu_seqlens)
    attention = model.block.layers[layer].attention
    attention.qkv_head_shards, attention.world_size = shards, 8
    rows = torch.randn(len(packed.x), config.hidden_size).to(device, torch.bfloat16)
    run = torch.compile(function, fullgraph=True, dynamic=dynamic, options=OPTIONS)
    with torch.no_grad():
        _, (code, *_) = run_and_get_code(run, attention, rows, plan)
    return code


def check_that_the_kernel_leaves_nothing_to_pack(device: str, layer: int, dynamic: bool) -> int:
    """Returns the launches besides the kernel and the matrix products."""
    alone = project_code(device, layer, dynamic, function=products)
    code = project_code(device, layer, dynamic)
    # One launch for norms, rotation and send layout beside those of the products.
    for launch in (CALL[device], r"extern_kernels\."):
        assert count(launch, code) == count(launch, alone)
    _, behind = code.split("torch.ops.magi2.store_heads.default(")
    # q, k and v are views of what it stored: nothing is copied.
    result = behind[: behind.index("return (")]
    assert not count(CALL[device], result), result
    assert "copy_(" not in result, result
    return count(CALL[device], code)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_kernel_leaves_nothing_to_pack(layer, dynamic, monkeypatch):
    def stored(qkv, *arguments):
        *_, heads, kv_heads, _, world_size = arguments
        slots = heads + 2 * kv_heads
        return qkv.new_zeros(world_size, len(qkv), slots // world_size, qkv.shape[1] // slots)

    # What is written around the kernel depends on no launch of it.
    monkeypatch.setattr(attention_heads, "store_heads_triton", stored)
    monkeypatch.setattr(attention_module, "choose_heads", lambda *_: Choice("triton", "a test"))
    assert check_that_the_kernel_leaves_nothing_to_pack("cpu", layer, dynamic) == 1  # the norm


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_kernel_leaves_nothing_to_pack_on_a_gpu(layer, dynamic):
    check_that_the_kernel_leaves_nothing_to_pack("cuda", layer, dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_pack_adds_one_launch_at_most_to_what_makes_q_k_and_v(layer, dynamic):
    flat, packed = (
        project_code("cuda", layer, dynamic, "torch", shards) for shards in (False, True)
    )
    assert "torch.ops.magi2.store_heads" not in flat + packed
    # Inductor gathers v by itself either way; with the pack it does so in a launch of its own.
    assert count(CALL["cuda"], packed) <= count(CALL["cuda"], flat) + 1
