"""The MAGI-2 transformer: packed tokens in, velocities out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from magi2.checks import describe
from magi2.config import Magi2Config
from magi2.modules.adapters import PostAdapter, PreAdapter
from magi2.modules.block import Block
from magi2.modules.embeddings import check_coords
from magi2.modules.modality import ModalityOrder, check_modality
from magi2.modules.replicas import ReplicaDispatcher, expert_dispatcher
from magi2.modules.request import RequestPlan, branch_ends, check_cu_seqlens
from magi2.modules.sequence import SequenceDispatcher
from magi2.options import Options, replicated_exchange_by_default
from magi2.topology import Topology


class Magi2Transformer(nn.Module):
    """The whole model. Its state dict has the released checkpoint's names.

    The weights are not initialised: load a checkpoint, or call `magi2.initialise.initialise`.
    Float32 products (adapters, hyper-connections, router) are meant to be true float32: leave
    TF32 off, as torch does by default.

    On several ranks every rank is given the whole request, keeps its share of the tokens, and
    returns the whole result. Where branches of guidance have their own ranks, the first half of
    the packed sequences is one branch and the second half the other. Weights are whole on every
    rank, but for the routed experts.

    Gradients flow on several ranks too. Each rank's loss on the result counts, so divide it by
    their number; then add up the gradients of the whole weights over the ranks.

    Args:
        config: What the checkpoint fixes.
        options: What it leaves open.
        topology: The ranks that share the work; None for one rank, whatever torch.distributed runs.
        device: Of the weights; "meta" for shapes alone.
    """

    def __init__(
        self,
        config: Magi2Config,
        options: Options | None = None,
        topology: Topology | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.options = options or Options()
        self.topology = topology or Topology()
        self.expert_heads = self.topology.local_heads(config.moe.num_heads)
        replicated = self.options.replicated_expert_exchange
        if replicated is None:
            replicated = replicated_exchange_by_default(device)
        self.expert_runs = self.topology.expert_runs if replicated else 1
        self.pre_adapter = PreAdapter(config, device)
        self.block = Block(config, self.options, self.topology, device)
        self.post_adapter = PostAdapter(config, device)

    def forward(
        self,
        x: torch.Tensor,
        coords: torch.Tensor,
        modality: torch.Tensor,
        cu_seqlens: torch.Tensor | Sequence[int],
        time_tokens: torch.Tensor,
        split_sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Velocities of one packed request, the same arguments and result on every rank.

        Args:
            x: (tokens, channels) float32: latents and text features, zero-filled on the right.
            coords: (tokens, 9) float32: t, h, w, T, H, W, refT, refH, refW.
            modality: (tokens,) integers: 0 video, 1 audio, 2 text, 3 time (counts as text).
            cu_seqlens: Ends of the packed sequences, from 0 to tokens.
            time_tokens: (tokens, n) float32; overwrites the first n embedded channels. n may be 0.
            split_sizes: Tokens of each rank of the sequence group; None for an even split. Where
                branches have their own ranks, of this rank's branch.

        Returns:
            (tokens, output_channels) float32; rows of text tokens are zero.

        Raises:
            ValueError: If an argument has another shape or dtype, or holds what the model does
                not know: before anything is sent, and on every rank alike.
        """
        plan = self.plan(coords, modality, cu_seqlens, split_sizes)
        return self.run(x, plan, time_tokens)

    def plan(
        self,
        coords: torch.Tensor,
        modality: torch.Tensor,
        cu_seqlens: torch.Tensor | Sequence[int],
        split_sizes: Sequence[int] | None = None,
    ) -> RequestPlan:
        """Work out what stays the same over all steps of a request; arguments as `forward`'s."""
        device = self.pre_adapter.rope.bands.device
        _check_device(device, coords=coords, modality=modality)
        check_coords(coords)
        check_modality(modality)
        if modality.shape[0] != coords.shape[0]:
            raise ValueError(
                f"modality has {modality.shape[0]} ids and coords {coords.shape[0]} rows: expected "
                "one of each for every token."
            )
        topology = self.topology
        ends, sizes = branch_ends(
            check_cu_seqlens(cu_seqlens, coords.shape[0]), topology.cfg_rank, topology.cfg_size
        )
        branches = SequenceDispatcher(group=topology.cfg_group, split_sizes=sizes)
        sequence = SequenceDispatcher.of(topology.sequence_group, ends[-1], split_sizes)
        return RequestPlan(
            order=ModalityOrder.from_modality(sequence.shard(branches.shard(modality))),
            rotary=self.pre_adapter.rope(sequence.shard(branches.shard(coords))),
            cu_seqlens=ends,
            branches=branches,
            sequence=sequence,
            experts=expert_dispatcher(sequence, topology, self.expert_runs),
        )

    def run(self, x: torch.Tensor, plan: RequestPlan, time_tokens: torch.Tensor) -> torch.Tensor:
        """Velocities of a planned request; arguments as `forward`'s."""
        self._check_plan(plan)
        _check_device(plan.rotary.device, x=x, time_tokens=time_tokens)
        self._check_tokens(x, plan.branches.seqlen, time_tokens)
        x, time_tokens = (plan.sequence.shard(plan.branches.shard(t)) for t in (x, time_tokens))
        embedded = self.pre_adapter(x, plan.order)
        # Diffusion time enters here and nowhere else: it replaces what was embedded.
        embedded = torch.cat([time_tokens, embedded[:, time_tokens.shape[1] :]], dim=1)
        streams = self.block(embedded.to(self.config.dtype), plan)
        velocities = self.post_adapter(streams, plan.order)
        return plan.branches.gather(plan.sequence.gather(velocities))

    def _check_plan(self, plan: RequestPlan) -> None:
        topology = self.topology
        mine = {
            "branches": (topology.cfg_rank, topology.cfg_size),
            "sequence": (topology.sequence_rank, topology.sequence_size),
            "experts": (topology.expert_rank, topology.expert_size),
        }
        for name, place in mine.items():
            dispatcher: SequenceDispatcher | ReplicaDispatcher = getattr(plan, name)
            if (dispatcher.rank, dispatcher.world_size) != place:
                raise ValueError(
                    f"the plan's {name} is of rank {dispatcher.rank} of {dispatcher.world_size}, "
                    f"this model is rank {place[0]} of {place[1]}: expected a plan of this model."
                )
        if isinstance(plan.experts, ReplicaDispatcher) and (
            plan.experts.num_runs != topology.expert_runs
        ):
            raise ValueError(
                f"the plan's experts are {plan.experts.num_runs} runs of the sequence group, this "
                f"model's are {topology.expert_runs}: expected a plan of this model."
            )
        if plan.rotary.shape[1] != 6 * self.config.num_rotary_bands:
            raise ValueError(
                f"the plan's rotary table has {plan.rotary.shape[1]} columns: expected "
                f"{6 * self.config.num_rotary_bands}. Plan the request with this model."
            )

    def _check_tokens(self, x: torch.Tensor, num_tokens: int, time_tokens: torch.Tensor) -> None:
        for name, tensor in (("x", x), ("time_tokens", time_tokens)):
            is_matrix = isinstance(tensor, torch.Tensor) and tensor.dim() == 2
            if not is_matrix or tensor.dtype != torch.float32 or tensor.shape[0] != num_tokens:
                raise ValueError(
                    f"{name} is {describe(tensor)}: expected ({num_tokens}, "
                    "channels) float32, one row for each token of cu_seqlens."
                )
        if x.shape[1] != self.config.input_channels:
            raise ValueError(
                f"x has {x.shape[1]} channels: expected {self.config.input_channels}, the widest "
                "modality; fill narrower ones with zeros on the right."
            )
        if time_tokens.shape[1] > self.config.stream_width:
            raise ValueError(
                f"time_tokens has {time_tokens.shape[1]} columns: expected at most "
                f"{self.config.stream_width}, the embedded width."
            )


def _check_device(device: torch.device, **tensors: object) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}: expected {device}, where the request's other "
                "tensors and the model are. Move it there."
            )
