"""Single operations against the golden files."""

from __future__ import annotations

import pytest
import torch

from magi2.modules.embeddings import time_embedding
from magi2.modules.linear import GroupedNorm
from magi2.modules.modality import ModalityOrder
from magi2.ops.attention import apply_sinks_torch, packed_attention_torch
from magi2.ops.rotary import apply_rotary_torch, rotary_bands, rotary_table
from magi2.ops.swiglu import swiglu7_torch
from tests.magi2.golden import FOLDER, MODULE_RELATIVE_RMS, GoldenFile, check_close, golden_files

# Judged with packing and sampling, which are not in the transformer.
ELSEWHERE = ("schedules", "trajectory", "proxy")
HERE = (
    "dispatcher",
    "rmsnorm",
    "rope",
    "swiglu7",
    "mhc",
    "attention_module",
    "attention_packed",
    "moe_core",
    "moe_layer",
    "layer",
    "model",
)


def test_every_golden_file_has_a_test_of_its_kind():
    kinds = [GoldenFile(path).kind for path in FOLDER.glob("*.safetensors")]
    assert kinds, f"no golden files in {FOLDER}"
    unknown = [k for k in kinds if not k.startswith(HERE + ELSEWHERE)]
    assert not unknown


@golden_files("dispatcher.*")
def test_tokens_are_grouped_in_the_stable_order(golden):
    for case in golden.config["cases"]:
        get = lambda key: golden[f"{case}.{key}"]  # noqa: E731, B023
        order = ModalityOrder.from_modality(get("in.modality"))
        assert torch.equal(order.permutation, get("out.permute_mapping"))
        assert torch.equal(order.inverse, get("out.inv_permute_mapping"))
        assert order.group_sizes == tuple(get("out.group_size").tolist())
        assert torch.equal(order.group(get("in.x")), get("out.x_permuted"))
        assert torch.equal(order.ungroup(get("out.x_permuted")), get("in.x"))
        ends = torch.tensor(order.group_sizes).cumsum(0)
        assert torch.equal(ends, get("out.cu_group_sizes")[1:])


@golden_files("rmsnorm.*")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("groups", ["single", "multi"])
@pytest.mark.parametrize("heads", ["", "_heads"])
def test_norm_matches_the_reference(golden, precision, groups, heads):
    kind = "q_norm" if heads else "pre_norm"
    dim = golden.config["head_dim" if heads else "dim"]
    num_groups = golden.config["num_modality"] if groups == "multi" else 1
    (weight,) = (
        value
        for key, value in golden.tensors.items()
        if key.endswith(f"{kind}.weight") and value.numel() == num_groups * dim
    )
    norm = GroupedNorm(dim, num_groups, None, torch.float32 if heads else None)
    norm.load_state_dict({"weight": weight})
    order = ModalityOrder.from_modality(golden["in.modality"])
    x = golden[f"in.x{heads}"].to(torch.float32 if precision == "fp32" else torch.bfloat16)
    with torch.no_grad():
        y = order.ungroup(norm(order.group(x), order.group_sizes))
    rms = MODULE_RELATIVE_RMS if precision == "fp32" else None
    golden.check(precision, f"out.{precision}.{groups}{heads}", y, rms)


@golden_files("rope.*")
def test_rotary_matches_the_reference(golden):
    bands = golden["pre_adapter.rope.bands"]
    check_close("bands", rotary_bands(len(bands)), bands, {"rtol": 1e-6, "atol": 0})
    golden.check("out.rope", "out.rope", rotary_table(golden["in.coords"], bands))
    rotated = apply_rotary_torch(golden["in.x"], golden["out.rope"])
    golden.check("out.x_rotated", "out.x_rotated", rotated, MODULE_RELATIVE_RMS)


@golden_files("rope.*")
def test_time_embedding_matches_the_reference(golden):
    names = [key for key in golden.tensors if key.startswith("out.time_embedding_")]
    for name in names:
        y = time_embedding(golden["in.time"], golden[name].shape[1])
        golden.check(name, name, y)


@golden_files("swiglu7.*")
def test_activation_matches_the_reference(golden):
    golden.check("fp32", "out.fp32", swiglu7_torch(golden["in.x"]), MODULE_RELATIVE_RMS)
    rounded = swiglu7_torch(golden["in.x"].bfloat16())
    golden.check("bf16", "out.bf16_in_bf16_out", rounded)


@golden_files("attention_packed.*")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_packed_attention_with_sinks_matches_the_reference(golden, precision):
    (sinks,) = (value for key, value in golden.tensors.items() if key.endswith(".sinks"))
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    q, k, v = (golden[f"in.{name}"].to(dtype) for name in "qkv")
    rms = MODULE_RELATIVE_RMS if precision == "fp32" else None
    for pack in golden.config["packs"]:
        for cap, softcap in golden.config["softcaps"].items():
            ends = golden[f"in.cu_seqlens.{pack}"].tolist()
            out, lse = packed_attention_torch(q, k, v, ends, softcap)
            out, lse_with_sinks = apply_sinks_torch(out, lse, sinks)
            golden.check(precision, f"out.{precision}.{pack}.{cap}", out, rms)
            if precision == "fp32":
                golden.check("fp32", f"out.fp32.lse_no_sink.{pack}.{cap}", lse, rms)
                golden.check("fp32", f"out.fp32.lse_with_sink.{pack}.{cap}", lse_with_sinks, rms)
