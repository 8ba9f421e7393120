"""The transformer once more, from its specification alone: float64, one token at a time.

It shares no code with `magi2`: it reads the configuration's numbers and a state dict. Slow, and
without any rounding to the activation dtype, so it judges float32 configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from magi2.config import Magi2Config


class Oracle:
    """Velocities by the specification's formulas.

    Args:
        config: Sizes and choices.
        state: Weights under their released names.

    Attributes:
        margin: The smallest gap met between the last chosen and the first rejected expert.
    """

    def __init__(self, config: Magi2Config, state: Mapping[str, Tensor]) -> None:
        self.config = config
        self.state = {name: tensor.double() for name, tensor in state.items()}
        self.margin = math.inf

    def __call__(
        self,
        x: Tensor,
        coords: Tensor,
        modality: Tensor,
        cu_seqlens: Sequence[int],
        time_tokens: Tensor,
    ) -> Tensor:
        kinds = [min(int(kind), 2) for kind in modality]
        angles = [self.angles(row) for row in coords.double().tolist()]
        state = [self.embed(row, kind) for row, kind in zip(x.double(), kinds, strict=True)]
        streams = []
        for row, time in zip(state, time_tokens.double(), strict=True):
            row[: len(time)] = time
            streams.append(row.view(self.config.num_streams, self.config.hidden_size))
        for layer in range(self.config.num_layers):
            streams = self.connect(layer, "attn", streams, kinds, angles, cu_seqlens)
            streams = self.connect(layer, "mlp", streams, kinds, angles, cu_seqlens)
        rows = [
            self.velocity(row.flatten(), kind) for row, kind in zip(streams, kinds, strict=True)
        ]
        return torch.stack(rows)

    def embed(self, row: Tensor, kind: int) -> Tensor:
        name = ("video", "audio", "text")[kind]
        weight = self.state[f"pre_adapter.{name}_embedder.weight"]
        return weight @ row[: weight.shape[1]] + self.state[f"pre_adapter.{name}_embedder.bias"]

    def velocity(self, row: Tensor, kind: int) -> Tensor:
        config = self.config
        out = torch.zeros(max(config.video_channels, config.audio_channels)).double()
        if kind < 2:
            name = ("video", "audio")[kind]
            weight = self.state[f"post_adapter.final_linear_{name}.weight"]
            normed = self.norm(row, self.state[f"post_adapter.final_norm_{name}.weight"])
            out[: weight.shape[0]] = weight @ normed
        return out

    def angles(self, coords: list[float]) -> list[float]:
        bands = self.state["pre_adapter.rope.bands"].tolist()
        found = []
        for axis in range(3):
            position, size, reference = coords[axis], coords[axis + 3], coords[axis + 6]
            scale = 1.0 if size == reference == 1 else (reference - 1) / (size - 1)
            centre = 0.0 if axis == 0 else (size - 1) / 2
            found += [(position - centre) * scale * band for band in bands]
        return found

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / math.sqrt(float((x * x).mean()) + 1e-6) * (1 + weight)

    def part(self, name: str, kind: int, count: int) -> Tensor:
        """The weight set of a modality, where the tensor has one for each."""
        weight = self.state[name]
        rows = weight.shape[0] // count
        return weight[kind * rows : (kind + 1) * rows] if count == 3 else weight

    def connect(self, layer, branch, streams, kinds, angles, ends) -> list[Tensor]:
        config, n = self.config, self.config.num_streams
        prefix, sets = f"block.layers.{layer}.", 3 if layer in config.multimodal_layers else 1
        get = lambda name: self.state[f"{prefix}mhc_{name}_{branch}"]  # noqa: E731
        gain = 1 / math.sqrt(n * config.hidden_size)
        inputs, posts, mixes = [], [], []
        for x, kind in zip(streams, kinds, strict=True):
            z = self.norm(x.flatten(), self.part(f"{prefix}mhc_norm.weight", kind, sets))
            raw = z @ get("phi_fused")
            pre = torch.sigmoid(get("alpha_pre") * gain * raw[:n] + get("bias_pre"))
            posts.append(
                2 * torch.sigmoid(get("alpha_post") * gain * raw[n : 2 * n] + get("bias_post"))
            )
            mix = torch.exp(get("alpha_res") * gain * raw[2 * n :].view(n, n) + get("bias_res"))
            for _ in range(20):
                mix = mix / mix.sum(0)[None, :]
                mix = mix / mix.sum(1)[:, None]
            mixes.append(mix)
            inputs.append(sum(pre[j] * x[j] for j in range(n)))
        if branch == "attn":
            outputs = self.attention(f"{prefix}attention.", sets, inputs, kinds, angles, ends)
        elif layer in config.moe.layers:
            outputs = [
                self.mixture(f"{prefix}mlp.", u, k) for u, k in zip(inputs, kinds, strict=True)
            ]
        else:
            outputs = [
                self.dense(f"{prefix}mlp.", sets, u, k) for u, k in zip(inputs, kinds, strict=True)
            ]
        return [
            torch.stack([sum(mix[i, j] * x[j] for j in range(n)) + post[i] * y for i in range(n)])
            for mix, x, post, y in zip(mixes, streams, posts, outputs, strict=True)
        ]

    def rotate(self, head: Tensor, angles: list[float]) -> Tensor:
        out, half = head.clone(), len(angles)
        for j, angle in enumerate(angles):
            out[j] = head[j] * math.cos(angle) - head[j + half] * math.sin(angle)
            out[j + half] = head[j + half] * math.cos(angle) + head[j] * math.sin(angle)
        return out

    def attention(self, prefix, sets, inputs, kinds, angles, ends) -> list[Tensor]:
        config, d = self.config, self.config.head_dim
        heads, kv_heads = config.hidden_size // d, config.num_kv_heads
        queries, keys, values, gates = [], [], [], []
        for u, kind, angle in zip(inputs, kinds, angles, strict=True):
            own = lambda name, kind=kind: self.part(f"{prefix}{name}.weight", kind, sets)  # noqa: E731
            x = self.norm(u, own("pre_norm"))
            gates.append(torch.sigmoid(own("linear_g") @ x))
            qkv = (own("linear_qkv") @ x).view(heads + 2 * kv_heads, d)
            q, k, v = qkv[:heads], qkv[heads : heads + kv_heads], qkv[heads + kv_heads :]
            queries.append([self.rotate(self.norm(h, own("q_norm")), angle) for h in q])
            keys.append([self.rotate(self.norm(h, own("k_norm")), angle) for h in k])
            values.append(v)
        sinks, outputs = self.state[f"{prefix}sinks"], []
        for token, kind in enumerate(kinds):
            start, end = next((a, b) for a, b in pairwise(ends) if a <= token < b)
            row = []
            for head in range(heads):
                kv, total, out = head * kv_heads // heads, 0.0, torch.zeros(d).double()
                for other in range(start, end):
                    score = float(queries[token][head] @ keys[other][kv]) / math.sqrt(d)
                    if config.attention_softcap > 0:
                        cap = config.attention_softcap
                        score = cap * math.tanh(score / cap)
                    total += math.exp(score)
                    out += math.exp(score) * values[other][kv]
                total += float(sinks[:, head].exp().sum())
                row.append(out / total * gates[token][head])
            outputs.append(self.part(f"{prefix}linear_proj.weight", kind, sets) @ torch.cat(row))
        return outputs

    def activate(self, gate: Tensor, linear: Tensor) -> Tensor:
        gate, linear = gate.clamp(max=7.0), linear.clamp(-7.0, 7.0)
        return gate / (1 + torch.exp(-1.702 * gate)) * (linear + 1)

    def gated(self, first: Tensor, second: Tensor, x: Tensor) -> Tensor:
        inner = first @ x
        return second @ self.activate(inner[0::2], inner[1::2])

    def dense(self, prefix: str, sets: int, u: Tensor, kind: int) -> Tensor:
        own = lambda name: self.part(f"{prefix}{name}.weight", kind, sets)  # noqa: E731
        return self.gated(own("up_gate_proj"), own("down_proj"), self.norm(u, own("pre_norm")))

    def mixture(self, prefix: str, u: Tensor, kind: int) -> Tensor:
        get = lambda name: self.state[f"{prefix}{name}.weight"]  # noqa: E731
        own = lambda name: self.part(f"{prefix}{name}.weight", kind, 3)  # noqa: E731
        x = self.norm(u, own("pre_norm"))
        slices = (get("split_linear") @ x).chunk(self.config.moe.num_heads)
        routed = get("merge_linear") @ torch.cat(
            [self.routed(f"{prefix}moe_mlp.", head, part) for head, part in enumerate(slices)]
        )
        shared = self.gated(get("shared_expert_fc1"), get("shared_expert_fc2"), x)
        name = "modality_specific_shared_expert_fc"
        return routed + shared + self.gated(own(f"{name}1"), own(f"{name}2"), x)

    def routed(self, prefix: str, head: int, x: Tensor) -> Tensor:
        moe = self.config.moe
        rows = range(head * moe.num_experts, (head + 1) * moe.num_experts)
        logits = [float(self.state[f"{prefix}gate"][row] @ x) for row in rows]
        if moe.score_func == "softmax":
            total = sum(math.exp(logit) for logit in logits)
            scores = [math.exp(logit) / total for logit in logits]
        else:
            scores = [1 / (1 + math.exp(-logit)) for logit in logits]
        bias = self.state[f"{prefix}router.expert_bias_ema"].tolist()
        ranked = sorted(range(moe.num_experts), key=lambda e: -scores[e] - bias[rows[e]])
        if moe.top_k < moe.num_experts:
            last, first = (ranked[moe.top_k - 1], ranked[moe.top_k])
            gap = scores[last] + bias[rows[last]] - scores[first] - bias[rows[first]]
            self.margin = min(self.margin, gap)
        chosen = ranked[: moe.top_k]
        scale = moe.route_scale / (sum(scores[e] for e in chosen) if moe.route_norm else 1.0)
        out = torch.zeros_like(x)
        for expert in chosen:
            gate, up, down = (
                self.state[prefix + n][rows[expert]] for n in ("W_gate", "W_up", "W_down")
            )
            out += scale * scores[expert] * (self.activate(x @ gate, x @ up) @ down)
        return out
