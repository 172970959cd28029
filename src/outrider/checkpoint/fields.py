"""Typed access to the fields of a `config.json`, with errors that name the file and the field."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config import Yarn
from outrider.errors import CheckpointError

_FLOATS = ("float32", "bfloat16", "float16")
_REQUIRED: Any = object()


@dataclass(frozen=True)
class Fields:
    """The JSON object `raw`, read from `path`."""

    raw: Mapping[str, Any]
    path: Path

    def refuse(self, name: str, because: str) -> CheckpointError:
        """The error for field `name`; the caller raises it."""
        return CheckpointError(f"{self.path}: {name} is {self.raw.get(name)!r}; {because}")

    def integer(self, name: str, default: Any = _REQUIRED, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """Integer field from `minimum` to `maximum`."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.refuse(name, f"it must be a whole number of at least {minimum}")
        if value > maximum:
            raise self.refuse(name, f"more than {maximum} are not supported")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """Positive number field."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
            raise self.refuse(name, "it must be a positive, finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Boolean field; null counts as absent."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "it must be true or false")
        return value

    def only(self, name: str, value: Any) -> None:
        """Refuse any value of `name` but `value`, the only one that is implemented."""
        if self._get(name, value) != value:
            raise self.refuse(name, f"only {value!r} is implemented")

    def dtype(self) -> str:
        """Dtype name of the dense weights; old files say `torch_dtype`."""
        name = "dtype" if "dtype" in self.raw else "torch_dtype"
        value = self._get(name, "bfloat16")
        if value not in _FLOATS:
            raise self.refuse(name, f"it must be one of {', '.join(_FLOATS)}")
        return str(value)

    def eos(self) -> tuple[int, ...]:
        """End-of-sequence ids: an id, a list of ids or nothing."""
        value = self.raw.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.refuse("eos_token_id", "it must be an id or a list of ids")
        return tuple(ids)

    def mxfp4(self) -> bool:
        """Whether the experts are stored as MXFP4.

        Raises: CheckpointError for any other quantisation.
        """
        quantization = self.raw.get("quantization_config")
        if quantization is None:
            return False
        if not isinstance(quantization, dict) or quantization.get("quant_method") != "mxfp4":
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise CheckpointError(
                f"{self.path}: quantization_config.quant_method is {method!r}; only 'mxfp4' and none are implemented"
            )
        return True

    def rope(self, default_theta: float, default: Mapping[str, Any] | None = None) -> tuple[float, Yarn | None]:
        """(theta, YaRN or None) from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
        name = "rope_parameters" if self.raw.get("rope_parameters") else "rope_scaling"
        rope = self.raw.get(name) or default or {}
        if not isinstance(rope, Mapping):
            raise self.refuse(name, "it must be an object")
        inner = Fields(rope, Path(f"{self.path}: {name}"))
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise self.refuse(name, "settings per layer type are not implemented")
        inner.only("partial_rotary_factor", 1.0)
        theta = (inner if rope.get("rope_theta") is not None else self).number("rope_theta", default_theta)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "yarn":
            raise CheckpointError(f"{self.path}: {name}.rope_type is {kind!r}; 'default' and 'yarn' are implemented")
        if rope.get("mscale") or rope.get("mscale_all_dim"):
            raise CheckpointError(f"{self.path}: {name}.mscale is not implemented")
        attention_factor = rope.get("attention_factor")
        return theta, Yarn(
            factor=inner.number("factor"),
            original_positions=inner.integer(
                "original_max_position_embeddings", self.raw.get("max_position_embeddings")
            ),
            beta_fast=inner.number("beta_fast", 32.0),
            beta_slow=inner.number("beta_slow", 1.0),
            truncate=inner.flag("truncate", True),
            attention_factor=None if attention_factor is None else inner.number("attention_factor"),
        )

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"{self.path} has no field '{name}'")
        return default
