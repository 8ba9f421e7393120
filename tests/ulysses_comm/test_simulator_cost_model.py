"""Predicted times against numbers worked out by hand; docs/simulator.md repeats the first one."""

import pytest
import torch
import torch.distributed as dist

from ulysses_comm.simulate import (
    CostModel,
    Link,
    Prediction,
    head_exchange_bytes,
    predict,
    simulate,
    simulate_world,
)
from ulysses_comm.simulator.traffic import Traffic

MICRO = 1e-6
# 1 byte per microsecond keeps the arithmetic readable.
SLOW = Link(latency=100 * MICRO, bandwidth=1e6)
FAST = Link(latency=10 * MICRO, bandwidth=10e6)


def micros(seconds):
    return pytest.approx(seconds * MICRO)


def test_one_level_exchange_by_hand():
    sent = [[9, 40, 10], [20, 9, 0], [5, 70, 9]]
    # Sent: 50, 20, 75. Received: 25, 110, 10. The busiest port receives 110 bytes.
    assert CostModel.one_level(SLOW).all_to_all_seconds(sent) == micros(100 + 110)


def test_messages_cost_time_of_their_own():
    link = Link(latency=100 * MICRO, bandwidth=1e6, per_message=7 * MICRO)
    model = CostModel.one_level(link)
    # Rank 0 sends 2 messages with 30 bytes; empty ones are not sent.
    assert model.all_to_all_seconds([[0, 10, 20], [0, 0, 0], [0, 0, 0]]) == micros(100 + 14 + 30)
    assert model.all_to_all_seconds([[0, 30, 0], [0, 0, 0], [0, 0, 0]]) == micros(100 + 7 + 30)


def test_what_a_rank_keeps_is_free():
    assert CostModel.one_level(SLOW).all_to_all_seconds([[1000, 0], [0, 1000]]) == 0


def test_two_levels_by_hand():
    model = CostModel.two_level(ranks_per_node=2, intra=FAST, inter=SLOW)
    sent = [
        [0, 500, 10, 20],
        [100, 0, 0, 0],
        [0, 0, 0, 2000],
        [0, 0, 0, 0],
    ]
    # Inside: rank 2 sends 2000 bytes: 10 + 200. Between: rank 0 sends 30 bytes: 100 + 30.
    assert model.all_to_all_seconds(sent) == micros(210)
    sent[2][3] = 1000
    # Inside now 10 + 100; between, 130, is the longer.
    assert model.all_to_all_seconds(sent) == micros(130)
    # The same bytes between ranks that share a node, given by their ranks in the world.
    pair = [[0, 1000], [0, 0]]
    assert model.all_to_all_seconds(pair, ranks=[2, 3]) == micros(10 + 100)
    assert model.all_to_all_seconds(pair, ranks=[1, 2]) == micros(100 + 1000)


class TestCollectives:
    """Four ranks, one level, 40 bytes per rank: shares of 10 bytes."""

    MODEL = CostModel.one_level(SLOW)

    def seconds(self, step):
        prediction = predict(simulate(4, step).traffic, self.MODEL)
        assert len(prediction.seconds) == 1
        assert prediction.total == prediction.seconds[0]
        return prediction.total

    def test_all_reduce_scatters_and_gathers(self):
        step = lambda g: dist.all_reduce(torch.ones(10), group=g)  # noqa: E731
        assert self.seconds(step) == micros(2 * (100 + 30))

    def test_broadcast_scatters_from_its_root_and_gathers(self):
        # The root sends three shares; then every other rank receives what it has not: three shares
        # for the root's neighbours is two of the others' and the root's own.
        step = lambda g: dist.broadcast(torch.ones(10), group_src=2, group=g)  # noqa: E731
        assert self.seconds(step) == micros((100 + 30) + (100 + 30))

    def test_reduce_scatters_and_collects_on_its_root(self):
        step = lambda g: dist.reduce(torch.ones(10), group_dst=1, group=g)  # noqa: E731
        assert self.seconds(step) == micros((100 + 30) + (100 + 30))

    def test_gathers_and_exchanges_are_one_phase(self):
        step = lambda g: g._allgather_base(torch.empty(40), torch.ones(10)).wait()  # noqa: E731
        assert self.seconds(step) == micros(100 + 120)
        step = lambda g: dist.all_to_all_single(torch.empty(8), torch.ones(8), group=g)  # noqa: E731
        assert self.seconds(step) == micros(100 + 24)

    def test_a_barrier_costs_its_messages(self):
        link = Link(latency=100 * MICRO, bandwidth=1e6, per_message=MICRO)
        traffic = simulate(4, lambda g: dist.barrier(group=g)).traffic
        assert predict(traffic, CostModel.one_level(link)).total == micros(103)

    def test_a_message_costs_the_link_that_it_crosses(self):
        def program():
            if dist.get_rank() == 1:
                dist.send(torch.ones(25), 2)
            if dist.get_rank() == 2:
                dist.recv(torch.ones(25), 1)

        traffic = simulate_world(4, program).traffic
        apart = CostModel.two_level(ranks_per_node=2, intra=FAST, inter=SLOW)
        together = CostModel.two_level(ranks_per_node=4, intra=FAST, inter=SLOW)
        assert predict(traffic, apart).total == micros(100 + 100)
        assert predict(traffic, together).total == micros(10 + 10)


def test_groups_that_share_no_rank_communicate_at_the_same_time():
    def program():
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        rank = dist.get_rank()
        size = 10 if rank < 2 else 30
        dist.all_reduce(torch.ones(size), group=groups[rank // 2])
        dist.all_to_all_single(torch.empty(4), torch.ones(4))

    traffic = simulate_world(4, program).traffic
    prediction = predict(traffic, CostModel.one_level(SLOW))
    # 10 floats in halves of 20 bytes, 30 floats in halves of 60; then all four: 3 x 4 bytes.
    assert sorted(prediction.seconds) == [micros(112), micros(240), micros(320)]
    assert prediction.total == micros(320 + 112)


def test_an_empty_record_takes_no_time():
    assert predict(Traffic(3), CostModel.one_level(SLOW)) == Prediction([], 0.0)


def test_an_exchange_of_heads_without_running_it():
    sent = head_exchange_bytes([3, 0, 1], 16)
    assert sent == [[48] * 3, [0] * 3, [16] * 3]

    def step(group):
        tokens = [3, 0, 1]
        mine = torch.zeros(3 * tokens[group.rank()], 2, 4, dtype=torch.bfloat16)
        received = torch.empty(4, 2, 4, dtype=torch.bfloat16)
        splits = [tokens[group.rank()]] * 3
        dist.all_to_all_single(received, mine, tokens, splits, group=group)

    assert simulate(3, step).traffic[0].sent == sent


def test_64_ranks_are_simulated_and_predicted():
    def step(group):
        sent = torch.zeros(64, 100, dtype=torch.uint8)
        dist.all_to_all_single(torch.empty_like(sent), sent, group=group)

    traffic = simulate(64, step).traffic
    model = CostModel.two_level(ranks_per_node=8, intra=FAST, inter=SLOW)
    # 7 peers inside, 56 outside.
    assert predict(traffic, model).total == micros(100 + 5600)


@pytest.mark.parametrize(
    "options",
    [
        {"latency": -1.0, "bandwidth": 1.0},
        {"latency": 0.0, "bandwidth": 0.0},
        {"latency": 0.0, "bandwidth": 1.0, "per_message": -1.0},
        {"latency": 0.0, "bandwidth": float("nan")},
    ],
)
def test_rejects_links_that_cannot_exist(options):
    with pytest.raises(ValueError, match="expected latency and per_message in seconds"):
        Link(**options)


@pytest.mark.parametrize(
    "options",
    [{"ranks_per_node": 2}, {"intra": FAST}, {"intra": FAST, "ranks_per_node": 0}],
)
def test_rejects_half_a_second_level(options):
    with pytest.raises(ValueError, match="two levels need both"):
        CostModel(inter=SLOW, **options)


@pytest.mark.parametrize(
    ("sent", "ranks"), [([[0, 1]], None), ([[0, 1], [1]], None), ([[0, 1], [1, 0]], [0])]
)
def test_rejects_a_matrix_that_fits_no_ranks(sent, ranks):
    with pytest.raises(ValueError, match="one row and one column per rank"):
        CostModel.one_level(SLOW).all_to_all_seconds(sent, ranks)
