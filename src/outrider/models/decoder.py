"""The decoder of both families: embedding, pre-norm layers of attention and experts (or a dense MLP), final norm, head.

The families differ in small parts only (sinks or q/k norms, the router's form, the expert's activation), which live
where they are used; `docs/decisions/0002-one-decoder.md` says why there is one class.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import ModelConfig
from outrider.core import ExpertProvider
from outrider.kernels.linear import linear
from outrider.kernels.rope import rope_frequencies, rope_tables
from outrider.kvcache.storage import KVStorage
from outrider.models.batch import Batch, Observer
from outrider.models.layers import Attention, DenseMLP, RMSNorm, Weights
from outrider.models.moe_block import MoeBlock


class DecoderLayer:
    """One layer; `mlp` is a `MoeBlock` or a `DenseMLP`."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        prefix = f"model.layers.{layer}"
        self.attention_norm = RMSNorm(weights(f"{prefix}.input_layernorm.weight"), config.rms_norm_eps)
        self.attention = Attention(config, weights, layer)
        self.mlp_norm = RMSNorm(weights(f"{prefix}.post_attention_layernorm.weight"), config.rms_norm_eps)
        self.mlp: MoeBlock | DenseMLP
        if config.is_moe[layer]:
            self.mlp = MoeBlock(config, weights, layer)
        else:
            self.mlp = DenseMLP(weights, f"{prefix}.mlp")

    def __call__(
        self,
        x: Tensor,
        batch: Batch,
        kv: KVStorage,
        rope: tuple[Tensor, Tensor],
        provider: ExpertProvider,
        observer: Observer | None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch, kv, rope)
        h = self.mlp_norm(x)
        return x + (self.mlp(h, provider, observer) if isinstance(self.mlp, MoeBlock) else self.mlp(h))


class Decoder:
    """The target model. Dense weights are held here, experts only passed through."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._nbytes = 0

        def held(name: str) -> Tensor:
            weight = weights(name)
            self._nbytes += weight.nbytes
            return weight

        self.embedding = held("model.embed_tokens.weight")
        self.layers = [DecoderLayer(config, held, layer) for layer in range(config.num_layers)]
        self.norm = RMSNorm(held("model.norm.weight"), config.rms_norm_eps)
        self.head = self.embedding if config.tie_embeddings else held("lm_head.weight")
        frequencies, self._rope_factor = rope_frequencies(config.head_dim, config.rope_theta, config.yarn)
        self._frequencies = frequencies.to(self.embedding.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense weights that are held, a tied head counted once."""
        return self._nbytes

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kv: KVStorage, provider: ExpertProvider, observer: Observer | None = None
    ) -> Tensor:
        """Run all layers on the batch's rows, writing their keys and values.

        Returns: the residual stream after the last layer [rows, hidden], before the final norm.
        """
        x = F.embedding(batch.token_ids, self.embedding)
        rope = rope_tables(batch.positions, self._frequencies, self._rope_factor, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, batch, kv, rope, provider, observer)
            if observer is not None:
                observer.residual(index, x)
        return x

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """[rows, vocab] of residual rows [rows, hidden]."""
        return linear(self.norm(x), self.head)
