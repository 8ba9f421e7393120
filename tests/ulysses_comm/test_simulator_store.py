"""The store of a simulated group waits in lock step."""

import datetime

import pytest
import torch.distributed as dist

from ulysses_comm.simulate import DeadlockError, SimulationError, simulate, simulate_world


def test_ranks_wait_for_each_others_keys():
    def step(group):
        store = group.get_group_store()
        rank, size = group.rank(), group.size()
        store.set(f"value {rank}", str(rank * 10))
        store.wait([f"value {peer}" for peer in range(size)], datetime.timedelta(seconds=1))
        return [store.get(f"value {peer}") for peer in range(size)]

    assert simulate(3, step).results == [[b"0", b"10", b"20"]] * 3


def test_get_waits_too_and_a_prefix_works():
    def step(group):
        store = dist.PrefixStore("mine", group.get_group_store())
        if group.rank() == 0:
            return store.get("late")
        store.set("late", b"\x00\xff")
        return group.get_group_store().list_keys()

    assert simulate(2, step).results == [b"\x00\xff", ["mine/late"]]


def test_a_key_that_nobody_sets_is_a_deadlock_at_once():
    def step(group):
        if group.rank() != 1:
            group.get_group_store().wait(["b", "a"], datetime.timedelta(days=1))

    with pytest.raises(DeadlockError) as caught:
        simulate(3, step)
    assert "ranks 0, 2: waiting in a wait for 'a', 'b' in the store of group" in str(caught.value)
    assert "rank 1: returned" in str(caught.value)


def test_polling_a_store_lets_the_others_on():
    def step(group):
        store = group.get_group_store()
        if group.rank() == 1:
            store.set("ready", "1")
            return 0
        polls = 0
        while not store.check(["ready"]):
            polls += 1
        return polls

    assert simulate(2, step).results[0] < 3


def test_counters_and_other_operations():
    def step(group):
        store = group.get_group_store()
        total = store.add("count", 2)
        dist.barrier(group=group)
        seen = (store.get("count"), store.add("count", 0))
        store.append("log", "x")
        first = store.compare_set("chosen", "", str(group.rank()))
        again = store.compare_set("chosen", "other", "never")
        dist.barrier(group=group)
        deleted = store.delete_key("count")
        store.multi_set([f"a{group.rank()}", f"b{group.rank()}"], ["1", b"2"])
        values = store.multi_get([f"a{group.rank()}", f"b{group.rank()}"])
        assert store.has_extended_api()
        return total, seen, first, again, deleted, values, store.get("log"), store.num_keys()

    ranks = simulate(2, step).results
    assert sorted(rank[0] for rank in ranks) == [2, 4]
    assert [rank[1] for rank in ranks] == [(b"4", 4)] * 2
    assert ranks[0][2] == ranks[1][2] == ranks[0][3] == ranks[1][3]
    assert sorted(rank[4] for rank in ranks) == [False, True]
    assert [rank[5] for rank in ranks] == [[b"1", b"2"]] * 2
    assert [rank[6] for rank in ranks] == [b"xx"] * 2


def test_groups_have_stores_of_their_own():
    def program():
        pair = dist.new_group([0, 1])
        world = dist.group.WORLD
        if dist.get_rank() == 2:
            return None
        pair.get_group_store().set("key", "pair")
        world.get_group_store().set("key", "world")
        dist.barrier(pair)
        return pair.get_group_store().get("key"), world.get_group_store().get("key")

    assert simulate_world(3, program).results[:2] == [(b"pair", b"world")] * 2


def test_a_foreign_thread_cannot_wait():
    store = simulate(1, lambda group: group.get_group_store()).results[0]
    with pytest.raises(SimulationError, match="no rank"):
        store.wait(["key"])
