"""`magi2 generate`: one clip from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from magi2.cli import generate_options as options
from magi2.cli.options import check_simulate, read_timeout, use_threads

if TYPE_CHECKING:
    from magi2.generate_request import GenerateRequest
    from magi2.launch import ParallelSizes
    from magi2.pipeline import GenerateResult


def generate(
    checkpoint: options.Checkpoint,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    text_features: options.TextFeatures = None,
    negative_prompt_file: options.NegativePromptFile = None,
    allow_other_negative_prompt: options.AllowOtherNegativePrompt = False,
    no_negative_prompt: options.NoNegativePrompt = False,
    image: options.Image = None,
    resolution: options.ResolutionName = options.Resolution.low,
    width: options.Width = None,
    height: options.Height = None,
    num_frames: options.NumFrames = None,
    seconds: options.Seconds = None,
    num_inference_steps: options.NumInferenceSteps = None,
    seed: options.Seed = None,
    shift: options.Shift = None,
    video_guidance_scale: options.VideoGuidanceScale = None,
    audio_guidance_scale: options.AudioGuidanceScale = None,
    simulate: options.Simulate = None,
    ulysses_degree: options.UlyssesDegree = None,
    cfg_parallel_size: options.CfgParallelSize = 1,
    expert_parallel_size: options.ExpertParallelSize = None,
    device: options.DeviceKind = None,
    backend: options.Backend = None,
    threads: options.Threads = None,
    timeout: options.Timeout = 3600.0,
    compile_static: options.CompileStatic = False,
    compile_dynamic: options.CompileDynamic = False,
    deterministic: options.Deterministic = False,
    route_sum: options.RouteSum = "choice",
    moe_backend: options.MoeBackend = "auto",
    attention_backend: options.AttentionBackend = "auto",
    qkv_backend: options.QkvBackend = "auto",
    mhc_backend: options.MhcBackend = "auto",
    output: options.Output = Path("out/magi2"),
    print_hashes: options.PrintHashes = False,
    save_every: options.SaveEvery = 1,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    text_encoder: options.TextEncoder = None,
    video_vae: options.VideoVae = None,
    turbo_decoder: options.TurboDecoder = None,
    audio_vae: options.AudioVae = None,
) -> None:
    """Make one clip: video and sound, or their latents and a preview where decoders are missing.

    Runs on ranks that torchrun or mpirun started, on simulated ones, or alone.
    Exits with 0 if the clip is there, with 1 if not.
    """
    from magi2.generate_request import GenerateRequest
    from magi2.geometry import PRESETS
    from magi2.inputs import read_text_file
    from magi2.launch import ParallelSizes
    from magi2.options import Options

    given = [n for n, v in (("--prompt", prompt), ("--prompt-file", prompt_file)) if v is not None]
    given += ["--text-features"] if text_features is not None else []
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are two prompts of one clip: expected one.")
    if negative_prompt_file is not None:
        _check_negative_prompt(no_negative_prompt, prompt is not None or prompt_file is not None)
    if compile_static and compile_dynamic:
        raise ValueError("--compile and --compile-dynamic contradict each other: expected one.")
    if prompt_file is not None:
        prompt = read_text_file(prompt_file, "the prompt file")
    settings: dict[str, object] = {
        "num_inference_steps": num_inference_steps,
        "shift": shift,
        "video_guidance_scale": video_guidance_scale,
        "audio_guidance_scale": audio_guidance_scale,
        "use_negative_prompt": False if no_negative_prompt else None,
    }
    preset_width, preset_height = PRESETS[resolution.value]
    request = GenerateRequest(
        output=output,
        prompt=prompt,
        images=tuple(image or ()),
        width=preset_width if width is None else width,
        height=preset_height if height is None else height,
        num_frames=num_frames,
        seconds=seconds,
        seed=seed,
        settings={name: value for name, value in settings.items() if value is not None},
        options=Options(
            route_sum=route_sum,
            moe_backend=moe_backend,
            attention_backend=attention_backend,
            qkv_backend=qkv_backend,
            mhc_backend=mhc_backend,
        ),
        compile="static" if compile_static else "dynamic" if compile_dynamic else "off",
        deterministic=deterministic,
        allow_other_negative_prompt=allow_other_negative_prompt,
        save_every=save_every,
        resume=resume,
        overwrite=overwrite,
    )
    result = _run(
        checkpoint,
        request,
        parts={
            "text_encoder": text_encoder,
            "text_features": text_features,
            "negative_prompt_file": negative_prompt_file,
            "video_vae": video_vae,
            "turbo_decoder": turbo_decoder,
            "audio_vae": audio_vae,
        },
        sizes=ParallelSizes(
            ulysses=ulysses_degree, cfg=cfg_parallel_size, expert=expert_parallel_size
        ),
        simulate=simulate,
        device=None if device is None else device.value,
        backend=backend,
        threads=threads,
        timeout=timeout,
    )
    if result.is_first:
        _report(result, print_hashes)


def _check_negative_prompt(is_off: bool, has_prompt: bool) -> None:
    """Refuse a file that would be passed over without a word."""
    if is_off:
        raise ValueError(
            "--negative-prompt-file and --no-negative-prompt contradict each other: expected one."
        )
    if not has_prompt:
        raise ValueError(
            "--negative-prompt-file is encoded together with a prompt: expected --prompt or "
            "--prompt-file beside it. Text features hold those of a negative prompt already."
        )


def _run(
    checkpoint: Path,
    request: GenerateRequest,
    *,
    parts: dict[str, Path | None],
    sizes: ParallelSizes,
    simulate: int | None,
    device: str | None,
    backend: str | None,
    threads: int | None,
    timeout: float,
) -> GenerateResult:
    """Run the pipeline, and say how to go on if it does not come to its end."""
    from magi2 import pipeline
    from magi2.cli.progress import ConsoleProgress
    from magi2.run_state import STATE_NAME

    check_simulate(simulate)
    patience = read_timeout(timeout)
    use_threads(threads)
    progress = ConsoleProgress()
    try:
        return pipeline.generate(
            checkpoint,
            request,
            parts=parts,
            sizes=sizes,
            simulate=simulate,
            device=device,
            backend=backend,
            timeout=patience,
            progress=progress,
        )
    except BaseException:
        progress.close()
        every, done = request.save_every, progress.steps_done
        saved = (done if progress.is_done else done // every * every) if every else 0
        if saved and (request.output / STATE_NAME).exists():
            typer.echo(
                f"magi2 generate: step {saved} is saved in {request.output}. The same command with "
                f"--resume{' instead of --overwrite' * request.overwrite} goes on from there.",
                err=True,
            )
        raise
    finally:
        progress.close()


def _report(result: GenerateResult, print_hashes: bool) -> None:
    for note in result.notes:
        typer.echo(f"Note: {note}", err=True)
    for path in result.files:
        typer.echo(str(path), err=True)
    if print_hashes:
        for name, digest in result.hashes.items():
            typer.echo(f"{digest}  {name}")
