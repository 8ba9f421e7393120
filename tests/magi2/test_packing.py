"""Packed requests against the reference's files, the table of positions, and their inverse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magi2.geometry import PRESETS, Geometry
from magi2.modules.embeddings import check_coords
from magi2.modules.modality import AUDIO, TEXT, VIDEO
from magi2.ops.rotary import rotary_bands, rotary_table
from magi2.packing import (
    Conditioning,
    ReferenceImage,
    TokenLayout,
    pack_tokens,
    plan_tokens,
    time_columns,
    unpack_tokens,
    write_latents,
)
from tests.magi2.golden import GoldenFile, check_close, golden_files

CHANNELS = (5, 4, 7)  # of video, audio and text
SMALL = Geometry(latent_frames=2, latent_height=3, latent_width=2, audio_length=4)


def random_request(geometry: Geometry, lengths, num_images: int = 0, size=(2, 3), **changes):
    """Latents and conditioning in which every number is another."""
    video_channels, audio_channels, text_channels = CHANNELS
    prompt, negative = (torch.randn(length, text_channels) for length in lengths)
    images = tuple(
        ReferenceImage(
            latent=torch.randn(video_channels, 1, *size), special_token=torch.randn(text_channels)
        )
        for _ in range(num_images)
    )
    conditioning = Conditioning(prompt=prompt, negative=negative, images=images, **changes)
    video = torch.randn(geometry.video_shape(video_channels))
    audio = torch.randn(geometry.audio_shape(audio_channels))
    return video, audio, conditioning


def plan_for(geometry: Geometry, conditioning: Conditioning, **options) -> TokenLayout:
    return plan_tokens(
        geometry,
        conditioning.text_lengths,
        image_size=conditioning.image_size,
        num_images=len(conditioning.images),
        **options,
    )


def golden_request(golden: GoldenFile):
    """A file's latents, conditioning and layout."""
    video, audio = golden["in.video_latent"], golden["in.audio_latent"]
    geometry = Geometry(
        latent_frames=video.shape[2],
        latent_height=video.shape[3],
        latent_width=video.shape[4],
        audio_length=audio.shape[1],
    )
    images = ()
    if "in.ref_image_feat" in golden.tensors:
        features, tokens = (
            golden["in.ref_image_feat"],
            golden["in.ref_image_special_token_embedding"],
        )
        images = tuple(
            ReferenceImage(latent=latent, special_token=token)
            for latent, token in zip(features[0], tokens[0], strict=True)
        )
    conditioning = Conditioning(
        prompt=golden["in.text"][0],
        negative=golden["in.null_text"][0],
        images=images,
        use_images_without_prompt=golden.config["use_ref_for_uncond"],
    )
    layout = plan_for(geometry, conditioning, pad_to_multiple_of=golden.config["align_to"])
    return video, audio, conditioning, layout


@golden_files("proxy_.*")
def test_packing_matches_the_reference(golden):
    video, audio, conditioning, layout = golden_request(golden)
    tolerance = golden.tolerance
    ends = torch.tensor(layout.cu_seqlens, dtype=torch.int32)
    for name, actual in {
        "tokens": pack_tokens(layout, video, audio, conditioning),
        "coords": layout.coords,
        "modality": layout.modality,
        "cu_seqlens": ends,
    }.items():
        assert actual.dtype == golden[f"out.{name}"].dtype
        check_close(name, actual, golden[f"out.{name}"], tolerance[f"out.{name}"])
    columns = time_columns(layout, int(golden["in.timestep"]), golden.config["time_channel_dim"])
    name = "out.time_token_sequence"
    check_close(name, columns, golden[name], tolerance[name])
    assert torch.equal(golden["mid.t_normalized"], golden["in.timestep"].float().expand(2) / 1000)
    assert layout.num_padding == int(golden.metadata["pad_rows"])
    assert layout.text_lengths == tuple(golden["mid.text_lens"].tolist())
    assert ends.diff().max() == golden["out.max_seqlen"]
    texts = golden["mid.batched_text"]
    for text, batched in zip((conditioning.prompt, conditioning.negative), texts, strict=True):
        assert torch.equal(text, batched[: len(text)])


@golden_files("proxy_.*")
def test_unpacking_matches_the_reference(golden):
    video, audio, _, layout = golden_request(golden)
    unpacked = unpack_tokens(layout, golden["in.model_output"], video.shape[1], audio.shape[2])
    for name, actual in zip(("video", "audio"), unpacked, strict=True):
        assert torch.equal(actual, golden[f"out.unpacked_{name}"])


@pytest.mark.parametrize(
    ("preset", "lengths", "total", "per_rank"),
    [
        ("272p", (222, 222), 29616, 3702),
        ("272p", (15, 429), 29616, 3702),
        ("540p", (222, 222), 115632, 14454),
    ],
)
def test_released_sizes_give_the_stated_tokens(preset, lengths, total, per_rank):
    width, height = PRESETS[preset]
    geometry = Geometry.of(width=width, height=height)
    layout = plan_tokens(geometry, lengths, pad_to_multiple_of=48)
    assert layout.num_tokens == total == 8 * per_rank
    assert (layout.num_padding, len(layout.cu_seqlens)) == (0, 3)
    assert len(layout.coords) == len(layout.modality) == len(layout.time_rows) == total
    ends = [geometry.num_video_tokens + geometry.audio_length + length for length in lengths]
    assert layout.cu_seqlens == (0, ends[0], sum(ends))
    if preset == "272p":
        for text in (397, 444):  # any sum between gives the same with padding
            padded = plan_tokens(geometry, (15, text - 15), pad_to_multiple_of=48)
            assert padded.num_tokens == total


def effective_positions(coords: torch.Tensor) -> torch.Tensor:
    """Angles of the lowest band, which is 1: centred and stretched positions on each axis."""
    bands = rotary_bands(1, "cpu")
    table = rotary_table(coords, bands)
    return torch.atan2(table[:, :3], table[:, 3:])


def turn(*position: float) -> list[float]:
    """A position as an angle between -pi and pi."""
    return [math.remainder(p, 2 * math.pi) for p in position]


def test_positions_are_those_of_the_pages_table():
    geometry = Geometry(latent_frames=3, latent_height=4, latent_width=2, audio_length=16)
    layout = plan_tokens(geometry, (5, 1), image_size=(2, 4), num_images=2, pad_to_multiple_of=48)
    expected = []
    for length in (5, 1):
        expected += [
            turn(i, j - 1.5, k - 0.5) for i in range(3) for j in range(4) for k in range(2)
        ]
        expected += [turn(i * (2 - 1) / 15, 0, 0) for i in range(16)]
        expected += [turn(0 if length > 1 else -1, 0, 0)] * length
        for image in range(2):
            frame = 3 + 2 + image
            expected += [turn(frame, -1 - 0.5, -1 - 1.5)]
            expected += [turn(frame, j - 0.5, k - 1.5) for j in range(2) for k in range(4)]
    expected += [turn(i, 0, 0) for i in range(layout.num_padding)]
    assert layout.num_padding == 22
    positions = effective_positions(layout.coords)
    torch.testing.assert_close(positions, torch.tensor(expected), rtol=0, atol=2e-6)


def test_audio_spans_the_frames_of_ten_seconds():
    coords = plan_tokens(Geometry.of(width=16, height=16), (0, 0)).coords[32 : 32 + 250]
    angles = rotary_table(coords, torch.tensor([1.0 / 64]))  # no turn within 32 frames
    frames = torch.atan2(angles[:, 0], angles[:, 3]) * 64
    torch.testing.assert_close(frames, torch.arange(250) * 31 / 249, rtol=1e-5, atol=1e-5)


def test_branches_without_text_have_no_text_tokens():
    _, _, conditioning = random_request(SMALL, (3, 0))
    layout = plan_for(SMALL, conditioning)
    assert layout.cu_seqlens == (0, 19, 35)
    assert (layout.modality[19:] != TEXT).all()


@pytest.mark.parametrize("shown", [True, False])
def test_images_of_the_unconditional_branch_may_be_zeros(shown):
    video, audio, conditioning = random_request(
        SMALL, (3, 2), num_images=2, use_images_without_prompt=shown
    )
    layout = plan_for(SMALL, conditioning)
    x = pack_tokens(layout, video, audio, conditioning)
    text_end = layout.num_generated + 3
    first, second = x[text_end : text_end + 14], x[layout.starts[1] + layout.num_generated + 2 :]
    images = layout.modality[text_end : text_end + 14] == VIDEO
    assert torch.equal(second[~images], first[~images])  # special tokens in any case
    assert torch.equal(second[images], first[images] if shown else torch.zeros(12, 7))
    assert first[images][:, :5].all()


def test_features_of_lower_precision_are_widened_exactly():
    video, audio, conditioning = random_request(SMALL, (3, 2), num_images=1)
    image = ReferenceImage(
        latent=conditioning.images[0].latent,
        special_token=conditioning.images[0].special_token.bfloat16(),
    )
    narrow = Conditioning(
        prompt=conditioning.prompt.bfloat16(),
        negative=conditioning.negative.bfloat16(),
        images=(image,),
    )
    layout = plan_for(SMALL, narrow)
    x = pack_tokens(layout, video, audio, narrow)
    start = layout.num_generated
    assert x.dtype == torch.float32
    assert torch.equal(x[start : start + 3], narrow.prompt.float())
    assert torch.equal(x[start + 3], image.special_token.float())


@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 3, st.integers(1, 20)),
    lengths=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    num_images=st.integers(0, 3),
    image_size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    multiple=st.sampled_from([None, 1, 5, 48]),
    each=st.booleans(),
)
def test_every_request_survives_the_round_trip(
    sizes, lengths, num_images, image_size, multiple, each
):
    names = ("latent_frames", "latent_height", "latent_width", "audio_length")
    geometry = Geometry(**dict(zip(names, sizes, strict=True)))
    video, audio, conditioning = random_request(geometry, lengths, num_images, image_size)
    layout = plan_for(geometry, conditioning, pad_to_multiple_of=multiple, pad_each_branch=each)
    x = pack_tokens(layout, video, audio, conditioning)
    check_coords(layout.coords)
    videos, audios = unpack_tokens(layout, x, CHANNELS[0], CHANNELS[1])
    for branch in range(2):
        assert torch.equal(videos[branch : branch + 1], video)
        assert torch.equal(audios[branch : branch + 1], audio)
    shown = num_images * (1 + image_size[0] * image_size[1])
    branches = [layout.num_generated + length + shown for length in lengths]
    padding = x[layout.time_rows == 2]
    assert len(padding) == layout.num_padding
    assert not padding.any()
    assert layout.num_tokens == sum(branches) + layout.num_padding == layout.cu_seqlens[-1]
    if multiple and each:
        lengths_padded = [-(-length // multiple) * multiple for length in branches]
        assert layout.starts == (0, lengths_padded[0])
        assert len(layout.cu_seqlens) == 5
    else:
        assert layout.starts == (0, branches[0])
        assert layout.num_tokens % (multiple or 1) == 0
        assert len(layout.cu_seqlens) == 3 + (layout.num_padding > 0)
    counts = torch.bincount(layout.modality, minlength=3).tolist()
    assert counts[AUDIO] == 2 * geometry.audio_length
    image_tokens = 2 * num_images * image_size[0] * image_size[1]
    assert counts[VIDEO] == 2 * geometry.num_video_tokens + image_tokens


def test_tokens_are_where_a_plain_loop_puts_them():
    video, audio, conditioning = random_request(SMALL, (3, 1), num_images=2)
    layout = plan_for(SMALL, conditioning, pad_to_multiple_of=16)
    rows = []
    for text in (conditioning.prompt, conditioning.negative):
        rows += [video[0, :, t, h, w] for t in range(2) for h in range(3) for w in range(2)]
        rows += [audio[0, i] for i in range(4)]
        rows += list(text)
        for image in conditioning.images:
            rows.append(image.special_token)
            rows += [image.latent[:, 0, h, w] for h in range(2) for w in range(3)]
    x = pack_tokens(layout, video, audio, conditioning)
    expected = torch.zeros(layout.num_tokens, max(CHANNELS))
    for row, channels in enumerate(rows):
        expected[row, : len(channels)] = channels
    assert layout.num_padding == 64 - len(rows) == -len(rows) % 16
    assert torch.equal(x, expected)


def test_writing_latents_changes_nothing_else():
    video, audio, conditioning = random_request(SMALL, (3, 2), num_images=1)
    layout = plan_for(SMALL, conditioning, pad_to_multiple_of=48)
    x = pack_tokens(layout, video, audio, conditioning)
    other_video, other_audio = torch.randn_like(video), torch.randn_like(audio)
    write_latents(layout, x, other_video, other_audio)
    assert torch.equal(x, pack_tokens(layout, other_video, other_audio, conditioning))
    write_latents(layout, x, video, audio)
    assert torch.equal(x, pack_tokens(layout, video, audio, conditioning))


def test_time_columns_hold_the_formula_for_every_timestep():
    layout = plan_tokens(SMALL, (2, 1), image_size=(1, 2), num_images=1, pad_to_multiple_of=48)
    generated = torch.zeros(layout.num_tokens, dtype=torch.bool)
    for start in layout.starts:
        generated[start : start + layout.num_generated] = True
    padding = torch.arange(layout.num_tokens) >= layout.cu_seqlens[2]
    given_tokens = ~generated & ~padding
    frequencies = torch.exp(-math.log(10000) * torch.arange(32, dtype=torch.float32) / 32)
    not_cancelling = 0
    for timestep in range(0, 1001):
        columns = time_columns(layout, timestep)
        time = torch.tensor(timestep, dtype=torch.float32) / 1000
        angles = (1000 * time) * frequencies
        not_cancelling += float(1000 * time) != timestep
        row = torch.cat([angles.cos(), angles.sin()])
        torch.testing.assert_close(columns[0], row, rtol=0, atol=1e-6)
        assert (columns[generated] == columns[0]).all()
        assert torch.equal(columns[given_tokens][:, :32], torch.ones(int(given_tokens.sum()), 32))
        assert not columns[given_tokens][:, 32:].any()
        assert not columns[padding].any()
    assert not_cancelling == 10
    assert time_columns(layout, 500, 0).shape == (layout.num_tokens, 0)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ((3,), {}, r"text_lengths=\[3\]"),
        ((3, -1), {}, "zero or more each"),
        ((3, 1.5), {}, "text_lengths"),
        ((3, 1), {"num_images": 1}, "expected a size if there are images"),
        ((3, 1), {"image_size": (2, 2)}, "none if there are none"),
        ((3, 1), {"num_images": 1, "image_size": (2, 0)}, "rows and columns"),
        ((3, 1), {"num_images": 1, "image_size": (2,)}, "rows and columns"),
        ((3, 1), {"pad_to_multiple_of": 0}, "pad_to_multiple_of=0"),
    ],
)
def test_rejects_plans_of_no_request(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        plan_tokens(SMALL, lengths, **options)


def test_rejects_tensors_that_do_not_fit_the_layout():
    video, audio, conditioning = random_request(SMALL, (3, 2), num_images=1)
    layout = plan_for(SMALL, conditioning)
    x = pack_tokens(layout, video, audio, conditioning)
    with pytest.raises(ValueError, match=r"video is .*expected \(1, 5, 2, 3, 2\)"):
        pack_tokens(layout, video[:, :, :1], audio, conditioning)
    with pytest.raises(ValueError, match=r"audio is .*float64: expected"):
        pack_tokens(layout, video, audio.double(), conditioning)
    with pytest.raises(ValueError, match=r"video is .*expected"):
        write_latents(layout, x, video[0], audio)
    _, _, longer = random_request(SMALL, (4, 2), num_images=1)
    with pytest.raises(ValueError, match=r"text_lengths=\(4, 2\): expected \(3, 2\)"):
        pack_tokens(layout, video, audio, longer)
    _, _, larger = random_request(SMALL, (3, 2), num_images=1, size=(3, 3))
    with pytest.raises(ValueError, match=r"image_size=\(3, 3\): expected \(2, 3\)"):
        pack_tokens(layout, video, audio, larger)
    _, _, more = random_request(SMALL, (3, 2), num_images=2)
    with pytest.raises(ValueError, match="2 images: expected 1"):
        pack_tokens(layout, video, audio, more)
    with pytest.raises(ValueError, match="5 latent channels and the video 6"):
        pack_tokens(layout, torch.randn(SMALL.video_shape(6)), audio, conditioning)
    with pytest.raises(ValueError, match=r"rows is .*at least 5 channels"):
        unpack_tokens(layout, x[:, :4], 5, 4)
    with pytest.raises(ValueError, match="a row for each token"):
        unpack_tokens(layout, x[1:], 5, 4)


def test_conditioning_rejects_contradictions():
    text, image = torch.randn(3, 7), torch.randn(5, 1, 2, 3)
    with pytest.raises(ValueError, match=r"prompt is .*expected"):
        Conditioning(prompt=text[0], negative=text)
    with pytest.raises(ValueError, match=r"negative is .*int64"):
        Conditioning(prompt=text, negative=text.long())
    with pytest.raises(ValueError, match="7 channels and negative 6"):
        Conditioning(prompt=text, negative=text[:, :6])
    with pytest.raises(ValueError, match=r"the image latent is .*expected"):
        ReferenceImage(latent=image[:, 0], special_token=text[0])
    with pytest.raises(ValueError, match=r"the image latent is .*bfloat16"):
        ReferenceImage(latent=image.bfloat16(), special_token=text[0])
    with pytest.raises(ValueError, match="special token is"):
        ReferenceImage(latent=image, special_token=text)
    first = ReferenceImage(latent=image, special_token=text[0])
    other = ReferenceImage(latent=image[..., :2], special_token=text[0])
    with pytest.raises(ValueError, match="one size for all"):
        Conditioning(prompt=text, negative=text, images=(first, other))
    narrow = ReferenceImage(latent=image, special_token=text[0, :6])
    with pytest.raises(ValueError, match="special tokens have 6 channels and the prompt 7"):
        Conditioning(prompt=text, negative=text, images=(narrow,))
