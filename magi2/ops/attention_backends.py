"""Packed attention with sinks, by whichever kernel serves the device: the one place that decides.

    torch       the plain form, exact in float32, which has gradients
    cudnn       cuDNN's attention, as torch calls it
    flash       the FlashAttention that torch brings
    varlen      torch.nn.attention.varlen, for packed sequences
    flash_attn  the package flash-attn, where it is installed
    flex        FlexAttention, compiled; can cap scores, and on a GPU has gradients
    cpu_flash   torch's blocked attention for CPUs
    musa        what torch_musa's scaled_dot_product_attention calls
    auto        a kernel where it was run and measured on the kind of device; else torch

All but "torch" round their result to the activation dtype before the sinks take their part, and so
does "torch": two roundings everywhere, of sums in different orders.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from magi2.ops import attention_kernels as kernels
from magi2.ops.attention import packed_attention_torch, sink_weights_torch
from magi2.ops.attention_heads import weigh_heads_triton
from magi2.ops.head_backend import choose_heads
from magi2.ops.packed_sequences import PackedSequences
from ulysses_comm.hardware import Choice

ATTENTION_BACKENDS = (
    "auto",
    "torch",
    "cudnn",
    "flash",
    "varlen",
    "flash_attn",
    "flex",
    "cpu_flash",
    "musa",
)

_HALVES = (torch.bfloat16, torch.float16)
_ALL = (*_HALVES, torch.float32)


@dataclass(frozen=True, kw_only=True)
class _Backend:
    """A kernel, and what it can do.

    Attributes:
        run: The kernel.
        kinds: Of devices.
        dtypes: Of q, k and v.
        missing: Says why it is not there on the device of a tensor, or None.
        head_dims: Largest head, and what it is a multiple of.
        caps: Whether it can cap scores.
        gradients: Kinds of devices where it has them, those of the log-sum-exp included.
    """

    run: kernels.Kernel
    kinds: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = _HALVES
    missing: Callable[[torch.Tensor], str | None] = lambda q: None
    head_dims: tuple[int, int] = (256, 8)
    caps: bool = False
    gradients: tuple[str, ...] = ()


def _missing_cudnn(q: torch.Tensor) -> str | None:
    if not hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention"):
        return "this torch has no cuDNN attention"
    if not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return "torch.backends.cuda.enable_cudnn_sdp(False) forbids it"
    return _too_old(q)


def _missing_flash(q: torch.Tensor) -> str | None:
    if not hasattr(torch.ops.aten, "_flash_attention_forward"):
        return "this torch has no FlashAttention for packed sequences"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without FlashAttention"
    if not torch.backends.cuda.flash_sdp_enabled():
        return "torch.backends.cuda.enable_flash_sdp(False) forbids it"
    return _too_old(q)


def _missing_varlen(q: torch.Tensor) -> str | None:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return "this torch has no torch.nn.attention.varlen"
    return _missing_flash(q)


def _too_old(q: torch.Tensor) -> str | None:
    major, minor = torch.cuda.get_device_capability(q.device)
    return None if major >= 8 else f"the GPU has compute capability {major}.{minor}, below 8.0"


def _missing_package(q: torch.Tensor) -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    return None


def _missing_musa(q: torch.Tensor) -> str | None:
    if kernels.musa_operator() is None:
        return "this torch_musa has no attention that returns a log-sum-exp"
    return _musa_mismatch(q.device, q.dtype)


@functools.cache
def _musa_mismatch(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why torch_musa's attention cannot be trusted here, or None; tried once on a few tokens."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(48, 2, 64, generator=generator).to(device, dtype) for _ in range(3))
    packed = PackedSequences((0, 20, 48))
    try:
        for start, end, out, lse in kernels.attend_musa(q, k, v, packed, 0.0):
            own = (q[start:end], k[start:end], v[start:end])
            plain, plain_lse = packed_attention_torch(*own, (0, end - start), 0.0)
            torch.testing.assert_close(out.float(), plain.float(), rtol=0.02, atol=0.02)
            torch.testing.assert_close(lse, plain_lse, rtol=1e-3, atol=1e-3)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        return f"torch_musa's attention failed a trial on 48 tokens: {str(error).splitlines()[0]}"
    return None


_BACKENDS = {
    "cudnn": _Backend(
        run=kernels.attend_cudnn, kinds=("cuda",), missing=_missing_cudnn, head_dims=(128, 8)
    ),
    "flash": _Backend(run=kernels.attend_flash, kinds=("cuda",), missing=_missing_flash),
    "varlen": _Backend(run=kernels.attend_varlen, kinds=("cuda",), missing=_missing_varlen),
    "flash_attn": _Backend(
        run=kernels.attend_flash_attn,
        kinds=("cuda", "musa"),
        missing=_missing_package,
        caps=True,
    ),
    "flex": _Backend(
        run=kernels.attend_flex,
        kinds=("cuda", "cpu"),
        dtypes=_ALL,
        head_dims=(256, 16),
        caps=True,
        gradients=("cuda",),
    ),
    "cpu_flash": _Backend(
        run=kernels.attend_cpu_flash,
        kinds=("cpu",),
        dtypes=_ALL,
        head_dims=(1024, 1),
    ),
    "musa": _Backend(run=kernels.attend_musa, kinds=("musa",), missing=_missing_musa),
}

# What "auto" tries on each kind of device, best first; torch is what is left. Kernels come in here
# once `benchmarks/bench_attention.py` and the tests marked `gpu` were run there.
_AUTO: dict[str, tuple[str, ...]] = {"cuda": ("cudnn", "flash")}


def choose_attention(
    requested: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float
) -> Choice:
    """Decide for one attention.

    Args:
        requested: One of `ATTENTION_BACKENDS`.
        q: (tokens, heads, head_dim).
        k: (tokens, kv_heads, head_dim).
        v: As k.
        softcap: Zero or less for none.

    Returns:
        The backend, never "auto", with the reason.

    Raises:
        ValueError: If `requested` is no backend.
        RuntimeError: If it was asked for by name and cannot do this.
    """
    check_attention_backend(requested)
    if requested == "torch":
        return Choice("torch", "asked for")
    if requested != "auto":
        obstacle = _obstacle(requested, (q, k, v), softcap)
        if obstacle is not None:
            raise RuntimeError(
                f"attention_backend={requested!r} cannot run: {obstacle}. Use 'auto', which takes "
                "another then."
            )
        return Choice(requested, "asked for")
    obstacles: list[str] = []
    for name in _AUTO.get(_kind_of(q), ()):
        obstacle = _obstacle(name, (q, k, v), softcap)
        if obstacle is None:
            reason = f"q is {str(q.dtype).removeprefix('torch.')} on {q.device}"
            return Choice(name, "; ".join([reason, *obstacles]))
        obstacles.append(f"not {name}: {obstacle}")
    return Choice("torch", "; ".join(obstacles) or f"q is on {q.device}")


def check_attention_backend(requested: str) -> None:
    """Refuse a name that is none.

    Raises:
        ValueError: As said.
    """
    if requested not in ATTENTION_BACKENDS:
        raise ValueError(f"attention_backend={requested!r}: expected one of {ATTENTION_BACKENDS}.")


def check_attention_device(requested: str, device: torch.device) -> None:
    """Find out before weights are read whether a backend can run on a device at all.

    Args:
        requested: One of `ATTENTION_BACKENDS`.
        device: Where the model will be.

    Raises:
        ValueError: If it was asked for by name and cannot.
    """
    check_attention_backend(requested)
    if requested in ("auto", "torch"):
        return
    backend = _BACKENDS[requested]
    if device.type in backend.kinds:
        obstacle = backend.missing(torch.empty(0, dtype=_HALVES[0], device=device))
    else:
        obstacle = f"it serves {' and '.join(backend.kinds)}"
    if obstacle is not None:
        raise ValueError(
            f"attention_backend={requested!r} cannot run on {device.type}: {obstacle}. Use 'auto', "
            "which takes another then."
        )


def attend_with_sinks(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    packed: PackedSequences,
    sink_total_H: torch.Tensor,
    softcap: float = 0.0,
    backend: str = "auto",
    weigh: str = "auto",
) -> torch.Tensor:
    """Attention inside each sequence, in whose softmax sinks without values take part.

    Args:
        q_THD: (tokens, heads, head_dim), any strides with adjacent channels.
        k_TGD: (tokens, kv_heads, head_dim) alike; query head h reads `h * kv_heads // heads`.
        v_TGD: As k.
        packed: The sequences.
        sink_total_H: (heads,) float32 log-sum-exp of each head's sinks, neither scaled nor capped.
        softcap: Scores become `softcap * tanh(score / softcap)`; zero or less for none.
        backend: One of `ATTENTION_BACKENDS`.
        weigh: What lets the sinks take their part: one of `QKV_BACKENDS`. A kernel's weights are a
            few units of float32 from torch's.

    Returns:
        (tokens, heads, head_dim), dense, in q's dtype. The attention is rounded to it once, and
        once more after its product with the float32 weight that the sinks leave it.

    Raises:
        ValueError: If `backend` is none.
        RuntimeError: If it cannot do this.

    Under torch.compile it is one operator, as long as no gradient is recorded.
    """
    tensors = (q_THD, k_TGD, v_TGD)
    recorded = _records((*tensors, sink_total_H))
    if torch.compiler.is_compiling() and not recorded:
        check_attention_backend(backend)
        result: torch.Tensor = packed_attention_op(
            *tensors, sink_total_H, list(packed.ends), softcap, backend, weigh
        )
        return result
    if torch.compiler.is_compiling():
        backend = weigh = "torch"
    name = choose_attention(backend, *tensors, softcap).name
    pieces = (kernels.attend_plainly if name == "torch" else _BACKENDS[name].run)(
        *tensors, packed, softcap
    )
    if recorded or (name == "torch" and weigh != "triton"):
        weighted = [
            (p.out.float() * sink_weights_torch(p.lse, sink_total_H).unsqueeze(-1)).to(p.out.dtype)
            for p in pieces
        ]
        return weighted[0] if len(weighted) == 1 else torch.cat([q_THD[:0], *weighted])
    return _joined(pieces, q_THD, sink_total_H, weigh)


def _joined(
    pieces: Iterator[kernels.Attended], q_THD: torch.Tensor, sink_total_H: torch.Tensor, weigh: str
) -> torch.Tensor:
    """The pieces side by side, each times what the sinks leave it: one pass, one rounding."""
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if choose_heads(weigh, "weigh", q_THD, [sink_total_H]).name == "triton":
        for start, end, attended, lse in pieces:
            weigh_heads_triton(attended, lse, sink_total_H, out[start:end])
        return out
    waiting = list(pieces)
    # exp(lse - logaddexp(lse, total)) with fewer launches and roundings, and stored in the order in
    # which the product walks over it. Differences that are no number leave nothing.
    weight_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
    for start, end, _, lse in waiting:
        finite = lse.nan_to_num(torch.nan, torch.nan, torch.nan)
        torch.sub(finite, sink_total_H, out=weight_TH[start:end])
    weight_TH1 = weight_TH.sigmoid_().nan_to_num_(0.0).unsqueeze(-1)
    for start, end, attended, _ in waiting:
        torch.mul(attended, weight_TH1[start:end], out=out[start:end])
    return out


@torch.library.custom_op("magi2::packed_attention", mutates_args=())
def packed_attention_op(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    sink_total_H: torch.Tensor,
    ends: Sequence[int],
    softcap: float,
    backend: str,
    weigh: str,
) -> torch.Tensor:
    """`attend_with_sinks` as an operator that a compiler takes whole."""
    return attend_with_sinks(
        q_THD, k_TGD, v_TGD, PackedSequences(ends), sink_total_H, softcap, backend, weigh
    )


@packed_attention_op.register_fake
def _(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    sink_total_H: torch.Tensor,
    ends: Sequence[int],
    softcap: float,
    backend: str,
    weigh: str,
) -> torch.Tensor:
    return q_THD.new_empty(q_THD.shape)


def _obstacle(
    name: str, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], softcap: float
) -> str | None:
    """Why this backend cannot do this, or None."""
    backend, q = _BACKENDS[name], tensors[0]
    if _kind_of(q) not in backend.kinds:
        return f"q is on {q.device}, and it serves {' and '.join(backend.kinds)}"
    if _records(tensors) and _kind_of(q) not in backend.gradients:
        return "gradients are recorded, which it has not; torch.no_grad() stops that"
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"{type(tensor).__name__} is a tensor subclass, which may hold no memory"
        if tensor.dtype not in backend.dtypes or tensor.dtype != q.dtype:
            return f"q, k and v are {[t.dtype for t in tensors]}, and it takes {backend.dtypes}"
        if tensor.stride(2) != 1 and tensor.shape[2] > 1:
            return f"a tensor has strides {tensor.stride()}, and it reads adjacent channels"
    largest, multiple = backend.head_dims
    if q.shape[2] > largest or q.shape[2] % multiple:
        return f"head_dim is {q.shape[2]}, and it takes multiples of {multiple} up to {largest}"
    if softcap > 0 and not backend.caps:
        return f"softcap is {softcap}, and it caps no scores"
    return backend.missing(q)


def _records(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _kind_of(tensor: torch.Tensor) -> str:
    return tensor.device.type
