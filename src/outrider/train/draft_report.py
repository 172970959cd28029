"""What a trained draft says about itself: its card, acceptance as JSON and as a picture, and the training report.

Contract: `write_report` writes README.md, acceptance.json, acceptance.png and training.json; the card is a pure
function of the report and the acceptance.
"""

from pathlib import Path
from typing import Any

from outrider.console import write_json
from outrider.figure import new_figure, save_figure
from outrider.train.draft_eval import Acceptance


def check_plotting() -> None:
    """Raises: ConfigError if the picture could not be drawn at the end."""
    new_figure(1, 1)


def write_report(folder: Path, report: dict[str, Any], acceptance: Acceptance) -> None:
    """Write the four files."""
    measured = acceptance.to_dict() | {"block_size": report["draft"]["block_size"], "curve": report["curve"]}
    write_json(folder / "training.json", report)
    write_json(folder / "acceptance.json", measured)
    _draw(report, acceptance, folder / "acceptance.png")
    (folder / "README.md").write_text(render(report, acceptance), encoding="utf-8")


def _draw(report: dict[str, Any], acceptance: Acceptance, path: Path) -> None:
    """Acceptance by position beside its growth over the training."""
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    positions = range(1, len(acceptance.by_position) + 1)
    left.bar(positions, [100 * share for share in acceptance.by_position], color="tab:blue")
    left.set_ylim(0, 100)
    left.set_xticks(list(positions))
    left.set_xlabel("draft")
    left.set_ylabel("rounds in which it and all before it were accepted, %")
    left.set_title(f"{acceptance.mean_acceptance_length:.2f} tokens a round, the bonus token included", fontsize=9)
    steps, lengths = zip(*report["curve"], strict=True)
    right.plot(steps, lengths, marker="o", ms=3)
    right.set_xlabel("training step")
    right.set_ylabel("tokens a round on held-out prompts")
    right.grid(alpha=0.3)
    right.set_title(f"greedy, {acceptance.sequences} held-out prompts", fontsize=9)
    save_figure(figure, path)


def render(report: dict[str, Any], acceptance: Acceptance) -> str:
    """The card in Markdown."""
    draft, recipe, data = report["draft"], report["recipe"], report["data"]
    again, documents = recipe["continuation"], report["documents"]
    rows = "\n".join(f"| {k} | {share:.1%} |" for k, share in enumerate(acceptance.by_position, start=1))
    sources = "\n".join(f"| {name} | {licence} |" for name, licence in report["sources"])
    commands = "\n".join(report["commands"])
    raw = (
        f" For the first {recipe['raw_until']:.0%} of the steps {data['raw_sequences']:,} sequences of the text as it "
        f"is, {data['raw_tokens']:,} tokens, were mixed in."
        if data["raw_sequences"]
        else ""
    )
    return f"""---
library_name: outrider
tags: [dflash, speculative-decoding]
---
# DFlash draft of `{report["target"]}`

A block drafter (DFlash, arXiv 2602.06036) in the layout of the z-lab checkpoints. It shares embedding and head with its
target and serves no other model.

| | |
|---|---|
| block | {draft["block_size"]} rows: the anchor and {draft["block_size"] - 1} drafts |
| layers | {draft["num_layers"]} of hidden {draft["hidden_size"]}, {draft["num_heads"]} heads \
({draft["num_kv_heads"]} KV) of {draft["head_dim"]}, feed-forward {draft["intermediate"]} |
| reads | target layers {", ".join(map(str, draft["tap_layers"]))} of {draft["target_layers"]} (counted from 0) |
| mask token | {draft["mask_token_id"]} |
| parameters | {report["parameters"]:,} |

## Acceptance

{acceptance.mean_acceptance_length:.2f} tokens a round, the bonus token included (plain decoding: 1): the engine with \
this draft, greedy, at most
{recipe["heldout_tokens"]} tokens behind each of {acceptance.sequences} prompts from held-out documents, \
{acceptance.rounds:,} rounds. {acceptance.identical} of the {acceptance.sequences} texts are those of plain
decoding, token for token. The prompts come from {documents["heldout"]} of {documents["heldout"] + documents["train"]} \
documents, set apart by a hash before any training
prompt was drawn.

| draft | it and all before it accepted |
|---|---|
{rows}

![acceptance by position, and over the training](acceptance.png)

## Training

{recipe["steps"]:,} steps of {recipe["batch"]} sequences, {recipe["anchors"]} blocks in each, on \
{data["written_sequences"]:,} texts ({data["written_tokens"]:,} tokens with their
prompts) that the target wrote itself behind prompts of {again["prompt"][0]} to {again["prompt"][1]} tokens, \
{again["greedy"]:.0%} of them greedily and the others at
temperature {again["temperature"]}.{raw}
{report["training_seconds"]:.0f} s on one {report["device"]} in {report["dtype"]}, torch {report["torch"]}. Muon for \
the layers' matrices, Adam for the rest, peak rate
{recipe["rate"]}, warm-up {recipe["warmup"]:.0%}, linear decay over the last {recipe["decay"]:.0%}. Cross-entropy at \
the rows' own positions, row k weighted
exp(-(k - 1) / {recipe["gamma"] or 0.45 * draft["block_size"]:g}).

| text | licence as stated |
|---|---|
{sources}

```
{commands}
```
"""
