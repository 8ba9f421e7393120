"""The command line: one command in each module beside this one; this file only registers them."""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback as tracebacks
from collections.abc import Callable
from contextvars import ContextVar
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from magi2.cli.bench_step import bench_step
from magi2.cli.generate import generate
from magi2.cli.inspect import inspect
from magi2.cli.plan import plan
from magi2.cli.tiny_checkpoint import make_tiny_checkpoint

if TYPE_CHECKING:
    from magi2.launch import RankFailedError

app = typer.Typer(
    name="magi2", add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True
)

_INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended
_PATIENCE_SECONDS = 1.0
_EXTRA = "ulysses-comm[pipeline]"
_shows_tracebacks: ContextVar[bool] = ContextVar("shows_tracebacks", default=False)


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        version = metadata.version("ulysses-comm")
    except metadata.PackageNotFoundError:  # run from its source, perhaps
        version = "of unknown version"
    typer.echo(f"magi2 of ulysses-comm {version}")
    raise typer.Exit


@app.callback()
def cli(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error was raised, not only its text.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """MAGI-2 Preview: from a prompt to video and audio, on one device or many."""
    _shows_tracebacks.set(traceback)


def add_command(name: str, function: Callable[..., None]) -> None:
    """Register a command, whose foreseeable errors end the program with their text alone.

    ValueError and OSError say what was given and how to fix it, as does a missing package.
    RuntimeError and MemoryError come from the machine and its libraries too: their text is shown,
    and how to see more. Anything else is a fault of this package and keeps its traceback.
    """

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            if _shows_tracebacks.get():
                raise
            typer.echo(f"magi2 {name}: {_with_rank(error)}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            typer.echo(f"magi2 {name}: interrupted", err=True)
            raise typer.Exit(_INTERRUPTED) from error
        except (RuntimeError, MemoryError) as error:
            from magi2.launch import RankFailedError, RanksNotStartedError

            if isinstance(error, RankFailedError):
                _end_process(name, error)
            if _shows_tracebacks.get():
                raise
            text = _with_rank(error) or type(error).__name__
            if not isinstance(error, RanksNotStartedError):
                text += f"\n`magi2 --traceback {name} ...` shows where this was raised."
            typer.echo(f"magi2 {name}: {text}", err=True)
            raise typer.Exit(1) from error

    app.command(name)(command)


add_command("bench-step", bench_step)
add_command("generate", generate)
add_command("inspect", inspect)
add_command("make-tiny-checkpoint", make_tiny_checkpoint)
add_command("plan", plan)


def main() -> None:
    """Run the command line."""
    app(prog_name="magi2")


def _with_rank(error: Exception) -> str:
    """An error's text, and which simulated rank raised it."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and "pip install" not in text:
        # Missed by a plain import, perhaps one in a library that is there.
        text += f". Commands need {_EXTRA}: pip install '{_EXTRA}'"
    notes = [note.partition("\n")[0] for note in getattr(error, "__notes__", [])]
    return " ".join([text, *(f"({note})" for note in notes)])


def _end_process(name: str, error: RankFailedError) -> NoReturn:
    """End this process of several at once, its text printed.

    No way back through the interpreter's end: it may wait for ranks that are gone.
    """
    if error.speaks:
        if error.is_fault or _shows_tracebacks.get():
            tracebacks.print_exception(error.__cause__)
        typer.echo(f"magi2 {name}: {error}", err=True)
    else:
        # Whoever started the ranks may end all of them with the first: let the others speak.
        time.sleep(_PATIENCE_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_INTERRUPTED if isinstance(error.__cause__, KeyboardInterrupt) else 1)
