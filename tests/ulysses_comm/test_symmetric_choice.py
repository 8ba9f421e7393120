"""Who decides on a transport, what ranks tell each other, and what they refuse."""

from __future__ import annotations

import importlib.util
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ulysses_comm as uc
from tests.bits import assert_same_bits
from tests.ulysses_comm.symmetric_ranks import FileMemory, folder_of, run_interpreted
from ulysses_comm import bootstrap, doctor
from ulysses_comm.symmetric import ability, choice
from ulysses_comm.symmetric.ability import Ability, obstacles_between
from ulysses_comm.symmetric.ask import ask_all
from ulysses_comm.symmetric.state import GroupState

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

GPUS = ("GPU-0", "GPU-1", "GPU-2")


def able(rank: int, **changes: Any) -> Ability:
    others = tuple(gpu for gpu in GPUS if gpu != GPUS[rank])
    return replace(
        Ability(
            host="host/1", device=GPUS[rank], reach=others, seen=GPUS, linked=others, problems=()
        ),
        **changes,
    )


def test_ranks_that_nvlink_joins_have_no_obstacle() -> None:
    assert obstacles_between([able(0), able(1), able(2)], strict=True) == []
    assert Ability.from_json(able(1).to_json()) == able(1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"host": "host/2"}, "the ranks run on more than one host"),
        ({"device": "GPU-0"}, "ranks 0 and 1 share one GPU"),
        ({"linked": ("GPU-2",)}, "between ranks 1 and 0: no NVLink joins their GPUs"),
        ({"reach": ("GPU-2",)}, "CUDA gives their GPUs no access to each other's memory"),
        ({"problems": ("triton is not installed",)}, "rank 1: triton is not installed"),
        ({"linked": None}, "NVML does not tell whether NVLink joins their GPUs"),
        ({"linked": None, "seen": ("GPU-1",)}, "neither CUDA nor NVML tells"),
    ],
)
def test_an_obstacle_is_named_with_its_ranks(changes: dict[str, Any], text: str) -> None:
    (found,) = obstacles_between([able(0), able(1, **changes)], strict=True)
    assert text in found


def test_links_that_nobody_tells_of_are_taken_where_the_caller_insists() -> None:
    ranks = [able(0, linked=None), able(1, linked=None)]
    assert obstacles_between(ranks, strict=False) == []
    assert len(obstacles_between(ranks, strict=True)) == 1


def test_a_ranks_gpu_is_the_one_that_its_group_is_bound_to() -> None:
    bound = mock.Mock(bound_device_id=torch.device("cuda", 3))
    with mock.patch.object(torch.cuda, "current_device", return_value=1):
        assert ability.device_of(bound) == torch.device("cuda", 3)
        for unbound in (mock.Mock(bound_device_id=None), object()):
            assert ability.device_of(unbound) == torch.device("cuda", 1)  # type: ignore[arg-type]


def test_nvml_is_asked_for_each_neighbour() -> None:
    class Nvml:
        """Three GPUs: the first is joined to the second, not to the third."""

        def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
            handle._obj.value = int(uuid[-1:]) + 1
            return 0

        def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
            count._obj.value = 3
            return 0

        def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:  # noqa: N802
            handle._obj.value = index + 1
            return 0

        def nvmlDeviceGetUUID(self, handle: Any, name: Any, size: int) -> int:  # noqa: N802
            name.value = f"GPU-{handle.value - 1}".encode()
            return 0

        def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, index: int, status: Any) -> int:  # noqa: N802
            assert index == 2
            status._obj.value = 0 if {one.value, other.value} == {1, 2} else 5
            return 0

    with mock.patch.object(ability, "_nvml", return_value=Nvml()):
        assert ability.nvlink_neighbours("GPU-0") == ("GPU-1",)
        assert ability.nvlink_neighbours("GPU-2") == ()
    with mock.patch.object(ability, "_nvml", return_value=None):
        assert ability.nvlink_neighbours("GPU-0") is None


def test_arguments_are_checked_before_anyone_is_asked() -> None:
    def step(group: Any) -> None:
        with pytest.raises(ValueError, match="'nvlink': expected auto, collective, symm_mem"):
            uc.use_transport(group, "nvlink")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="slots=-1: expected a whole number from 0 to 254"):
            uc.use_transport(group, slots=-1)
        for timeout in (timedelta(0), 30, 0.5):
            with pytest.raises(ValueError, match=r"timeout=.*: expected a positive timedelta"):
                uc.use_transport(group, timeout=timeout)  # type: ignore[arg-type]

    uc.simulate(2, step)


def test_ranks_without_gpus_stay_with_the_collective() -> None:
    def step(group: Any) -> list[str]:
        texts = [uc.explain_transport(group)]
        for name in ("auto", "collective"):
            uc.use_transport(group, name)  # type: ignore[arg-type]
            texts.append(uc.explain_transport(group))
        with pytest.raises(RuntimeError, match="cannot use: the group has no backend for CUDA"):
            uc.use_transport(group, "symm_mem")
        return texts

    assert uc.simulate(2, step).results[0] == [
        "collective: use_transport was not called for this group",
        "collective: no symmetric memory: the group has no backend for CUDA tensors",
        "collective: the caller asked for it",
    ]
    assert uc.use_transport(uc.LONE_RANK).reason == "a lone rank exchanges nothing"
    assert uc.explain_transport(uc.LONE_RANK).startswith("collective: ")


def test_the_environment_decides_for_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_COMM_TRANSPORT", "symm_mem")

    def step(group: Any) -> tuple[str, str]:
        before = uc.explain_transport(group)
        uc.scatter_seqlen_gather_heads(torch.ones(4, 1, 2), [2, 2], group)
        return before, uc.explain_transport(group)

    before, after = uc.simulate(2, step).results[0]
    assert before.startswith("symm_mem, by ULYSSES_COMM_TRANSPORT: decided at")
    # A group of the CPU is no error: the variable speaks to all groups of a program.
    assert after == "collective: no symmetric memory: the group has no backend for CUDA tensors"
    monkeypatch.setenv("ULYSSES_COMM_TRANSPORT", "fast")
    with pytest.raises(ValueError, match=r"ULYSSES_COMM_TRANSPORT in the environment .*'fast'"):
        uc.use_transport(uc.LONE_RANK)


def test_a_rank_that_says_nothing_is_named_in_time() -> None:
    store = dist.HashStore()
    group: Any = mock.Mock()
    group.get_group_store.return_value = store
    group.rank.return_value, group.size.return_value = 0, 3
    store.set("ulysses_comm/transport/1/1", '"here"')
    with pytest.raises(RuntimeError, match=r"rank 0 waited 0.05 s for rank 2 to agree .* alike"):
        ask_all(group, "here", patience=timedelta(seconds=0.05))


def test_a_variable_for_the_collective_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_COMM_TRANSPORT", "collective")

    def step(group: Any) -> str:
        if group.rank() == 0:
            assert choice.state_of(group) is None
        return uc.explain_transport(group)

    with (
        mock.patch.object(choice, "serves_cuda", return_value=True),
        mock.patch.object(choice, "ask_all", side_effect=AssertionError("nobody to ask")),
    ):
        told = uc.simulate(2, step).results
    assert told[0] == "collective: ULYSSES_COMM_TRANSPORT in the environment asked for it"
    assert told[1].startswith("collective, by ULYSSES_COMM_TRANSPORT")


def test_ranks_may_come_as_late_as_to_the_groups_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[timedelta] = []

    def ask(group: Any, answer: Any, *, patience: timedelta) -> list[Any]:
        waits.append(patience)
        raise RuntimeError("alone")

    monkeypatch.setattr(choice, "serves_cuda", lambda group: True)
    monkeypatch.setattr(choice, "device_of", lambda group: torch.device("cpu"))
    monkeypatch.setattr(choice, "examine_rank", lambda device: able(0))
    monkeypatch.setattr(choice, "ask_all", ask)
    for timeout in (timedelta(minutes=30), timedelta(seconds=5)):
        monkeypatch.setattr(choice, "timeout_of", lambda group, device, timeout=timeout: timeout)
        with pytest.raises(RuntimeError, match="alone"):
            choice._choose(mock.Mock(), "auto", "the caller", 4, None)
    assert waits == [timedelta(minutes=30), timedelta(seconds=120)]


def chooses(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    """Choose as on GPUs, with files for memory and abilities made up."""
    rank = group.rank()
    told: dict[str, Any] = {}
    mine = able(rank)

    def state(group: Any, device: Any, memory: Any, slots: int, seconds: float) -> GroupState:
        return GroupState(group, torch.device("cpu"), memory, slots, seconds)

    class Failing(FileMemory):
        def allocate(self, nbytes: int) -> Any:
            raise MemoryError("no room") if rank == 1 else RuntimeError("no peer")

    def examine(device: torch.device) -> Ability:
        if rank == 1:
            raise RuntimeError("CUDA error: the device is gone")
        return mine

    def memory(kind: type[FileMemory]) -> Any:
        return lambda group, device: kind(group, f"{folder}")

    def attempt(name: str, ask: str, **options: Any) -> None:
        try:
            told[name] = uc.use_transport(group, ask, **options)  # type: ignore[arg-type]
        except RuntimeError as error:
            told[name] = str(error)

    with (
        mock.patch.object(choice, "serves_cuda", return_value=True),
        mock.patch.object(choice, "examine_rank", side_effect=lambda device: mine),
        mock.patch.object(torch.cuda, "current_device", return_value=rank),
        mock.patch.object(choice, "GroupState", state),
        mock.patch.object(choice, "TorchMemory", memory(Failing)),
    ):
        attempt("memory fails", "auto")
        attempt("memory fails, insisting", "symm_mem")
        with mock.patch.object(choice, "TorchMemory", memory(FileMemory)):
            attempt("able", "auto", slots=2, timeout=timedelta(seconds=7))
            first = choice.state_of(group)
            attempt("again", "auto", slots=2, timeout=timedelta(seconds=7))
            told["kept"] = choice.state_of(group) is first
            q = torch.ones(2, 4, 8)
            uc.scatter_heads_gather_seqlen([q], [2, 2], group)
            told["explained"] = uc.explain_transport(group)
        attempt("different wishes", "auto" if rank == 0 else "symm_mem")
        attempt("one wants none of it", "collective" if rank == 0 else "symm_mem")
        attempt("none wants it", "collective")
        with (
            mock.patch.object(choice, "examine_rank", side_effect=examine),
            mock.patch.object(choice, "host_name", return_value=mine.host),
        ):
            attempt("a GPU that is lost", "auto")
        mine = able(rank, linked=() if rank == 0 else ("GPU-0",))
        attempt("no link", "auto")
        told["after"] = choice.state_of(group) is None
    gone = weakref.ref(first)
    del first
    told["gone"] = gone() is None
    assert_same_bits(uc.scatter_heads_gather_seqlen([q], [2, 2], group)[0], torch.ones(4, 2, 8))
    return told


@needs_triton
@pytest.mark.gloo
def test_all_ranks_choose_the_same(tmp_path: Path) -> None:
    one, other = run_interpreted(chooses, 2, folder_of(tmp_path))
    assert one == other
    problem = (
        "rank 0 cannot set up symmetric memory: RuntimeError: no peer; "
        "rank 1 cannot set up symmetric memory: MemoryError: no room"
    )
    assert one["memory fails"] == uc.TransportChoice(
        "collective", f"no symmetric memory: {problem}"
    )
    assert one["memory fails, insisting"] == (
        "the caller asked for transport 'symm_mem', which this group cannot use: "
        f"{problem}. Ask for 'auto' to go without it here, or for 'collective'."
    )
    reason = "the caller asked for auto, and every pair of ranks is joined by NVLink"
    assert one["able"] == one["again"] == uc.TransportChoice("symm_mem", reason)
    assert one["kept"]
    assert one["explained"] == (
        f"symm_mem: {reason}; gives up after 7 s; 0 of 2 slots of 2 MiB lent"
    )
    assert "rank 0 asks for auto" in one["different wishes"]
    assert "rank 1 asks for symm_mem" in one["different wishes"]
    assert one["one wants none of it"] == (
        "The ranks ask for different transports: expected the same of all, and the same "
        "ULYSSES_COMM_TRANSPORT in the environment, which wins over the call.\n"
        "  rank 0 asks for collective\n"
        "  rank 1 asks for symm_mem with slots=4, timeout=60 s"
    )
    assert one["none wants it"].reason == "the caller asked for it"
    assert one["a GPU that is lost"] == uc.TransportChoice(
        "collective",
        "no symmetric memory: rank 1: its GPU cannot be examined (RuntimeError: CUDA error: the "
        "device is gone)",
    )
    assert one["no link"].reason == (
        "no symmetric memory: between ranks 0 and 1: no NVLink joins their GPUs"
    )
    assert one["after"]
    assert one["gone"]


def test_a_program_starts_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="'nvlink': expected auto, collective, symm_mem"):
        uc.init_distributed("gloo", device="cpu", launcher="bare", transport="nvlink")  # type: ignore[arg-type]
    assert not dist.is_initialized()
    refusal = mock.patch.object(bootstrap, "use_transport", side_effect=RuntimeError("no NVLink"))
    with refusal, pytest.raises(RuntimeError, match="no NVLink"):
        uc.init_distributed("gloo", device="cpu", launcher="bare", transport="symm_mem")
    assert not dist.is_initialized()


def test_the_doctor_names_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_COMM_TRANSPORT", "fast")
    (check,) = doctor.run(timeout=1.0).checks
    assert check.passed is False
    assert "ULYSSES_COMM_TRANSPORT in the environment asked for transport 'fast'" in check.detail
