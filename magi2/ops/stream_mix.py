"""Residual streams to a branch's input, and the branch's output back to the streams.

Letters: T tokens, S streams, C channels.
"""

from __future__ import annotations

import torch


def mix_streams_torch(x_TSC: torch.Tensor, pre_TS: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the streams, (T, C): accumulated in float32, rounded once to x's dtype."""
    total = pre_TS[:, 0, None].float() * x_TSC[:, 0].float()
    for stream in range(1, x_TSC.shape[1]):
        total = total + pre_TS[:, stream, None].float() * x_TSC[:, stream].float()
    return total.to(x_TSC.dtype)


def hyper_connect_torch(
    x_TSC: torch.Tensor, y_TC: torch.Tensor, post_TS: torch.Tensor, res_TSS: torch.Tensor
) -> torch.Tensor:
    """Next streams: the old ones mixed by `res`, plus the branch's output scaled by `post`.

    `X'_i = sum_j res[i, j] * X_j + post[i] * y`, accumulated in float32 in ascending j with the
    branch term last, rounded once to x's dtype. (T, S, C).
    """
    total = res_TSS[:, :, 0, None].float() * x_TSC[:, None, 0].float()
    for stream in range(1, x_TSC.shape[1]):
        total = total + res_TSS[:, :, stream, None].float() * x_TSC[:, None, stream].float()
    total = total + post_TS[:, :, None].float() * y_TC[:, None].float()
    return total.to(x_TSC.dtype)
