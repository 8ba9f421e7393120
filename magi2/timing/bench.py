"""Steps of a model with random inputs, timed on all its ranks."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import re
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from magi2.checkpoint import load_checkpoint
from magi2.compiling import compile_model
from magi2.config import Magi2Config
from magi2.denoiser import Denoiser
from magi2.determinism import deterministic_mode
from magi2.geometry import Geometry
from magi2.launch import DEFAULT_TIMEOUT, ParallelSizes, Ranks, run_on_ranks
from magi2.ops.rotary import rotary_bands
from magi2.options import Options
from magi2.packing import Conditioning
from magi2.sampler import SamplerState, draw_noise, sample
from magi2.settings import SamplingSettings
from magi2.timing.records import gather_records
from magi2.timing.summary import TimingSummary, summarise
from magi2.timing.timer import StepTimer
from magi2.transformer import Magi2Transformer

if TYPE_CHECKING:
    from magi2.compiling import RegionCompiler

# Weights of these names are small offsets and gains; all others are matrices.
_SMALL = re.compile(r"(norm(_video|_audio)?\.weight|sinks|mhc_(alpha|bias)_\w+|bias(_ema)?)$")
_INPUT_MAJOR = re.compile(r"(moe_mlp\.W_\w+|mhc_phi_fused_\w+)$")


class Watcher(Protocol):
    """Who is told how a benchmark goes on."""

    def phase(self, text: str) -> None:
        """Hear what begins now."""

    def step(self, done: int, total: int, seconds: float) -> None:
        """Hear that a step is done, and how long it took."""


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What to time.

    Args:
        config: The model's.
        geometry: The clip.
        text_lengths: Text tokens of the prompt and of the negative prompt.
        num_steps: Steps to run; the first two are left out of means.
        checkpoint: Folder of the weights; None for random ones.
        options: Of the model.
        compile: "off", "static" or "dynamic".
        deterministic: Whether eager code and compiles are to repeat their bits.
        seed: Of weights and inputs.

    Raises:
        ValueError: If a number is none that a run can have.
    """

    config: Magi2Config
    geometry: Geometry
    text_lengths: tuple[int, int]
    num_steps: int
    checkpoint: Path | None = None
    options: Options = field(default_factory=Options)
    compile: str = "off"
    deterministic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps}: expected 1 or more.")
        if self.compile not in ("off", "static", "dynamic"):
            raise ValueError(f"compile={self.compile!r}: expected 'off', 'static' or 'dynamic'.")


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What came out, the same on every rank but for `is_first`.

    Attributes:
        summary: Times and bytes.
        facts: What was run, where, and the most memory that a rank's tensors took on a GPU.
        is_first: Whether this rank speaks for all.
    """

    summary: TimingSummary
    facts: dict[str, Any]
    is_first: bool

    def to_json(self) -> str:
        """Facts and summary."""
        document = {"facts": self.facts, "summary": json.loads(self.summary.to_json())}
        return json.dumps(document, indent=2) + "\n"


def bench_step(
    request: BenchRequest,
    *,
    sizes: ParallelSizes | None = None,
    simulate: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    progress: Watcher | None = None,
) -> BenchResult:
    """Run the request's steps on all ranks together and time them.

    Args:
        request: What to time; the same on every rank.
        sizes: How the ranks divide the work.
        simulate: As in `magi2.launch.run_on_ranks`, as are device, backend and timeout.
        device: "cpu", "cuda" or "musa"; None for what the machine has.
        backend: Of torch.distributed; None for the one that fits.
        timeout: How long a rank waits for others.
        progress: Told of phases and steps on the first rank, between the steps that are timed.

    Raises:
        ValueError: If the model cannot run so.
        RankFailedError: On several processes, whatever ended the run.
    """
    bench = _Bench(request, progress)
    with deterministic_mode(request.deterministic):
        return run_on_ranks(
            bench.on_rank,
            sizes or ParallelSizes(),
            num_expert_heads=request.config.moe.num_heads,
            simulate=simulate,
            device=device,
            backend=backend,
            timeout=timeout,
        )


def fill_randomly(model: Magi2Transformer, seed: int) -> None:
    """Random weights, drawn on the model's device, so that the released sizes take seconds.

    Ranks agree on what they hold both; experts differ with the first head that a rank holds.
    """
    first_head = model.expert_heads.start
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("rope.bands"):
                tensor.copy_(rotary_bands(tensor.shape[0], tensor.device))
                continue
            place = first_head if ".moe_mlp." in name else 0
            generator = torch.Generator(tensor.device)
            generator.manual_seed(zlib.crc32(f"{seed} {place} {name}".encode()))
            if _SMALL.search(name):
                tensor.uniform_(-0.1, 0.1, generator=generator)
            elif tensor.numel():
                inputs = tensor.shape[-2] if _INPUT_MAJOR.search(name) else tensor.shape[-1]
                tensor.normal_(std=1 / math.sqrt(inputs), generator=generator)


class _Bench:
    """One benchmark in this process, for one rank or for all simulated ones."""

    def __init__(self, request: BenchRequest, progress: Watcher | None) -> None:
        self.request = request
        self._progress = progress
        self._compiler: RegionCompiler | None = None  # of all simulated ranks

    def on_rank(self, ranks: Ranks) -> BenchResult:
        request, told = self.request, self._progress if ranks.is_first else None
        if told is not None:
            told.phase("making weights" if request.checkpoint is None else "loading weights")
        model, timer = self._model(ranks), StepTimer(ranks.device)

        def on_step(state: object) -> None:
            record = timer.end_step()
            if told is not None:
                told.step(len(timer.records), request.num_steps, record.seconds)
                timer.start()  # no step holds the telling

        settings = SamplingSettings(num_inference_steps=request.num_steps)
        with timer.on(model):
            denoiser = Denoiser(model, request.geometry, self._conditioning(ranks.device))
            config = request.config
            channels = config.video_channels, config.audio_channels
            noise = draw_noise(request.geometry, *channels, request.seed, ranks.device)
            if told is not None:
                told.phase(
                    f"timing {request.num_steps} steps of {denoiser.layout.num_tokens:,} tokens"
                )
            timer.start()
            sample(denoiser, SamplerState.start(*noise), settings, on_step)
        everyone = gather_records(timer.records)
        summary = summarise(everyone, simulated=ranks.launcher == "simulated")
        facts = self._facts(ranks, denoiser.layout.num_tokens, denoiser.plan.sequence.split_sizes)
        return BenchResult(summary=summary, facts=facts, is_first=ranks.is_first)

    def _model(self, ranks: Ranks) -> Magi2Transformer:
        request = self.request
        model = Magi2Transformer(request.config, request.options, ranks.topology, device="meta")
        if request.checkpoint is not None:
            load_checkpoint(model, request.checkpoint, ranks.device)
        else:
            model.to_empty(device=ranks.device)
            fill_randomly(model, request.seed)
        if request.compile != "off":
            self._compiler = compile_model(
                model,
                dynamic=request.compile == "dynamic",
                deterministic=request.deterministic,
                compiler=self._compiler,
            )
        return model

    def _conditioning(self, device: torch.device) -> Conditioning:
        generator = torch.Generator().manual_seed(self.request.seed)
        prompt, negative = (
            torch.randn(tokens, self.request.config.text_channels, generator=generator).to(device)
            for tokens in self.request.text_lengths
        )
        return Conditioning(prompt=prompt, negative=negative)

    def _facts(self, ranks: Ranks, tokens: int, split_sizes: tuple[int, ...]) -> dict[str, Any]:
        request, topology, device = self.request, ranks.topology, ranks.device
        peak = None
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
        return {
            "config": request.config.to_dict()["arch_config"],
            "weights": "random" if request.checkpoint is None else request.checkpoint.name,
            "geometry": dataclasses.asdict(request.geometry),
            "text_tokens": list(request.text_lengths),
            "tokens": tokens,
            "tokens_of_a_rank": max(split_sizes),
            "ranks": ranks.world_size,
            "launcher": ranks.launcher,
            "ulysses_degree": topology.sequence_size,
            "cfg_parallel_size": topology.cfg_size,
            "expert_parallel_size": topology.expert_size,
            "options": dataclasses.asdict(request.options),
            "compile": request.compile,
            "deterministic": request.deterministic,
            "device": _device_name(device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "peak_memory_bytes_of_rank_0": peak,
        }


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    return str(torch.get_device_module(device).get_device_name(device))


def keep_layers(config: Magi2Config, num_layers: int) -> Magi2Config:
    """The configuration with its first layers alone.

    Raises:
        ValueError: If it has fewer.
    """
    if not 1 <= num_layers <= config.num_layers:
        raise ValueError(
            f"{num_layers} layers of a model of {config.num_layers}: expected 1 to "
            f"{config.num_layers}."
        )
    return dataclasses.replace(
        config,
        num_layers=num_layers,
        multimodal_layers=tuple(n for n in config.multimodal_layers if n < num_layers),
        moe=dataclasses.replace(
            config.moe, layers=tuple(n for n in config.moe.layers if n < num_layers)
        ),
    )
