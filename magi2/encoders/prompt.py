"""From what a user wrote to the text that is encoded."""

from __future__ import annotations

import json
import re
from typing import Any

from magi2.encoders.structured_prompt import render

FIGURE_SENTENCE = "The first frame refers to <Figure 1>"
_REFERENCES = "reference_layer"
_TOO_DEEP = "The prompt's JSON is nested too deeply: expected layers of some levels at most."


def normalise_prompt(text: str) -> str:
    """Render a structured prompt as compact text; any other text comes back as it is.

    Args:
        text: A prompt; structured if it is a JSON object with the key `global_layer`.

    Raises:
        ValueError: If it is structured, and a part that is rendered is not of the kind expected or
            it is nested too deeply.
    """
    document = _parse(text)
    if isinstance(document, dict) and "global_layer" in document:
        try:
            return render(document)
        except RecursionError as error:
            raise ValueError(_TOO_DEEP) from error
    return text


def add_figure_sentence(text: str) -> str:
    """Say that the first frame refers to the reference image; before `normalise_prompt`.

    The sentence names figure 1, however many images there are.

    Raises:
        ValueError: If it is a JSON object that is nested too deeply.
    """
    document = _parse(text)
    if isinstance(document, dict):
        try:
            return json.dumps({**document, _REFERENCES: [FIGURE_SENTENCE]}, ensure_ascii=False)
        except RecursionError as error:
            raise ValueError(_TOO_DEEP) from error
    # No separator: one would change the tokens.
    return f"{text}{_REFERENCES}:{FIGURE_SENTENCE}"


def figure_span(text: str, figure: int) -> tuple[int, int] | None:
    """Where a figure is first named in a normalised prompt.

    Args:
        text: The normalised prompt.
        figure: Number of the figure, from 1.

    Returns:
        First character of `<Figure k>` and the one after its last; None if it is not named.
    """
    match = re.search(re.escape(f"<Figure {figure}>"), text)
    return match.span() if match else None


def _parse(text: str) -> Any:
    """The JSON document that a text is, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
