"""From a request to video and audio: the one place that knows every part.

    result = generate("checkpoint", GenerateRequest(output=Path("out"), prompt="..."), simulate=4)

The first rank reads, encodes, decodes and writes; every rank samples. Docs: docs/pipeline.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from magi2.checkpoint import load_checkpoint
from magi2.conditioning import Conditioning
from magi2.decoding import Decoders, load_decoders
from magi2.denoiser import Denoiser
from magi2.determinism import deterministic_mode
from magi2.fingerprint import common_facts, conditioning_sha256, fingerprint_of
from magi2.generate_request import GenerateRequest
from magi2.geometry import Geometry
from magi2.inputs import Inputs, encode_inputs, read_inputs
from magi2.launch import DEFAULT_TIMEOUT, ParallelSizes, Ranks, run_on_ranks
from magi2.ops.attention_backends import check_attention_device
from magi2.ops.backend import check_device
from magi2.output_folder import FEATURES_NAME, OutputFolder, bytes_needed
from magi2.rank_agreement import check_alike, check_latents
from magi2.release import Release, open_release
from magi2.results import require_packages, write_results
from magi2.run_state import StoredState, check_same_run, load_state, save_state
from magi2.sampler import (
    SamplerState,
    check_state,
    draw_noise,
    sample,
    state_from_tensors,
    state_to_tensors,
)
from magi2.schedule import make_solver
from magi2.settings import SamplingSettings
from magi2.transformer import Magi2Transformer
from ulysses_comm import hardware

if TYPE_CHECKING:
    from magi2.compiling import RegionCompiler


class Progress(Protocol):
    """What a run tells while it goes on; only the first rank tells."""

    def phase(self, text: str) -> None:
        """Say what begins now, such as "loading the transformer"."""

    def step(self, done: int, total: int, seconds: float) -> None:
        """Say that a step is done, its state saved, and how long it took."""


class Silence:
    """Progress that nobody watches."""

    def phase(self, text: str) -> None:
        """Say nothing."""

    def step(self, done: int, total: int, seconds: float) -> None:
        """Say nothing."""


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """What a run leaves behind, the same on every rank.

    Args:
        video: (video channels, frames, rows, columns) float32 latent, on the CPU.
        audio: (audio latents, audio channels) float32 latent, on the CPU.
        hashes: SHA-256 of the raw bytes of what was made, by name.
        files: What was written.
        notes: What the run did without, in sentences.
        step_seconds: Time of each step done now, on this rank.
        resumed_from: Steps that an earlier run had done; 0 for none.
        is_first: Whether this is the rank that speaks for all.
    """

    video: torch.Tensor
    audio: torch.Tensor
    hashes: Mapping[str, str]
    files: tuple[Path, ...]
    notes: tuple[str, ...]
    step_seconds: tuple[float, ...]
    resumed_from: int
    is_first: bool


def generate(
    folder: str | Path,
    request: GenerateRequest,
    *,
    parts: Mapping[str, Path | None] | None = None,
    sizes: ParallelSizes | None = None,
    simulate: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    progress: Progress | None = None,
) -> GenerateResult:
    """Make one clip, on all ranks together.

    Args:
        folder: A checkpoint as `magi2.release.open_release` takes it.
        request: The clip; the same on every rank.
        parts: Where optional parts are, by key of `magi2.release.PARTS`.
        sizes: How the ranks divide the work; None for all on the tokens.
        simulate: As in `magi2.launch.run_on_ranks`, as are device, backend and timeout.
        device: "cpu", "cuda" or "musa"; None for what the machine has.
        backend: Of torch.distributed; None for the one that fits.
        timeout: How long a rank waits for others.
        progress: Is told how the run goes on.

    Raises:
        ValueError: If anything that was asked for cannot be: before weights are read.
        OSError: If something cannot be written; the state of the last saved step stays.
        RankFailedError: On several processes, whatever ended the run.
    """
    run = _Run(Path(folder), request, parts or {}, sizes or ParallelSizes(), progress or Silence())
    with deterministic_mode(request.deterministic), contextlib.closing(run.output):
        return run_on_ranks(
            run.on_rank,
            run.sizes,
            num_expert_heads=lambda: run.release.config.moe.num_heads,
            simulate=simulate,
            device=device,
            backend=backend,
            timeout=timeout,
        )


class _Run:
    """One run in this process, for one rank or for all simulated ones."""

    def __init__(
        self,
        folder: Path,
        request: GenerateRequest,
        parts: Mapping[str, Path | None],
        sizes: ParallelSizes,
        progress: Progress,
    ) -> None:
        self.folder = folder
        self.request = request
        self.parts = parts
        self.sizes = sizes
        self.progress = progress
        self.output = OutputFolder(request.output)
        self._release: Release | None = None
        # Of the first rank alone:
        self._inputs: Inputs | None = None
        self._stored: StoredState | None = None
        self._fingerprint: dict[str, str] = {}
        self._decoders = Decoders()
        # Simulated ranks compile once for all.
        self._compiler: RegionCompiler | None = None

    @property
    def release(self) -> Release:
        """The checkpoint, looked through when it is first asked for."""
        if self._release is None:
            self._release = open_release(self.folder, self.parts)
        return self._release

    @property
    def settings(self) -> SamplingSettings:
        """The checkpoint's, with what the request changes."""
        return self.request.settings_of(self.release.settings)

    @property
    def geometry(self) -> Geometry:
        """Of the clip."""
        return self.request.geometry_of(self.settings)

    @property
    def seed(self) -> int:
        """Of the noise."""
        return self.release.seed if self.request.seed is None else self.request.seed

    def on_rank(self, ranks: Ranks) -> GenerateResult:
        """The whole run, on one rank."""
        settings, geometry = self.settings, self.geometry
        if ranks.launcher != "simulated":
            check_alike(self._common_facts(), ranks.world_size)
        # Of no use yet: to find out at once whether there is one.
        make_solver(settings)
        for option in ("moe_backend", "qkv_backend", "mhc_backend"):
            check_device(option, getattr(self.request.options, option), ranks.device)
        check_attention_device(self.request.options.attention_backend, ranks.device)
        # Shapes alone, first of all: it knows which numbers of ranks it can run on.
        model = Magi2Transformer(
            self.release.config, self.request.options, ranks.topology, device="meta"
        )
        ranks.on_first(lambda: self._check(ranks))
        self._phase(ranks, "preparing text and images")
        conditioning = ranks.on_first(lambda: self._encode(ranks.device))
        fingerprint, stored = ranks.on_first(lambda: self._identify(conditioning))
        ranks.on_first(self._load_decoders)
        self._phase(ranks, "loading the transformer")
        _free_memory(ranks.device)
        self._load(model, ranks)
        denoiser = Denoiser(
            model,
            geometry,
            conditioning,
            pad_to_multiple_of=self.request.pad_to_multiple_of,
            time_channels=settings.time_channels,
        )
        start = self._start(ranks, stored)
        self._phase(ranks, "sampling")
        steps = _Steps(self, ranks, fingerprint)
        state = sample(denoiser, start, settings, steps)
        del denoiser, model
        _free_memory(ranks.device)
        video, audio = state.video[0].cpu(), state.audio[0].cpu()
        check_latents(video, audio, ranks.world_size)
        self._phase(ranks, "decoding and writing")
        results = ranks.on_first(
            lambda: write_results(
                self.output,
                video,
                audio,
                self._decoders,
                release=self.release,
                device=ranks.device,
                facts=self._facts(ranks, fingerprint, steps.seconds, start.step),
                fps=settings.fps,
            )
        )
        return GenerateResult(
            video=video,
            audio=audio,
            hashes=results.hashes,
            files=results.files,
            notes=results.notes,
            step_seconds=tuple(steps.seconds),
            resumed_from=start.step,
            is_first=ranks.is_first,
        )

    def _phase(self, ranks: Ranks, text: str) -> None:
        if ranks.is_first:
            self.progress.phase(text)

    def _common_facts(self) -> dict[str, str]:
        return common_facts(self.request, self.release, self.settings, self.geometry, self.seed)

    def _check(self, ranks: Ranks) -> None:
        """Everything that can be known before weights are read."""
        release, geometry, request = self.release, self.geometry, self.request
        if any(self.output.path.resolve() == folder.resolve() for folder in release.searched):
            raise ValueError(
                f"the output folder {self.output.path} is the checkpoint's: expected another, for "
                "results there would be taken for parts of it. Choose one with --output."
            )
        self._inputs = read_inputs(request, release, self.settings, geometry)
        decodes = not {"turbo_decoder", "video_vae"}.isdisjoint(release.parts)
        require_packages(decodes_video=decodes, decodes_audio="audio_vae" in release.parts)
        config = release.config
        # Last, for it may discard a run: not because of a request that is refused anyway.
        resumes = self.output.prepare(
            resume=request.resume,
            overwrite=request.overwrite,
            keep=(*release.parts.values(), *request.images),
            num_bytes=bytes_needed(
                geometry, config.video_channels, config.audio_channels, decodes_video=decodes
            ),
        )
        self._fingerprint = fingerprint_of(self._common_facts(), self._inputs, ranks)
        self._stored = load_state(self.output.state) if resumes else None
        self._check_stored(but_for=("conditioning",))
        if self._stored is not None:
            self._check_state(self._stored)

    def _check_stored(self, but_for: tuple[str, ...] = ()) -> None:
        """Refuse a state of another run."""
        if self._stored is not None:
            known = {n: v for n, v in self._stored.fingerprint.items() if n not in but_for}
            step = self._stored.metadata.get("step", "?")
            check_same_run(self.output.state, known, self._fingerprint, step)

    def _check_state(self, stored: StoredState) -> None:
        """Refuse a state that says it is of this run and cannot be."""
        config, geometry = self.release.config, self.geometry
        shapes = (
            geometry.video_shape(config.video_channels),
            geometry.audio_shape(config.audio_channels),
        )
        try:
            state = state_from_tensors(stored.tensors, stored.metadata)
            check_state(state, self.settings, *shapes)
        except ValueError as error:
            raise ValueError(
                f"{self.output.state} cannot be gone on with: {error} Discard it with --overwrite."
            ) from error

    def _encode(self, device: torch.device) -> Conditioning:
        assert self._inputs is not None, "checked before"
        inputs, self._inputs = self._inputs, None
        kept = self.output.path / FEATURES_NAME
        # A state that was accepted is of these texts, and so are features beside it.
        use_kept = self._stored is not None
        return encode_inputs(inputs, self.release, self.settings, device, kept, use_kept=use_kept)

    def _identify(self, conditioning: Conditioning) -> tuple[dict[str, str], StoredState | None]:
        """What this run is recognised by, and the state to go on with, if it is of this run."""
        self._fingerprint["conditioning"] = conditioning_sha256(conditioning)
        self._check_stored()
        stored, self._stored = self._stored, None
        return self._fingerprint, stored

    def _load_decoders(self) -> None:
        self._decoders = load_decoders(self.release)

    def _load(self, model: Magi2Transformer, ranks: Ranks) -> None:
        """Read this rank's weights, and compile what is to be compiled."""
        request = self.request
        load_checkpoint(model, self.release.folder, ranks.device)
        if request.compile != "off":
            from magi2.compiling import compile_model

            self._compiler = compile_model(
                model,
                dynamic=request.compile == "dynamic",
                deterministic=request.deterministic,
                compiler=self._compiler,
            )

    def _start(self, ranks: Ranks, stored: StoredState | None) -> SamplerState:
        if stored is not None:
            return state_from_tensors(stored.tensors, stored.metadata, ranks.device)
        config = self.release.config
        channels = (config.video_channels, config.audio_channels)
        return SamplerState.start(*draw_noise(self.geometry, *channels, self.seed, ranks.device))

    def _facts(
        self,
        ranks: Ranks,
        fingerprint: Mapping[str, str],
        step_seconds: list[float],
        resumed_from: int,
    ) -> dict[str, object]:
        topology = ranks.topology
        return {
            "seed": self.seed,
            "geometry": dataclasses.asdict(self.geometry),
            "settings": dataclasses.asdict(self.settings),
            "ranks": {
                "launcher": ranks.launcher,
                "world_size": ranks.world_size,
                "ulysses_degree": topology.sequence_size,
                "cfg_parallel_size": topology.cfg_size,
                "expert_parallel_size": topology.expert_size,
            },
            "options": dataclasses.asdict(self.request.options),
            "compile": self.request.compile,
            "deterministic": self.request.deterministic,
            # Also versions, device and threads: hashes are to be equal where this is.
            "fingerprint": dict(fingerprint),
            "resumed_from": resumed_from,
            "step_seconds": step_seconds,
        }


class _Steps:
    """Is called after each step: measures, saves the state, tells."""

    def __init__(self, run: _Run, ranks: Ranks, fingerprint: Mapping[str, str]) -> None:
        self.run = run
        self.ranks = ranks
        self.fingerprint = fingerprint
        self.total = run.settings.num_inference_steps
        self.seconds: list[float] = []
        self._began = time.perf_counter()

    def __call__(self, state: SamplerState) -> None:
        hardware.synchronize(self.ranks.device)
        self.seconds.append(time.perf_counter() - self._began)
        if self.ranks.is_first:
            every = self.run.request.save_every
            if every and (state.step % every == 0 or state.step == self.total):
                save_state(self.run.output.state, *state_to_tensors(state), self.fingerprint)
            self.run.progress.step(state.step, self.total, self.seconds[-1])
        self._began = time.perf_counter()


def _free_memory(device: torch.device) -> None:
    """Make room for the next large model: the encoders' goes before, the transformer's after."""
    gc.collect()
    if hardware.is_accelerator(device):
        torch.get_device_module(device).empty_cache()
