"""Joint tokens (a prompt beside an image) take part once, whoever holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.traffic import calls_of
from tests.ulysses_comm.attention_cases import (
    SPLITS,
    attention_with_lse,
    close,
    inputs,
    sdpa_of,
    shard,
    token_axis,
)
from ulysses_comm import UlyssesAttention, simulate

JOINT_SPLITS = {1: (4,), 2: (1, 3), 3: (2, 2, 0), 4: (0, 1, 3, 0), 5: (1, 1, 1, 0, 1)}
FP64 = torch.float64


def one_process(
    layout: str, whole: list[torch.Tensor], joint: list[torch.Tensor], place: str, **kwargs: Any
) -> list[torch.Tensor]:
    """Return the outputs for sharded and joint tokens."""
    axis, length = token_axis(layout), whole[0].shape[token_axis(layout)]
    pairs = [(j, w) if place == "front" else (w, j) for w, j in zip(whole, joint, strict=True)]
    output = sdpa_of(layout)(*(torch.cat(pair, dim=axis) for pair in pairs), **kwargs)
    extra = joint[0].shape[axis]
    sizes = [extra, length] if place == "front" else [length, extra]
    parts = output.split(sizes, dim=axis)
    return list(parts[::-1] if place == "front" else parts)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("place", ["front", "rear"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [(8, 8), (6, 3), (3, 1)])
def test_replicated_joint_tokens_appear_once(
    heads: tuple[int, int], world_size: int, place: str, chunks: int
) -> None:
    """vllm-omni #347, #1233, #6930; sglang #18516, #19419: text was gathered W times."""
    splits = SPLITS[world_size]
    for layout in ("shd", "bshd", "bhsd"):
        whole = inputs(layout, heads)
        joint = inputs(layout, heads, length=4, seed=1)
        weight, joint_weight = (inputs(layout, heads, length=n, seed=2)[0] for n in (9, 4))
        leaves = [t.clone().requires_grad_() for t in (*whole, *joint)]
        want, want_joint = one_process(layout, leaves[:3], leaves[3:], place)
        ((want * weight).sum() + (want_joint * joint_weight).sum()).backward()

        def step(
            group: dist.ProcessGroup,
            layout: str = layout,
            whole: list[torch.Tensor] = whole,
            joint: list[torch.Tensor] = joint,
            weight: torch.Tensor = weight,
            joint_weight: torch.Tensor = joint_weight,
        ) -> list[torch.Tensor | None]:
            rank = group.rank()
            layer = UlyssesAttention(sdpa_of(layout), group=group, layout=layout, chunks=chunks)
            own = [shard(t, splits, rank, layout).clone().requires_grad_() for t in whole]
            extra = [t.clone().requires_grad_() for t in joint]
            output, joint_output = layer.joint(*own, *extra, place=place, split_sizes=splits)
            loss = (output * shard(weight, splits, rank, layout)).sum()
            if rank == 0:  # what every rank has counts once
                loss = loss + (joint_output * joint_weight).sum()
            loss.backward()
            return [output, joint_output, *(t.grad for t in (*own, *extra))]

        results = simulate(world_size, step).results
        axis = token_axis(layout)
        close(torch.cat([r[0] for r in results], dim=axis), want)
        for _, joint_output, *_ in results:
            close(joint_output, want_joint)
        for index, leaf in enumerate(leaves):
            grads = [r[2 + index] for r in results]
            assert leaf.grad is not None
            if index < 3:
                close(torch.cat(grads, dim=axis), leaf.grad)
            else:
                grads = [torch.zeros_like(leaf) if grad is None else grad for grad in grads]
                close(torch.stack(grads).sum(0), leaf.grad)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("place", ["front", "rear"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sharded_joint_tokens_are_gathered_in_order(
    world_size: int, place: str, chunks: int
) -> None:
    splits, joint_splits = SPLITS[world_size], JOINT_SPLITS[world_size]
    whole, joint = inputs("bshd", (6, 2)), inputs("bshd", (6, 2), length=4, seed=1)
    mask = torch.ones(13, 13, dtype=torch.bool).tril()
    leaves = [t.clone().requires_grad_() for t in (*whole, *joint)]
    want, want_joint = one_process("bshd", leaves[:3], leaves[3:], place, attn_mask=mask)
    (want.square().sum() + want_joint.square().sum()).backward()

    def step(group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        rank = group.rank()
        layer = UlyssesAttention(sdpa_of("bshd"), group=group, layout="bshd", chunks=chunks)
        own = [t.split(splits, dim=1)[rank].clone().requires_grad_() for t in whole]
        extra = [t.split(joint_splits, dim=1)[rank].clone().requires_grad_() for t in joint]
        output, joint_output = layer.joint(
            *own,
            *extra,
            place=place,
            split_sizes=splits,
            joint_split_sizes=joint_splits,
            attn_mask=mask,
        )
        (output.square().sum() + joint_output.square().sum()).backward()
        return [output, joint_output, *(t.grad for t in (*own, *extra))]

    results = simulate(world_size, step).results
    for index, expected in enumerate((want, want_joint, *(leaf.grad for leaf in leaves))):
        close(torch.cat([r[index] for r in results], dim=1), expected)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_joint_tokens_have_their_log_sum_exp(world_size: int) -> None:
    splits = SPLITS[world_size]
    whole, joint = inputs("bshd", (6, 6)), inputs("bshd", (6, 6), length=4, seed=1)
    pairs = zip(whole, joint, strict=True)
    output, lse = attention_with_lse(*(torch.cat([j, w], dim=1) for w, j in pairs))

    def step(group: dist.ProcessGroup) -> Any:
        layer = UlyssesAttention(attention_with_lse, group=group, layout="bshd", lse_layout="bhs")
        local = [t.split(splits, dim=1)[group.rank()] for t in whole]
        return layer.joint(*local, *joint, split_sizes=splits)

    results = simulate(world_size, step).results
    close(torch.cat([own[0] for own, _ in results], dim=1), output[:, 4:])
    close(torch.cat([own[1] for own, _ in results], dim=2), lse[:, :, 4:])
    for _, (joint_output, joint_lse) in results:
        close(joint_output, output[:, :4])
        close(joint_lse, lse[:, :, :4])


def test_joint_tokens_need_no_collective_of_their_own() -> None:
    whole, joint = inputs("bshd", (4, 4)), inputs("bshd", (4, 4), length=4, seed=1)

    def step(group: dist.ProcessGroup) -> None:
        layer = UlyssesAttention(sdpa_of("bshd"), group=group, layout="bshd")
        local = [t.split(SPLITS[3], dim=1)[group.rank()] for t in whole]
        layer.joint(*local, *joint, split_sizes=SPLITS[3])

    assert len(calls_of(simulate(3, step))) == 2


@pytest.mark.parametrize(
    ("joint", "options", "message"),
    [
        (
            torch.zeros(1, 4, 2, 8, dtype=FP64),
            {},
            r"joint_q is \(1, 4, 2, 8\).*same dtype and axes",
        ),
        (torch.zeros(2, 4, 6, 8), {}, "joint_q is .*float32 beside .*float64"),
        (torch.zeros(2, 4, 8), {}, "joint_q has shape .*4 axes of layout='bshd'"),
        (None, {"place": "middle"}, "place='middle'"),
        (None, {"joint_split_sizes": [3, 1]}, r"4 tokens.*joint_split_sizes\[0\]=3"),
    ],
)
def test_refuses(joint: torch.Tensor | None, options: dict[str, Any], message: str) -> None:
    def step(group: dist.ProcessGroup) -> None:
        layer = UlyssesAttention(sdpa_of("bshd"), group=group, layout="bshd")
        local = [t[:, :4] for t in inputs("bshd", (6, 6))]
        extra = [t[:, :4] if joint is None else joint for t in local]
        layer.joint(*local, *extra, **options)

    with pytest.raises(ValueError, match=message):
        simulate(2, step)
