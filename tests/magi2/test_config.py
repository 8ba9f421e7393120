from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch

from magi2 import presets
from magi2.config import Magi2Config
from tests.magi2.golden import CHECKPOINTS

PRESETS = [presets.preview, presets.tiny, presets.tiny_uneven]


@pytest.mark.parametrize("preset", PRESETS)
def test_json_round_trip_is_identity(preset):
    config = preset()
    document = json.loads(json.dumps(config.to_dict()))
    assert Magi2Config.from_dict(document) == config
    assert Magi2Config.from_dict(document["arch_config"]) == config


def test_preview_has_the_released_numbers():
    config = presets.preview()
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (24, 24, 128)
    assert (config.intermediate_size, config.stream_width) == (8192, 12288)
    assert (config.moe.num_heads, config.moe_head_dim, config.moe.num_experts) == (12, 256, 256)
    assert (config.output_channels, config.input_channels) == (64, 5120)
    assert config.num_rotary_bands == 16
    assert [layer for layer in range(40) if config.num_modalities(layer) == 3] == [0, 1, 38, 39]
    assert set(range(40)) - set(config.moe.layers) == {0, 1, 38, 39}


def test_released_document_loads_with_its_other_sections(tmp_path):
    document = presets.preview().to_dict()
    del document["arch_config"]["layer_activation_types"]
    del document["arch_config"]["moe_config"]["split_merge_intermediate_size"]
    document["engine_config"] = {"cp_size": 8, "ep_size": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    assert Magi2Config.from_file(path) == presets.preview()


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: folder.name)
def test_golden_checkpoint_configuration_loads(folder):
    config = Magi2Config.from_file(folder / "config.json")
    document = json.loads((folder / "config.json").read_text())
    given = document.get("arch_config", document)
    written = config.to_dict()["arch_config"]
    assert {key: written[key] for key in given if key in written} == {
        key: value for key, value in given.items() if key in written
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("head_dim"), "lacks 'head_dim'"),
        (lambda a: a.update(bogus=1), "unknown keys .'bogus'"),
        (lambda a: a["moe_config"].update(capacity=1), "moe_config has unknown keys"),
        (lambda a: a["attn_gating"].update(enable=False), "attn_gating.enable=False"),
        (lambda a: a.update(activation_type="gelu"), "activation_type='gelu'"),
        (lambda a: a.update(layer_activation_types={"3": "gelu"}), "layer_activation_types"),
        (lambda a: a.update(params_dtype="float16"), "params_dtype='float16'"),
        (lambda a: a.update(num_heads_q=7), "num_heads_q=7 contradicts"),
        (lambda a: a.update(mhc_config=3), "mhc_config is 3"),
        (lambda a: a.update(num_layers="40"), "num_layers='40'"),
        (lambda a: a.update(head_dim=36), "no multiple of 8"),
        (lambda a: a.update(head_dim=40), "head_dim=40 does not divide hidden_size"),
        (lambda a: a.update(num_query_groups=3), "num_kv_heads=3 does not divide"),
        (lambda a: a["moe_config"].update(num_heads=7), "moe.num_heads=7 does not divide"),
        (lambda a: a["moe_config"].update(top_k=9), "top_k=9 exceeds"),
        (lambda a: a["moe_config"].update(score_func="relu"), "score_func='relu'"),
        (lambda a: a["moe_config"].update(moe_layers=[1, 4]), "moe.layers=.1, 4."),
        (lambda a: a.update(mm_layers=[0, 0]), "multimodal_layers=.0, 0."),
        (lambda a: a.update(intermediate_factor=0.5), "dense MLP of width 0"),
        (lambda a: a.update(intermediate_factor=-4), "dense MLP of width -768"),
        (lambda a: a.update(intermediate_factor="4"), "intermediate_factor='4'"),
        (lambda a: a.update(intermediate_factor=float("inf")), "intermediate_factor=inf"),
        (lambda a: a.update(num_layers=10**6), "num_layers=1000000: expected at most 1000"),
        (lambda a: a.update(hidden_size=2**40), "hidden_size=1099511627776: expected at most"),
        (lambda a: a["moe_config"].update(num_experts=2**40), "moe.num_experts=1099511627776"),
        (lambda a: a.update(intermediate_factor=1e308), "dense MLP of width 0"),
        (lambda a: a.update(intermediate_factor=10**400), "intermediate_factor=1000"),
        (lambda a: a.update(attn_softcap=None), "attention_softcap=None: expected a finite number"),
        (lambda a: a.update(attn_softcap="-1"), "attention_softcap='-1'"),
        (lambda a: a["mhc_config"].update(alpha_init=True), "alpha_init=True"),
        (lambda a: a["moe_config"].update(route_scale=float("nan")), "route_scale=nan"),
        (lambda a: a["moe_config"].update(route_norm="false"), "route_norm='false'"),
        (lambda a: a.update(mm_layers=3), "mm_layers is of type int"),
        (lambda a: a.update(mm_layers="03"), "mm_layers is of type str"),
        (lambda a: a.update(mm_layers=[0.0]), "holds 0.0"),
        (lambda a: a["moe_config"].update(moe_layers=[True]), "holds True"),
        (lambda a: a.update(layer_activation_types=["gelu"]), "layer_activation_types is"),
        (lambda a: a.update(params_dtype=["bfloat16"]), "params_dtype=.'bfloat16'."),
    ],
)
def test_refuses_what_the_model_is_not(change, message):
    document = copy.deepcopy(presets.tiny().to_dict())
    change(document["arch_config"])
    with pytest.raises(ValueError, match=message):
        Magi2Config.from_dict(document)


def test_refuses_a_document_that_is_no_object():
    with pytest.raises(ValueError, match=r"config is \[1\]: expected a JSON object"):
        Magi2Config.from_dict([1])


def test_refuses_a_key_that_is_stated_twice(tmp_path):
    text = json.dumps(presets.tiny().to_dict()).replace('"top_k": 2', '"top_k": 2, "top_k": 3')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="the key 'top_k' is stated twice"):
        Magi2Config.from_file(tmp_path / "config.json")


def test_refuses_a_file_that_is_no_object(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        Magi2Config.from_file(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"is not JSON: it is nested too deeply"):
        Magi2Config.from_file(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Magi2Config.from_file(path)


def test_refuses_a_dtype_that_no_checkpoint_has():
    with pytest.raises(ValueError, match="float16"):
        dataclasses.replace(presets.tiny(), dtype=torch.float16)
