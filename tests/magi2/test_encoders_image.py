"""Reference images: their size, their pixels, their latents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magi2.encoders.image import encode_reference_image, load_reference_image, target_size
from tests.magi2 import tiny_wan

pytest.importorskip("diffusers")
image_module = pytest.importorskip("PIL.Image")


def save_image(path, width, height, mode="RGB", seed=0):
    values = np.random.default_rng(seed).integers(0, 256, (height, width, len(mode)), np.uint8)
    image = image_module.fromarray(values.squeeze(), mode)
    image.save(path)
    return image


def as_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 * 2 - 1


@pytest.mark.parametrize(
    ("size", "grid", "expected"),
    [
        ((96, 64), (64, 96), (64, 96)),  # as large as the clip
        ((300, 200), (256, 448), (288, 448)),  # 298 rows, rounded down
        ((200, 300), (256, 448), (448, 288)),  # a tall image in a wide clip
        ((50, 50), (128, 64), (128, 128)),
        ((1000, 333), (256, 448), (128, 448)),
    ],
)
def test_long_side_becomes_the_clips(tmp_path, size, grid, expected):
    save_image(tmp_path / "x.png", *size)
    pixels = load_reference_image(tmp_path / "x.png", *grid)
    assert (pixels.shape, pixels.dtype) == ((3, *expected), torch.float32)
    assert pixels.min() >= -1
    assert pixels.max() <= 1


def test_target_size_rounds_down():
    assert target_size(300, 200, 448) == (448, 298)
    assert target_size(200, 300, 448) == (298, 448)
    assert target_size(7, 7, 100) == (100, 100)


def test_an_image_of_the_right_size_is_only_scaled_to_its_range(tmp_path):
    image = save_image(tmp_path / "x.png", 96, 64)
    pixels = load_reference_image(tmp_path / "x.png", 64, 96)
    torch.testing.assert_close(pixels, as_tensor(image), rtol=0, atol=1e-6)


def test_resizes_twice_with_lanczos(tmp_path):
    image = save_image(tmp_path / "x.png", 90, 40)
    pixels = load_reference_image(tmp_path / "x.png", 64, 128)
    lanczos = image_module.Resampling.LANCZOS
    # 40 * 128 / 90 = 56.9: to a canvas of 128 x 56, inside which the scale is 56 / 40 = 1.4.
    inner = image.resize((126, 56), lanczos)
    canvas = image_module.new("RGB", (128, 56), "white")
    canvas.paste(inner, (1, 0))
    expected = as_tensor(canvas.resize((128, 32), lanczos))
    assert pixels.shape == (3, 32, 128)
    torch.testing.assert_close(pixels, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_other_modes_become_rgb(tmp_path, mode):
    image = save_image(tmp_path / "x.png", 64, 64, mode)
    pixels = load_reference_image(tmp_path / "x.png", 64, 64)
    torch.testing.assert_close(pixels, as_tensor(image.convert("RGB")), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "name"), [("uint16", "x.png"), ("int32", "x.tiff"), ("float32", "x.tiff")]
)
def test_values_of_more_than_8_bits_are_refused_not_clipped(tmp_path, dtype, name):
    values = np.arange(64 * 64, dtype=dtype).reshape(64, 64)
    image_module.fromarray(values).save(tmp_path / name)
    with pytest.raises(ValueError, match=r"more than 8 bits .* Save it with 8 bits"):
        load_reference_image(tmp_path / name, 64, 64)


def test_unusable_images_are_refused(tmp_path):
    (tmp_path / "text.png").write_text("no image")
    for name in ("text.png", "absent.png"):
        with pytest.raises(ValueError, match="cannot be read as an image"):
            load_reference_image(tmp_path / name, 256, 448)
    save_image(tmp_path / "narrow.png", 500, 20)
    with pytest.raises(ValueError, match="500 x 20: at a long side of 448"):
        load_reference_image(tmp_path / "narrow.png", 256, 448)
    with pytest.raises(ValueError, match=r"a clip of 16 x 16 pixels .* Use a larger clip"):
        load_reference_image(tmp_path / "narrow.png", 16, 16)


def test_latent_is_the_normalised_mean_of_rounded_pixels():
    vae = tiny_wan.make()
    pixels = torch.rand(3, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latent = encode_reference_image(vae, pixels)
    assert (latent.shape, latent.dtype) == ((4, 1, 4, 6), torch.float32)

    def encoded(x):
        mean = vae.encode(x[None, :, None]).latent_dist.mean
        shift = torch.tensor(tiny_wan.CONFIG["latents_mean"]).view(4, 1, 1, 1)
        scale = 1 / torch.tensor(tiny_wan.CONFIG["latents_std"]).view(4, 1, 1, 1)
        return (mean[0] - shift) * scale

    assert torch.equal(latent, encoded(pixels.bfloat16().float()))
    assert not torch.equal(latent, encoded(pixels))


def test_vae_must_be_in_float32_and_sides_must_fit():
    vae = tiny_wan.make()
    with pytest.raises(ValueError, match="multiples of 16"):
        encode_reference_image(vae, torch.zeros(3, 40, 64))
    with pytest.raises(ValueError, match="expected float32"):
        encode_reference_image(vae.to(torch.bfloat16), torch.zeros(3, 64, 64))
