"""The command line of the demo."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ulysses_comm.demo.encoder import find_model_folder, load_passage
from ulysses_comm.demo.judge import Results
from ulysses_comm.demo.options import (
    GROUP_SIZES,
    Backend,
    OptionError,
    Plan,
    launched_by_torchrun,
    make_plan,
    missing_packages,
)
from ulysses_comm.demo.processes import run_launched_rank, run_started_ranks
from ulysses_comm.demo.report import (
    case_table,
    conclusion,
    introduction,
    make_console,
    promise_table,
)
from ulysses_comm.demo.simulated import run_simulated_ranks
from ulysses_comm.demo.splits import SPLITS

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def cli() -> None:
    """Ulysses sequence parallelism: exchanges, head shards and ranks inside one process."""


@app.command()
def demo(
    ranks: Annotated[
        str | None,
        typer.Option(
            help=f"Group sizes to simulate, out of {', '.join(map(str, GROUP_SIZES))}.",
            show_default="2 3 4 6",
        ),
    ] = None,
    splits: Annotated[
        str, typer.Option(help=f"Ways to split the sequence, out of {', '.join(SPLITS)}.")
    ] = "skewed empty-rank",
    backend: Annotated[
        Backend, typer.Option(help="Ranks inside this process, or real processes.")
    ] = Backend.simulate,
    nproc: Annotated[
        int | None,
        typer.Option(help="Processes to start with --backend gloo.", show_default="4"),
    ] = None,
    picture: Annotated[Path, typer.Option(help="Where to draw who sent how much to whom.")] = Path(
        "out/demo-traffic.png"
    ),
    no_picture: Annotated[bool, typer.Option("--no-picture", help="Draw nothing.")] = False,
) -> None:
    """Run a released encoder's attention through the exchanges and compare with one rank.

    Exits with 0 if every check holds, with 1 if one does not.
    With --backend gloo it starts processes, or takes the ranks of torchrun.
    """
    try:
        plan = make_plan(
            backend=backend,
            ranks=ranks,
            nproc=nproc,
            splits=splits,
            picture=None if no_picture else picture,
        )
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from error
    missing = missing_packages(plan)
    if missing:
        typer.echo(
            f"The demo needs {', '.join(missing)}, which is not installed. "
            "Install the demo extra: pip install 'ulysses-comm[demo]'",
            err=True,
        )
        raise typer.Exit(2)
    raise typer.Exit(0 if run_plan(plan).passed else 1)


@app.command()
def doctor(
    timeout: Annotated[float, typer.Option(help="Seconds for each exchange.")] = 60.0,
) -> None:
    """Show what this machine offers, what would be chosen, and whether small exchanges work.

    Exits with 0 if none fails, with 1 if one does.
    On ranks that torchrun or mpirun started they exchange with one another.
    """
    from ulysses_comm import doctor

    raise typer.Exit(doctor.main(["--timeout", str(timeout)]))


def run_plan(plan: Plan) -> Results:
    """Run every case of the plan, and show what came out; under torchrun only rank 0 speaks."""
    began = time.perf_counter()
    speaks = not launched_by_torchrun() or os.environ["RANK"] == "0"
    console = make_console()
    if speaks:
        passage = load_passage(find_model_folder())
        console.print(introduction(passage, plan))
    if plan.backend is Backend.simulate:
        results = run_simulated_ranks(plan)
    elif launched_by_torchrun():
        results = run_launched_rank(plan)
    else:
        results = run_started_ranks(plan)
    if speaks:
        console.print(case_table(results.verdicts, console.width), promise_table(results.verdicts))
        if plan.picture is not None:
            console.print(f"Rank-to-rank traffic: {plan.picture}")
        console.print(conclusion(results, time.perf_counter() - began))
    return results
