"""The timer sees every exchange with its bytes, changes no bit, and its summary adds up."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from magi2 import presets
from magi2.options import Options
from magi2.regions import Regions
from magi2.timing import (
    StepRecord,
    StepTimer,
    TimingSummary,
    draw_summary,
    gather_records,
    summarise,
)
from magi2.timing.exchanges import BRANCHES, DISPATCH, OUTPUT, QKV, RESULT, RETURN
from magi2.timing.records import Part
from magi2.topology import Topology
from tests.magi2.packed import packed_pair, without_padding
from tests.magi2.sharded import model_of
from ulysses_comm.simulate import simulate_world

CASES = {  # world size, cfg size, expert size, replicated exchange, splits
    "whole group": (4, 1, 4, False, [30, 0, 44, 1]),
    "runs": (4, 1, 2, False, [30, 0, 44, 1]),
    "replicas": (4, 1, 2, True, [20, 18, 19, 19]),
    "branches": (4, 2, 2, False, None),
    "lone experts": (2, 1, 1, False, [70, 5]),
}


def run_timed(case: str):
    """Two steps on simulated ranks: results and records of each rank, and the traffic."""
    world_size, cfg_size, expert_size, replicated, splits = CASES[case]
    config = presets.tiny()
    packed = packed_pair(config)
    if case in ("branches", "replicas"):
        packed = without_padding(packed)
    if case == "replicas":
        splits = [17, 19, 18, 18]
        assert sum(splits) == len(packed.x)
    options = Options(replicated_expert_exchange=replicated)

    def program():
        shape = (cfg_size, world_size // cfg_size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cfg", "sequence"))
        topology = Topology.of_mesh(mesh, cfg="cfg", expert_size=expert_size)
        model, plain = (model_of(config, topology, options) for _ in range(2))
        timer = StepTimer("cpu")
        with torch.no_grad():
            with timer.on(model):
                plan = model.plan(packed.coords, packed.modality, packed.cu_seqlens, splits)
                timer.start()
                results = []
                for _ in range(2):
                    results.append(model.run(packed.x, plan, packed.time_tokens))
                    timer.end_step()
            dist.barrier()
            expected = plain(*packed, splits)
        assert all(torch.equal(result, expected) for result in results)
        return timer.records, gather_records(timer.records)

    return simulate_world(world_size, program)


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_traffic_record(case):
    run = run_timed(case)
    records = [own for own, _ in run.results]
    # Three forwards: two timed ones, and one that is compared with.
    exchanges = run.traffic.select("all_to_all_single")
    sent = [sum(n for d, n in enumerate(row) if d != r) for r, row in enumerate(exchanges.matrix)]
    for rank, steps in enumerate(records):
        for step in steps:
            assert sum(part.bytes_sent for part in step.exchanges.values()) * 3 == sent[rank]
    names = {QKV: 4, OUTPUT: 4, RESULT: 1, DISPATCH: 2, RETURN: 2}
    if case == "branches":
        names[BRANCHES] = 1
    if case == "lone experts":
        names.pop(DISPATCH), names.pop(RETURN)
    assert {name: part.count for name, part in records[0][0].exchanges.items()} == names
    gathered = [everyone for _, everyone in run.results]
    assert all(everyone == records for everyone in gathered)


def test_parts_of_a_step_are_disjoint_and_named_by_region():
    config, timer = presets.tiny(), StepTimer("cpu")
    model, packed = model_of(config), packed_pair(config)
    timer.attach(model)
    with pytest.raises(ValueError, match="already"):
        timer.attach(model)
    with torch.no_grad():
        timer.start()
        model(*packed)
        record = timer.end_step()
        counts = {name: part.count for name, part in record.components.items()}
        assert counts == {
            "adapter-in": 1,
            "attention-in": 4,
            "attention": 4,
            "dense-out": 2,
            "moe-in": 2,
            "experts": 2,
            "moe-out": 2,
            "adapter-out": 1,
        }
        assert record.exchanges == {}
        named = sum(part.seconds for part in record.components.values())
        assert 0 < named <= record.model_seconds <= record.seconds
        timer.detach()
        model(*packed)
        assert timer.end_step().components == {}
    assert Regions.of(model) is not None


def test_a_model_that_runs_by_regions_already_goes_on_so():
    model, packed, called = model_of(presets.tiny()), packed_pair(presets.tiny()), []

    def call(name, function, module, order, *arguments):
        called.append(name)
        return function(module, *arguments)

    regions, timer = Regions(model, call), StepTimer("cpu")
    with torch.no_grad(), timer.on(model):
        assert Regions.of(model) is regions
        timer.start()
        model(*packed)
        components = timer.end_step().components
    assert sum(components[name].count for name in set(called)) == len(called) == 12


def test_steps_need_a_start():
    with pytest.raises(RuntimeError, match="start"):
        StepTimer("cpu").end_step()


class LateClock:
    """Moments that can be compared only once they are settled, as a GPU's events."""

    def __init__(self) -> None:
        self.taken, self.settled = [], 0

    def now(self):
        self.taken.append(time.perf_counter())
        return len(self.taken) - 1

    def settle(self):
        self.settled = len(self.taken)

    def seconds(self, start, end):
        assert max(start, end) < self.settled
        return self.taken[end] - self.taken[start]


def test_moments_are_compared_after_the_device_has_settled():
    config, timer = presets.tiny_uneven(), StepTimer("cpu", LateClock())
    model, packed = model_of(config), packed_pair(config)
    with torch.no_grad(), timer.on(model):
        timer.start()
        for _ in range(2):
            model(*packed)
            timer.end_step()
    assert len(timer.records) == 2
    assert all(record.seconds > record.model_seconds > 0 for record in timer.records)


@pytest.mark.gpu
def test_events_see_what_the_gpu_does():
    config, timer = presets.tiny(), StepTimer("cuda")
    model, packed = model_of(config).to("cuda"), packed_pair(config).to("cuda")
    with torch.no_grad(), timer.on(model):
        timer.start()
        for _ in range(3):
            model(*packed)
            torch.cuda._sleep(20_000_000)  # cycles: some milliseconds that no host clock waits for
            timer.end_step()
    for step in timer.records:
        named = sum(part.seconds for part in step.components.values())
        assert 0 < named <= step.model_seconds < step.seconds - 5e-3


def record(seconds: float, exchange: float, sent: int = 0, work: float = 0.5) -> StepRecord:
    return StepRecord(
        seconds=seconds,
        model_seconds=seconds - 0.25,
        components={"experts": Part(seconds=work, count=2)},
        exchanges={QKV: Part(seconds=exchange, count=4, bytes_sent=sent)},
    )


def two_ranks() -> list[list[StepRecord]]:
    first = [record(90.0, 1.0), record(9.0, 1.0), record(2.0, 0.5, 10), record(4.0, 1.0, 10)]
    second = [record(80.0, 1.0), record(9.0, 1.0), record(3.0, 1.0, 30, 1.0), record(3.0, 2.0, 30)]
    return [first, second]


def test_summary_takes_the_slowest_rank_and_leaves_two_steps_out():
    summary = summarise(two_ranks())
    assert summary.num_ranks == 2
    assert summary.measured_steps == [2, 3]
    assert summary.step_seconds == [90.0, 9.0, 3.0, 4.0]
    assert summary.fastest_rank_seconds == [80.0, 9.0, 2.0, 3.0]
    assert summary.mean_step_seconds == 3.5
    assert summary.mean_computing_seconds == (2.0 + 3.0) / 2
    assert summary.mean_model_seconds == 3.25
    assert summary.components["experts"] == Part(seconds=0.75, count=2)
    assert summary.exchanges[QKV] == Part(seconds=1.5, count=4, bytes_sent=30)
    assert summarise([two_ranks()[0][:2]]).measured_steps == [1]


@pytest.mark.parametrize("ranks", [[[]], [[record(1, 0)], []]])
def test_summary_refuses_unequally_many_steps(ranks):
    with pytest.raises(ValueError, match="equally"):
        summarise(ranks)


def test_summary_round_trips_and_is_drawn(tmp_path):
    summary = summarise(two_ranks(), simulated=True)
    path = summary.write(tmp_path / "deep" / "steps.json")
    assert TimingSummary.from_json(path.read_text()) == summary
    with pytest.raises(ValueError, match="format"):
        TimingSummary.from_json('{"format": 0}')
    picture = draw_summary(summary, tmp_path / "steps.png", title="two ranks")
    assert picture.read_bytes().startswith(b"\x89PNG")
