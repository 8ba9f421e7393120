"""The denoising loop: from noise to latents, step by step, and on from any step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from magi2.checks import describe, parse_json
from magi2.denoiser import Velocities
from magi2.geometry import Geometry
from magi2.guidance import guide_audio, guide_video
from magi2.schedule import (
    SolverState,
    flow_timesteps,
    make_solver,
    restore_solver,
    solver_state,
)
from magi2.settings import SamplingSettings

Denoise = Callable[[torch.Tensor, torch.Tensor, int], Velocities]
_STATE_FORMAT = "1"
_STREAMS = ("video", "audio")


@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """Where a run is between two steps; nothing else is needed to go on.

    Its tensors are never written to: a state may be kept while the run goes on.

    Args:
        step: Steps done.
        video: (1, video channels, frames, rows, columns) float32: the latents of the next step.
        audio: (1, audio latents, audio channels) float32.
        video_solver: What the video's solver carries over.
        audio_solver: What the audio's solver carries over.
    """

    step: int
    video: torch.Tensor
    audio: torch.Tensor
    video_solver: SolverState
    audio_solver: SolverState

    @classmethod
    def start(cls, video: torch.Tensor, audio: torch.Tensor) -> SamplerState:
        """The state before the first step, with the latents that noise was drawn for."""
        fresh = SolverState({}, {"step": 0})
        return cls(step=0, video=video, audio=audio, video_solver=fresh, audio_solver=fresh)


def draw_noise(
    geometry: Geometry,
    video_channels: int,
    audio_channels: int,
    seed: int,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The noise that a clip starts from: first the video's, then the audio's.

    The same seed gives every rank the same values on devices of one kind; a GPU's differ from a
    CPU's. They are those that `torch.manual_seed(seed)` and `torch.randn` give, and the global
    generators are left as they are. The reference adds a clip's index in its batch to the seed.

    Args:
        geometry: The clip.
        video_channels: Of a video latent.
        audio_channels: Of an audio latent.
        seed: From 0 to 2**63 - 1.
        device: Where the noise is drawn and stays.

    Returns:
        Video (1, video channels, frames, rows, columns) and audio (1, audio latents, audio
        channels), float32.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: expected an integer from 0 to 2**63 - 1.")
    generator = torch.Generator(device).manual_seed(seed)
    video, audio = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        for shape in (geometry.video_shape(video_channels), geometry.audio_shape(audio_channels))
    )
    return video, audio


def sample(
    denoise: Denoise,
    state: SamplerState,
    settings: SamplingSettings,
    on_step: Callable[[SamplerState], None] | None = None,
) -> SamplerState:
    """Do the steps that are left.

    Video and audio have solvers of their own and are stepped at the same timesteps.

    Args:
        denoise: Velocities of latents at a timestep, such as a `Denoiser`.
        state: Where to begin: `SamplerState.start`, or any state that `on_step` was given.
        settings: Steps and guidance, the same as before if a run goes on.
        on_step: Called after every step with the state, also after the last.

    Returns:
        The state after the last step; its latents are the result.

    Raises:
        ValueError: If the state does not belong to so many steps.
        RuntimeError: If a velocity is not finite, or of another shape than its latent.

    Going on from a state gives the same bits as a run without a stop.
    """
    timesteps = flow_timesteps(settings.num_inference_steps, settings.shift)
    video_solver, audio_solver = make_solver(settings), make_solver(settings)
    _check_steps(state, len(timesteps))
    restore_solver(video_solver, state.video_solver)
    restore_solver(audio_solver, state.audio_solver)
    for step in range(state.step, len(timesteps)):
        timestep = timesteps[step]
        video, audio = state.video, state.audio
        velocities = denoise(video, audio, timestep)
        video_velocity = guide_video(
            velocities.video_prompt, velocities.video_negative, video, timestep, settings
        )
        audio_velocity = guide_audio(
            velocities.audio_prompt, velocities.audio_negative, audio, settings
        )
        _check_velocity("video", video_velocity, video, step)
        _check_velocity("audio", audio_velocity, audio, step)
        state = SamplerState(
            step=step + 1,
            video=video_solver.step(video_velocity, timestep, video).prev_sample,
            audio=audio_solver.step(audio_velocity, timestep, audio).prev_sample,
            video_solver=solver_state(video_solver),
            audio_solver=solver_state(audio_solver),
        )
        if on_step is not None:
            on_step(state)
    return state


def state_to_tensors(state: SamplerState) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A state as named tensors and strings, as a safetensors file holds them.

    `state_from_tensors` is the inverse. The tensors are the state's own, not copies.
    """
    tensors = {"video": state.video, "audio": state.audio}
    metadata = {"state_format": _STATE_FORMAT, "step": str(state.step)}
    for name in _STREAMS:
        solver: SolverState = getattr(state, f"{name}_solver")
        for key, tensor in solver.tensors.items():
            tensors[f"{name}_solver.{key}"] = tensor
        metadata[f"{name}_solver"] = json.dumps(solver.values, sort_keys=True)
    return tensors, metadata


def state_from_tensors(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    device: torch.device | str = "cpu",
) -> SamplerState:
    """The state that `state_to_tensors` was given.

    Args:
        tensors: By name, on any device.
        metadata: Strings; further ones are left alone.
        device: Where the state's tensors are to be, as copies.

    Raises:
        ValueError: If tensors or strings are missing, unknown or contradict each other.
    """
    if metadata.get("state_format") != _STATE_FORMAT:
        raise ValueError(
            f"the sampler's state has format {metadata.get('state_format')!r}: expected "
            f"{_STATE_FORMAT!r}. Start the run anew, or go on with the version that wrote it."
        )
    # Copies of their own: a file's bytes may be mapped, and lie at any address.
    own = {name: tensor.detach().to(device, copy=True) for name, tensor in tensors.items()}
    latents = {name: _take_latent(own, name) for name in _STREAMS}
    solvers = {}
    for name in _STREAMS:
        prefix = f"{name}_solver."
        mine = {
            key.removeprefix(prefix): own.pop(key) for key in list(own) if key.startswith(prefix)
        }
        for key, tensor in mine.items():
            if tensor.shape != latents[name].shape or tensor.dtype != torch.float32:
                raise ValueError(
                    f"the sampler's state holds {prefix}{key}, {describe(tensor)}: expected "
                    f"{tuple(latents[name].shape)} torch.float32, as the {name} latent."
                )
        solvers[name] = SolverState(mine, _counters(metadata, f"{name}_solver"))
    if own:
        raise ValueError(f"the sampler's state holds unknown tensors {sorted(own)}.")
    state = SamplerState(
        step=solvers["video"].values.get("step", -1),
        video=latents["video"],
        audio=latents["audio"],
        video_solver=solvers["video"],
        audio_solver=solvers["audio"],
    )
    if metadata.get("step") != str(state.step):
        raise ValueError(
            f"the sampler's state is of step {metadata.get('step')!r} and its video solver's of "
            f"{state.step}: expected the same. Its file is damaged; start the run anew."
        )
    return state


def _take_latent(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    dims = {"video": 5, "audio": 3}[name]
    latent = tensors.pop(name, None)
    if latent is None or latent.dim() != dims or latent.dtype != torch.float32:
        raise ValueError(
            f"the sampler's state has a {name} latent {describe(latent)}: expected {dims} "
            "dimensions of torch.float32."
        )
    return latent


def _counters(metadata: Mapping[str, str], name: str) -> dict[str, int]:
    try:
        values: Any = parse_json(metadata.get(name, ""))
    except ValueError:
        values = None
    whole = isinstance(values, dict) and all(type(value) is int for value in values.values())
    if not whole:
        raise ValueError(
            f"the sampler's state has {name}={metadata.get(name)!r}: expected a JSON object of "
            "integers."
        )
    return dict(values)


def check_state(
    state: SamplerState,
    settings: SamplingSettings,
    video_shape: tuple[int, ...],
    audio_shape: tuple[int, ...],
) -> None:
    """Refuse a state that `sample` cannot go on from with these settings and sizes.

    Raises:
        ValueError: If its latents have other shapes, or its solvers' states contradict it or the
            number of steps.
    """
    for name, shape in (("video", video_shape), ("audio", audio_shape)):
        latent = getattr(state, name)
        if latent.shape != shape:
            raise ValueError(f"the {name} latent is {describe(latent)}: expected {shape}.")
    _check_steps(state, settings.num_inference_steps)
    for stored in (state.video_solver, state.audio_solver):
        restore_solver(make_solver(settings), stored)


def _check_steps(state: SamplerState, num_steps: int) -> None:
    steps = (state.step, *(s.values.get("step") for s in (state.video_solver, state.audio_solver)))
    if len(set(steps)) != 1 or not 0 <= state.step <= num_steps:
        raise ValueError(
            f"the state has done {state.step} steps, its solvers {list(steps[1:])}: expected the "
            f"same, from 0 to {num_steps}. Go on with the settings that the run was begun with."
        )


def _check_velocity(name: str, velocity: torch.Tensor, latent: torch.Tensor, step: int) -> None:
    if velocity.shape != latent.shape:
        raise RuntimeError(
            f"the {name} velocity of step {step + 1} is {describe(velocity)}: expected "
            f"{tuple(latent.shape)}, as the latent."
        )
    if not bool(velocity.isfinite().all()):
        raise RuntimeError(
            f"the {name} velocity of step {step + 1} holds NaN or infinity: expected finite "
            "numbers. The weights, the text features or the state that the run went on from are "
            "damaged, or the guidance scale is far too large."
        )
