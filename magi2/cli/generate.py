"""`magi2 generate`: one clip from a checkpoint."""

from __future__ import annotations

from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from magi2.generate_request import GenerateRequest
    from magi2.launch import ParallelSizes
    from magi2.pipeline import GenerateResult

_PROMPT = "What is shown"
_SIZE = "Size and sampling"
_RANKS = "Ranks and devices"
_RUN = "The run and its outputs"
_PARTS = "Where optional parts are, if not beside the checkpoint"


class Resolution(str, Enum):
    """Sizes that the released model is made for."""

    low = "272p"
    high = "540p"


class Device(str, Enum):
    """Kinds of device."""

    cpu = "cpu"
    cuda = "cuda"
    musa = "musa"


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder with the transformer's shards and config.json.")
    ],
    prompt: Annotated[
        str | None,
        typer.Option(help="Text, plain or structured JSON.", rich_help_panel=_PROMPT),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file that holds it.", rich_help_panel=_PROMPT),
    ] = None,
    text_features: Annotated[
        Path | None,
        typer.Option(
            help="Safetensors file with the features of a prompt that was encoded elsewhere.",
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    negative_prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the released negative prompt; its hash is checked.",
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    allow_other_negative_prompt: Annotated[
        bool,
        typer.Option(
            "--allow-other-negative-prompt",
            help="Take another text there.",
            rich_help_panel=_PROMPT,
        ),
    ] = False,
    no_negative_prompt: Annotated[
        bool,
        typer.Option(
            "--no-negative-prompt",
            help="Leave the unconditional branch without text.",
            rich_help_panel=_PROMPT,
        ),
    ] = False,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Reference image; may be repeated.", rich_help_panel=_PROMPT),
    ] = None,
    resolution: Annotated[
        Resolution, typer.Option(help="448 x 256 or 896 x 512 pixels.", rich_help_panel=_SIZE)
    ] = Resolution.low,
    width: Annotated[
        int | None, typer.Option(help="Pixels, a multiple of 16.", rich_help_panel=_SIZE)
    ] = None,
    height: Annotated[
        int | None, typer.Option(help="Pixels, a multiple of 16.", rich_help_panel=_SIZE)
    ] = None,
    num_frames: Annotated[
        int | None,
        typer.Option(help="One more than a multiple of 4.", rich_help_panel=_SIZE),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Length instead of --num-frames.", show_default="10", rich_help_panel=_SIZE
        ),
    ] = None,
    num_inference_steps: Annotated[
        int | None, typer.Option(show_default="the checkpoint's", rich_help_panel=_SIZE)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(show_default="the checkpoint's", rich_help_panel=_SIZE)
    ] = None,
    shift: Annotated[
        float | None,
        typer.Option(
            help="Moves steps towards noise.",
            show_default="the checkpoint's",
            rich_help_panel=_SIZE,
        ),
    ] = None,
    video_guidance_scale: Annotated[
        float | None, typer.Option(show_default="the checkpoint's", rich_help_panel=_SIZE)
    ] = None,
    audio_guidance_scale: Annotated[
        float | None, typer.Option(show_default="the checkpoint's", rich_help_panel=_SIZE)
    ] = None,
    simulate: Annotated[
        int | None,
        typer.Option(
            help="Simulate so many ranks in this process. Without it, the ranks that torchrun or "
            "mpirun started, or one.",
            rich_help_panel=_RANKS,
        ),
    ] = None,
    ulysses_degree: Annotated[
        int | None,
        typer.Option(
            help="Ranks that share the tokens.",
            show_default="all that --cfg-parallel-size leaves",
            rich_help_panel=_RANKS,
        ),
    ] = None,
    cfg_parallel_size: Annotated[
        int,
        typer.Option(help="2 gives each branch of guidance its own ranks.", rich_help_panel=_RANKS),
    ] = 1,
    expert_parallel_size: Annotated[
        int | None,
        typer.Option(
            help="Ranks that share the experts.",
            show_default="the most that leaves no expert head to pad",
            rich_help_panel=_RANKS,
        ),
    ] = None,
    device: Annotated[
        Device | None,
        typer.Option(show_default="what the machine has", rich_help_panel=_RANKS),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Of torch.distributed.",
            show_default="the one that fits",
            rich_help_panel=_RANKS,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads of each process on the CPU; decides last bits there.",
            show_default="torch's",
            rich_help_panel=_RANKS,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a rank waits for others.", rich_help_panel=_RANKS)
    ] = 3600.0,
    compile_static: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile the regions between exchanges, for this token count.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    compile_dynamic: Annotated[
        bool,
        typer.Option(
            "--compile-dynamic", help="Compile them for any token count.", rich_help_panel=_RUN
        ),
    ] = False,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Only operations whose results never vary.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    route_sum: Annotated[
        str,
        typer.Option(
            help="Order in which experts' outputs are added: choice, or expert as in the "
            "reference's deterministic mode.",
            rich_help_panel=_RUN,
        ),
    ] = "choice",
    moe_backend: Annotated[
        str,
        typer.Option(
            help="What runs the mixture of experts: torch, triton, or auto for Triton on a GPU.",
            rich_help_panel=_RUN,
        ),
    ] = "auto",
    output: Annotated[
        Path, typer.Option(help="Folder for all results.", rich_help_panel=_RUN)
    ] = Path("out/magi2"),
    print_hashes: Annotated[
        bool,
        typer.Option(
            "--print-hashes",
            help="Print the SHA-256 of the raw bytes of latents, frames and samples.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    save_every: Annotated[
        int,
        typer.Option(help="Steps between saved states; 0 saves none.", rich_help_panel=_RUN),
    ] = 1,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the unfinished run in the output folder, if there is one.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Discard a run in the output folder.", rich_help_panel=_RUN
        ),
    ] = False,
    text_encoder: Annotated[
        Path | None, typer.Option(help="Folder of Qwen3.5-27B.", rich_help_panel=_PARTS)
    ] = None,
    video_vae: Annotated[
        Path | None,
        typer.Option(help="Wan2.2 VAE: diffusers folder or file.", rich_help_panel=_PARTS),
    ] = None,
    turbo_decoder: Annotated[
        Path | None, typer.Option(help="Turbo video decoder.", rich_help_panel=_PARTS)
    ] = None,
    audio_vae: Annotated[
        Path | None,
        typer.Option(
            help="Stable Audio Open 1.0: diffusers folder or file.", rich_help_panel=_PARTS
        ),
    ] = None,
) -> None:
    """Make one clip: video and sound, or their latents and a preview where decoders are missing.

    Runs on the ranks that torchrun or mpirun started, on simulated ones, or alone. Exits with 0 if
    the clip is there, with 1 if not.
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
        options=Options(route_sum=route_sum, moe_backend=moe_backend),
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
    import torch

    from magi2 import pipeline
    from magi2.cli.progress import ConsoleProgress

    if timeout <= 0:
        raise ValueError(f"--timeout {timeout:g}: expected a positive number of seconds.")
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads {threads}: expected a positive number.")
        torch.set_num_threads(threads)
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
            timeout=timedelta(seconds=timeout),
            progress=progress,
        )
    except BaseException:
        progress.close()
        every = request.save_every
        saved = progress.steps_done // every * every if every else 0
        if saved:
            typer.echo(
                f"magi2 generate: step {saved} is saved in {request.output}. The same command with "
                "--resume goes on from there.",
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
