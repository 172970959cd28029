"""What is in a checkpoint: `outrider inspect`.

Contract: everything is checked as `open_checkpoint` checks it, and nothing but JSON and safetensors headers is read.
Bytes are exact: those of the stored tensors, without file headers.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from outrider.checkpoint.checkpoint import open_checkpoint
from outrider.checkpoint.inventory import (
    Stored,
    dense_tensors,
    expert_nbytes,
    expert_tensors,
    group_nbytes,
)
from outrider.checkpoint.shards import read_json
from outrider.config import Family, format_bytes

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Inspection:
    """A checkpoint in numbers.

    Attributes:
        layers: decoder layers; `moe_layers` of them have experts, the others a dense MLP.
        experts: experts of one MoE layer.
        format: how experts are stored: "mxfp4" or a dtype name; `dtypes` are those of the dense tensors.
        nbytes: all tensors; the sum of `experts_nbytes`, `dense_nbytes` and `other_nbytes` (tensors that are allowed
            but not used, such as the head of a model with tied embeddings).
        layer_experts_nbytes: the experts of one MoE layer.
        dense_nbytes: by group: embedding, head, attention, router, norms, dense MLP.
        context: the longest context in tokens; `windows` counts sliding-window layers by their window in tokens.
        problems: what a user will miss although the checkpoint can be served; empty if nothing.
    """

    folder: Path
    family: Family
    layers: int
    moe_layers: int
    experts: int
    experts_per_token: int
    format: str
    dtypes: tuple[str, ...]
    nbytes: int
    experts_nbytes: int
    expert_nbytes: int
    layer_experts_nbytes: int
    dense_nbytes: dict[str, int]
    other_nbytes: int
    tensors: int
    shards: int
    vocab_size: int
    hidden_size: int
    context: int
    windows: dict[int, int]
    sinks: bool
    tied_embeddings: bool
    tokenizer: bool
    chat_template: bool
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"folder": str(self.folder), "windows": {str(w): n for w, n in self.windows.items()}}


def inspect(folder: Path) -> Inspection:
    """Look at the checkpoint in `folder`.

    Raises: CheckpointError for whatever `open_checkpoint` refuses.
    """
    checkpoint = open_checkpoint(folder)
    config, shards = checkpoint.config, checkpoint.shards
    dense = {name: Stored(shards.dtype(name), shards.shape(name)) for name in dense_tensors(config)}
    experts = expert_tensors(config, checkpoint.parts)
    other = shards.names - dense.keys() - experts.keys()
    dense_nbytes = group_nbytes(dense)
    experts_nbytes = sum(tensor.nbytes for tensor in experts.values())
    other_nbytes = sum(shards.tensor(name).nbytes for name in other)  # a view: no byte of it is read
    one = expert_nbytes(checkpoint.parts)
    tokenizer, template = _has_tokenizer(folder), _has_chat_template(folder)
    windows = [window for window in config.windows if window is not None]
    return Inspection(
        folder=folder,
        family=config.family,
        layers=config.num_layers,
        moe_layers=len(config.moe_layers),
        experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        format="mxfp4" if config.mxfp4_experts else checkpoint.parts[0].dtype,
        dtypes=tuple(sorted({tensor.dtype for tensor in dense.values()})),
        nbytes=experts_nbytes + sum(dense_nbytes.values()) + other_nbytes,
        experts_nbytes=experts_nbytes,
        expert_nbytes=one,
        layer_experts_nbytes=one * config.num_experts,
        dense_nbytes={str(group): nbytes for group, nbytes in dense_nbytes.items()},
        other_nbytes=other_nbytes,
        tensors=len(shards.names),
        shards=len({shards.path(name) for name in shards.names}),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context=config.max_positions,
        windows={window: windows.count(window) for window in sorted(set(windows))},
        sinks=any(name.endswith(".sinks") for name in dense),
        tied_embeddings=config.tie_embeddings,
        tokenizer=tokenizer,
        chat_template=template,
        problems=_problems(tokenizer, template),
    )


def render(inspection: Inspection) -> RenderableType:
    """The inspection for a terminal: what it is, then a table of bytes."""
    one = inspection
    facts = Table.grid(padding=(0, 2))
    for label, text in (
        ("model", f"{one.family}, {one.layers} layers, hidden size {one.hidden_size}, vocabulary {one.vocab_size}"),
        ("experts", f"{one.experts} in each of {one.moe_layers} layers, {one.experts_per_token} a token, {one.format}"),
        ("dense weights", f"{', '.join(one.dtypes)}{', head tied to the embedding' if one.tied_embeddings else ''}"),
        ("context", f"{one.context} tokens; {_attention(one)}"),
        ("files", f"{one.tensors} tensors in {one.shards} {'shard' if one.shards == 1 else 'shards'}"),
        ("tokenizer", "yes" if one.tokenizer else "no"),
        ("chat template", "yes" if one.chat_template else "no"),
        ("problems", "; ".join(one.problems) or "none"),
    ):
        facts.add_row(f"[bold]{label}[/]", text)
    table = Table("what", "bytes", "", "share", title="Weights", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {"experts": one.experts_nbytes, **one.dense_nbytes, "other": one.other_nbytes}
    for label, nbytes in rows.items():
        if nbytes:
            table.add_row(label, f"{nbytes:,}", format_bytes(nbytes), f"{nbytes / one.nbytes:.1%}")
    table.add_section()
    table.add_row("all", f"{one.nbytes:,}", format_bytes(one.nbytes), "100.0%")
    table.add_section()
    table.add_row("one expert", f"{one.expert_nbytes:,}", format_bytes(one.expert_nbytes), "")
    layer = one.layer_experts_nbytes
    table.add_row("experts of one layer", f"{layer:,}", format_bytes(layer), "")
    return Group(f"[bold]{escape(str(one.folder))}[/]", facts, table)


def _attention(inspection: Inspection) -> str:
    full = inspection.layers - sum(inspection.windows.values())
    kinds = [f"windows of {window} in {count} layers" for window, count in inspection.windows.items()]
    kinds += [f"full attention in {full}"] if full else []
    return ", ".join(kinds) + (", with sinks" if inspection.sinks else "")


def _problems(tokenizer: bool, template: bool) -> tuple[str, ...]:
    problems = []
    if not tokenizer:
        problems.append("no tokenizer, so prompts must be given as ids")
    if not template:
        problems.append("no chat template, so chat is not possible")
    return tuple(problems)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in _TEMPLATES):
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(read_json(settings).get("chat_template"))
