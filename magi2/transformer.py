"""The MAGI-2 transformer: packed tokens in, velocities out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from magi2.config import Magi2Config
from magi2.modules.adapters import PostAdapter, PreAdapter
from magi2.modules.block import Block
from magi2.modules.embeddings import check_coords
from magi2.modules.modality import ModalityOrder, check_modality
from magi2.modules.request import RequestPlan, check_cu_seqlens
from magi2.options import Options


class Magi2Transformer(nn.Module):
    """The whole model. Its state dict has the released checkpoint's names.

    The weights are not initialised: load a checkpoint, or call `magi2.initialise.initialise`.
    Float32 products (adapters, hyper-connections, router) are meant to be true float32: leave
    TF32 off, as torch does by default.

    Args:
        config: What the checkpoint fixes.
        options: What it leaves open.
        device: Of the weights; "meta" for shapes alone.
    """

    def __init__(
        self,
        config: Magi2Config,
        options: Options | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.options = options or Options()
        self.expert_heads = range(config.moe.num_heads)
        self.pre_adapter = PreAdapter(config, device)
        self.block = Block(config, self.options, device)
        self.post_adapter = PostAdapter(config, device)

    def forward(
        self,
        x: torch.Tensor,
        coords: torch.Tensor,
        modality: torch.Tensor,
        cu_seqlens: torch.Tensor | Sequence[int],
        time_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Velocities of one packed request.

        Args:
            x: (tokens, channels) float32: latents and text features, zero-filled on the right.
            coords: (tokens, 9) float32: t, h, w, T, H, W, refT, refH, refW.
            modality: (tokens,) integers: 0 video, 1 audio, 2 text, 3 time (counts as text).
            cu_seqlens: Ends of the packed sequences, from 0 to tokens.
            time_tokens: (tokens, n) float32; overwrites the first n embedded channels. n may be 0.

        Returns:
            (tokens, output_channels) float32; rows of text tokens are zero.

        Raises:
            ValueError: If an argument has another shape or dtype, or holds what the model does
                not know.
        """
        return self.run(x, self.plan(coords, modality, cu_seqlens), time_tokens)

    def plan(
        self,
        coords: torch.Tensor,
        modality: torch.Tensor,
        cu_seqlens: torch.Tensor | Sequence[int],
    ) -> RequestPlan:
        """Work out what stays the same over all steps of a request; arguments as `forward`'s."""
        check_coords(coords)
        check_modality(modality)
        if modality.shape[0] != coords.shape[0]:
            raise ValueError(
                f"modality has {modality.shape[0]} ids and coords {coords.shape[0]} rows: expected "
                "one of each for every token."
            )
        return RequestPlan(
            order=ModalityOrder.from_modality(modality),
            rotary=self.pre_adapter.rope(coords),
            cu_seqlens=check_cu_seqlens(cu_seqlens, coords.shape[0]),
        )

    def run(self, x: torch.Tensor, plan: RequestPlan, time_tokens: torch.Tensor) -> torch.Tensor:
        """Velocities of a planned request; arguments as `forward`'s."""
        self._check_tokens(x, plan.cu_seqlens[-1], time_tokens)
        embedded = self.pre_adapter(x, plan.order)
        # Diffusion time enters here and nowhere else: it replaces what was embedded.
        embedded = torch.cat([time_tokens, embedded[:, time_tokens.shape[1] :]], dim=1)
        streams = self.block(embedded.to(self.config.dtype), plan)
        velocities: torch.Tensor = self.post_adapter(streams, plan.order)
        return velocities

    def _check_tokens(self, x: torch.Tensor, num_tokens: int, time_tokens: torch.Tensor) -> None:
        for name, tensor in (("x", x), ("time_tokens", time_tokens)):
            if tensor.dim() != 2 or tensor.dtype != torch.float32 or tensor.shape[0] != num_tokens:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype}: expected ({num_tokens}, "
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
