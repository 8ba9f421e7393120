"""Asynchronous calls: results are unreadable before wait(), buffers are watched, waiting is due."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from ulysses_comm.simulate import AsyncMisuseError, simulate
from ulysses_comm.simulator.buffers import fill_unreadable

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start(group, sent, received):
    return dist.all_to_all_single(received, sent, group=group, async_op=True)


class TestResultsBeforeWait:
    @pytest.mark.parametrize("last", [0, 1])
    def test_are_unreadable_even_if_everybody_has_arrived(self, last):
        def step(group):
            if group.rank() == last:
                dist.recv(torch.empty(1), group_src=1 - last, group=group)
            sent, received = torch.ones(2) * group.rank(), torch.zeros(2)
            work = start(group, sent, received)
            if group.rank() != last:
                dist.send(torch.ones(1), group_dst=last, group=group)
            early = received.isnan().all().item()
            work.wait()
            return early, received.tolist()

        assert simulate(2, step).results == [(True, [0.0, 1.0])] * 2

    @pytest.mark.parametrize(
        ("dtype", "shows"),
        [
            (torch.float32, "nan"),
            (torch.bfloat16, "nan"),
            (torch.float8_e4m3fn, "nan"),
            (torch.float8_e5m2, "nan"),
            (torch.complex64, "nan"),
            (torch.uint8, 0xFF),
            (torch.int8, -1),
            (torch.int16, -(2**15)),
            (torch.int32, -(2**31)),
            (torch.int64, -(2**63)),
            (torch.uint16, 2**16 - 1),
            (torch.bool, False),
        ],
        ids=str,
    )
    def test_show_a_value_that_stands_out(self, dtype, shows):
        tensor = torch.zeros(2, 3, dtype=dtype)
        fill_unreadable(tensor)
        if shows == "nan":
            wide = tensor if dtype.is_complex else tensor.float()
            assert wide.isnan().all()
        else:
            assert tensor.tolist() == [[shows] * 3] * 2

    def test_sent_bytes_read_as_floats_show_nan(self):
        tensor = torch.zeros(16, dtype=torch.uint8)
        fill_unreadable(tensor)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            assert tensor.view(dtype).isnan().all()

    def test_of_an_all_reduce_in_place_are_unreadable_and_then_right(self):
        def step(group):
            tensor = torch.ones(3) * (group.rank() + 1)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            early = tensor.isnan().all().item()
            work.wait()
            return early, tensor.tolist()

        assert simulate(3, step).results == [(True, [6.0] * 3)] * 3

    def test_a_strided_or_scalar_output_is_covered(self):
        def step(group):
            scalar = torch.tensor(float(group.rank()))
            parts = list(torch.zeros(4, 2).unbind(0))[::2]
            works = [
                dist.all_reduce(scalar, group=group, async_op=True),
                dist.all_gather(parts, torch.ones(2), group=group, async_op=True),
            ]
            early = scalar.isnan().item() and all(part.isnan().all() for part in parts)
            for work in works:
                work.wait()
            return early, scalar.item(), [part.tolist() for part in parts]

        assert simulate(2, step).results == [(True, 1.0, [[1.0, 1.0]] * 2)] * 2

    def test_wait_in_another_order_than_issued(self):
        def step(group):
            tensors = [torch.tensor([float(group.rank() + k)]) for k in range(3)]
            works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
            for k in (2, 0, 1) if group.rank() else (1, 2, 0):
                works[k].wait()
            return [t.item() for t in tensors]

        assert simulate(2, step).results == [[1.0, 3.0, 5.0]] * 2


class TestHandles:
    def test_tell_how_far_they_are(self):
        def step(group):
            tensor = torch.ones(1)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            before = work.is_success()
            assert work.exception() is None
            while not work.is_completed():
                pass
            # As on real backends, the result may be read once it is known to be there.
            value = tensor.item()
            assert work.is_completed()
            assert work.wait()
            assert work.result()[0] is tensor
            return before, work.is_success(), value

        assert simulate(2, step).results == [(False, True, 2.0)] * 2

    @pytest.mark.parametrize("way", ["synchronize", "block_current_stream", "result"])
    def test_other_ways_to_wait(self, way):
        def step(group):
            tensor = torch.ones(1)
            getattr(dist.all_reduce(tensor, group=group, async_op=True), way)()
            return tensor.item()

        assert simulate(2, step).results == [2.0, 2.0]

    def test_futures_hold_the_outputs(self):
        def step(group):
            tensor, received = torch.ones(1), torch.empty(2)
            future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
            doubled = future.then(lambda done: done.value()[0] * 2).wait()
            root = torch.full((1,), float(group.rank()))
            sent = dist.broadcast(root, group_src=0, group=group, async_op=True).get_future()
            work = all_gather_single(received, root, group=group, async_op=True)
            return doubled.item(), sent.wait()[0].item(), work.get_future().wait()[0].tolist()

        assert simulate(2, step).results == [(4.0, 0.0, [0.0, 0.0])] * 2

    def test_only_receives_have_a_source_rank(self):
        def step(group):
            work = dist.barrier(group=group, async_op=True)
            work.wait()
            with pytest.raises(RuntimeError, match="no single source rank"):
                work.source_rank()

        simulate(1, step)


class TestChangedBuffers:
    @pytest.mark.parametrize("role", ["send", "receive"])
    @pytest.mark.parametrize("moment", ["before the others arrive", "after they have arrived"])
    def test_are_found_and_the_rank_is_named(self, role, moment):
        def step(group):
            sent, received = torch.ones(2), torch.zeros(2)
            work = start(group, sent, received)
            if group.rank() == 0:
                if moment == "after they have arrived":
                    dist.recv(torch.empty(1), group_src=1, group=group)
                (sent if role == "send" else received).add_(1)
            elif moment == "after they have arrived":
                dist.send(torch.ones(1), group_dst=0, group=group)
            work.wait()

        with pytest.raises(AsyncMisuseError) as caught:
            simulate(2, step)
        text = str(caught.value)
        assert f"rank 0 changed the {role} buffer" in text
        assert "all_to_all_single #0" in text
        assert f"issued at {__file__}:" in text
        assert "before wait()" in text

    def test_after_wait_every_buffer_is_free_again(self):
        def step(group):
            sent, received = torch.ones(2), torch.zeros(2)
            for _ in range(3):
                work = start(group, sent, received)
                work.wait()
                sent.add_(1)
                received.mul_(0)
            dist.all_to_all_single(received, sent, group=group)
            return received.tolist()

        assert simulate(2, step).results == [[4.0, 4.0]] * 2

    def test_a_view_of_the_send_buffer_counts(self):
        def step(group):
            sent = torch.ones(2)
            work = start(group, sent, torch.zeros(2))
            sent[1:].zero_()
            work.wait()

        with pytest.raises(AsyncMisuseError, match="send buffer"):
            simulate(1, step)

    def test_writes_behind_torchs_back_are_found_with_digests(self):
        def step(group):
            sent = torch.ones(2)
            work = start(group, sent, torch.zeros(2))
            sent.numpy()[0] = 5
            work.wait()

        simulate(1, step)
        with pytest.raises(AsyncMisuseError, match="send buffer"):
            simulate(1, step, digests=True)

    def test_inference_tensors_have_no_version_and_pass(self):
        def step(group):
            with torch.inference_mode():
                sent, received = torch.ones(2), torch.zeros(2)
                start(group, sent, received).wait()
                return received.tolist()

        assert simulate(2, step).results == [[1.0, 1.0]] * 2


class TestUnwaitedCalls:
    @staticmethod
    def step(group):
        dist.all_reduce(torch.ones(1), group=group)
        dist.all_reduce(torch.ones(1), group=group, async_op=True)
        if group.rank() == 1:
            group.recv([torch.ones(1)], 0, 7)

    def test_are_an_error_that_lists_them(self):
        with pytest.raises(AsyncMisuseError) as caught:
            simulate(2, self.step)
        text = str(caught.value)
        assert text.startswith("3 asynchronous calls were never waited for")
        for rank in (0, 1):
            assert f"rank {rank}: all_reduce #1 of group" in text
        assert "rank 1: recv from rank 0 (tag 7)" in text
        assert f"issued at {__file__}:" in text

    def test_are_a_warning_if_asked_for(self):
        with pytest.warns(UserWarning, match="never waited for") as caught:
            run = simulate(2, self.step, unwaited="warn")
        assert len(run.results) == 2
        assert caught[0].filename == __file__

    def test_are_nothing_if_asked_for(self, recwarn):
        simulate(2, self.step, unwaited="ignore")
        assert not recwarn.list

    @pytest.mark.parametrize("fails", [False, True])
    def test_of_functional_collectives_are_let_go(self, fails):
        """torch keeps a list of open collectives per thread, and keeps it when the thread ends."""
        groups = []

        def step(group):
            groups.append(weakref.ref(group))
            torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", group.group_name)
            assert torch._C._distributed_c10d._get_work_registry_size() == 1
            if fails:
                raise KeyError

        with pytest.raises(KeyError if fails else AsyncMisuseError):
            simulate(2, step)
        gc.collect()
        assert [group() for group in groups] == [None] * len(groups)

    def test_do_not_hide_the_error_of_a_rank(self):
        def step(group):
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
            raise KeyError(group.rank())

        with pytest.raises(KeyError):
            simulate(2, step)
