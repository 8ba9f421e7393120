"""Everything that a run's bits depend on, as names and values."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping

import torch

from magi2.conditioning import Conditioning
from magi2.generate_request import GenerateRequest
from magi2.geometry import Geometry
from magi2.hashes import tensors_sha256
from magi2.inputs import Inputs
from magi2.launch import Ranks
from magi2.release import Release
from magi2.settings import SamplingSettings

# Options that move the same bits in other ways.
_SAME_BITS = ("qkv_head_shards", "output_head_shards", "qkv_to_peers")
# Those of the model and of the solver.
_PACKAGES = ("ulysses-comm", "diffusers")


def common_facts(
    request: GenerateRequest,
    release: Release,
    settings: SamplingSettings,
    geometry: Geometry,
    seed: int,
) -> dict[str, str]:
    """What has to be equal on all ranks of a run.

    The layouts that give the same bits are no part of it.
    """
    facts: dict[str, object] = {
        "checkpoint": release.sha256(),
        "seed": seed,
        "pad_to_multiple_of": request.pad_to_multiple_of,
        "compile": request.compile,
        "deterministic": request.deterministic,
        "torch": torch.__version__,
        **{package: _version(package) for package in _PACKAGES},
    }
    for name, value in dataclasses.asdict(request.options).items():
        if name not in _SAME_BITS:
            facts[name] = value
    facts.update(dataclasses.asdict(settings))
    facts.update(dataclasses.asdict(geometry))
    return {name: str(value) for name, value in facts.items()}


def fingerprint_of(common: Mapping[str, str], inputs: Inputs, ranks: Ranks) -> dict[str, str]:
    """What has to be equal for a run to go on with the same bits, but for its conditioning.

    What started the ranks is no part of it.

    Args:
        common: What `common_facts` returned.
        inputs: Of the first rank.
        ranks: All of them.
    """
    topology = ranks.topology
    facts: dict[str, object] = {
        **common,
        "texts": inputs.texts_sha256(),
        "images": len(inputs.images),
        "world_size": ranks.world_size,
        "ulysses_degree": topology.sequence_size,
        "cfg_parallel_size": topology.cfg_size,
        "expert_parallel_size": topology.expert_size,
        "device": _device_name(ranks.device),
    }
    if ranks.device.type == "cpu":
        # How many threads share a sum decides how it is rounded.
        facts["threads"] = torch.get_num_threads()
    return {name: str(value) for name, value in facts.items()}


def conditioning_sha256(conditioning: Conditioning) -> str:
    """A hash of text features, images and how they are used."""
    tensors = {"prompt": conditioning.prompt, "negative": conditioning.negative}
    for number, image in enumerate(conditioning.images):
        tensors[f"image {number}"] = image.latent
        tensors[f"special token {number}"] = image.special_token
    return tensors_sha256(tensors)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from its source, perhaps
        return "unknown"


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))
