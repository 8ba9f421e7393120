"""The exchanges through Inductor, the compiler that people use. One compile: a cold one is slow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor.graph import GraphLowering

from tests.bits import assert_same_bits
from tests.traffic import calls_of
from tests.ulysses_comm.compiling import Compiled, fresh_compiler, of_any_length
from ulysses_comm import (
    read_split_sizes,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    simulate,
)

SPLITS = [(7, 9), (0, 9), (1, 1)]


@pytest.fixture(autouse=True)
def nan_filled_empty() -> None:
    """Leave `torch.empty` alone: filling it is one more kernel."""


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    # A cached result would come without its code.
    with (
        fresh_compiler(error_on_recompile=True),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def layer(x: torch.Tensor, splits: Any, group: Any) -> list[torch.Tensor]:
    """Q, K and V from one tensor by operations that do not round, exchanged there and back."""
    if isinstance(splits, torch.Tensor):
        splits = read_split_sizes(splits, group, tokens=x.shape[0])
    # As operators of our own Inductor would drop the first, which nobody reads, and run the third
    # in front of the second, with whose input it can fuse its own.
    scatter_heads_gather_seqlen([x[..., :3] * 4], splits, group)
    one = scatter_heads_gather_seqlen([x[..., :1] * 2], splits, group)[0]
    q, k, v = scatter_heads_gather_seqlen([x * 2, x.neg(), x[:, :2] * 0.5], splits, group)
    two = scatter_heads_gather_seqlen([x[..., :1] * 4], splits, group)[0]
    output = torch.cat([q + k, v * 4], dim=1)
    return [scatter_seqlen_gather_head_shards(output, splits, group) * 2, one * 2, two * 2]


def widths_of(simulation: Any) -> list[int]:
    """Return for each collective how many numbers a row has."""
    return [torch.Size(call.send_shapes[0][1:]).numel() for call in calls_of(simulation)]


def test_inductor_keeps_order_bits_and_gradients_for_every_length_in_one_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))

    def step(group: dist.ProcessGroup) -> int:
        rank = group.rank()
        compiled = Compiled(layer, "inductor")
        for splits in SPLITS:
            x = torch.randn(splits[rank], 4, 8).requires_grad_()
            expected = layer(x, splits, group)
            weights = [torch.randn_like(result) for result in expected]
            (expected_grad,) = torch.autograd.grad(expected, x, weights)
            of_any_length(x)
            actual = compiled(x, torch.tensor(splits), group)
            for one, other in zip(actual, expected, strict=True):
                assert_same_bits(one, other, f"{splits}")
            (grad,) = torch.autograd.grad(actual, x, weights)
            assert_same_bits(grad, expected_grad, f"gradient of {splits}")
        return compiled.count

    simulation = simulate(2, step, seed=0)
    assert simulation.results == [1, 1]
    forward, backward = [6, 2, 40, 2, 24], [24, 2, 40, 2]
    assert widths_of(simulation) == (forward + backward) * 2 * len(SPLITS)
    forward_codes = [code for code in codes if len(sends_in(code)) == len(forward)]
    assert len(forward_codes) == 2
    for code in forward_codes:
        assert_stored_in_send_order(code)


def sends_in(code: str) -> list[int]:
    """Return the lines of generated code that call the collective."""
    lines = code.splitlines()
    return [i for i, line in enumerate(lines) if "all_to_all_single.default(" in line]


def assert_stored_in_send_order(code: str) -> None:
    """Q, K and V are written by one kernel into one buffer, which is the one that is sent."""
    _, before, sent, *_ = sends_in(code)
    between = [line.strip() for line in code.splitlines()[before + 1 : sent]]
    kernels = [line for line in between if re.match(r"(cpp_fused\w*|extern_kernels\.\w+)\(", line)]
    assert len(kernels) == 1, kernels
