"""Outrider serves Mixture-of-Experts models that do not fit in your GPU."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.config import SamplingParams as SamplingParams
    from outrider.engine.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `outrider --help` and the scheduler's tests do not import torch.
    if name == "LLM":
        from outrider.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from outrider.config import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'outrider' has no attribute '{name}'")
