"""The negative prompt: a fixed text of the release, read from a file and known by its hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

NEGATIVE_PROMPT_SHA256 = "5ac0746de6c7e0388a16122d9c7e751b1cb067242218bf6f41ec1e88271cdcb9"
NEGATIVE_PROMPT_CHARACTERS = 1721


def read_negative_prompt(path: str | Path, *, allow_other: bool = False) -> str:
    """Read the released negative prompt.

    Args:
        path: A UTF-8 text file. White space around the text may differ from the release.
        allow_other: Take whatever text the file holds: guidance then leads away from something
            else than in the release.

    Returns:
        The text: of the released one its exact characters, of another all characters of the file
        but one final line break.

    Raises:
        ValueError: If the file cannot be read, is not UTF-8, is empty, or, without `allow_other`,
            holds another text.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no UTF-8 text (byte {error.start}): expected the negative prompt."
        ) from error
    for candidate in (text, text.strip()):
        if is_released_negative_prompt(candidate):
            return candidate
    if not text.strip():
        raise ValueError(f"{path} is empty: expected the negative prompt.")
    if not allow_other:
        raise ValueError(
            f"{path} holds {len(text)} characters with SHA-256 {_sha256(text)}: expected the "
            f"released negative prompt, {NEGATIVE_PROMPT_CHARACTERS} characters from 'Bright "
            f"tones, overexposed' to 'autotune artifacts' with SHA-256 {NEGATIVE_PROMPT_SHA256}. "
            "Copy it from the released inference code, or allow another text."
        )
    return text.removesuffix("\n").removesuffix("\r")


def is_released_negative_prompt(text: str) -> bool:
    """Whether a text is the released negative prompt, to the character."""
    return _sha256(text) == NEGATIVE_PROMPT_SHA256


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
