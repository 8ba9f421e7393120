"""UlyssesAttention equals its wrapped attention on one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bits import assert_same_bits
from tests.traffic import calls_of
from tests.ulysses_comm.attention_cases import (
    HEADS,
    SPLITS,
    attention_with_lse,
    close,
    inputs,
    integer_mix,
    sdpa_of,
    shard,
    token_axis,
)
from ulysses_comm import (
    LONE_RANK,
    PerHead,
    UlyssesAttention,
    Workspace,
    pack_head_shards,
    simulate,
)

LAYOUTS = ["shd", "bshd", "bhsd", "sbhd"]
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def run(
    world_size: int,
    layout: str,
    whole: list[torch.Tensor],
    attention: Callable[..., Any],
    call: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Run one layer on simulated ranks; results as the ranks return them."""
    splits = SPLITS[world_size]

    def step(group: dist.ProcessGroup) -> Any:
        layer = UlyssesAttention(attention, group=group, layout=layout, **options)
        local = [shard(t, splits, group.rank(), layout) for t in whole]
        return layer(*local, split_sizes=splits, **(call or {}))

    return simulate(world_size, step)


def with_gradients(
    attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor], weight: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = attend(*leaves)
    (output * weight).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_output_and_gradients_equal_one_process(
    heads: tuple[int, int], world_size: int, chunks: int
) -> None:
    for layout in LAYOUTS:
        whole = inputs(layout, heads)
        weight = inputs(layout, heads, seed=9)[0]
        expected = with_gradients(sdpa_of(layout), whole, weight)
        splits = SPLITS[world_size]

        def step(
            group: dist.ProcessGroup,
            layout: str = layout,
            whole: list[torch.Tensor] = whole,
            weight: torch.Tensor = weight,
            splits: tuple[int, ...] = splits,
        ) -> list[torch.Tensor]:
            layer = UlyssesAttention(sdpa_of(layout), group=group, layout=layout, chunks=chunks)
            local = [shard(t, splits, group.rank(), layout) for t in (*whole, weight)]
            return with_gradients(
                lambda q, k, v: layer(q, k, v, split_sizes=splits), local[:3], local[3]
            )

        results = simulate(world_size, step).results
        for index, want in enumerate(expected):
            joined = torch.cat([r[index] for r in results], dim=token_axis(layout))
            close(joined, want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_chunks_do_not_change_a_bit(layout: str, heads: tuple[int, int]) -> None:
    whole = inputs(layout, heads, dtype=FP32)
    plain = run(3, layout, whole, sdpa_of(layout)).results
    for chunks in (2, 3, 99):
        chunked = run(3, layout, whole, sdpa_of(layout), chunks=chunks).results
        for one, other in zip(plain, chunked, strict=True):
            assert_same_bits(one, other, f"{chunks} chunks", strides=True)


def test_the_result_has_the_bits_of_one_process() -> None:
    for (name, heads), world_size in itertools.product(HEADS.items(), (2, 4, 8)):
        whole = [t.mul(9).round() for t in inputs("bshd", heads)]
        results = run(world_size, "bshd", whole, integer_mix).results
        assert_same_bits(torch.cat(results, dim=1), integer_mix(*whole), f"{name}, {world_size}")


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_n_layers_make_2n_collectives_for_each_turn(chunks: int, layers: int) -> None:
    """accelerate #4209, vllm-omni #5717, #7120: lengths were gathered anew in every layer."""
    splits = SPLITS[3]

    def step(group: dist.ProcessGroup) -> None:
        layer = UlyssesAttention(
            attention_with_lse, group=group, layout="bshd", lse_layout="bhs", chunks=chunks
        )
        q, k, v = (t.split(splits, dim=1)[group.rank()] for t in inputs("bshd", (12, 12)))
        for _ in range(layers):
            q, _ = layer(q, k, v, split_sizes=splits)

    kinds = [call.kind for call in calls_of(simulate(3, step))]
    assert kinds == ["all_to_all_single"] * (2 * layers * chunks)


def test_a_turn_is_exchanged_while_the_one_before_attends() -> None:
    events: list[tuple[int, str]] = []

    def step(group: dist.ProcessGroup) -> None:
        def attention(*tensors: torch.Tensor) -> torch.Tensor:
            events.append((group.rank(), "attend"))
            return sdpa_of("shd")(*tensors)

        layer = UlyssesAttention(attention, group=group, chunks=3)
        local = [t.split([5, 4])[group.rank()] for t in inputs("shd", (6, 6))]
        original = dist.all_to_all_single

        def recorded(*args: Any, **kwargs: Any) -> Any:
            events.append((group.rank(), "start"))
            return original(*args, **kwargs)

        dist.all_to_all_single = recorded
        try:
            layer(*local, split_sizes=[5, 4])
        finally:
            dist.all_to_all_single = original

    simulate(1, lambda _: None)
    from tests.spy import SpyGroup

    step(SpyGroup(0, 2))
    order = [what for _, what in events]
    # in 0, in 1, attend 0, out 0, in 2, attend 1, out 1, attend 2, out 2
    start = "start"
    assert order == [start, start, "attend", start, start, "attend", start, "attend", start]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_gets_views_of_the_receive_buffer(layout: str) -> None:
    seen: list[list[torch.Tensor]] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append([q, k, v])
        return sdpa_of(layout)(q, k, v)

    run(2, layout, inputs(layout, (8, 2)), attention)
    for q, k, v in seen:
        storages = {t.untyped_storage().data_ptr() for t in (q, k, v)}
        assert len(storages) == 1, "a hidden copy"
        assert all(t.stride(-1) == 1 for t in (q, k, v))


@pytest.mark.parametrize("layout", ["shd", "bshd"])
def test_a_contiguous_output_of_one_sequence_is_sent_in_place(layout: str) -> None:
    addresses = {}

    def step(group: dist.ProcessGroup) -> None:
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            output = torch.ones(q.shape)
            addresses[group.rank()] = output.data_ptr()
            keep.append(output)
            return output

        keep: list[torch.Tensor] = []
        local = [t.split([5, 4], dim=token_axis(layout))[group.rank()] for t in whole]
        UlyssesAttention(attention, group=group, layout=layout)(*local, split_sizes=[5, 4])

    whole = inputs(layout, (4, 4), batch=1, dtype=FP32)
    out = calls_of(simulate(2, step))[1]
    assert out.send_addresses == [addresses[0], addresses[1]]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_payload_is_copied_once_in_and_once_out_of_the_receive_buffer(
    layout: str, batch: int
) -> None:
    def attention(*tensors: torch.Tensor) -> torch.Tensor:
        return sdpa_of(layout)(*tensors).contiguous()

    whole = inputs(layout, (8, 8), batch=batch, dtype=FP32)
    simulation = run(2, layout, whole, attention)
    inward, outward = calls_of(simulation)
    bytes_of = [sum(t.split(SPLITS[2], dim=token_axis(layout))[r].nbytes for t in whole)
                for r in range(2)]  # fmt: skip
    assert inward.copied_bytes == bytes_of
    own = [shard(whole[0], SPLITS[2], r, layout).nbytes for r in range(2)]
    # One flat copy of what was received. An output whose tokens do not come first in memory is
    # packed before it is sent.
    in_order = layout == "sbhd" or (layout == "bshd" and batch == 1)
    packed = 0 if in_order else whole[0].nbytes // 2
    assert outward.copied_bytes == [size + packed for size in own]


def test_packed_head_shards_are_sent_in_place() -> None:
    """verl #7417: an entry for packed buffers."""
    whole = inputs("shd", (8, 4), dtype=FP32)
    splits = SPLITS[2]

    def step(group: dist.ProcessGroup) -> tuple[torch.Tensor, int]:
        shards = pack_head_shards([t.split(splits)[group.rank()] for t in whole], 2)
        layer = UlyssesAttention(sdpa_of("shd"), group=group)
        return layer(*shards, split_sizes=splits), shards[0].data_ptr()

    simulation = simulate(2, step)
    assert calls_of(simulation)[0].send_addresses == [address for _, address in simulation.results]
    joined = torch.cat([output for output, _ in simulation.results])
    torch.testing.assert_close(joined, sdpa_of("shd")(*whole))


def test_no_split_sizes_means_as_many_tokens_on_every_rank() -> None:
    whole = inputs("bshd", (4, 2), length=8)

    def step(group: dist.ProcessGroup) -> torch.Tensor:
        local = [t.chunk(4, dim=1)[group.rank()] for t in whole]
        return UlyssesAttention(sdpa_of("bshd"), group=group, layout="bshd")(*local)

    close(torch.cat(simulate(4, step).results, dim=1), sdpa_of("bshd")(*whole))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_values_of_another_head_dim(layout: str, world_size: int) -> None:
    whole = inputs(layout, (6, 3), head_dims=(8, 4), dtype=FP32)
    results = run(world_size, layout, whole, sdpa_of(layout)).results
    joined = torch.cat(results, dim=token_axis(layout))
    torch.testing.assert_close(joined, sdpa_of(layout)(*whole))


@pytest.mark.parametrize("chunks", [1, 2])
def test_dtypes_promote_or_are_kept(chunks: int) -> None:
    seen: list[list[torch.dtype]] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append([q.dtype, k.dtype, v.dtype])
        return q.clone()

    q, k, v = inputs("bshd", (4, 1))
    mixed = [q.to(FP32), k.to(BF16), v.to(BF16)]
    run(2, "bshd", mixed, attention, chunks=chunks)
    assert {tuple(dtypes) for dtypes in seen} == {(FP32, FP32, FP32)}
    seen.clear()
    results = run(2, "bshd", mixed, attention, chunks=chunks, keep_dtypes=True).results
    assert {tuple(dtypes) for dtypes in seen} == {(FP32, BF16, BF16)}
    assert_same_bits(torch.cat(results, dim=1), mixed[0])


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("heads", [(8, 4), (3, 1)])
def test_log_sum_exp_comes_back_in_the_same_collective(
    heads: tuple[int, int], world_size: int, chunks: int
) -> None:
    for dtype in (FP64, BF16):
        whole = inputs("bshd", heads, dtype=dtype)
        simulation = run(
            world_size, "bshd", whole, attention_with_lse, lse_layout="bhs", chunks=chunks
        )
        output = torch.cat([output for output, _ in simulation.results], dim=1)
        lse = torch.cat([lse for _, lse in simulation.results], dim=2)
        expected, expected_lse = attention_with_lse(*whole)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(lse, expected_lse)
        assert lse.dtype == (FP64 if dtype == FP64 else FP32)


def test_gradients_flow_through_the_log_sum_exp() -> None:
    whole, splits = inputs("bshd", (3, 3)), SPLITS[4]

    def loss(outcome: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return outcome[0].square().sum() + outcome[1].sin().sum()

    def step(group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        leaves = [t.split(splits, dim=1)[group.rank()].clone().requires_grad_() for t in whole]
        layer = UlyssesAttention(attention_with_lse, group=group, layout="bshd", lse_layout="bhs")
        loss(layer(*leaves, split_sizes=splits)).backward()
        return [leaf.grad for leaf in leaves]

    leaves = [tensor.clone().requires_grad_() for tensor in whole]
    loss(attention_with_lse(*leaves)).backward()
    results = simulate(4, step).results
    for index, leaf in enumerate(leaves):
        assert leaf.grad is not None
        close(torch.cat([grads[index] for grads in results], dim=1), leaf.grad)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [(8, 2), (6, 6)])
@pytest.mark.parametrize("chunks", [1, 2])
def test_masks_and_biases_are_cut_to_the_heads(
    heads: tuple[int, int], world_size: int, chunks: int
) -> None:
    whole = inputs("bhsd", heads)
    generator = torch.Generator().manual_seed(3)
    per_head = torch.randn(2, heads[0], 9, 9, generator=generator, dtype=FP64)
    masks = [
        per_head,  # a bias for each head
        per_head[:1],  # the same in every sequence
        per_head[:, :1] > 0,  # a mask for all heads
        (per_head[0, 0] > -9).tril(),  # no axis of heads at all
        None,
    ]
    for mask in masks:
        expected = sdpa_of("bhsd")(*whole, attn_mask=mask)
        results = run(
            world_size, "bhsd", whole, sdpa_of("bhsd"), {"attn_mask": mask}, chunks=chunks
        ).results
        close(torch.cat(results, dim=2), expected)


def with_slopes_and_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    alibi_slopes: torch.Tensor,
    sinks: torch.Tensor,
    kv_scale: torch.Tensor,
    causal: bool,
) -> torch.Tensor:
    """Attention (shd) with a slope and a sink for each query head, a scale for each key head."""
    repeat = q.shape[1] // k.shape[1]
    k = k * kv_scale.view(1, -1, 1)
    k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
    places = torch.arange(len(q))
    scores = torch.einsum("qhd,khd->hqk", q, k)
    scores = scores - alibi_slopes.view(-1, 1, 1) * (places[:, None] - places).abs()
    if causal:
        scores = scores.masked_fill(places[:, None] < places, float("-inf"))
    column = sinks.view(-1, 1, 1).expand(-1, len(q), 1)
    return torch.einsum("hqk,khd->qhd", torch.cat([scores, column], -1).softmax(-1)[..., :-1], v)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_slopes_sinks_and_declared_extras_are_cut_to_the_heads(world_size: int) -> None:
    whole = inputs("shd", (6, 3))
    extras = {
        "alibi_slopes": torch.arange(1.0, 7.0, dtype=FP64) / 9,
        "sinks": torch.arange(6.0, dtype=FP64).requires_grad_(),
        "kv_scale": torch.arange(1.0, 4.0, dtype=FP64),
        "causal": True,
    }
    expected = with_slopes_and_sinks(*whole, **extras)
    expected.sum().backward()
    sink_grad = extras["sinks"].grad
    splits = SPLITS[world_size]

    def step(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = UlyssesAttention(
            with_slopes_and_sinks, group=group, per_head={"kv_scale": PerHead(-1, of="key_value")}
        )
        own = {**extras, "sinks": extras["sinks"].detach().clone().requires_grad_()}
        local = [t.split(splits)[group.rank()].clone().requires_grad_() for t in whole]
        output = layer(*local, split_sizes=splits, **own)
        output.sum().backward()
        grad = own["sinks"].grad
        return output.detach(), torch.zeros(6, dtype=FP64) if grad is None else grad

    results = simulate(world_size, step).results
    close(torch.cat([output for output, _ in results]), expected.detach())
    # Each rank has the gradient of its own heads; their sum is the gradient.
    close(sum(grad for _, grad in results), sink_grad)


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Any) -> torch.Tensor:
    """Attention (shd) inside each sequence of a packed batch."""
    assert cu_seqlens[-1] == len(q), "cu_seqlens are those of the whole batch"
    parts = itertools.pairwise(cu_seqlens.tolist()) if hasattr(itertools, "pairwise") else []
    return torch.cat([sdpa_of("shd")(q[a:b], k[a:b], v[a:b]) for a, b in parts])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_variable_length_batches_pass_global_cu_seqlens(world_size: int) -> None:
    whole = inputs("shd", (8, 2))
    cu_seqlens = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    results = run(world_size, "shd", whole, varlen, {"cu_seqlens": cu_seqlens}).results
    close(torch.cat(results), varlen(*whole, cu_seqlens))


def test_score_mods_get_the_number_of_the_head_in_the_model() -> None:
    seen: dict[int, int] = {}

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Callable[..., Any]
    ) -> torch.Tensor:
        for head in range(q.shape[2]):
            seen[int(score_mod(0.0, 0, head, 0, 0))] = head
        return q.clone()

    whole = inputs("bshd", (7, 7))
    run(3, "bshd", whole, attention, {"score_mod": lambda score, b, h, i, j: h})
    assert sorted(seen) == list(range(7))


def test_a_module_keeps_its_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return q * self.scale

    layer = UlyssesAttention(Scaled(), group=LONE_RANK)
    assert [name for name, _ in layer.named_parameters()] == ["attention.scale"]
    assert "layout='shd'" in repr(layer)


def test_a_copy_of_a_model_works_with_the_same_ranks() -> None:
    splits = SPLITS[2]
    whole = inputs("shd", (4, 2))

    def step(group: dist.ProcessGroup) -> torch.Tensor:
        layer = UlyssesAttention(sdpa_of("shd"), group=group, workspace=Workspace())
        copied = copy.deepcopy(nn.Sequential(layer))[0]
        assert copied is not layer
        assert copied.group is group
        assert copied.workspace is layer.workspace
        return copied(*(t.split(splits)[group.rank()] for t in whole), split_sizes=splits)

    close(torch.cat(simulate(2, step).results), sdpa_of("shd")(*whole))


def test_a_lone_rank_hands_its_tensors_through() -> None:
    seen: list[int] = []

    def attention(*tensors: torch.Tensor, flag: str) -> torch.Tensor:
        seen.extend(t.data_ptr() for t in tensors)
        assert flag == "as it is"
        return tensors[0]

    tensors = inputs("bhsd", (4, 2))
    layer = UlyssesAttention(attention, group=LONE_RANK, layout="bhsd", chunks=3)
    assert layer(*tensors, flag="as it is") is tensors[0]
    assert seen == [tensor.data_ptr() for tensor in tensors]


def test_a_steady_loop_through_a_workspace_allocates_nothing() -> None:
    whole = inputs("bshd", (8, 2), dtype=FP32)
    splits = SPLITS[2]
    reference = sdpa_of("bshd")(*whole)

    def step(group: dist.ProcessGroup) -> list[int]:
        workspace = Workspace()
        layer = UlyssesAttention(
            sdpa_of("bshd"), group=group, layout="bshd", workspace=workspace, chunks=2
        )
        local = [shard(t, splits, group.rank(), "bshd") for t in whole]
        counts = []
        for _ in range(4):
            output = layer(*local, split_sizes=splits)
            torch.testing.assert_close(output, shard(reference, splits, group.rank(), "bshd"))
            counts.append(workspace.allocations)
        return counts

    for counts in simulate(2, step).results:
        assert counts[0] > 0
        assert counts[1:] == counts[1:2] * 3


def test_two_groups_and_two_models_at_once() -> None:
    """DeepSpeed #8291, #8316: a second model got the first one's split."""
    models = [(8, 2), (6, 6), (5, 1)]
    tensors = [inputs("bshd", heads, seed=i) for i, heads in enumerate(models)]

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        layers = [UlyssesAttention(sdpa_of("bshd"), group=group, layout="bshd") for _ in models]
        return [
            layer(*(shard(t, SPLITS[4], group.rank(), "bshd") for t in whole),
                  split_sizes=SPLITS[4])
            for _ in range(2)
            for layer, whole in zip(layers, tensors, strict=True)
        ]  # fmt: skip

    results = simulate(4, step).results
    for index in range(6):
        joined = torch.cat([outputs[index] for outputs in results], dim=1)
        close(joined, sdpa_of("bshd")(*tensors[index % 3]))


@pytest.mark.parametrize("validate", [True, False])
def test_ranks_that_disagree_get_one_error(validate: bool) -> None:
    def step(group: dist.ProcessGroup) -> str:
        splits = [5, 4] if group.rank() else [5, 3]
        tokens = 5 if group.rank() == 0 else 4
        tensors = [torch.zeros(tokens, 4, 8) for _ in range(3)]
        layer = UlyssesAttention(sdpa_of("shd"), group=group, validate=validate)
        try:
            layer(*tensors, split_sizes=splits)
        except RuntimeError as error:
            return str(error)
        return "went unnoticed"

    if not validate:
        with pytest.raises(RuntimeError, match="rank"):
            simulate(2, step)
        return
    (text,) = set(simulate(2, step).results)
    assert "split_sizes" in text


def three(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("tensors", "options", "call", "message"),
    [
        (three((4, 2, 8)) * 3, {"layout": "bsh"}, {}, "layout='bsh': expected one of shd"),
        (three((4, 2, 8)) * 3, {"lse_layout": "b"}, {}, "lse_layout='b'"),
        (three((4, 2, 8)) * 3, {"chunks": 0}, {}, "chunks=0"),
        (three((4, 2, 8)) * 3, {"chunks": 2.0}, {}, "chunks=2.0: expected a whole number"),
        (three((4, 2, 8)) * 3, {"chunks": None}, {}, "chunks=None: expected a whole number"),
        (three((4, 2, 8)) * 3, {"per_head": ["bias"]}, {}, "per_head is a list: expected a map"),
        (three((4, 2, 8)) * 3, {"per_head": {"bias": -3}}, {}, r"per_head\['bias'\] is -3"),
        (three((4, 8)) * 3, {}, {}, r"q has shape \(4, 8\): expected the 3 axes"),
        (three((4, 3, 2, 8)) * 3, {}, {}, "world_size=2.*layout='bshd'"),
        (three((4, 2, 8)) * 3, {"layout": "bshd"}, {}, "expected the 4 axes"),
        (three((4, 2, 8)) * 3, {}, {"split_sizes": [3, 4]}, r"4 tokens.*split_sizes\[0\]=3"),
        (three((4, 2, 8)) * 3, {}, {"split_sizes": [4]}, "1 entries"),
        (three((4, 2, 8), (5, 2, 8), (5, 2, 8)), {}, {}, "as many sequences and tokens"),
        (three((4, 4, 8), (4, 2, 8), (4, 1, 8)), {}, {}, "as many heads in k as in v"),
        (three((4, 4, 8), (4, 2, 4), (4, 2, 8)), {}, {}, "as many channels in q as in k"),
        (three((4, 4, 8), (4, 3, 8), (4, 3, 8)), {}, {}, "num_heads=4, num_kv_heads=3"),
        (three((4, 4, 8)) * 3, {}, {"attn_mask": torch.zeros(3, 8, 8)}, "3 on axis -3: expected 4"),
        (three((4, 4, 8)) * 3, {}, {"score_mod": 3}, "score_mod is a int"),
    ],
)
def test_refuses(
    tensors: list[torch.Tensor], options: dict[str, Any], call: dict[str, Any], message: str
) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return q.clone()

    def step(group: dist.ProcessGroup) -> Any:
        return UlyssesAttention(attention, group=group, **options)(*tensors, **call)

    with pytest.raises(ValueError, match=message):
        simulate(2, step)


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        (lambda q, k, v: (q, None), {}, "returned a tuple: expected a tensor.*lse_layout"),
        (lambda q, k, v: q, {"lse_layout": "sh"}, r"returned a Tensor: expected \(output, lse\)"),
        (lambda q, k, v: q.flatten(1), {}, "expected the 3 axes of layout"),
        (lambda q, k, v: q[1:], {}, r"\(1, 7, 1, 8\).*expected \(1, 8, 1\)"),
        (lambda q, k, v: q.double(), {}, "torch.float64 .*expected torch.float32"),
        (lambda q, k, v: (q, q[..., 0].half()), {"lse_layout": "sh"}, "log-sum-exp.*float16"),
        (lambda q, k, v: (q, q), {"lse_layout": "sh"}, "2 axes of lse_layout"),
    ],
)
def test_refuses_what_an_attention_returns(
    attention: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    def step(group: dist.ProcessGroup) -> Any:
        return UlyssesAttention(attention, group=group, **options)(*(three((4, 1, 8)) * 3))

    with pytest.raises(ValueError, match=message):
        simulate(2, step)


def test_refuses_what_cannot_be_called() -> None:
    with pytest.raises(ValueError, match="attention is a Tensor: expected a function"):
        UlyssesAttention(torch.zeros(3), group=LONE_RANK)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_joint", [False, True])
def test_a_lone_rank_attends_in_the_dtype_that_several_would(
    world_size: int, is_joint: bool
) -> None:
    """It got what it was given, so that a model of mixed dtypes ran on two ranks and not on one."""
    seen: list[set[torch.dtype]] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append({q.dtype, k.dtype, v.dtype})
        return v

    def step(group: dist.ProcessGroup) -> None:
        layer = UlyssesAttention(attention, group=group)
        qkv = [torch.ones(2, 2, 8), *(torch.ones(2, 2, 8, dtype=torch.bfloat16) for _ in "kv")]
        if is_joint:
            layer.joint(*qkv, *qkv)
        else:
            layer(*qkv)

    simulate(world_size, step)
    assert seen == [{torch.float32}] * world_size
