"""Files that people open, read again with another decoder's eyes."""

from __future__ import annotations

import wave
from fractions import Fraction

import numpy as np
import pytest
import torch

from magi2.media.audio_file import write_audio
from magi2.media.latent_picture import enlarge, latent_colours
from magi2.media.preview import LABEL, write_preview
from magi2.media.video_file import write_video

av = pytest.importorskip("av")
image_module = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")

SIZE = (32, 48)


def moving_bar(num_frames):
    """A white bar that moves down two rows a frame, on a blue ground."""
    frames = torch.zeros(num_frames, *SIZE, 3, dtype=torch.uint8)
    frames[..., 2] = 128
    for index in range(num_frames):
        frames[index, index * 2 % SIZE[0] :][:4] = 255
    return frames


def tone(samples, rate=44100, channels=2):
    time = torch.arange(samples) / rate
    frequencies = torch.tensor([440.0, 880.0])[:channels, None]
    return 0.5 * torch.sin(2 * torch.pi * frequencies * time)


def read_video(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return stream.average_rate, torch.from_numpy(np.stack(frames))


def read_audio(path):
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        blocks = [frame.to_ndarray() for frame in container.decode(stream)]
        return stream.rate, torch.from_numpy(np.concatenate(blocks, axis=1))


def test_video_and_sound_come_back(tmp_path):
    frames, audio = moving_bar(25), tone(88200)
    path = tmp_path / "clip.mp4"
    write_video(path, frames, 12.5, audio)
    assert [file.name for file in tmp_path.iterdir()] == ["clip.mp4"]
    rate, shown = read_video(path)
    assert rate == Fraction(25, 2)
    assert shown.shape == frames.shape
    # Lossy, so: every frame is closest to its own original.
    errors = (shown[:, None].float() - frames[None].float()).abs().mean(dim=(2, 3, 4))
    assert torch.equal(errors[:16].argmin(dim=1), torch.arange(16))
    assert errors.diagonal().max() < 4
    sample_rate, heard = read_audio(path)
    assert sample_rate == 44100
    assert heard.shape[0] == 2
    assert 88200 <= heard.shape[1] < 88200 + 4 * 1024
    for channel, frequency in enumerate((440, 880)):
        spectrum = torch.fft.rfft(heard[channel, 10000:54100]).abs()
        assert spectrum.argmax() == frequency
    level = heard[:, 10000:54100].square().mean().sqrt()
    torch.testing.assert_close(level, torch.tensor(0.5 / 2**0.5), rtol=0.02, atol=0)


def test_the_container_lasts_as_long_as_the_clip(tmp_path):
    path = tmp_path / "clip.mp4"
    write_video(path, moving_bar(125), Fraction(25, 2), tone(441000))
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 125
        for stream in container.streams:
            assert float(stream.duration * stream.time_base) == pytest.approx(10.0, abs=0.05)


def test_one_silent_frame_and_mono_sound(tmp_path):
    write_video(tmp_path / "one.mp4", moving_bar(1), 12.5)
    _, shown = read_video(tmp_path / "one.mp4")
    assert shown.shape[0] == 1
    write_video(tmp_path / "mono.mp4", moving_bar(2), 25, tone(1000, channels=1))
    assert read_audio(tmp_path / "mono.mp4")[1].shape[0] == 1


@pytest.mark.parametrize(
    ("frames", "fps", "audio", "message"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), 12.5, None, "height, width, 3"),
        (torch.zeros(2, 8, 8, 3), 12.5, None, "uint8"),
        (torch.zeros(2, 7, 8, 3, dtype=torch.uint8), 12.5, None, "even height"),
        (torch.zeros(0, 8, 8, 3, dtype=torch.uint8), 12.5, None, "at least one frame"),
        (moving_bar(1), 0, None, "fps=0"),
        (moving_bar(1), float("nan"), None, "fps=nan"),
        (moving_bar(1), 12.5, torch.zeros(10, 2), "1 or 2 channels"),
        (moving_bar(1), 12.5, torch.zeros(2, 10, dtype=torch.float64), "expected float32"),
        (moving_bar(1), 12.5, torch.full((2, 10), float("inf")), "NaN or infinity"),
    ],
)
def test_impossible_videos_are_refused(tmp_path, frames, fps, audio, message):
    with pytest.raises(ValueError, match=message):
        write_video(tmp_path / "x.mp4", frames, fps, audio)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(OSError, match="does not exist"):
        write_video(tmp_path / "absent" / "x.mp4", moving_bar(1), 12.5)


def test_wav_holds_the_rounded_samples(tmp_path):
    audio = torch.tensor([[0.0, 0.5, 1.0, -1.0, 2.0], [-0.25, 0.0, 0.0, 0.0, -3.0]])
    write_audio(tmp_path / "x.wav", audio, 8000)
    with wave.open(str(tmp_path / "x.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (2, 8000, 2)
        samples = np.frombuffer(file.readframes(5), "<i2").reshape(5, 2).T
    assert samples.tolist() == [[0, 16384, 32767, -32767, 32767], [-8192, 0, 0, 0, -32767]]


def scene(frames=5, rows=4, columns=6, channels=48):
    """A latent in which three patterns are mixed over the channels, and those patterns."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(3, frames, rows, columns, generator=generator)
    mixing = torch.linalg.qr(torch.randn(channels, 3, generator=generator))[0]
    weighted = patterns * torch.tensor([4.0, 2.0, 1.0]).view(3, 1, 1, 1)
    return torch.einsum("cp,pthw->cthw", mixing, weighted), patterns


def test_colours_follow_the_strongest_patterns():
    latent, patterns = scene(frames=20)
    colours = latent_colours(latent)
    assert colours.shape == (20, 4, 6, 3)
    assert colours.dtype == torch.uint8
    for colour in range(3):
        pair = torch.stack([colours[..., colour].flatten().double(), patterns[colour].flatten()])
        assert torch.corrcoef(pair)[0, 1].abs() > 0.95
    assert torch.equal(latent_colours(latent), colours)
    assert not torch.equal(latent_colours(latent.flip(1)), colours)


def test_colours_do_not_depend_on_the_signs_of_eigenvectors(monkeypatch):
    latent, _ = scene()
    expected = latent_colours(latent)
    eigh = torch.linalg.eigh

    def flipped(matrix):
        values, vectors = eigh(matrix)
        return values, -vectors

    monkeypatch.setattr(torch.linalg, "eigh", flipped)
    assert torch.equal(latent_colours(latent), expected)


@pytest.mark.parametrize("channels", [1, 2, 48])
def test_colours_of_a_constant_latent_are_grey(channels):
    colours = latent_colours(torch.ones(channels, 2, 3, 4, dtype=torch.bfloat16))
    assert (colours == 128).all()


def test_enlarged_pixels_stay_squares():
    frames = torch.arange(2 * 3 * 5 * 3, dtype=torch.uint8).view(2, 3, 5, 3)
    large = enlarge(frames, 16)
    assert large.shape == (2, 12, 20, 3)
    assert torch.equal(large[:, ::4, ::4], frames)
    assert torch.equal(large[:, 3::4, 3::4], frames)


def test_a_clip_of_one_column_is_not_made_too_high_for_a_video(tmp_path):
    assert enlarge(torch.zeros(1, 200, 1, 3, dtype=torch.uint8), 448).shape == (1, 800, 4, 3)
    written = write_preview(tmp_path, torch.randn(4, 2, 200, 1), torch.randn(3, 4))
    assert all(path.stat().st_size for path in written)


def test_what_ffmpeg_refuses_is_said(tmp_path):
    with pytest.raises(RuntimeError, match=r"FFmpeg cannot make .* up to 16384 pixels a side"):
        write_video(tmp_path / "x.mp4", torch.zeros(1, 2, 40000, 3, dtype=torch.uint8), 12.5)
    assert not list(tmp_path.iterdir())


def test_preview_shows_every_latent_frame_under_its_label(tmp_path):
    latent, _ = scene(frames=7, rows=6, columns=10)
    sheet, video, plot = write_preview(tmp_path / "new", latent, torch.randn(50, 64))
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "preview_latents.png",
        "preview_latents.mp4",
        "preview_audio.png",
    }
    rate, shown = read_video(video)
    assert (rate, len(shown)) == (Fraction(25, 8), 7)
    assert shown.shape[2] >= 448
    # The bar with the label, then the colours.
    assert shown[:, :24].float().mean() < 100
    assert (shown[:, :24].amax(dim=(1, 2, 3)) > 180).all()
    expected = enlarge(latent_colours(latent), 448)
    assert (shown[:, 24:].float() - expected.float()).abs().mean() < 12
    for path in (sheet, plot):
        with image_module.open(path) as image:
            assert min(image.size) > 200


def test_the_label_is_drawn_on_every_picture(tmp_path):
    latent, audio = scene()[0], torch.randn(20, 8)
    ours = write_preview(tmp_path / "a", latent, audio, label=LABEL)
    other = write_preview(tmp_path / "b", latent, audio, label="something else")
    for mine, theirs in zip(ours, other, strict=True):
        assert mine.read_bytes() != theirs.read_bytes()
    again = write_preview(tmp_path / "c", latent, audio)
    assert ours[0].read_bytes() == again[0].read_bytes()


def test_preview_draws_a_decoded_waveform(tmp_path):
    latent = scene()[0]
    plot = write_preview(tmp_path, latent, torch.randn(25, 8), waveform=tone(44100))[2]
    with image_module.open(plot) as image:
        assert image.size == (1000, 700)


@pytest.mark.parametrize(
    ("video", "audio", "message"),
    [
        (torch.zeros(1, 48, 2, 2, 2), torch.zeros(2, 4), "video_latent"),
        (torch.zeros(48, 2, 2, 2), torch.zeros(1, 2, 4), "audio_latent"),
        (torch.full((4, 1, 2, 2), float("nan")), torch.zeros(2, 4), "nothing to show"),
    ],
)
def test_impossible_previews_are_refused(tmp_path, video, audio, message):
    with pytest.raises(ValueError, match=message):
        write_preview(tmp_path / "new", video, audio)
    assert not (tmp_path / "new").exists()
