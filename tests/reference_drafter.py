"""DFlash a second time, as plainly as it can be written: one dense mask, no cache, everything anew every time.

It shares no code with the package: it reads config.json and the safetensors file by itself.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class ReferenceDrafter:
    """The drafter in `folder` (z-lab layout), with the target's `embedding` and `head`, in float32."""

    def __init__(self, folder: Path, embedding: Tensor, head: Tensor) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.w = {name.removeprefix("model."): t.float() for name, t in tensors.items()}
        self.embedding, self.head = embedding.float(), head.float()
        self.inner = self.config["dflash_config"]
        self.block = self.inner.get("block_size", self.config.get("block_size"))

    def logits(self, features: Tensor, anchor: int) -> Tensor:
        """Logits [block - 1, vocab] behind `anchor`, which follows the tokens of `features` [length, taps * hidden]."""
        length, size = features.shape[0], self.block
        context = self.norm(features @ self.w["fc.weight"].T, "hidden_norm.weight")
        ids = torch.tensor([anchor] + [self.inner["mask_token_id"]] * (size - 1))
        x = self.embedding[ids]
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self.attention(layer, x, context, length)
            h = self.norm(x, f"layers.{layer}.post_attention_layernorm.weight")
            gate, up = (h @ self.w[f"layers.{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + (gate * torch.sigmoid(gate) * up) @ self.w[f"layers.{layer}.mlp.down_proj.weight"].T
        return (self.norm(x, "norm.weight") @ self.head.T)[1:]

    def attention(self, layer: int, x: Tensor, context: Tensor, length: int) -> Tensor:
        prefix = f"layers.{layer}.self_attn"
        dim, kv_heads = self.config["head_dim"], self.config["num_key_value_heads"]
        heads = self.config["num_attention_heads"]
        h = self.norm(x, f"layers.{layer}.input_layernorm.weight")
        both = torch.cat((context, h))

        def project(name: str, rows: Tensor, count: int) -> Tensor:
            out = rows @ self.w[f"{prefix}.{name}_proj.weight"].T
            if f"{prefix}.{name}_proj.bias" in self.w:
                out = out + self.w[f"{prefix}.{name}_proj.bias"]
            return out.view(len(rows), count, dim)

        at_keys = torch.arange(length + len(x))
        at_rows = at_keys[length:]
        query = self.rotate(self.norm(project("q", h, heads), f"{prefix}.q_norm.weight"), at_rows)
        keys = self.rotate(self.norm(project("k", both, kv_heads), f"{prefix}.k_norm.weight"), at_keys)
        values = project("v", both, kv_heads)
        seen = torch.ones(len(x), len(both), dtype=torch.bool)
        if self.config["layer_types"][layer] == "sliding_attention":
            distance = at_rows[:, None] - at_keys[None, :]
            causal = self.config.get("is_causal", self.inner.get("causal", True))
            seen = (distance < self.config["sliding_window"]) & (distance >= 0 if causal else True)
        out = torch.zeros(len(x), heads, dim)
        for head in range(heads):
            own = head * kv_heads // heads
            scores = query[:, head] @ keys[:, own].T / math.sqrt(dim)
            out[:, head] = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values[:, own]
        joined = out.flatten(1)
        result = joined @ self.w[f"{prefix}.o_proj.weight"].T
        return result + self.w[f"{prefix}.o_proj.bias"] if f"{prefix}.o_proj.bias" in self.w else result

    def norm(self, x: Tensor, weight: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.w[weight]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Pairs (i, i + dim/2) turned as complex numbers."""
        half = self.config["head_dim"] // 2
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        theta = rope.get("rope_theta", self.config.get("rope_theta"))
        speed = [theta ** (-i / half) for i in range(half)]
        size = 1.0
        if rope.get("rope_type", rope.get("type")) == "yarn":
            speed, size = yarn(speed, rope, theta)
        angle = positions[:, None].float() * torch.tensor(speed)
        turn = torch.polar(torch.full_like(angle, size), angle)[:, None]
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((turned.real, turned.imag), -1)


def yarn(speed: list[float], rope: dict[str, Any], theta: float) -> tuple[list[float], float]:
    """arXiv 2309.00071, section 3.2: slow dimensions are interpolated, fast ones kept, with a ramp between."""
    half, factor = len(speed), rope["factor"]

    def dimension(turns: float) -> float:
        return half * math.log(rope["original_max_position_embeddings"] / (turns * 2 * math.pi)) / math.log(theta)

    low, high = dimension(rope.get("beta_fast", 32.0)), dimension(rope.get("beta_slow", 1.0))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = [min(max((i - low) / max(high - low, 0.001), 0.0), 1.0) for i in range(half)]
    return [s * (1 - r) + s / factor * r for s, r in zip(speed, ramp, strict=True)], 0.1 * math.log(factor) + 1
