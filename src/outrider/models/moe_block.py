"""The MoE layer: route, ask the provider for the union's experts, combine in rank order."""

import torch
from torch import Tensor

from outrider.config import ModelConfig
from outrider.core import ExpertProvider, ExpertWeights
from outrider.kernels.expert_mlp import clamped_swiglu_expert, swiglu_expert
from outrider.kernels.router import softmax_top_k, top_k_softmax
from outrider.models.batch import Observer
from outrider.models.layers import Linear, Weights


class MoeBlock:
    """Experts of layer `layer`; holds the router, never an expert."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        self.config, self.layer = config, layer
        gpt_oss = config.family == "gpt_oss"
        self.router = Linear.load(weights, f"model.layers.{layer}.mlp.{'router' if gpt_oss else 'gate'}", bias=gpt_oss)

    def __call__(self, x: Tensor, provider: ExpertProvider, observer: Observer | None = None) -> Tensor:
        """x [rows, hidden] -> [rows, hidden].

        A row's k partial results are added in the order of their rank, whichever expert came first, so residency
        never shows in the sum.
        """
        mix, ids = self.route(x)
        if observer is not None:
            observer.routed(self.layer, ids)
        partial = x.new_empty(*ids.shape, x.shape[1])  # [rows, k, hidden]
        for expert, weights in provider.resolve(self.layer, ids):
            rows, ranks = torch.where(ids == expert)
            partial[rows, ranks] = self._expert(x[rows], weights)
        output = partial[:, 0] * mix[:, :1]
        for rank in range(1, ids.shape[1]):
            output += partial[:, rank] * mix[:, rank : rank + 1]
        return output

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, expert ids), each [rows, k]; the only router there is."""
        logits = self.router(x)
        if self.config.family == "gpt_oss":
            return top_k_softmax(logits, self.config.experts_per_token)
        return softmax_top_k(logits, self.config.experts_per_token, self.config.normalize_top_k)

    def _expert(self, x: Tensor, weights: ExpertWeights) -> Tensor:
        if self.config.family == "gpt_oss":
            return clamped_swiglu_expert(x, weights, self.config.swiglu_alpha, self.config.swiglu_limit)
        return swiglu_expert(x, weights)
