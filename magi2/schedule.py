"""Noise levels and the solver that goes from one to the next.

The solver is diffusers' multistep UniPC, of order 2, given the reference's noise levels: with
them its numbers are the reference's, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from magi2.extras import require
from magi2.settings import SamplingSettings

NUM_TIMESTEPS = 1000
# The reference's largest noise level before the shift, which it holds in float32.
_SIGMA_MAX = float(np.float32(0.999))
_ORDER = 2


class SolverState(NamedTuple):
    """What a solver carries from one step to the next.

    Args:
        tensors: Data predictions of the last steps and the last corrected sample.
        values: Counters, ready for JSON.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, int]


def flow_sigmas(num_steps: int, shift: float) -> torch.Tensor:
    """Noise level of each step, and 0 at the end.

    Returns:
        (num_steps + 1,) float32, falling from just below 1.
    """
    levels = np.append(_shifted(num_steps, shift), 0.0)
    return torch.from_numpy(levels.astype(np.float32))


def flow_timesteps(num_steps: int, shift: float) -> list[int]:
    """What the model is told of each step's noise level: its thousandths, rounded down.

    Neighbours may be equal where steps are many.
    """
    # From the float64 levels: rounding to float32 first could reach the next integer.
    return [int(level) for level in NUM_TIMESTEPS * _shifted(num_steps, shift)]


def make_solver(settings: SamplingSettings) -> Any:
    """A fresh solver, set to the first step: diffusers' UniPCMultistepScheduler.

    Steps are counted. The reference looks its first timestep up instead, and with 168 steps or
    more, where that occurs twice at the released shift, skips a step and fails at the end.

    Raises:
        ModuleNotFoundError: If diffusers is not installed.
        RuntimeError: If this version of diffusers makes other noise levels of those it is given.
    """
    scheduler = require("diffusers", "sampling").UniPCMultistepScheduler
    num_steps, shift = settings.num_inference_steps, settings.shift
    solver = scheduler(
        num_train_timesteps=NUM_TIMESTEPS,
        solver_order=_ORDER,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift,
    )
    # Its own levels would start and end elsewhere, and the timesteps differ by up to 7.
    solver.set_timesteps(sigmas=_unshifted(num_steps))
    solver.set_begin_index(0)
    same = torch.equal(solver.sigmas, flow_sigmas(num_steps, shift))
    if not same or solver.timesteps.tolist() != flow_timesteps(num_steps, shift):
        raise RuntimeError(
            f"diffusers' UniPCMultistepScheduler makes other noise levels for {num_steps} steps "
            f"and shift {shift} than it was given: expected them unchanged, as diffusers 0.42 "
            "leaves them. Install such a version."
        )
    return solver


def solver_state(solver: Any) -> SolverState:
    """Take out what the solver's next steps depend on; its tensors are shared, not copied."""
    if solver.step_index is None:
        return SolverState({}, {"step": 0})
    tensors = {
        f"data_prediction_{place}": prediction
        for place, prediction in enumerate(solver.model_outputs)
        if prediction is not None
    }
    tensors["corrected_sample"] = solver.last_sample
    values = {
        "step": solver.step_index,
        "order": solver.this_order,
        "num_predictions": solver.lower_order_nums,
    }
    return SolverState(tensors, values)


def restore_solver(solver: Any, state: SolverState) -> None:
    """Put a fresh solver where another was: its next steps have the same bits.

    Raises:
        ValueError: If the state is none that `solver_state` returns for as many steps.
    """
    tensors, values = state
    step = values.get("step")
    num_steps = len(solver.timesteps)
    if not isinstance(step, int) or not 0 <= step <= num_steps:
        raise ValueError(f"the solver's state is of step {step!r}: expected 0 to {num_steps}.")
    if step == 0:
        solver.set_begin_index(0)
        return
    kept = min(_ORDER, step)
    places = range(_ORDER - kept, _ORDER)
    expected = {"corrected_sample", *(f"data_prediction_{place}" for place in places)}
    counters = {"step", "order", "num_predictions"}
    if set(tensors) != expected or set(values) != counters:
        raise ValueError(
            f"the solver's state of step {step} holds {sorted(tensors)} and {sorted(values)}: "
            f"expected {sorted(expected)} and {sorted(counters)}."
        )
    if values["num_predictions"] != kept or not 1 <= values["order"] <= kept:
        raise ValueError(
            f"the solver's state of step {step} says num_predictions={values['num_predictions']} "
            f"and order={values['order']}: expected {kept}, and 1 to {kept}."
        )
    solver.set_begin_index(step)
    solver.model_outputs = [tensors.get(f"data_prediction_{place}") for place in range(_ORDER)]
    solver.timestep_list = [
        int(solver.timesteps[step - _ORDER + place]) if place in places else None
        for place in range(_ORDER)
    ]
    solver.lower_order_nums = values["num_predictions"]
    solver.this_order = values["order"]
    solver.last_sample = tensors["corrected_sample"]


def _unshifted(num_steps: int) -> npt.NDArray[np.float64]:
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps}: expected a positive integer.")
    return np.linspace(_SIGMA_MAX, 0.0, num_steps + 1)[:-1]


def _shifted(num_steps: int, shift: float) -> npt.NDArray[np.float64]:
    if not math.isfinite(shift) or shift <= 0:
        raise ValueError(f"shift={shift}: expected a positive number.")
    levels = _unshifted(num_steps)
    return shift * levels / (1 + (shift - 1) * levels)
