"""The text encoder against the whole model, its tokens, and the figures' special tokens."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")

from magi2.encoders import text as text_module
from magi2.encoders.text import figure_token, load_text_encoder
from magi2.encoders.tokenizer import CJK_RANGES, isolate_cjk
from tests.magi2 import tiny_qwen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("qwen")


@pytest.fixture(scope="module")
def tower(folder):
    return tiny_qwen.save(folder)


@pytest.fixture(scope="module")
def encoder(folder, tower):
    return load_text_encoder(folder)


def tokens_of(encoder, text):
    return encoder.tokenizer(text, return_offsets_mapping=True)


def reference(tower, encoder, text):
    ids = torch.tensor([tokens_of(encoder, text)["input_ids"]])
    with torch.no_grad():
        return tower(ids, output_hidden_states=True).hidden_states[-3][0]


def test_features_are_the_hidden_states_before_the_last_two_layers(encoder, tower):
    features = encoder.encode("the cat sat on the mat").features
    assert features.dtype == torch.bfloat16
    assert features.shape == (encoder.count_tokens("the cat sat on the mat"), 32)
    assert torch.equal(features, reference(tower, encoder, "the cat sat on the mat"))


def test_cjk_characters_stand_alone_in_a_loaded_encoder(encoder):
    merged = len(tiny_qwen.tokenizer().encode("日本日本").ids)
    assert encoder.count_tokens("日本日本") > merged


def test_only_the_layers_that_are_needed_are_loaded(encoder):
    assert len(encoder.model.layers) == tiny_qwen.TEXT_CONFIG["num_hidden_layers"] - 2


def test_the_whole_published_model_gives_the_same(tmp_path):
    tower = tiny_qwen.save(tmp_path, whole=True)
    encoder = load_text_encoder(tmp_path)
    features = encoder.encode("the cat").features
    assert torch.equal(features, reference(tower, encoder, "the cat"))


def test_one_token_is_enough_and_none_is_refused(encoder):
    assert encoder.encode("q").features.shape[0] == 1
    with pytest.raises(ValueError, match="has no tokens"):
        encoder.encode("")


def test_structured_prompts_are_rendered_before_they_are_encoded(encoder):
    document = json.dumps({"global_layer": {"context": "the cat"}})
    assert torch.equal(
        encoder.encode(document).features, encoder.encode("context: the cat").features
    )


def test_special_token_is_the_mean_over_the_tokens_that_name_the_figure(encoder, tower):
    prompt = "the cat"
    text = "the catreference_layer:The first frame refers to <Figure 1>"
    result = encoder.encode(prompt, num_images=2)
    assert torch.equal(result.features, reference(tower, encoder, text))
    start = text.index("<Figure 1>")
    spans = tokens_of(encoder, text)["offset_mapping"]
    rows = [i for i, (a, b) in enumerate(spans) if a < start + 10 and b > start]
    assert 1 < len(rows) < len(spans)
    assert torch.equal(result.special_tokens[0], result.features[rows].mean(dim=0))
    assert (result.special_tokens[1] == 0).all()
    assert result.special_tokens[1].shape == (32,)


def test_figure_tokens_overlap_at_both_ends():
    features = torch.arange(8.0).view(4, 2)
    spans = [(0, 3), (3, 5), (5, 9), (9, 12)]
    assert torch.equal(figure_token(features, spans, (4, 6)), features[1:3].mean(dim=0))
    assert torch.equal(figure_token(features, spans, (3, 5)), features[1])
    assert torch.equal(figure_token(features, spans, None), torch.zeros(2))


def test_long_prompts_are_cut_with_a_warning(encoder, monkeypatch):
    monkeypatch.setattr(text_module, "MAX_TOKENS", 4)
    assert encoder.count_tokens("zebras quack") > 4
    with pytest.warns(UserWarning, match="cut off"):
        features = encoder.encode("zebras quack").features
    assert features.shape[0] == 4


@pytest.mark.parametrize("character", "日ᄀ가龥ｦ𠀀")
def test_cjk_characters_stand_alone(character):
    tokenizer = tiny_qwen.tokenizer()
    isolate_cjk(tokenizer)
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(f"a{character}{character} b")
    spans = [span for _, span in pieces]
    assert spans == [(0, 1), (1, 2), (2, 3), (3, 5)]


def test_isolation_splits_what_was_merged_and_nothing_else():
    plain, isolated = tiny_qwen.tokenizer(), tiny_qwen.tokenizer()
    isolate_cjk(isolated)
    assert len(isolated.encode("日本").ids) > len(plain.encode("日本").ids)
    assert isolated.encode("the cat <Figure 1>").ids == plain.encode("the cat <Figure 1>").ids
    twice = tiny_qwen.tokenizer()
    isolate_cjk(twice)
    isolate_cjk(twice)
    assert twice.encode("the 日本").ids == isolated.encode("the 日本").ids


def test_isolation_ends_exactly_at_the_ranges():
    tokenizer = tiny_qwen.tokenizer()
    isolate_cjk(tokenizer)
    for first, last in CJK_RANGES:
        for code, alone in ((first, True), (last, True)):
            text = f"x{chr(code)}{chr(code)}x"
            spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
            assert ((1, 2) in spans) == alone, hex(code)
    for code in (0x10FF, 0x1200, 0x2E7F, 0x303, 0xA4D0, 0xFF64, 0xFFDD):
        text = f"{chr(code)}{chr(code)}"
        split = tokenizer.pre_tokenizer.pre_tokenize_str(text)
        whole = tiny_qwen.tokenizer().pre_tokenizer.pre_tokenize_str(text)
        assert split == whole, hex(code)


def test_folders_that_are_no_qwen_are_refused(tmp_path, folder, tower):
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_text_encoder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"cannot be loaded as Qwen3\.5"):
        load_text_encoder(tmp_path)


def test_missing_weights_are_refused(tmp_path, folder, tower):
    from safetensors.torch import load_file, save_file

    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    del weights["layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing keys: layers\.1\.mlp\.up_proj\.weight"):
        load_text_encoder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"cannot be loaded as Qwen3\.5"):
        load_text_encoder(tmp_path)
