"""The command line: `python -m ulysses_comm demo` and `python -m ulysses_comm doctor`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what has to be installed for it."""
    try:
        from ulysses_comm.demo.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        if sys.argv[1:2] == ["doctor"]:
            # Most wanted where nothing is installed yet; it needs torch alone.
            from ulysses_comm import doctor

            sys.exit(doctor.main(sys.argv[2:]))
        sys.exit(
            f"python -m ulysses_comm needs the package {error.name}, which is not installed. "
            "Install the demo extra: pip install 'ulysses-comm[demo]'"
        )
    app(prog_name="python -m ulysses_comm")


if __name__ == "__main__":
    main()
