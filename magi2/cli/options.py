"""Options that several commands share, and what they mean."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from magi2.config import Magi2Config
    from magi2.geometry import Geometry
    from magi2.planning import DeviceProfile

RANKS = "Ranks"
SIZE = "Size of the clip"
DEVICE = "Devices and links"
_MAX_TIMEOUT = 30 * 24 * 3600
_MAX_THREADS = 4096

Source = Annotated[
    str,
    typer.Argument(
        help="Checkpoint folder, config.json, or a preset: preview, tiny or tiny_uneven.",
        metavar="FOLDER|CONFIG|PRESET",
    ),
]
UlyssesDegree = Annotated[
    int, typer.Option(min=1, help="Ranks that share the tokens.", rich_help_panel=RANKS)
]
CfgParallelSize = Annotated[
    int,
    typer.Option(
        min=1, max=2, help="2 gives each branch of guidance its own ranks.", rich_help_panel=RANKS
    ),
]
ExpertParallelSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Ranks that share the experts.",
        show_default="the most that leaves no expert head to pad",
        rich_help_panel=RANKS,
    ),
]
Resolution = Annotated[
    str, typer.Option(help="272p, 448 x 256 pixels, or 540p, 896 x 512.", rich_help_panel=SIZE)
]
Width = Annotated[
    int | None,
    typer.Option(
        help="Pixels, a multiple of 16.",
        show_default="the resolution's",
        rich_help_panel=SIZE,
    ),
]
Height = Annotated[
    int | None,
    typer.Option(
        help="Pixels, a multiple of 16.",
        show_default="the resolution's",
        rich_help_panel=SIZE,
    ),
]
NumFrames = Annotated[
    int, typer.Option(help="One more than a multiple of 4.", rich_help_panel=SIZE)
]
TextTokens = Annotated[int, typer.Option(min=1, help="Of the prompt.", rich_help_panel=SIZE)]
NegativeTextTokens = Annotated[
    int, typer.Option(min=0, help="Of the negative prompt.", rich_help_panel=SIZE)
]
DeviceName = Annotated[str, typer.Option(help="h200, h100 or a100.", rich_help_panel=DEVICE)]
DeviceFile = Annotated[
    Path | None,
    typer.Option(
        help="JSON with the attributes of magi2.planning.DeviceProfile instead.",
        rich_help_panel=DEVICE,
    ),
]


def read_config(source: str) -> Magi2Config:
    """The configuration in a folder, in a file, or of a preset.

    Raises:
        ValueError: If it is none of them.
    """
    from magi2 import presets
    from magi2.checkpoint.save import CONFIG_NAME
    from magi2.config import Magi2Config
    from magi2.release import open_release

    path = Path(source)
    if path.is_dir():
        config = path / CONFIG_NAME
        return Magi2Config.from_file(config) if config.is_file() else open_release(path).config
    if path.is_file():
        return Magi2Config.from_file(path)
    known = {"preview": presets.preview, "tiny": presets.tiny, "tiny_uneven": presets.tiny_uneven}
    if source not in known:
        raise ValueError(
            f"{source} is no folder, file or preset: expected a checkpoint folder, a config.json, "
            f"or one of {', '.join(known)}."
        )
    return known[source]()


def read_geometry(
    resolution: str, width: int | None, height: int | None, num_frames: int
) -> Geometry:
    """Sizes of a clip.

    Raises:
        ValueError: If there is no such resolution, or latents have no such size.
    """
    from magi2.geometry import PRESETS, Geometry

    if resolution not in PRESETS:
        raise ValueError(f"--resolution {resolution}: expected one of {', '.join(PRESETS)}.")
    preset_width, preset_height = PRESETS[resolution]
    return Geometry.of(
        width=preset_width if width is None else width,
        height=preset_height if height is None else height,
        num_frames=num_frames,
    )


def read_device(name: str, path: Path | None) -> DeviceProfile:
    """A device by name, or from a file.

    Raises:
        ValueError: If there is none of this name.
    """
    from magi2.planning import DEVICES, DeviceProfile

    if path is not None:
        return DeviceProfile.from_file(path)
    if name not in DEVICES:
        raise ValueError(
            f"--device {name}: expected one of {', '.join(DEVICES)}, or a profile of your own with "
            "--device-file."
        )
    return DEVICES[name]


def read_timeout(seconds: float) -> timedelta:
    """How long ranks wait for one another.

    Raises:
        ValueError: If it is no positive number of seconds that torch.distributed takes.
    """
    if not 0 < seconds <= _MAX_TIMEOUT:
        raise ValueError(
            f"--timeout {seconds:g}: expected a positive number of seconds, at most {_MAX_TIMEOUT}."
        )
    return timedelta(seconds=seconds)


def check_simulate(num_ranks: int | None) -> None:
    """Refuse to simulate all ranks in each of several processes, which would write to one folder.

    Raises:
        ValueError: If torchrun or mpirun started more than this process.
    """
    from ulysses_comm.bootstrap import launched_size

    started = launched_size(os.environ)
    if num_ranks is not None and started > 1:
        raise ValueError(
            f"--simulate {num_ranks}, but {started} processes were started, as their environment "
            "says, and each would simulate all ranks. Leave out --simulate to run on them, or "
            "start a single process."
        )


def use_threads(threads: int | None) -> None:
    """Let torch use so many threads in this process; None leaves its choice.

    Raises:
        ValueError: If it is no number of threads that a machine has.
    """
    import torch

    if threads is None:
        return
    if not 1 <= threads <= _MAX_THREADS:
        raise ValueError(f"--threads {threads}: expected a number from 1 to {_MAX_THREADS}.")
    torch.set_num_threads(threads)
