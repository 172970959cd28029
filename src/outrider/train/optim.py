"""Muon for weight matrices, Adam for the rest, and the learning-rate schedule.

Contract: `Optimizer.step(rate)` updates all parameters from their gradients and clears these; its `state()` with the
parameters is all that a resumed run needs to continue bit for bit on the same device.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic Newton-Schulz iteration of Muon (Jordan et al., 2024)
_ITERATIONS = 5
_MOMENTUM = 0.95
_BETAS = (0.9, 0.95)
_EPS = 1e-8
_CLIP = 1.0


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100, decay: float = 0.4) -> float:
    """Linear warm-up, constant, then linear to zero over the last `decay` of all steps."""
    rise = min(1.0, (step + 1) / warmup)
    fall = min(1.0, (steps - step) / max(1.0, decay * steps))
    return peak * rise * fall


def orthogonalise(stack: Tensor) -> Tensor:
    """Replace each matrix of [N, R, C] by about the nearest one with orthonormal rows or columns."""
    x = stack.bfloat16() if stack.is_cuda else stack.float()
    wide = x.shape[1] > x.shape[2]
    if wide:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    restored: Tensor = x.transpose(1, 2) if wide else x
    return restored.float()


def uses_muon(name: str, parameter: Tensor) -> bool:
    """Matrices inside the blocks, except the router's."""
    return parameter.dim() >= 2 and "proj" in name and not name.endswith("bias")


class Optimizer:
    """Decoupled weight decay applies to Muon's matrices only."""

    def __init__(self, model: nn.Module, weight_decay: float) -> None:
        named = dict(model.named_parameters())
        self.weight_decay = weight_decay
        self.parameters = list(named.values())
        self.plain = {n: p for n, p in named.items() if not uses_muon(n, p)}
        self.groups: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
        for name, p in named.items():
            if uses_muon(name, p):
                self.groups.setdefault(tuple(p.shape), {})[name] = p
        self.momentum = {n: torch.zeros_like(p) for group in self.groups.values() for n, p in group.items()}
        self.first = {n: torch.zeros_like(p) for n, p in self.plain.items()}
        self.second = {n: torch.zeros_like(p) for n, p in self.plain.items()}
        self.count = 0

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at learning rate `rate`; gradients are clipped to a norm of 1 and then dropped."""
        torch.nn.utils.clip_grad_norm_(self.parameters, _CLIP, foreach=True)
        self.count += 1
        for group in self.groups.values():
            self._muon(group, rate)
        self._adam(rate)
        for p in self.parameters:
            p.grad = None

    def _muon(self, group: dict[str, nn.Parameter], rate: float) -> None:
        momenta = [self.momentum[name] for name in group]
        grads = _gradients(group.values())
        torch._foreach_lerp_(momenta, grads, 1 - _MOMENTUM)
        ahead = torch._foreach_lerp(grads, momenta, _MOMENTUM)  # Nesterov
        stack = torch.stack(list(ahead)).flatten(0, -3)
        scale = 0.2 * max(stack.shape[-2:]) ** 0.5  # about Adam's root-mean-square, so one rate serves both
        updates = orthogonalise(stack).view(len(group), *ahead[0].shape)
        parameters: list[Tensor] = list(group.values())
        torch._foreach_mul_(parameters, 1 - rate * self.weight_decay)
        torch._foreach_add_(parameters, list(updates.unbind()), alpha=-rate * scale)

    def _adam(self, rate: float) -> None:
        parameters: list[Tensor] = list(self.plain.values())
        first, second = list(self.first.values()), list(self.second.values())
        grads = _gradients(parameters)
        torch._foreach_lerp_(first, grads, 1 - _BETAS[0])
        torch._foreach_mul_(second, _BETAS[1])
        torch._foreach_addcmul_(second, grads, grads, 1 - _BETAS[1])
        root = torch._foreach_sqrt(second)
        torch._foreach_mul_(root, (1 - _BETAS[1] ** self.count) ** -0.5)
        torch._foreach_add_(root, _EPS)
        torch._foreach_addcdiv_(parameters, first, root, value=-rate / (1 - _BETAS[0] ** self.count))

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "momentum": self.momentum, "first": self.first, "second": self.second}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned, onto this model's device."""
        self.count = int(state["count"])
        for kind in ("momentum", "first", "second"):
            own: dict[str, Tensor] = getattr(self, kind)
            for name, tensor in own.items():
                tensor.copy_(state[kind][name])


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
