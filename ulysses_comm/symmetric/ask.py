"""Let every rank of a group hear what every other has to say, through the group's store."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_PREFIX = "ulysses_comm/transport"

PATIENCE = timedelta(seconds=120)
"""How long ranks wait for one another at least; setting up a GPU takes some of it."""


def ask_all(group: dist.ProcessGroup, answer: Any, *, patience: timedelta = PATIENCE) -> list[Any]:
    """Return the answers of all ranks, in rank order, the same list on each of them.

    Args:
        group: The ranks; each calls this equally often.
        answer: What this rank says; anything that JSON holds.
        patience: How long to wait for the others.

    Raises:
        RuntimeError: If a rank says nothing in time.
    """
    store, rank = group.get_group_store(), group.rank()
    # The count lives in the store, so that every object that stands for the group shares it.
    call = store.add(f"{_PREFIX}/calls/{rank}", 1)
    store.set(f"{_PREFIX}/{call}/{rank}", json.dumps(answer))
    answers = []
    deadline = time.monotonic() + patience.total_seconds()
    for other in range(group.size()):
        key = f"{_PREFIX}/{call}/{other}"
        try:
            store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            answers.append(json.loads(store.get(key)))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank} waited {patience.total_seconds():g} s for rank {other} to agree on a "
                "transport: expected every rank of the group to call use_transport; or, where "
                "ULYSSES_COMM_TRANSPORT is set, which has to be alike on all ranks, to make its "
                "first exchange. Look for that rank's own error."
            ) from error
    return answers
