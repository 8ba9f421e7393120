"""How large a clip is: in pixels, frames and seconds, and in latents and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from magi2.checks import is_finite_number

# Width and height in pixels of the sizes that the released model is made for.
PRESETS = {"272p": (448, 256), "540p": (896, 512)}
# The released model knows clips of this length only.
DEFAULT_SECONDS = 10.0
DEFAULT_FPS = 12.5
AUDIO_LATENT_FPS = 25
SPATIAL_STRIDE = 16
TEMPORAL_STRIDE = 4


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of the latents of one clip. A video latent is a token, and so is an audio latent.

    Args:
        latent_frames: Video latents in time, T; they decode to 4 * T - 3 frames.
        latent_height: Rows of latents, each of 16 pixels.
        latent_width: Columns of latents, each of 16 pixels.
        audio_length: Audio latents, 25 a second.

    Raises:
        ValueError: If one is no positive integer.
    """

    latent_frames: int
    latent_height: int
    latent_width: int
    audio_length: int

    def __post_init__(self) -> None:
        for name in ("latent_frames", "latent_height", "latent_width", "audio_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a positive integer.")

    @classmethod
    def of(
        cls,
        *,
        width: int,
        height: int,
        num_frames: int | None = None,
        seconds: float | None = None,
        fps: float = DEFAULT_FPS,
    ) -> Geometry:
        """Sizes of the latents of a clip of this size and length.

        Args:
            width: Pixels, a multiple of 16.
            height: Pixels, a multiple of 16.
            num_frames: Frames to show, one more than a multiple of 4. Or else:
            seconds: Length, rounded down to a number of frames that latents decode to. Without
                either, the 10 seconds that the released model is made for.
            fps: Frames to show in a second.

        Raises:
            ValueError: If a size is none that latents decode to, or both lengths are given.
        """
        for name, pixels in (("width", width), ("height", height)):
            _check_pixels(name, pixels)
        if not is_finite_number(fps) or fps <= 0:
            raise ValueError(f"fps={fps!r}: expected a positive number, {DEFAULT_FPS} as released.")
        if num_frames is not None:
            if seconds is not None:
                raise ValueError(
                    f"num_frames={num_frames} and seconds={seconds} are two lengths of one clip: "
                    "expected one of them. Leave the other out."
                )
            _check_frames(num_frames)
            seconds = num_frames / fps
        elif seconds is None:
            seconds = DEFAULT_SECONDS
        # The latent clock runs at twice the shown rate, with twice the stride in time.
        # A product may be infinite where its factors are not.
        is_length = is_finite_number(seconds) and is_finite_number(
            seconds * max(fps, 1.0) * AUDIO_LATENT_FPS
        )
        ticks = round(seconds * fps * 2) if is_length else 0
        audio_length = round(seconds * AUDIO_LATENT_FPS) if ticks else 0
        if ticks < 1 or audio_length < 1:
            raise ValueError(
                f"seconds={seconds!r} at fps={fps}: expected a positive number, long enough for a "
                f"frame and for an audio latent of 1/{AUDIO_LATENT_FPS} s."
            )
        return cls(
            latent_frames=(ticks - 1) // (2 * TEMPORAL_STRIDE) + 1,
            latent_height=height // SPATIAL_STRIDE,
            latent_width=width // SPATIAL_STRIDE,
            audio_length=audio_length,
        )

    @property
    def num_video_tokens(self) -> int:
        """Video latents of the clip."""
        return self.latent_frames * self.latent_height * self.latent_width

    @property
    def num_frames(self) -> int:
        """Frames that the video latents decode to."""
        return TEMPORAL_STRIDE * (self.latent_frames - 1) + 1

    @property
    def width(self) -> int:
        """Pixels of a row."""
        return self.latent_width * SPATIAL_STRIDE

    @property
    def height(self) -> int:
        """Rows of pixels."""
        return self.latent_height * SPATIAL_STRIDE

    def video_shape(self, channels: int) -> tuple[int, int, int, int, int]:
        """Shape of the video latent: (1, channels, frames, rows, columns)."""
        return (1, channels, self.latent_frames, self.latent_height, self.latent_width)

    def audio_shape(self, channels: int) -> tuple[int, int, int]:
        """Shape of the audio latent: (1, audio_length, channels)."""
        return (1, self.audio_length, channels)


def _check_pixels(name: str, pixels: object) -> None:
    if not isinstance(pixels, int) or isinstance(pixels, bool) or pixels < SPATIAL_STRIDE:
        raise ValueError(f"{name}={pixels!r}: expected pixels, {SPATIAL_STRIDE} or more.")
    if pixels % SPATIAL_STRIDE:
        below = pixels // SPATIAL_STRIDE * SPATIAL_STRIDE
        raise ValueError(
            f"{name}={pixels} is no multiple of {SPATIAL_STRIDE}, the pixels of a latent: use "
            f"{below} or {below + SPATIAL_STRIDE}."
        )


def _check_frames(num_frames: object) -> None:
    if not isinstance(num_frames, int) or isinstance(num_frames, bool) or num_frames < 1:
        raise ValueError(f"num_frames={num_frames!r}: expected a positive integer.")
    if num_frames % TEMPORAL_STRIDE != 1:
        below = (num_frames - 2) // TEMPORAL_STRIDE * TEMPORAL_STRIDE + 1
        raise ValueError(
            f"num_frames={num_frames}: expected one more than a multiple of {TEMPORAL_STRIDE}, "
            f"which is what latents decode to. Use {below} or {below + TEMPORAL_STRIDE}."
        )
