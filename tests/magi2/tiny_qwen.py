"""A small Qwen3.5 with random weights and a byte-level tokenizer, saved as a published folder."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXT_CONFIG = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # The third layer is the full-attention one, so that both kinds come before the features.
    "layer_types": ["linear_attention"] * 2 + ["full_attention"] + ["linear_attention"] * 2,
    "max_position_embeddings": 8192,
}


def tokenizer():
    """Byte-level BPE, trained on a text with merges across CJK characters."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=310, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator(
        ["the cat sat on the mat", "日本日本日本日本", "the <Figure 1>"] * 4, trainer
    )
    return model


def save(folder, whole: bool = False):
    """Write the folder; `whole` with vision tower and language head, as the release is.

    Returns the text tower.
    """
    import transformers

    torch.manual_seed(0)
    text = transformers.Qwen3_5TextConfig(**TEXT_CONFIG)
    if whole:
        vision = {
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
            "out_hidden_size": 32, "num_position_embeddings": 16,
        }  # fmt: skip
        config = transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=vision)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    else:
        model = transformers.Qwen3_5TextModel(text)
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer()).save_pretrained(folder)
    # Read back: the cast above also rounded the rotary frequencies, which loading does not.
    model = type(model).from_pretrained(folder, dtype=torch.bfloat16).eval()
    return model.model.language_model if whole else model
