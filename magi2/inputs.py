"""Text and images of a request: read and checked before any weights, encoded on one rank."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from magi2.conditioning import Conditioning, ReferenceImage
from magi2.encoders.features_file import load_text_features, save_text_features
from magi2.encoders.negative_prompt import read_negative_prompt
from magi2.encoders.text import MAX_TOKENS, TextEncoder, load_text_encoder
from magi2.encoders.text_features import TextFeatures
from magi2.encoders.tokenizer import isolate_cjk
from magi2.extras import require
from magi2.generate_request import GenerateRequest
from magi2.geometry import Geometry
from magi2.release import PARTS, Release
from magi2.settings import SamplingSettings

_PARTS = {part.key: part for part in PARTS}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a clip is made from, read and checked, not yet encoded.

    Args:
        prompt: Text as it was given; None where features take its place.
        negative: The same of the unconditional branch; None for no text.
        features: Of prompt and negative prompt, where they are given.
        images: (3, height, width) float32 each, in [-1, 1].
    """

    prompt: str | None
    negative: str | None
    features: tuple[TextFeatures, TextFeatures | None] | None
    images: tuple[torch.Tensor, ...]

    def texts_sha256(self) -> str:
        """A hash of the texts to encode, by which features that were kept are known again."""
        texts = json.dumps([self.prompt, self.negative])
        return hashlib.sha256(texts.encode()).hexdigest()


def read_text_file(path: Path, what: str) -> str:
    """A text file's content, without white space at its ends.

    Raises:
        ValueError: If it cannot be read, is not UTF-8, or holds no text.
    """
    try:
        # Some editors mark UTF-8 at its start: the mark is no part of the text.
        text = path.read_bytes().decode("utf-8-sig").strip()
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} {path} is not UTF-8 text, from byte {error.start} on: save it as UTF-8."
        ) from error
    if not text:
        raise ValueError(f"{what} {path} is empty: expected text.")
    return text


def read_inputs(
    request: GenerateRequest, release: Release, settings: SamplingSettings, geometry: Geometry
) -> Inputs:
    """Read and check everything that the request names; no weights are read.

    Raises:
        ValueError: If something cannot be read, is missing, or is more than the model takes.
    """
    if request.prompt is None:
        features = _read_features(request, release, settings)
        prompt = negative = None
    else:
        prompt, negative = _read_texts(request, release, settings)
        features = None
    return Inputs(
        prompt=prompt,
        negative=negative,
        features=features,
        images=_read_images(request, release, geometry),
    )


def encode_inputs(
    inputs: Inputs,
    release: Release,
    settings: SamplingSettings,
    device: torch.device,
    kept_features: Path,
    *,
    use_kept: bool,
) -> Conditioning:
    """Run the text encoder and the image VAE where there is something for them to do.

    Args:
        inputs: What `read_inputs` returned.
        release: Where the encoders are.
        settings: Of the request.
        device: Where they run; each is gone before the next is loaded.
        kept_features: File for the features of texts that are encoded.
        use_kept: Whether it holds those of these texts already, if it is there.

    Returns:
        Features as they are stored and image latents in float32, on the CPU.
    """
    texts = inputs.features or (_load_kept(kept_features) if use_kept else None)
    if texts is None:
        texts = _encode_texts(inputs, release, device)
        save_text_features(kept_features, *texts)
    prompt, negative = texts
    latents = _encode_images(inputs, release, device)
    if negative is None or not settings.use_negative_prompt:
        negative = TextFeatures(features=prompt.features[:0])
    return Conditioning(
        prompt=prompt.features.cpu(),
        negative=negative.features.cpu(),
        images=tuple(
            ReferenceImage(latent=latent, special_token=token.cpu())
            for latent, token in zip(latents, prompt.special_tokens, strict=True)
        ),
        use_images_without_prompt=settings.use_images_without_prompt,
    )


def _load_kept(path: Path) -> tuple[TextFeatures, TextFeatures | None] | None:
    """Features of an earlier run; None if the file is gone or damaged, as they can be made anew."""
    try:
        return load_text_features(path)
    except ValueError:
        return None


def _read_texts(
    request: GenerateRequest, release: Release, settings: SamplingSettings
) -> tuple[str, str | None]:
    assert request.prompt is not None
    if not request.prompt.strip():
        raise ValueError("the prompt is empty: expected text, or features with --text-features.")
    encoder = _require(release, "text_encoder", "a prompt has to be encoded")
    negative = None
    if settings.use_negative_prompt:
        path = _require(
            release,
            "negative_prompt_file",
            "the released settings use a negative prompt (--no-negative-prompt does without)",
        )
        negative = read_negative_prompt(path, allow_other=request.allow_other_negative_prompt)
    # The reference would cut a text that is too long, without a word.
    counter = _load_counter(encoder)
    check_num_tokens("prompt", counter.count_tokens(request.prompt, len(request.images)))
    if negative is not None:
        check_num_tokens("negative prompt", counter.count_tokens(negative))
    return request.prompt, negative


def _load_counter(folder: Path) -> TextEncoder:
    """An encoder that only counts tokens: its weights are not read."""
    transformers = require("transformers", "encoding prompts")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # A damaged folder makes the library raise errors of any class.
        raise ValueError(
            f"{folder} has no tokenizer that can be loaded: {error or type(error).__name__}"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"{folder} has a tokenizer without tokenizer.json: expected the files of Qwen3.5-27B."
        )
    isolate_cjk(tokenizer.backend_tokenizer)
    return TextEncoder(None, tokenizer)


def check_num_tokens(name: str, count: int) -> None:
    """Refuse a text that the model was not made for.

    Raises:
        ValueError: If it has none, or more than 7000 tokens.
    """
    if not count:
        raise ValueError(f"the {name} has no tokens: expected text in some part that is used.")
    if count > MAX_TOKENS:
        raise ValueError(
            f"the {name} has {count} tokens: expected at most {MAX_TOKENS}. Shorten it."
        )


def _read_features(
    request: GenerateRequest, release: Release, settings: SamplingSettings
) -> tuple[TextFeatures, TextFeatures | None]:
    path = _require(release, "text_features", "without --prompt, text features are needed")
    prompt, negative = load_text_features(path)
    for name, features in (("prompt", prompt), ("negative prompt", negative)):
        if features is None:
            continue
        if features.num_tokens:  # A negative prompt may have none.
            check_num_tokens(f"{name} of {path}", features.num_tokens)
        if features.num_channels != release.config.text_channels:
            raise ValueError(
                f"{path} has {features.num_channels} channels in the features of the {name}: "
                f"expected {release.config.text_channels}, as this checkpoint takes them."
            )
    if settings.use_negative_prompt and negative is None:
        raise ValueError(
            f"{path} has no features of a negative prompt, and the settings use one: add them, or "
            "do without a negative prompt with --no-negative-prompt."
        )
    if len(prompt.special_tokens) != len(request.images):
        raise ValueError(
            f"{path} has special tokens for {len(prompt.special_tokens)} reference image(s), and "
            f"{len(request.images)} were given: expected features that were encoded for them."
        )
    return prompt, negative


def _read_images(
    request: GenerateRequest, release: Release, geometry: Geometry
) -> tuple[torch.Tensor, ...]:
    if not request.images:
        return ()
    from magi2.encoders.image import load_reference_image

    _require(release, "video_vae", "reference images have to be encoded")
    images = tuple(
        load_reference_image(path, geometry.height, geometry.width) for path in request.images
    )
    sizes = {tuple(image.shape[1:]) for image in images}
    if len(sizes) > 1:
        raise ValueError(
            f"the reference images come to {sorted(sizes)} (height, width) pixels at this clip's "
            "size: expected one size. Give them one aspect ratio."
        )
    return images


def _encode_texts(
    inputs: Inputs, release: Release, device: torch.device
) -> tuple[TextFeatures, TextFeatures | None]:
    assert inputs.prompt is not None
    encoder = load_text_encoder(release.parts["text_encoder"], device)
    prompt = encoder.encode(inputs.prompt, num_images=len(inputs.images))
    negative = None if inputs.negative is None else encoder.encode(inputs.negative)
    if prompt.num_channels != release.config.text_channels:
        raise ValueError(
            f"the text encoder {release.parts['text_encoder']} gives {prompt.num_channels} "
            f"channels: expected {release.config.text_channels}, as this checkpoint takes them."
        )
    return prompt, negative


def _encode_images(
    inputs: Inputs, release: Release, device: torch.device
) -> tuple[torch.Tensor, ...]:
    if not inputs.images:
        return ()
    from magi2.decoders.wan import load_video_vae
    from magi2.encoders.image import encode_reference_image

    vae = load_video_vae(release.parts["video_vae"], device)
    if vae.config.z_dim != release.config.video_channels:
        raise ValueError(
            f"the video VAE {release.parts['video_vae']} makes latents of {vae.config.z_dim} "
            f"channels: expected {release.config.video_channels}, as this checkpoint takes them."
        )
    return tuple(encode_reference_image(vae, image).cpu() for image in inputs.images)


def _require(release: Release, key: str, why: str) -> Path:
    if key not in release.parts:
        raise ValueError(f"{why}, but {release.explain(_PARTS[key])}.")
    return release.parts[key]
