"""How a drafter is trained: one frozen dataclass, and the draft config that it gives for a target.

Contract: everything that the trained weights depend on, other than the text and the target, is in `Recipe`.
"""

import math
from dataclasses import dataclass, field, replace

from outrider.config import DraftConfig, ModelConfig
from outrider.errors import ConfigError
from outrider.train.draft_data import Continuation


@dataclass(frozen=True)
class Recipe:
    """Sizes of the drafter, its text, and its training. A 0 or an empty tuple is filled in from the target.

    Attributes:
        block: rows of a block, the anchor included.
        layers, heads, kv_heads, head_dim, intermediate: of the drafter; 0 gives the target's, intermediate three
            hidden sizes.
        taps: target layers that are read; (): `default_taps`.
        mask_token: id that fills a block; None: the tokenizer's mask token, else the last id of the vocabulary.
        continuation: how text is regenerated; sequences: how many.
        raw_sequences: sequences of the text as it is, which are trained on beside the regenerated ones up to
            `raw_until` of all steps; raw_tokens: their length.
        heldout: prompts that acceptance is measured on; heldout_tokens: length of their greedy continuations.
        steps, batch: optimiser steps, sequences in each; anchors: blocks trained on in each sequence.
        rate, warmup, decay: peak learning rate, share of the steps in which it rises, and falls to 0.
        gamma: position k of a block (1 is the first draft) weighs exp(-(k - 1) / gamma); 0 takes 0.45 of the block.
        save_every: steps between checkpoints and held-out measurements.
    """

    block: int = 16
    layers: int = 5
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    taps: tuple[int, ...] = ()
    mask_token: int | None = None
    continuation: Continuation = field(default_factory=Continuation)
    sequences: int = 8000
    raw_sequences: int = 0
    raw_tokens: int = 384
    raw_until: float = 0.8
    heldout: int = 64
    heldout_tokens: int = 128
    steps: int = 4000
    batch: int = 16
    anchors: int = 32
    rate: float = 6e-4
    warmup: float = 0.04
    decay: float = 0.5
    weight_decay: float = 0.0
    gamma: float = 0.0
    seed: int = 0
    save_every: int = 500

    def __post_init__(self) -> None:
        least = dict.fromkeys(("layers", "heldout", "steps", "batch", "anchors", "save_every"), 1)
        least |= {"block": 2, "sequences": 0, "raw_sequences": 0, "raw_tokens": 3, "seed": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {minimum}")
        if not 0 < self.rate < math.inf:
            raise ConfigError(f"rate is {self.rate}; it must be a positive number")
        if not 0 <= self.gamma < math.inf:
            raise ConfigError(f"gamma is {self.gamma}; it must be a positive number, or 0 for 0.45 of the block")
        if self.heldout_tokens <= self.block:
            raise ConfigError(
                f"block is {self.block}, which does not fit into held-out texts of {self.heldout_tokens} tokens"
            )
        if len(set(self.taps)) < len(self.taps):
            raise ConfigError(f"taps are {', '.join(map(str, self.taps))}; a layer can be tapped once")

    @property
    def heldout_continuation(self) -> Continuation:
        """How acceptance is measured: greedy, without a draft."""
        return replace(self.continuation, tokens=self.heldout_tokens, greedy=1.0)

    @property
    def longest(self) -> int:
        """Most tokens of any sequence that is written or captured."""
        return max(self.continuation.longest, self.heldout_continuation.longest, self.raw_sequences and self.raw_tokens)

    @property
    def position_gamma(self) -> float:
        """`gamma`, or 0.45 of the block: 7.2 at 16, 3.6 at 8 (the paper: 7 and 4)."""
        return self.gamma or 0.45 * self.block


def default_taps(target_layers: int, count: int) -> tuple[int, ...]:
    """Where the published drafts tap: evenly from layer 1 to three layers before the end; a small target everywhere."""
    if count == 1:
        return (target_layers // 2,)
    taps = tuple(round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count))
    if target_layers < 4 or len(set(taps)) < count:
        return tuple(range(max(0, target_layers - count), target_layers))
    return taps


def draft_config(recipe: Recipe, target: ModelConfig, mask_token: int) -> DraftConfig:
    """The drafter of `recipe` for `target`.

    Raises: ConfigError for a tap or a mask id that the target does not have, or heads that do not divide.
    """
    heads, kv_heads = recipe.heads or target.num_heads, recipe.kv_heads or target.num_kv_heads
    if heads % kv_heads:
        raise ConfigError(f"{heads} attention heads do not divide among {kv_heads} key/value heads")
    taps = recipe.taps or default_taps(target.num_layers, min(5, target.num_layers))
    if wrong := [tap for tap in taps if not 0 <= tap < target.num_layers]:
        raise ConfigError(f"tap {wrong[0]} is no layer of the target, which has {target.num_layers}, counted from 0")
    if not 0 <= mask_token < target.vocab_size:
        raise ConfigError(f"mask token {mask_token} is none of the target's {target.vocab_size}, counted from 0")
    return DraftConfig(
        block_size=recipe.block,
        mask_token_id=mask_token,
        tap_layers=taps,
        target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=recipe.layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=recipe.head_dim or target.head_dim,
        intermediate=recipe.intermediate or 3 * target.hidden_size,
        rms_norm_eps=1e-6,
        rope_theta=target.rope_theta,
        dtype="bfloat16",
        windows=(None,) * recipe.layers,
        causal=(False,) * recipe.layers,
        yarn=target.yarn,
    )
