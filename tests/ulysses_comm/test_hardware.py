"""Device, backend and layouts: on this machine, and on a Moore Threads one that is a stand-in.

The stand-in, tests/musa_stub, is a torch_musa that has no GPU behind it; the real torchada applies
its real patches on top. Each such program is a process of its own.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ulysses_comm import hardware

ROOT = Path(__file__).parents[2]

needs_torchada = pytest.mark.skipif(
    importlib.util.find_spec("torchada") is None, reason="needs torchada: pip install torchada"
)


def run(program: str, *, musa: bool = True, **variables: str) -> str:
    """Run a program in a process of its own, with the stand-in or without, and return its output.

    It may expect `refusal(call)`, the text of the error that a call raises.
    """
    prologue = (
        "import os, sys\nimport torch, torch.distributed as dist\n"
        "from ulysses_comm import hardware\n"
        "def refusal(call):\n"
        "    try:\n        call()\n"
        "    except (RuntimeError, ValueError) as error:\n        return str(error)\n"
        "    raise AssertionError('nothing was refused')\n"
    )
    path = [str(ROOT), *([str(ROOT / "tests" / "musa_stub")] if musa else [])]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ULYSSES_", "TORCHADA_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", prologue + program],
        env={**clean, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


MUSA_WITH_TWO_GPUS = """
from ulysses_comm import bootstrap, doctor, exchange, mpi, testing
from ulysses_comm.simulate import simulate
import magi2.transformer
assert not {'torchada', 'mpi4py'} & set(sys.modules), 'imported without being asked for'
assert hardware.is_musa_build() and hardware.device_count('musa') == 2
chosen = hardware.choose_device()
assert (chosen.name, chosen.reason) == ('musa', 'torch sees 2 musa device(s)')
assert hardware.choose_backend('musa').name == 'mccl'
assert hardware.backend_problems('mccl', 'musa') == hardware.backend_problems('gloo', 'cpu') == []
(problem,) = hardware.backend_problems('mccl', 'cpu')
assert problem == "backend 'mccl' carries musa tensors, and the device is cpu"
assert hardware.device_for_rank(1) == torch.device('musa:1')
refused = refusal(lambda: hardware.device_for_rank(2))
assert 'rank 2' in refused and 'sees 2' in refused and 'ULYSSES_COMM_DEVICE=cpu' in refused
assert hardware.is_accelerator('musa:1') and not hardware.is_accelerator('cpu')
assert hardware.device_for_rank(5, 'cpu') == torch.device('cpu')
os.environ['STUB_MUSA_DEVICES'] = '1'
os.environ['MUSA_VISIBLE_DEVICES'] = '3'  # a launcher that shows each rank its own GPU
assert hardware.device_for_rank(3) == torch.device('musa:0')
os.environ['STUB_MUSA_DEVICES'] = '2'

launch = bootstrap.init_distributed()
assert 'torchada' in sys.modules
assert torch.device('cuda:0').type == 'musa', 'torchada did not patch'
assert (launch.device.type, launch.device.index) == ('musa', 0)
assert torch.musa.devices_set == [torch.device('musa:0')]
assert launch.backend.name == dist.get_backend() == 'mccl'
assert dist.group.WORLD.size() == 1
dist.destroy_process_group()

# Under torchada's patches: a device that calls itself cuda, and the exchanges.
assert hardware.is_accelerator('cuda') and hardware.choose_device().name == 'musa'
assert hardware.layout_defaults('cuda') == hardware.layout_defaults('musa')
whole = torch.arange(5 * 6 * 4.0).view(5, 6, 4)
def step(group):
    mine = whole.split([3, 0, 2])[group.rank()]
    gathered, = exchange.scatter_heads_gather_seqlen([mine], [3, 0, 2], group)
    assert torch.equal(gathered, whole[:, 2 * group.rank() : 2 * group.rank() + 2])
    assert torch.equal(
        exchange.scatter_seqlen_gather_heads(gathered.contiguous(), [3, 0, 2], group), mine)
simulate(3, step)
assert hardware.load_torchada('cpu') is None
try:
    mpi.load_mpi()
except RuntimeError:
    pass  # no MPI on this machine
else:
    launch = bootstrap.init_distributed('ulysses_mpi')
    assert launch.device.type == 'cpu', 'MPI carries CPU tensors'
    dist.destroy_process_group()
os.environ['ULYSSES_COMM_DEVICE'] = 'cpu'
launch = bootstrap.init_distributed()
assert (launch.device.type, launch.backend.name) == ('cpu', 'gloo')
dist.destroy_process_group()
"""


@needs_torchada
def test_musa_machine_gets_mccl_and_torchada() -> None:
    run(MUSA_WITH_TWO_GPUS, STUB_MUSA_DEVICES="2")


def test_musa_torch_without_a_gpu_is_a_cpu_machine() -> None:
    run(
        """
assert hardware.is_musa_build() and hardware.device_count('musa') == 0
chosen = hardware.choose_device()
assert chosen.name == 'cpu' and 'torch_musa is loaded but finds no GPU' in chosen.reason
assert hardware.load_torchada() is None and 'torchada' not in sys.modules
assert "'musa'" in refusal(lambda: hardware.choose_device('musa'))
""",
        STUB_MUSA_DEVICES="0",
    )


def test_musa_machine_without_mccl_and_without_torchada() -> None:
    """Cards of the S80 class have no MCCL; torchada can be forbidden."""
    run(
        """
chosen = hardware.choose_backend('musa')
assert chosen.name == 'gloo' and 'no MCCL' in chosen.reason
assert 'built without it' in hardware.backend_problems('mccl')[0]
assert hardware.load_torchada() is None
from ulysses_comm.bootstrap import init_distributed
assert init_distributed().backend.name == 'gloo'
assert 'torchada' not in sys.modules and torch.device('cuda:0').type == 'cuda'
""",
        STUB_MUSA_DEVICES="1",
        STUB_MUSA_MCCL="0",
        ULYSSES_COMM_TORCHADA="0",
    )


@needs_torchada
def test_torchada_is_imported_elsewhere_only_on_request() -> None:
    run(
        """
assert hardware.load_torchada() is None and 'torchada' not in sys.modules
os.environ['ULYSSES_COMM_TORCHADA'] = '1'
assert hardware.load_torchada() is sys.modules['torchada']
assert torch.device('cuda:0').type == 'cuda'
sys.modules['torchada'] = None
""",
        musa=False,
    )


def test_asking_for_torchada_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_COMM_TORCHADA", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"torchada, which is not installed.*\[musa\]"):
        hardware.load_torchada()


def test_only_hardware_knows_torchada_and_torch_musa() -> None:
    """No import statement anywhere, and no name of a module outside that one file."""
    for package in ("ulysses_comm", "magi2"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names = [node.value] if path.name not in ("hardware.py", "findings.py") else []
                roots = {name.partition(".")[0] for name in names}
                assert not roots & {"torchada", "torch_musa"}, f"{path}:{node.lineno}"


def test_choices_on_this_machine_agree_with_torch() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    if hardware.device_count("musa"):
        expected = "musa"
    chosen = hardware.choose_device()
    assert chosen.name == expected
    assert chosen.reason
    assert hardware.choose_device("cpu").reason == "the caller asked for it"
    backend = hardware.choose_backend(chosen.name)
    assert hardware.backend_problems(backend.name) == []
    assert hardware.choose_backend("cpu", mpi_ranks=True).name == "ulysses_mpi"
    hardware.use_device(torch.device("cpu"))
    hardware.synchronize(torch.device("cpu"))


def test_environment_decides_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_COMM_DEVICE", "cpu")
    assert hardware.choose_device().reason == "ULYSSES_COMM_DEVICE in the environment asked for it"
    monkeypatch.setenv("ULYSSES_COMM_DEVICE", "npu")
    with pytest.raises(ValueError, match=r"ULYSSES_COMM_DEVICE.*'npu': expected cpu, cuda or musa"):
        hardware.choose_device()
    assert hardware.choose_device("cpu").name == "cpu"


@pytest.mark.parametrize("missing", ["cuda", "musa"])
def test_a_device_that_is_not_there_is_refused(missing: str) -> None:
    if hardware.device_count(missing):  # type: ignore[arg-type]
        pytest.skip(f"this machine has {missing} devices")
    with pytest.raises(RuntimeError, match=f"'{missing}', but torch .* sees none"):
        hardware.choose_device(missing)


@pytest.mark.parametrize(
    ("device", "known"), [("cpu", True), ("cuda:1", True), ("musa", True), ("xpu", False)]
)
def test_head_shards_are_the_default_on_known_devices(device: str, known: bool) -> None:
    defaults = hardware.layout_defaults(device)
    assert (defaults.head_shard_inputs, defaults.head_shard_output) == (known, known)


EXCHANGE_ON_GPUS = """
import torch, torch.distributed as dist
from ulysses_comm.bootstrap import init_distributed
from ulysses_comm.doctor import check_exchange
launch = init_distributed()
check_exchange(dist.group.WORLD, launch.device)
print(launch.backend.name)
dist.destroy_process_group()
"""


def run_on_gpus(kind: hardware.DeviceKind, folder: Path) -> list[str]:
    count = min(hardware.device_count(kind), 4)
    if count < 2:
        pytest.skip(f"needs two {kind} devices")
    (folder / "program.py").write_text(EXCHANGE_ON_GPUS)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={count}", str(folder / "program.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(set(done.stdout.split()))


@pytest.mark.musa
def test_mccl_carries_uneven_exchanges(tmp_path: Path) -> None:
    assert run_on_gpus("musa", tmp_path) == ["mccl"]


@pytest.mark.gpu
def test_nccl_carries_uneven_exchanges(tmp_path: Path) -> None:
    assert dist.is_nccl_available()
    assert run_on_gpus("cuda", tmp_path) == ["nccl"]
