"""The drafter's forward against an independent dense implementation over rounds, its features against transformers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import SamplingParams
from outrider.checkpoint.draft import open_draft
from outrider.checkpoint.hf_config import read_config
from outrider.config import DraftConfig, EngineOptions, parse_slots
from outrider.engine.build import build_engine
from outrider.kvcache.pages import PagePool, PageTable
from outrider.kvcache.storage import KVStorage
from outrider.spec.drafter import Drafter
from reference_drafter import ReferenceDrafter
from test_parity import make_texts
from tiny import HIDDEN, MAKERS, VOCAB
from tiny_draft import tiny_draft

YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "bias-yarn-8-layers": {"layers": 8, "bias": True, "block": 8, "rope_theta": 150000.0, "rope_parameters": YARN},
    "sliding-causal": {"windows": (6, None), "block": 5},
    "sliding-both-ways": {"windows": (6, 6, None), "layers": 3, "causal": False, "block": 8},
    "window-of-one": {"windows": (1, None)},
    "nested-prefix": {"style": "z-lab-nested", "prefix": "model."},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("target")
    MAKERS["gpt_oss-mxfp4"](path)
    return path


def load(folder: Path, target: Path, pages: int = 64) -> tuple[Drafter, Tensor, Tensor]:
    """The drafter with a random embedding, and a head that makes logits of order one."""
    checkpoint = open_draft(folder, read_config(target))
    noise = torch.randn(2, VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    context = KVStorage(checkpoint.config, PagePool(pages), torch.float32, torch.device("cpu"))
    weights = {name: checkpoint.tensor(name).float() for name in checkpoint.names}
    ids = checkpoint.ids
    head = noise[1] * HIDDEN**-0.5 if ids is None else weights["lm_head.weight"]
    return Drafter(checkpoint.config, weights.__getitem__, noise[0], head, ids, context), noise[0], head


def commit(drafter: Drafter, table: PageTable, features: Tensor) -> None:
    start = table.length
    table.append(len(features))
    positions = torch.arange(start, table.length)
    drafter.extend(features, positions, torch.tensor(table.slots(start, table.length)))


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_equals_the_reference_over_rounds(tmp_path: Path, target: Path, shape: str) -> None:
    """A prompt, then rounds that run a whole block of rows and keep a part of them, two sequences at once."""
    config = tiny_draft(tmp_path, **SHAPES[shape])
    drafter, embedding, head = load(tmp_path, target)
    reference = ReferenceDrafter(tmp_path, embedding, head)
    width = len(config.tap_layers) * HIDDEN
    noise, rng = torch.Generator().manual_seed(2), random.Random(3)
    tables = [PageTable(drafter.context.pool) for _ in range(2)]
    known: list[Tensor] = []
    for table, length in zip(tables, (5, 250), strict=True):  # the second crosses an attention split
        known.append(torch.randn(length, width, generator=noise))
        commit(drafter, table, known[-1])
    for _ in range(6):
        anchors = [rng.randrange(VOCAB) for _ in tables]
        logits = drafter.propose(anchors, tables)
        for i, table in enumerate(tables):
            expected = reference.logits(known[i], anchors[i])
            torch.testing.assert_close(logits[i], expected, atol=1e-5, rtol=1e-5)
            rows, kept = torch.randn(config.block_size, width, generator=noise), rng.randint(1, config.block_size)
            start = table.length
            table.append(config.block_size)  # the verify's rows take pages, then all but `kept` are given back
            table.truncate(start)
            commit(drafter, table, rows[:kept])
            known[i] = torch.cat((known[i], rows[:kept]))


def test_a_block_leaves_nothing_behind(tmp_path: Path, target: Path) -> None:
    tiny_draft(tmp_path)
    drafter, _, _ = load(tmp_path, target)
    table = PageTable(drafter.context.pool)
    commit(drafter, table, torch.randn(20, 3 * HIDDEN))
    before = [t.clone() for t in drafter.context._keys + drafter.context._values]
    first = drafter.propose([7], [table])
    assert all(torch.equal(a, b) for a, b in zip(before, drafter.context._keys + drafter.context._values, strict=True))
    assert torch.equal(drafter.propose([7], [table]), first)


def test_rows_and_sequences_do_not_know_each_other(tmp_path: Path, target: Path) -> None:
    """Same bits alone and in a batch, and for a context that came in pieces."""
    tiny_draft(tmp_path, windows=(6, None))
    drafter, _, _ = load(tmp_path, target)
    features = torch.randn(40, 3 * HIDDEN, generator=torch.Generator().manual_seed(4))
    whole, pieces, other = (PageTable(drafter.context.pool) for _ in range(3))
    commit(drafter, other, features.flip(0)[:33])
    commit(drafter, whole, features)
    for start in range(0, 40, 7):
        commit(drafter, pieces, features[start : start + 7])
    alone = drafter.propose([9], [whole])[0]
    for batch in ([9, 5, 9], [9, 1, 9]):
        together = drafter.propose(batch, [pieces, other, whole])
        assert torch.equal(together[0], alone) and torch.equal(together[2], alone)


def test_a_reduced_vocabulary_proposes_target_ids(tmp_path: Path, target: Path) -> None:
    config = tiny_draft(tmp_path, style="speculators", reduced_vocab=50)
    drafter, _, _ = load(tmp_path, target)
    table = PageTable(drafter.context.pool)
    commit(drafter, table, torch.randn(9, 3 * HIDDEN))
    logits = drafter.propose([3], [table])
    ids = open_draft(tmp_path, read_config(target)).ids
    assert logits.shape == (1, config.num_drafts, VOCAB)
    finite = torch.isfinite(logits)
    assert ids is not None and finite[..., ids].all() and int(finite.sum()) == config.num_drafts * 50
    drafter._target_ids = None
    assert torch.equal(logits[..., ids], drafter.propose([3], [table]))


def test_sampling_from_the_anchor_gives_one_draft_more(tmp_path: Path, target: Path) -> None:
    """Row k then predicts the token behind its place: the same logits, none of them dropped."""
    tiny_draft(tmp_path / "masks")
    tiny_draft(tmp_path / "anchor", sample_from_anchor=True)
    logits = []
    for name in ("masks", "anchor"):
        drafter, _, _ = load(tmp_path / name, target)
        table = PageTable(drafter.context.pool)
        commit(drafter, table, torch.ones(9, 3 * HIDDEN))
        logits.append(drafter.propose([3], [table])[0])
    assert logits[1].shape[0] == 4 and torch.equal(logits[1][1:], logits[0])


@torch.no_grad()
def hf_residuals(model: torch.nn.Module, text: list[int]) -> list[Tensor]:
    """The residual stream after each layer, [length, hidden], before the final norm."""
    seen: list[Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output)[0].float())

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]  # type: ignore[union-attr, operator]
    model(torch.tensor([text]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("maker", ["gpt_oss-mxfp4", "qwen3_moe", "qwen3_moe-window"])
@pytest.mark.parametrize("taps", [(0, 1, 2), (2, 0)])
def test_drafts_of_the_engine_are_made_of_the_layers_that_the_config_names(
    tmp_path: Path, maker: str, taps: tuple[int, ...]
) -> None:
    """Every round's logits, from transformers' hidden states of the committed text, the last one before the norm."""
    model = MAKERS[maker](tmp_path / "target")
    tiny_draft(tmp_path / "draft", taps=taps, windows=(6, None), block=6)
    options = EngineOptions(parse_slots("50%"), draft=str(tmp_path / "draft"), prefill_chunk=8)
    engine = build_engine(str(tmp_path / "target"), options)
    reference = ReferenceDrafter(tmp_path / "draft", engine.decoder.embedding, engine.decoder.head)
    (text,) = make_texts([21], engine.config.vocab_size)
    session = engine.begin_session(text, SamplingParams(max_tokens=16, ignore_eos=True))
    assert engine.rounds.drafter is not None
    while not session.finished:
        committed = (session.prompt + session.output)[: session.table.length]
        residuals = hf_residuals(model, committed)
        expected = reference.logits(torch.cat([residuals[tap] for tap in taps], -1), session.anchor)
        logits = engine.rounds.drafter.propose([session.anchor], [session.table])[0]
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
        engine.draft_round([session])
        engine.verify_round([session])
    engine.close()


def test_config_says_what_a_block_gives() -> None:
    fields = dict.fromkeys(DraftConfig.__dataclass_fields__, 1) | {"block_size": 8}
    plain = DraftConfig(**fields | {"sample_from_anchor": False})  # type: ignore[arg-type]
    shifted = DraftConfig(**fields | {"sample_from_anchor": True})  # type: ignore[arg-type]
    assert (plain.num_drafts, plain.first_draft_row) == (7, 1)
    assert (shifted.num_drafts, shifted.first_draft_row) == (8, 0)
