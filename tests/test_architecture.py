"""Imports go down only (DESIGN: L0 config .. L5 cli), and what must stay free of torch is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "outrider"
LEVELS = {
    "errors": 0,
    "config": 0,
    "core": 0,
    "figure": 0,
    "stats": 0,
    "checkpoint": 1,
    "kernels": 1,
    "experts": 2,
    "kvcache": 2,
    "models": 2,
    "scheduler": 3,
    "spec": 3,
    "route_ahead": 3,
    "engine": 4,
    "bench": 5,
    "train": 5,
    "commands": 5,
    "console": 5,
    "cli": 5,
    "__main__": 5,
}
FORBIDDEN = {
    ("models", "experts"),  # a model sees experts through the injected provider only
    ("kvcache", "models"),
    ("experts", "kvcache"),
    ("experts", "models"),
    ("checkpoint", "experts"),
    ("scheduler", "experts"),
    ("scheduler", "models"),
    ("spec", "experts"),
    ("spec", "route_ahead"),  # it emits to an injected sink
}
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Names of outrider's parts that the file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [
                f"{node.module}.{alias.name}" if node.module == "outrider" else node.module for alias in node.names
            ]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name and name.startswith("outrider.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    for other in imports(path) - {part, "__version__"}:
        assert LEVELS[other] <= LEVELS[part], f"{path}: {part} must not import {other}"
        assert (part, other) not in FORBIDDEN, f"{path}: {part} must not import {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_scheduler_and_help_do_not_import_torch() -> None:
    code = (
        "import sys; import outrider.scheduler.scheduler, outrider.kvcache.pages, outrider.cli; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
