"""What head chunks gain: one attention layer, forward and backward, with 1, 2 and 4 turns.

torchrun --nproc-per-node 2 benchmarks/bench_overlap.py               NCCL where there are GPUs
torchrun --nproc-per-node 2 benchmarks/bench_overlap.py --tokens 512  gloo otherwise

Results are compared bit for bit before anything is timed. Rounds are interleaved in random order;
the ratio is the median of paired ratios, one turn over n, so above 1 is a gain.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ulysses_comm import UlyssesAttention, Workspace

CHUNKS = (1, 2, 4)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend in layout bshd."""
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    return scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(1, 2)


def run_once(layer: torch.nn.Module, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run the layer, backward too if its inputs are tracked; return outputs and gradients."""
    for tensor in tensors:
        tensor.grad = None
    output = layer(*tensors)
    if output.requires_grad:
        output.backward(torch.ones_like(output))
    return [output.detach(), *(t.grad for t in tensors if t.grad is not None)]


def time_once(layer: torch.nn.Module, tensors: list[torch.Tensor]) -> float:
    """Return milliseconds of one run, from a barrier to the last kernel."""
    is_cuda = tensors[0].is_cuda
    dist.barrier()
    if is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run_once(layer, tensors)
    if is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def measure(tensors: list[torch.Tensor], rounds: int) -> dict[int, tuple[float, float]]:
    """Return, for each number of turns, the median milliseconds and the median ratio to one."""
    layers = {
        chunks: UlyssesAttention(
            attention, group=dist.group.WORLD, layout="bshd", chunks=chunks, workspace=Workspace()
        )
        for chunks in CHUNKS
    }
    expected = run_once(layers[1], tensors)
    for chunks in CHUNKS[1:]:
        outputs = run_once(layers[chunks], tensors)
        assert torch.equal(outputs[0], expected[0]), f"{chunks} chunks changed a bit"
        for grad, want in zip(outputs[1:], expected[1:], strict=True):
            # Flash attention's backward adds in an order of its own.
            torch.testing.assert_close(grad, want, rtol=2e-2, atol=2e-2)
    times: dict[int, list[float]] = {chunks: [] for chunks in CHUNKS}
    order = random.Random(0)  # the same on every rank
    for number in range(rounds + 3):
        for chunks in order.sample(CHUNKS, len(CHUNKS)):
            elapsed = time_once(layers[chunks], tensors)
            if number >= 3:
                times[chunks].append(elapsed)
    return {
        chunks: (
            statistics.median(taken),
            statistics.median(a / b for a, b in zip(times[1], taken, strict=True)),
        )
        for chunks, taken in times.items()
    }


def main() -> None:
    """Print one row for each direction and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="of each rank")
    parser.add_argument("--heads", type=int, nargs=2, default=[24, 24], help="query, key/value")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if has_gpu else "cpu"
    if has_gpu:
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if has_gpu else torch.float32
    heads = options.heads
    if rank == 0:
        name = torch.cuda.get_device_name() if has_gpu else "CPU"
        print(f"{name} x {world_size} | {dtype} | {heads[0]}/{heads[1]} x 128 | ratio = 1 turn/n")
        print(" tokens/rank  direction          turns  median ms   ratio")
    for tokens in options.tokens:
        for tracked in (False, True):
            tensors = [
                torch.randn(1, tokens, n, 128, dtype=dtype, device=device).requires_grad_(tracked)
                for n in (heads[0], heads[1], heads[1])
            ]
            for chunks, (taken, ratio) in measure(tensors, options.rounds).items():
                if rank == 0:
                    direction = "forward+backward" if tracked else "forward"
                    print(f"{tokens:>12}  {direction:<17} {chunks:>6} {taken:>10.3f} {ratio:>7.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
