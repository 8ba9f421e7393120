"""The text encoder: the text tower of Qwen3.5, through transformers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from magi2.encoders.prompt import add_figure_sentence, figure_span, normalise_prompt
from magi2.encoders.text_features import TextFeatures
from magi2.encoders.tokenizer import isolate_cjk
from magi2.extras import require

__all__ = ["MAX_TOKENS", "TextEncoder", "TextFeatures", "load_text_encoder"]

MAX_TOKENS = 7000
# Decoder layers at the end that the features do not pass through.
_LAYERS_LEFT_OUT = 2
_SHOWN = 4


class TextEncoder:
    """Turns prompts into features.

    Args:
        model: Decoder layers up to the features, and nothing after them: `last_hidden_state` is
            what is wanted.
        tokenizer: A fast tokenizer of transformers, CJK characters isolated.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @property
    def num_channels(self) -> int:
        """Channels of the features."""
        return int(self.model.config.hidden_size)

    def count_tokens(self, prompt: str, num_images: int = 0) -> int:
        """Tokens of a prompt as `encode` sees it, before anything is cut off."""
        return len(self._tokenize(_final_text(prompt, num_images))[0])

    def encode(self, prompt: str, num_images: int = 0) -> TextFeatures:
        """Encode a prompt as the user wrote it: it is normalised here.

        Args:
            prompt: Plain or structured.
            num_images: Reference images. With any, the sentence that names figure 1 is added.

        Returns:
            On the model's device, in its dtype: one row of features for each token, and a special
            token for each image.

        Raises:
            ValueError: If the prompt has no tokens, num_images is negative, or as
                `normalise_prompt`.

        Tokens after the first 7000 are cut off, as the reference does, with a warning.
        """
        text = _final_text(prompt, num_images)
        tokens, spans = self._tokenize(text)
        if not tokens:
            raise ValueError(f"The prompt {prompt[:80]!r} has no tokens: expected some text.")
        if len(tokens) > MAX_TOKENS:
            warnings.warn(
                f"The prompt has {len(tokens)} tokens: all after the first {MAX_TOKENS} are cut "
                "off.",
                stacklevel=2,
            )
            tokens, spans = tokens[:MAX_TOKENS], spans[:MAX_TOKENS]
        with torch.no_grad():
            output = self.model(
                input_ids=torch.tensor([tokens], device=self.model.device), use_cache=False
            )
        features = output.last_hidden_state[0]
        figures = range(1, num_images + 1)
        return TextFeatures(
            features=features,
            special_tokens=tuple(
                figure_token(features, spans, figure_span(text, figure)) for figure in figures
            ),
        )

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Numbers of the tokens, and which characters each one covers."""
        batch = self.tokenizer(text, return_offsets_mapping=True, return_attention_mask=False)
        return list(batch["input_ids"]), [tuple(span) for span in batch["offset_mapping"]]


def figure_token(
    features: torch.Tensor, spans: Sequence[tuple[int, int]], figure: tuple[int, int] | None
) -> torch.Tensor:
    """Mean feature of the tokens that overlap a figure's name.

    Args:
        features: (tokens, channels).
        spans: First character of each token and the one after its last.
        figure: The same of the name; None if there is none.

    Returns:
        (channels,) in the features' dtype; zeros if no token overlaps.
    """
    if figure is not None:
        start, stop = figure
        rows = [index for index, (a, b) in enumerate(spans) if a < stop and b > start]
        if rows:
            return features[rows].mean(dim=0)
    return features.new_zeros(features.shape[1])


def load_text_encoder(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> TextEncoder:
    """Load the layers of a Qwen3.5 checkpoint that the features pass through.

    The last two layers, the vision tower and the language head are neither read nor kept.

    Args:
        folder: As published: `config.json`, weights in safetensors, the tokenizer's files.
        device: Where the model goes.
        dtype: bfloat16 as released.

    Raises:
        ValueError: If the folder lacks a file, is that of another model, or its weights do not
            fit.
        ModuleNotFoundError: If transformers is not installed.
        RuntimeError: If it is too old.
    """
    folder = Path(folder)
    transformers = require("transformers", "encoding prompts")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: expected a folder with Qwen3.5-27B.")
    if not hasattr(transformers, "Qwen3_5TextModel"):
        raise RuntimeError(
            f"transformers {transformers.__version__} does not know Qwen3.5: pip install -U "
            "'transformers>=5.5'."
        )
    try:
        config = transformers.Qwen3_5TextConfig.from_pretrained(folder, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # A damaged folder makes the library raise errors of any class.
        raise ValueError(f"{folder} cannot be loaded as Qwen3.5: {error}") from error
    _shorten(config, folder)
    if not tokenizer.is_fast:
        raise ValueError(
            f"{folder} has a tokenizer without tokenizer.json: expected a fast tokenizer, since "
            "figures are found by the characters of their tokens."
        )
    isolate_cjk(tokenizer.backend_tokenizer)
    model = _load_model(transformers, folder, config, dtype)
    # The features are taken before the norm.
    model.norm = torch.nn.Identity()
    return TextEncoder(model.to(device).requires_grad_(False).eval(), tokenizer)


def _shorten(config: Any, folder: Path) -> None:
    """Leave the last layers out of a configuration."""
    num_layers = config.num_hidden_layers - _LAYERS_LEFT_OUT
    if num_layers < 1:
        raise ValueError(
            f"{folder} has {config.num_hidden_layers} layers: expected more than "
            f"{_LAYERS_LEFT_OUT}, since the features are taken before the last {_LAYERS_LEFT_OUT}."
        )
    config.layer_types = config.layer_types[:num_layers]
    config.num_hidden_layers = num_layers


def _load_model(transformers: Any, folder: Path, config: Any, dtype: torch.dtype) -> Any:
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    # Without its report of the weights left over: they are those of the parts left out.
    logging.set_verbosity_error()
    try:
        model, info = transformers.Qwen3_5TextModel.from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # As above.
        raise ValueError(f"{folder} cannot be loaded as Qwen3.5: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    faults = [
        f"{kind.replace('_', ' ')}: {', '.join(found[:_SHOWN])}"
        for kind in ("missing_keys", "mismatched_keys", "error_msgs")
        if (found := sorted(map(str, info.get(kind) or ())))
    ]
    if faults:
        raise ValueError(f"{folder} does not fit the text tower of Qwen3.5: {'; '.join(faults)}.")
    return model


def _final_text(prompt: str, num_images: int) -> str:
    if num_images < 0:
        raise ValueError(f"num_images={num_images}: expected 0 or more.")
    text = normalise_prompt(add_figure_sentence(prompt) if num_images else prompt)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Half a pair of UTF-16, or a byte of the command line that was no UTF-8.
        raise ValueError(
            f"The prompt holds {text[error.start]!r} at character {error.start}, which is no "
            "character: expected Unicode text. Correct it, or give it as a file saved as UTF-8."
        ) from error
    return text
