"""The DFlash drafter (arXiv 2602.06036): one forward proposes a whole block.

A block is the anchor and masks, at the positions that follow the committed tokens. Its rows attend to each other and
to the *context*: one key and value for each committed token, made of the target's residual stream at that token
(`features`) and of nothing else. Embedding and head are the target's; the final norm is the drafter's own.

The context lies in the same pages as the target's keys and values, position by position, so truncating or
freeing a page table does it for both. A block's own keys and values are never stored.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import DraftConfig
from outrider.kernels.attention import attention
from outrider.kernels.linear import linear
from outrider.kernels.rope import apply_rope, rope_frequencies, rope_tables
from outrider.kvcache.pages import PageTable
from outrider.kvcache.storage import KVStorage
from outrider.models.layers import DenseMLP, Linear, RMSNorm, Weights

Rope = tuple[Tensor, Tensor]


class DrafterModel(Protocol):
    """What proposes blocks and is fed with what a verify committed."""

    config: DraftConfig
    context: KVStorage

    def extend(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Add committed rows to the context; see `Drafter.extend`."""

    def propose(self, anchors: Sequence[int], tables: Sequence[PageTable]) -> Tensor:
        """Logits of the drafts behind each anchor; see `Drafter.propose`."""


class Drafter:
    """Held on the device of `embedding` and in its dtype.

    Args:
        embedding: [vocab, hidden], the target's; head: [draft_vocab, hidden], the target's unless the vocabulary is
            reduced.
        target_ids: int64 [draft_vocab], the target's id of each draft token; None: the same.
        context: storage over the pool of the target's pages.
    """

    def __init__(
        self,
        config: DraftConfig,
        weights: Weights,
        embedding: Tensor,
        head: Tensor,
        target_ids: Tensor | None,
        context: KVStorage,
    ) -> None:
        self.config = config
        self.context = context
        self._embedding, self._head, self._target_ids = embedding, head, target_ids
        self._features = Linear.load(weights, "fc")
        self._features_norm = RMSNorm(weights("hidden_norm.weight"), config.rms_norm_eps)
        self._layers = [_Layer(config, weights, layer) for layer in range(config.num_layers)]
        self._norm = RMSNorm(weights("norm.weight"), config.rms_norm_eps)
        frequencies, self._rope_factor = rope_frequencies(config.head_dim, config.rope_theta, config.yarn)
        self._frequencies = frequencies.to(embedding.device)

    @torch.inference_mode()
    def extend(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Add committed rows to the context.

        Args:
            features: [rows, taps * hidden], the residual stream after the tapped layers, joined in the config's order.
            positions, slots: int64 [rows], absolute positions and KV token slots.
        """
        x = self._features_norm(self._features(features))
        rope = self._rope(positions, x.dtype)
        for index, layer in enumerate(self._layers):
            self.context.write(index, slots, *layer.keys_values(x, rope))

    @torch.inference_mode()
    def propose(self, anchors: Sequence[int], tables: Sequence[PageTable]) -> Tensor:
        """Logits float32 [sequences, num_drafts, vocab] of the drafts that follow each anchor.

        An anchor is the last emitted token of its sequence, at position `table.length`. Tokens that the drafter cannot
        propose have logit -inf.
        """
        config, device = self.config, self._embedding.device
        size = config.block_size
        ids = torch.full((len(anchors), size), config.mask_token_id, dtype=torch.int64)
        ids[:, 0] = torch.tensor(anchors)
        starts = torch.tensor([table.length for table in tables])
        positions = (starts.unsqueeze(1) + torch.arange(size)).flatten().to(device)
        pages = [torch.tensor(self.context.padded_pages(table, size), device=device) for table in tables]
        x = F.embedding(ids.flatten().to(device), self._embedding)
        rope = self._rope(positions, x.dtype)
        for index, layer in enumerate(self._layers):
            contexts = (self.context.gather(index, own, table.length) for own, table in zip(pages, tables, strict=True))
            x = layer(x, rope, contexts, starts.tolist(), size)
        rows = x.view(len(anchors), size, -1)[:, config.first_draft_row :]
        logits = linear(self._norm(rows.flatten(0, 1)), self._head).float().view(len(anchors), config.num_drafts, -1)
        return logits if self._target_ids is None else self._spread(logits, self._target_ids)

    def _spread(self, logits: Tensor, target_ids: Tensor) -> Tensor:
        wide = logits.new_full((*logits.shape[:2], self.config.vocab_size), float("-inf"))
        wide[..., target_ids] = logits
        return wide

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        return rope_tables(positions, self._frequencies, self._rope_factor, dtype)


class _Layer:
    """Pre-norm attention and SwiGLU; context rows get neither the input norm nor a query."""

    def __init__(self, config: DraftConfig, weights: Weights, layer: int) -> None:
        prefix, eps, bias = f"layers.{layer}", config.rms_norm_eps, config.attention_bias
        self._head_dim = config.head_dim
        self._window, self._causal = config.windows[layer], config.causal[layer]
        self._q, self._k, self._v, self._o = (
            Linear.load(weights, f"{prefix}.self_attn.{name}_proj", bias) for name in "qkvo"
        )
        self._q_norm, self._k_norm = (
            RMSNorm(weights(f"{prefix}.self_attn.{name}_norm.weight"), eps) for name in ("q", "k")
        )
        self._attention_norm = RMSNorm(weights(f"{prefix}.input_layernorm.weight"), eps)
        self._mlp_norm = RMSNorm(weights(f"{prefix}.post_attention_layernorm.weight"), eps)
        self._mlp = DenseMLP(weights, f"{prefix}.mlp")

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, head_dim] of context or block rows x [rows, hidden]."""
        keys = apply_rope(self._k_norm(self._heads(self._k(x))), *rope)
        return keys, self._heads(self._v(x))

    def __call__(
        self, x: Tensor, rope: Rope, contexts: Iterable[tuple[Tensor, Tensor]], starts: Sequence[int], size: int
    ) -> Tensor:
        """x [sequences * size, hidden]; `contexts` holds each sequence's gathered keys and values, with room behind
        the context for the block's own."""
        h = self._attention_norm(x)
        query = apply_rope(self._q_norm(self._heads(self._q(h))), *rope)
        block_keys, block_values = self.keys_values(h, rope)
        output = torch.empty_like(query)
        for index, ((keys, values), start) in enumerate(zip(contexts, starts, strict=True)):
            rows = slice(index * size, (index + 1) * size)
            keys[start : start + size], values[start : start + size] = block_keys[rows], block_values[rows]
            output[rows] = attention(query[rows], keys, values, start, self._window, causal=self._causal)
        x = x + self._o(output.flatten(1))
        return x + self._mlp(self._mlp_norm(x))

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self._head_dim))
        return heads
