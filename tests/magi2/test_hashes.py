"""Hashes of outputs and of tensors."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from magi2.hashes import raw_sha256, tensor_sha256, tensors_sha256


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int64])
def test_raw_hash_is_that_of_the_bytes(shape, dtype):
    array = (np.random.default_rng(0).random(shape) * 100).astype(dtype)
    assert (
        raw_sha256(torch.from_numpy(np.asarray(array)))
        == hashlib.sha256(array.tobytes()).hexdigest()
    )


def test_row_major_order_counts_and_not_the_strides():
    tensor = torch.arange(6.0).view(2, 3)
    assert raw_sha256(tensor.t()) == raw_sha256(tensor.t().contiguous())
    assert raw_sha256(tensor.t()) != raw_sha256(tensor)


def test_raw_hash_of_long_tensors_covers_all_of_it(monkeypatch):
    monkeypatch.setattr("magi2.hashes._CHUNK_BYTES", 7)
    tensor = torch.arange(11, dtype=torch.int32)
    assert raw_sha256(tensor) == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def test_tensor_hash_tells_types_and_shapes_apart():
    tensors = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(8, dtype=torch.bfloat16),
        torch.tensor([0.0, 0.0, 0.0, -0.0]),
    ]
    assert len({tensor_sha256(tensor) for tensor in tensors}) == len(tensors)


def test_hash_of_several_tensors_goes_by_name():
    one, two = torch.zeros(1), torch.ones(1)
    assert tensors_sha256({"a": one, "b": two}) == tensors_sha256({"b": two, "a": one})
    assert tensors_sha256({"a": one, "b": two}) != tensors_sha256({"a": two, "b": one})
    assert tensors_sha256({"a": one}) != tensors_sha256({"a": one, "b": two})
