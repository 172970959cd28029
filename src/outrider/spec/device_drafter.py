"""The DFlash drafter as kernels over fixed buffers, captured like the target: `spec/drafter.py` on the device.

A block's keys and values stand behind its sequence's context, in the same pages where there is room and then in pages
of the drafter's own; the next block, or the context as it grows, overwrites them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outrider.config import DraftConfig
from outrider.kernels.device import attention, linear, rope_write
from outrider.kernels.device.choose import Scratch, choose
from outrider.kernels.device.embed import embed
from outrider.kernels.device.graph import captured
from outrider.kernels.device.norm import add_norm
from outrider.kernels.device.set_rows import Standing, set_block_rows
from outrider.kernels.device.swiglu import swiglu
from outrider.kernels.rope import rope_frequencies
from outrider.kvcache.pages import PAGE_SIZE, PageTable, pages_for
from outrider.kvcache.storage import KVStorage
from outrider.models.layers import Weights
from outrider.models.rows import Rows, RowsOf, bucket_for, buckets_up_to


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer: qkv, kv [., hidden] (kv: the last rows of qkv), gate over up, and the norms."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norms: tuple[Tensor, Tensor, float]
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    window: int | None
    causal: bool


class DeviceDrafter:
    """A `DrafterModel` for up to `sequences` sequences; features come in steps of up to `rows` rows.

    Args:
        embedding, head, target_ids: as for `Drafter`.
        context: storage over the pool of the target's pages, with `block_pages` pages a sequence more.
        positions: most positions of a sequence.
    """

    def __init__(
        self,
        config: DraftConfig,
        weights: Weights,
        embedding: Tensor,
        head: Tensor,
        target_ids: Tensor | None,
        context: KVStorage,
        rows: int,
        sequences: int,
        positions: int,
        graphs: bool = True,
    ) -> None:
        self.config, self.context = config, context
        self._embedding, self._head, self._target_ids = embedding, head, target_ids
        device, dtype = embedding.device, embedding.dtype
        self._features, self._features_norm = weights("fc.weight"), weights("hidden_norm.weight")
        self._layers = [_load(config, weights, layer) for layer in range(config.num_layers)]
        self._norm = weights("norm.weight")
        frequencies, factor = rope_frequencies(config.head_dim, config.rope_theta, config.yarn)
        own, most = block_pages(config), bucket_for(sequences * config.block_size)
        self._tables = rope_write.tables(frequencies.to(device), factor, positions + config.block_size)
        self._rows = Rows(most, sequences, pages_for(positions) + own, device)
        self._fed = Rows(bucket_for(rows), 1, 1, device)
        self._blocks = {b: _Blocks(config, b, len(head), embedding) for b in buckets_up_to(most)}
        self._feeds = {b: _Feed(config, b, self._features.shape[1], dtype, device) for b in buckets_up_to(rows)}
        self._propose: dict[int, Callable[[], None]] = {b: partial(self._run, own) for b, own in self._blocks.items()}
        self._extend: dict[int, Callable[[], None]] = {
            b: partial(self._extended, own) for b, own in self._feeds.items()
        }
        self._choices = torch.zeros(most, dtype=torch.int32, device=device)
        self._scratch = Scratch(most, len(head), device)
        if graphs and device.type == "cuda":
            self._propose = {b: captured(run) for b, run in self._propose.items()}
            self._extend = {b: captured(run) for b, run in self._extend.items()}

    def extend(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """As `Drafter.extend`."""
        most = max(self._feeds)
        for some in zip(features.split(most), positions.split(most), slots.split(most), strict=True):
            number, fed = len(some[0]), self._fed
            feed = self._feeds[bucket_for(number)]
            for to, values in zip((feed.features, fed.positions, fed.slots), some, strict=True):
                to[:number].copy_(values)
            fed.count.fill_(number)
            self._extend[len(feed.x)]()

    def propose(self, anchors: Sequence[int], tables: Sequence[PageTable]) -> Tensor:
        """As `Drafter.propose`."""
        config, size = self.config, self.config.block_size
        spans = []
        for line, (anchor, table) in enumerate(zip(anchors, tables, strict=True)):
            pages = self._pages(line, table)
            places = range(table.length, table.length + size)
            slots = [pages[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE for place in places]
            ids = [anchor, *[config.mask_token_id] * (size - 1)]
            spans.append(RowsOf(ids, table.length, slots, pages, to_the_end=True))
        self._rows.set(spans)
        blocks = self._blocks[bucket_for(len(anchors) * size)]
        self._propose[len(blocks.x)]()
        logits = blocks.logits[0, : len(anchors) * size].view(len(anchors), size, -1)[:, config.first_draft_row :]
        if self._target_ids is None:
            return logits
        wide = logits.new_full((*logits.shape[:2], config.vocab_size), float("-inf"))
        wide[..., self._target_ids] = logits
        return wide

    # --- queued on the current stream, for rounds without the host ----------------------------------------------------

    def start(self, tables: Sequence[PageTable]) -> None:
        """Before the first of several rounds; the tables have pages for all of them."""
        self._rows.set_tables([self._pages(line, table) for line, table in enumerate(tables)])

    def draft(self, standing: Standing, bucket: int) -> Tensor:
        """A block behind every anchor, in a bucket of block rows.

        Returns: int32, d_1 of sequence s at s * block_size; -1 for logits that are not finite.
        """
        blocks, count = self._blocks[bucket], self._rows.count
        set_block_rows(standing, self._rows.columns, self.config.block_size, self.config.mask_token_id)
        self._run(blocks)
        choose(blocks.logits[0], self._choices, count, self._scratch)
        drafts = self._choices
        if self._target_ids is not None:
            drafts = torch.where(drafts < 0, drafts, self._target_ids[drafts.clamp(min=0)].int())
        return drafts[self.config.first_draft_row :]

    def feed(self, features: Tensor, positions: Tensor, slots: Tensor, count: Tensor) -> None:
        """Features [R, taps * hidden] of a bucket to keys and values of the context; int32 [R], count [1]."""
        b, eps, dim = self._feeds[len(features)], self.config.rms_norm_eps, self.config.head_dim
        linear.project(features, self._features, b.projected, count)
        b.x.zero_()
        add_norm(b.x, b.projected, None, self._features_norm, eps, b.h, count)
        for index, layer in enumerate(self._layers):
            first = self.config.num_heads * dim
            bias = None if layer.qkv_bias is None else layer.qkv_bias[first:]
            linear.project(b.h, layer.qkv[first:], b.kv, count)
            rope_write.rope_write(
                b.kv, bias, layer.qk_norms, *self._tables, positions, slots, b.query, *self.context.layer(index), count,
            )  # fmt: skip

    # --- inside -------------------------------------------------------------------------------------------------------

    def _pages(self, line: int, table: PageTable) -> list[int]:
        """Pages of a sequence and of its block behind them."""
        own = block_pages(self.config)
        behind = self.context.pool.num_pages + line * own
        return [*table.pages, *range(behind, behind + own)]

    def _extended(self, b: "_Feed") -> None:
        fed, bucket = self._fed, len(b.x)
        self.feed(b.features, fed.positions[:bucket], fed.slots[:bucket], fed.count)

    def _run(self, b: "_Blocks") -> None:
        """Blocks to logits."""
        rows, count, eps = self._rows, self._rows.count, self.config.rms_norm_eps
        embed(rows.ids, self._embedding, b.x, count)
        add_norm(b.x, None, None, self._layers[0].attention_norm, eps, b.h, count)
        for index, layer in enumerate(self._layers):
            keys, values = self.context.layer(index)
            linear.project(b.h, layer.qkv, b.qkv, count)
            rope_write.rope_write(
                b.qkv, layer.qkv_bias, layer.qk_norms, *self._tables, rows.positions, rows.slots, b.query, keys, values,
                count,
            )  # fmt: skip
            attention.attend(
                b.query, keys, values, rows.tables, rows.units, rows.sequences, rows.positions,
                rows.positions if layer.causal else rows.limits, count, layer.window, None, b.scratch, b.attended,
            )  # fmt: skip
            linear.project(b.attended.flatten(1), layer.output, b.projected, count)
            add_norm(b.x, b.projected, layer.output_bias, layer.mlp_norm, eps, b.h, count)
            linear.project(b.h, layer.gate_up, b.gate_up, count)
            swiglu(b.gate_up, b.inner, count)
            linear.project(b.inner, layer.down, b.down, count)
            last = index + 1 == len(self._layers)
            next_norm = self._norm if last else self._layers[index + 1].attention_norm
            add_norm(b.x, b.down, None, next_norm, eps, b.h, count)
        linear.project(b.h, self._head, b.logits, count)


class _Blocks:
    """Activations of one bucket of block rows."""

    def __init__(self, config: DraftConfig, rows: int, vocab: int, like: Tensor) -> None:
        hidden, inner, heads, dim = config.hidden_size, config.intermediate, config.num_heads, config.head_dim
        width = (heads + 2 * config.num_kv_heads) * dim
        of = partial(torch.zeros, dtype=like.dtype, device=like.device)
        wide = partial(torch.zeros, dtype=torch.float32, device=like.device)
        self.x, self.h, self.inner = of(rows, hidden), of(rows, hidden), of(rows, inner)
        self.query, self.attended = of(rows, heads, dim), of(rows, heads, dim)
        self.qkv = wide(linear.parts_for(width, hidden), rows, width)
        self.projected = wide(linear.parts_for(hidden, heads * dim), rows, hidden)
        self.gate_up = wide(linear.parts_for(2 * inner, hidden), rows, 2 * inner)
        self.down = wide(linear.parts_for(hidden, inner), rows, hidden)
        self.logits = wide(1, rows, vocab)
        splits = (rows, heads, attention.SPLITS)
        self.scratch = attention.Scratch(wide(*splits, dim), wide(*splits), wide(*splits))


class _Feed:
    """Activations of one bucket of committed rows."""

    def __init__(self, config: DraftConfig, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        hidden, kv = config.hidden_size, 2 * config.num_kv_heads * config.head_dim
        of = partial(torch.zeros, dtype=dtype, device=device)
        self.features, self.x, self.h = of(rows, width), of(rows, hidden), of(rows, hidden)
        self.query = of(rows, 0, config.head_dim)
        self.projected = torch.zeros(linear.parts_for(hidden, width), rows, hidden, device=device)
        self.kv = torch.zeros(linear.parts_for(kv, hidden), rows, kv, device=device)


def block_pages(config: DraftConfig) -> int:
    """Pages that a block may need behind those of its sequence."""
    return pages_for(config.block_size)


def drafter_nbytes(config: DraftConfig, rows: int, sequences: int, dtype: torch.dtype) -> int:
    """Bytes of a drafter's activations, for as many rows and sequences as it is made for."""
    meta = torch.empty(0, dtype=dtype, device="meta")
    taps = len(config.tap_layers) * config.hidden_size
    held: list[_Blocks | _Feed] = [
        _Blocks(config, b, config.draft_vocab_size, meta) for b in buckets_up_to(sequences * config.block_size)
    ]
    held += [_Feed(config, b, taps, dtype, meta.device) for b in buckets_up_to(rows)]
    tensors = [
        t for own in held for value in vars(own).values() for t in (value if isinstance(value, tuple) else [value])
    ]
    return sum(tensor.nbytes for tensor in tensors)


def _load(config: DraftConfig, weights: Weights, layer: int) -> _Layer:
    prefix = f"layers.{layer}"

    def joined(names: str, kind: str) -> Tensor:
        return torch.cat([weights(f"{prefix}.{name}.{kind}") for name in names.split()])

    attention_names = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
    norms = (weights(f"{prefix}.self_attn.{name}_norm.weight") for name in "qk")
    return _Layer(
        attention_norm=weights(f"{prefix}.input_layernorm.weight"),
        qkv=joined(attention_names, "weight"),
        qkv_bias=joined(attention_names, "bias") if config.attention_bias else None,
        qk_norms=(*norms, config.rms_norm_eps),  # type: ignore[arg-type]
        output=weights(f"{prefix}.self_attn.o_proj.weight"),
        output_bias=weights(f"{prefix}.self_attn.o_proj.bias") if config.attention_bias else None,
        mlp_norm=weights(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=joined("mlp.gate_proj mlp.up_proj", "weight"),
        down=weights(f"{prefix}.mlp.down_proj.weight"),
        window=config.windows[layer],
        causal=config.causal[layer],
    )
