"""Prompts to text: structured ones, the figure sentence, the negative prompt."""

from __future__ import annotations

import hashlib
import json
import sys

import pytest

from magi2.encoders import negative_prompt as negative_module
from magi2.encoders.negative_prompt import read_negative_prompt
from magi2.encoders.prompt import add_figure_sentence, figure_span, normalise_prompt

WHOLE = {
    "global_layer": {
        "context": "A  harbour\nat dawn",
        "description": "Boats leave.",
        "aesthetics": {"style": "film", "mood_atmosphere": "calm", "color_scheme": "blue"},
        "audio_baseline": {
            "dialogue": {"language": "English", "speaker_tags": ["S1", None, "S2"]},
            "ambience": "gulls",
        },
        "alive_subjects_static": [
            {
                "subject_id": "S1",
                "description": "a sailor",
                "position": "left",
                "orientation": "facing right",
                "visual_attributes": {
                    "clothing": "coat",
                    "gender": "male",
                    "height": "tall",
                    "ethnicity": None,
                },
            }
        ],
        "objects_static": [
            {
                "object_id": "O1",
                "description": "a boat",
                "shape_and_color": "long, red",
                "position": "centre",
            }
        ],
    },
    "dynamic_layer": {
        "timeline_segments": [
            {
                "segment_basic_info": {
                    "timestamp_range": "0-5s",
                    "segment_description": "The sailor speaks.",
                },
                "audio": {
                    "dialogue_lines": [
                        {"speaker": "S1", "text": "All  aboard!", "timestamp": "1-2s"},
                        {"text": "Aye."},
                        {"speaker": "S2", "text": ""},
                    ]
                },
                "alive_subjects": [
                    {
                        "subject_id": "S1",
                        "action": {
                            "primary_action": "waves",
                            "interaction": [],
                            "facial_expression": "smiles",
                        },
                    },
                    {"subject_id": "S2", "action": {"primary_action": ""}},
                ],
                "objects": [
                    {
                        "object_id": "O1",
                        "dynamic_state": {"state_change": "moves", "motion_detail": "slowly"},
                    },
                    {"object_id": "O2", "dynamic_state": {}},
                ],
            },
            {"segment_basic_info": {"segment_description": "It ends."}},
        ]
    },
    "reference_layer": ["The first frame refers to <Figure 1>", "  ", None],
}
WHOLE_TEXT = """\
context: A harbour at dawn
Boats leave.
aesthetics: style=film; mood=calm; color=blue
audio: language=English; speakers=S1,S2; ambience=gulls
subjects:
 - S1 | a sailor (left; facing right) :: gender=male; clothing=coat
objects:
 - O1 | a boat :: long, red; centre
timeline:
 - 0-5s The sailor speaks.
   - dialogue S1: All aboard! (1-2s)
   - dialogue: Aye.
   - action S1: waves; smiles
   - objects O1: moves; slowly
 - It ends.
The first frame refers to <Figure 1>"""


def test_structured_prompt_becomes_these_lines():
    assert normalise_prompt(json.dumps(WHOLE)) == WHOLE_TEXT


@pytest.mark.parametrize(
    "text",
    [
        "A cat.",
        "",
        " spaced \n text ",
        "[1, 2]",
        "17",
        '{"context": "x"}',
        '{"global_layer": ',
        "日本",
    ],
)
def test_other_text_is_left_alone(text):
    assert normalise_prompt(text) == text


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ({"description": "Only this."}, "context\nOnly this."),
        ({"context": "Only this."}, "context: Only this."),
        ({"aesthetics": {"mood_atmosphere": " ", "color_scheme": "red"}}, "aesthetics: color=red"),
        ({"aesthetics": {"style": ""}, "audio_baseline": {"dialogue": {}}}, ""),
        ({"audio_baseline": {"ambience": "rain"}}, "audio: ambience=rain"),
        ({"objects_static": [{"description": "a cup"}, {}]}, "objects:\n - a cup"),
        ({"objects_static": [{"object_id": "O"}]}, "objects:\n - O"),
        (
            {"alive_subjects_static": [{"subject_id": "S", "orientation": "up"}]},
            "subjects:\n - S (up)",
        ),
        ({"alive_subjects_static": [{"visual_attributes": {}}, None]}, ""),
    ],
)
def test_empty_parts_go_with_their_labels(layer, expected):
    assert normalise_prompt(json.dumps({"global_layer": layer})) == expected


def test_an_empty_global_layer_still_makes_the_prompt_structured():
    document = {"global_layer": {}, "reference_layer": ["x"]}
    assert normalise_prompt(json.dumps(document)) == "x"


def test_segments_without_range_or_text_keep_their_own_lines():
    segment = {"audio": {"dialogue_lines": [{"text": "Hi."}]}}
    document = {"global_layer": {}, "dynamic_layer": {"timeline_segments": [segment, {}]}}
    assert normalise_prompt(json.dumps(document)) == "timeline:\n -\n   - dialogue: Hi."


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"global_layer": []}, None),
        ({"global_layer": "x"}, "'global_layer' is 'x': expected a JSON object"),
        ({"global_layer": {"objects_static": ["x"]}}, "holds 'x': expected JSON objects"),
        ({"global_layer": {}, "reference_layer": "x"}, "expected a JSON array"),
        (
            {
                "global_layer": {},
                "dynamic_layer": {
                    "timeline_segments": [{"audio": {"dialogue_lines": [{"words": "Hi."}]}}]
                },
            },
            r"the keys \['words'\]: expected its words under",
        ),
    ],
)
def test_parts_of_another_kind_are_refused(document, message):
    text = json.dumps(document)
    if message is None:  # Empty lists count as absent.
        assert normalise_prompt(text) == ""
    else:
        with pytest.raises(ValueError, match=message):
            normalise_prompt(text)


def test_prompts_that_are_nested_too_deeply_are_refused():
    refusals = []
    # What the parser cannot take is plain text. What it can, the renderer may not.
    for depth in range(0, 2 * sys.getrecursionlimit(), 50):
        text = '{"global_layer": {"context": ' + "[" * depth + "1" + "]" * depth + "}}"
        for change in (normalise_prompt, add_figure_sentence):
            try:
                change(text)
            except ValueError as error:
                refusals.append(str(error))
    assert all("nested too deeply" in refusal for refusal in refusals)
    if sys.version_info < (3, 12):  # later ones have limits of their own for C
        assert refusals


def test_figure_sentence_is_appended_without_separator():
    expected = "A cat.reference_layer:The first frame refers to <Figure 1>"
    assert add_figure_sentence("A cat.") == expected
    assert add_figure_sentence("[1]").startswith("[1]reference_layer:")


def test_figure_sentence_replaces_the_reference_layer_of_a_document():
    text = add_figure_sentence('{"global_layer": {"context": "été"}, "reference_layer": ["old"]}')
    assert "été" in text
    assert json.loads(text)["reference_layer"] == ["The first frame refers to <Figure 1>"]
    expected = "context: été\nThe first frame refers to <Figure 1>"
    assert normalise_prompt(text) == expected
    assert json.loads(add_figure_sentence('{"a": 1}'))["a"] == 1


def test_figure_span_is_the_first_mention():
    text = "see <Figure 11>, <Figure 1> and <Figure 1>"
    start, stop = figure_span(text, 1)
    assert (start, text[start:stop]) == (17, "<Figure 1>")
    assert figure_span(text, 2) is None


@pytest.fixture
def released(monkeypatch):
    """A stand-in for the released text, which is not in this repository."""
    text = "Bright tones, autotune artifacts"
    digest = hashlib.sha256(text.encode()).hexdigest()
    monkeypatch.setattr(negative_module, "NEGATIVE_PROMPT_SHA256", digest)
    return text


@pytest.mark.parametrize("form", ["{}", "{}\n", "\ufeff{}", "  {}\r\n\n"])
def test_negative_prompt_is_known_whatever_surrounds_it(tmp_path, released, form):
    path = tmp_path / "negative.txt"
    path.write_bytes(form.format(released).encode())
    assert read_negative_prompt(path) == released


def test_another_negative_prompt_needs_permission(tmp_path, released):
    path = tmp_path / "negative.txt"
    path.write_text(released + "!\n")
    with pytest.raises(ValueError, match=r"33 characters|34 characters"):
        read_negative_prompt(path)
    assert read_negative_prompt(path, allow_other=True) == released + "!"


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe", "no UTF-8")]
)
def test_unreadable_negative_prompts_are_refused(tmp_path, content, message):
    path = tmp_path / "negative.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_negative_prompt(path, allow_other=True)
    with pytest.raises(ValueError, match="cannot be read"):
        read_negative_prompt(tmp_path / "absent", allow_other=True)
    with pytest.raises(ValueError, match="cannot be read"):
        read_negative_prompt(tmp_path, allow_other=True)
