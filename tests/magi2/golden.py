"""Golden files: where they lie, what they hold, how close is close enough.

The folder comes from MAGI2_GOLDEN_DIR; its README says how the numbers were made. A file's kind is
its name without number and extension; configurations, layer numbers, sizes and tolerances come
from its metadata, so another set of files of these kinds runs unchanged.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from functools import cached_property
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from magi2 import presets
from magi2.config import Magi2Config
from magi2.modules.modality import ModalityOrder
from magi2.modules.request import RequestPlan
from magi2.modules.sequence import SequenceDispatcher

FOLDER = Path(os.environ.get("MAGI2_GOLDEN_DIR", Path(__file__).parents[1] / "golden"))

# Laid out as released checkpoints, whatever their names.
CHECKPOINTS = sorted(path.parent for path in FOLDER.glob("*/config.json"))

# Beyond each file's own allclose tolerance: root mean square of the difference over that of the
# expected tensor. Two right float32 implementations differ by summation order only.
MODULE_RELATIVE_RMS = 1e-5
MODEL_RELATIVE_RMS = 5e-6


class GoldenFile:
    """One golden file; tensors by key, metadata parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kind = re.sub(r"^\d+_", "", path.stem)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        with safe_open(self.path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    @cached_property
    def metadata(self) -> dict[str, str]:
        with safe_open(self.path, "pt") as file:
            return dict(file.metadata())

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.tensors[key]

    @cached_property
    def config(self) -> dict:
        return json.loads(self.metadata["config"])

    @cached_property
    def tolerance(self) -> dict:
        return json.loads(self.metadata["tolerance"])

    @cached_property
    def layer(self) -> int:
        """Number of the layer that the weights' names carry."""
        found = {int(m[1]) for k in self.tensors if (m := re.match(r"block\.layers\.(\d+)\.", k))}
        assert len(found) == 1, f"{self.path} holds weights of layers {found}"
        return found.pop()

    def weights(self, part: str = "") -> dict[str, torch.Tensor]:
        """Weights of the file's layer under `part`, with that prefix cut off."""
        prefix = f"block.layers.{self.layer}." + (f"{part}." if part else "")
        return {
            key.removeprefix(prefix): value
            for key, value in self.tensors.items()
            if key.startswith(prefix)
        }

    def check(
        self, precision: str, name: str, actual: torch.Tensor, relative_rms: float | None = None
    ) -> None:
        """Compare with the expected tensor under the file's tolerance for this precision."""
        check_close(f"{self.path.name}:{name}", actual, self[name], self.tolerance[precision])
        if relative_rms is not None:
            error = rms_error(actual, self[name])
            assert error <= relative_rms, f"{name}: relative RMS {error:.2e} > {relative_rms:.0e}"


def golden_files(kind: str) -> pytest.MarkDecorator:
    """Parametrize a test over the files of a kind, a regular expression."""
    files = [GoldenFile(path) for path in sorted(FOLDER.glob("*.safetensors"))]
    chosen = [file for file in files if re.fullmatch(kind, file.kind)]
    return pytest.mark.parametrize("golden", chosen, ids=[file.path.stem for file in chosen])


def rms_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = actual.double() - expected.double()
    return float((difference.square().mean() / expected.double().square().mean()).sqrt())


def check_close(
    what: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: dict | str
) -> None:
    """The metadata's tolerance: "exact", or any of rtol/atol (allclose), relative_rms."""
    assert actual.shape == expected.shape, what
    if tolerance == "exact":
        assert torch.equal(actual, expected), what
        return
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} != {expected.dtype}"
    if "relative_rms" in tolerance:
        error = rms_error(actual, expected)
        assert error <= tolerance["relative_rms"], f"{what}: relative RMS {error:.2e}"
    rtol, atol = tolerance.get("rtol", 0.0), tolerance.get("atol", 0.0)
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}"
    )


def arch(golden: GoldenFile, **changes: object) -> Magi2Config:
    """The model configuration in the file's metadata."""
    return dataclasses.replace(Magi2Config.from_dict(golden.config), **changes)


def small_arch(hidden_size: int, num_streams: int) -> Magi2Config:
    """A float32 configuration for a module of which the file only gives these sizes."""
    return dataclasses.replace(
        presets.tiny(torch.float32),
        hidden_size=hidden_size,
        head_dim=8,
        num_kv_heads=1,
        intermediate_factor=192,
        num_streams=num_streams,
        moe=dataclasses.replace(presets.tiny().moe, num_heads=1),
    )


def plan_of(golden: GoldenFile, config: Magi2Config) -> RequestPlan:
    """The request plan of a file with modality ids; rotary table and packing if it has them."""
    modality = golden["in.modality"]
    no_angles = torch.zeros(len(modality), 6 * config.num_rotary_bands)
    ends = golden.tensors.get("in.cu_seqlens", torch.tensor([0, len(modality)]))
    return RequestPlan(
        order=ModalityOrder.from_modality(modality),
        rotary=golden.tensors.get("in.rope", no_angles),
        cu_seqlens=tuple(ends.tolist()),
        branches=SequenceDispatcher(split_sizes=(len(modality),)),
        sequence=SequenceDispatcher(split_sizes=(len(modality),)),
        experts=SequenceDispatcher(split_sizes=(len(modality),)),
    )
