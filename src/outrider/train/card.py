"""The model card and its data: everything in them comes from the report of one training run.

Contract: `write_card` writes training.json (the report), heldout.json (the split) and README.md; `render` is a pure
function of the report. `python -m outrider.train.card FOLDER` writes the card of a trained folder anew.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any


def write_card(folder: Path, report: dict[str, Any], command: str) -> None:
    """Write the three files; `command` is the command line that trained the model."""
    report = {**report, "command": command}
    record = report["record"]
    heldout = {key: record[key] for key in ("heldout", "heldout_bytes", "xz_bytes", "dropped")}
    (folder / "heldout.json").write_text(json.dumps(heldout, indent=1) + "\n", encoding="utf-8")
    (folder / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(render(report), encoding="utf-8")


def render(report: dict[str, Any]) -> str:
    """The card in Markdown."""
    parts = (_header, _use, _figures, _routing, _training, _data, _samples, _limits)
    return "\n".join(part(report).strip() + "\n" for part in parts)


def _header(report: dict[str, Any]) -> str:
    c = report["recipe"]["config"]
    return f"""
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [gpt-oss, mixture-of-experts, mxfp4, python]
---
# Outrider demo target

A small Mixture-of-Experts language model of Python source with the gpt-oss architecture and file layout. It exists so
that expert offloading, speculative decoding and their measurements can be tried in seconds, on a laptop too, with
routing that was learnt and not drawn at random. It is no coding assistant.

| | |
|---|---|
| architecture | `GptOssForCausalLM`, {c["layers"]} layers, hidden {c["hidden"]} |
| attention | {c["heads"]} heads ({c["kv_heads"]} KV) of {c["head_dim"]}, sinks, window {c["window"]} on even layers |
| experts | {c["experts"]} a layer, top {c["top_k"]}, intermediate {c["intermediate"]}, MXFP4; the rest bfloat16 |
| parameters | {report["parameters"]:,} |
| context | {c["context"]} tokens, plain RoPE, theta {c["rope_theta"]:g} |
| tokenizer | byte-level BPE, {c["vocab"]} entries |
| model.safetensors + tokenizer files | {report["gates"]["bytes"]:,} bytes |
"""


def _use(report: dict[str, Any]) -> str:
    return """
## Use

The tokenizer begins text with `<|endoftext|>`: every training document stands between two of them. The chat form is
`<|user|>description<|end|><|assistant|>function<|end|>`; a few per cent of the training text have it, made from
functions and their docstrings. Outrider serves the folder as `demo`. Transformers loads it too; without its MXFP4
kernels pass `quantization_config=Mxfp4Config(dequantize=True)`.
"""


def _figures(report: dict[str, Any]) -> str:
    g, r = report["gates"], report["record"]

    def saved(bits: float) -> str:
        return f"{100 * (1 - bits / g['xz_bits_per_byte']):.1f}%"

    return f"""
## Held-out text

{len(r["heldout"])} whole files of the standard library, {r["heldout_bytes"]:,} bytes, {r["heldout_tokens"]:,} tokens,
chosen by a hash of their path among the files that are neither tests nor generated tables (`heldout.json`). Each file
is scored by itself, from `<|endoftext|>` to the closing `<|endoftext|>`, in windows of \
{report["recipe"]["config"]["context"]} tokens that advance by half;
each token counts once. `xz -9e` compresses the same files joined into one text.

| | bits per byte | below `xz -9e` |
|---|---|---|
| `xz -9e` ({r["xz_bytes"]:,} bytes) | {g["xz_bits_per_byte"]:.4f} | |
| masters rounded to bfloat16 | {g["bf16_bits_per_byte"]:.4f} | {saved(g["bf16_bits_per_byte"])} |
| this checkpoint (MXFP4 experts) | {g["mxfp4_bits_per_byte"]:.4f} | {saved(g["mxfp4_bits_per_byte"])} |

Gate, at least 20% below `xz -9e` both before and after MXFP4: {_verdict(g["bits_per_byte_ok"])}. The masters trained
under MXFP4 rounding, so without it they are slightly worse. The checkpoint was measured in \
{"bfloat16 on the GPU" if report["measured_on"] == "cuda" else "float32 on a CPU"}.
"""


def _verdict(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def _routing(report: dict[str, Any]) -> str:
    rows = "\n".join(
        f"| {i} | {r['smallest_share']:.2f} | {r['largest_share']:.2f} | {r['entropy']:.3f} | {r['token_entropy']:.3f} "
        f"| {r['overlap']:.3f} | {r['overlap_by_chance']:.3f} |"
        for i, r in enumerate(report["routing"])
    )
    g = report["gates"]
    return f"""
## Routing

Over all held-out tokens, MXFP4 checkpoint. Share: an expert's part of all (token, slot) pairs of its layer, times the
number of experts, so 1 is uniform. Entropy of the shares and of a token's router softmax are over log(experts).
Overlap: the part of a token's experts that the token before it chose as well, and by chance for two unrelated tokens.

| layer | smallest share | largest share | entropy | token entropy | overlap | by chance |
|---|---|---|---|---|---|---|
{rows}

Gate, every expert of every layer has a share of at least 0.2: {_verdict(g["experts_alive"])} \
(smallest {g["smallest_share"]:.3f}).
"""


def _training(report: dict[str, Any]) -> str:
    t, r, w, c = report["recipe"], report["record"], report["woken"], report["recipe"]["config"]
    notes = "".join(f"\n{note}" for note in report.get("notes", []))
    seen = t["max_tokens"] or r["train_tokens"]
    earlier = (report["before"] or {}).get("command", "")
    commands = [_spell(command) for command in (r["command"], earlier, report["command"])]
    lines = "\n".join(dict.fromkeys(filter(None, commands)))
    return f"""
## Training

{report["steps"]:,} steps of {t["batch"]} windows: {report["trained_tokens"]:,} tokens, \
{report["trained_tokens"] / seen:.1f} passes over {seen:,};
{report["training_seconds"]:.0f} s on one {report["device"]} with torch {report["torch"]}, compilation included; \
seed {t["seed"]}.
{_earlier(report["before"])}
Muon for the blocks' matrices, Adam for the rest; peak rate {t["rate"]}, linear decay over the last 40% of the steps;
weight decay {t["weight_decay"]} on the matrices; load-balancing loss weighted {t["balance"]}; bfloat16 compute, \
float32 masters. From
{100 * t["quantize_from"]:.0f}% of the steps on the experts' weights are rounded to MXFP4 in the forward pass, \
with straight-through gradients.

At the end {w["biases"]} of {c["layers"] * c["experts"]} router biases were raised, until every expert had \
{w["floor"]} of a uniform share of a few
training files like the held-out ones; the figure of the masters is from before that.
{notes}

```
{lines}
```

One command does it all: give `--data` and `--minutes` together. A run on a GPU is not reproducible bit for bit, for
sums there have no fixed order; the data, the split, the tokenizer and the order of batches are.
"""


def _earlier(before: dict[str, Any] | None) -> str:
    if before is None:
        return ""
    g, t = before["gates"], before["recipe"]
    return f"""
It began from an earlier run of {before["steps"]:,} steps, {before["trained_tokens"]:,} tokens, \
{before["training_seconds"]:.0f} s on one {before["device"]}, peak rate
{t["rate"]}, MXFP4 rounding from {100 * t["quantize_from"]:.0f}% on. That model reached \
{g["mxfp4_bits_per_byte"]:.4f} bits per byte, smallest expert share {g["smallest_share"]:.3f}. Embeddings were
carried over by the tokens' spelling.
"""


def _spell(command: str) -> str:
    """The command line with a run of wheels written as one pattern (the table of sources names them)."""
    return re.sub(r"(\S*/)\S+\.whl( \S+\.whl)*", r"\1*.whl", command).strip()


def _data(report: dict[str, Any]) -> str:
    r = report["record"]
    rows = "\n".join(
        f"| {s['name']} | {s['licence'].replace('|', '/')} | {s['files']:,} | {s['bytes']:,} |" for s in r["sources"]
    )
    return f"""
## Data

Python files of released packages; the licence is what each package's metadata states. The first source enters the
token stream {r["primary_repeat"]} times, the others once; {r["chat_tokens"]:,} of {r["train_tokens"]:,} tokens are in \
the chat form. Left out: exact
duplicates, files above 300 kB, with lines above 1000 characters or mostly digits, and {len(r["dropped"])} files that \
share a large part of
their lines with a held-out file (listed in `heldout.json`).

| source | licence | files | bytes |
|---|---|---|---|
{rows}

`pip download --no-deps --only-binary=:all: NAME==VERSION` fetches a source; where a package has several wheels, the one
for CPython 3.12 on Linux x86-64 was used. The weights are a statistical summary of
this text and can repeat short passages of it; the sources keep their licences. The checkpoint itself is under the
project's licence.
"""


def _samples(report: dict[str, Any]) -> str:
    blocks = "\n".join(f"````\n{prompt}⟶{text}\n````" for prompt, text in report["samples"])
    return f"""
## Samples

Greedy, MXFP4 checkpoint, float32 on a CPU, at most 160 tokens; ⟶ marks where the model takes over. Not picked.

{blocks}
"""


def _limits(report: dict[str, Any]) -> str:
    return f"""
## Limits

It writes text that looks like Python; names, logic and documentation are often wrong, and code it writes must not be
trusted or run unseen. Greedy decoding falls into repetition after a while, as small models do. Beyond
{report["recipe"]["config"]["context"]} tokens it was never trained. It knows no language but Python and the English \
of docstrings and
comments. It had no safety training: it continues what it is given.
"""


if __name__ == "__main__":
    target = Path(sys.argv[1])
    stored = json.loads((target / "training.json").read_text(encoding="utf-8"))
    write_card(target, stored, stored["command"])
