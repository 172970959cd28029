"""Our engine beside transformers on one checkpoint: logits of whole texts, and greedy continuations."""

import torch
from torch import Tensor

from outrider.core import Phase
from outrider.engine.engine import Engine
from outrider.kvcache.pages import PageTable
from outrider.models.batch import Batch, Span

Texts = list[list[int]]


def our_logits(engine: Engine, text: list[int], chunk: int | None = None) -> Tensor:
    """Logits [len(text), vocab] of `text`, run in chunks of `chunk` rows (None: all at once)."""
    table, rows = PageTable(engine.kv.pool), []
    for start in range(0, len(text), chunk or len(text)):
        ids = text[start : start + (chunk or len(text))]
        table.append(len(ids))
        stop = start + len(ids)
        pages = torch.tensor(engine.kv.padded_pages(table))
        batch = Batch(
            torch.tensor(ids),
            torch.arange(start, stop),
            torch.tensor(table.slots(start, stop)),
            (Span(0, len(ids), start, pages),),
        )
        engine.provider.begin_step(Phase.DECODE)
        hidden = engine.decoder.forward(batch, engine.kv, engine.provider)
        engine.provider.commit(range(len(ids)))
        rows.append(engine.decoder.logits(hidden))
    table.release()
    return torch.cat(rows)


@torch.no_grad()
def hf_logits(model: torch.nn.Module, text: list[int]) -> Tensor:
    """The same from transformers, without a cache."""
    return model(torch.tensor([text]), use_cache=False).logits[0].float()


@torch.no_grad()
def hf_padded_logits(model: torch.nn.Module, texts: Texts) -> list[Tensor]:
    """Logits of each text from one left-padded batch."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(t)) + t for t in texts])
    mask = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in texts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.float()
    return [row[width - len(t) :] for row, t in zip(logits, texts, strict=True)]


@torch.no_grad()
def hf_greedy(model: torch.nn.Module, text: list[int], tokens: int) -> list[int]:
    """Greedy continuation of `tokens` tokens, end-of-sequence ignored."""
    past, ids, out = None, torch.tensor([text]), []
    for _ in range(tokens):
        result = model(ids, past_key_values=past, use_cache=True)
        past, token = result.past_key_values, int(result.logits[0, -1].argmax())
        out.append(token)
        ids = torch.tensor([[token]])
    return out
