"""One checked draft checkpoint: config, tensors by canonical name, the map from its vocabulary to the target's.

Contract: `open_draft` checks the pairing and every tensor's name, shape and dtype before any weight is read. Canonical
names are z-lab's (`fc.weight`, `layers.0.self_attn.q_proj.weight`, ...), whether the file prefixes `model.` or not.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from outrider.checkpoint.common import Shapes
from outrider.checkpoint.draft_config import read_draft_config
from outrider.checkpoint.shards import Shards
from outrider.config import DraftConfig, ModelConfig
from outrider.errors import CheckpointError

_FLOATS = {"float32", "bfloat16", "float16"}
_IDS = {"I64", "I32"}
_MASKS = {"BOOL", "uint8", *_IDS}
_HARMLESS = "rotary_emb.inv_freq"  # recomputed by everyone, still saved by old exporters
_COPY_TOLERANCE = 2**-7  # one rounding to bfloat16, twice over
_COMPARED_ROWS = 64


@dataclass(frozen=True, eq=False)
class DraftCheckpoint:
    """A draft whose every tensor has the expected name, shape and dtype; `config.target_layers` is the target's.

    names: canonical -> stored name.
    ids: int64 [draft_vocab], the target's id of each draft token, all different; None: the same vocabulary.
    """

    folder: Path
    config: DraftConfig
    shards: Shards
    names: Mapping[str, str]
    ids: Tensor | None

    def tensor(self, name: str) -> Tensor:
        """Tensor of canonical name `name`, a view of the mapped file in its stored dtype.

        With a reduced vocabulary there is also `lm_head.weight`, [draft_vocab, hidden].

        Raises: KeyError if a draft of this config has no such tensor.
        """
        return self.shards.tensor(self.names[name])

    def elements(self) -> int:
        """Elements of all weights that a drafter holds (not of what it shares with the target)."""
        return sum(prod(shape) for shape in draft_tensors(self.config).values())

    def check_copies(self, embedding: Tensor, head: Tensor) -> None:
        """Compare the file's copies of the target's `embedding` and `head`, both [vocab, hidden], on some rows.

        Files of `speculators` may carry them, frozen; a drafter never uses them. A copy that differs means that the
        draft was trained for another target.

        Raises: CheckpointError naming the copy.
        """
        originals = {"embed_tokens.weight": embedding}
        if self.ids is None:
            originals["lm_head.weight"] = head
        rows = torch.linspace(0, self.config.vocab_size - 1, _COMPARED_ROWS).long()
        rows = torch.cat([rows, torch.tensor([self.config.mask_token_id])]).unique()
        for name, original in originals.items():
            if name not in self.names:
                continue
            copied, own = self.tensor(name)[rows].float(), original[rows.to(original.device)].float().cpu()
            if not torch.allclose(copied, own, rtol=_COPY_TOLERANCE, atol=0.0):
                raise CheckpointError(
                    f"{self.shards.path(self.names[name])}: tensor {name!r} differs from the target's, which it must "
                    "equal; the draft was trained for another model"
                )


def open_draft(folder: Path, target: ModelConfig) -> DraftCheckpoint:
    """Open and check the draft in `folder` for `target`; no weight is read yet, only the vocabulary's map.

    Raises: CheckpointError naming the file, field, tensor or pair of numbers that is wrong.
    """
    config = read_draft_config(folder)
    check_pairing(config, target, folder / "config.json")
    config = replace(config, target_layers=target.num_layers)
    shards = Shards(folder)
    names = _canonical(shards)
    _check_tensors(shards, names, config)
    return DraftCheckpoint(folder, config, shards, names, _target_ids(shards, names, config))


def check_pairing(draft: DraftConfig, target: ModelConfig, where: Path) -> None:
    """Refuse a draft that was not made for `target`; errors name `where`, the draft's config.

    Raises: CheckpointError, one sentence with both numbers that disagree.
    """
    pairs = [
        ("hidden_size", draft.hidden_size, target.hidden_size),
        ("vocab_size", draft.vocab_size, target.vocab_size),
        ("num_target_layers", draft.target_layers or target.num_layers, target.num_layers),
    ]
    for name, drafted, wanted in pairs:
        if drafted != wanted:
            raise CheckpointError(
                f"{where}: {name} is {drafted}, but the target has {wanted}; a draft serves only the model that it "
                "was trained for"
            )
    for tap in draft.tap_layers:
        if not 0 <= tap < target.num_layers:
            raise CheckpointError(
                f"{where}: the draft taps layer {tap} of its target, which has {target.num_layers}, counted from 0"
            )
    if not 0 <= draft.mask_token_id < target.vocab_size:
        raise CheckpointError(
            f"{where}: mask_token_id is {draft.mask_token_id}, but the target's vocabulary has {target.vocab_size} "
            "tokens, counted from 0"
        )


def draft_tensors(config: DraftConfig) -> Shapes:
    """Canonical name -> shape ([out, in]) of every weight of a drafter."""
    hidden = config.hidden_size
    shapes: Shapes = {
        "fc.weight": (hidden, len(config.tap_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if config.draft_vocab_size != config.vocab_size:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_tensors(config)}
    return shapes


def _layer_tensors(config: DraftConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name, out, inp in (("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden), ("o", hidden, queries)):
        yield f"self_attn.{name}_proj.weight", (out, inp)
        if config.attention_bias:
            yield f"self_attn.{name}_proj.bias", (out,)
    yield "self_attn.q_norm.weight", (config.head_dim,)
    yield "self_attn.k_norm.weight", (config.head_dim,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "mlp.gate_proj.weight", (inner, hidden)
    yield "mlp.up_proj.weight", (inner, hidden)
    yield "mlp.down_proj.weight", (hidden, inner)


def _optional_tensors(config: DraftConfig) -> Shapes:
    """What files of `speculators` may also carry: frozen copies of the target's tensors, for training on their own."""
    hidden = config.hidden_size
    return {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "verifier_lm_head.weight": (config.draft_vocab_size, hidden),
        "verifier_norm.weight": (hidden,),
    }


def _canonical(shards: Shards) -> dict[str, str]:
    names: dict[str, str] = {}
    for stored in sorted(shards.names):
        name = stored.removeprefix("model.")
        if name.endswith(_HARMLESS):
            continue
        if name in names:
            raise CheckpointError(f"{shards.path(stored)}: tensor {name!r} is there both with and without 'model.'")
        names[name] = stored
    return names


def _check_tensors(shards: Shards, names: Mapping[str, str], config: DraftConfig) -> None:
    required = {name: (shape, _FLOATS) for name, shape in draft_tensors(config).items()}
    optional = {name: (shape, _FLOATS) for name, shape in _optional_tensors(config).items()}
    if config.draft_vocab_size != config.vocab_size:
        required["d2t"] = ((config.draft_vocab_size,), _IDS)
        optional["t2d"] = ((config.vocab_size,), _MASKS)
    has = (
        f"{config.num_layers} layers, {len(config.tap_layers)} tapped layers, "
        f"{'' if config.attention_bias else 'no '}attention_bias, {config.draft_vocab_size} of {config.vocab_size} "
        "tokens"
    )
    for name in required:
        if name not in names:
            raise CheckpointError(f"{shards.folder} lacks tensor {name!r}, which its config.json ({has}) calls for")
    expected = optional | required
    for name, stored in names.items():
        where = f"{shards.path(stored)}: tensor {stored!r}"
        if name not in expected:
            raise CheckpointError(f"{where} is not part of a DFlash draft with {has}")
        shape, dtypes = expected[name]
        if shards.shape(stored) != shape:
            found = list(shards.shape(stored))
            raise CheckpointError(f"{where} has shape {found}, config.json ({has}) calls for {list(shape)}")
        if shards.dtype(stored) not in dtypes:
            raise CheckpointError(f"{where} is {shards.dtype(stored)}, it must be {' or '.join(sorted(dtypes))}")


def _target_ids(shards: Shards, names: Mapping[str, str], config: DraftConfig) -> Tensor | None:
    """`d2t` holds differences: target id = draft id + d2t[draft id]; `t2d` marks the target's ids that have one."""
    if "d2t" not in names:
        return None
    where = f"{shards.path(names['d2t'])}: tensor {names['d2t']!r}"
    ids = torch.arange(config.draft_vocab_size) + shards.tensor(names["d2t"]).to(torch.int64)
    if ((ids < 0) | (ids >= config.vocab_size)).any():
        bad = int(ids[(ids < 0) | (ids >= config.vocab_size)][0])
        raise CheckpointError(f"{where} leads to token {bad}, but the target's vocabulary has {config.vocab_size}")
    if ids.unique().numel() != ids.numel():
        raise CheckpointError(f"{where} leads two draft tokens to one token of the target")
    if "t2d" in names:
        mask = shards.tensor(names["t2d"]) != 0
        if not torch.equal(mask.nonzero().flatten(), ids.sort().values):
            raise CheckpointError(f"{shards.path(names['t2d'])}: tensor {names['t2d']!r} and 'd2t' disagree")
    return ids
