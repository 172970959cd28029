"""Tiny targets with a random draft beside them, and runs by hand over the round seam."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from outrider import SamplingParams
from outrider.checkpoint.hf_config import read_config
from outrider.config import EngineOptions, parse_slots
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.spec.session import SpecSession
from parity import our_logits
from tiny import MAKERS
from tiny_draft import tiny_draft

Widths = Callable[[SpecSession], int]


def make_pair(folder: Path, maker: str, **draft: Any) -> None:
    """A target in `folder`/target and its draft in `folder`/draft."""
    MAKERS[maker](folder / "target")
    tiny_draft(folder / "draft", read_config(folder / "target"), **{"block": 8, "windows": (6, None)} | draft)


def open_pair(folder: Path, slots: str = "100%", speculate: bool = True, **options: Any) -> Engine:
    """The engine of such a pair, or of its target alone."""
    draft = {"draft": str(folder / "draft")} if speculate else {}
    return build_engine(str(folder / "target"), EngineOptions(parse_slots(slots), **draft | options))


def finish(engine: Engine, sessions: Sequence[SpecSession], widths: Widths | None = None) -> list[list[int]]:
    """Rounds of all sessions together until all are finished; `widths` gives each session's rows of a verify."""
    while running := [s for s in sessions if not s.finished]:
        engine.draft_round(running)
        engine.verify_round(running, None if widths is None else [widths(s) for s in running])
    return [s.output for s in sessions]


def drafted(session: SpecSession) -> tuple[int, ...]:
    """The tokens of the pending block."""
    assert session.draft is not None
    return session.draft.tokens


def assert_same(engine: Engine, prompt: list[int], plain: list[int], other: list[int], what: str) -> None:
    """Fails with the first position that differs and the gap between the two tokens' logits there."""
    if plain == other:
        return
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    gap = "the shorter is a prefix"
    if at < min(len(plain), len(other)):
        logits = our_logits(engine, [*prompt, *plain[:at]])[-1]
        gap = (
            f"logits {logits[plain[at]]:.6f} and {logits[other[at]]:.6f}, gap {logits[plain[at]] - logits[other[at]]:g}"
        )
    raise AssertionError(f"{what}: token {at} is {plain[at : at + 1]} plainly and {other[at : at + 1]} here; {gap}")


def greedy(tokens: int, **fields: Any) -> SamplingParams:
    """Greedy to the last token."""
    return SamplingParams(max_tokens=tokens, **{"ignore_eos": True} | fields)


def ids(seed: int, length: int, vocab: int) -> list[int]:
    """A random prompt."""
    return torch.randint(0, vocab - 1, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
