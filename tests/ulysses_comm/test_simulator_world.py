"""Unmodified torch.distributed programs in a simulated world."""

import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ulysses_comm.simulate import (
    DeadlockError,
    MismatchError,
    SimulationError,
    record_traffic,
    simulate,
    simulate_world,
)


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def batch(rank):
    torch.manual_seed(100 + rank)
    return torch.randn(3, 4)


def train_alone(world_size, steps=2):
    """The same training in one process on the whole batch; the mean over ranks of the losses."""
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(steps):
        loss = sum(alone(batch(rank)).square().mean() for rank in range(world_size)) / world_size
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in alone.parameters()]


def train(parallel, steps=2):
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    for _ in range(steps):
        parallel(batch(dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class TestPrograms:
    @pytest.mark.parametrize("world_size", range(1, 10))
    def test_ranks_sizes_and_a_collective_on_the_default_group(self, world_size):
        def program():
            assert dist.is_initialized()
            total = torch.tensor([dist.get_rank()])
            dist.all_reduce(total)
            return dist.get_rank(), dist.get_world_size(), total.item(), dist.get_backend()

        total = sum(range(world_size))
        assert simulate_world(world_size, program).results == [
            (rank, world_size, total, "ulysses_sim") for rank in range(world_size)
        ]

    def test_objects(self):
        def program():
            rank = dist.get_rank()
            gathered, scattered = [None] * 3, [None]
            dist.all_gather_object(gathered, {"rank": rank})
            dist.scatter_object_list(scattered, [f"for {r}" for r in range(3)], src=1)
            shared = [rank * 11]
            dist.broadcast_object_list(shared, src=2)
            collected = [None] * 3 if rank == 0 else None
            dist.gather_object(rank, collected, dst=0)
            return gathered, scattered[0], shared[0], collected

        everyone = [{"rank": rank} for rank in range(3)]
        assert simulate_world(3, program).results == [
            (everyone, f"for {rank}", 22, [0, 1, 2] if rank == 0 else None) for rank in range(3)
        ]

    def test_sub_groups_side_by_side(self):
        def program():
            rank = dist.get_rank()
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            reverse = dist.new_group([3, 0])
            mine = pairs[rank // 2]
            value = torch.tensor([10.0 + rank])
            dist.all_reduce(value, group=mine)
            ends = None
            if rank in (0, 3):
                ends = torch.tensor([rank])
                dist.broadcast(ends, src=3, group=reverse)
                ends = (ends.item(), dist.get_rank(reverse))
            assert dist.get_rank(pairs[1 - rank // 2]) == -1
            return value.item(), dist.get_rank(mine), dist.get_process_group_ranks(mine), ends

        run = simulate_world(4, program)
        assert run.results == [
            (21.0, 0, [0, 1], (3, 0)),
            (21.0, 1, [0, 1], None),
            (25.0, 0, [2, 3], None),
            (25.0, 1, [2, 3], (3, 1)),
        ]
        assert {record.ranks for record in run.traffic} == {(0, 1), (2, 3), (0, 3)}

    def test_two_dimensional_meshes(self):
        def program():
            mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "inner"))
            sums = []
            for name in ("outer", "inner"):
                value = torch.tensor([float(dist.get_rank())])
                dist.all_reduce(value, group=mesh[name].get_group())
                sums.append(value.item())
            gathered = torch.empty(3)
            dist.all_gather(
                list(gathered.unbind(0)),
                torch.tensor(float(dist.get_rank())),
                group=mesh.get_group("inner"),
            )
            return sums, mesh.get_coordinate(), gathered.tolist()

        for rank, (sums, coordinate, gathered) in enumerate(simulate_world(6, program).results):
            row, column = divmod(rank, 3)
            assert list(coordinate) == [row, column]
            assert sums == [column * 2 + 3, row * 9 + 3]
            assert gathered == [3.0 * row + k for k in range(3)]

    def test_tensors_distributed_over_a_mesh(self):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        def program():
            mesh = init_device_mesh("cpu", (3,))
            whole = torch.arange(12.0).view(6, 2)
            sharded = distribute_tensor(whole, mesh, [Shard(0)])
            moved = sharded.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()])
            total = sharded.sum().full_tensor()
            return moved.to_local().tolist(), sharded.to_local().tolist(), total.item()

        whole = torch.arange(12.0).view(6, 2)
        for rank, (moved, local, total) in enumerate(simulate_world(3, program).results):
            assert moved == whole.tolist()
            assert local == whole[2 * rank : 2 * rank + 2].tolist()
            assert total == whole.sum().item()

    def test_functional_collectives_with_gradients(self):
        def program():
            rank = dist.get_rank()
            leaf = torch.arange(4.0).add_(rank).requires_grad_()
            out = fc.all_to_all_single_autograd(leaf * 3, [2, 2], [2, 2], dist.group.WORLD)
            (out * (rank + 1)).sum().backward()
            return (out.detach() + 0).tolist(), leaf.grad.tolist()

        assert simulate_world(2, program).results == [
            ([0.0, 3.0, 3.0, 6.0], [3.0, 3.0, 6.0, 6.0]),
            ([6.0, 9.0, 9.0, 12.0], [3.0, 3.0, 6.0, 6.0]),
        ]


class TestTraining:
    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_ddp_trains_like_one_process(self, world_size):
        def program():
            parallel = torch.nn.parallel.DistributedDataParallel(model())
            train(parallel)
            return [p.detach() for p in parallel.parameters()]

        alone = train_alone(world_size)
        for parameters in simulate_world(world_size, program).results:
            torch.testing.assert_close(parameters, alone)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_fsdp2_trains_like_one_process(self, world_size):
        from torch.distributed.fsdp import fully_shard

        def program():
            parallel = model()
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in (parallel[0], parallel[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(parallel, mesh=mesh)
            train(parallel)
            return [p.full_tensor() for p in parallel.parameters()]

        alone = train_alone(world_size)
        run = simulate_world(world_size, program)
        for parameters in run.results:
            torch.testing.assert_close(parameters, alone)
        kinds = {record.kind for record in run.traffic}
        assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= kinds

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_activation_checkpoints_repeat_the_communication(self, reentrant):
        def layer(x):
            received = fc.all_to_all_single_autograd(x, [2, 2], [2, 2], dist.group.WORLD)
            return received.sin()

        def program(recompute):
            x = torch.arange(4.0).add_(dist.get_rank()).requires_grad_()
            out = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
            out.sum().backward()
            return x.grad

        plain = simulate_world(2, lambda: program(False))
        again = simulate_world(2, lambda: program(True))
        assert [g.tolist() for g in again.results] == [g.tolist() for g in plain.results]
        assert (len(plain.traffic), len(again.traffic)) == (2, 3)

    def test_dropout_differs_between_ranks_only_with_a_seed(self):
        def program():
            return torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()

        alike = simulate_world(2, program).results
        assert alike[0] == alike[1]
        own = simulate_world(2, program, seed=0).results
        assert own[0] != own[1]
        assert simulate_world(2, program, seed=0).results == own


class TestFaults:
    def test_groups_used_in_crossed_order_are_a_deadlock_that_names_both(self):
        def program():
            one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
            for group in (one, two) if dist.get_rank() == 0 else (two, one):
                dist.all_reduce(torch.ones(1), group=group)

        with pytest.raises(DeadlockError) as caught:
            simulate_world(2, program)
        text = str(caught.value)
        assert "rank 0: waiting in all_reduce #0 of group '1' (ranks 0-1)" in text
        assert "rank 1: waiting in all_reduce #0 of group '2' (ranks 0-1)" in text
        assert "(arrived: 0; missing: 1)" in text
        assert "(arrived: 1; missing: 0)" in text

    def test_reports_name_ranks_of_the_world_not_of_the_group(self):
        def program():
            group = dist.new_group([1, 3])
            if dist.get_rank() == 3:
                dist.all_reduce(torch.ones(2), group=group)
            if dist.get_rank() == 1:
                dist.all_reduce(torch.ones(5), group=group)

        with pytest.raises(MismatchError) as caught:
            simulate_world(4, program)
        assert "shape is (5,) on rank 1 and (2,) on rank 3" in str(caught.value)

    def test_a_rank_that_raises_under_ddp_keeps_its_exception(self):
        class OwnError(Exception):
            pass

        def program():
            parallel = torch.nn.parallel.DistributedDataParallel(model())
            out = parallel(batch(0)).sum()
            if dist.get_rank() == 1:

                def hook(_):
                    raise OwnError("in a backward hook")

                out.register_hook(hook)
            out.backward()

        with pytest.raises(OwnError, match="in a backward hook"):
            simulate_world(2, program)

    def test_a_mismatch_in_backward_keeps_its_type(self):
        def program():
            rank = dist.get_rank()
            x = torch.ones(4, requires_grad=True)
            y = fc.all_to_all_single_autograd(x, [2, 2], [2, 2], dist.group.WORLD)
            if rank == 0:
                y.sum().backward()
            else:
                dist.barrier()

        with pytest.raises(MismatchError, match="rank 1 called barrier"):
            simulate_world(2, program)

    def test_initialising_again_is_refused_by_torch(self):
        with pytest.raises(ValueError, match="twice"):
            simulate_world(1, lambda: dist.init_process_group("gloo"))

    def test_the_backend_is_for_simulations_only(self):
        simulate_world(1, lambda: None)
        with pytest.raises(RuntimeError, match="only exists inside"):
            dist.init_process_group("ulysses_sim", store=dist.HashStore(), rank=0, world_size=1)
        assert not dist.is_initialized()


class TestNothingIsLeftBehind:
    @pytest.mark.parametrize("fails", [False, True])
    def test_a_real_default_group_is_hidden_and_comes_back(self, tmp_path, fails):
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        try:
            world, hook = dist.group.WORLD, sys.excepthook
            sub = dist.new_group([0])

            def program():
                assert dist.group.WORLD is not world
                assert dist.get_world_size() == 3
                dist.new_group([0, 1])
                dist.barrier()
                if fails and dist.get_rank() == 1:
                    raise KeyError

            if fails:
                with pytest.raises(KeyError):
                    simulate_world(3, program)
            else:
                simulate_world(3, program)
            assert dist.group.WORLD is world
            assert sys.excepthook is hook
            assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=sub)
            reduced = fc.all_reduce(tensor, "sum", dist.group.WORLD)
            assert reduced.item() == 1.0
            assert simulate(2, lambda g: g.size()).results == [2, 2]
        finally:
            dist.destroy_process_group()
        assert not dist.is_initialized()

    def test_many_worlds_leave_no_threads_and_no_groups(self):
        threads, environment = threading.active_count(), dict(os.environ)

        def program():
            dist.new_group([0])
            dist.barrier()
            if dist.get_rank() == 0 and failing:
                raise KeyError

        for failing in [False, True] * 15:
            try:
                simulate_world(2, program)
            except KeyError:
                assert failing
        assert threading.active_count() == threads
        assert not dist.is_initialized()
        assert dict(os.environ) == environment

    def test_a_program_may_destroy_its_groups_itself(self):
        def program():
            group = dist.new_group([0, 1])
            dist.barrier(group)
            dist.destroy_process_group(group)
            # A new group of the same ranks is another one, whatever its name.
            again = dist.new_group([0, 1])
            total = torch.ones(1)
            dist.all_reduce(total, group=again)
            dist.destroy_process_group()
            return total.item()

        assert simulate_world(2, program).results == [2.0, 2.0]


class TestRecordedRegions:
    def test_hold_the_collectives_of_the_rank_and_no_others(self):
        def program():
            dist.barrier()
            with record_traffic() as outer:
                dist.all_reduce(torch.ones(1))
                with record_traffic() as inner:
                    if dist.get_rank() == 0:
                        dist.send(torch.ones(1), 1)
                    elif dist.get_rank() == 1:
                        dist.recv(torch.ones(1), 0)
            dist.barrier()
            return [record.kind for record in outer], [record.kind for record in inner]

        run = simulate_world(3, program)
        both = (["all_reduce", "send"], ["send"])
        assert run.results == [both, both, (["all_reduce"], [])]
        assert len(run.traffic) == 4

    def test_only_work_inside_a_rank(self):
        with pytest.raises(SimulationError, match="inside a simulated rank"), record_traffic():
            pass


def exchange(x, group):
    size = x.shape[0] // 2
    return fc.all_to_all_single_autograd(x * 2, [size, size], [size, size], group).sin()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
class TestCompile:
    def test_functional_collectives_on_explicit_groups(self, backend):
        torch._dynamo.reset()
        compiled = torch.compile(exchange, backend=backend, fullgraph=True)

        def step(group):
            outcomes = []
            for function in (exchange, compiled):
                x = (torch.arange(4.0) + group.rank()).requires_grad_()
                out = function(x, group)
                out.sum().backward()
                outcomes.append((out.tolist(), x.grad.tolist()))
            return outcomes

        for plain, traced in simulate(2, step).results:
            assert plain == traced

    def test_dist_calls_in_a_simulated_world(self, backend):
        torch._dynamo.reset()
        counters.clear()

        def f(x):
            received = torch.empty_like(x)
            dist.all_to_all_single(received, x)
            return received + 1

        compiled = torch.compile(f, backend=backend, fullgraph=True)

        def program():
            return compiled(torch.arange(4.0) + 10 * dist.get_rank()).tolist()

        expected = [[1.0, 2.0, 11.0, 12.0], [3.0, 4.0, 13.0, 14.0]]
        assert simulate_world(2, program).results == expected
        # torch guards a graph by the group object, so every rank of every world has its own.
        assert simulate_world(2, program).results == expected
        assert counters["stats"]["unique_graphs"] == 4
