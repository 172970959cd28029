"""Dense layers as small callables over named weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from outrider.config import ModelConfig
from outrider.kernels.attention import attention
from outrider.kernels.linear import linear
from outrider.kernels.rms_norm import rms_norm
from outrider.kernels.rope import apply_rope
from outrider.kvcache.storage import KVStorage
from outrider.models.batch import Batch

Weights = Callable[[str], Tensor]
"""Gives a dense tensor by its full name, on the device and in the dtype of the engine."""


@dataclass(frozen=True)
class Linear:
    """weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def load(cls, weights: Weights, name: str, bias: bool = False) -> "Linear":
        """The projection called `name`."""
        return cls(weights(f"{name}.weight"), weights(f"{name}.bias") if bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class RMSNorm:
    """weight [dim]."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class DenseMLP:
    """silu(gate) * up, then down."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self.gate, self.up, self.down = (Linear.load(weights, f"{prefix}.{n}_proj") for n in ("gate", "up", "down"))

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention:
    """Grouped-query attention of layer `layer`: sinks (gpt-oss) or per-head q/k norms (Qwen3), a window or none."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self.layer, self.head_dim, self.window = layer, config.head_dim, config.windows[layer]
        self.q, self.k, self.v, self.o = (
            Linear.load(weights, f"{prefix}.{n}_proj", config.attention_bias) for n in ("q", "k", "v", "o")
        )
        self.sinks = weights(f"{prefix}.sinks") if config.family == "gpt_oss" else None
        self.norms = None
        if config.family == "qwen3_moe":
            q_norm, k_norm = (RMSNorm(weights(f"{prefix}.{n}_norm.weight"), config.rms_norm_eps) for n in ("q", "k"))
            self.norms = q_norm, k_norm

    def __call__(self, x: Tensor, batch: Batch, kv: KVStorage, rope: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q, self.k, self.v))
        if self.norms:
            query, key = self.norms[0](query), self.norms[1](key)
        query, key = apply_rope(query, *rope), apply_rope(key, *rope)
        kv.write(self.layer, batch.slots, key, value)
        output = query.new_empty(query.shape)
        for span in batch.spans:
            keys, values = kv.gather(self.layer, span.pages, span.position + span.stop - span.start)
            rows = query[span.start : span.stop]
            output[span.start : span.stop] = attention(rows, keys, values, span.position, self.window, self.sinks)
        return self.o(output.flatten(1))
