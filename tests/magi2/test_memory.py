"""How much memory activations take, in units of what a layer cannot do without.

The unit is the residual streams of all tokens twice, in and out of a layer, in the activation
dtype: both exist when the last stream is written. In bfloat16 the float32 copy that the stream
norm makes is one unit by itself, and its products, which plain torch stores one after another, are
one each; kernels that fuse them come nearer to one unit in all.
"""

from __future__ import annotations

import pytest
import torch

from magi2 import presets
from magi2.config import Magi2Config
from magi2.modules.block import TransformerLayer
from magi2.modules.modality import ModalityOrder
from magi2.modules.request import RequestPlan
from magi2.modules.sequence import SequenceDispatcher
from magi2.options import Options
from magi2.topology import Topology
from tests.magi2.live_memory import LiveMemory
from tests.magi2.packed import packed_pair
from tests.magi2.sharded import model_of

LAYER_UNITS = {torch.float32: 4.0, torch.bfloat16: 6.0}
MODEL_UNITS = {torch.float32: 5.0, torch.bfloat16: 8.0}
TOKENS = 3702  # of one rank of eight, in the 272p example


def unit(config: Magi2Config, tokens: int) -> int:
    return 2 * tokens * config.stream_width * config.dtype.itemsize


def test_the_meter_sees_what_lives_and_what_is_freed():
    with LiveMemory() as memory:
        x = torch.ones(100)
        y = x + 1
        assert memory.live == 800
        view = y[10:]
        del y
        assert memory.live == 800
        del view
        assert memory.live == 400
        x.add_(1)
        assert (memory.live, memory.peak) == (400, 800)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", [presets.tiny, presets.tiny_uneven])
def test_activations_of_the_tiny_model_stay_within_their_units(preset, dtype):
    config = preset(dtype)
    model, packed = model_of(config), packed_pair(config, video=(8, 8, 8), audio=30)
    tokens = len(packed.x)
    with torch.no_grad():
        with LiveMemory() as memory:
            model(*packed)
        assert memory.peak <= MODEL_UNITS[dtype] * unit(config, tokens)
        plan = model.plan(packed.coords, packed.modality, packed.cu_seqlens)
        for layer in model.block.layers:
            streams = torch.randn(tokens, 4, config.hidden_size).to(dtype)
            with LiveMemory() as memory:
                layer(streams, plan)
            assert memory.peak + streams.nbytes <= LAYER_UNITS[dtype] * unit(config, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [0, 2], ids=["dense", "mixture"])
def test_activations_of_a_production_layer_stay_within_their_units(layer, record_property):
    config = presets.preview()
    with torch.device("cuda"), torch.no_grad():
        module = TransformerLayer(config, Options(), Topology(), layer, "cuda")
        for tensor in module.state_dict().values():
            tensor.normal_(std=0.02)
        modality = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([3584, 63, 55]))
        split = SequenceDispatcher(split_sizes=(TOKENS,))
        plan = RequestPlan(
            order=ModalityOrder.from_modality(modality),
            rotary=torch.randn(TOKENS, 6 * config.num_rotary_bands),
            cu_seqlens=(0, 1825, TOKENS),
            branches=split,
            sequence=split,
            experts=split,
        )
        streams = torch.randn(TOKENS, 4, config.hidden_size).bfloat16()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = module(streams, plan)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before + streams.nbytes
    assert result.isfinite().all()
    units = peak / unit(config, TOKENS)
    record_property("units", units)
    print(f"layer {layer}: {peak / 2**20:.0f} MiB, {units:.2f} units")
    assert units <= LAYER_UNITS[torch.bfloat16]
