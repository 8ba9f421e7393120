"""Point-to-point messages between simulated ranks."""

import pytest
import torch
import torch.distributed as dist

from ulysses_comm.simulate import DeadlockError, MismatchError, simulate, simulate_world


def test_send_and_recv_in_both_orders():
    def step(group):
        if group.rank() == 0:
            dist.send(torch.arange(3.0), group_dst=1, group=group)
            back = torch.empty(2)
            dist.recv(back, group_src=1, group=group)
            return back.tolist()
        value = torch.empty(3)
        dist.recv(value, group_src=0, group=group)
        dist.send(value[:2] * 10, group_dst=0, group=group)
        return value.tolist()

    run = simulate(2, step)
    assert run.results == [[0.0, 10.0], [0.0, 1.0, 2.0]]
    assert [(r.kind, r.ranks, r.index, r.sent) for r in run.traffic] == [
        ("send", (0, 1), 0, [[0, 12], [0, 0]]),
        ("send", (1, 0), 0, [[0, 8], [0, 0]]),
    ]
    assert run.traffic.matrix == [[0, 12], [8, 0]]


def test_two_blocking_sends_first_are_a_deadlock():
    def step(group):
        peer = 1 - group.rank()
        dist.send(torch.ones(1), group_dst=peer, group=group)
        dist.recv(torch.ones(1), group_src=peer, group=group)

    with pytest.raises(DeadlockError) as caught:
        simulate(2, step)
    assert "rank 0: waiting in send to rank 1 (tag 0)" in str(caught.value)
    assert "rank 1: waiting in send to rank 0 (tag 0)" in str(caught.value)


def test_messages_of_one_pair_keep_their_order_and_tags_tell_them_apart():
    def step(group):
        if group.rank() == 0:
            works = [
                dist.isend(torch.tensor([k]), group_dst=1, group=group, tag=k % 2) for k in range(4)
            ]
            for work in works:
                work.wait()
            return None
        received = [torch.empty(1, dtype=torch.int64) for _ in range(4)]
        works = [
            dist.irecv(buffer, group_src=0, group=group, tag=tag)
            for buffer, tag in zip(received, (1, 0, 1, 0), strict=True)
        ]
        for work in works:
            work.wait()
        return [buffer.item() for buffer in received]

    assert simulate(2, step).results[1] == [1, 0, 3, 2]


def test_a_receive_is_unreadable_before_wait():
    def step(group):
        if group.rank() == 0:
            dist.send(torch.ones(1), group_dst=1, group=group)
            return None
        buffer = torch.zeros(1)
        work = dist.irecv(buffer, group_src=0, group=group)
        early = buffer.isnan().item()
        work.wait()
        return early, buffer.item(), work.source_rank()

    assert simulate(2, step).results[1] == (True, 1.0, 0)


def test_recv_from_any_source_takes_what_was_sent_first():
    def program():
        if dist.get_rank():
            dist.send(torch.tensor([dist.get_rank()]), 0)
            return None
        sources = []
        for _ in range(3):
            buffer = torch.empty(1, dtype=torch.int64)
            source = dist.recv(buffer)
            sources.append((source, buffer.item()))
        return sources

    assert simulate_world(4, program).results[0] == [(1, 1), (2, 2), (3, 3)]


def test_batched_messages_around_a_ring():
    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        received = torch.empty(2)
        ops = [
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return received.tolist()

    assert simulate_world(3, program).results == [[2.0] * 2, [0.0] * 2, [1.0] * 2]


def test_a_batch_that_torch_coalesces():
    def step(group):
        received = torch.empty(1)
        peer = 1 - group.rank()
        device = torch.device("cpu")
        with dist.distributed_c10d._coalescing_manager(group, device, async_ops=True) as manager:
            dist.isend(torch.tensor([float(group.rank())]), group_dst=peer, group=group)
            dist.irecv(received, group_src=peer, group=group)
        manager.wait()
        return received.item()

    assert simulate(2, step).results == [1.0, 0.0]


@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        (torch.empty(3), r"\(2,\) float32 on cpu to rank 1, which expects \(3,\) float32"),
        (
            torch.empty(2, dtype=torch.int32),
            r"\(2,\) float32 on cpu to rank 1, which expects \(2,\) int32",
        ),
    ],
)
def test_sides_that_disagree_are_named(buffer, text):
    def step(group):
        if group.rank() == 0:
            dist.send(torch.ones(2), group_dst=1, group=group)
        else:
            dist.recv(buffer.clone(), group_src=0, group=group)

    with pytest.raises(MismatchError, match=f"rank 0 sends {text}"):
        simulate(2, step)


def test_a_message_that_nobody_sends_is_a_deadlock():
    def step(group):
        if group.rank() == 1:
            dist.recv(torch.ones(1), group_src=2, group=group, tag=4)

    with pytest.raises(DeadlockError, match=r"rank 1: waiting in recv from rank 2 \(tag 4\)"):
        simulate(3, step)


def test_objects_can_be_sent():
    def program():
        if dist.get_rank() == 0:
            dist.send_object_list([{"a": 1}, "b"], dst=1)
            return None
        objects = [None, None]
        dist.recv_object_list(objects, src=0)
        return objects

    assert simulate_world(2, program).results[1] == [{"a": 1}, "b"]
