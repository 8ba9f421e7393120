"""The command line as a module: `python -m magi2`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what has to be installed for it."""
    try:
        from magi2.cli.app import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit(
            f"magi2 needs the package {error.name}, which is not installed. Install the pipeline "
            "extra: pip install 'ulysses-comm[pipeline]'"
        )
    run()


if __name__ == "__main__":
    main()
