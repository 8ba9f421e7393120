"""Which implementation of the mixture runs: decided once, said aloud, never by accident."""

from __future__ import annotations

import dataclasses
import sys
from typing import NamedTuple

import pytest
import torch

from magi2 import presets
from magi2.modules.experts import RoutedExperts
from magi2.ops import backend, fused_experts
from magi2.ops.backend import choose_backend, explain, route_tokens, run_experts
from magi2.ops.expert_mlp import expert_mlp_torch
from magi2.ops.routing import choose_experts_torch, router_logits_torch
from magi2.ops.token_permute import sum_routes_torch
from magi2.options import Options

SETTINGS = {"top_k": 2, "score_func": "sigmoid", "route_norm": True, "route_scale": 4.9}


class Device(NamedTuple):
    type: str

    def __str__(self) -> str:
        return self.type


class OnDevice:
    """What the choice looks at, on a device that this machine may lack."""

    def __init__(self, kind, dtype=torch.bfloat16, requires_grad=False, contiguous=True):
        # torch.device refuses kinds that this build of torch has no name for.
        self.device, self.dtype = Device(kind), dtype
        self.requires_grad, self.shape = requires_grad, (4, 2, 8)
        self.is_contiguous = lambda: contiguous
        self.stride = lambda dim=None: 1 if contiguous else 2


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(backend, "_missing_triton", lambda: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def chosen(requested, x, *weights, experts=8):
    return choose_backend(requested, x, weights, experts)


def banks(kind="cuda", **changes):
    return [OnDevice(kind, **changes) for _ in range(3)]


@pytest.mark.usefixtures("with_triton")
def test_auto_takes_torch_until_the_kernels_are_measured_to_be_faster():
    assert chosen("auto", OnDevice("musa")).reason.endswith("measured to be faster on musa")


@pytest.mark.parametrize("kind", ["cuda", "musa"])
@pytest.mark.usefixtures("with_triton")
def test_auto_takes_triton_where_it_was_measured_faster_without_gradients(kind, monkeypatch):
    monkeypatch.setattr(backend, "MEASURED_FASTER", frozenset(["cuda", kind]))
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = OnDevice(kind, dtype)
            choice = chosen("auto", x, *banks(kind, dtype=dtype, requires_grad=True))
            assert explain(choice) == f"triton: x is on {kind}, without gradients"
            assert chosen("torch", x).name == "torch"
            assert explain(chosen("triton", x)) == "triton: asked for"


@pytest.mark.usefixtures("with_triton")
def test_auto_says_why_it_takes_torch():
    x = OnDevice("cuda")
    reasons = [
        (chosen("auto", OnDevice("cpu")), "x is on cpu, and Triton serves cuda and musa"),
        (chosen("auto", OnDevice("meta")), "x is on meta"),
        (chosen("auto", x, *banks(requires_grad=True)), "gradients are recorded"),
        (chosen("auto", OnDevice("cuda", requires_grad=True)), "gradients are recorded"),
        (chosen("auto", OnDevice("cuda", torch.float64)), "x is torch.float64"),
        (chosen("auto", x, *banks(dtype=torch.float32)), "an expert weight is torch.float32"),
        (chosen("auto", x, *banks(contiguous=False)), "an expert weight is"),
        (chosen("auto", x, OnDevice("cuda"), experts=2000), "2000 experts a head"),
        (chosen("auto", OnDevice("cuda", contiguous=False)), "adjacent channels"),
        (chosen("torch", x), "asked for"),
    ]
    for choice, reason in reasons:
        assert choice.name == "torch"
        assert reason in choice.reason
        assert explain(choice).startswith("torch: ")


def test_auto_takes_torch_where_triton_does_not_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    backend._import_error.cache_clear()
    assert "pip install 'ulysses-comm[triton]'" in chosen("auto", OnDevice("cuda")).reason
    with pytest.raises(RuntimeError, match="moe_backend='triton' cannot run: triton does not"):
        chosen("triton", OnDevice("cuda"))
    backend._import_error.cache_clear()


@pytest.mark.usefixtures("with_triton")
def test_triton_asked_for_is_triton_or_an_error():
    for x, weights, message in [
        (OnDevice("cpu"), [], "x is on cpu"),
        (OnDevice("cuda"), banks(requires_grad=True), "gradients are recorded"),
        (OnDevice("cuda", torch.float64), [], "float64"),
    ]:
        with pytest.raises(RuntimeError, match=f"moe_backend='triton' cannot run.*{message}"):
            chosen("triton", x, *weights)


@pytest.mark.usefixtures("with_triton")
def test_the_interpreter_serves_a_cpu_only_when_triton_is_asked_for(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert chosen("triton", OnDevice("cpu")).name == "triton"
    assert chosen("auto", OnDevice("cpu")).name == "torch"


@pytest.mark.usefixtures("with_triton")
def test_tensors_that_may_hold_no_memory_go_to_torch(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    class Lazy(torch.Tensor):
        pass

    x = torch.randn(3, 1, 8)
    assert chosen("triton", x).name == "triton"
    with pytest.raises(RuntimeError, match="Lazy is a tensor subclass"):
        chosen("triton", x.as_subclass(Lazy))
    with pytest.raises(RuntimeError, match="Lazy is a tensor subclass"):
        chosen("triton", x, x.as_subclass(Lazy))


@pytest.mark.usefixtures("with_triton")
def test_a_kernel_that_fails_is_not_hidden(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("the kernel is broken")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(fused_experts, "run_experts_triton", broken)
    x, choice = torch.randn(3, 1, 8), torch.zeros(1, 3, 1, dtype=torch.long)
    weights = (torch.randn(2, 8, 4), torch.randn(2, 8, 4), torch.randn(2, 4, 8))
    with pytest.raises(RuntimeError, match="the kernel is broken"):
        run_experts(x, choice, torch.ones(1, 3, 1), weights, "choice", "triton")


def test_names_of_backends_are_checked():
    with pytest.raises(ValueError, match="moe_backend='cutlass': expected one of"):
        Options(moe_backend="cutlass")
    with pytest.raises(ValueError, match="moe_backend='cutlass': expected one of"):
        chosen("cutlass", OnDevice("cpu"))
    assert Options().moe_backend == "auto"


@pytest.mark.parametrize("requested", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_the_bits_are_those_of_the_plain_form(requested, dtype):
    x, gate, bias = torch.randn(9, 2, 16).to(dtype), torch.randn(2, 8, 16), torch.randn(2, 8)
    weights = tuple(torch.randn(16, *shape).to(dtype) for shape in ((16, 12), (16, 12), (12, 16)))
    routed = route_tokens(x, gate, bias, requested, **SETTINGS)
    plain = choose_experts_torch(router_logits_torch(x, gate), bias, **SETTINGS)
    assert all(map(torch.equal, routed, plain))
    for order in ("choice", "expert"):
        mine = run_experts(x, *routed, weights, order, requested)
        assert torch.equal(
            mine, sum_routes_torch(expert_mlp_torch(x, *plain, *weights), plain[0], order)
        )


def test_modules_take_the_backend_from_the_options_and_say_what_runs():
    config = dataclasses.replace(presets.tiny(), dtype=torch.bfloat16)
    dim = config.moe_head_dim
    for requested in ("auto", "torch", "triton"):
        experts = RoutedExperts(config, Options(moe_backend=requested), 2, "cpu")
        assert experts.backend == experts.router.backend == requested
        x = torch.randn(3, 2, dim).bfloat16()
        if requested == "triton":
            with pytest.raises(RuntimeError, match="x is on cpu"):
                experts.explain(x)
            with pytest.raises(RuntimeError, match="x is on cpu"):
                experts(x)
        else:
            assert experts.explain(x).startswith("torch: ")
    none = RoutedExperts(config, Options(moe_backend="triton"), 0, "cpu")
    assert none(torch.randn(3, 0, dim)).shape == (3, 0, dim)
