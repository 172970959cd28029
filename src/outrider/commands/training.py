"""`train-draft`: a DFlash draft for any target that the engine runs."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.commands.options import Json, Model


def train_draft(
    model: Model,
    data: Annotated[list[Path], typer.Option(help="Text to draw prompts from; may be given several times.")],
    out: Annotated[Path, typer.Option(help="Folder for the draft, its card and the work that a rerun resumes.")],
    as_json: Json = False,
) -> None:
    """Train a DFlash draft for MODEL on text that MODEL itself writes."""
    raise NotImplementedError
