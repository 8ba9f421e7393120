"""Noise levels against the reference's, and the solver against its plain equations."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from magi2.schedule import (
    flow_sigmas,
    flow_timesteps,
    make_solver,
    restore_solver,
    solver_state,
)
from magi2.settings import SamplingSettings
from tests.magi2.golden import check_close, golden_files, rms_error

# Relative RMS over all steps, by the number of steps up to which it holds: differences of close
# noise levels lose digits. Measured: 1.1e-7, 9.1e-7 and 4.2e-6 to the same equations in float32,
# where up to four steps are equal bit for bit; 3.1e-7, 9.2e-7 and 4.2e-6 to float64.
SOLVER_RMS = {
    np.float32: ((4, 0.0), (100, 2e-7), (300, 1.5e-6), (1000, 8e-6)),
    np.float64: ((4, 9e-8), (100, 5e-7), (300, 1.5e-6), (1000, 8e-6)),
}


def solver_of(num_steps: int, shift: float = 7.0):
    return make_solver(SamplingSettings(num_inference_steps=num_steps, shift=shift))


def velocity(x, timestep: int):
    """A velocity for which steps do not cancel."""
    return x / 2 + timestep / 1000


def run(solver, x: torch.Tensor, num_steps: int | None = None) -> list[torch.Tensor]:
    """Samples after each step that is left, or after the next few."""
    done = solver.step_index or solver.begin_index
    samples = []
    for timestep in solver.timesteps[done:][:num_steps].tolist():
        x = solver.step(velocity(x, timestep), timestep, x).prev_sample
        samples.append(x)
    return samples


def plain_unipc(x: np.ndarray, num_steps: int, dtype: type) -> list[np.ndarray]:
    """Order 2, B2, data prediction, from its equations, all in one precision.

    The noise levels are those that float32 holds, as the solver's are.
    """
    sigma = flow_sigmas(num_steps, 7.0).numpy().astype(dtype)
    timesteps = flow_timesteps(num_steps, 7.0)
    alpha = 1 - sigma
    with np.errstate(divide="ignore"):
        level = np.log(alpha) - np.log(sigma)
    x = corrected = x.astype(dtype)
    m, order, samples = [], 0, []
    for k in range(num_steps):
        m.append(x - sigma[k] * velocity(x, dtype(timesteps[k])))
        if k:
            h = level[k] - level[k - 1]
            e = np.expm1(-h)
            if order == 1:
                change = (m[k] - m[k - 1]) / 2
            else:
                r, q = (level[k - 2] - level[k - 1]) / h, -h
                phi1 = e / q - 1
                b1, b2 = phi1 / e, 2 * (phi1 / q - dtype(0.5)) / e
                rho1 = (b1 - b2) / (1 - r)
                change = rho1 * (m[k - 2] - m[k - 1]) / r + (b1 - rho1) * (m[k] - m[k - 1])
            corrected = sigma[k] / sigma[k - 1] * corrected - alpha[k] * e * (m[k - 1] + change)
        order = min(2, num_steps - k, k + 1)
        h = level[k + 1] - level[k]
        e = np.expm1(-h)
        x = sigma[k + 1] / sigma[k] * corrected - alpha[k + 1] * e * m[k]
        if order == 2:
            r = (level[k - 1] - level[k]) / h
            x = x - alpha[k + 1] * e * (m[k - 1] - m[k]) / r / 2
        samples.append(x)
    return samples


@golden_files("schedules")
def test_noise_levels_match_the_reference(golden):
    for name, config in golden.config.items():
        steps, shift = config["num_inference_steps"], config["shift"]
        sigmas, timesteps = flow_sigmas(steps, shift), flow_timesteps(steps, shift)
        check_close(name, sigmas, golden[f"out.{name}.sigmas"], golden.tolerance["sigmas"])
        assert torch.equal(sigmas, golden[f"out.{name}.sigmas"])
        assert timesteps == golden[f"out.{name}.timesteps"].tolist()
        solver = solver_of(steps, shift)
        assert torch.equal(solver.sigmas, sigmas)
        assert solver.timesteps.tolist() == timesteps


def test_noise_levels_are_the_stated_ones():
    stated = [0.99985701, 0.95437175, 0.87478107, 0.69971985, 0.0]
    assert flow_sigmas(4, 7.0).tolist() == pytest.approx(stated, abs=5e-9)
    assert flow_timesteps(4, 7.0) == [999, 954, 874, 699]
    sigmas, timesteps = flow_sigmas(100, 7.0).tolist(), flow_timesteps(100, 7.0)
    first = [0.99985701, 0.99841505, 0.99694800, 0.99545509, 0.99393564]
    assert sigmas[:5] == pytest.approx(first, abs=5e-9)
    assert sigmas[-4:] == pytest.approx([0.17781526, 0.12488838, 0.06597544, 0.0], abs=5e-9)
    assert timesteps[:6] == [999, 998, 996, 995, 993, 992]
    assert timesteps[-5:] == [269, 225, 177, 124, 65]


def test_solver_gives_the_stated_scalars():
    samples = run(solver_of(4), torch.ones(1, 1))
    stated = [0.93181759, 0.82097363, 0.61228037, -0.09103614]
    assert [float(x) for x in samples] == pytest.approx(stated, abs=9e-8)


@pytest.mark.parametrize("dtype", SOLVER_RMS)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 8, 20, 100, 167, 168, 300, 1000])
def test_solver_agrees_with_its_plain_equations(num_steps, dtype):
    starts = np.array([1.0, -0.3, 2.5], dtype=np.float32)
    samples = torch.stack(run(solver_of(num_steps), torch.from_numpy(starts)[None]))[:, 0].numpy()
    expected = np.stack(plain_unipc(starts, num_steps, dtype))
    assert expected.dtype == dtype
    assert samples.shape == (num_steps, 3)
    limit = next(rms for most, rms in SOLVER_RMS[dtype] if num_steps <= most)
    assert rms_error(torch.from_numpy(samples), torch.from_numpy(expected)) <= limit


def test_solver_counts_steps_where_a_timestep_occurs_twice():
    # There the reference begins at the second occurrence and runs off the end.
    assert len(set(flow_timesteps(167, 7.0)[:2])) == 2
    assert len(set(flow_timesteps(168, 7.0)[:2])) == 1
    solver = solver_of(168)
    samples = run(solver, torch.ones(1, 1))
    assert solver.step_index == len(samples) == 168


def test_last_sample_is_the_last_data_prediction():
    solver = solver_of(3)
    *_, x, last = run(solver, torch.randn(1, 4))
    sigma, timestep = solver.sigmas[-2], int(solver.timesteps[-1])
    assert torch.equal(last, x - sigma * velocity(x, timestep))


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_solver_goes_on_from_every_step_with_the_same_bits(num_steps):
    start = torch.randn(1, 3, 2, 2, 2)
    whole = run(solver_of(num_steps), start)
    for done in range(num_steps + 1):
        first = solver_of(num_steps)
        x = [start, *run(first, start, done)][-1]
        state = solver_state(first)
        assert state.values["step"] == done
        second = solver_of(num_steps)
        restore_solver(second, state)
        rest = run(second, x)
        assert len(rest) == num_steps - done
        assert all(torch.equal(a, b) for a, b in zip(rest, whole[done:], strict=True))
        if done < num_steps:
            assert solver_state(second).values == {
                "step": num_steps,
                "order": 1,
                "num_predictions": min(2, num_steps),
            }


def test_a_state_is_not_changed_by_going_on():
    solver = solver_of(4)
    samples = run(solver, torch.randn(1, 3), 2)
    tensors, values = solver_state(solver)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    run(solver, samples[-1])
    assert values["step"] == 2
    assert sorted(tensors) == ["corrected_sample", "data_prediction_0", "data_prediction_1"]
    assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 9}, "of step 9: expected 0 to 4"),
        ({"step": None}, "of step None"),
        ({"step": 1}, r"of step 1 holds .*expected \['corrected_sample', 'data_prediction_1'\]"),
        ({"num_predictions": 1}, "num_predictions=1"),
        ({"order": 3}, "order=3"),
        ({"more": 3}, "more"),
    ],
)
def test_rejects_a_state_of_another_solver(changes, message):
    solver = solver_of(4)
    run(solver, torch.randn(1, 3), 2)
    tensors, values = solver_state(solver)
    with pytest.raises(ValueError, match=message):
        restore_solver(solver_of(4), (tensors, {**values, **changes}))
    with pytest.raises(ValueError, match="of step 2 holds"):
        restore_solver(solver_of(4), ({}, values))


@pytest.mark.parametrize("shift", [0.0, -1.0, math.nan, math.inf])
def test_rejects_shifts_that_are_none(shift):
    with pytest.raises(ValueError, match="shift="):
        flow_sigmas(4, shift)


def test_rejects_no_steps():
    with pytest.raises(ValueError, match="num_steps=0"):
        flow_timesteps(0, 7.0)


def test_a_missing_diffusers_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ModuleNotFoundError, match=r"diffusers.*ulysses-comm\[pipeline\]"):
        solver_of(4)


def test_a_diffusers_that_changes_the_levels_is_refused(monkeypatch):
    from diffusers import UniPCMultistepScheduler

    own = UniPCMultistepScheduler.set_timesteps
    monkeypatch.setattr(
        UniPCMultistepScheduler, "set_timesteps", lambda self, sigmas: own(self, len(sigmas))
    )
    with pytest.raises(RuntimeError, match="other noise levels for 4 steps"):
        solver_of(4)
