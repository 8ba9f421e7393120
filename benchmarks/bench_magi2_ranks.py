"""Two layers of MAGI-2 on several GPUs: equal to the simulator's, and what a step is made of.

    python benchmarks/bench_magi2_ranks.py --layout sp2 cfg2              two GPUs
    python benchmarks/bench_magi2_ranks.py --layout sp4 sp8 sp8ep4 sp4cfg2
    python benchmarks/bench_magi2_ranks.py --device cpu --preset tiny     gloo, to check this script

One dense and one mixture layer of the released width with random weights; tokens as many a rank as
the released clip has on eight. The same ranks are simulated on one device first. Both runs are
deterministic, with the same kernels on the same shapes, so the bits are expected to be equal; where
they are not the largest difference is printed. Timed steps follow, with torch's usual kernels. Each
run has processes of its own, so that one that fails costs no other.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a bare checkout

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.processes import failure_of, run_script_on_ranks
from magi2 import presets
from magi2.config import Magi2Config
from magi2.denoiser import Denoiser
from magi2.determinism import deterministic_mode
from magi2.geometry import Geometry
from magi2.launch import ParallelSizes, Ranks, run_on_ranks
from magi2.packing import Conditioning
from magi2.sampler import SamplerState, draw_noise, sample
from magi2.settings import SamplingSettings
from magi2.timing import StepTimer, gather_records, summarise
from magi2.timing.bench import fill_randomly
from magi2.transformer import Magi2Transformer

# (ranks, sizes) by name; an expert size of None is the largest that pads no head.
LAYOUTS = {
    "sp2": (2, ParallelSizes(ulysses=2)),
    "cfg2": (2, ParallelSizes(cfg=2)),
    "sp4": (4, ParallelSizes(ulysses=4)),
    "sp2cfg2": (4, ParallelSizes(ulysses=2, cfg=2)),
    "sp8": (8, ParallelSizes(ulysses=8)),
    "sp8ep4": (8, ParallelSizes(ulysses=8, expert=4)),
    "sp4cfg2": (8, ParallelSizes(ulysses=4, cfg=2)),
}
TRANSPORTS = {"NCCL": "collective", "symmetric": "symm_mem"}
CHECKED_STEPS = 2
TEXT_TOKENS = 222
SIMULATED, LEFT_OUT = "simulated", "left out: "


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.run is not None:
        _run_rank(options)
    else:
        _run_all(options)


def _run_all(options: argparse.Namespace) -> None:
    """Simulate, run over each transport and compare, layout by layout."""
    device = harness.usable_device(options.device)
    name = f"magi2-ranks-{harness.device_name(device)}.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    deadline, lines = time.monotonic() + options.seconds, []
    for layout in options.layout:
        with tempfile.TemporaryDirectory(prefix="bench-magi2-") as folder:
            left = deadline - time.monotonic()
            if left < 20:
                print(f"{layout} is left out: the time is over", flush=True)
                continue
            of_layout = _run_layout(options, layout, Path(folder), deadline)
        for line in of_layout:
            with (options.out / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        lines += of_layout
        _print_steps(layout, of_layout)
    _print_verdicts(lines)
    print(f"appended to {options.out / name}")
    ran = [line for line in lines if not line["problem"].startswith(LEFT_OUT)]
    if not ran or any(line["problem"] or not line["equal"] for line in ran):
        raise SystemExit("not every layout ran and equals the simulation")


def _run_layout(
    options: argparse.Namespace, layout: str, folder: Path, deadline: float
) -> list[dict[str, Any]]:
    world_size, _ = LAYOUTS[layout]
    shared = ["--device", options.device, "--preset", options.preset, "--steps",
              str(options.steps), "--layout", layout, "--tokens", str(options.tokens),
              "--folder", str(folder)]  # fmt: skip
    runs = {SIMULATED: (1, {})} | {
        transport: (world_size, {"ULYSSES_COMM_TRANSPORT": TRANSPORTS[transport]})
        for transport in options.transport
    }
    lines, expected = [], None
    for run, (processes, environment) in runs.items():
        seconds = min(options.limit, deadline - time.monotonic())
        codes = run_script_on_ranks(
            Path(__file__),
            [*shared, "--run", run],
            world_size=processes,
            seconds=seconds,
            environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **environment},
        )
        path = folder / f"{run}.pt"
        found = torch.load(path, weights_only=False) if path.exists() else {}
        problem = found.get("problem") or ("" if found else failure_of(codes) or "no result")
        if run == SIMULATED:
            expected = found.get("outputs")
            if problem:
                print(f"{layout}: the simulation failed: {problem}", flush=True)
            continue
        line = {"bench": "magi2-ranks", "layout": layout, "transport": run, "problem": problem,
                "equal": False, **_compare(found.get("outputs"), expected),
                **found.get("facts", {})}  # fmt: skip
        lines.append(line)
        if problem:
            print(f"{layout}, {run}: {problem}", flush=True)
    return lines


def _compare(outputs: dict[str, torch.Tensor] | None, expected: Any) -> dict[str, Any]:
    """Whether the bits are those of the simulation; how far off they are if not."""
    if outputs is None or expected is None:
        return {"comparison": "nothing to compare"}
    differences = {}
    for name, want in expected.items():
        got = outputs[name]
        if not torch.equal(got.view(torch.int32), want.view(torch.int32)):
            off = (got - want).double()
            rms = float(off.norm() / want.double().norm())
            differences[name] = f"max abs {float(off.abs().max()):.3e}, relative RMS {rms:.2e}"
    said = "; ".join(f"{name}: {text}" for name, text in differences.items())
    return {"equal": not differences, "comparison": said or "every bit equals the simulation's"}


def _run_rank(options: argparse.Namespace) -> None:
    """One process: all simulated ranks, or one real one."""
    (layout,) = options.layout
    world_size, sizes = LAYOUTS[layout]
    simulated = options.run == SIMULATED
    if options.device == "cpu":
        torch.set_num_threads(1)
    bench = _Bench(options, world_size, simulated)
    # The mode is the process's: once around all simulated ranks.
    with deterministic_mode() if simulated else nullcontext():
        found = run_on_ranks(
            bench.on_rank,
            sizes,
            num_expert_heads=bench.config.moe.num_heads,
            simulate=world_size if simulated else None,
            device=options.device,
            timeout=timedelta(seconds=60),
        )
    if simulated or os.environ["RANK"] == "0":
        torch.save(found, options.folder / f"{options.run}.pt")
    sys.stdout.flush()
    os._exit(0)


class _Bench:
    """What every rank of one run does."""

    def __init__(self, options: argparse.Namespace, world_size: int, simulated: bool) -> None:
        self.options, self.simulated = options, simulated
        self.config = two_layers(getattr(presets, options.preset)())
        self.geometry = geometry_of(options.preset, world_size, options.tokens)

    def on_rank(self, ranks: Ranks) -> dict[str, Any]:
        reason = self._missing_transport(ranks)
        if reason:
            return {"problem": f"{LEFT_OUT}{reason}"}
        model = Magi2Transformer(self.config, topology=ranks.topology, device="meta")
        model.to_empty(device=ranks.device)
        fill_randomly(model, seed=0)
        denoiser = Denoiser(model, self.geometry, self._conditioning(ranks.device))
        with nullcontext() if self.simulated else deterministic_mode():
            outputs = self._outputs(denoiser, ranks)
        if self.simulated:
            return {"outputs": outputs}
        return {"outputs": outputs, "facts": self._timed(model, ranks, outputs)}

    def _missing_transport(self, ranks: Ranks) -> str:
        """Why the exchanges do not go through what the environment asks for; empty if they do."""
        wish = os.environ.get("ULYSSES_COMM_TRANSPORT", "collective")
        if self.simulated or wish == "collective":
            return ""
        try:
            from ulysses_comm import use_transport
        except ImportError:
            return "this ulysses_comm has no use_transport"
        try:
            # Every group that exchanges: the environment decides for those made later, too.
            choice = use_transport(dist.group.WORLD, wish)
        except (RuntimeError, ValueError) as error:
            return str(error)
        return "" if choice.name == wish else choice.reason

    def _conditioning(self, device: torch.device) -> Conditioning:
        generator = torch.Generator().manual_seed(0)
        prompt, negative = (
            torch.randn(TEXT_TOKENS, self.config.text_channels, generator=generator).to(device)
            for _ in range(2)
        )
        return Conditioning(prompt=prompt, negative=negative)

    def _noise(self, device: torch.device) -> SamplerState:
        channels = self.config.video_channels, self.config.audio_channels
        # Drawn on the CPU: simulated ranks have random streams of their own on a GPU.
        noise = draw_noise(self.geometry, *channels, 0, torch.device("cpu"))
        return SamplerState.start(*(tensor.to(device) for tensor in noise))

    def _outputs(self, denoiser: Denoiser, ranks: Ranks) -> dict[str, torch.Tensor]:
        start = self._noise(ranks.device)
        velocities = denoiser(start.video, start.audio, 700)
        settings = SamplingSettings(num_inference_steps=CHECKED_STEPS)
        end = sample(denoiser, start, settings)
        found = {
            "velocity of the video": velocities.video_prompt,
            "velocity of the negative": velocities.video_negative,
            "velocity of the audio": velocities.audio_prompt,
            f"video after {CHECKED_STEPS} steps": end.video,
            f"audio after {CHECKED_STEPS} steps": end.audio,
        }
        return {name: tensor.detach().float().cpu() for name, tensor in found.items()}

    def _timed(
        self, model: Magi2Transformer, ranks: Ranks, outputs: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        timer = StepTimer(ranks.device)
        with timer.on(model):
            denoiser = Denoiser(model, self.geometry, self._conditioning(ranks.device))
            timer.start()
            settings = SamplingSettings(num_inference_steps=self.options.steps)
            sample(denoiser, self._noise(ranks.device), settings, timer.on_step)
        summary = summarise(gather_records(timer.records))
        own: dict[str, Any] = {"digest": _digest(outputs), "peak_bytes": None}
        if ranks.device.type == "cuda":
            own["peak_bytes"] = torch.cuda.max_memory_allocated(ranks.device)
        everyone: list[dict[str, Any]] = [own] * ranks.world_size
        dist.all_gather_object(everyone, own)
        return {
            "ranks": ranks.world_size,
            "tokens": denoiser.layout.num_tokens,
            "tokens_of_a_rank": max(denoiser.plan.sequence.split_sizes),
            "expert_parallel_size": ranks.topology.expert_size,
            "peak_bytes": [rank["peak_bytes"] for rank in everyone],
            "ranks_agree": len({rank["digest"] for rank in everyone}) == 1,
            "transport_said": _explain(ranks),
            "summary": json.loads(summary.to_json()),
            "versions": harness.versions(),
            "device": harness.device_name(ranks.device),
        }


def two_layers(config: Magi2Config) -> Magi2Config:
    """A dense layer that knows modalities apart, then one with the mixture."""
    moe = dataclasses.replace(config.moe, layers=(1,))
    return dataclasses.replace(config, num_layers=2, multimodal_layers=(0,), moe=moe)


def geometry_of(preset: str, world_size: int, tokens: int) -> Geometry:
    """A clip of the released size whose length gives each rank about so many tokens."""
    if preset != "preview":
        return Geometry.of(width=64, height=64, num_frames=13)
    frames = max(1, round(125 * world_size * tokens / (8 * 3702)))
    return Geometry.of(width=448, height=256, num_frames=max(1, (frames - 1) // 4 * 4 + 1))


def _explain(ranks: Ranks) -> str:
    try:
        from ulysses_comm import explain_transport
    except ImportError:
        return "collective: the only one there is"
    return str(explain_transport(ranks.topology.sequence_group))


def _digest(outputs: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in outputs.values():
        total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def _print_steps(layout: str, lines: Sequence[dict[str, Any]]) -> None:
    """Where a step's time goes, transports side by side."""
    timed = [line for line in lines if "summary" in line]
    if not timed:
        return
    parts = {
        line["transport"]: {**line["summary"]["components"], **line["summary"]["exchanges"]}
        for line in timed
    }
    header = ["", *(f"{transport} ms" for transport in parts), "times", "MB sent"]
    cells = []
    for name in dict.fromkeys(name for of in parts.values() for name in of):
        found = [of.get(name) for of in parts.values()]
        some = next(part for part in found if part)
        times = [f"{part['seconds'] * 1e3:.3f}" if part else "" for part in found]
        sent = f"{some['bytes_sent'] / 1e6:.1f}" if some["bytes_sent"] else ""
        cells.append([name, *times, str(some["count"]), sent])
    for title, key in (("computing", "mean_computing_seconds"), ("a step", "mean_step_seconds")):
        seconds = [f"{line['summary'][key] * 1e3:.3f}" for line in timed]
        cells.append([title, *seconds, "", ""])
    first = timed[0]
    title = f"{layout}: {first['tokens']} tokens, {first['tokens_of_a_rank']} a rank"
    harness.print_table(title, header, cells)
    sys.stdout.flush()


def _print_verdicts(lines: Sequence[dict[str, Any]]) -> None:
    cells = []
    for line in lines:
        peaks = [peak for peak in line.get("peak_bytes", []) if peak]
        memory = f"{max(peaks) / 1e9:.1f} GB" if peaks else "-"
        said = line["problem"] or line["comparison"]
        agree = {True: "yes", False: "NO"}.get(line.get("ranks_agree"), "-")
        cells.append([line["layout"], line["transport"], said, agree, memory])
    header = ["layout", "transport", "against the simulation", "ranks agree", "peak of a rank"]
    harness.print_table("equality", header, cells)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--layout", nargs="+", choices=list(LAYOUTS), default=["sp2", "cfg2"])
    add("--transport", nargs="+", choices=list(TRANSPORTS), default=list(TRANSPORTS))
    add("--device", choices=["cpu", "cuda"], default=device)
    add("--preset", choices=["preview", "tiny"], default="preview" if device == "cuda" else "tiny")
    add("--tokens", type=int, default=3702, help="of a rank, about; default 3702 (preview only)")
    add("--steps", type=int, default=12, help="timed, the first two left out; default 12")
    add("--seconds", type=float, default=520.0, help="for all of it, default 520")
    add("--limit", type=float, default=180.0, help="for one run of a layout, default 180")
    add("--out", type=Path, default=harness.RESULTS, help="folder for the results")
    add("--run", help=argparse.SUPPRESS)  # what the processes that this script starts do
    add("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
