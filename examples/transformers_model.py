"""A transformers model whose sequence is shared by ranks: the same loss, gradients and logits.

python examples/transformers_model.py                            two ranks in this process
torchrun --nproc-per-node 2 examples/transformers_model.py       the same function on real processes
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import transformers

from ulysses_comm import simulate, sum_gradients
from ulysses_comm.integrations.transformers import parallelize

IDS = torch.randint(0, 100, (1, 11), generator=torch.Generator().manual_seed(0))


def build() -> torch.nn.Module:
    """Return a small Llama of random weights; a released one works alike."""
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Do one training step on one rank; return logits, loss and gradients."""
    model = build()
    # What a user writes:
    sequence = parallelize(model, group)
    output = model(**sequence.shard(input_ids=IDS, labels=IDS))
    output.loss.backward()
    sum_gradients(model.parameters(), group)
    # For show: the whole logits and the whole loss.
    with torch.no_grad():
        logits, loss = sequence.gather(output.logits), sequence.total_loss(output.loss)
    return [logits, loss, *(parameter.grad for parameter in model.parameters())]


def compare(group: dist.ProcessGroup) -> None:
    """Hold a rank's results against the model on one process."""
    model = build()
    output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()
    whole = [output.logits, output.loss, *(parameter.grad for parameter in model.parameters())]
    for sharded, expected in zip(step(group), whole, strict=True):
        torch.testing.assert_close(sharded, expected, rtol=1e-3, atol=1e-5)


def main() -> None:
    """Run under torchrun if it started this process, else on simulated ranks."""
    if "LOCAL_RANK" not in os.environ:
        simulate(2, compare)
        print("Two simulated ranks have the logits, the loss and the gradients of one.")
        return
    dist.init_process_group("gloo")
    try:
        compare(dist.group.WORLD)
        print(f"Rank {dist.get_rank()} has the results of a single rank.")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
