import contextvars
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ulysses_comm.simulate import (
    AbortedError,
    DeadlockError,
    SimulationError,
    simulate,
    simulate_world,
)

marker = contextvars.ContextVar("marker", default="unset")


def exchange(group, value):
    """One even all_to_all_single of one row per pair; row d of the input goes to rank d."""
    sent = torch.full((group.size(), 2), float(value))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received[:, 0].tolist()


@pytest.mark.parametrize("world_size", range(1, 10))
def test_results_come_in_rank_order_at_every_world_size(world_size):
    run = simulate(world_size, lambda group: (group.rank(), group.size(), exchange(group, 5)))
    expected = [(rank, world_size, [5.0] * world_size) for rank in range(world_size)]
    assert run.results == expected
    assert len(run.traffic) == 1


@pytest.mark.parametrize("world_size", [0, -1, 2.0, "2", True])
def test_rejects_a_world_size_that_is_no_positive_integer(world_size):
    for run in (simulate, simulate_world):
        with pytest.raises(ValueError, match="world_size="):
            run(world_size, lambda *_: None)


def test_rejects_an_unknown_way_to_treat_unwaited_calls():
    with pytest.raises(ValueError, match="expected 'error', 'warn' or 'ignore'"):
        simulate(1, lambda group: None, unwaited="later")


def test_exactly_one_rank_runs_at_a_time_in_a_fixed_order():
    order = []

    def step(group):
        for call in range(3):
            order.append((call, group.rank(), "in"))
            time.sleep(0.001 * ((group.rank() * 7 + call) % 3))
            order.append((call, group.rank(), "out"))
            dist.barrier(group=group)

    simulate(4, step)
    # The last rank to arrive goes on; then the others follow it in ring order.
    expected = [(0, r) for r in (0, 1, 2, 3)] + [(1, r) for r in (3, 0, 1, 2)]
    expected += [(2, r) for r in (2, 3, 0, 1)]
    assert order == [(*entry, way) for entry in expected for way in ("in", "out")]


class TestRandomStreams:
    @staticmethod
    def draw(group):
        drawn = []
        for _ in range(3):
            drawn.append((torch.rand(3).tolist(), random.random(), np.random.rand()))
            dist.barrier(group=group)
        return drawn

    def test_without_a_seed_every_rank_continues_the_callers_stream(self):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        ranks = simulate(3, self.draw).results
        # The caller's state is as it was, so drawing here gives what each rank drew.
        alone = [(torch.rand(3).tolist(), random.random(), np.random.rand()) for _ in range(3)]
        assert ranks == [alone] * 3

    def test_with_a_seed_every_rank_has_its_own_stream_the_same_in_every_run(self):
        first = simulate(4, self.draw, seed=3).results
        torch.rand(5)
        assert simulate(4, self.draw, seed=3).results == first
        other = simulate(4, self.draw, seed=4).results
        streams = [str(rank) for rank in (*first, *other)]
        assert len(set(streams)) == 8
        # A rank's stream does not depend on how many ranks there are.
        assert simulate(2, self.draw, seed=3).results == first[:2]

    def test_a_ranks_stream_does_not_depend_on_where_it_is_interrupted(self):
        def often(group):
            drawn = []
            for _ in range(4):
                drawn.append(torch.randn(1).item())
                dist.barrier(group=group)
            return drawn

        def at_once(group):
            return [torch.randn(1).item() for _ in range(4)]

        assert simulate(3, often, seed=1).results == simulate(3, at_once, seed=1).results

    @pytest.mark.parametrize("seed", [None, 11])
    @pytest.mark.parametrize("fails", [False, True])
    def test_the_callers_state_is_untouched(self, seed, fails):
        def step(group):
            random.random()
            torch.rand(1)
            np.random.randn()
            torch.manual_seed(99)
            np.random.seed(98)
            random.seed(97)
            dist.barrier(group=group)
            if fails:
                raise KeyError

        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        np.random.randn()  # leaves the second of a pair behind
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()
        if fails:
            with pytest.raises(KeyError):
                simulate(2, step, seed=seed)
        else:
            simulate(2, step, seed=seed)
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()
        assert torch.equal(before[0], after[0])
        assert before[1] == after[1]
        assert all(np.array_equal(x, y) for x, y in zip(before[2], after[2], strict=True))

    def test_another_numpy_generator_of_the_caller_is_carried_and_restored(self):
        original = np.random.get_bit_generator()
        own = np.random.PCG64(5)
        try:
            np.random.set_bit_generator(own)
            drawn = simulate(2, lambda group: np.random.rand()).results
            assert np.random.get_bit_generator() is own
            assert drawn == [np.random.rand()] * 2
        finally:
            np.random.set_bit_generator(original)


class TestCallersState:
    def test_grad_mode_autocast_and_context_variables_reach_the_ranks(self):
        def step(group):
            first = marker.get()
            marker.set(f"rank {group.rank()}")
            dist.barrier(group=group)
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            return first, marker.get(), torch.is_grad_enabled(), product.dtype

        token = marker.set("caller")
        try:
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                ranks = simulate(2, step).results
            assert marker.get() == "caller"
        finally:
            marker.reset(token)
        assert ranks == [("caller", f"rank {r}", False, torch.bfloat16) for r in range(2)]
        assert simulate(1, step).results == [("unset", "rank 0", True, torch.float32)]

    def test_inference_mode_reaches_the_ranks_and_its_tensors_can_be_exchanged(self):
        def step(group):
            received = exchange(group, group.rank())
            return torch.is_inference_mode_enabled(), torch.ones(1).is_inference(), received

        with torch.inference_mode():
            ranks = simulate(2, step).results
        assert ranks == [(True, True, [0.0, 1.0])] * 2

    def test_one_rank_alone_in_inference_mode_is_served_too(self):
        def step(group):
            with torch.inference_mode(group.rank() == 0):
                return exchange(group, group.rank())

        assert simulate(3, step).results == [[0.0, 1.0, 2.0]] * 3

    def test_default_device_reaches_the_ranks(self):
        with torch.device("meta"):
            devices = simulate(2, lambda group: torch.empty(1).device.type).results
            assert torch.empty(1).device.type == "meta"
        assert devices == ["meta"] * 2
        assert torch.empty(1).device.type == "cpu"

    def test_backward_runs_in_the_thread_of_its_rank(self):
        def step(group):
            threads = []
            leaf = torch.ones(2, requires_grad=True)
            leaf.register_hook(lambda _: threads.append(threading.get_ident()))
            (leaf * 2).sum().backward()
            return threads == [threading.get_ident()]

        assert simulate(3, step).results == [True] * 3


class TestARankThatRaises:
    def test_the_run_ends_with_that_ranks_own_exception_and_its_traceback(self):
        error = KeyError("mine")

        def deep():
            raise error

        def step(group):
            if group.rank() == 1:
                deep()
            dist.barrier(group=group)

        with pytest.raises(KeyError) as caught:
            simulate(3, step)
        assert caught.value is error
        assert type(caught.value) is KeyError
        text = "".join(traceback.format_exception(caught.value))
        # The rank's own frames come last, straight below the call of simulate.
        names = [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)]
        assert names[-2:] == ["step", "deep"]
        assert "raised by simulated rank 1 of 3" in text
        assert "barrier #0" in text
        (note,) = error.__notes__
        assert note.splitlines()[0] == "raised by simulated rank 1 of 3"
        assert "rank 0: waiting in barrier #0" in note
        assert "rank 2: not started" in note

    def test_the_first_error_wins_over_what_it_causes_elsewhere(self):
        def step(group):
            if group.rank() == 1:
                raise LookupError("first")
            try:
                dist.barrier(group=group)
            except AbortedError as error:
                raise ArithmeticError("second") from error

        with pytest.raises(LookupError, match="first"):
            simulate(3, step)

    def test_other_ranks_see_why_they_are_stopped_and_can_clean_up(self):
        seen = {}

        def step(group):
            if group.rank() == 2:
                raise LookupError("gone")
            try:
                dist.barrier(group=group)
            except AbortedError as error:
                seen[group.rank()] = str(error)
                with pytest.raises(AbortedError):
                    dist.barrier(group=group)
                raise

        with pytest.raises(LookupError):
            simulate(3, step)
        assert set(seen) == {0, 1}
        assert all("rank 2: LookupError: gone" in text for text in seen.values())

    def test_a_rank_cannot_swallow_the_failure_of_the_run(self):
        def step(group):
            if group.rank() == 0:
                return
            try:
                dist.barrier(group=group)
            except SimulationError:
                return

        with pytest.raises(DeadlockError):
            simulate(2, step)

    def test_an_error_that_a_rank_handles_does_not_end_the_run(self):
        def step(group):
            with pytest.raises(ValueError, match="split"):
                dist.all_to_all_single(torch.empty(3), torch.empty(3), group=group)
            return exchange(group, group.rank())

        assert simulate(2, step).results == [[0.0, 1.0]] * 2

    @pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
    def test_exceptions_that_are_no_errors_end_the_run_too(self, kind):
        def step(group):
            if group.rank() == 1:
                raise kind
            dist.barrier(group=group)

        with pytest.raises(kind):
            simulate(2, step)


class TestDeadlock:
    def test_a_rank_that_returns_early_is_named_at_once(self):
        def step(group):
            if group.rank() != 2:
                dist.barrier(group=group)

        begin = time.monotonic()
        with pytest.raises(DeadlockError) as caught:
            simulate(4, step)
        assert time.monotonic() - begin < 2
        text = str(caught.value)
        assert "ranks 0-1, 3: waiting in barrier #0" in text
        assert "(arrived: 0-1, 3; missing: 2)" in text
        assert f"{__file__}:" in text
        assert "rank 2: returned" in text

    def test_every_rank_is_listed_with_the_call_it_waits_in(self):
        def step(group):
            if group.rank() == 0:
                torch.ones(1)
                dist.recv(torch.empty(1), group_src=1, group=group)
            else:
                dist.barrier(group=group)

        with pytest.raises(DeadlockError) as caught:
            simulate(2, step)
        assert "rank 0: waiting in recv from rank 1 (tag 0)" in str(caught.value)
        assert "rank 1: waiting in barrier #0" in str(caught.value)
        assert "missing: 0" in str(caught.value)

    def test_ranks_that_only_poll_are_a_deadlock(self):
        def step(group):
            if group.rank() == 1:
                return
            work = dist.barrier(group=group, async_op=True)
            while not work.is_completed():
                pass

        with pytest.raises(DeadlockError, match="rank 1: returned"):
            simulate(2, step)

    def test_polling_lets_the_other_ranks_on(self):
        def step(group):
            if group.rank() == 1:
                for _ in range(3):
                    dist.barrier(group=group)
                return 0
            polls = 0
            for _ in range(3):
                work = dist.barrier(group=group, async_op=True)
                while not work.is_completed():
                    polls += 1
            return polls

        assert simulate(2, step).results[0] < 5


class TestWhoMayUseAGroup:
    def test_another_ranks_group_is_refused(self):
        groups = {}

        def step(group):
            groups[group.rank()] = group
            dist.barrier(group=group)
            dist.barrier(group=groups[1 - group.rank()])

        with pytest.raises(SimulationError, match=r"group of rank 0 was used by rank 1"):
            simulate(2, step)

    def test_another_thread_is_refused(self):
        def step(group):
            caught = []

            def foreign():
                try:
                    dist.barrier(group=group)
                except SimulationError as error:
                    caught.append(str(error))

            thread = threading.Thread(target=foreign, name="foreign")
            thread.start()
            thread.join()
            return caught[0]

        assert "'foreign', which is no rank" in simulate(1, step).results[0]

    def test_a_group_of_a_run_that_is_over_is_refused(self):
        group = simulate(1, lambda group: group).results[0]
        with pytest.raises(SimulationError, match="run is over"):
            dist.barrier(group=group)


class TestOneAtATime:
    def test_a_rank_can_simulate_with_explicit_groups(self):
        def inner(group):
            return exchange(group, group.rank() + 10)

        def outer(group):
            torch.manual_seed(group.rank())
            before = torch.get_rng_state()
            results = simulate(2, inner).results
            assert torch.equal(torch.get_rng_state(), before)
            return results, exchange(group, group.rank())

        runs = simulate(3, outer).results
        assert runs == [([[10.0, 11.0]] * 2, [0.0, 1.0, 2.0])] * 3

    def test_a_failure_inside_a_nested_run_is_the_outer_ranks_failure(self):
        def outer(group):
            if group.rank() == 1:
                simulate(2, lambda inner: 1 / inner.rank())
            dist.barrier(group=group)

        with pytest.raises(ZeroDivisionError) as caught:
            simulate(2, outer)
        assert [note.splitlines()[0] for note in caught.value.__notes__] == [
            "raised by simulated rank 0 of 2",
            "raised by simulated rank 1 of 2",
        ]

    @pytest.mark.parametrize("outer", [simulate, simulate_world])
    def test_a_rank_cannot_start_a_simulated_world(self, outer):
        with pytest.raises(SimulationError, match="from inside a simulated rank"):
            outer(2, lambda *_: simulate_world(2, lambda: None))

    @pytest.mark.parametrize("second", [simulate, simulate_world])
    def test_two_threads_cannot_simulate_at_once(self, second):
        caught = []

        def foreign():
            try:
                second(1, lambda *_: None)
            except SimulationError as error:
                caught.append(str(error))

        def step(group):
            thread = threading.Thread(target=foreign)
            thread.start()
            thread.join()

        simulate(1, step)
        assert "while another thread runs one" in caught[0]
        assert second(1, lambda *_: 1).results == [1]


class TestInterruption:
    @pytest.fixture(autouse=True)
    def python_hears_ctrl_c(self):
        """A shell starts its background jobs with the signal ignored, and Python keeps it so."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    @pytest.mark.parametrize("rank_0_waits", [True, False])
    def test_ctrl_c_ends_every_rank_even_one_that_computes(self, monkeypatch, rank_0_waits):
        monkeypatch.setattr("ulysses_comm.simulator.scheduler._INTERRUPT_PATIENCE_SECONDS", 0.3)
        ended = []

        def step(group):
            try:
                if rank_0_waits and group.rank() == 0:
                    dist.barrier(group=group)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                while True:
                    time.sleep(0.001)
            finally:
                ended.append(group.rank())

        before = threading.active_count()
        torch.manual_seed(5)
        state = torch.get_rng_state()
        with pytest.raises(KeyboardInterrupt):
            simulate(3, step)
        assert sorted(ended) == ([0, 1] if rank_0_waits else [0])
        assert threading.active_count() == before
        assert torch.equal(torch.get_rng_state(), state)
        assert simulate(2, lambda group: exchange(group, 1)).results == [[1.0, 1.0]] * 2

    def test_a_thread_that_cannot_start_ends_the_others(self, monkeypatch):
        start = threading.Thread.start

        def failing(thread):
            if thread.name.endswith("rank2"):
                raise RuntimeError("can't start new thread")
            start(thread)

        ran = []
        before = threading.active_count()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", failing)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                simulate(4, lambda group: ran.append(group.rank()))
        assert ran == []
        assert threading.active_count() == before
        assert simulate(2, lambda group: exchange(group, 1)).results == [[1.0, 1.0]] * 2


class TestNothingIsLeftBehind:
    def test_many_runs_leave_no_threads_names_or_tensors(self):
        resolve = torch._C._distributed_c10d._resolve_process_group
        alive = []

        def step(group):
            assert resolve(group.group_name) is group
            tensor = torch.ones(3)
            alive.append(weakref.ref(tensor))
            exchange(group, 1)
            return group.group_name

        def failing(group):
            tensor = torch.ones(3)
            alive.append(weakref.ref(tensor))
            work = dist.all_reduce(tensor, group=group, async_op=True)
            if group.rank() == 0:
                raise KeyError
            work.wait()

        threads = threading.active_count()
        open_collectives = torch._C._distributed_c10d._get_work_registry_size()
        names = set()
        for _ in range(100):
            names.update(simulate(2, step).results)
            with pytest.raises(KeyError):
                simulate(2, failing)
        assert threading.active_count() == threads
        assert torch._C._distributed_c10d._get_work_registry_size() == open_collectives
        for name in names:
            with pytest.raises(RuntimeError):
                resolve(name)
        gc.collect()
        assert not [ref for ref in alive if ref() is not None]

    def test_ranks_are_translated_while_there_is_no_default_group(self):
        def step(group):
            tensor = torch.tensor([group.rank()])
            dist.broadcast(tensor, src=1, group=group)
            return tensor.item(), dist.get_process_group_ranks(group)

        assert simulate(2, step).results == [(1, [0, 1])] * 2
        assert not dist.distributed_c10d._world.pg_group_ranks

        def ask(group):
            with pytest.raises(ValueError, match="not been initialized"):
                dist.get_rank(group)

        simulate(2, ask)

    def test_nothing_is_initialised_and_a_real_default_group_stays(self, tmp_path):
        assert not dist.is_initialized()
        assert simulate(2, lambda group: dist.is_initialized()).results == [False, False]
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        try:
            world = dist.group.WORLD

            def step(group):
                assert dist.group.WORLD is world
                # Not an answer in terms of the default group.
                with pytest.raises(ValueError, match="not registered"):
                    dist.get_rank(group)
                return exchange(group, group.rank())

            assert simulate(2, step).results == [[0.0, 1.0]] * 2
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
        finally:
            dist.destroy_process_group()

    def test_the_excepthook_and_torch_modes_are_as_before(self):
        hook = sys.excepthook
        simulate_world(2, lambda: dist.barrier())
        assert sys.excepthook is hook
        assert torch.is_grad_enabled()


def test_importing_does_nothing_to_torch_distributed():
    # In this process other tests have simulated already, so look at a fresh one.
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "before = dict(dist.Backend.default_device_backend_map), list(dist.Backend.backend_list)\n"
        "from ulysses_comm.simulate import simulate_world\n"
        "after = dict(dist.Backend.default_device_backend_map), list(dist.Backend.backend_list)\n"
        "assert before == after\n"
        "assert 'matplotlib' not in sys.modules\n"
        "simulate_world(2, dist.barrier)\n"
        "assert dist.Backend.default_device_backend_map == before[0]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_the_same_input_gives_the_same_bits_whatever_the_timing():
    def step(group):
        drawn = []
        for call in range(4):
            # Time from outside the ranks' random streams.
            time.sleep(int.from_bytes(os.urandom(1), "little") / 255 * 0.003)
            mine = torch.randn(3 * group.size()) * (call + 1)
            total = mine.clone()
            dist.all_reduce(total, group=group)
            received = torch.empty_like(mine)
            dist.all_to_all_single(received, mine, group=group)
            drawn += [total.tolist(), received.tolist()]
        return drawn

    first, second = (simulate(4, step, seed=1, digests=True) for _ in range(2))
    assert first.results == second.results
    for rank in range(4):
        assert first.traffic.digests(rank) == second.traffic.digests(rank)
    assert [r.kind for r in first.traffic] == ["all_reduce", "all_to_all_single"] * 4


def test_a_run_and_an_exchange_cost_milliseconds():
    """An order of magnitude above what an idle machine needs: a few ms a run, 1-2 an exchange."""

    def step(group):
        sent, received = torch.ones(8, 16), torch.empty(8, 16)
        for _ in range(calls):
            dist.all_to_all_single(received, sent, group=group)

    def seconds():
        begin = time.perf_counter()
        simulate(8, step)
        return time.perf_counter() - begin

    calls = 0
    run = min(seconds() for _ in range(10))
    calls = 20
    exchange_ = (min(seconds() for _ in range(5)) - run) / calls
    assert run < 0.05
    assert exchange_ < 0.02
