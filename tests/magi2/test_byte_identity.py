"""Which runs of all steps give the same bytes of video and audio, and which need not.

A tiny checkpoint is sampled from noise to latents, and the SHA-256 of their bytes are compared.

Equal, whatever the platform, because the same rows meet the same operations:

- a run and its repetition, eager or compiled with `deterministic`, static and dynamic each against
  itself; regions traced by "aot_eager" against eager code;
- head-shard layouts on and off, in each of the two places;
- simulated ranks and processes of as many ranks;
- branches packed on two ranks and branches on a rank each, if both branches have equally many
  tokens and every rank holds all experts: a rank then has the very rows of one branch. What differs
  is only how many heads and sequences one attention call has, and those do not touch each other;
- the time taken of a run.

Equal on a CPU in bfloat16, where a row's products do not depend on the rows beside it: the way to
the experts over all ranks or inside a run, and experts whole or shared.

Not promised, and not tested for equal bytes: other numbers of ranks that share the tokens, packed
branches of unequal length against split ones, and padding. A matrix product over another number of
rows may add in another order (on a CPU most such runs are equal, some are not); so may Inductor's
fused kernels against eager code, and dynamic ones against static ones. `route_sum` "choice" and
"expert" add in another order by definition; each is compared with itself.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from magi2 import presets
from magi2.checkpoint import load_checkpoint, save_checkpoint
from magi2.compiling import RegionCompiler, compile_model
from magi2.config import Magi2Config
from magi2.denoiser import Denoiser
from magi2.determinism import deterministic_mode
from magi2.encoders.features_file import load_text_features, save_text_features
from magi2.encoders.text_features import TextFeatures
from magi2.generate_request import GenerateRequest
from magi2.geometry import Geometry
from magi2.hashes import raw_sha256
from magi2.initialise import random_state_dict
from magi2.launch import ParallelSizes, run_on_ranks
from magi2.options import Options
from magi2.packing import Conditioning
from magi2.pipeline import generate
from magi2.sampler import SamplerState, draw_noise, sample
from magi2.settings import SamplingSettings
from magi2.timing import StepTimer
from magi2.transformer import Magi2Transformer
from tests.magi2.sharded import FLAT, LAYOUTS, PACKED
from tests.ranks import run_ranks

STEPS, SEED = 3, 7
SIZE = {"width": 48, "height": 32, "num_frames": 5}
EQUAL_TEXTS, UNEQUAL_TEXTS = (6, 6), (9, 4)


def four_choices() -> Magi2Config:
    """Two experts would add to the same in either order."""
    config = presets.tiny()
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, top_k=4))


CONFIGS = {
    "tiny": presets.tiny,
    "tiny_uneven": presets.tiny_uneven,
    "four choices": four_choices,
}


@pytest.fixture(autouse=True)
def nan_filled_empty():
    """No filling: it would be part of what is traced."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders by preset and text lengths, made when asked for."""

    @functools.cache
    def make(preset: str, texts: tuple[int, int]) -> str:
        config: Magi2Config = CONFIGS[preset]()
        folder = tmp_path_factory.mktemp("checkpoint")
        save_checkpoint(random_state_dict(config), config, folder)
        generator = torch.Generator().manual_seed(1)
        features = (
            TextFeatures(
                features=torch.randn(n, config.text_channels, generator=generator).bfloat16()
            )
            for n in texts
        )
        save_text_features(folder / "text_features.safetensors", *features)
        return str(folder)

    return make


def sampled(
    folder: str,
    sizes: ParallelSizes | None = None,
    options: Options | None = None,
    *,
    simulate: int | None = None,
    compiler: RegionCompiler | None = None,
    timed: bool = False,
) -> dict[str, str]:
    """Hashes of the latents after all steps, equal on all ranks."""

    def on_rank(ranks):
        config = Magi2Config.from_file(f"{folder}/config.json")
        model = Magi2Transformer(config, options, ranks.topology, device="meta")
        load_checkpoint(model, folder)
        if compiler is not None:
            compile_model(
                model,
                dynamic=compiler.dynamic,
                deterministic=compiler.deterministic,
                backend=compiler.backend,
                compiler=compiler,
            )
        timer = StepTimer(ranks.device)
        if timed:
            timer.attach(model)
            timer.start()
        prompt, negative = load_text_features(f"{folder}/text_features.safetensors")
        conditioning = Conditioning(prompt=prompt.features, negative=negative.features)
        geometry = Geometry.of(**SIZE)
        noise = draw_noise(geometry, config.video_channels, config.audio_channels, SEED)
        state = sample(
            Denoiser(model, geometry, conditioning),
            SamplerState.start(*noise),
            SamplingSettings(num_inference_steps=STEPS),
            timer.on_step if timed else None,
        )
        return {"video": raw_sha256(state.video[0]), "audio": raw_sha256(state.audio[0])}

    with deterministic_mode():
        return run_on_ranks(
            on_rank,
            sizes or ParallelSizes(),
            num_expert_heads=Magi2Config.from_file(f"{folder}/config.json").moe.num_heads,
            simulate=simulate,
            device="cpu",
        )


def test_all_hashes_come_from_different_latents_and_repeat(checkpoints):
    folder = checkpoints("tiny_uneven", UNEQUAL_TEXTS)
    first = sampled(folder)
    assert first["video"] != first["audio"]
    assert sampled(folder, timed=True) == first
    other = sampled(folder, options=Options(router_bias="raw"))
    assert other["video"] != first["video"]
    assert other["audio"] != first["audio"]


def test_pipeline_prints_these_hashes(checkpoints, tmp_path):
    folder = checkpoints("tiny_uneven", UNEQUAL_TEXTS)
    request = GenerateRequest(
        output=tmp_path / "out",
        settings={"num_inference_steps": STEPS},
        seed=SEED,
        deterministic=True,
        save_every=0,
        **SIZE,
    )
    result = generate(folder, request, simulate=2, device="cpu")
    hashes = sampled(folder, simulate=2)
    assert set(hashes.values()) <= set(result.hashes.values())
    assert raw_sha256(result.video) == hashes["video"]
    assert raw_sha256(result.audio) == hashes["audio"]


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(2, ParallelSizes()), (6, ParallelSizes(cfg=2))],
    ids=["packed branches", "split branches"],
)
def test_layouts_give_the_same_bytes(checkpoints, world_size, sizes):
    folder = checkpoints("tiny_uneven", UNEQUAL_TEXTS)
    results = [sampled(folder, sizes, layout, simulate=world_size) for layout in LAYOUTS.values()]
    assert results == [results[0]] * len(LAYOUTS)


def test_split_branches_of_equal_length_give_the_bytes_of_packed_ones(checkpoints):
    folder = checkpoints("tiny_uneven", EQUAL_TEXTS)
    packed = sampled(folder, ParallelSizes(ulysses=2, expert=1), simulate=2)
    split = sampled(folder, ParallelSizes(ulysses=1, cfg=2), simulate=2)
    assert split == packed


@pytest.mark.parametrize("route_sum", ["choice", "expert"])
def test_ways_to_the_experts_give_the_same_bytes(checkpoints, route_sum):
    folder = checkpoints("four choices", EQUAL_TEXTS)
    results = [
        sampled(
            folder,
            ParallelSizes(expert=expert),
            Options(route_sum=route_sum, replicated_expert_exchange=replicated),
            simulate=4,
        )
        for expert, replicated in [(2, False), (2, True), (1, False), (4, False)]
    ]
    assert results == [results[0]] * 4


def test_sums_over_experts_differ(checkpoints):
    folder = checkpoints("four choices", EQUAL_TEXTS)
    chosen, by_expert = (
        sampled(folder, options=Options(route_sum=order)) for order in ("choice", "expert")
    )
    assert chosen != by_expert


def traced(dynamic: bool) -> RegionCompiler:
    return RegionCompiler(dynamic=dynamic, deterministic=True, backend="aot_eager")


@pytest.mark.parametrize(
    ("dynamic", "world_size"),
    [
        (False, 1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(True, 1), (True, 3)]),
    ],
)
def test_traced_regions_give_the_bytes_of_eager_code(checkpoints, dynamic, world_size, monkeypatch):
    # Sinkhorn's loop is unrolled when traced; two rounds say what twenty do, sooner.
    monkeypatch.setattr("magi2.modules.mhc.SINKHORN_ITERATIONS", 2)
    folder = checkpoints("tiny_uneven", UNEQUAL_TEXTS)
    torch._dynamo.reset()
    actual = sampled(folder, simulate=world_size, compiler=traced(dynamic))
    assert actual == sampled(folder, simulate=world_size)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("world_size", "dynamic", "layout"),
    [
        pytest.param(1, False, PACKED, id="lone-static"),
        pytest.param(1, True, PACKED, id="lone-dynamic"),
        pytest.param(2, False, FLAT, id="two-static-flat", marks=pytest.mark.long),
        pytest.param(2, True, PACKED, id="two-dynamic-packed", marks=pytest.mark.long),
    ],
)
def test_compiled_runs_repeat_their_bytes(checkpoints, world_size, dynamic, layout):
    folder = checkpoints("tiny_uneven", UNEQUAL_TEXTS)
    results = []
    for _ in range(2):
        torch._dynamo.reset()
        with torch._inductor.utils.fresh_cache():
            compiler = RegionCompiler(dynamic=dynamic, deterministic=True)
            results.append(sampled(folder, options=layout, simulate=world_size, compiler=compiler))
    torch._dynamo.reset()
    assert results[0] == results[1]


def on_gloo(group, folder, sizes):
    return sampled(folder, sizes)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("preset", "world_size", "sizes"),
    [
        ("tiny_uneven", 2, ParallelSizes()),
        pytest.param("tiny", 4, ParallelSizes(cfg=2), marks=pytest.mark.long),
        pytest.param("tiny", 4, ParallelSizes(expert=2), marks=pytest.mark.long),
    ],
)
def test_simulated_ranks_give_the_bytes_of_processes(checkpoints, preset, world_size, sizes):
    folder = checkpoints(preset, UNEQUAL_TEXTS)
    expected = sampled(folder, sizes, simulate=world_size)
    assert run_ranks(on_gloo, world_size, folder, sizes) == [expected] * world_size
