"""What the record says, as numbers, as a table and as a picture."""

import hashlib
import sys

import pytest
import torch
import torch.distributed as dist

from ulysses_comm.simulate import record_traffic, simulate
from ulysses_comm.simulator.text import format_bytes, ranges
from ulysses_comm.simulator.traffic import Traffic

COUNTS = [[1, 2, 0], [0, 3, 1], [2, 2, 2]]


def exchange(group, counts=COUNTS, dtype=torch.bfloat16, row=(2, 4)):
    rank = group.rank()
    sent = torch.zeros(sum(counts[rank]), *row, dtype=dtype)
    receives = [sends[rank] for sends in counts]
    received = torch.empty(sum(receives), *row, dtype=dtype)
    dist.all_to_all_single(received, sent, receives, counts[rank], group=group)
    return sent, received


class TestRecords:
    def test_of_an_exchange_hold_bytes_shapes_addresses(self):
        run = simulate(3, exchange)
        (record,) = run.traffic
        assert (record.kind, record.group, record.ranks, record.index) == (
            "all_to_all_single",
            "simulated_0",
            (0, 1, 2),
            0,
        )
        assert record.sent == [[count * 16 for count in row] for row in COUNTS]
        assert record.local_bytes == (1 + 3 + 2) * 16
        assert record.remote_bytes == (2 + 1 + 4) * 16
        assert record.largest_remote_bytes == 4 * 16
        for rank, (sent, _) in enumerate(run.results):
            call = record.call_of(rank)
            (buffer,) = call.buffers
            assert buffer.data_ptr == sent.data_ptr()
            assert buffer.storage_ptr == sent.untyped_storage().data_ptr()
            assert (buffer.shape, buffer.dtype) == (tuple(sent.shape), torch.bfloat16)
            assert (buffer.nbytes, buffer.contiguous, buffer.digest) == (sent.nbytes, True, None)
            assert not call.async_op
        with pytest.raises(KeyError, match="rank 3 took no part"):
            record.call_of(3)

    @pytest.mark.parametrize(
        ("call", "expected"),
        [
            (lambda g: dist.barrier(group=g), [[0, 0], [0, 0]]),
            (lambda g: dist.all_reduce(torch.ones(3), group=g), [[0, 12], [12, 0]]),
            (lambda g: g.reduce([torch.ones(3)], _reduce_to(1)), [[0, 12], [0, 0]]),
            (lambda g: dist.broadcast(torch.ones(3), group_src=1, group=g), [[0, 0], [12, 0]]),
            (lambda g: g._allgather_base(torch.ones(6), torch.ones(3)).wait(), [[12, 12]] * 2),
            (lambda g: g._reduce_scatter_base(torch.ones(3), torch.ones(6)).wait(), [[12, 12]] * 2),
            (
                lambda g: dist.reduce_scatter(
                    torch.ones(3 - 2 * g.rank()), [torch.ones(3), torch.ones(1)], group=g
                ),
                [[12, 4]] * 2,
            ),
            (
                lambda g: dist.all_to_all(
                    [torch.ones(1), torch.ones(2)] if g.rank() else [torch.ones(3), torch.ones(1)],
                    [torch.ones(1), torch.ones(2)] if g.rank() else [torch.ones(3), torch.ones(1)],
                    group=g,
                ),
                [[12, 4], [4, 8]],
            ),
        ],
        ids=range(8),
    )
    def test_count_what_each_collective_moves(self, call, expected):
        assert simulate(2, call).traffic[0].sent == expected

    def test_an_all_reduce_counts_as_direct_reduce_scatter_and_gather(self):
        # 5 elements over 3 ranks: shares of 2, 2 and 1, each sent to its owner and back to all.
        run = simulate(3, lambda g: dist.all_reduce(torch.ones(5, dtype=torch.float64), group=g))
        assert run.traffic[0].sent == [[0, 32, 24], [32, 0, 24], [24, 24, 0]]

    def test_of_calls_that_others_have_not_joined_count_nothing(self):
        def step(group):
            with record_traffic() as traffic:
                work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
                early = len(traffic), traffic.matrix
                work.wait()
            return early, traffic.matrix

        sent = [[0, 4], [4, 0]]
        early, late = simulate(2, step).results
        assert early == ((1, [[0, 0], [0, 0]]), sent)
        assert late == ((1, sent), sent)


def _reduce_to(root):
    options = dist.ReduceOptions()
    options.rootRank = root
    options.asyncOp = False
    return options


class TestSums:
    def test_select_slice_and_matrix(self):
        def step(group):
            exchange(group)
            dist.barrier(group=group)
            exchange(group)
            if group.rank() == 2:
                dist.send(torch.ones(5), group_dst=0, group=group)
            if group.rank() == 0:
                dist.recv(torch.ones(5), group_src=2, group=group)

        traffic = simulate(3, step).traffic
        exchanges = traffic.select("all_to_all_single")
        assert len(traffic) == 4
        assert len(exchanges) == 2
        assert exchanges.matrix == [[count * 32 for count in row] for row in COUNTS]
        assert exchanges.remote_bytes == 2 * 7 * 16
        assert traffic.remote_bytes == 2 * 7 * 16 + 20
        assert [record.kind for record in traffic.select(rank=1)] == [
            "all_to_all_single",
            "barrier",
            "all_to_all_single",
        ]
        assert len(traffic.select(group="another")) == 0
        assert len(traffic[1:3]) == 2
        assert traffic[-1].kind == "send"
        assert "4 collectives of 3 ranks" in repr(traffic)

    def test_copies_are_booked_on_the_call_before_or_after(self):
        def step(group):
            rank = group.rank()
            group.record_copied_bytes(100 + rank, after=False)
            dist.barrier(group=group)
            group.record_copied_bytes(7, after=True)
            group.record_copied_bytes(3, after=True)
            dist.barrier(group=group)
            group.record_copied_bytes(1000, after=False)

        traffic = simulate(2, step).traffic
        assert [
            [c.copied_bytes for c in sorted(r.calls, key=lambda c: c.rank)] for r in traffic
        ] == [
            [110, 111],
            [0, 0],
        ]
        assert traffic[0].copied_bytes == 221
        assert traffic.loose_copies == [1000, 1000]
        assert traffic.copied_bytes == [1110, 1111]
        assert traffic[:1].copied_bytes == [110, 111]

    def test_copies_without_any_collective_are_counted(self):
        def step(group):
            group.record_copied_bytes(5, after=True)
            group.record_copied_bytes(6, after=False)

        assert simulate(1, step).traffic.copied_bytes == [11]


class TestDigests:
    def test_are_the_hash_of_the_bytes_that_were_sent(self):
        def step(group):
            sent = torch.arange(4, dtype=torch.int16) + group.rank()
            dist.all_reduce(sent, group=group)

        traffic = simulate(2, step, digests=True).traffic
        for rank in (0, 1):
            data = (torch.arange(4, dtype=torch.int16) + rank).numpy().tobytes()
            assert traffic.digests(rank) == [hashlib.sha256(data).hexdigest()]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool], ids=str)
    def test_tell_equal_runs_from_different_ones(self, dtype):
        def run(value):
            def step(group):
                sent = torch.full((4,), float(value)).to(dtype)
                dist.all_to_all_single(torch.empty_like(sent), sent, group=group)

            return [simulate(2, step, digests=True).traffic.digests(rank) for rank in (0, 1)]

        assert run(1) == run(1)
        assert run(1) != run(0)


class TestSentInPlace:
    def test_a_buffer_its_parts_and_its_whole_are_recognised(self):
        def step(group):
            whole = torch.zeros(8, 3)
            sent = whole[2:6]
            dist.all_to_all_single(torch.empty(4, 3), sent, group=group)
            return whole

        run = simulate(2, step)
        for rank, whole in enumerate(run.results):
            sent = whole[2:6]
            for tensor in (sent, sent[1:3, ::2], sent.view(2, 2, 3).transpose(0, 1), whole):
                run.traffic.assert_sent_from(tensor, rank=rank)
                assert not run.traffic.sent_from(tensor, rank=1 - rank)
            # Neighbours in the same storage, and tensors that reach beyond what was sent.
            for tensor in (whole[:2], whole[6:], whole[5:7], whole[1:3]):
                assert not run.traffic.sent_from(tensor)

    def test_a_copy_is_told_apart_and_the_error_says_what_was_sent(self):
        def step(group):
            mine = torch.ones(2)
            dist.all_to_all_single(torch.empty(2), mine.clone(), group=group)
            return mine

        run = simulate(2, step)
        with pytest.raises(AssertionError) as caught:
            run.traffic.assert_sent_from(run.results[1], rank=1)
        assert "rank 1 never sent from the memory of the tensor of shape (2,)" in str(caught.value)
        assert "all_to_all_single #0 of 'simulated_0', rank 1: 8 bytes at 0x" in str(caught.value)
        with pytest.raises(AssertionError, match="no rank sent from"):
            run.traffic.assert_sent_from(run.results[1])

    def test_memory_that_was_freed_and_given_out_again_does_not_count(self):
        def step(group):
            for _ in range(20):
                dist.all_reduce(torch.ones(1000), group=group)
            return [torch.ones(1000) for _ in range(20)]

        run = simulate(1, step)
        addresses = {call.buffers[0].data_ptr for record in run.traffic for call in record.calls}
        reused = [t for t in run.results[0] if t.data_ptr() in addresses]
        assert reused, "the allocator gave no address out again: the test shows nothing"
        assert not any(run.traffic.sent_from(tensor) for tensor in reused)

    def test_the_record_keeps_no_memory_alive(self):
        def step(group):
            tensor = torch.ones(10)
            dist.all_reduce(tensor, group=group)
            return torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())

        run = simulate(1, step)
        assert run.results[0].expired()
        assert len(run.traffic) == 1

    def test_without_bytes_there_is_nothing_to_copy(self):
        def step(group):
            rows = [0, 3][group.rank()]
            mine = torch.ones(2 * rows, 2)
            dist.all_to_all_single(torch.empty(3, 2), mine, [0, 3], [rows] * 2, group=group)
            return mine

        run = simulate(2, step)
        run.traffic.assert_sent_from(run.results[0], rank=0)
        assert not run.traffic.sent_from(run.results[0], rank=1)

    def test_functional_and_compiled_calls_send_the_tensor_itself(self):
        def call(x, group):
            op = torch.ops._c10d_functional
            return op.wait_tensor(op.all_to_all_single(x, [1, 1], [1, 1], group.group_name))

        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for function in (call, compiled):

            def step(group, function=function):
                x = torch.ones(2, 3)
                function(x, group)
                return x

            run = simulate(2, step)
            for rank, x in enumerate(run.results):
                run.traffic.assert_sent_from(x, rank=rank)


class TestText:
    def test_the_table_has_a_line_per_collective_and_a_sum(self):
        def step(group):
            exchange(group)
            group.record_copied_bytes(2048, after=True)
            dist.barrier(group=group)

        traffic = simulate(3, step).traffic
        assert str(traffic) == traffic.table()
        lines = traffic.table().splitlines()
        assert [" ".join(line.split()) for line in (lines[0], *lines[2:4], lines[5])] == [
            "# collective group ranks dtype sent shape remote busiest rank own share copied",
            "0 all_to_all_single simulated_0 0-2 bfloat16 (3..6, 2, 4) 112 B 64 B 96 B 6.00 KiB",
            "1 barrier simulated_0 0-2 0 B 0 B 0 B 0 B",
            "sum of 2 112 B 64 B 96 B 6.00 KiB",
        ]
        # Columns of numbers are aligned at their right end, the rules span every column.
        assert lines[1] == lines[4]
        assert {len(lines[k]) for k in (0, 1, 2, 3, 5)} == {len(lines[1])}
        assert lines[2].index("bfloat16") == lines[0].index("dtype")

    def test_a_long_table_can_be_cut(self):
        traffic = simulate(2, lambda g: [dist.barrier(group=g) for _ in range(5)]).traffic
        lines = traffic.table(limit=2).splitlines()
        assert len(lines) == 7
        assert lines[4].split() == ["...", "3", "more"]
        assert "sum of 5" in lines[-1]

    def test_the_matrix_shows_own_shares_in_brackets(self):
        lines = simulate(3, exchange).traffic.matrix_table().splitlines()
        assert [line.split() for line in lines] == [
            ["from", "\\", "to", "0", "1", "2", "to", "others"],
            ["---------", "------", "------", "------", "---------"],
            ["0", "[16", "B]", "32", "B", "0", "B", "32", "B"],
            ["1", "0", "B", "[48", "B]", "16", "B", "16", "B"],
            ["2", "32", "B", "32", "B", "[32", "B]", "64", "B"],
        ]

    def test_an_empty_record_has_a_table(self):
        assert "sum of 0" in simulate(1, lambda g: None).traffic.table()

    @pytest.mark.parametrize(
        ("nbytes", "text"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (15 * 1024 + 512, "15.5 KiB"),
            (68 * 2**20, "68.0 MiB"),
            (300 * 2**20, "300 MiB"),
            (5 * 2**40, "5.00 TiB"),
            (5000 * 2**40, "5000 TiB"),
        ],
    )
    def test_bytes(self, nbytes, text):
        assert format_bytes(nbytes) == text

    @pytest.mark.parametrize(
        ("ranks", "text"),
        [
            ([], "none"),
            ([3], "3"),
            ([0, 1, 2], "0-2"),
            ([0, 2, 3, 7], "0, 2-3, 7"),
            ([3, 0], "3, 0"),
        ],
    )
    def test_ranks(self, ranks, text):
        assert ranges(ranks) == text


@pytest.fixture
def traffic():
    return simulate(3, exchange).traffic


class TestPicture:
    @pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
    def test_is_written_in_the_format_of_the_suffix(self, traffic, tmp_path, suffix):
        pytest.importorskip("matplotlib", reason="needs matplotlib (extra viz)")
        path = tmp_path / f"traffic{suffix}"
        traffic.draw(path, title="three ranks")
        head = path.read_bytes()[:100]
        assert {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix] in head

    def test_is_darkest_where_most_was_sent_and_says_how_much(self, traffic, tmp_path):
        pytest.importorskip("matplotlib", reason="needs matplotlib (extra viz)")
        path = tmp_path / "traffic.svg"
        traffic.draw(path, title="three ranks")
        text = path.read_text()
        for part in ("three ranks", "112 B between ranks", "to rank", "from rank", "64 B"):
            assert f"<!-- {part}" in text or part in text, part

    @pytest.mark.parametrize("world_size", [1, 40])
    def test_any_number_of_ranks_and_no_traffic_at_all(self, tmp_path, world_size):
        pytest.importorskip("matplotlib", reason="needs matplotlib (extra viz)")
        Traffic(world_size).draw(tmp_path / "empty.png")
        assert (tmp_path / "empty.png").stat().st_size > 1000

    def test_without_matplotlib_names_the_extra(self, traffic, tmp_path, monkeypatch):
        for module in ("matplotlib.backends.backend_agg", "matplotlib.figure"):
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'ulysses-comm\[viz\]'"):
            traffic.draw(tmp_path / "picture.png")
        assert not list(tmp_path.iterdir())
