"""Ranks that disagree: the error names the ranks, the call and both values."""

import pytest
import torch
import torch.distributed as dist

from ulysses_comm.simulate import MismatchError, SimulationError, simulate

meta = torch.device("meta")


def a2a(group, rows=4, row=(2,), dtype=torch.float32, out_splits=None, in_splits=None, device=None):
    sent = torch.zeros(rows, *row, dtype=dtype, device=device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, out_splits, in_splits, group=group)


def ones(*shape, **options):
    return torch.ones(*shape, **options)


# What the odd rank does instead, and what the error must say about the others and about it.
ODD_CALLS = {
    "another collective": (
        lambda g: dist.all_reduce(ones(2), group=g),
        lambda g: dist.barrier(group=g),
        ["called all_reduce(reduce op=SUM, dtype=float32, shape=(2,)", "rank 2 called barrier()"],
    ),
    "dtype": (
        lambda g: a2a(g, 3),
        lambda g: a2a(g, 3, dtype=torch.bfloat16),
        ["both called all_to_all_single", "dtype is float32 on rank 0 and bfloat16 on rank 2"],
    ),
    "trailing shape": (
        lambda g: a2a(g, 3, (2, 4)),
        lambda g: a2a(g, 3, (4, 2)),
        ["shape of a row is (2, 4) on rank 0 and (4, 2) on rank 2"],
    ),
    "device type": (
        lambda g: a2a(g, 3),
        lambda g: a2a(g, 3, device=meta),
        ["device is cpu on rank 0 and meta on rank 2"],
    ),
    "reduce op": (
        lambda g: dist.all_reduce(ones(2), dist.ReduceOp.SUM, group=g),
        lambda g: dist.all_reduce(ones(2), dist.ReduceOp.MAX, group=g),
        ["reduce op is SUM on rank 0 and MAX on rank 2"],
    ),
    "root": (
        lambda g: dist.broadcast(ones(2), group_src=1, group=g),
        lambda g: dist.broadcast(ones(2), group_src=0, group=g),
        ["root is 1 on rank 0 and 0 on rank 2"],
    ),
    "shape and dtype at once": (
        lambda g: dist.all_reduce(ones(2), group=g),
        lambda g: dist.all_reduce(ones(3, dtype=torch.float64), group=g),
        ["dtype is float32 on rank 0 and float64", "shape is (2,) on rank 0 and (3,) on rank 2"],
    ),
    "number of coalesced tensors": (
        lambda g: g.allreduce_coalesced([ones(2), ones(2)], dist.AllreduceCoalescedOptions()),
        lambda g: g.allreduce_coalesced([ones(2)], dist.AllreduceCoalescedOptions()),
        ["shape is ((2,), (2,)) on rank 0 and (2,) on rank 2"],
    ),
    "list and tensor form": (
        lambda g: g._allgather_base(torch.empty(6), ones(2)),
        lambda g: dist.all_gather([torch.empty(2) for _ in range(3)], ones(2), group=g),
        ["called all_gather_into_tensor(", "called all_gather("],
    ),
    "send sizes": (
        lambda g: a2a(g, 6, in_splits=[2, 2, 2], out_splits=[2, 2, 2]),
        lambda g: a2a(g, 6, in_splits=[1, 3, 2], out_splits=[2, 2, 2]),
        [
            "ranks disagree in all_to_all_single #1",
            "rank 2 sends 1 rows to rank 0, which expects 2",
            "rank 2 sends 3 rows to rank 1, which expects 2",
        ],
    ),
    "receive sizes": (
        lambda g: a2a(g, 6, in_splits=[2, 2, 2], out_splits=[2, 2, 2]),
        lambda g: a2a(g, 6, in_splits=[2, 2, 2], out_splits=[0, 4, 2]),
        [
            "rank 0 sends 2 rows to rank 2, which expects 0",
            "rank 1 sends 2 rows to rank 2, which expects 4",
        ],
    ),
    "a tensor of an all_to_all": (
        lambda g: dist.all_to_all([torch.empty(2)] * 3, [ones(2)] * 3, group=g),
        lambda g: dist.all_to_all([torch.empty(2)] * 3, [ones(2), ones(5), ones(2)], group=g),
        ["rank 2 sends (5,) float32 on cpu to rank 1, which expects (2,) float32 on cpu"],
    ),
    "a tensor of an all_gather": (
        lambda g: dist.all_gather([torch.empty(2) for _ in range(3)], ones(2), group=g),
        lambda g: dist.all_gather([torch.empty(2) for _ in range(3)], ones(3), group=g),
        ["rank 2 sends (3,) float32 on cpu to rank 0, which expects (2,) float32 on cpu"],
    ),
    "a tensor of a gather": (
        lambda g: dist.gather(
            ones(2), [torch.empty(2)] * 3 if g.rank() == 0 else None, group_dst=0, group=g
        ),
        lambda g: dist.gather(ones(4), None, group_dst=0, group=g),
        ["rank 2 sends (4,) float32 on cpu to rank 0, which expects (2,)"],
    ),
    "a tensor of a scatter": (
        lambda g: dist.scatter(
            torch.empty(2), [ones(2)] * 3 if g.rank() == 0 else None, group_src=0, group=g
        ),
        lambda g: dist.scatter(torch.empty(1), None, group_src=0, group=g),
        ["rank 0 sends (2,) float32 on cpu to rank 2, which expects (1,)"],
    ),
}


@pytest.mark.parametrize("name", ODD_CALLS)
def test_the_error_names_ranks_call_and_both_values(name):
    usual, odd, texts = ODD_CALLS[name]

    def step(group):
        dist.barrier(group=group)
        (odd if group.rank() == 2 else usual)(group)

    with pytest.raises(MismatchError) as caught:
        simulate(3, step)
    message = str(caught.value)
    for text in [*texts, "#1 of group 'simulated_0' (ranks 0-2)"]:
        assert text in message, message
    # The traceback leads to the line of the rank that arrived last or differed first.
    assert any(entry.name == "step" for entry in caught.traceback)
    assert isinstance(caught.value, SimulationError)
    assert isinstance(caught.value, RuntimeError)


def test_a_mismatch_that_a_rank_swallows_still_ends_the_run():
    def step(group):
        try:
            if group.rank() == 0:
                dist.barrier(group=group)
            else:
                dist.all_reduce(torch.ones(1), group=group)
        except SimulationError:
            return "all is well"

    with pytest.raises(MismatchError):
        simulate(2, step)


def test_ranks_may_differ_where_no_agreement_is_needed():
    counts = [[0, 5], [2, 1]]

    def step(group):
        rank = group.rank()
        receives = [row[rank] for row in counts]
        received = torch.empty(sum(receives), 2)
        sent = torch.ones(sum(counts[rank]), 2)
        dist.all_to_all_single(received, sent, receives, counts[rank], group=group)
        return received.shape[0]

    assert simulate(2, step).results == [2, 6]
