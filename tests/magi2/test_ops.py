"""Operations against obvious float64 loops, and the properties that the specification states."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from magi2.modules.embeddings import check_coords
from magi2.ops.attention import apply_sinks_torch, packed_attention_torch
from magi2.ops.expert_mlp import expert_mlp_torch
from magi2.ops.grouped_norm import grouped_norm_torch
from magi2.ops.rotary import apply_rotary_torch, rotary_bands, rotary_table
from magi2.ops.routing import choose_experts_torch, router_logits_torch
from magi2.ops.sinkhorn import sinkhorn_torch
from magi2.ops.stream_mix import hyper_connect_torch, mix_streams_torch
from magi2.ops.swiglu import swiglu7_torch
from magi2.ops.token_permute import expert_order, inverse_permutation, sum_routes_torch
from tests.magi2.live_memory import LiveMemory
from tests.magi2.packed import grid
from tests.spy import OperatorLog

# A handful of float32 roundings away from float64.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("sizes", [(4, 0, 3), (0, 0, 0), (0, 0, 5), (1, 1, 1)])
def test_norm_uses_the_weight_of_the_rows_group(sizes):
    x, weight = torch.randn(sum(sizes), 2, 8), torch.randn(3, 8)
    y = grouped_norm_torch(x, weight, sizes, 1e-6)
    groups = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = expected * (1 + weight.double()[groups].unsqueeze(1))
    torch.testing.assert_close(y.double(), expected, **FLOAT32)


@pytest.mark.parametrize("width", [2, 8, 2560])
@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activating_a_concatenation_concatenates_the_activations(width, rows, dtype):
    # Scaled so that the clamps are hit.
    one, other = (torch.randn(rows, width).mul(40).to(dtype) for _ in range(2))
    joined = swiglu7_torch(torch.cat([one, other], dim=1))
    apart = torch.cat([swiglu7_torch(one), swiglu7_torch(other)], dim=1)
    if dtype == torch.bfloat16:
        assert torch.equal(joined, apart)
    else:  # a row's tail may go through another exponential: one unit in the last place
        torch.testing.assert_close(joined, apart, rtol=3e-7, atol=0)


def test_sinkhorn_divides_columns_first_and_rows_last():
    logits = torch.randn(5, 4, 4) * 3
    one = sinkhorn_torch(logits, 1, 0.0).double()
    weights = logits.double().exp()
    weights = weights / weights.sum(1, keepdim=True)
    weights = weights / weights.sum(2, keepdim=True)
    torch.testing.assert_close(one, weights, **FLOAT32)
    many = sinkhorn_torch(logits, 20, 1e-12)
    torch.testing.assert_close(many.sum(2), torch.ones(5, 4), **FLOAT32)
    torch.testing.assert_close(many.sum(1), torch.ones(5, 4), rtol=0.1, atol=0)


def test_sinkhorn_stays_in_range_and_nan_in_its_token():
    logits = torch.randn(3, 4, 4) + 500.0
    logits[1, 2, 3] = float("nan")
    weights = sinkhorn_torch(logits, 20, 1e-12)
    assert weights[[0, 2]].isfinite().all()
    assert weights[1].isnan().any()


def test_streams_are_summed_in_float32_and_rounded_once():
    x = torch.randn(9, 4, 16).bfloat16()
    pre, post = torch.rand(9, 4).bfloat16(), torch.rand(9, 4).bfloat16()
    res, y = torch.rand(9, 4, 4).bfloat16(), torch.randn(9, 16).bfloat16()
    exact = torch.einsum("ts,tsc->tc", pre.double(), x.double())
    assert_rounded_once(mix_streams_torch(x, pre), exact)
    exact = torch.einsum("tij,tjc->tic", res.double(), x.double())
    exact = exact + post.double()[:, :, None] * y.double()[:, None]
    assert_rounded_once(hyper_connect_torch(x, y, post, res), exact)


def assert_rounded_once(actual, exact):
    """Half a unit in the last place of bfloat16, and a little for float32."""
    assert actual.dtype == torch.bfloat16
    bound = exact.abs() * 2.0**-8 * 1.001 + 1e-5
    assert ((actual.double() - exact).abs() <= bound).all()


def attention_oracle(q, k, v, ends, softcap, sinks):
    """One query at a time, float64."""
    q, k, v, sinks = (t.double() for t in (q, k, v, sinks))
    out = torch.zeros_like(q)
    for start, end in pairwise(ends):
        for token in range(start, end):
            for head in range(q.shape[1]):
                kv = head * k.shape[1] // q.shape[1]
                scores = k[start:end, kv] @ q[token, head] / math.sqrt(q.shape[2])
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.softmax(torch.cat([scores, sinks[:, head]]), 0)
                out[token, head] = weights[: end - start] @ v[start:end, kv]
    return out


@pytest.mark.parametrize("ends", [[0, 9], [0, 1, 9], [0, 0, 4, 4, 9, 9], [0, 0]])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("softcap", [-1.0, 0.0, 2.5])
def test_attention_matches_the_oracle(ends, kv_heads, softcap):
    q = torch.randn(ends[-1], 6, 8)
    k, v = (torch.randn(ends[-1], kv_heads, 8) for _ in range(2))
    sinks = torch.randn(2, 6)
    out, lse = packed_attention_torch(q, k, v, ends, softcap)
    assert out.is_contiguous()
    assert lse.shape == q.shape[:2]
    out, _ = apply_sinks_torch(out, lse, sinks)
    expected = attention_oracle(q, k, v, ends, softcap, sinks)
    torch.testing.assert_close(out.double(), expected, **FLOAT32)


def test_memory_of_attention_grows_with_the_tokens_and_not_with_their_square():
    peaks = []
    for tokens in (500, 1000):
        q, k, v = (torch.randn(tokens, 3, 8) for _ in range(3))
        with LiveMemory() as memory:
            packed_attention_torch(q, k, v, [0, tokens], -1.0)
        peaks.append(memory.peak)
        assert memory.peak < 8 * q.nbytes
    assert peaks[1] < 2.1 * peaks[0]


def test_attention_reads_strided_views():
    fused = torch.randn(20, 9, 8)
    views = fused.split([3, 3, 3], dim=1)
    dense = [view.contiguous() for view in views]
    for one, other in zip(
        packed_attention_torch(*views, [0, 20], -1.0),
        packed_attention_torch(*dense, [0, 20], -1.0),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_rotary_turns_paired_channels_and_leaves_the_rest():
    coords = grid((2, 3, 4))
    table = rotary_table(coords, rotary_bands(2))
    x = torch.randn(24, 3, 16)
    y = apply_rotary_torch(x, table)
    assert torch.equal(y[..., 12:], x[..., 12:])
    pairs = torch.complex(x[..., :6].double(), x[..., 6:12].double())
    position = coords[:, :3].double() - torch.tensor([0.0, 1.0, 1.5]).double()
    angle = (position[:, :, None] * torch.tensor([1.0, 0.01]).double()).flatten(1)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(y[..., :12].double(), expected, rtol=1e-5, atol=1e-5)


def test_text_has_no_positions_but_a_single_token_does():
    bands = rotary_bands(2)
    text = rotary_table(grid((5, 1, 1), (1, 1, 1), (-5, 0, 0)), bands)
    assert torch.equal(text, torch.cat([torch.zeros(5, 6), torch.ones(5, 6)], dim=1))
    lone = rotary_table(grid((1, 1, 1), (1, 1, 1), (-1, 0, 0)), bands)
    torch.testing.assert_close(lone[0, :2], torch.sin(-bands))


def test_a_grid_of_one_with_another_reference_has_no_scale():
    coords = grid((1, 2, 2), (3, 2, 2))
    with pytest.raises(ValueError, match="coords of token 0"):
        check_coords(coords)


def route(logits, bias, **changes):
    settings = {"top_k": 2, "score_func": "sigmoid", "route_norm": True, "route_scale": 4.9}
    return choose_experts_torch(logits, bias, **(settings | changes))


def test_bias_changes_the_choice_and_not_the_weights():
    logits = torch.randn(3, 7, 8)
    bias = torch.zeros(3, 8)
    bias[:, 5] = 10.0
    choice, weights = route(logits, bias, route_norm=False, route_scale=1.0)
    assert (choice[..., 0] == 5).all()
    assert torch.equal(weights, torch.sigmoid(logits).gather(-1, choice))
    normalised = route(logits, bias)[1]
    torch.testing.assert_close(normalised.sum(-1), torch.full((3, 7), 4.9))


def test_softmax_scores_are_over_all_experts():
    logits = torch.randn(2, 5, 8)
    choice, weights = route(
        logits, torch.zeros(2, 8), score_func="softmax", route_norm=False, route_scale=1.0
    )
    expected = torch.softmax(logits, dim=-1).topk(2)
    assert torch.equal(choice, expected.indices)
    assert torch.equal(weights, expected.values)


@pytest.mark.parametrize(
    ("tokens", "heads", "experts", "top_k"),
    [(0, 3, 8, 2), (1, 1, 8, 2), (7, 3, 16, 6), (9, 3, 16, 6), (33, 2, 256, 6)],
)
def test_routing_does_not_depend_on_the_operands_layout(tokens, heads, experts, top_k):
    gate, bias = torch.randn(heads, experts, 16), torch.randn(heads, experts)
    x = torch.randn(tokens, heads, 16).bfloat16()
    wider = torch.randn(tokens, heads + 2, 16).bfloat16()
    wider[:, 1:-1] = x
    strided = torch.bmm(x.float().transpose(0, 1), gate.transpose(1, 2))
    expected = (strided, *route(strided, bias, top_k=top_k))
    for rows in (x, wider[:, 1:-1]):
        logits = router_logits_torch(rows, gate)
        routed = (logits, *route(logits, bias, top_k=top_k))
        assert all(torch.equal(a, b) for a, b in zip(routed, expected, strict=True))


@pytest.mark.parametrize(
    ("dtype", "copy"), [(torch.bfloat16, "_to_copy"), (torch.float32, "clone")]
)
def test_the_routers_operand_is_one_dense_copy(dtype, copy):
    x, gate = torch.randn(7, 3, 16).to(dtype), torch.randn(3, 8, 16)
    with OperatorLog() as log:
        router_logits_torch(x, gate)
    assert [name for name, _ in log.moved()] == [copy, "bmm"]
    operand = next(args[0] for name, args, _ in log.calls if name == "aten::bmm")
    assert (operand.dtype, operand.shape) == (torch.float32, (3, 7, 16))
    assert operand.is_contiguous()


def expert_case(tokens, heads, top_k, experts, dim=8, inner=12, dtype=torch.float32):
    x = torch.randn(tokens, heads, dim).to(dtype)
    choice = torch.rand(heads, tokens, experts).argsort(-1)[..., :top_k]
    weights = torch.rand(heads, tokens, top_k)
    gate, up = (torch.randn(heads * experts, dim, inner).to(dtype) for _ in range(2))
    down = torch.randn(heads * experts, inner, dim).to(dtype)
    return x, choice, weights, gate, up, down


def experts_oracle(x, choice, weights, gate, up, down):
    """One route at a time, float64, without rounding."""
    heads, tokens, top_k = choice.shape
    experts = gate.shape[0] // heads
    out = torch.zeros(tokens, heads, top_k, x.shape[2], dtype=torch.float64)
    for h in range(heads):
        for t in range(tokens):
            for k in range(top_k):
                row = h * experts + int(choice[h, t, k])
                a = (x[t, h].double() @ gate[row].double()).clamp(max=7)
                b = (x[t, h].double() @ up[row].double()).clamp(-7, 7)
                hidden = a * torch.sigmoid(1.702 * a) * (b + 1)
                out[t, h, k] = hidden @ down[row].double() * weights[h, t, k].double()
    return out


@pytest.mark.parametrize(
    "sizes", [(0, 3, 2, 4), (1, 1, 2, 4), (1, 3, 6, 8), (7, 3, 2, 4), (29, 2, 8, 8), (5, 1, 1, 40)]
)
def test_experts_match_the_oracle(sizes):
    case = expert_case(*sizes)
    routes = expert_mlp_torch(*case)
    expected = experts_oracle(*case)
    torch.testing.assert_close(routes.double(), expected, rtol=1e-4, atol=1e-4)


def test_all_tokens_on_one_expert():
    x, choice, *rest = expert_case(9, 2, 1, 6)
    choice = torch.full_like(choice, 4)
    expected = experts_oracle(x, choice, *rest)
    routes = expert_mlp_torch(x, choice, *rest)
    torch.testing.assert_close(routes.double(), expected, rtol=1e-4, atol=1e-4)


def test_experts_round_the_inner_row_and_the_weighted_row():
    x, choice, weights, gate, up, down = expert_case(1, 1, 1, 1, dim=8, dtype=torch.bfloat16)
    a, b = (x[0].float() @ w[0].float() for w in (gate, up))
    a, b = a.clamp(max=7), b.clamp(-7, 7)
    hidden = (a * torch.sigmoid(1.702 * a) * (b + 1)).bfloat16()
    expected = (hidden.float() @ down[0].float() * weights[0, 0, 0]).bfloat16()
    routes = expert_mlp_torch(x, choice, weights, gate, up, down)
    assert torch.equal(routes[0, 0, 0], expected[0])


def test_expert_order_is_stable_and_counts_every_expert():
    choice = torch.tensor([[[2, 0], [2, 1]], [[0, 2], [1, 0]]])
    order, counts = expert_order(choice, 3)
    # Routes (t, h, k) are numbered ((t * 2) + h) * 2 + k.
    assert counts == [1, 1, 2, 2, 1, 1]
    assert order.tolist() == [1, 5, 0, 4, 2, 7, 6, 3]
    assert torch.equal(order[inverse_permutation(order)], torch.arange(8))


def test_sum_orders_round_as_they_say():
    routes = torch.tensor([[[[256.0], [1.0], [1.0]]]]).bfloat16()
    choice = torch.tensor([[[7, 1, 0]]])
    # In float32 258 is exact; rounded each time, 256 + 1 stays 256, but 1 + 1 + 256 does not.
    assert sum_routes_torch(routes, choice, "choice").item() == 258
    assert sum_routes_torch(routes, choice, "expert").item() == 258
    descending = torch.tensor([[[0, 1, 7]]])
    assert sum_routes_torch(routes, descending, "expert").item() == 256
    assert sum_routes_torch(routes, descending, "choice").item() == 258
    with pytest.raises(ValueError, match="order='fast'"):
        sum_routes_torch(routes, choice, "fast")


def test_sum_orders_agree_within_their_roundings():
    routes = torch.randn(50, 3, 6, 16).bfloat16()
    choice = torch.rand(3, 50, 9).argsort(-1)[..., :6]
    exact = routes.double().sum(2)
    scale = routes.double().abs().sum(2)
    once, often = (sum_routes_torch(routes, choice, order) for order in ("choice", "expert"))
    assert ((once.double() - exact).abs() <= scale * 2.0**-8).all()
    assert ((often.double() - exact).abs() <= 6 * scale * 2.0**-8).all()
    assert not torch.equal(once, often)
