"""The demo over real processes: started here, or by torchrun."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from ulysses_comm.demo.attention import ATTENTION_NAME, LAYOUTS, Layout, register_attention
from ulysses_comm.demo.encoder import (
    find_model_folder,
    load_encoder,
    load_passage,
    run_unsharded,
)
from ulysses_comm.demo.judge import Results, Run, Sent, Verdict, judge
from ulysses_comm.demo.options import Plan
from ulysses_comm.demo.recording import RankSent, RecordingGroup
from ulysses_comm.demo.simulated import draw
from ulysses_comm.demo.splits import SPLITS
from ulysses_comm.demo.step import run_rank
from ulysses_comm.simulator.traffic import CollectiveRecord, RankCall, Traffic

# A rank that is lost ends the others with an error after this time.
TIMEOUT = timedelta(seconds=120)
# What takes every rank seconds to import.
PRELOADED = ("transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert")


def run_started_ranks(plan: Plan) -> Results:
    """Start gloo processes on this machine and run every case of the plan on them.

    Raises:
        torch.multiprocessing.ProcessRaisedException: If a rank raises, with its traceback.
    """
    # The ranks are forked from a server that has imported all this once, without starting a thread.
    multiprocessing.set_forkserver_preload([__name__, *PRELOADED])
    with tempfile.TemporaryDirectory(prefix="ulysses-comm-demo-") as folder:
        start_processes(
            _started_rank,
            args=(plan, folder),
            nprocs=plan.group_sizes[0],
            start_method="forkserver",
        )
        results: Results = pickle.loads((Path(folder) / "results").read_bytes())
        return results


def run_launched_rank(plan: Plan) -> Results:
    """Run every case of the plan on torchrun's ranks, of which this process is one.

    Returns:
        The results, the same on every rank.
    """
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        return _run_cases(plan)
    finally:
        dist.destroy_process_group()


def _started_rank(rank: int, plan: Plan, folder: str) -> None:
    world_size = plan.group_sizes[0]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group(
        "gloo",
        init_method=(Path(folder) / "rendezvous").as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    try:
        results = _run_cases(plan)
        if rank == 0:
            (Path(folder) / "results").write_bytes(pickle.dumps(results))
    finally:
        dist.destroy_process_group()


def _run_cases(plan: Plan) -> Results:
    """Run both layouts of every case on this rank; rank 0 judges and tells the others."""
    group = dist.group.WORLD
    assert group is not None, "called between init_process_group and destroy_process_group"
    folder = find_model_folder()
    token_ids = load_passage(folder).token_ids
    register_attention()
    model = load_encoder(folder, ATTENTION_NAME)
    reference = run_unsharded(folder, token_ids) if group.rank() == 0 else None
    verdicts: list[Verdict] = []
    drawable: list[tuple[Traffic, list[int]]] = []
    for name in plan.split_names:
        split_sizes = SPLITS[name](token_ids.shape[1], group.size())
        packed, in_place = (
            _run_layout(model, token_ids, split_sizes, layout, group) for layout in LAYOUTS
        )
        if reference is not None:
            verdicts.append(judge(name, split_sizes, packed[0], in_place[0], reference))
            drawable.append((in_place[1], split_sizes))
    box = [None if reference is None else Results(verdicts, reference.isolated_error)]
    dist.broadcast_object_list(box, src=0, group=group)
    assert box[0] is not None, "rank 0 sends results"
    # After the last collective, so that a picture that fails keeps nobody waiting.
    if plan.picture is not None and drawable:
        draw(*drawable[0], plan.picture)
    return box[0]


def _run_layout(
    model: Any,
    token_ids: torch.Tensor,
    split_sizes: list[int],
    layout: Layout,
    group: dist.ProcessGroup,
) -> tuple[Run, Traffic]:
    """Run this rank's share, and bring every rank's outcome and record to every rank."""
    recording = RecordingGroup(group)
    outcome = run_rank(model, token_ids, split_sizes, layout, recording)
    gathered = [(outcome, recording.record)] * group.size()
    dist.all_gather_object(gathered, (outcome, recording.record), group=group)
    records = [record for _, record in gathered]
    exchanges = _as_traffic(records)
    sent = Sent(
        bytes=exchanges.matrix,
        copied=[record.copied_bytes for record in exchanges],
        digests=[list(ranks) for ranks in zip(*(r.digests for r in records), strict=True)],
        addresses=[list(ranks) for ranks in zip(*(r.addresses for r in records), strict=True)],
    )
    return Run(layout=layout, outcomes=[one for one, _ in gathered], sent=sent), exchanges


def _as_traffic(records: Sequence[RankSent]) -> Traffic:
    """Put every rank's record together, in the form in which the simulator keeps its own."""
    ranks = range(len(records))
    exchanges = range(len(records[0].bytes))
    return Traffic(
        len(records),
        [
            CollectiveRecord(
                kind="all_to_all_single",
                group="gloo",
                ranks=tuple(ranks),
                index=index,
                calls=[RankCall(rank, (), True, records[rank].copied[index]) for rank in ranks],
                sent=[record.bytes[index] for record in records],
            )
            for index in exchanges
        ],
    )
