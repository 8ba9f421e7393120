"""The attention's queries, keys and values, stored straight to the ranks that they are for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from magi2 import presets
from magi2.options import Options
from magi2.timing.exchanges import watch_exchanges
from magi2.topology import Topology
from tests.bits import assert_same_bits
from tests.magi2.packed import packed_pair
from tests.magi2.sharded import model_of
from tests.ulysses_comm.symmetric_ranks import (
    collectively,
    folder_of,
    use_files,
)
from ulysses_comm import HeadScatterTarget

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton: pip install --no-deps triton==3.6.0 adds it to a CPU build of torch",
)


def attends(group: dist.ProcessGroup, folder: str) -> None:
    use_files(group, folder)
    config = presets.tiny()
    packed = packed_pair(config)
    finished, finish = [], HeadScatterTarget.finish

    def count(target: HeadScatterTarget) -> list[torch.Tensor]:
        finished.append(target.is_direct)
        return finish(target)

    HeadScatterTarget.finish = count  # type: ignore[method-assign]
    results = []
    for to_peers in (True, False):
        options = Options(qkv_backend="triton", attention_backend="torch", qkv_to_peers=to_peers)
        model = model_of(config, Topology.of_group(group), options)
        plan = model.plan(packed.coords, packed.modality, packed.cu_seqlens)
        torch.manual_seed(1 + group.rank())
        rows = torch.randn(plan.sequence.seqlen_local, config.hidden_size, dtype=config.dtype)
        with torch.no_grad():
            results.append(model.block.layers[0].attention(rows, plan))
    assert finished == [True]
    assert_same_bits(*results)
    # Where exchanges are timed apart, and over the collective, there is a send buffer.
    watched = watch_exchanges(plan, lambda name, nbytes: nullcontext())
    assert watched.sequence.open_heads([2], 8, rows) is None
    with collectively(group):
        assert plan.sequence.open_heads([2], 8, rows) is None


@pytest.mark.gloo
def test_an_attention_that_stores_to_its_peers_has_the_same_bits(tmp_path: Path) -> None:
    # In a process of its own: Triton's sums are interpreted only if it was imported that way, also
    # by the server that ranks are forked from.
    script = (
        "import sys; from tests.magi2.test_qkv_to_peers import attends; "
        "from tests.ulysses_comm.symmetric_ranks import run_interpreted; "
        "run_interpreted(attends, 2, sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, folder_of(tmp_path)],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_option_is_yes_or_no() -> None:
    with pytest.raises(ValueError, match="qkv_to_peers=None: expected True or False"):
        Options(qkv_to_peers=None)  # type: ignore[arg-type]
