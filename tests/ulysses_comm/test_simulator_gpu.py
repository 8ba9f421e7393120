"""Simulated ranks whose tensors lie on one GPU, each on a stream of its own if it likes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

from ulysses_comm.simulate import AsyncMisuseError, simulate, simulate_all_to_all, simulate_world

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000  # about 10 ms: longer than the host needs to issue everything


def rows(counts, dtype=torch.float32, width=257):
    return [
        (torch.arange(sum(row) * width, device="cuda").view(-1, width) + 1000 * rank).to(dtype)
        for rank, row in enumerate(counts)
    ]


def uneven(world_size):
    return [[(s * 7 + d * 3) % 5 for d in range(world_size)] for s in range(world_size)]


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.view(torch.uint8).cpu(), expected.view(torch.uint8).cpu())


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("world_size", [2, 8])
def test_exchanges_equal_the_oracle(world_size, dtype, async_op):
    counts = uneven(world_size)
    inputs = rows(counts, dtype)

    def step(group):
        rank = group.rank()
        receives = [row[rank] for row in counts]
        output = inputs[rank].new_empty(sum(receives), inputs[rank].shape[1])
        work = dist.all_to_all_single(
            output, inputs[rank], receives, counts[rank], group=group, async_op=async_op
        )
        if async_op:
            work.wait()
        return output

    run = simulate(world_size, step, digests=True)
    for rank, expected in enumerate(simulate_all_to_all(inputs, counts)):
        assert_same_bits(run.results[rank], expected)
        run.traffic.assert_sent_from(inputs[rank], rank=rank)


@pytest.mark.parametrize("async_op", [False, True])
def test_streams_of_the_ranks_are_ordered_by_the_collective(async_op):
    counts = uneven(4)
    inputs = rows(counts)
    expected = simulate_all_to_all(inputs, counts)
    torch.cuda.synchronize()

    def step(group):
        rank = group.rank()
        receives = [row[rank] for row in counts]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            sent = torch.zeros_like(inputs[rank])
            received = sent.new_empty(sum(receives), sent.shape[1])
            # What is sent is ready long after the host has issued the exchange.
            torch.cuda._sleep(CYCLES * (1 + rank % 2))
            sent.copy_(inputs[rank])
            work = dist.all_to_all_single(
                received, sent, receives, counts[rank], group=group, async_op=async_op
            )
            if async_op:
                work.wait()
            result = received.clone()
            # Free for reuse: the exchange has read it as far as this stream is concerned.
            sent.fill_(-1)
            received.fill_(-1)
        stream.synchronize()
        return result

    for result, oracle in zip(simulate(4, step).results, expected, strict=True):
        assert_same_bits(result, oracle)


def test_the_callers_stream_and_device_reach_the_ranks():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        seen = simulate(
            2, lambda g: (torch.cuda.current_stream(), torch.cuda.current_device())
        ).results
    assert seen == [(stream, torch.cuda.current_device())] * 2


@pytest.mark.parametrize("seed", [None, 3])
def test_every_rank_has_its_own_random_stream_on_the_gpu(seed):
    def draw(group):
        first = torch.rand(4, device="cuda").tolist()
        dist.barrier(group=group)
        return first, torch.rand(4, device="cuda").tolist()

    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    ranks = simulate(2, draw, seed=seed).results
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert simulate(2, draw, seed=seed).results == ranks
    if seed is None:
        alone = (torch.rand(4, device="cuda").tolist(), torch.rand(4, device="cuda").tolist())
        assert ranks == [alone] * 2
    else:
        assert len({str(drawn) for rank in ranks for drawn in rank}) == 4


def test_reductions_and_futures():
    def step(group):
        tensor = torch.full((1000,), float(group.rank() + 1), device="cuda")
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        (doubled,) = future.then(lambda done: [done.value()[0] * 2]).wait()
        gathered = torch.empty(3, device="cuda")
        dist.all_gather(list(gathered.unbind(0)), tensor[group.rank()], group=group)
        return doubled[0].item(), gathered.tolist()

    assert simulate(3, step).results == [(12.0, [6.0] * 3)] * 3


def test_results_are_unreadable_before_wait_and_changes_are_found():
    def early(group):
        received = torch.zeros(4, device="cuda")
        work = dist.all_to_all_single(
            received, torch.ones(4, device="cuda"), group=group, async_op=True
        )
        unreadable = received.isnan().all().item()
        work.wait()
        return unreadable, received.tolist()

    assert simulate(2, early).results == [(True, [1.0] * 4)] * 2

    def changed(group):
        sent = torch.ones(4, device="cuda")
        work = dist.all_to_all_single(torch.empty_like(sent), sent, group=group, async_op=True)
        sent.zero_()
        work.wait()

    with pytest.raises(AsyncMisuseError, match="send buffer"):
        simulate(2, changed)


def test_gradients_flow_back_through_the_ranks_own_threads():
    def step(group):
        rank = group.rank()
        leaf = torch.arange(8.0, device="cuda").add_(rank).requires_grad_()
        out = fc.all_to_all_single_autograd(leaf * 3, [2] * 4, [2] * 4, group)
        (out * (rank + 1)).sum().backward()
        return leaf.grad.tolist()

    expected = [3.0, 3.0, 6.0, 6.0, 9.0, 9.0, 12.0, 12.0]
    assert simulate(4, step).results == [expected] * 4


def test_ddp_trains_on_one_gpu():
    def model():
        torch.manual_seed(0)
        return torch.nn.Linear(4, 2).cuda()

    def batch(rank):
        return torch.arange(8.0, device="cuda").view(2, 4) + rank

    def program():
        parallel = torch.nn.parallel.DistributedDataParallel(model(), device_ids=[0])
        parallel(batch(dist.get_rank())).square().mean().backward()
        return parallel.module.weight.grad

    alone = model()
    (sum(alone(batch(rank)).square().mean() for rank in range(3)) / 3).backward()
    for grad in simulate_world(3, program).results:
        torch.testing.assert_close(grad, alone.weight.grad)


def test_cpu_and_gpu_ranks_in_one_call_are_named():
    def step(group):
        device = "cuda" if group.rank() else "cpu"
        dist.all_reduce(torch.ones(2, device=device), group=group)

    with pytest.raises(RuntimeError, match="device is cpu on rank 0 and cuda on rank 1"):
        simulate(2, step)
