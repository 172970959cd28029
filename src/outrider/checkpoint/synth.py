"""Random checkpoints of true shapes and bytes: `outrider synth`.

Contract: the same arguments give the same files. Activations stay sane through depth: matrices have a standard
deviation of 1/sqrt(fan-in), embeddings and sinks of 1, biases of 0.02, norms are 1; MXFP4 codes are uniform under
scales that give the same standard deviation. For speed all values are windows, at random places, of one buffer of
random values per kind: routing and arithmetic see noise, but equal runs of values occur in different tensors, so
nothing about compression or statistics can be learnt from such a checkpoint.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoint.hf_config import parse_config
from outrider.checkpoint.inventory import Stored, dense_tensors, expert_parts, expert_tensors
from outrider.checkpoint.presets import raw_config
from outrider.checkpoint.writer import SHARD_NBYTES, CheckpointWriter
from outrider.config import ModelConfig
from outrider.core import Progress, no_progress
from outrider.kernels.mxfp4 import SCALE_BIAS

_BUFFER = 2**24
_CODE_RMS = math.sqrt(sum(value**2 for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
_BIAS_STD = 0.02


def synthesize(
    source: str | Path,
    out: Path,
    seed: int = 0,
    progress: Progress = no_progress,
    *,
    layers: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    shard_nbytes: int = SHARD_NBYTES,
) -> ModelConfig:
    """Write the checkpoint folder `out`: `config.json` and random weights; returns the checked config.

    Args:
        source: a preset's name (`PRESETS`), a `config.json`, or a folder that holds one.
        layers: replaces the number of layers; settings per layer are cut, or repeated, to fit.
        overrides: further `config.json` fields to replace.

    Raises: CheckpointError if the config cannot be read or served, or `out` cannot be written.
    """
    raw, origin = raw_config(source)
    raw |= dict(overrides or {})
    if layers is not None:
        raw = _with_layers(raw, layers)
    config = parse_config(raw, origin)
    tensors = dense_tensors(config) | expert_tensors(config, expert_parts(config))
    nbytes = sum(stored.nbytes for stored in tensors.values())
    noise = Noise(seed)
    with CheckpointWriter(out, nbytes, progress, "random weights", shard_nbytes) as writer:
        writer.write_json("config.json", raw)
        for name, stored in tensors.items():
            writer.add(name, _draw(noise, name, stored, config))
    return config


def _with_layers(raw: dict[str, Any], layers: int) -> dict[str, Any]:
    raw = raw | {"num_hidden_layers": layers}
    if isinstance(kinds := raw.get("layer_types"), list) and kinds:
        raw["layer_types"] = [kinds[layer % len(kinds)] for layer in range(layers)]
    if isinstance(dense := raw.get("mlp_only_layers"), list):
        raw["mlp_only_layers"] = [layer for layer in dense if layer < layers]
    return raw


class Noise:
    """Random tensors cut from one buffer per kind and scale; the same seed and calls give the same tensors."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._normal: Tensor | None = None
        self._buffers: dict[tuple[str, float], Tensor] = {}

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype, std: float) -> Tensor:
        """Normal values of standard deviation `std`."""
        return self._cut(shape, (str(dtype), std), lambda: (self._normals() * std).to(dtype))

    def codes(self, shape: tuple[int, ...]) -> Tensor:
        """Uniform bytes, uint8: pairs of MXFP4 codes."""
        return self._cut(shape, ("codes", 0.0), lambda: self._bytes(256))

    def scales(self, shape: tuple[int, ...], std: float) -> Tensor:
        """E8M0 bytes, uint8: two neighbouring powers of two, mixed so that uniform codes get `std`."""
        wanted = std / _CODE_RMS
        exponent = math.floor(math.log2(wanted))
        larger = ((wanted / 2.0**exponent) ** 2 - 1) / 3  # its share: (1 - s) + 4 s = (wanted / 2^exponent)^2

        def make() -> Tensor:
            chosen = torch.rand(_BUFFER // 16, generator=self._random) < larger
            return (chosen + (exponent + SCALE_BIAS)).to(torch.uint8)

        return self._cut(shape, ("scales", std), make)

    def _normals(self) -> Tensor:
        if self._normal is None:
            self._normal = torch.randn(_BUFFER, generator=self._random)
        return self._normal

    def _bytes(self, end: int) -> Tensor:
        return torch.randint(0, end, (_BUFFER,), generator=self._random, dtype=torch.uint8)

    def _cut(self, shape: tuple[int, ...], kind: tuple[str, float], make: Callable[[], Tensor]) -> Tensor:
        if kind not in self._buffers:
            self._buffers[kind] = make()
        buffer = self._buffers[kind]
        tensor = torch.empty(math.prod(shape), dtype=buffer.dtype)
        done = 0
        while done < tensor.numel():
            start = int(torch.randint(buffer.numel() // 2, (), generator=self._random))
            piece = buffer[start : start + tensor.numel() - done]
            tensor[done : done + piece.numel()] = piece
            done += piece.numel()
        return tensor.view(shape)


def _draw(noise: Noise, name: str, stored: Stored, config: ModelConfig) -> Tensor:
    """The tensor `name`, shaped and typed as `stored`."""
    if name.endswith("_blocks"):
        return noise.codes(stored.shape)
    if name.endswith("_scales"):
        return noise.scales(stored.shape, (32 * stored.shape[-1]) ** -0.5)
    dtype = getattr(torch, stored.dtype)
    if name.endswith("norm.weight"):
        return torch.ones(stored.shape, dtype=dtype)
    return noise.normal(stored.shape, dtype, _std(name, stored, config))


def _std(name: str, stored: Stored, config: ModelConfig) -> float:
    if name.endswith("bias"):
        return _BIAS_STD
    if name.endswith(("sinks", "embed_tokens.weight")):
        return config.hidden_size**-0.5 if config.tie_embeddings and "embed" in name else 1.0
    # transformers stores plain gpt-oss experts as [E, in, out], everything else is [out, in]
    fan_in = stored.shape[-2] if len(stored.shape) == 3 else stored.shape[-1]
    return float(fan_in**-0.5)
