import pytest
import torch
import torch.distributed as dist

from ulysses_comm.simulate import simulate
from ulysses_comm.simulator.errors import DeadlockError, MismatchError


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_all_to_all_single_delivers_uneven_slices_in_source_order(world_size):
    def step(group):
        rank = group.rank()
        # Rank r sends (r + d) % 3 rows to rank d; each row names its source and destination.
        sends = [(rank + peer) % 3 for peer in range(world_size)]
        rows = [[rank, peer] for peer, count in enumerate(sends) for _ in range(count)]
        sent = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)
        received = torch.full((sum(sends), 2), -1)
        dist.all_to_all_single(received, sent, sends, sends, group=group)
        return received.tolist()

    for rank, received in enumerate(simulate(world_size, step).results):
        assert received == [
            [peer, rank] for peer in range(world_size) for _ in range((rank + peer) % 3)
        ]


def test_a_rank_that_raises_ends_the_run_with_its_own_exception():
    error = KeyError("mine")

    def step(group):
        if group.rank() == 1:
            raise error
        dist.barrier(group=group)

    with pytest.raises(KeyError) as caught:
        simulate(3, step)
    assert caught.value is error
    assert caught.traceback[-1].name == "step"
    assert any("rank 1 of 3" in note for note in caught.value.__notes__)


def test_a_rank_that_returns_early_is_a_deadlock_that_names_it():
    def step(group):
        if group.rank() != 2:
            dist.barrier(group=group)

    with pytest.raises(DeadlockError, match=r"missing: 2[\s\S]*rank 2 has returned"):
        simulate(3, step)


def test_split_sizes_that_disagree_are_named_with_both_values():
    def step(group):
        sends = [2, 3] if group.rank() == 0 else [2, 2]
        sent = torch.zeros(sum(sends))
        dist.all_to_all_single(torch.zeros(4), sent, [2, 2], sends, group=group)

    with pytest.raises(MismatchError, match="rank 0 sends 3 rows to rank 1, which expects 2"):
        simulate(2, step)
