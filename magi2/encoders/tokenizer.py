"""Tokens as the model saw them in training: every CJK character stands alone."""

from __future__ import annotations

from typing import Any

from magi2.extras import require

# First and last code points.
CJK_RANGES = (
    (0x1100, 0x11FF),
    (0x2E80, 0xA4CF),
    (0xA840, 0xD7AF),
    (0xF900, 0xFAFF),
    (0xFE30, 0xFE4F),
    (0xFF65, 0xFFDC),
    (0x20000, 0x2FFFF),
)


def isolate_cjk(tokenizer: Any) -> None:
    """Make a tokenizer split text before and after every CJK character, then as it did before.

    Changes the tokenizer; doing it twice changes nothing more. Other text keeps its tokens.

    Args:
        tokenizer: Of the tokenizers library: `backend_tokenizer` of a fast one of transformers.

    Raises:
        ModuleNotFoundError: If tokenizers is not installed.
    """
    tokenizers = require("tokenizers", "isolating CJK characters")
    pre_tokenizers = tokenizers.pre_tokenizers
    characters = "".join(f"{chr(first)}-{chr(last)}" for first, last in CJK_RANGES)
    split = pre_tokenizers.Split(tokenizers.Regex(f"[{characters}]"), behavior="isolated")
    before = tokenizer.pre_tokenizer
    steps = [split] if before is None else [split, before]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
