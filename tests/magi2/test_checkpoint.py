from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from magi2 import presets
from magi2.checkpoint import load_checkpoint, save_checkpoint
from magi2.checkpoint.index import INDEX_NAME, open_checkpoint
from magi2.checkpoint.shard_file import ShardFile
from magi2.config import Magi2Config
from magi2.initialise import random_state_dict
from magi2.transformer import Magi2Transformer
from tests.magi2.golden import CHECKPOINTS
from tests.magi2.live_memory import resident_bytes

CONFIG = presets.tiny_uneven()
NORM = "block.layers.1.mlp.pre_norm.weight"


@pytest.fixture(scope="module")
def weights():
    return random_state_dict(CONFIG)


@pytest.fixture(scope="module")
def saved(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_checkpoint(weights, CONFIG, folder, max_shard_bytes=1 << 20)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the checkpoint that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def new_model():
    return Magi2Transformer(CONFIG, device="meta")


def test_round_trip_is_bitwise_identity(saved, weights):
    model = new_model()
    load_checkpoint(model, saved)
    assert Magi2Config.from_file(saved / "config.json") == CONFIG
    loaded = model.state_dict()
    assert loaded.keys() == weights.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == weights[name].dtype
        assert torch.equal(tensor, weights[name]), name


def test_shards_are_read_and_written_as_safetensors_does(saved, weights):
    index = json.loads((saved / INDEX_NAME).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    size = sum(t.numel() * t.element_size() for t in weights.values())
    assert index["metadata"]["total_size"] == size
    for file in files:
        assert (saved / file).stat().st_size < (1 << 20) + 20_000
        for name, tensor in load_file(saved / file).items():
            assert index["weight_map"][name] == file
            assert torch.equal(tensor, weights[name])
            assert torch.equal(ShardFile(saved / file).read(name), tensor)


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: folder.name)
def test_a_checkpoint_made_elsewhere_round_trips(folder, tmp_path):
    config = Magi2Config.from_file(folder / "config.json")
    model = Magi2Transformer(config, device="meta")
    load_checkpoint(model, folder)
    save_checkpoint(model.state_dict(), config, tmp_path / "again")
    mine, theirs = open_checkpoint(tmp_path / "again"), open_checkpoint(folder)
    assert mine.file_of.keys() == theirs.file_of.keys()
    for name in theirs.file_of:
        one, other = (c.file_of[name].read(name) for c in (mine, theirs))
        assert one.dtype == other.dtype
        assert torch.equal(one, other), name


def test_unaligned_tensors_are_read(tmp_path):
    # The package sorts by alignment; older writers did not.
    bytes_, floats = torch.arange(3, dtype=torch.uint8), torch.randn(4, 5)
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "b": {"dtype": "F32", "shape": [4, 5], "data_offsets": [3, 83]},
        }
    ).encode()
    path = tmp_path / "odd.safetensors"
    data = bytes(bytes_.tolist()) + floats.numpy().tobytes()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    file = ShardFile(path)
    assert torch.equal(file.read("a"), bytes_)
    assert torch.equal(file.read("b"), floats)
    assert torch.equal(file.read("b", range(1, 3)), floats[1:3])


def test_reading_rows_touches_only_their_pages(tmp_path):
    path = tmp_path / "large.safetensors"
    tensor = torch.arange(1 << 23, dtype=torch.float32).view(64, -1)
    save_file({"x": tensor}, path)
    file = ShardFile(path)
    rows = file.read("x", range(16, 24)).clone()
    assert torch.equal(rows, tensor[16:24])
    eighth = tensor.nbytes // 8
    assert eighth <= resident_bytes(path) < 2 * eighth


def test_values_are_cast_to_the_model(saved, weights):
    model = Magi2Transformer(presets.tiny_uneven(torch.float32), device="meta")
    load_checkpoint(model, saved)
    name = "block.layers.1.mlp.moe_mlp.W_up"
    assert model.get_parameter(name).dtype == torch.float32
    assert torch.equal(model.get_parameter(name), weights[name].float())


def test_loads_into_a_model_that_has_memory(saved, weights):
    model = Magi2Transformer(CONFIG)
    pointer = model.get_parameter(NORM).data_ptr()
    load_checkpoint(model, saved)
    assert model.get_parameter(NORM).data_ptr() == pointer
    assert torch.equal(model.get_parameter(NORM), weights[NORM])
    with pytest.raises(ValueError, match="not on 'meta'"):
        load_checkpoint(model, saved, device="cpu")


def rewrite(folder: Path, change) -> None:
    """Change one shard's tensors, and the index with them."""
    index = json.loads((folder / INDEX_NAME).read_text())
    file = index["weight_map"][NORM]
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)
    kept = {name: f for name, f in index["weight_map"].items() if f != file}
    index["weight_map"] = kept | dict.fromkeys(tensors, file)
    del index["metadata"]
    (folder / INDEX_NAME).write_text(json.dumps(index))


def refused(folder: Path) -> str:
    """The message of the refusal; the model must not have been touched."""
    model = new_model()
    with pytest.raises(ValueError, match="refused") as caught:
        load_checkpoint(model, folder)
    assert all(parameter.is_meta for parameter in model.parameters())
    return str(caught.value)


def test_refuses_missing_and_unexpected_tensors_by_name(copy):
    def change(tensors):
        tensors["block.layers.1.mlp.pre_norm.offset"] = tensors.pop(NORM)

    rewrite(copy, change)
    message = refused(copy)
    assert f"missing: {NORM}" in message
    assert "unexpected: block.layers.1.mlp.pre_norm.offset" in message


def test_refuses_another_shape_or_type_by_name(copy):
    def change(tensors):
        tensors[NORM] = tensors[NORM][:-1].contiguous()
        tensors["block.layers.1.mlp.moe_mlp.gate"] = torch.zeros(24, 32, dtype=torch.int32)

    rewrite(copy, change)
    message = refused(copy)
    assert f"{NORM} has shape [287], the model expects [288]" in message
    assert "block.layers.1.mlp.moe_mlp.gate is torch.int32" in message


def test_refuses_another_number_of_experts(tmp_path, weights):
    name = "block.layers.1.mlp.moe_mlp.W_up"
    damaged = dict(weights) | {name: weights[name][:-1]}
    save_checkpoint(damaged, CONFIG, tmp_path / "short")
    assert f"{name} has shape [23, 32, 32]" in refused(tmp_path / "short")


def test_refuses_nan_by_name(copy):
    names = [NORM]

    def change(tensors):
        names.append(next(name for name, t in tensors.items() if t.dtype == torch.bfloat16))
        for name in names:
            tensors[name].view(-1)[7] = float("nan")

    rewrite(copy, change)
    with pytest.raises(ValueError, match="NaN in: " + ", ".join(sorted(names))):
        load_checkpoint(new_model(), copy)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_refuses_a_truncated_shard(copy, kept):
    path = sorted(copy.glob("*.safetensors"))[1]
    data = path.read_bytes()
    path.write_bytes(data[:kept])
    message = refused(copy)
    assert str(path) in message
    assert "truncated" in message


def test_lists_all_faulty_files_at_once(copy):
    first, second, *_ = sorted(copy.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes() + b"\0")
    message = refused(copy)
    assert f"{first} cannot be read: No such file" in message
    assert f"{second} is too long" in message


def test_refuses_a_damaged_header(copy):
    path = sorted(copy.glob("*.safetensors"))[0]
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"x" + data[9:])
    assert f"{path} has no safetensors header" in refused(copy)
    path.write_bytes(data.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1))
    assert "header is damaged" in refused(copy)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}, "x has dtype F8_E4M3"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "x has shape .-1."),
        ({"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}, "holds 1.5"),
        ({"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}, "shape is of type int"),
        ({"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}, "holds '0'"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0]}, "no safetensors header"),
        ({"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, "no safetensors header"),
        ({"dtype": "F32", "data_offsets": [0, 4]}, "KeyError.'shape'."),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "header is damaged"),
        ([1], "no safetensors header"),
    ],
)
def test_refuses_an_entry_that_describes_no_tensor(tmp_path, entry, message):
    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "one.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=message) as caught:
        ShardFile(path)
    assert str(path) in str(caught.value)


def test_refuses_a_tensor_that_is_stated_twice(tmp_path):
    entry = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    header = f'{{"x": {entry}, "x": {entry}}}'.encode()
    path = tmp_path / "one.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match="the key 'x' is stated twice"):
        ShardFile(path)


def test_refuses_a_tensor_that_two_shards_hold(copy):
    # In both orders of the files: the index names either the first or the second.
    index = json.loads((copy / INDEX_NAME).read_text())
    del index["metadata"]
    (copy / INDEX_NAME).write_text(json.dumps(index))
    first, second, *_ = sorted(set(index["weight_map"].values()))
    name = next(n for n, file in index["weight_map"].items() if file == second)
    tensors = load_file(copy / first)
    save_file(tensors | {name: load_file(copy / second)[name]}, copy / first)
    assert f"in a shard, but not so in the index: {name} ({first})" in refused(copy)
    save_file(tensors, copy / first)
    other = next(iter(tensors))
    save_file(load_file(copy / second) | {other: tensors[other]}, copy / second)
    assert f"in a shard, but not so in the index: {other} ({second})" in refused(copy)


def test_refuses_a_shard_that_the_index_does_not_name(copy):
    save_file({"x": torch.zeros(1)}, copy / "model-00009-of-00009.safetensors")
    message = refused(copy)
    assert "the index does not name: model-00009-of-00009.safetensors" in message


def test_lets_other_safetensors_files_lie_beside_the_shards(copy):
    save_file({"x": torch.zeros(1)}, copy / "text_features.safetensors")
    open_checkpoint(copy)


@pytest.mark.parametrize("file", ["../other/one.safetensors", "/one.safetensors", "a/b", 7, None])
def test_refuses_an_index_that_points_out_of_its_folder(copy, file):
    index = json.loads((copy / INDEX_NAME).read_text())
    index["weight_map"][NORM] = file
    (copy / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="files outside its folder") as caught:
        load_checkpoint(new_model(), copy)
    assert f"{NORM} in {file!r}" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"weight_map": [1]}',
        '{"weight_map": {}, "weight_map": {}}',
        '{"weight_map": {}, "metadata": {"total_size": "many"}}',
        '{"weight_map": {}, "metadata": {"total_size": NaN}}',
        '{"weight_map": {}, "metadata": 3}',
        "\0\xff",
    ],
)
def test_refuses_an_index_that_is_none(copy, text):
    (copy / INDEX_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="no checkpoint index"):
        load_checkpoint(new_model(), copy)


def test_an_index_that_names_nothing_lacks_everything(tmp_path):
    (tmp_path / INDEX_NAME).write_text('{"weight_map": {}}')
    assert "and 111 more" in refused(tmp_path)


def test_refuses_an_index_that_contradicts_its_shards(copy):
    index = json.loads((copy / INDEX_NAME).read_text())
    files = sorted(set(index["weight_map"].values()))
    other = next(f for f in files if f != index["weight_map"][NORM])
    index["weight_map"][NORM] = other
    (copy / INDEX_NAME).write_text(json.dumps(index))
    message = refused(copy)
    assert f"in the index, but not in the shard it names: {NORM}" in message
    assert f"in a shard, but not so in the index: {NORM} (" in message


def test_refuses_a_wrong_total_or_no_index(copy):
    index = json.loads((copy / INDEX_NAME).read_text())
    index["metadata"]["total_size"] += 1
    (copy / INDEX_NAME).write_text(json.dumps(index))
    assert "the index states" in refused(copy)
    (copy / INDEX_NAME).write_text("{}")
    with pytest.raises(ValueError, match="no checkpoint index"):
        load_checkpoint(new_model(), copy)
    (copy / INDEX_NAME).unlink()
    with pytest.raises(ValueError, match="No such file"):
        load_checkpoint(new_model(), copy)


def test_saving_never_overwrites(saved, weights):
    with pytest.raises(ValueError, match="already holds a checkpoint"):
        save_checkpoint(weights, CONFIG, saved)
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        save_checkpoint(weights, CONFIG, saved / "new", max_shard_bytes=0)


def test_saving_leaves_other_shards_and_files_alone(weights, tmp_path):
    stale = tmp_path / "model-00001-of-00002.safetensors"
    stale.write_bytes(b"")
    with pytest.raises(ValueError, match="or shards of one"):
        save_checkpoint(weights, CONFIG, tmp_path)
    with pytest.raises(ValueError, match="is a file: expected a folder"):
        save_checkpoint(weights, CONFIG, stale)
    assert [path.name for path in tmp_path.iterdir()] == [stale.name]


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.complex64)]
)
def test_refuses_to_save_what_cannot_be_stored(tensor, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be stored: x \(.*, 1 in all"):
        save_checkpoint({"x": tensor}, CONFIG, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_save_that_fails_leaves_no_checkpoint(weights, tmp_path, monkeypatch):
    written = []

    def failing(path, tensors):
        written.append(path.name)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        path.write_bytes(b"")

    monkeypatch.setattr("magi2.checkpoint.save.write_shard", failing)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(weights, CONFIG, tmp_path / "full", max_shard_bytes=1 << 18)
    assert len(written) == 2
    assert not (tmp_path / "full" / INDEX_NAME).exists()
    assert not list((tmp_path / "full").glob("*.safetensors"))


def test_a_checkpoint_that_may_not_be_written_loads(copy, weights):
    for path in copy.iterdir():
        path.chmod(0o444)
    copy.chmod(0o555)
    model = new_model()
    load_checkpoint(model, copy)
    copy.chmod(0o755)
    # Changing the model must not reach for the file either.
    with torch.no_grad():
        model.get_parameter(NORM).add_(1)
    assert torch.equal(open_checkpoint(copy).file_of[NORM].read(NORM), weights[NORM])
