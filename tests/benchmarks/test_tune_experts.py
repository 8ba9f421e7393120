"""The ways that the tuner tries are valid, differ, and find their way to a worker and back."""

from __future__ import annotations

import argparse
import pickle

import pytest
import torch

from benchmarks.expert_cases import SHAPES, ExpertInputs, Shape
from benchmarks.tune_experts import KINDS, jobs_of


def test_every_way_is_tried_once_at_each_shape() -> None:
    jobs = jobs_of(argparse.Namespace(device="cuda", limit=0, only=None))
    assert len(set(jobs)) == len(jobs)
    assert {job.kind for job in jobs} == set(KINDS)
    for shape in SHAPES:
        assert sum(job.shape == shape for job in jobs) == len(jobs) / len(SHAPES)
    assert pickle.loads(pickle.dumps(jobs)) == jobs


def test_floors_are_those_of_the_production_shapes() -> None:
    memory, matrix = (max(shape.floor_us[i] for shape in SHAPES) for i in (0, 1))
    assert memory == pytest.approx(1438, abs=1)
    assert matrix == pytest.approx(663, abs=1)
    assert "6.04 GB" in SHAPES[0].floor
    assert "0.524 TFLOP" in SHAPES[1].floor


@pytest.mark.parametrize("groups", [3, 5, 1024])
def test_grouped_products_of_torch_are_the_experts_at_any_cut(groups: int) -> None:
    inputs = ExpertInputs(Shape("small", 60, 2, 2, 5, 32, 48), torch.device("cpu"))
    inputs.close_to(inputs.summed, 1e-2)(inputs.grouped_mm(groups))
