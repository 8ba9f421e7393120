"""The folder that a run writes to: which files it knows, whether it may, whether there is room."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from magi2.atomic_file import write_atomically
from magi2.geometry import Geometry
from magi2.run_state import STATE_NAME

LATENTS_NAME = "latents.safetensors"
RECORD_NAME = "run.json"
VIDEO_NAME = "video.mp4"
AUDIO_NAME = "audio.wav"
FEATURES_NAME = "text_features.safetensors"
_PREVIEWS = ("preview_latents.png", "preview_latents.mp4", "preview_audio.png")
_RESULTS = (LATENTS_NAME, VIDEO_NAME, AUDIO_NAME, FEATURES_NAME, *_PREVIEWS)

# A state holds a latent and three of a solver's tensors like it, and while it is replaced the one
# before is there too.
_STATE_COPIES = 2 * 4
# H.264 at the quality used here needs less than this part of the raw frames.
_COMPRESSION = 6
_SLACK_BYTES = 32 << 20


class OutputFolder:
    """Everything that a run leaves behind.

    Args:
        path: The folder; made by `prepare`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def state(self) -> Path:
        """The state of an unfinished run."""
        return self.path / STATE_NAME

    def prepare(
        self,
        *,
        resume: bool,
        overwrite: bool,
        num_bytes: int,
        keep: Collection[Path] = (),
    ) -> bool:
        """Make the folder, and see to it that a run may write there.

        Args:
            resume: Whether a run that is there is to go on.
            overwrite: Whether one that is there may be discarded; its files are removed.
            num_bytes: Room that the run will need.
            keep: Files that are not removed, wherever they lie: the run is made from them.

        Returns:
            Whether there is a state to go on with.

        Raises:
            ValueError: If a run is there and neither was asked for, another one is writing there
                now, or there is no room.
            OSError: If the folder cannot be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"the output folder {self.path} cannot be made: {error.strerror}. Choose another "
                "with --output."
            ) from error
        self._lock()
        self._check_runs(resume=resume, overwrite=overwrite)
        self._check_room(num_bytes)
        if overwrite:
            self._clear(keep)
        return resume and self.state.exists()

    def close(self) -> None:
        """Let other runs in again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def write_latents(
        self, video: torch.Tensor, audio: torch.Tensor, facts: Mapping[str, str]
    ) -> Path:
        """Write the latents as the sampler left them.

        Args:
            video: (video channels, frames, rows, columns) float32.
            audio: (audio latents, audio channels) float32.
            facts: Strings to store beside them.
        """
        from safetensors.torch import save

        path = self.path / LATENTS_NAME
        tensors = {"video": video.contiguous(), "audio": audio.contiguous()}
        write_atomically(path, save(tensors, metadata=dict(facts)))
        return path

    def finish(self, record: Mapping[str, Any]) -> Path:
        """Write the record of a finished run, and remove its state."""
        path = self.path / RECORD_NAME
        write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
        self.state.unlink(missing_ok=True)
        return path

    def _check_runs(self, *, resume: bool, overwrite: bool) -> None:
        finished = (self.path / RECORD_NAME).exists()
        if overwrite:
            return
        if self.state.exists():
            if not resume:
                raise ValueError(
                    f"{self.path} holds an unfinished run: go on with it with --resume, discard it "
                    "with --overwrite, or choose another folder with --output."
                )
        elif finished:
            raise ValueError(
                f"{self.path} holds a finished run: replace it with --overwrite, or choose another "
                "folder with --output."
            )

    def _check_room(self, num_bytes: int) -> None:
        probe = self.path / ".probe"
        try:
            write_atomically(probe, b"can this folder be written to?")
        except OSError as error:
            raise ValueError(f"the output folder {self.path} cannot be used: {error}") from error
        probe.unlink()
        free = shutil.disk_usage(self.path).free
        if free < num_bytes:
            raise ValueError(
                f"{self.path} has {free >> 20} MiB free: expected {-(-num_bytes >> 20)} MiB for "
                "the state, the latents and the results of this run. Free some, or write "
                "elsewhere with --output."
            )

    def _clear(self, keep: Collection[Path]) -> None:
        kept = [path for path in keep if path.exists()]
        for name in (RECORD_NAME, STATE_NAME, *_RESULTS):
            path = self.path / name
            if not (path.exists() and any(path.samefile(other) for other in kept)):
                path.unlink(missing_ok=True)

    def _lock(self) -> None:
        """Keep other runs out until `close`, or until this process ends in whatever way."""
        try:
            import fcntl
        except ModuleNotFoundError:  # Windows has no such locks.
            return
        self.close()
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(
                f"another run is writing to {self.path}: wait for its end, or choose another "
                "folder with --output."
            ) from None
        except OSError:  # Some file systems of networks have none: then it has to do without.
            os.close(descriptor)
            return
        self._descriptor = descriptor


def bytes_needed(
    geometry: Geometry, video_channels: int, audio_channels: int, *, decodes_video: bool
) -> int:
    """Room that a run needs on its disk at most, roughly.

    Args:
        geometry: The clip.
        video_channels: Of a video latent.
        audio_channels: Of an audio latent.
        decodes_video: Whether frames are written.
    """
    latents = 4 * (
        geometry.num_video_tokens * video_channels + geometry.audio_length * audio_channels
    )
    frames = geometry.num_frames * geometry.width * geometry.height * 3 if decodes_video else 0
    return latents * (_STATE_COPIES + 1) + frames // _COMPRESSION + _SLACK_BYTES
