"""Sampling settings: the released values, the released JSON, and what is refused."""

from __future__ import annotations

import copy

import pytest

from magi2.settings import NO_EFFECT, SamplingSettings

RELEASED = {
    "arch_config": {"num_layers": 40},
    "engine_config": {"seed": 42},
    "evaluation_config": {
        "num_inference_steps": 100,
        "shift": 7.0,
        "video_txt_guidance_scale": 5.0,
        "audio_txt_guidance_scale": 7.0,
        "use_negative_prompt": True,
        "use_ref_for_uncond": True,
        "cfg_rescale": 0.0,
        "use_cfg_trick": False,
        "use_dynamic_cfg": False,
        "use_skimmed_cfg_linear": False,
        "fps": 12.5,
        "vae_stride": [8, 16, 16],
        "patch_size": [1, 1, 1],
        "z_dim": 48,
        "use_turbo_vae": True,
        "txt_encoder_type": "qwen35",
        "ref_image_type": "original",
        "vae_model_path": "somewhere",
    },
    "data_proxy_config": {
        "t_patch_size": 1,
        "patch_size": 1,
        "spatial_rope_interpolation": "extra",
        "add_time_token": False,
        "time_channel_dim": 64,
        "audio_latent_fps": 25,
        "time_aligned_rope": True,
        "time_pos_fps": 25,
        "vae_first_latent_is_image": True,
        "video_fps": 12.5,
    },
}
OPTIONS = {
    "use_cfg_trick": {"cfg_trick_start_frame": 3, "cfg_trick_value": 2.0},
    "use_dynamic_cfg": {"dynamic_cfg_start_t": 500, "dynamic_cfg_cutoff_value": 2.0},
    "use_skimmed_cfg": {"skimmed_cfg_scale": 2.0},
}


def changed(section: str, **values: object) -> dict:
    document = copy.deepcopy(RELEASED)
    document[section].update(values)
    return document


def test_released_document_gives_the_defaults():
    assert SamplingSettings.from_dict(RELEASED) == SamplingSettings()
    assert SamplingSettings.from_dict({}) == SamplingSettings()


def test_every_key_that_has_an_effect_is_read():
    values = {
        "num_inference_steps": 8,
        "shift": 5.0,
        "video_txt_guidance_scale": 4.0,
        "audio_txt_guidance_scale": 3,
        "use_negative_prompt": False,
        "use_ref_for_uncond": False,
        "fps": 25,
        "cfg_rescale": 0.5,
        "use_cfg_trick": True,
        "use_dynamic_cfg": True,
        "use_skimmed_cfg_linear": True,
        **{name: value for values in OPTIONS.values() for name, value in values.items()},
    }
    document = changed("evaluation_config", **values)
    document["data_proxy_config"]["time_channel_dim"] = 16
    assert SamplingSettings.from_dict(document) == SamplingSettings(
        num_inference_steps=8,
        shift=5.0,
        video_guidance_scale=4.0,
        audio_guidance_scale=3,
        use_negative_prompt=False,
        use_images_without_prompt=False,
        fps=25,
        time_channels=16,
        cfg_rescale=0.5,
        **dict.fromkeys(OPTIONS, True),
        **{name: value for values in OPTIONS.values() for name, value in values.items()},
    )


@pytest.mark.parametrize("section", sorted(NO_EFFECT))
def test_keys_without_effect_may_say_anything(section):
    values = dict.fromkeys(NO_EFFECT[section], "anything")
    assert SamplingSettings.from_dict(changed(section, **values)) == SamplingSettings()


@pytest.mark.parametrize("section", ["evaluation_config", "data_proxy_config"])
def test_unknown_keys_are_refused_unless_named(section):
    document = changed(section, num_inference_step=8)
    with pytest.raises(ValueError, match=rf"{section} has unknown keys \['num_inference_step'\]"):
        SamplingSettings.from_dict(document)
    known = SamplingSettings.from_dict(document, ignore=["num_inference_step"])
    assert known == SamplingSettings()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("evaluation_config", "vae_stride", [4, 16, 16]),
        ("evaluation_config", "patch_size", [1, 2, 2]),
        ("evaluation_config", "txt_encoder_type", "t5"),
        ("evaluation_config", "ref_image_type", "cropped"),
        ("data_proxy_config", "t_patch_size", 2),
        ("data_proxy_config", "patch_size", True),
        ("data_proxy_config", "spatial_rope_interpolation", "inter"),
        ("data_proxy_config", "add_time_token", True),
        ("data_proxy_config", "add_time_token", 0),
        ("data_proxy_config", "audio_latent_fps", 50),
    ],
)
def test_values_of_another_model_are_refused(section, key, value):
    with pytest.raises(ValueError, match=f"{section}.{key}=.*released value"):
        SamplingSettings.from_dict(changed(section, **{key: value}))


def test_whole_numbers_may_be_written_as_floats():
    document = {
        "evaluation_config": {"vae_stride": [8.0, 16, 16]},
        "data_proxy_config": {"audio_latent_fps": 25.0},
    }
    assert SamplingSettings.from_dict(document) == SamplingSettings()


def test_a_section_must_be_an_object():
    with pytest.raises(ValueError, match=r"evaluation_config is .*JSON object"):
        SamplingSettings.from_dict({"evaluation_config": [1]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_inference_steps", 0),
        ("num_inference_steps", 1001),
        ("num_inference_steps", 8.0),
        ("num_inference_steps", True),
        ("num_inference_steps", None),
        ("shift", 0.0),
        ("shift", 1000.0),
        ("shift", float("nan")),
        ("shift", "7"),
        ("video_guidance_scale", float("inf")),
        ("video_guidance_scale", 10**400),
        ("audio_guidance_scale", None),
        ("use_negative_prompt", 1),
        ("use_images_without_prompt", "yes"),
        ("use_cfg_trick", None),
        ("fps", 0),
        ("time_channels", 63),
        ("time_channels", -2),
        ("cfg_rescale", 1.5),
        ("cfg_rescale", -0.1),
        ("cfg_trick_start_frame", -1),
        ("cfg_trick_start_frame", 1.5),
        ("cfg_trick_value", float("nan")),
        ("dynamic_cfg_start_t", 1001),
        ("dynamic_cfg_cutoff_value", "2"),
        ("skimmed_cfg_scale", True),
    ],
)
def test_rejects_values_that_sampling_cannot_use(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        SamplingSettings(**{name: value})


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_needs_its_values(option):
    values = OPTIONS[option]
    SamplingSettings(**{option: True}, **values)
    for name in values:
        others = {other: value for other, value in values.items() if other != name}
        with pytest.raises(ValueError, match=f"{option} is on.*{name}"):
            SamplingSettings(**{option: True}, **others)
