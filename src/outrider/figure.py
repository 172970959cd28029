"""Plots through matplotlib, which is optional; the errors of its absence and of a bad path are sentences."""

from pathlib import Path
from typing import Any

from outrider.errors import ConfigError


def new_figure(width: float, height: float) -> Any:
    """An empty `matplotlib.figure.Figure` of so many inches.

    Raises: ConfigError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a plot needs matplotlib, which is not installed; install it with: pip install matplotlib"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: str | Path) -> None:
    """Write `figure` in the format that the name of `path` ends with.

    Raises: ConfigError if it cannot be written there.
    """
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}") from error
