"""The demo over ranks inside this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ulysses_comm.demo.attention import ATTENTION_NAME, LAYOUTS, Layout, register_attention
from ulysses_comm.demo.encoder import (
    find_model_folder,
    load_encoder,
    load_passage,
    run_unsharded,
)
from ulysses_comm.demo.judge import Results, Run, Sent, judge
from ulysses_comm.demo.options import Plan
from ulysses_comm.demo.splits import SPLITS
from ulysses_comm.demo.step import run_rank
from ulysses_comm.simulate import simulate
from ulysses_comm.simulator.traffic import SentBuffer, Traffic


def run_simulated_ranks(plan: Plan) -> Results:
    """Run every group size of the plan with every way to split, both layouts each."""
    folder = find_model_folder()
    token_ids = load_passage(folder).token_ids
    register_attention()
    model = load_encoder(folder, ATTENTION_NAME)
    reference = run_unsharded(folder, token_ids)
    verdicts = []
    for world_size in plan.group_sizes:
        for name in plan.split_names:
            split_sizes = SPLITS[name](token_ids.shape[1], world_size)
            packed, in_place = (
                run_layout(model, token_ids, split_sizes, layout) for layout in LAYOUTS
            )
            verdicts.append(judge(name, split_sizes, packed[0], in_place[0], reference))
            drawn = (max(plan.group_sizes), plan.split_names[0])
            if plan.picture is not None and (world_size, name) == drawn:
                draw(in_place[1], split_sizes, plan.picture)
    return Results(verdicts, reference.isolated_error)


def run_layout(
    model: Any, token_ids: torch.Tensor, split_sizes: list[int], layout: Layout
) -> tuple[Run, Traffic]:
    """Run one layout on simulated ranks.

    Returns:
        What the ranks brought back, and the record of the exchanges only.
    """
    simulation = simulate(
        len(split_sizes),
        lambda group: run_rank(model, token_ids, split_sizes, layout, group),
        seed=0,
        digests=True,
    )
    exchanges = simulation.traffic.select("all_to_all_single")
    return Run(layout=layout, outcomes=simulation.results, sent=_summary(exchanges)), exchanges


def draw(exchanges: Traffic, split_sizes: Sequence[int], picture: Path) -> None:
    """Draw who sent how much to whom."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    exchanges.draw(picture, title=f"Tokens of each rank: {' '.join(map(str, split_sizes))}")


def _summary(exchanges: Traffic) -> Sent:
    calls = [[record.call_of(rank) for rank in record.ranks] for record in exchanges]
    return Sent(
        bytes=exchanges.matrix,
        copied=[record.copied_bytes for record in exchanges],
        digests=[[_digest(call.buffers[0]) for call in ranks] for ranks in calls],
        addresses=[[call.buffers[0].data_ptr for call in ranks] for ranks in calls],
    )


def _digest(buffer: SentBuffer) -> str:
    assert buffer.digest is not None, "simulate(digests=True) hashes what is sent"
    return buffer.digest
