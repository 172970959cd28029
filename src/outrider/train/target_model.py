"""The demo target as a trainable module: the gpt-oss architecture, small.

Contract: parameters are float32 masters under the published names, except that the experts hold unpacked
`gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I] (rows are outputs, so MXFP4 blocks run along the last axis). The
forward computes in `dtype`; with `quantized=True` the experts' weights pass through MXFP4 rounding and gradients go
straight through it. On CUDA attention and experts use flex_attention and grouped matrix products; elsewhere the plain
form, which is also the reference. Expert `b` of row pairs: gate columns are even, up columns odd.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.train.moe import (
    Rounding,
    expert_inputs,
    fake_quant,
    grouped_experts,
    looped_experts,
    mxfp4_values,
)

ALPHA = 1.702
LIMIT = 7.0
_QUERIES = 256  # rows of dense attention at a time


@dataclass(frozen=True)
class TargetConfig:
    """Sizes; `context` in tokens is both the training length and `max_position_embeddings`."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    experts: int = 32
    top_k: int = 4
    intermediate: int = 128
    window: int = 128
    context: int = 2048
    rope_theta: float = 10000.0
    eps: float = 1e-5

    def is_sliding(self, layer: int) -> bool:
        """Even layers see `window` tokens, odd ones everything, as published."""
        return layer % 2 == 0


@dataclass
class Routing:
    """One layer's choice: `logits` float32 [T, E] (all tokens of the batch in order), `chosen` int64 [T, k]."""

    logits: Tensor
    chosen: Tensor


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * (wide * scale)).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with one learned sink logit a head in the softmax's denominator."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        c = config
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden)
        self.sinks = nn.Parameter(torch.zeros(c.heads))

    def forward(self, x: Tensor, rope: Tensor, mask: object) -> Tensor:
        """`x` [B, S, H]; `rope` float32 [2, S, head_dim/2]; `mask` bool [S, S] or a flex BlockMask."""
        q = _rotate(_heads(x, self.q_proj, self.head_dim), rope)
        k = _rotate(_heads(x, self.k_proj, self.head_dim), rope)
        v = _heads(x, self.v_proj, self.head_dim)
        attend = _dense_attention if isinstance(mask, Tensor) else _flex_attention
        out = attend(q, k, v, self.sinks, mask)  # [B, heads, S, head_dim]
        return _linear(out.transpose(1, 2).flatten(2), self.o_proj)


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)


def _heads(x: Tensor, layer: nn.Linear, head_dim: int) -> Tensor:
    flat = _linear(x, layer)
    return flat.view(*flat.shape[:2], -1, head_dim).transpose(1, 2)


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    cos, sin = rope[0], rope[1]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: object) -> Tensor:
    assert isinstance(mask, Tensor)
    parts = []
    for start in range(0, q.shape[2], _QUERIES):
        rows = mask[start : start + _QUERIES]
        seen = rows.any(0).nonzero()
        keys = slice(int(seen[0]), int(seen[-1]) + 1)
        visible = torch.zeros(rows[:, keys].shape, device=q.device).masked_fill(~rows[:, keys], -math.inf)
        # One more key, of zeros, carries the sink: its score is the bias alone and its value adds nothing.
        sink = sinks.float()[:, None, None].expand(-1, len(rows), 1)
        bias = torch.cat((visible.expand(len(sinks), -1, -1), sink), dim=-1).to(q.dtype).unsqueeze(0)
        wider_k, wider_v = (F.pad(t[:, :, keys], (0, 0, 0, 1)) for t in (k, v))
        some = q[:, :, start : start + _QUERIES]
        parts.append(F.scaled_dot_product_attention(some, wider_k, wider_v, attn_mask=bias, enable_gqa=True))
    return torch.cat(parts, dim=2)


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: object) -> Tensor:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    assert isinstance(mask, BlockMask)
    out, lse = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
    # A sink adds exp(sink) to the denominator: scale by exp(lse) / (exp(lse) + exp(sink)).
    kept = torch.sigmoid(lse.float() - sinks.float()[:, None])
    return out * kept.unsqueeze(-1).to(out.dtype)


class Router(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.bias = nn.Parameter(torch.zeros(config.experts))
        self.top_k = config.top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`x` [T, H] -> logits float32 [T, E], weights float32 [T, k] that sum to one, chosen int64 [T, k]."""
        logits = F.linear(x.float(), self.weight, self.bias)
        top, chosen = logits.topk(self.top_k, dim=-1)
        return logits, top.softmax(-1), chosen


class Experts(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        e, h, i = config.experts, config.hidden, config.intermediate
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * i, h))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(e, 2 * i))
        self.down_proj = nn.Parameter(torch.empty(e, h, i))
        self.down_proj_bias = nn.Parameter(torch.zeros(e, h))
        self.rounding: Rounding = mxfp4_values

    def weights(self, dtype: torch.dtype, quantized: bool) -> tuple[Tensor, Tensor]:
        """(gate_up [E, 2I, H], down [E, H, I]) in `dtype`, rounded to MXFP4 values if `quantized`."""
        if not quantized:
            return self.gate_up_proj.to(dtype), self.down_proj.to(dtype)
        first, second = (fake_quant(w, dtype, self.rounding) for w in (self.gate_up_proj, self.down_proj))
        return first, second


class Mlp(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor, weights: tuple[Tensor, Tensor]) -> tuple[Tensor, Routing]:
        """`x` [T, H]; `weights` from `Experts.weights`."""
        logits, scores, chosen = self.router(x)
        e = self.experts
        biases = (e.gate_up_proj_bias.to(x.dtype), e.down_proj_bias.to(x.dtype))
        if x.is_cuda:
            out = grouped_experts(x, expert_inputs(chosen, logits.shape[1]), scores, weights, biases, swiglu)
        else:
            out = looped_experts(x, chosen, scores, weights, biases, swiglu)
        return out, Routing(logits, chosen)


def swiglu(gate_up: Tensor) -> Tensor:
    """The published clamped activation; [..., 2I] with gate and up interleaved -> [..., I]."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(max=LIMIT)
    up = up.clamp(min=-LIMIT, max=LIMIT)
    return (up + 1) * gate * torch.sigmoid(gate * ALPHA)


class Block(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)

    def forward(
        self, x: Tensor, rope: Tensor, mask: object, weights: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`x` [B, S, H] -> the same, router logits [B*S, E], chosen experts [B*S, k]."""
        return self.feed(self.attend(x, rope, mask), weights)

    def attend(self, x: Tensor, rope: Tensor, mask: object) -> Tensor:
        attended: Tensor = self.self_attn(self.input_layernorm(x), rope, mask)
        return x + attended

    def feed(self, x: Tensor, weights: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        out, routing = self.mlp(self.post_attention_layernorm(x).flatten(0, 1), weights)
        return x + out.view_as(x), routing.logits, routing.chosen

    def router_logits(self, x: Tensor) -> Tensor:
        """What `feed` would route by: `x` [B, S, H] after attention -> [B*S, E]."""
        logits: Tensor = self.mlp.router(self.post_attention_layernorm(x).flatten(0, 1))[0]
        return logits


class TargetModel(nn.Module):
    """Token ids int64 [B, S] -> final hidden states [B, S, H]; `logits` applies the tied head."""

    def __init__(self, config: TargetConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self._masks: dict[tuple[int, bool, str], object] = {}

    def initialise(self, seed: int) -> None:
        """Draw every weight from `seed`, on the CPU so that each device starts from the same values."""
        generator = torch.Generator().manual_seed(seed)
        depth = (2 * self.config.layers) ** -0.5
        with torch.no_grad():
            for name, p in self.named_parameters():
                if name.endswith("bias"):
                    p.zero_()
                if p.dim() < 2 or name.endswith("_bias"):
                    continue
                std = 0.02 if "embed" in name or "router" in name else p.shape[-1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj")):
                    std *= depth
                p.copy_(torch.randn(p.shape, generator=generator) * std)

    def forward(self, ids: Tensor, quantized: bool = False) -> tuple[Tensor, list[Routing]]:
        length = ids.shape[1]
        x = self.embed_tokens(ids).to(self.dtype)
        rope = rope_table(self.config, length, ids.device)
        routings = []
        for index, layer in enumerate(self.blocks()):
            mask = self.mask(length, index, ids.device)
            weights = layer.mlp.experts.weights(self.dtype, quantized)
            x, logits, chosen = layer(x, rope, mask, weights)
            routings.append(Routing(logits, chosen))
        return self.norm(x), routings

    def compile_blocks(self) -> None:
        """Compile each block and the MXFP4 rounding (blocks share one graph for each kind of attention)."""
        rounding = torch.compile(mxfp4_values, dynamic=False)
        for block in self.blocks():
            block.compile(dynamic=False)
            block.mlp.experts.rounding = rounding

    def blocks(self) -> Sequence[Block]:
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., vocab], in the dtype of `hidden`."""
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))

    def mask(self, length: int, layer: int, device: torch.device) -> object:
        """What `Block` wants as mask in that layer: bool [length, length], or a BlockMask on CUDA."""
        sliding = self.config.is_sliding(layer)
        key = (length, sliding, str(device))
        if key not in self._masks:
            self._masks[key] = _build_mask(length, self.config.window if sliding else length, device)
        return self._masks[key]


def rope_table(config: TargetConfig, length: int, device: torch.device) -> Tensor:
    """Cosines and sines float32 [2, length, head_dim/2]."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    angle = torch.arange(length, device=device).float()[:, None] / config.rope_theta**exponent
    return torch.stack((angle.cos(), angle.sin()))


def _build_mask(length: int, window: int, device: torch.device) -> object:
    if device.type == "cuda" and length % 128 == 0:
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q - k < window)

        return create_block_mask(visible, None, None, length, length, device=str(device))
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)
