"""How a clip is sampled: steps, guidance and their options, with the released values."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from magi2.checks import is_finite_number

# Counted, not looked up, steps may be many; beyond these the float32 noise levels lie too close.
MAX_STEPS = 1000
MAX_SHIFT = 100.0

_EVALUATION = {
    "num_inference_steps": "num_inference_steps",
    "shift": "shift",
    "video_txt_guidance_scale": "video_guidance_scale",
    "audio_txt_guidance_scale": "audio_guidance_scale",
    "use_negative_prompt": "use_negative_prompt",
    "use_ref_for_uncond": "use_images_without_prompt",
    "fps": "fps",
    "cfg_rescale": "cfg_rescale",
    "use_cfg_trick": "use_cfg_trick",
    "cfg_trick_start_frame": "cfg_trick_start_frame",
    "cfg_trick_value": "cfg_trick_value",
    "use_dynamic_cfg": "use_dynamic_cfg",
    "dynamic_cfg_start_t": "dynamic_cfg_start_t",
    "dynamic_cfg_cutoff_value": "dynamic_cfg_cutoff_value",
    "use_skimmed_cfg_linear": "use_skimmed_cfg",
    "skimmed_cfg_scale": "skimmed_cfg_scale",
}
_DATA = {"time_channel_dim": "time_channels"}
# Released values that this package has built in: anything else would be another model.
_FIXED = {
    "vae_stride": [8, 16, 16],
    "patch_size": [1, 1, 1],
    "txt_encoder_type": "qwen35",
    "ref_image_type": "original",
}
_FIXED_DATA = {
    "t_patch_size": 1,
    "patch_size": 1,
    "spatial_rope_interpolation": "extra",
    "add_time_token": False,
    "audio_latent_fps": 25,
}
# Read by the reference without any effect, or answered elsewhere: the latent channels by the
# weights, the decoder by what is installed.
NO_EFFECT = {
    "evaluation_config": ("z_dim", "use_turbo_vae"),
    "data_proxy_config": (
        "time_aligned_rope",
        "time_pos_fps",
        "vae_first_latent_is_image",
        "video_fps",
    ),
}
# Options of guidance and the values that each needs.
_OPTIONS = {
    "use_cfg_trick": ("cfg_trick_start_frame", "cfg_trick_value"),
    "use_dynamic_cfg": ("dynamic_cfg_start_t", "dynamic_cfg_cutoff_value"),
    "use_skimmed_cfg": ("skimmed_cfg_scale",),
}


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Everything but prompt, size and seed that decides what a clip looks like.

    Args:
        num_inference_steps: Steps, one model call each.
        shift: Moves steps towards noise; 1 spaces them evenly.
        video_guidance_scale: Weight of the prompt against the negative one, for video; 1 is none.
        audio_guidance_scale: The same for audio.
        use_negative_prompt: Whether the unconditional branch has text at all.
        use_images_without_prompt: Whether the unconditional branch sees the reference images.
        fps: Frames shown in a second.
        time_channels: Columns in which the model is told the time.
        cfg_rescale: How far the guided velocity is brought to the conditional one's deviation,
            from 0, not at all, to 1.
        use_cfg_trick: Whether the first latent frames have a video scale of their own, if smaller:
        cfg_trick_start_frame: First latent frame that has not.
        cfg_trick_value: That scale.
        use_dynamic_cfg: Whether late steps have a video scale of their own, if smaller:
        dynamic_cfg_start_t: Timestep, from 0 to 1000, below which they do.
        dynamic_cfg_cutoff_value: That scale.
        use_skimmed_cfg: Whether guidance is held back where it overshoots, for video and audio:
        skimmed_cfg_scale: The scale that is left there.

    Raises:
        ValueError: If a value is none that sampling can use, or one that an option needs is not
            given.
    """

    num_inference_steps: int = 100
    shift: float = 7.0
    video_guidance_scale: float = 5.0
    audio_guidance_scale: float = 7.0
    use_negative_prompt: bool = True
    use_images_without_prompt: bool = True
    fps: float = 12.5
    time_channels: int = 64
    cfg_rescale: float = 0.0
    use_cfg_trick: bool = False
    cfg_trick_start_frame: int | None = None
    cfg_trick_value: float | None = None
    use_dynamic_cfg: bool = False
    dynamic_cfg_start_t: float | None = None
    dynamic_cfg_cutoff_value: float | None = None
    use_skimmed_cfg: bool = False
    skimmed_cfg_scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("use_negative_prompt", "use_images_without_prompt", *_OPTIONS):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected true or false.")
        for option, values in _OPTIONS.items():
            missing = [name for name in values if getattr(self, name) is None]
            if getattr(self, option) and missing:
                raise ValueError(
                    f"{option} is on and {missing} not given: expected a value of each."
                )
        _check(self, "num_inference_steps", f"an integer from 1 to {MAX_STEPS}", 1, MAX_STEPS, int)
        _check(self, "shift", f"a number above 0, up to {MAX_SHIFT:g}", 1e-3, MAX_SHIFT)
        _check(self, "fps", "a positive number", 1e-3)
        _check(self, "time_channels", "zero or a positive even integer", 0, kind=int)
        if self.time_channels % 2:
            raise ValueError(f"time_channels={self.time_channels}: expected an even integer.")
        _check(self, "cfg_rescale", "a number from 0 to 1", 0, 1)
        _check(self, "cfg_trick_start_frame", "latent frames, zero or more", 0, kind=int)
        _check(self, "dynamic_cfg_start_t", "a timestep from 0 to 1000", 0, 1000)
        for name in (
            "video_guidance_scale",
            "audio_guidance_scale",
            "cfg_trick_value",
            "dynamic_cfg_cutoff_value",
            "skimmed_cfg_scale",
        ):
            _check(self, name, "a finite number")

    @classmethod
    def from_dict(
        cls, document: Mapping[str, Any], *, ignore: Collection[str] = ()
    ) -> SamplingSettings:
        """Read the released JSON's `evaluation_config` and `data_proxy_config`.

        A section or a key that is missing has its released value. Keys that end in `_path` say
        where a part lies and are left alone; those in `NO_EFFECT` are known to do nothing here.

        Args:
            document: The whole document; its other sections are left alone.
            ignore: Further keys of these sections to leave alone.

        Raises:
            ValueError: If a key is unknown, or a value is one that this package does not have.
        """
        evaluation = _read(document, "evaluation_config", _EVALUATION, _FIXED, ignore)
        data = _read(document, "data_proxy_config", _DATA, _FIXED_DATA, ignore)
        return cls(**evaluation, **data)


def _read(
    document: Mapping[str, Any],
    section: str,
    names: Mapping[str, str],
    fixed: Mapping[str, object],
    ignore: Collection[str],
) -> dict[str, Any]:
    keys = document.get(section, {})
    if not isinstance(keys, Mapping):
        raise ValueError(f"{section} is {keys!r}: expected a JSON object.")
    left_alone = {*NO_EFFECT[section], *ignore}
    values, unknown = {}, []
    for key, value in keys.items():
        if key in names:
            values[names[key]] = value
        elif key in fixed:
            if not _is_same(value, fixed[key]):
                raise ValueError(
                    f"{section}.{key}={value!r}: only {fixed[key]!r}, the released value, is "
                    "supported."
                )
        elif key not in left_alone and not key.endswith("_path"):
            unknown.append(key)
    if unknown:
        raise ValueError(
            f"{section} has unknown keys {sorted(unknown)}: expected the released keys only. "
            "Correct their names, or have them ignored if they say nothing about sampling."
        )
    return values


def _is_same(value: object, fixed: object) -> bool:
    """Equality as of JSON values: there 1.0 is 1, but true is not."""
    if isinstance(value, list) and isinstance(fixed, list):
        return len(value) == len(fixed) and all(map(_is_same, value, fixed))
    return value == fixed and isinstance(value, bool) == isinstance(fixed, bool)


def _check(
    settings: SamplingSettings,
    name: str,
    expected: str,
    lowest: float = -math.inf,
    highest: float = math.inf,
    kind: type[int] | None = None,
) -> None:
    value = getattr(settings, name)
    if value is None and any(name in values for values in _OPTIONS.values()):
        return
    is_kind = is_finite_number(value) and (kind is None or isinstance(value, kind))
    if not is_kind or not lowest <= value <= highest:
        raise ValueError(f"{name}={value!r}: expected {expected}.")
