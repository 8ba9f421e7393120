"""A prompt given as a JSON document of layers, as compact lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_ATTRIBUTES = ("gender", "age_group", "ethnicity", "clothing", "appearance_details")
# Spellings that are looked for, in this order.
_SUBJECT_ID = ("subject_id", "id")
_OBJECT_ID = ("object_id", "id")
_SPEAKER = ("speaker", "speaker_tag", "speaker_id", "subject_id")
_TEXT = ("text", "line", "content")
_TIME = ("time", "timestamp", "timestamp_range", "time_range")


def render(document: Mapping[str, Any]) -> str:
    """Lines for the layers `global_layer`, `dynamic_layer` and `reference_layer`.

    Empty parts are left out together with their labels; white space inside a value becomes single
    spaces.

    Raises:
        ValueError: If a layer, or a part of one, is not of the JSON type expected.
    """
    cleaned = _clean(document)
    lines = [
        *_global_lines(_object(cleaned, "global_layer")),
        *_timeline_lines(_object(cleaned, "dynamic_layer")),
        *map(_text, _items(cleaned, "reference_layer")),
    ]
    return "\n".join(line for line in lines if line.strip())


def _clean(value: Any) -> Any:
    """Drop object entries that are null, [] or {} once they are clean, and null list items."""
    if isinstance(value, Mapping):
        cleaned = {key: _clean(entry) for key, entry in value.items()}
        return {key: entry for key, entry in cleaned.items() if entry not in (None, [], {})}
    if isinstance(value, list):
        return [_clean(item) for item in value if item is not None]
    return value


def _global_lines(layer: Mapping[str, Any]) -> Iterator[str]:
    context, description = _text(layer.get("context")), _text(layer.get("description"))
    if context or description:
        yield f"context: {context}" if context else "context"
    yield description
    aesthetics = _object(layer, "aesthetics")
    yield _labelled(
        "aesthetics: ",
        _pairs(
            style=aesthetics.get("style"),
            mood=aesthetics.get("mood_atmosphere"),
            color=aesthetics.get("color_scheme"),
        ),
    )
    baseline = _object(layer, "audio_baseline")
    dialogue = _object(baseline, "dialogue")
    speakers = dialogue.get("speaker_tags")
    if isinstance(speakers, list):
        speakers = ",".join(filter(None, map(_text, speakers)))
    yield _labelled(
        "audio: ",
        _pairs(
            language=dialogue.get("language"), speakers=speakers, ambience=baseline.get("ambience")
        ),
    )
    yield from _listed("subjects:", map(_subject_line, _objects(layer, "alive_subjects_static")))
    yield from _listed("objects:", map(_object_line, _objects(layer, "objects_static")))


def _subject_line(subject: Mapping[str, Any]) -> str:
    place = _joined("; ", subject.get("position"), subject.get("orientation"))
    attributes = _object(subject, "visual_attributes")
    return (
        _joined(" | ", _pick(subject, _SUBJECT_ID), subject.get("description"))
        + (f" ({place})" if place else "")
        + _labelled(" :: ", _pairs(**{key: attributes.get(key) for key in _ATTRIBUTES}))
    )


def _object_line(thing: Mapping[str, Any]) -> str:
    look = _joined("; ", thing.get("shape_and_color"), thing.get("position"))
    return _joined(" | ", _pick(thing, _OBJECT_ID), thing.get("description")) + _labelled(
        " :: ", look
    )


def _timeline_lines(layer: Mapping[str, Any]) -> Iterator[str]:
    lines: list[str] = []
    for segment in _objects(layer, "timeline_segments"):
        basics = _object(segment, "segment_basic_info")
        head = _joined(" ", "-", basics.get("timestamp_range"), basics.get("segment_description"))
        own = [line for line in _segment_lines(segment) if line]
        if own or head != "-":
            lines += [f" {head}", *own]
    if lines:
        yield "timeline:"
    yield from lines


def _segment_lines(segment: Mapping[str, Any]) -> Iterator[str]:
    for line in _objects(_object(segment, "audio"), "dialogue_lines"):
        text, time = _pick(line, _TEXT), _pick(line, _TIME)
        if line and not any(key in line for key in _TEXT):
            raise ValueError(
                f"A dialogue line of the prompt has the keys {sorted(line)}: expected its words "
                f"under one of {', '.join(_TEXT)}."
            )
        if text:
            speaker = _joined(" ", "dialogue", _pick(line, _SPEAKER))
            yield f"   - {speaker}: {text}" + (f" ({time})" if time else "")
    for subject in _objects(segment, "alive_subjects"):
        action = _object(subject, "action")
        yield _doing(
            _joined(" ", "action", _pick(subject, _SUBJECT_ID)),
            *map(action.get, ("primary_action", "interaction", "facial_expression")),
        )
    for thing in _objects(segment, "objects"):
        state = _object(thing, "dynamic_state")
        yield _doing(
            _joined(" ", "objects", _pick(thing, _OBJECT_ID)),
            *map(state.get, ("state_change", "motion_detail")),
        )


def _doing(label: str, *parts: Any) -> str:
    return _labelled(f"   - {label}: ", _joined("; ", *parts))


def _listed(label: str, items: Iterable[str]) -> Iterator[str]:
    lines = [f" - {item}" for item in items if item]
    if lines:
        yield label
    yield from lines


def _labelled(label: str, text: str) -> str:
    return f"{label}{text}" if text else ""


def _pairs(**values: Any) -> str:
    return "; ".join(f"{key}={_text(value)}" for key, value in values.items() if _text(value))


def _joined(separator: str, *values: Any) -> str:
    return separator.join(filter(None, map(_text, values)))


def _pick(item: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    return next((text for key in keys if (text := _text(item.get(key)))), "")


def _text(value: Any) -> str:
    """A value in print, its white space collapsed; lists by commas; nothing for null."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(filter(None, map(_text, value)))
    return " ".join(str(value).split())


def _object(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"The prompt's {key!r} is {value!r}: expected a JSON object.")
    return value


def _items(parent: Mapping[str, Any], key: str) -> list[Any]:
    value = parent.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"The prompt's {key!r} is {value!r}: expected a JSON array.")
    return value


def _objects(parent: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    items = _items(parent, key)
    for item in items:
        if not isinstance(item, Mapping):
            raise ValueError(f"The prompt's {key!r} holds {item!r}: expected JSON objects.")
    return items
