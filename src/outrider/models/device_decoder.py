"""The decoder as kernels over fixed buffers: what one captured graph holds.

The layers are those of `decoder.py`; here every operand has its place before the step begins, rows that do not exist
are skipped on the device, and nothing is read back. A row's bits do not depend on its bucket.
"""

from copy import copy
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from outrider.config import ModelConfig
from outrider.kernels.device import attention, linear, rope_write
from outrider.kernels.device.embed import embed
from outrider.kernels.device.experts import many_rows
from outrider.kernels.device.norm import add_norm
from outrider.kernels.device.router import route
from outrider.kernels.rope import rope_frequencies
from outrider.kvcache.storage import KVStorage
from outrider.models.layers import Weights
from outrider.models.rows import Rows


class DeviceExperts(Protocol):
    """Expert memory as a captured forward sees it."""

    def run(
        self,
        layer: int,
        x: Tensor,
        ids: Tensor,
        count: Tensor,
        inner: Tensor,
        out: Tensor,
        room: Tensor | None = None,
    ) -> None:
        """Send rows to their experts; see `experts/device_provider.py`."""


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer. qkv [(heads + 2 kv_heads) * dim, hidden]; norms of q and k with their eps, or None."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norms: tuple[Tensor, Tensor, float] | None
    sinks: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    router: Tensor
    router_bias: Tensor | None
    window: int | None


class DeviceDecoder:
    """Dense weights and the sequence of kernels. Every layer must have experts."""

    def __init__(self, config: ModelConfig, weights: Weights, max_context: int) -> None:
        self.config = config
        self._nbytes = 0

        def held(name: str) -> Tensor:
            weight = weights(name)
            self._nbytes += weight.nbytes
            return weight

        self.embedding = held("model.embed_tokens.weight")
        self.layers = [_load(config, held, layer) for layer in range(config.num_layers)]
        self.norm_weight = held("model.norm.weight")
        self.head = self.embedding if config.tie_embeddings else held("lm_head.weight")
        frequencies, factor = rope_frequencies(config.head_dim, config.rope_theta, config.yarn)
        self.cos, self.sin = rope_write.tables(frequencies.to(self.embedding.device), factor, max_context)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense weights that are held, a tied head counted once."""
        return self._nbytes

    def forward(self, rows: Rows, buffers: "Buffers", kv: KVStorage, experts: DeviceExperts) -> None:
        """Run all layers on the rows; leaves `buffers.x`, the residual stream before the final norm, and its taps,
        `buffers.h`, the final norm's output, and `buffers.ids`, every layer's routes."""
        b = buffers
        self.begin(rows, b)
        for index in range(len(self.layers)):
            self.mix(index, rows, b, kv)
            experts.run(index, b.h, b.ids[index], rows.count, b.inner, b.expert_out, b.room)
            self.add(index, b, rows.count)

    def begin(self, rows: Rows, b: "Buffers") -> None:
        """Embed the rows, and norm them for the first layer."""
        embed(rows.ids, self.embedding, b.x, rows.count)
        add_norm(b.x, None, None, self.layers[0].attention_norm, self.config.rms_norm_eps, b.h, rows.count)

    def mix(self, index: int, rows: Rows, b: "Buffers", kv: KVStorage) -> None:
        """Attention and router of a layer."""
        layer, config, count, eps = self.layers[index], self.config, rows.count, self.config.rms_norm_eps
        linear.project(b.h, layer.qkv, b.qkv, count)
        keys, values = kv.layer(index)
        rope_write.rope_write(
            b.qkv, layer.qkv_bias, layer.qk_norms, self.cos, self.sin, rows.positions, rows.slots, b.query, keys,
            values, count,
        )  # fmt: skip
        attention.attend(
            b.query, keys, values, rows.tables, rows.units, rows.sequences, rows.positions, rows.limits, count,
            layer.window, layer.sinks, b.scratch, b.attended, rows.unit,
        )  # fmt: skip
        linear.project(b.attended.flatten(1), layer.output, b.projected, count)
        add_norm(b.x, b.projected, layer.output_bias, layer.mlp_norm, eps, b.h, count)
        linear.project(b.h, layer.router, b.logits, count)
        over_all = config.family == "qwen3_moe" and not config.normalize_top_k
        route(b.logits, layer.router_bias, over_all, b.ids[index], b.mix, count)

    def add(self, index: int, b: "Buffers | LongBuffers", count: Tensor) -> None:
        """Add what the experts gave to the residual stream, and norm it for what follows."""
        last = index + 1 == len(self.layers)
        norm = self.norm_weight if last else self.layers[index + 1].attention_norm
        add_norm(b.x, b.expert_out, None, norm, self.config.rms_norm_eps, b.h, count, b.mix, b.taps.get(index))


class Buffers:
    """Activations of one row bucket, carved out of memory that all buckets share (`memory`, uint8; None: only measure).

    What lies behind the columns of `h`, `inner` and `room` has to stay zero, so those have one place in all buckets,
    `inner` one for steps of many rows an expert (which have a `room`) and one for those of few.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        most: int,
        taps: tuple[int, ...],
        dtype: torch.dtype,
        memory: Tensor | None,
    ) -> None:
        self.rows = rows
        self._memory, self._used = memory, 0
        heads, dim, hidden, k = config.num_heads, config.head_dim, config.hidden_size, config.experts_per_token
        width, inner, f32 = (heads + 2 * config.num_kv_heads) * dim, config.expert_intermediate, torch.float32
        padded, experts = -(-inner // 64) * 64, config.num_experts
        self.h = self._carve(dtype, most, -(-hidden // 64) * 64)[:rows]
        self.inner = self._carve(dtype, most * k, padded)[: rows * k]
        self.room: Tensor | None = None
        if many_rows(most, k, experts):
            room, wide = self._carve(dtype, most, self.h.shape[1]), self._carve(dtype, most * k, padded)
            if many_rows(rows, k, experts):
                self.room, self.inner = room[:rows], wide[: rows * k]
        self.x = self._carve(dtype, rows, hidden)
        self.qkv = self._carve(f32, linear.parts_for(width, hidden), rows, width)
        self.query = self._carve(dtype, rows, heads, dim)
        self.attended = self._carve(dtype, rows, heads, dim)
        self.projected = self._carve(f32, linear.parts_for(hidden, heads * dim), rows, hidden)
        self.logits = self._carve(f32, linear.parts_for(config.num_experts, hidden), rows, config.num_experts)
        self.ids = self._carve(torch.int32, config.num_layers, rows, k)
        self.mix = self._carve(f32, rows, k)
        self.expert_out = self._carve(f32, rows * k, hidden)
        self.features = self._carve(dtype, rows, len(taps) * hidden)
        self.taps = taps_of(self.features, taps)
        self.scratch = attention.Scratch(
            self._carve(f32, rows, heads, attention.SPLITS, dim),
            self._carve(f32, rows, heads, attention.SPLITS),
            self._carve(f32, rows, heads, attention.SPLITS),
        )
        self.nbytes = self._used

    def _carve(self, dtype: torch.dtype, *shape: int) -> Tensor:
        start, nbytes = self._used, dtype.itemsize * prod(shape)
        self._used += -(-nbytes // 256) * 256
        if self._memory is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._memory[start : start + nbytes].view(dtype).view(shape)


class LongBuffers:
    """Activations of a long prompt whose attention runs in slices of `buffers.rows` rows, with the scratch of
    `buffers`: what lives from one slice to the next.

    Attributes: slices: `buffers` with the rows of each slice in place.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        buffers: "Buffers",
        taps: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        of, f32 = partial(torch.zeros, device=device), torch.float32
        hidden, k, inner = config.hidden_size, config.experts_per_token, config.expert_intermediate
        self.x = of(rows, hidden, dtype=dtype)
        self.h, self.room = (of(rows, -(-hidden // 64) * 64, dtype=dtype) for _ in range(2))
        self.inner = of(rows * k, -(-inner // 64) * 64, dtype=dtype)
        self.expert_out = of(rows * k, hidden, dtype=f32)
        self.ids = of(config.num_layers, rows, k, dtype=torch.int32)
        self.mix = of(rows, k, dtype=f32)
        self.features = of(rows, len(taps) * hidden, dtype=dtype)
        self.taps = taps_of(self.features, taps)
        held = (self.x, self.h, self.room, self.inner, self.expert_out, self.ids, self.mix, self.features)
        self.nbytes = sum(tensor.nbytes for tensor in held)
        self.slices = []
        for start in range(0, rows, buffers.rows):
            own, span = copy(buffers), slice(start, start + buffers.rows)
            own.x, own.h, own.ids, own.mix = self.x[span], self.h[span], self.ids[:, span], self.mix[span]
            self.slices.append(own)


def taps_of(features: Tensor, taps: tuple[int, ...]) -> dict[int, Tensor]:
    """Columns of `features` [rows, taps * hidden] by tapped layer."""
    return dict(zip(taps, features.chunk(len(taps), dim=1), strict=True)) if taps else {}


def _load(config: ModelConfig, weights: Weights, layer: int) -> _Layer:
    prefix = f"model.layers.{layer}"
    attention_prefix = f"{prefix}.self_attn"
    gpt_oss = config.family == "gpt_oss"
    router = f"{prefix}.mlp.{'router' if gpt_oss else 'gate'}"
    biased = config.attention_bias

    def joined(kind: str) -> Tensor:
        return torch.cat([weights(f"{attention_prefix}.{name}_proj.{kind}") for name in "qkv"])

    norms = None
    if not gpt_oss:
        q_norm, k_norm = (weights(f"{attention_prefix}.{name}_norm.weight") for name in "qk")
        norms = q_norm, k_norm, config.rms_norm_eps
    return _Layer(
        attention_norm=weights(f"{prefix}.input_layernorm.weight"),
        qkv=joined("weight"),
        qkv_bias=joined("bias") if biased else None,
        qk_norms=norms,
        sinks=weights(f"{attention_prefix}.sinks") if gpt_oss else None,
        output=weights(f"{attention_prefix}.o_proj.weight"),
        output_bias=weights(f"{attention_prefix}.o_proj.bias") if biased else None,
        mlp_norm=weights(f"{prefix}.post_attention_layernorm.weight"),
        router=weights(f"{router}.weight"),
        router_bias=weights(f"{router}.bias") if gpt_oss else None,
        window=config.windows[layer],
    )
