"""`copy_head_shards`: the same cases for the torch form and the Triton one, bits as integers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bits import assert_same_bits, quiet_nans, random_bits
from tests.ulysses_comm.copy_cases import CASES, Case, run
from ulysses_comm.copies import copy_head_shards, copy_head_shards_torch, explain_copy

ROOT = Path(__file__).resolve().parents[2]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton: pip install --no-deps triton==3.6.0 adds it to a CPU build of torch",
)


def _interpreted(code: str) -> str:
    """Run code in a process where Triton interprets, so that this one stays as it is."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _shards(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_form_equals_a_copy_of_every_shard(case: Case) -> None:
    run(case, copy_head_shards_torch, "cpu")


@needs_triton
def test_triton_form_equals_a_copy_of_every_shard_under_the_interpreter() -> None:
    out = _interpreted("from tests.ulysses_comm.copy_cases import main; main()")
    assert f"{len(CASES)} cases right on cpu" in out


@needs_triton
def test_every_tile_gives_the_same_bytes_under_the_interpreter() -> None:
    out = _interpreted(
        "import functools\n"
        "from tests.ulysses_comm.copy_cases import BF16, FP32, Case, run\n"
        "from ulysses_comm.kernels.copies import CopyTile, copy_head_shards_triton\n"
        "cases = [Case(5, 2, (2, 1, 3), 16), Case(5, 2, (2, 1, 3), 7, layout='heads first'),\n"
        "         Case(5, 2, (2, 1, 3), 16, (BF16, FP32, BF16), FP32)]\n"
        "tiles = [CopyTile(tile_bytes, block, 4, ranks_first, vec, policy)\n"
        "         for tile_bytes in (1, 1000) for block in (64, 2048) for ranks_first in (0, 1)\n"
        "         for vec in (1, 8) for policy in ('', 'evict_first')]\n"
        "for case in cases:\n"
        "    for tile in tiles:\n"
        "        run(case, functools.partial(copy_head_shards_triton, tile=tile), 'cpu')\n"
        "print(len(cases) * len(tiles))\n"
    )
    assert out.split() == ["96"]


@needs_triton
def test_backend_triton_serves_cpu_tensors_under_the_interpreter_only() -> None:
    with pytest.raises(RuntimeError, match="tensors are on cpu"):
        copy_head_shards([_shards(2, 2, 1, 4)], [_shards(2, 2, 1, 4)], backend="triton")
    out = _interpreted(
        "import torch\n"
        "from ulysses_comm.copies import copy_head_shards, explain_copy\n"
        "from ulysses_comm.kernels import copies\n"
        "to, source = torch.zeros(2, 2, 1, 4), torch.ones(2, 2, 1, 4)\n"
        "print(explain_copy([to], [source]))\n"
        "copy_head_shards([to], [source], backend='triton')\n"
        "assert to.eq(1).all()\n"
        "print(copies.describe_launches([to] * 5, [source] * 5))\n"
        "print(copies.describe_launches([to.expand(2, 2, 3, 4)], [to.expand(2, 2, 3, 4)]))\n"
    )
    automatic, five, strided = out.strip().splitlines()
    assert automatic.startswith("torch, one copy per pair: the tensors are on cpu")
    assert five == "2 launches: the dense kernel for 4 pairs, the dense kernel for 1 pair"
    assert strided == "1 launch: the strided kernel for 1 pair"


@needs_triton
@pytest.mark.parametrize("zero", [(0, 4, 2, 8), (5, 4, 0, 8), (5, 4, 2, 0)])
def test_nothing_to_copy_launches_nothing(zero: tuple[int, ...]) -> None:
    empty = torch.empty(zero)
    assert explain_copy([empty], [empty.clone()]).startswith("nothing")
    for backend in ("auto", "torch", "triton"):
        copy_head_shards([empty], [empty.clone()], backend=backend)  # type: ignore[arg-type]
    from ulysses_comm.kernels import copies

    # No driver here: a launch would raise.
    copies.copy_head_shards_triton([empty], [empty.clone()])


def test_no_pairs_copy_nothing() -> None:
    copy_head_shards([], [])
    assert explain_copy([], []).startswith("nothing")


def test_different_head_dims_copy_together() -> None:
    sources = [_shards(5, 2, 3, 8), _shards(5, 2, 1, 6)]
    destinations = [torch.empty_like(source) for source in sources]
    copy_head_shards(destinations, sources)
    for destination, source in zip(destinations, sources, strict=True):
        assert_same_bits(destination, source)


@pytest.mark.parametrize(
    ("destinations", "sources", "message"),
    [
        ([(2, 2, 1, 4)], [], "1 destinations for 0 sources"),
        ([(2, 2, 1, 4)], [(2, 2, 2, 4)], r"destinations\[0\] is \[2, 2, 1, 4\]"),
        ([(2, 2, 1, 4)], [(1, 2, 1, 4)], r"sources\[0\] is \[1, 2, 1, 4\]"),
        ([(2, 2, 4)], [(2, 2, 4)], "unflatten"),
        ([(2, 2, 1, 4), (2, 1, 2, 4)], [(2, 2, 1, 4), (2, 1, 2, 4)], r"destinations\[1\]"),
    ],
)
def test_rejects_pairs_that_do_not_match(
    destinations: list[tuple[int, ...]], sources: list[tuple[int, ...]], message: str
) -> None:
    to = [torch.zeros(shape) for shape in destinations]
    for copy in (copy_head_shards, explain_copy):
        with pytest.raises(ValueError, match=message):
            copy(to, [torch.ones(shape) for shape in sources])
    assert all(tensor.eq(0).all() for tensor in to)


def test_rejects_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend='cuda'"):
        copy_head_shards([_shards(1, 1, 1, 1)], [_shards(1, 1, 1, 1)], backend="cuda")  # type: ignore[arg-type]


def test_tracked_sources_keep_their_gradient() -> None:
    source = _shards(3, 2, 2, 4).requires_grad_()
    buffer = torch.zeros(2, 3, 2, 4)
    copy_head_shards([buffer.transpose(0, 1)], [source])
    buffer.mul(torch.arange(48.0).view(2, 3, 2, 4)).sum().backward()
    assert_same_bits(source.grad, torch.arange(48.0).view(2, 3, 2, 4).transpose(0, 1))


@needs_triton
@pytest.mark.parametrize(
    ("words", "widths", "vecs", "sources", "destination"),
    [
        ([8, 8, 8], [96, 96, 96], [2, 2, 2], ["bf16", "bf16", "bf16"], "bf16"),
        ([8, 8, 8], [32, 96, 64], [2, 2, 2], ["bf16", "bf16", "bf16"], "bf16"),
        ([0, 8, 0], [384, 192, 384], [4, 2, 4], ["bf16", "fp32", "fp16"], "fp32"),
    ],
)
def test_dense_kernel_compiles_for_hopper_with_16_byte_access(
    words: list[int], widths: list[int], vecs: list[int], sources: list[str], destination: str
) -> None:
    ptx = _compile_dense(words, widths, vecs, sources, destination)
    # Two 8-byte words an access where nothing is converted, 16-byte stores everywhere.
    assert "ld.global" in ptx
    assert "st.global.v2.b64" in ptx
    assert "st.global.b" not in ptx
    assert ".local" not in ptx


def _compile_dense(
    words: list[int], widths: list[int], vecs: list[int], sources: list[str], destination: str
) -> str:
    """PTX of the dense kernel for sm_90, every pointer 16-byte aligned as at launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ulysses_comm.kernels.copies import copy_head_shards_kernel

    constants: dict[str, object] = {
        "PAIRS": 3, "ROWS": 4, "PARTS": 1, "RANKS_FIRST": True, "POLICY": "evict_first",
    }  # fmt: skip
    signature: dict[str, str] = {}
    for i in range(4):
        k = i % 3
        signature[f"source{i}"] = f"*{sources[k]}"
        signature[f"destination{i}"] = f"*{destination}"
        shape = {"WIDTH": widths[k], "VEC": vecs[k], "WORD": words[k], "BLOCK": 2048}
        constants.update({f"{name}{i}": value for name, value in shape.items()})
    names = [parameter.name for parameter in copy_head_shards_kernel.params]
    # Strides and sizes are what is left.
    types = {
        name: signature.get(name, "constexpr" if name in constants else "i32") for name in names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in signature}
    source = ASTSource(
        copy_head_shards_kernel, signature=types, constexprs=constants, attrs=aligned
    )
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_forms_equal_a_copy_of_every_shard_on_a_gpu(case: Case, backend: str) -> None:
    def copy(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copy_head_shards(destinations, sources, backend=backend)  # type: ignore[arg-type]

    run(case, copy, "cuda")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_auto_takes_triton_on_a_gpu_and_says_why_not() -> None:
    source = torch.randn(4, 2, 3, 8, device="cuda")
    to = torch.empty_like(source)
    assert explain_copy([to], [source]) == "triton, 1 launch: the dense kernel for 1 pair"
    assert "float32 to torch.bfloat16" in explain_copy([to.bfloat16()], [source])
    assert "autograd" in explain_copy([to], [source.clone().requires_grad_()])
    assert "conjugate" in explain_copy([to.cfloat()], [source.cfloat()])
    with pytest.raises(RuntimeError, match=r"float32 to torch\.bfloat16"):
        copy_head_shards([to.bfloat16()], [source], backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_16_bit_pattern_converts_as_torch_does_on_a_gpu(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).cuda()
    source = patterns.view(512, 2, 4, 16)
    ours, theirs = (torch.empty(source.shape, dtype=FP32, device="cuda") for _ in range(2))
    copy_head_shards([ours], [source], backend="triton")
    copy_head_shards([theirs], [source], backend="torch")
    assert_same_bits(ours, theirs)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_elements_on_a_gpu() -> None:
    # 4.4e9 elements on each side; only the last tokens are looked at.
    tokens, world_size, heads, head_dim = 70_001, 8, 60, 128
    shape = (tokens, world_size, heads, head_dim)
    source = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    source[-2:] = random_bits((2, *shape[1:]), torch.uint8, seed=1).cuda()
    buffer = torch.full((world_size, tokens, heads, head_dim), 7, dtype=torch.uint8, device="cuda")
    copy_head_shards([buffer.transpose(0, 1)], [source], backend="triton")
    assert_same_bits(buffer.transpose(0, 1)[-2:], source[-2:])
    assert not buffer[:, :-2].any()


def test_bfloat16_widens_without_touching_a_nan() -> None:
    source = random_bits((64, 2, 4, 16), BF16, seed=3)
    wide = torch.empty(source.shape)
    copy_head_shards([wide], [source])
    bits = source.view(torch.int16).to(torch.int32) << 16
    assert_same_bits(quiet_nans(wide), quiet_nans(bits.view(FP32)))
