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
from magi2.modules.attention import Attention
from magi2.ops.attention_heads import gate_heads_torch
from magi2.options import Options
from magi2.topology import Topology
from tests.bits import assert_same_bits
from tests.magi2.packed import packed_pair
from tests.magi2.sharded import model_of
from ulysses_comm import pin_head_layout

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


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_pack_adds_no_launch_to_what_makes_q_k_and_v(layer, dynamic, backend):
    config = presets.tiny(torch.bfloat16)
    packed = packed_pair(config)
    launches, stored = {}, {}
    for shards in (False, True):
        torch._dynamo.reset()
        model = model_of(config, Topology(), Options(qkv_backend=backend)).to("cuda")
        plan = model.plan(packed.coords.cuda(), packed.modality.cuda(), packed.cu_seqlens)
        attention = model.block.layers[layer].attention
        # One rank that packs for eight: what is exchanged afterwards does not matter here.
        attention.qkv_head_shards, attention.world_size = shards, 8
        rows = torch.randn(len(packed.x), config.hidden_size).cuda().bfloat16()
        run = torch.compile(Attention.project, fullgraph=True, dynamic=dynamic, options=OPTIONS)
        with torch.no_grad():
            _, (code, *_) = run_and_get_code(run, attention, rows, plan)
        launches[shards] = count(CALL["cuda"], code)
        stored[shards] = code.count("torch.ops.magi2.store_heads.default(")
    if backend == "auto":
        # One launch for norms, rotation and send layout: nothing is left to be packed.
        assert stored == {False: 1, True: 1}
        assert launches[True] == launches[False]
    else:
        # Inductor gathers v by itself either way; with the pack it does so in a launch of its own.
        assert stored == {False: 0, True: 0}
        assert launches[True] <= launches[False] + 1
