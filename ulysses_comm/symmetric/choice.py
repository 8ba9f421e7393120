"""Which transport carries the exchanges of a group: chosen once, by all of its ranks, and kept."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from ulysses_comm.group import Group, resolve_group
from ulysses_comm.hardware import Choice
from ulysses_comm.symmetric.ability import (
    Ability,
    device_of,
    examine_rank,
    host_name,
    obstacles_between,
    serves_cuda,
    timeout_of,
)
from ulysses_comm.symmetric.ask import PATIENCE, ask_all
from ulysses_comm.symmetric.memory import TorchMemory
from ulysses_comm.symmetric.state import GroupState

TransportName = Literal["auto", "collective", "symm_mem"]

_CALLER = "the caller"

NAMES = ("auto", "collective", "symm_mem")

TRANSPORT_VARIABLE = "ULYSSES_COMM_TRANSPORT"
"""Environment variable that decides for every group: auto, collective or symm_mem."""

DEFAULT_SLOTS = 4
"""Receive slots of a size: enough for the results that one layer holds at a time."""


@dataclass(frozen=True)
class TransportChoice(Choice):
    """The transport of a group, "collective" or "symm_mem", and why."""


@dataclass
class _Chosen:
    choice: TransportChoice
    state: GroupState | None = None


def use_transport(
    group: Group,
    name: TransportName = "auto",
    *,
    slots: int = DEFAULT_SLOTS,
    timeout: timedelta | None = None,
) -> TransportChoice:
    """Choose what carries the exchanges of a group from now on. Every rank of it has to call this.

    Args:
        group: As in `scatter_heads_gather_seqlen`.
        name: "collective" is the group's own all-to-all. "symm_mem" stores straight into the peers'
            memory, over NVLink, without a send buffer; docs/nvlink.md says what it promises.
            "auto" is symm_mem where every rank is known to be able to, else collective. The
            environment's ULYSSES_COMM_TRANSPORT, if set, wins over this argument.
        slots: Results of one size class that can be lent, that is, lie where the peers wrote them.
            Further ones that are alive at the same time, and all of them with 0, are copied to
            ordinary memory.
        timeout: How long a rank waits for a peer inside an exchange before it gives up and its
            process ends with an error; None for the group's own timeout.

    Returns:
        The transport, "collective" or "symm_mem", and the reason, the same on all ranks.

    Raises:
        ValueError: If an argument is none of what it may be.
        RuntimeError: If symm_mem was asked for by name and a rank cannot; every rank raises, and
            the text names the ranks and reasons. Also if ranks ask for different things.
    """
    process_group = resolve_group(group)
    wish, source = _wish(name)
    _check_numbers(slots, timeout)
    if process_group is None or process_group.size() == 1:
        return TransportChoice("collective", "a lone rank exchanges nothing")
    chosen = _choose(process_group, wish, source, slots, timeout)
    _CHOSEN[process_group] = chosen
    return chosen.choice


def explain_transport(group: Group) -> str:
    """Say in one line what carries the exchanges of a group, and why; asks no other rank."""
    process_group = resolve_group(group)
    if process_group is None or process_group.size() == 1:
        return "collective: a lone rank exchanges nothing"
    chosen = _CHOSEN.get(process_group)
    if chosen is None:
        wish = os.environ.get(TRANSPORT_VARIABLE)
        if wish:
            return f"{wish}, by {TRANSPORT_VARIABLE}: decided at the group's first exchange"
        chosen = _UNASKED
    line = f"{chosen.choice.name}: {chosen.choice.reason}"
    return line if chosen.state is None else f"{line}; {chosen.state.describe()}"


def transport_of(group: Group) -> Literal["collective", "symm_mem"]:
    """Name what carries the exchanges of a group.

    Where only the environment has chosen, the first call for a group may make its ranks agree, as
    their first exchange would.
    """
    process_group = resolve_group(group)
    if process_group is None or process_group.size() == 1 or state_of(process_group) is None:
        return "collective"
    return "symm_mem"


def choice_on_this_machine() -> TransportChoice:
    """Return what "auto" would choose for one rank on each GPU that this process sees."""
    count = torch.cuda.device_count()
    if count < 2:
        return TransportChoice("collective", f"torch sees {count} CUDA GPU(s), and it takes two")
    abilities = [examine_rank(torch.device("cuda", index)) for index in range(count)]
    obstacles = obstacles_between(abilities, strict=True)
    if obstacles:
        return TransportChoice("collective", f"no symmetric memory: {'; '.join(obstacles)}")
    return TransportChoice("symm_mem", f"{count} GPUs, every pair of them joined by NVLink")


def state_of(group: dist.ProcessGroup) -> GroupState | None:
    """Return what a group exchanges through if that is symmetric memory, else None.

    The first call for a group asks the environment, and may make the ranks agree.
    """
    chosen = _CHOSEN.get(group)
    if chosen is None:
        chosen = _UNASKED
        if os.environ.get(TRANSPORT_VARIABLE):
            name, source = _wish("collective")
            if name == "collective":  # as without it: nothing to wait for at a first exchange
                chosen = _Chosen(TransportChoice(name, f"{source} asked for it"))
            else:
                chosen = _choose(group, name, source, DEFAULT_SLOTS, None)
        _CHOSEN[group] = chosen
    return chosen.state


def way_of(
    group: dist.ProcessGroup, inputs: Sequence[torch.Tensor], *, async_op: bool
) -> str | None:
    """Name how an exchange would travel, which ranks have to agree on; asks no other rank.

    The collective serves `start_...` and the plain call alike; symmetric memory does not. None if
    there is nothing to compare.
    """
    form = "start_... (pull)" if async_op else "the plain call (push)"
    chosen = _CHOSEN.get(group)
    if chosen is None:
        wish = os.environ.get(TRANSPORT_VARIABLE, "collective")
        undecided = wish != "collective" and serves_cuda(group)
        return f"{wish}, to be decided, {form}" if undecided else None
    if chosen.state is None or not chosen.state.serves(inputs):
        return None
    return f"symm_mem, {form}"


def install_state(group: dist.ProcessGroup, state: GroupState, reason: str) -> None:
    """Exchange through a state that was made elsewhere: tests bring their own memory."""
    _CHOSEN[group] = _Chosen(TransportChoice("symm_mem", reason), state)


_UNASKED = _Chosen(TransportChoice("collective", "use_transport was not called for this group"))

_CHOSEN: weakref.WeakKeyDictionary[dist.ProcessGroup, _Chosen] = weakref.WeakKeyDictionary()


def check_wish(name: str) -> None:
    """Check a transport's name, and the environment's, before anything is started for it.

    Raises:
        ValueError: If there is no such transport.
    """
    _wish(name)


def _wish(name: str) -> tuple[str, str]:
    """Return the transport that is asked for, and by whom."""
    source = _CALLER
    if os.environ.get(TRANSPORT_VARIABLE):
        name, source = os.environ[TRANSPORT_VARIABLE], f"{TRANSPORT_VARIABLE} in the environment"
    if name not in NAMES:
        raise ValueError(f"{source} asked for transport {name!r}: expected {', '.join(NAMES)}.")
    return name, source


def _check_numbers(slots: int, timeout: timedelta | None) -> None:
    if isinstance(slots, bool) or not isinstance(slots, int) or not 0 <= slots < 255:
        raise ValueError(f"slots={slots!r}: expected a whole number from 0 to 254.")
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise ValueError(f"timeout={timeout!r}: expected a positive timedelta, or None.")


def _choose(
    group: dist.ProcessGroup, name: str, source: str, slots: int, timeout: timedelta | None
) -> _Chosen:
    asked = TransportChoice("collective", f"{source} asked for it")
    if not serves_cuda(group):
        if name == "collective":
            return _Chosen(asked)
        # Known to every rank without asking. The environment speaks to all groups of a program,
        # those for the CPU among them.
        wish = name if source == _CALLER else "auto"
        return _refuse(wish, source, ["the group has no backend for CUDA tensors"])
    device = device_of(group)
    before = _CHOSEN.get(group)
    if before is not None and before.state is not None:
        before.state.settle()  # its memory may go, and every rank's launches are over by then
    own_timeout = timeout_of(group, device)
    patience = max(PATIENCE, own_timeout)  # a rank may come as late as to the group's collectives
    seconds = (timeout or own_timeout).total_seconds()
    # Ranks that want the collective say so too: the others would wait for them.
    wish_of_rank = [name, slots, seconds] if name != "collective" else [name, None, None]
    answer_of_rank = {"wish": wish_of_rank, "ability": _examined(device).to_json()}
    answers = ask_all(group, answer_of_rank, patience=patience)
    _check_same_wish([answer["wish"] for answer in answers])
    if name == "collective":
        return _Chosen(asked)
    abilities = [Ability.from_json(answer["ability"]) for answer in answers]
    obstacles = obstacles_between(abilities, strict=name == "auto")
    if obstacles:
        return _refuse(name, source, obstacles)
    if before is not None and before.state is not None and before.state.fits(slots, seconds):
        return before
    problem, state = "", None
    try:
        state = GroupState(group, device, TorchMemory(group, device), slots, seconds)
    except Exception as error:  # whatever it is, the other ranks have to hear of it
        problem = f"{type(error).__name__}: {error}"
    problems = [
        f"rank {rank} cannot set up symmetric memory: {text}"
        for rank, text in enumerate(ask_all(group, problem))
        if text
    ]
    if problems:
        return _refuse(name, source, problems)
    known = all(ability.linked is not None for ability in abilities)
    joined = "joined by NVLink" if known else "given access to each other by CUDA"
    reason = f"{source} asked for {name}, and every pair of ranks is {joined}"
    return _Chosen(TransportChoice("symm_mem", reason), state)


def _examined(device: torch.device) -> Ability:
    """Return what this rank can do; that it cannot tell is a problem that the others hear of."""
    try:
        return examine_rank(device)
    except Exception as error:
        problem = f"its GPU cannot be examined ({type(error).__name__}: {error})"
        return Ability(host_name(), str(device), (), (), None, (problem,))


def _check_same_wish(wishes: list[list[Any]]) -> None:
    if any(wish != wishes[0] for wish in wishes):
        lines = [
            f"rank {rank} asks for {wish[0]}"
            + ("" if wish[1] is None else f" with slots={wish[1]}, timeout={wish[2]:g} s")
            for rank, wish in enumerate(wishes)
        ]
        raise RuntimeError(
            "The ranks ask for different transports: expected the same of all, and the same "
            f"{TRANSPORT_VARIABLE} in the environment, which wins over the call.\n  "
            + "\n  ".join(lines)
        )


def _refuse(name: str, source: str, reasons: list[str]) -> _Chosen:
    text = "; ".join(reasons)
    if name == "symm_mem":
        raise RuntimeError(
            f"{source} asked for transport 'symm_mem', which this group cannot use: {text}. Ask "
            "for 'auto' to go without it here, or for 'collective'."
        )
    return _Chosen(TransportChoice("collective", f"no symmetric memory: {text}"))
