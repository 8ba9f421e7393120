"""The comparison of ranks inside a graph, as a registered operator.

No `from __future__ import annotations` here: `torch.library.custom_op` reads the annotations.
"""

from collections.abc import Sequence

import torch

from ulysses_comm.agreement import settle_in_graph
from ulysses_comm.collective import group_of_graph, keep_in_order


@torch.library.custom_op("ulysses_comm::check_agreement", mutates_args=())
def check_agreement(
    split_sizes: Sequence[int], other_facts: str, group_name: str, rank: int, handle: int
) -> None:
    """Let the ranks compare what they are about to exchange; see `settle_in_graph`."""
    group = group_of_graph(group_name, rank, len(split_sizes))
    settle_in_graph(list(split_sizes), other_facts, group, handle)


@check_agreement.register_fake
def _(
    split_sizes: Sequence[int], other_facts: str, group_name: str, rank: int, handle: int
) -> None:
    return None


keep_in_order(check_agreement)
