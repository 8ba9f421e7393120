"""Residual streams to a branch's input, and the branch's output back to the streams.

Letters: T tokens, S streams, C channels.
"""

from __future__ import annotations

import torch


def mix_streams_torch(x_TSC: torch.Tensor, pre_TS: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the streams, (T, C): accumulated in float32, rounded once to x's dtype.

    Float64 streams are mixed in float64.
    """
    total = _wide(pre_TS[:, 0, None]) * _wide(x_TSC[:, 0])
    for stream in range(1, x_TSC.shape[1]):
        total = total + _wide(pre_TS[:, stream, None]) * _wide(x_TSC[:, stream])
    return total.to(x_TSC.dtype)


def hyper_connect_torch(
    x_TSC: torch.Tensor, y_TC: torch.Tensor, post_TS: torch.Tensor, res_TSS: torch.Tensor
) -> torch.Tensor:
    """Next streams: the old ones mixed by `res`, plus the branch's output scaled by `post`.

    `X'_i = sum_j res[i, j] * X_j + post[i] * y`, accumulated in float32 in ascending j with the
    branch term last, rounded once to x's dtype. (T, S, C). Float64 streams are mixed in float64.
    """
    total = _wide(res_TSS[:, :, 0, None]) * _wide(x_TSC[:, None, 0])
    for stream in range(1, x_TSC.shape[1]):
        total = total + _wide(res_TSS[:, :, stream, None]) * _wide(x_TSC[:, None, stream])
    total = total + _wide(post_TS[:, :, None]) * _wide(y_TC[:, None])
    return total.to(x_TSC.dtype)


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()
