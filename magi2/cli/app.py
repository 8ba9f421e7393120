"""The command line: one command in each module beside this one; this file only registers them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="magi2", add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True
)

_shows_tracebacks: ContextVar[bool] = ContextVar("shows_tracebacks", default=False)


@app.callback()
def cli(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error was raised, not only its text.")
    ] = False,
) -> None:
    """MAGI-2 Preview: from a prompt to video and audio, on one device or many."""
    _shows_tracebacks.set(traceback)


def add_command(name: str, function: Callable[..., None]) -> None:
    """Register a command, whose ValueError and OSError end the program with their text alone.

    Such errors say what was given and how to fix it. Anything else is a fault of this package and
    keeps its traceback.
    """

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except (ValueError, OSError) as error:
            if _shows_tracebacks.get():
                raise
            typer.echo(f"magi2 {name}: {error}", err=True)
            raise typer.Exit(1) from error

    app.command(name)(command)


def main() -> None:
    """Run the command line."""
    app(prog_name="magi2")
