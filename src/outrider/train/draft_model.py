"""The DFlash drafter (arXiv 2602.06036) as a trainable module: many blocks of a sequence in one forward.

Contract: parameters are float32 masters under the published tensor names, so the state dict is the checkpoint;
embedding and head are the target's, frozen and passed in. The forward computes in the features' dtype. Blocks do not
see each other: a block row sees the context strictly before its anchor and its own block, exactly as when drafting,
where the anchor is the one token whose state the target has not computed yet.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.config import DraftConfig
from outrider.kernels.rope import rope_frequencies

Rope = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * (wide * scale)).to(x.dtype)


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    """x [B, heads, rows, head_dim], tables [B or 1, 1, rows, head_dim/2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rope
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Queries from block rows; keys and values from the context and from block rows."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        c = config
        self.head_dim, self.group = c.head_dim, c.num_heads // c.num_kv_heads
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.attention_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.attention_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.attention_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.attention_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, ropes: tuple[Rope, Rope], mask: Tensor) -> Tensor:
        """`x` [B, Q, H]; `context` [B, S, H]; `ropes` of both; `mask` bool [B, 1, Q, S + Q], True where seen."""
        q = _rotate(self.q_norm(self._heads(x, self.q_proj)), ropes[0])
        pairs = [self._keys_values(context, ropes[1]), self._keys_values(x, ropes[0])]
        k, v = (torch.cat(part, dim=2).repeat_interleave(self.group, dim=1) for part in zip(*pairs, strict=True))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return _linear(out.transpose(1, 2).flatten(2), self.o_proj)

    def _keys_values(self, rows: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        keys = _rotate(self.k_norm(self._heads(rows, self.k_proj)), rope)
        return keys, self._heads(rows, self.v_proj)

    def _heads(self, x: Tensor, layer: nn.Linear) -> Tensor:
        heads: Tensor = _linear(x, layer).unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return _linear(F.silu(_linear(x, self.gate_proj)) * _linear(x, self.up_proj), self.down_proj)


class Layer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, ropes: tuple[Rope, Rope], mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, ropes, mask)
        fed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + fed


class DraftModel(nn.Module):
    """Features and anchors to normed hidden rows of every block."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.tap_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def initialise(self, seed: int, norm: Tensor) -> None:
        """Draw every matrix from `seed`, on the CPU so that each device starts from the same values.

        Args: `norm` [hidden], the target's final norm, which the own one starts from: it fits the head.
        """
        generator = torch.Generator().manual_seed(seed)
        depth = (2 * self.config.num_layers) ** -0.5
        with torch.no_grad():
            for name, p in self.named_parameters():
                if name.endswith("bias"):
                    p.zero_()
                elif p.dim() == 2:
                    std = p.shape[1] ** -0.5 * (depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
                    p.copy_(torch.randn(p.shape, generator=generator) * std)
            self.norm.weight.copy_(norm)

    def forward(self, features: Tensor, anchors: Tensor, anchor_embeddings: Tensor, mask_embedding: Tensor) -> Tensor:
        """Rows of the blocks that begin at `anchors`.

        Args:
            features: [B, S, taps * H], row s is what the target's tapped layers put out at position s.
            anchors: int64 [B, A], absolute positions; a block sees the features strictly before its own.
            anchor_embeddings: [B, A, H], the target's embedding of the anchor tokens; mask_embedding: [H].

        Returns: [B, A, block, H] after the final norm; the head of the target makes logits of it.
        """
        size = self.config.block_size
        context = self.hidden_norm(_linear(features, self.fc))
        masks = mask_embedding.to(context.dtype).expand(*anchors.shape, size - 1, -1)
        x = torch.cat((anchor_embeddings.to(context.dtype).unsqueeze(2), masks), dim=2).flatten(1, 2)
        steps = torch.arange(size, device=anchors.device)
        ropes = (
            self._rope((anchors.unsqueeze(-1) + steps).flatten(1)),
            self._rope(torch.arange(features.shape[1], device=anchors.device).unsqueeze(0)),
        )
        seen = block_mask(anchors, features.shape[1], size)
        for layer in self.layers:
            x = layer(x, context, ropes, seen)
        rows: Tensor = self.norm(x).unflatten(1, (-1, size))
        return rows

    def _rope(self, positions: Tensor) -> Rope:
        """cos and sin float32 [B, 1, rows, head_dim/2]."""
        config = self.config
        frequencies, factor = rope_frequencies(config.head_dim, config.rope_theta, config.yarn)
        angles = positions.float().unsqueeze(-1) * frequencies.to(positions.device)
        return (angles.cos() * factor).unsqueeze(1), (angles.sin() * factor).unsqueeze(1)


def block_mask(anchors: Tensor, length: int, size: int) -> Tensor:
    """What block rows see: bool [B, 1, A * size, length + A * size] for int64 anchors [B, A] and `length` features.

    The columns are the context, then all block rows.
    """
    start = anchors.repeat_interleave(size, dim=1).unsqueeze(-1)
    context = torch.arange(length, device=anchors.device) < start
    owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(size)
    own = owner.unsqueeze(1) == owner.unsqueeze(0)
    return torch.cat((context, own.expand(len(anchors), -1, -1)), dim=-1).unsqueeze(1)
