"""What a caller asks of the pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from magi2.geometry import PRESETS, Geometry
from magi2.options import Options
from magi2.settings import SamplingSettings

COMPILE_MODES = ("off", "static", "dynamic")
_WIDTH, _HEIGHT = PRESETS["272p"]


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One clip to make.

    Args:
        output: Folder for everything that is written; made if absent.
        prompt: Text to encode; None to take text features.
        images: Reference images, in the order of their figures.
        width: Pixels, a multiple of 16.
        height: Pixels, a multiple of 16.
        num_frames: Frames, one more than a multiple of 4; None for `seconds`.
        seconds: Length; None for `num_frames`, or for the released 10 seconds.
        seed: Of the noise; None for the checkpoint's.
        settings: What to change of the checkpoint's sampling settings, by name.
        options: Of the model.
        compile: "off", "static" for a graph for each token count, or "dynamic" for one graph.
        deterministic: Whether torch must choose operations whose results never vary.
        pad_to_multiple_of: Pad the packed tokens as the reference does, with 48; None for none.
        allow_other_negative_prompt: Whether a text other than the released one will do.
        save_every: Steps after which the state is saved; 0 for never.
        resume: Whether to go on with the state in the output folder, if there is one.
        overwrite: Whether to discard a run in the output folder.

    Raises:
        ValueError: If a value is none that a run can have.
    """

    output: Path
    prompt: str | None = None
    images: tuple[Path, ...] = ()
    width: int = _WIDTH
    height: int = _HEIGHT
    num_frames: int | None = None
    seconds: float | None = None
    seed: int | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    compile: str = "off"
    deterministic: bool = False
    pad_to_multiple_of: int | None = None
    allow_other_negative_prompt: bool = False
    save_every: int = 1
    resume: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.compile not in COMPILE_MODES:
            raise ValueError(f"compile={self.compile!r}: expected one of {COMPILE_MODES}.")
        if self.save_every < 0:
            raise ValueError(
                f"save_every={self.save_every}: expected a number of steps, or 0 to save no state."
            )
        if self.resume and self.overwrite:
            raise ValueError(
                "resume and overwrite contradict each other: expected one of them. Go on with the "
                "run in the output folder, or discard it."
            )
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: expected a number from 0 to 2**63 - 1.")
        known = {setting.name for setting in dataclasses.fields(SamplingSettings)}
        unknown = sorted(set(self.settings) - known)
        if unknown:
            raise ValueError(f"settings {unknown} are unknown: expected some of {sorted(known)}.")

    def settings_of(self, released: SamplingSettings) -> SamplingSettings:
        """The checkpoint's sampling settings with the changes asked for."""
        return dataclasses.replace(released, **self.settings)  # type: ignore[arg-type]

    def geometry_of(self, settings: SamplingSettings) -> Geometry:
        """Sizes of the clip's latents."""
        return Geometry.of(
            width=self.width,
            height=self.height,
            num_frames=self.num_frames,
            seconds=self.seconds,
            fps=settings.fps,
        )
