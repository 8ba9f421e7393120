"""Every collective against plain torch, on explicit groups of 1 to 9 ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_comm.simulate import simulate, simulate_all_to_all
from ulysses_comm.simulator.reductions import reduce_op_name

# torch 2.13 renamed them and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

WORLD_SIZES = [1, 2, 3, 5, 8]
MOVED_DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def random_bits(shape, dtype, seed):
    """Every bit pattern of a dtype, NaN payloads and infinities included; 0 and 1 for bool."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if shape[-1] == 0:
        return torch.empty(shape, dtype=dtype)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert bits(actual) == bits(expected)


@st.composite
def exchanges(draw):
    world_size = draw(st.integers(1, 9))
    counts = draw(
        st.lists(
            st.lists(st.integers(0, 4), min_size=world_size, max_size=world_size),
            min_size=world_size,
            max_size=world_size,
        )
    )
    row = draw(st.sampled_from([(1,), (3,), (2, 5), (0,), (2, 1, 3)]))
    dtype = draw(st.sampled_from(MOVED_DTYPES))
    return counts, row, dtype, draw(st.booleans()), draw(st.integers(0, 2**31))


class TestAllToAllSingle:
    @settings(max_examples=150)
    @given(exchanges())
    def test_every_layout_equals_the_oracle_bit_for_bit(self, exchange):
        counts, row, dtype, async_op, seed = exchange
        inputs = [
            random_bits((sum(sends), *row), dtype, seed + rank) for rank, sends in enumerate(counts)
        ]

        def step(group):
            rank = group.rank()
            receives = [sends[rank] for sends in counts]
            output = torch.empty((sum(receives), *row), dtype=dtype)
            work = dist.all_to_all_single(
                output, inputs[rank], receives, counts[rank], group=group, async_op=async_op
            )
            if async_op:
                work.wait()
            return output

        run = simulate(len(counts), step)
        for actual, expected in zip(run.results, simulate_all_to_all(inputs, counts), strict=True):
            assert_same_bits(actual, expected)
        row_bytes = torch.Size(row).numel() * dtype.itemsize
        expected_bytes = [[count * row_bytes for count in sends] for sends in counts]
        # torch sends complex numbers as pairs of real ones: the same bytes.
        assert run.traffic[0].sent == expected_bytes

    def test_rows_may_be_received_in_another_shape(self):
        def step(group):
            sent = torch.arange(8.0).view(4, 2) + 100 * group.rank()
            received = torch.empty(4, 1, 2)
            dist.all_to_all_single(received, sent, group=group)
            return received

        for rank, received in enumerate(simulate(2, step).results):
            parts = [
                torch.arange(8.0).view(4, 2)[2 * rank : 2 * rank + 2] + 100 * r for r in (0, 1)
            ]
            assert torch.equal(received, torch.cat(parts).unsqueeze(1))

    def test_an_output_that_requires_grad_is_written(self):
        def step(group):
            received = torch.empty(2, requires_grad=True)
            dist.all_to_all_single(received, torch.ones(2) + group.rank(), group=group)
            return received.detach().clone()

        assert [r.tolist() for r in simulate(2, step).results] == [[1.0, 2.0]] * 2

    def test_both_names_of_torch_are_there(self):
        def step(group):
            outputs = []
            for name in ("alltoall_base", "all_to_all_single"):
                output = torch.empty(2)
                getattr(group, name)(output, torch.ones(2), [], []).wait()
                outputs.append(output.tolist())
            return outputs

        assert simulate(2, step).results == [[[1.0, 1.0]] * 2] * 2


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", MOVED_DTYPES, ids=str)
class TestMoves:
    def test_list_collectives_move_every_bit(self, world_size, dtype):
        ranks = range(world_size)
        # The tensor that goes from one rank to another; its length names both.
        parts = [
            [random_bits((source + 2 * d,), dtype, 10 * source + d) for d in ranks]
            for source in ranks
        ]
        root = world_size - 1

        def step(group):
            rank = group.rank()
            exchanged = [torch.empty_like(parts[source][rank]) for source in ranks]
            dist.all_to_all(exchanged, parts[rank], group=group)
            gathered = [torch.empty_like(parts[source][0]) for source in ranks]
            dist.all_gather(gathered, parts[rank][0], group=group)
            collected = [torch.empty_like(part) for part in gathered] if rank == root else None
            dist.gather(parts[rank][0], collected, group_dst=root, group=group)
            share = torch.empty_like(parts[root][rank])
            scattered = parts[root] if rank == root else None
            dist.scatter(share, scattered, group_src=root, group=group)
            return exchanged, gathered, collected, share

        for rank, outcome in enumerate(simulate(world_size, step).results):
            exchanged, gathered, collected, share = outcome
            for source in ranks:
                assert_same_bits(exchanged[source], parts[source][rank])
                assert_same_bits(gathered[source], parts[source][0])
                if rank == root:
                    assert_same_bits(collected[source], parts[source][0])
            assert_same_bits(share, parts[root][rank])

    def test_tensor_collectives_move_every_bit(self, world_size, dtype):
        inputs = [random_bits((3, 4), dtype, rank) for rank in range(world_size)]
        root = world_size // 2

        def step(group):
            rank = group.rank()
            gathered = torch.empty(world_size * 3, 4, dtype=dtype)
            all_gather_single(gathered, inputs[rank], group=group)
            stacked = torch.empty(world_size, 3, 4, dtype=dtype)
            all_gather_single(stacked, inputs[rank], group=group)
            copied = inputs[rank].clone()
            dist.broadcast(copied, group_src=root, group=group)
            return gathered, stacked, copied

        for gathered, stacked, copied in simulate(world_size, step).results:
            assert_same_bits(gathered, torch.cat([i.view(torch.uint8) for i in inputs]).view(dtype))
            assert bits(stacked) == bits(gathered)
            assert_same_bits(copied, inputs[root])


REDUCE_OPS = {
    "SUM": lambda values: values.sum(0),
    "AVG": lambda values: values.sum(0) / len(values),
    "PRODUCT": lambda values: values.prod(0),
    "MIN": lambda values: values.amin(0),
    "MAX": lambda values: values.amax(0),
}
BIT_OPS = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduce_everywhere(world_size, inputs, op):
    """All reductions of `inputs` (one tensor per rank, `world_size` rows) with one op."""

    def step(group):
        rank = group.rank()
        everywhere = inputs[rank].clone()
        dist.all_reduce(everywhere, op, group=group)
        on_root = inputs[rank].clone()
        dist.reduce(on_root, group_dst=0, op=op, group=group)
        row = torch.empty_like(inputs[rank][:1])
        reduce_scatter_single(row, inputs[rank], op, group=group)
        from_list = torch.empty_like(row)
        rows = [part.contiguous() for part in inputs[rank].split(1)]
        dist.reduce_scatter(from_list, rows, op, group=group)
        return everywhere, on_root, row, from_list

    return simulate(world_size, step).results


@pytest.mark.parametrize("world_size", WORLD_SIZES)
class TestReductions:
    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            (name, dtype)
            for name in REDUCE_OPS
            for dtype in (torch.float64, torch.int64, torch.int8, torch.uint8)
            if name != "AVG" or dtype.is_floating_point
        ],
    )
    def test_exact_dtypes_equal_plain_torch(self, world_size, name, dtype):
        # Small whole numbers: exact in every dtype and any order.
        inputs = [torch.randint(0, 3, (world_size, 5)).to(dtype) for _ in range(world_size)]
        expected = REDUCE_OPS[name](torch.stack(inputs)).to(dtype)
        outcomes = reduce_everywhere(world_size, inputs, getattr(dist.ReduceOp, name))
        for rank, (everywhere, on_root, row, from_list) in enumerate(outcomes):
            assert_same_bits(everywhere, expected)
            assert_same_bits(on_root, expected if rank == 0 else inputs[rank])
            assert_same_bits(row, expected[rank : rank + 1])
            assert_same_bits(from_list, expected[rank : rank + 1])

    @pytest.mark.parametrize("name", BIT_OPS)
    @pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool], ids=str)
    def test_bitwise_ops_equal_plain_torch(self, world_size, name, dtype):
        inputs = [random_bits((world_size, 4), dtype, rank) for rank in range(world_size)]
        expected = inputs[0]
        for other in inputs[1:]:
            expected = BIT_OPS[name](expected, other)
        outcomes = reduce_everywhere(world_size, inputs, getattr(dist.ReduceOp, name))
        for rank, (everywhere, _, row, _) in enumerate(outcomes):
            assert_same_bits(everywhere, expected)
            assert_same_bits(row, expected[rank : rank + 1])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_floating_sums_are_in_rank_order_and_rounded_once(self, world_size, dtype):
        inputs = [torch.randn(world_size, 50).to(dtype) for _ in range(world_size)]
        total = inputs[0].float()
        for other in inputs[1:]:
            total = total + other.float()
        for name, exact in (("SUM", total), ("AVG", total / world_size)):
            outcomes = reduce_everywhere(world_size, inputs, getattr(dist.ReduceOp, name))
            for rank, (everywhere, _, row, from_list) in enumerate(outcomes):
                assert_same_bits(everywhere, exact.to(dtype))
                assert_same_bits(row, exact[rank : rank + 1].to(dtype))
                assert_same_bits(from_list, row)

    def test_booleans_add_as_or_and_multiply_as_and(self, world_size):
        inputs = [
            torch.tensor([[True, False, rank == 0]] * world_size) for rank in range(world_size)
        ]
        any_true = [True, False, True]
        all_true = [True, False, world_size == 1]
        for name, expected in (("SUM", any_true), ("MAX", any_true), ("PRODUCT", all_true)):
            outcomes = reduce_everywhere(world_size, inputs, getattr(dist.ReduceOp, name))
            assert [outcome[0][0].tolist() for outcome in outcomes] == [expected] * world_size

    def test_nothing_changes_a_bit_when_a_rank_is_alone_or_nan_meets_minimum(self, world_size):
        inputs = [random_bits((world_size, 6), torch.bfloat16, rank) for rank in range(world_size)]
        everywhere = [o[0] for o in reduce_everywhere(world_size, inputs, dist.ReduceOp.MAX)]
        if world_size == 1:
            assert_same_bits(everywhere[0], inputs[0])
        is_nan = torch.stack(inputs).isnan().any(0)
        assert torch.equal(everywhere[0].isnan(), is_nan)


class TestReduceOps:
    @pytest.mark.parametrize(
        ("name", "dtype", "text"),
        [
            ("AVG", torch.int64, "AVG"),
            ("AVG", torch.bool, "AVG"),
            ("BAND", torch.float32, "integer or bool"),
            ("BAND", torch.bfloat16, "integer or bool"),
        ],
    )
    def test_refuses_ops_that_make_no_sense_for_the_dtype(self, name, dtype, text):
        def step(group):
            tensor = torch.ones(2).to(dtype)
            with pytest.raises(ValueError, match=text):
                dist.all_reduce(tensor, getattr(dist.ReduceOp, name), group=group)

        simulate(2, step)

    def test_names_an_op_that_it_does_not_know(self):
        with pytest.raises(ValueError, match=r"does not know the reduce op .*; it knows SUM, AVG"):
            reduce_op_name(dist.ReduceOp.PREMUL_SUM, [torch.ones(2)])

    def test_refuses_the_largest_of_complex_numbers(self):
        with pytest.raises(ValueError, match="MAX has no meaning for"):
            reduce_op_name(dist.ReduceOp.MAX, [torch.ones(2, dtype=torch.complex64)])

    def test_sums_of_complex_numbers(self):
        def step(group):
            tensor = torch.tensor([1 + 2j]) * (group.rank() + 1)
            dist.all_reduce(tensor, group=group)
            return tensor.tolist()

        assert simulate(3, step).results == [[6 + 12j]] * 3


class TestInPlace:
    @pytest.mark.parametrize("async_op", [False, True])
    def test_a_gather_out_of_its_own_output(self, async_op):
        def step(group):
            output = torch.full((3, 2), -1.0)
            output[group.rank()] = group.rank() + 10
            mine = output[group.rank()]
            work = all_gather_single(output, mine, group=group, async_op=async_op)
            if async_op:
                work.wait()
            listed = [torch.full((2,), -1.0) for _ in range(3)]
            listed[group.rank()].fill_(group.rank())
            dist.all_gather(listed, listed[group.rank()], group=group)
            return output[:, 0].tolist(), [part[1].item() for part in listed]

        assert simulate(3, step).results == [([10.0, 11.0, 12.0], [0.0, 1.0, 2.0])] * 3

    @pytest.mark.parametrize("async_op", [False, True])
    def test_a_reduce_scatter_into_its_own_input(self, async_op):
        def step(group):
            input = torch.arange(6.0).view(3, 2) * (group.rank() + 1)
            mine = input[group.rank()]
            work = reduce_scatter_single(mine, input, group=group, async_op=async_op)
            if async_op:
                work.wait()
            return mine.tolist()

        assert simulate(3, step).results == [[0.0, 6.0], [12.0, 18.0], [24.0, 30.0]]

    def test_an_exchange_into_its_own_input_is_refused(self):
        def step(group):
            buffer = torch.zeros(6)
            with pytest.raises(ValueError, match="overlaps the send buffer"):
                dist.all_to_all_single(buffer[:4], buffer[2:], group=group)
            with pytest.raises(ValueError, match="overlaps the send buffer"):
                dist.all_to_all([buffer[:1], buffer[1:2]], [buffer[1:2], buffer[4:5]], group=group)
            dist.all_to_all_single(buffer[:2], buffer[4:], group=group)

        simulate(2, step)

    def test_channels_last_tensors_are_reduced_in_place(self):
        def step(group):
            tensor = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
            mine = tensor.clone()
            dist.all_reduce(tensor, group=group)
            dist.broadcast(mine, group_src=1, group=group)
            return tensor, mine

        torch.manual_seed(0)
        ranks = simulate(2, step).results
        for tensor, mine in ranks:
            assert torch.equal(tensor, mine * 2)
            assert tensor.is_contiguous(memory_format=torch.channels_last)


def all_to_all_single(output, input, *splits):
    return lambda group: dist.all_to_all_single(output, input, *splits, group=group)


BAD_CALLS = [
    ("output must be contiguous", all_to_all_single(torch.empty(2, 2).t(), torch.ones(2, 2))),
    ("input must be contiguous", all_to_all_single(torch.empty(2, 2), torch.ones(2, 2).t())),
    ("3 rows, which do not split", all_to_all_single(torch.empty(3), torch.ones(4))),
    ("scalar", all_to_all_single(torch.tensor(1.0), torch.tensor(1.0))),
    (
        r"3 split sizes \[1, 1, 1\], expected 2",
        all_to_all_single(torch.empty(3), torch.ones(3), [1, 1, 1], [2, 1]),
    ),
    (
        "add up to 4, dimension 0 is 3",
        all_to_all_single(torch.empty(3), torch.ones(3), [1, 2], [2, 2]),
    ),
    ("non-negative", all_to_all_single(torch.empty(3), torch.ones(3), [1, 2], [-1, 4])),
    ("as many elements", all_to_all_single(torch.empty(2, 3), torch.ones(2, 2))),
    ("contiguous", lambda g: dist.all_reduce(torch.ones(4)[::2], group=g)),
    ("sparse", lambda g: dist.all_reduce(torch.ones(2).to_sparse(), group=g)),
    ("2 times the elements", lambda g: g._allgather_base(torch.empty(5), torch.ones(2))),
    ("2 times the elements", lambda g: g._reduce_scatter_base(torch.empty(2), torch.ones(5))),
    (
        "this rank's share",
        lambda g: dist.reduce_scatter(torch.empty(3), [torch.ones(2)] * 2, group=g),
    ),
    (
        "1 tensors, expected 2",
        lambda g: dist.all_gather([torch.empty(2)], torch.ones(2), group=g),
    ),
    (
        "1 tensors, expected 2",
        lambda g: dist.all_to_all([torch.empty(2)], [torch.ones(2)], group=g),
    ),
    ("to itself", lambda g: g.send([torch.ones(1)], g.rank(), 0)),
]


@pytest.mark.parametrize(("text", "call"), BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_bad_arguments_concern_one_rank_alone(text, call):
    """A ValueError on the rank at fault, before anything is sent; caught, the run goes on."""

    def step(group):
        if group.rank() == 1:
            with pytest.raises(ValueError, match=text):
                call(group)
        dist.barrier(group=group)

    run = simulate(2, step)
    assert [record.kind for record in run.traffic] == ["barrier"]


class TestFunctionalCollectivesOnExplicitGroups:
    def test_all_to_all_with_gradients(self):
        splits = [[1, 2, 0], [3, 0, 1], [0, 2, 2]]

        def step(group):
            rank = group.rank()
            receives = [row[rank] for row in splits]
            leaf = (torch.arange(float(sum(splits[rank]))) + 10 * rank).requires_grad_()
            output = fc.all_to_all_single_autograd(leaf * 2, receives, splits[rank], group)
            (output * (rank + 1)).sum().backward()
            return leaf.detach(), output.detach() + 0, leaf.grad

        ranks = simulate(3, step).results
        expected = simulate_all_to_all([2 * leaf for leaf, _, _ in ranks], splits)
        for rank, (_, output, grad) in enumerate(ranks):
            assert torch.equal(output, expected[rank])
            weights = [float(d + 1) for d, count in enumerate(splits[rank]) for _ in range(count)]
            assert grad.tolist() == [2 * weight for weight in weights]

    def test_reductions_and_gathers(self):
        def step(group):
            value = torch.arange(4.0) + group.rank()
            op = torch.ops._c10d_functional
            wait = op.wait_tensor
            name = group.group_name
            return [
                wait(op.all_reduce(value, "sum", name)).tolist(),
                wait(op.all_gather_into_tensor(value, 2, name)).tolist(),
                wait(op.reduce_scatter_tensor(value, "sum", 2, name)).tolist(),
                wait(op.broadcast(value, 1, name)).tolist(),
                [
                    wait(t).tolist()
                    for t in op.all_reduce_coalesced([value, value + 1], "sum", name)
                ],
                [
                    wait(t).tolist()
                    for t in op.all_gather_into_tensor_coalesced([value[:1]], 2, name)
                ],
            ]

        shared = [[1.0, 3.0, 5.0, 7.0], [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]]
        rest = [[1.0, 2.0, 3.0, 4.0], [[1.0, 3.0, 5.0, 7.0], [3.0, 5.0, 7.0, 9.0]], [[0.0, 1.0]]]
        ranks = simulate(2, step).results
        assert ranks[0] == [*shared, [1.0, 3.0], *rest]
        assert ranks[1] == [*shared, [5.0, 7.0], *rest]


def test_objects_can_be_gathered_on_an_explicit_group():
    def step(group):
        gathered = [None] * 3
        dist.all_gather_object(gathered, {"rank": group.rank()}, group=group)
        return gathered

    assert simulate(3, step).results == [[{"rank": rank} for rank in range(3)]] * 3


def test_coalesced_forms_are_one_collective():
    def step(group):
        tensors = [torch.full((n,), float(group.rank())) for n in (1, 2)]
        with dist.distributed_c10d._coalescing_manager(group=group):
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        outputs = [torch.empty(4), torch.empty(2)]
        with dist.distributed_c10d._coalescing_manager(group=group, async_ops=True) as manager:
            all_gather_single(outputs[0], torch.ones(2), group=group)
            all_gather_single(outputs[1], torch.ones(1), group=group)
        manager.wait()
        parts = [torch.empty(1), torch.empty(2)]
        with dist.distributed_c10d._coalescing_manager(group=group):
            for part, n in zip(parts, (1, 2), strict=True):
                reduce_scatter_single(part, torch.ones(2 * n), group=group)
        return [t.tolist() for t in itertools.chain(tensors, outputs, parts)]

    run = simulate(2, step)
    assert run.results == [[[1.0], [1.0, 1.0], [1.0] * 4, [1.0] * 2, [2.0], [2.0, 2.0]]] * 2
    assert [record.kind for record in run.traffic] == [
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    ]


def test_a_batch_of_mixed_calls_waits_at_its_end():
    def step(group):
        one, two = torch.ones(2) * group.rank(), torch.empty(2)
        device = torch.device("cpu")
        group._start_coalescing(device)
        dist.broadcast(one, group_src=1, group=group)
        dist.all_to_all_single(two, torch.ones(2) * group.rank(), group=group)
        work = group._end_coalescing(device)
        assert one.isnan().all() or group.rank() == 1
        work.wait()
        return one.tolist(), two.tolist()

    assert simulate(2, step).results == [([1.0, 1.0], [0.0, 1.0])] * 2


def test_what_simulated_groups_cannot_do_is_said_by_name():
    def step(group):
        with pytest.raises(NotImplementedError, match="cannot be split"):
            group.split_group([0])
        with pytest.raises(NotImplementedError, match="cannot be merged"):
            group.merge_remote_group(None)

    simulate(1, step)


def test_meta_tensors_send_shapes_alone():
    """Traffic of a model that fits no machine: everything is recorded, nothing is stored."""

    def step(group):
        tensor = torch.empty(8, 2**20, 2**10, device="meta")
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=group)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        return received.shape

    run = simulate(8, step, digests=True)
    assert run.traffic[0].sent == [[2**32] * 8] * 8
    assert run.traffic.digests(0) == [None, None]
