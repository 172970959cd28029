"""The engine: `build` composes it, `step()` runs it, `LLM` is what users hold."""
