"""Sizes of a clip: the released presets, the formulas, and what has no latents."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magi2.geometry import PRESETS, Geometry


@pytest.mark.parametrize(
    ("preset", "rows", "columns", "tokens"), [("272p", 16, 28, 14336), ("540p", 32, 56, 57344)]
)
def test_presets_have_the_released_sizes(preset, rows, columns, tokens):
    width, height = PRESETS[preset]
    geometry = Geometry.of(width=width, height=height)
    assert geometry.video_shape(48) == (1, 48, 32, rows, columns)
    assert geometry.audio_shape(64) == (1, 250, 64)
    assert geometry.num_video_tokens == tokens
    assert (geometry.num_frames, geometry.width, geometry.height) == (125, width, height)
    assert Geometry.of(width=width, height=height, seconds=10) == geometry
    assert Geometry.of(width=width, height=height, num_frames=125) == geometry


@given(seconds=st.floats(0.1, 60), fps=st.sampled_from([12.5, 24, 25, 30]))
def test_length_in_seconds_follows_the_formulas(seconds, fps):
    geometry = Geometry.of(width=32, height=16, seconds=seconds, fps=fps)
    assert geometry.latent_frames == math.floor((round(seconds * fps * 2) - 1) / 8) + 1
    assert geometry.audio_length == round(seconds * 25)


@given(latent_frames=st.integers(1, 300), fps=st.sampled_from([12.5, 24, 25, 30]))
def test_length_in_frames_gives_these_frames(latent_frames, fps):
    num_frames = 4 * latent_frames - 3
    geometry = Geometry.of(width=16, height=16, num_frames=num_frames, fps=fps)
    assert geometry.latent_frames == latent_frames
    assert geometry.num_frames == num_frames
    assert geometry.audio_length == round(num_frames / fps * 25)


def test_halves_round_to_even():
    assert Geometry.of(width=16, height=16, seconds=0.5).audio_length == 12  # of 12.5
    assert Geometry.of(width=16, height=16, seconds=0.7).audio_length == 18  # of 17.5
    assert Geometry.of(width=16, height=16, seconds=1.5).audio_length == 38  # of 37.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 450}, "multiple of 16.*448 or 464"),
        ({"height": 8}, "height=8.*16 or more"),
        ({"width": 448.0}, "width=448.0: expected pixels"),
        ({"height": True}, "height=True"),
        ({"num_frames": 124}, "121 or 125"),
        ({"num_frames": 126}, "125 or 129"),
        ({"num_frames": 2}, "1 or 5"),
        ({"num_frames": 0}, "positive integer"),
        ({"num_frames": 125, "seconds": 10}, "one of them"),
        ({"seconds": 0.01}, "long enough"),
        ({"seconds": -1}, "long enough"),
        ({"seconds": float("nan")}, "long enough"),
        ({"seconds": "10"}, "long enough"),
        ({"seconds": 1e308}, "long enough"),
        ({"seconds": 10**400}, "long enough"),
        ({"fps": 0}, "fps=0"),
        ({"fps": float("inf")}, "fps=inf"),
    ],
)
def test_rejects_what_has_no_latents(arguments, message):
    with pytest.raises(ValueError, match=message):
        Geometry.of(**{"width": 448, "height": 256, **arguments})


@pytest.mark.parametrize("value", [0, -1, 1.0, True])
def test_rejects_sizes_that_are_no_positive_integers(value):
    sizes = {"latent_frames": 1, "latent_height": 1, "latent_width": 1, "audio_length": 1}
    for name in sizes:
        with pytest.raises(ValueError, match=f"{name}="):
            Geometry(**{**sizes, name: value})
