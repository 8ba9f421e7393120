"""From a request to latents, files and hashes."""

from __future__ import annotations

import errno
import json
import os
import sys

import diffusers
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from magi2 import pipeline
from magi2.checkpoint import load_checkpoint
from magi2.conditioning import Conditioning
from magi2.denoiser import Denoiser
from magi2.encoders.features_file import load_text_features
from magi2.hashes import raw_sha256
from magi2.launch import ParallelSizes
from magi2.output_folder import OutputFolder
from magi2.pipeline import generate
from magi2.rank_agreement import check_alike, check_latents
from magi2.release import open_release
from magi2.run_state import load_state, save_state
from magi2.sampler import SamplerState, draw_noise, sample
from magi2.transformer import Magi2Transformer
from tests.magi2 import runs
from ulysses_comm.simulate import simulate_world

CPU = {"device": "cpu"}
STATE = "state.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return runs.make_checkpoint(tmp_path_factory.mktemp("pipeline") / "checkpoint")


@pytest.fixture
def no_pictures(monkeypatch):
    """Leave the preview out, which costs more than the steps."""
    monkeypatch.setattr("magi2.media.preview.write_preview", lambda *args, **kwargs: [])


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    """A run without a stop, on simulated ranks."""
    output = tmp_path_factory.mktemp("whole")
    return generate(checkpoint, runs.request(output), simulate=2, **CPU)


@pytest.mark.usefixtures("no_pictures")
def test_the_pipeline_is_its_parts_put_together(checkpoint, tmp_path):
    result = generate(checkpoint, runs.request(tmp_path / "out", seed=5), **CPU)
    release = open_release(checkpoint)
    wanted = runs.request(tmp_path)
    settings = wanted.settings_of(release.settings)
    geometry = wanted.geometry_of(settings)
    prompt, negative = load_text_features(checkpoint / "text_features.safetensors")
    model = Magi2Transformer(release.config, device="meta")
    load_checkpoint(model, checkpoint)
    denoiser = Denoiser(
        model, geometry, Conditioning(prompt=prompt.features, negative=negative.features)
    )
    noise = draw_noise(geometry, 8, 6, 5)
    state = sample(denoiser, SamplerState.start(*noise), settings)
    assert torch.equal(result.video, state.video[0])
    assert torch.equal(result.audio, state.audio[0])


def test_a_run_without_decoders_ends_with_latents_and_a_preview(whole):
    written = {path.name: path for path in whole.files}
    assert set(written) == {
        "latents.safetensors",
        "preview_latents.png",
        "preview_latents.mp4",
        "preview_audio.png",
        "run.json",
    }
    assert all(path.stat().st_size for path in whole.files)
    folder = written["run.json"].parent
    assert sorted(os.listdir(folder)) == sorted(written)  # no state, nothing half-written
    latents = load_file(written["latents.safetensors"])
    assert torch.equal(latents["video"], whole.video)
    assert torch.equal(latents["audio"], whole.audio)
    assert whole.hashes == {
        "video_latent": raw_sha256(whole.video),
        "audio_latent": raw_sha256(whole.audio),
    }
    assert (whole.video.shape, whole.audio.shape) == ((8, 2, 2, 3), (10, 6))
    record = json.loads(written["run.json"].read_text())
    assert record["hashes"] == whole.hashes
    assert len(record["step_seconds"]) == runs.NUM_STEPS
    assert record["ranks"]["world_size"] == 2
    assert record["fingerprint"]["torch"] == torch.__version__
    assert record["fingerprint"]["threads"] == str(torch.get_num_threads())
    for words in ("--turbo-decoder", "--audio-vae"):
        assert [note for note in whole.notes if words in note]


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(4, ParallelSizes(cfg=2)), (3, ParallelSizes(ulysses=3, expert=1))],
)
@pytest.mark.usefixtures("no_pictures")
def test_other_layouts_of_ranks_agree_but_for_roundings(checkpoint, whole, tmp_path, ranks, sizes):
    result = generate(checkpoint, runs.request(tmp_path), simulate=ranks, sizes=sizes, **CPU)
    for mine, theirs in ((result.video, whole.video), (result.audio, whole.audio)):
        # Sums over other splits round otherwise, and steps of guided bfloat16 amplify it.
        assert (mine - theirs).square().mean().sqrt() < 0.1 * theirs.square().mean().sqrt()


@pytest.mark.parametrize("stop", range(1, runs.NUM_STEPS + 1))
@pytest.mark.usefixtures("no_pictures")
def test_a_run_goes_on_from_any_step_with_the_same_bits(checkpoint, whole, tmp_path, stop):
    with pytest.raises(KeyboardInterrupt):
        generate(checkpoint, runs.request(tmp_path), simulate=2, progress=runs.StopAt(stop), **CPU)
    assert os.listdir(tmp_path) == [STATE]
    told = runs.StopAt(99)
    result = generate(
        checkpoint, runs.request(tmp_path, resume=True), simulate=2, progress=told, **CPU
    )
    assert told.steps == list(range(stop + 1, runs.NUM_STEPS + 1))
    assert result.resumed_from == stop
    assert result.hashes == whole.hashes
    assert not (tmp_path / STATE).exists()


@pytest.mark.gpu
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_run_on_a_gpu_goes_on_with_the_same_bits(checkpoint, tmp_path, monkeypatch, ranks):
    # Deterministic mode wants it from the start of a process; other tests may have used the GPU.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    gpu = {"device": "cuda", "simulate": ranks}
    wanted = {"deterministic": True}
    expected = generate(checkpoint, runs.request(tmp_path / "whole", **wanted), **gpu)
    with pytest.raises(KeyboardInterrupt):
        generate(
            checkpoint, runs.request(tmp_path / "out", **wanted),
            progress=runs.StopAt(2), **gpu,
        )  # fmt: skip
    result = generate(checkpoint, runs.request(tmp_path / "out", resume=True, **wanted), **gpu)
    assert (result.resumed_from, result.hashes) == (2, expected.hashes)


def test_states_may_be_saved_less_often(checkpoint, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        generate(checkpoint, runs.request(tmp_path, save_every=2), progress=runs.StopAt(3), **CPU)
    assert load_state(tmp_path / STATE).metadata["step"] == "2"
    with pytest.raises(KeyboardInterrupt):
        generate(
            checkpoint, runs.request(tmp_path / "none", save_every=0),
            progress=runs.StopAt(3), **CPU,
        )  # fmt: skip
    assert not (tmp_path / "none" / STATE).exists()


def stopped(checkpoint, output):
    with pytest.raises(KeyboardInterrupt):
        generate(checkpoint, runs.request(output), progress=runs.StopAt(2), simulate=2, **CPU)


def test_another_run_is_not_gone_on_with(checkpoint, tmp_path, monkeypatch):
    stopped(checkpoint, tmp_path)
    before = (tmp_path / STATE).read_bytes()
    versions = load_state(tmp_path / STATE).fingerprint
    assert versions["torch"] == torch.__version__
    assert versions["diffusers"] == diffusers.__version__
    # Found out before weights are read.
    monkeypatch.setattr(pipeline, "load_checkpoint", None)
    other = runs.make_checkpoint(tmp_path.parent / "other", alpha_init=0.02)
    for folder, changes, keywords, words in (
        (checkpoint, {"seed": 7}, {"simulate": 2}, ["seed: 42 there, 7 now"]),
        (checkpoint, {}, {"simulate": 3}, ["ulysses_degree: 2", "world_size: 2 there, 3 now"]),
        (
            checkpoint,
            {"settings": {"num_inference_steps": 5}, "width": 64},
            {"simulate": 2},
            ["num_inference_steps: 4 there, 5 now", "latent_width: 3 there, 4 now"],
        ),
        (other, {}, {"simulate": 2}, ["checkpoint: "]),
    ):
        with pytest.raises(ValueError, match="after step 2") as error:
            generate(folder, runs.request(tmp_path, resume=True, **changes), **keywords, **CPU)
        assert [word for word in words if word not in str(error.value)] == []
    assert (tmp_path / STATE).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"video": torch.zeros(1, 8, 2, 2, 1)}, "video_solver."),
        ({"audio": torch.zeros(1, 10, 5), "video": torch.zeros(1)}, "has a video latent"),
        ({"step": "3"}, "is of step '3' and its video solver's of 2"),
        ({"audio_solver": "[]"}, "audio_solver='[]'"),
        ({"audio_solver": '{"step": 2}'}, "the solver's state of step 2 holds"),
    ],
)
def test_a_damaged_state_is_refused_before_weights_are_read(
    checkpoint, tmp_path, monkeypatch, change, words
):
    stopped(checkpoint, tmp_path)
    stored = load_state(tmp_path / STATE)
    tensors = {n: v for n, v in change.items() if isinstance(v, torch.Tensor)}
    strings = {n: v for n, v in change.items() if isinstance(v, str)}
    save_state(
        tmp_path / STATE,
        {**stored.tensors, **tensors},
        {**stored.metadata, **strings},
        stored.fingerprint,
    )
    monkeypatch.setattr(pipeline, "load_checkpoint", None)
    with pytest.raises(ValueError, match=r"cannot be gone on with: .*--overwrite") as error:
        generate(checkpoint, runs.request(tmp_path, resume=True), simulate=2, **CPU)
    assert words in str(error.value)


def test_a_state_of_another_size_is_refused(checkpoint, tmp_path):
    stopped(checkpoint, tmp_path)
    stored = load_state(tmp_path / STATE)
    cut = {n: v[..., :1] if n.startswith("video") else v for n, v in stored.tensors.items()}
    save_state(tmp_path / STATE, cut, stored.metadata, stored.fingerprint)
    with pytest.raises(
        ValueError, match=r"the video latent is \(1, 8, 2, 2, 1\) .*\(1, 8, 2, 2, 3\)"
    ):
        generate(checkpoint, runs.request(tmp_path, resume=True), simulate=2, **CPU)


@pytest.mark.usefixtures("no_pictures")
def test_two_runs_do_not_write_to_one_folder(checkpoint, tmp_path):
    pytest.importorskip("fcntl")
    stopped(checkpoint, tmp_path)
    before = (tmp_path / STATE).read_bytes()
    other = OutputFolder(tmp_path)
    assert other.prepare(resume=True, overwrite=False, num_bytes=0)
    for changes in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(ValueError, match=r"another run is writing to .*--output"):
            generate(checkpoint, runs.request(tmp_path, **changes), simulate=2, **CPU)
    assert (tmp_path / STATE).read_bytes() == before
    other.close()
    # Each run lets go of it, whether it was stopped or came to its end.
    generate(checkpoint, runs.request(tmp_path, resume=True), simulate=2, **CPU)
    generate(checkpoint, runs.request(tmp_path, overwrite=True), simulate=2, **CPU)


@pytest.mark.usefixtures("no_pictures")
def test_what_a_run_is_made_from_is_not_discarded(checkpoint, tmp_path):
    features = tmp_path / "out" / "text_features.safetensors"
    features.parent.mkdir()
    features.write_bytes((checkpoint / features.name).read_bytes())
    for _ in range(2):
        wanted = runs.request(features.parent, overwrite=True, settings={"num_inference_steps": 1})
        generate(checkpoint, wanted, parts={"text_features": features}, **CPU)
        assert features.read_bytes() == (checkpoint / features.name).read_bytes()
    before = sorted(os.listdir(checkpoint))
    with pytest.raises(ValueError, match="is the checkpoint's: expected another"):
        generate(checkpoint, runs.request(checkpoint / ".." / checkpoint.name), **CPU)
    assert sorted(os.listdir(checkpoint)) == before


@pytest.mark.parametrize("package", ["av", "diffusers", "matplotlib.figure", "PIL.Image"])
def test_packages_are_missed_before_weights_are_read(checkpoint, tmp_path, monkeypatch, package):
    monkeypatch.setattr(pipeline, "load_checkpoint", None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ulysses-comm\[pipeline\]'"):
        generate(checkpoint, runs.request(tmp_path / "out"), **CPU)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_pictures")
def test_nothing_is_resumed_where_nothing_is(checkpoint, whole, tmp_path):
    result = generate(checkpoint, runs.request(tmp_path, resume=True), simulate=2, **CPU)
    assert (result.resumed_from, result.hashes) == (0, whole.hashes)


@pytest.mark.usefixtures("no_pictures")
def test_a_disk_that_fills_up_costs_one_step(checkpoint, whole, tmp_path, monkeypatch):
    true_fsync, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        # One file each for the probe and the states; and one more for each folder.
        if len(calls) > 2 * 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=r"No space left .* Free at least \d+ bytes"):
        generate(checkpoint, runs.request(tmp_path), simulate=2, **CPU)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [STATE]
    assert load_state(tmp_path / STATE).metadata["step"] == "2"
    result = generate(checkpoint, runs.request(tmp_path, resume=True), simulate=2, **CPU)
    assert (result.resumed_from, result.hashes) == (2, whole.hashes)


def test_results_that_cannot_be_written_cost_no_sampling(checkpoint, whole, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("magi2.media.preview.write_preview", full)
    with pytest.raises(OSError, match="No space left"):
        generate(checkpoint, runs.request(tmp_path), simulate=2, **CPU)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["latents.safetensors", STATE]
    told = runs.StopAt(99)
    result = generate(
        checkpoint, runs.request(tmp_path, resume=True), simulate=2, progress=told, **CPU
    )
    assert (told.steps, result.hashes) == ([], whole.hashes)


@pytest.mark.usefixtures("no_pictures")
def test_a_run_in_the_folder_is_not_lost_by_accident(checkpoint, tmp_path):
    stopped(checkpoint, tmp_path)
    with pytest.raises(ValueError, match=r"holds an unfinished run.*--resume"):
        generate(checkpoint, runs.request(tmp_path), simulate=2, **CPU)
    # A request that is refused discards nothing either.
    with pytest.raises(ValueError, match="--text-encoder"):
        generate(checkpoint, runs.request(tmp_path, prompt="a cat", overwrite=True), **CPU)
    assert (tmp_path / STATE).exists()
    generate(checkpoint, runs.request(tmp_path, overwrite=True), simulate=2, **CPU)
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"holds a finished run.*--overwrite"):
            generate(checkpoint, runs.request(tmp_path, resume=resume), simulate=2, **CPU)


@pytest.mark.parametrize(("mode", "dynamic"), [("static", False), ("dynamic", True)])
def test_simulated_ranks_compile_once_for_all(checkpoint, tmp_path, monkeypatch, mode, dynamic):
    calls = []

    def compile_model(model, **keywords):
        calls.append(keywords)
        return "the compiler"

    monkeypatch.setattr("magi2.compiling.compile_model", compile_model)
    wanted = runs.request(tmp_path, compile=mode, deterministic=True)
    with pytest.raises(KeyboardInterrupt):
        generate(checkpoint, wanted, simulate=2, progress=runs.StopAt(1), **CPU)
    settings = {"dynamic": dynamic, "deterministic": True}
    assert calls == [{**settings, "compiler": None}, {**settings, "compiler": "the compiler"}]
    assert load_state(tmp_path / STATE).fingerprint["compile"] == mode


def test_ranks_that_were_started_otherwise_are_named():
    def program():
        rank = dist.get_rank()
        check_alike({"seed": "1"}, 3)
        with pytest.raises(ValueError, match="the same options") as error:
            check_alike({"seed": str(rank // 2), "shift": "7"} if rank else {"seed": "0"}, 3)
        return str(error.value).splitlines()[1:3]

    expected = [
        "  seed: 0 on rank(s) [0, 1], 1 on rank(s) [2]",
        "  shift: (not stated) on rank(s) [0], 7 on rank(s) [1, 2]",
    ]
    assert simulate_world(3, program).results == [expected] * 3


def test_ranks_with_other_bits_are_found():
    def program():
        video = torch.zeros(4)
        check_latents(video, torch.zeros(1), 3)
        video[0] = -0.0 if dist.get_rank() == 2 else 0.0
        with pytest.raises(RuntimeError, match=r"rank\(s\) \[2\] have other latents"):
            check_latents(video, torch.zeros(1), 3)

    simulate_world(3, program)
