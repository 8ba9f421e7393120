"""Run a function on gloo processes of this machine, and survive whatever becomes of them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


class RanksFailedError(Exception):
    """A rank raised, died or did not end in time; the message says what it did."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float) -> list:
    """Call `function(group, *args)` on every rank of a new gloo group; results in rank order.

    Args:
        function: A module-level function of an importable module.
        world_size: Number of processes.
        *args: Further arguments, anything that can be pickled.
        timeout: Seconds for all of it.

    Raises:
        RanksFailedError: If a rank raises, is killed (gloo aborts the process where peers' messages
            differ in size) or is not done in time. The other ranks are killed then.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.peers.preload"])
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        ranks = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(theirs, rank, world_size, folder, timeout, function, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return _collect(ranks, time.monotonic() + timeout)
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join()
                pipe.close()


def _collect(ranks: list[tuple[Any, Connection]], deadline: float) -> list:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksFailedError("hangs")
        for pipe in ready:
            try:
                succeeded, answer = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, answer = False, "ends without an answer"
            if not succeeded:
                raise RanksFailedError(_death(ranks) or answer)
            results[waiting[pipe]] = answer
    return [results[rank] for rank in range(len(ranks))]


def _death(ranks: list[tuple[Any, Connection]]) -> str | None:
    """How a rank died, or None: where one did, what others raise is about its silence."""
    for _ in range(20):
        for process, _ in ranks:
            code = process.exitcode
            if code is not None and code < 0:
                return f"aborts the process ({signal.Signals(-code).name})"
            if code is not None:
                return f"ends the process with exit code {code}"
        time.sleep(0.05)
    return None


def _rank_main(
    pipe: Connection,
    rank: int,
    world_size: int,
    folder: str,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # What gloo and torch print on their way down is told to the parent in other words.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(os.path.join(folder, "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        answer = True, function(dist.group.WORLD, *args)
    except Exception as error:
        (first, *_) = str(error).splitlines() or [""]
        answer = False, f"{type(error).__name__}: {first}"
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    # Others may still be in a collective: the store's file and the sockets stay until the kill.
    time.sleep(timeout)
    os._exit(0)
