"""`magi2 bench-step`: how long steps take, and what they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magi2.cli import options

if TYPE_CHECKING:
    from magi2.timing.bench import BenchRequest, BenchResult

_RUN = "The run"
_OUTPUTS = "Outputs"


def bench_step(
    source: options.Source = "tiny",
    resolution: options.Resolution = "272p",
    width: options.Width = None,
    height: options.Height = None,
    num_frames: options.NumFrames = 125,
    text_tokens: options.TextTokens = 222,
    negative_text_tokens: options.NegativeTextTokens = 222,
    num_inference_steps: Annotated[
        int,
        typer.Option(
            min=1, help="Steps; the first two are left out of means.", rich_help_panel=_RUN
        ),
    ] = 10,
    num_layers: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first so many layers.", rich_help_panel=_RUN),
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Do not read a checkpoint's.", rich_help_panel=_RUN),
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="Of weights and inputs.", rich_help_panel=_RUN)
    ] = 0,
    compile_static: Annotated[
        bool,
        typer.Option("--compile", help="Compile for this token count.", rich_help_panel=_RUN),
    ] = False,
    compile_dynamic: Annotated[
        bool,
        typer.Option("--compile-dynamic", help="For any token count.", rich_help_panel=_RUN),
    ] = False,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Only repeatable kernels.", rich_help_panel=_RUN),
    ] = False,
    route_sum: Annotated[
        str,
        typer.Option(help="Sum over experts: choice or expert.", rich_help_panel=_RUN),
    ] = "choice",
    moe_backend: Annotated[
        str,
        typer.Option(
            help="What runs the mixture: torch, triton, or auto for what is known faster.",
            rich_help_panel=_RUN,
        ),
    ] = "auto",
    attention_backend: Annotated[
        str,
        typer.Option(
            help="What runs the attention: auto for what is known faster, torch, cudnn, flash, "
            "varlen, flash_attn, flex, cpu_flash or musa.",
            rich_help_panel=_RUN,
        ),
    ] = "auto",
    qkv_backend: Annotated[
        str,
        typer.Option(
            help="What runs norms, rotation and gates around the attention: torch, triton, auto.",
            rich_help_panel=_RUN,
        ),
    ] = "auto",
    mhc_backend: Annotated[
        str,
        typer.Option(
            help="What runs the hyper-connections: torch, triton, or auto.",
            rich_help_panel=_RUN,
        ),
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of each process on the CPU.",
            show_default="torch's",
            rich_help_panel=_RUN,
        ),
    ] = None,
    simulate: Annotated[
        int | None,
        typer.Option(
            help="Simulate so many ranks in this process. Without it, the ranks that torchrun or "
            "mpirun started, or one.",
            rich_help_panel=options.RANKS,
        ),
    ] = None,
    ulysses_degree: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks that share the tokens.",
            show_default="all that --cfg-parallel-size leaves",
            rich_help_panel=options.RANKS,
        ),
    ] = None,
    cfg_parallel_size: options.CfgParallelSize = 1,
    expert_parallel_size: options.ExpertParallelSize = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda or musa.",
            show_default="what the machine has",
            rich_help_panel=options.RANKS,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Of torch.distributed.",
            show_default="the one that fits",
            rich_help_panel=options.RANKS,
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds that a rank waits for others.", rich_help_panel=options.RANKS),
    ] = 3600.0,
    output: Annotated[
        Path,
        typer.Option(help="Folder for steps.json and steps.png.", rich_help_panel=_OUTPUTS),
    ] = Path("out/bench-step"),
    no_picture: Annotated[
        bool, typer.Option("--no-picture", help="Draw nothing.", rich_help_panel=_OUTPUTS)
    ] = False,
) -> None:
    """Time steps with random inputs: whole steps, regions, exchanges and the bytes in them.

    Of several ranks the slowest counts in every step. The default size is the released 272p clip.
    """
    from rich.console import Console

    from magi2.cli.progress import ConsoleProgress
    from magi2.launch import ParallelSizes
    from magi2.options import Options
    from magi2.timing.bench import BenchRequest
    from magi2.timing.bench import bench_step as run

    if compile_static and compile_dynamic:
        raise ValueError("--compile and --compile-dynamic contradict each other: expected one.")
    config, checkpoint = _read_source(source, num_layers, random_weights)
    request = BenchRequest(
        config=config,
        checkpoint=checkpoint,
        geometry=options.read_geometry(resolution, width, height, num_frames),
        text_lengths=(text_tokens, negative_text_tokens),
        num_steps=num_inference_steps,
        compile="static" if compile_static else "dynamic" if compile_dynamic else "off",
        deterministic=deterministic,
        options=Options(
            route_sum=route_sum,
            moe_backend=moe_backend,
            attention_backend=attention_backend,
            qkv_backend=qkv_backend,
            mhc_backend=mhc_backend,
        ),
        seed=seed,
    )
    options.check_simulate(simulate)
    patience = options.read_timeout(timeout)
    options.use_threads(threads)
    output.mkdir(parents=True, exist_ok=True)  # before time is spent on what could not be kept
    result = run(
        request,
        sizes=ParallelSizes(
            ulysses=ulysses_degree, cfg=cfg_parallel_size, expert=expert_parallel_size
        ),
        simulate=simulate,
        device=device,
        backend=backend,
        timeout=patience,
        # Lines on a terminal too: a bar is drawn by a thread, beside what is timed.
        progress=ConsoleProgress(Console(stderr=True, highlight=False, force_terminal=False)),
    )
    if result.is_first:
        _report(result, request, source, output, draws=not no_picture)


def _read_source(
    source: str, num_layers: int | None, random_weights: bool
) -> tuple[Any, Path | None]:
    """The configuration, and the folder of the weights if they are to be read."""
    from magi2.release import open_release
    from magi2.timing.bench import keep_layers

    config, checkpoint = options.read_config(source), None
    if Path(source).is_dir() and not random_weights:
        checkpoint = open_release(source).folder
    if num_layers is not None:
        if checkpoint is not None:
            raise ValueError(
                f"--num-layers {num_layers} of a checkpoint: expected --random-weights with it, "
                "since a checkpoint is read whole."
            )
        config = keep_layers(config, num_layers)
    return config, checkpoint


def _report(
    result: BenchResult, request: BenchRequest, source: str, output: Path, *, draws: bool
) -> None:
    from magi2.cli.tables import make_console
    from magi2.timing.picture import draw_summary

    facts = result.facts
    title = (
        f"{source}, {facts['tokens']:,} tokens, {facts['tokens_of_a_rank']:,} a rank; "
        f"{_ranks(facts)} on {facts['device']}, compile {request.compile}"
    )
    console = make_console()
    console.print(title, soft_wrap=True)  # a path in it would be cut in two
    console.print(_table(result))
    files = [output / "steps.json"]
    files[0].write_text(result.to_json(), encoding="utf-8")
    if draws:
        files.append(draw_summary(result.summary, output / "steps.png", title=title))
    console.print("\n".join(str(file) for file in files), soft_wrap=True)


def _ranks(facts: dict[str, Any]) -> str:
    if facts["ranks"] == 1:
        return "one rank"
    kind = "simulated ranks" if facts["launcher"] == "simulated" else "ranks"
    return (
        f"{facts['ranks']} {kind} (ulysses {facts['ulysses_degree']}, cfg "
        f"{facts['cfg_parallel_size']}, experts over {facts['expert_parallel_size']})"
    )


def _table(result: BenchResult) -> Any:
    from magi2.cli.tables import make_table, megabytes, milliseconds

    summary = result.summary
    parts = [*summary.components.items(), *summary.exchanges.items()]
    rows = [
        (
            name,
            milliseconds(part.seconds),
            f"{part.seconds / summary.mean_step_seconds:.0%}",
            str(part.count),
            megabytes(part.bytes_sent) if part.bytes_sent else "",
        )
        for name, part in parts
    ]
    rows.append(("all in a step", milliseconds(summary.mean_step_seconds), "", "", ""))
    caption = (
        f"Mean of {len(summary.measured_steps)} of {len(summary.step_seconds)} steps, of each part "
        "the slowest rank's."
    )
    if summary.simulated and summary.num_ranks > 1:
        caption += (
            f"\nSimulated ranks take turns: exchanges hold the other ranks' computing. Its own "
            f"computing takes the slowest rank {milliseconds(summary.mean_computing_seconds)}."
        )
    headers = ("", "in a step", "share", "times", "sent by a rank")
    return make_table("Where the time goes", headers, rows, caption=caption)
