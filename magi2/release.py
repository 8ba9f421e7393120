"""A released checkpoint folder, and the parts around the transformer that a run can make use of.

The transformer has to be there. Everything else is found under usual names beside it, or given;
what is missing is named together with what it would give.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magi2.checkpoint.index import INDEX_NAME, Checkpoint, open_checkpoint
from magi2.checkpoint.save import CONFIG_NAME
from magi2.checks import parse_json
from magi2.config import Magi2Config
from magi2.settings import SamplingSettings

DEFAULT_SEED = 42
# Where the transformer lies if not in the folder that was given.
_SUBFOLDERS = ("preview", "transformer")
# Of each shard, so many bytes at both ends are part of what a checkpoint is recognised by.
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Part:
    """Something beside the transformer that a run can do without.

    Args:
        key: Its name in code; the command line's flag is the same with dashes.
        what: Its name for people.
        usual_names: Files or folders under which it is found.
        without: What a run without it is like.
    """

    key: str
    what: str
    usual_names: tuple[str, ...]
    without: str

    @property
    def flag(self) -> str:
        """The option that says where it is."""
        return "--" + self.key.replace("_", "-")


PARTS = (
    Part(
        key="text_encoder",
        what="text encoder (Qwen3.5-27B)",
        usual_names=("text_encoder", "qwen35", "Qwen3.5-27B"),
        without="prompts cannot be encoded; give features of them with --text-features",
    ),
    Part(
        key="text_features",
        what="text features",
        usual_names=("text_features.safetensors",),
        without="prompts have to be encoded, which needs the text encoder",
    ),
    Part(
        key="negative_prompt_file",
        what="negative prompt",
        usual_names=("negative_prompt.txt",),
        without="a prompt can only be used with --no-negative-prompt, unlike in the release",
    ),
    Part(
        key="video_vae",
        what="Wan2.2 video VAE",
        usual_names=("vae", "video_vae", "Wan2.2_VAE.pth", "Wan2.2-TI2V-5B"),
        without="reference images cannot be encoded, and only the turbo decoder makes frames",
    ),
    Part(
        key="turbo_decoder",
        what="turbo video decoder",
        usual_names=("turbo_vae", "turbo_decoder", "TurboV3-Wan22-TinyShallow_7_7"),
        without="frames come from the slower Wan2.2 video VAE, if that is there",
    ),
    Part(
        key="audio_vae",
        what="audio decoder (Stable Audio Open 1.0)",
        usual_names=("audio_vae", "stable-audio-open-1.0", "stable_audio_open_1.0"),
        without="there is no sound, only the audio latent",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Release:
    """A checkpoint folder that was looked through; no weights are read yet.

    Args:
        folder: Of the transformer's shards.
        config: The transformer's.
        settings: Of the sampler, as the configuration has them.
        seed: The released one, of the first sample.
        checkpoint: Index and headers of the shards.
        parts: Where each optional part is, by key; what is missing is not in it.
        searched: Folders in which the parts were looked for.
    """

    folder: Path
    config: Magi2Config
    settings: SamplingSettings
    seed: int
    checkpoint: Checkpoint
    parts: Mapping[str, Path]
    searched: tuple[Path, ...]

    def missing(self) -> list[Part]:
        """Parts that are not there."""
        return [part for part in PARTS if part.key not in self.parts]

    def explain(self, part: Part) -> str:
        """Where a missing part was looked for, and how to give it, in one sentence."""
        folders = " and ".join(str(folder) for folder in self.searched)
        return (
            f"the {part.what} cannot be found: looked for {', '.join(part.usual_names)} in "
            f"{folders}. Put it there, or say where it is with {part.flag}"
        )

    def sha256(self) -> str:
        """A hash by which the weights are recognised: of both ends of every shard, not of all."""
        digest = hashlib.sha256()
        for path in [self.folder / CONFIG_NAME, self.folder / INDEX_NAME]:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        for name, shard in sorted(self.checkpoint.files.items()):
            size = shard.path.stat().st_size
            digest.update(f"{name} {size}\n".encode())
            with shard.path.open("rb") as file:
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(max(0, size - _SAMPLE_BYTES))
                digest.update(file.read())
        return digest.hexdigest()


def open_release(folder: str | Path, given: Mapping[str, Path | None] | None = None) -> Release:
    """Look through a checkpoint folder: configuration, index, headers, and what lies beside.

    Args:
        folder: With index, shards and `config.json`, or with a folder `preview` or `transformer`
            that has them.
        given: Where parts are, by key; overrides what lies under the usual names.

    Raises:
        ValueError: If the transformer is not whole, its configuration is another one, or a part is
            not where it was said to be.
    """
    outer = Path(folder)
    inner = _find_transformer(outer)
    document = _read_config(inner / CONFIG_NAME)
    try:
        config, settings = Magi2Config.from_dict(document), SamplingSettings.from_dict(document)
    except ValueError as error:
        raise ValueError(f"{inner / CONFIG_NAME}: {error}") from error
    searched = (inner,) if inner == outer else (outer, inner)
    return Release(
        folder=inner,
        config=config,
        settings=settings,
        seed=_read_seed(document, inner / CONFIG_NAME),
        checkpoint=open_checkpoint(inner),
        parts=_find_parts(searched, given or {}),
        searched=searched,
    )


def _find_transformer(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder: expected a checkpoint as released. `magi2 "
            "make-tiny-checkpoint FOLDER` makes a small one to try things with."
        )
    candidates = [folder, *(folder / name for name in _SUBFOLDERS)]
    for candidate in candidates:
        if (candidate / INDEX_NAME).is_file():
            return candidate
    raise ValueError(
        f"{folder} holds no checkpoint: expected {INDEX_NAME}, its shards and {CONFIG_NAME} there, "
        f"or in its folder {' or '.join(_SUBFOLDERS)}."
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        document = parse_json(path.read_bytes())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}. Expected the released configuration beside "
            "the shards."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds a {type(document).__name__}: expected a JSON object.")
    return document


def _read_seed(document: Mapping[str, Any], path: Path) -> int:
    engine = document.get("engine_config", {})
    if not isinstance(engine, Mapping):
        raise ValueError(f"{path}: engine_config is {engine!r}: expected a JSON object.")
    seed = engine.get("seed", DEFAULT_SEED)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(
            f"{path}: engine_config.seed is {seed!r}: expected a whole number from 0 to 2**63 - 1."
        )
    return seed


def _find_parts(folders: tuple[Path, ...], given: Mapping[str, Path | None]) -> dict[str, Path]:
    known = {part.key for part in PARTS}
    assert set(given) <= known, f"unknown parts {set(given) - known}"
    found = {}
    for part in PARTS:
        path = given.get(part.key)
        if path is not None:
            if not path.exists():
                raise ValueError(f"{part.flag} {path}: there is no such file or folder.")
            found[part.key] = path
            continue
        candidates = [folder / name for folder in folders for name in part.usual_names]
        present = [candidate for candidate in candidates if candidate.exists()]
        if present:
            found[part.key] = present[0]
    return found
