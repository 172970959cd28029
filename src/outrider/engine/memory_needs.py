"""What an engine takes of its device's memory and of pinned memory, before anything is allocated: the sum of its
terms, how many expert slots a bound leaves room for, and the refusal with every term.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.checkpoint import Checkpoint
from outrider.checkpoint.draft import DraftCheckpoint
from outrider.config import EngineOptions, format_bytes
from outrider.engine.memory_plan import RUNTIME_NBYTES
from outrider.errors import ConfigError
from outrider.experts.budget import slots_per_layer
from outrider.experts.store import MappedStore
from outrider.kvcache.pages import PAGE_SIZE
from outrider.kvcache.storage import kv_bytes_per_token


@dataclass(frozen=True)
class MemoryNeeds:
    """Of an engine with these settings.

    Attributes:
        by_device: whether the device drives. kv_tokens: tokens that KV pages hold.
        rows, prompt_rows, width: most rows of a step, of a long prompt, and of a sequence in a verify.
    """

    checkpoint: Checkpoint
    draft: DraftCheckpoint | None
    mapped: MappedStore
    options: EngineOptions
    by_device: bool
    kv_tokens: int
    max_context: int
    rows: int
    prompt_rows: int
    width: int
    device: torch.device
    dtype: torch.dtype

    @property
    def record_nbytes(self) -> int:
        """Bytes of a slot."""
        if not self.by_device:
            return self.mapped.layout.record_nbytes
        from outrider.engine.build_device import packed_layout

        return packed_layout(self.checkpoint.config, self.dtype).record_nbytes

    def slots(self) -> dict[int, int]:
        """Expert slots of each layer: those asked for, else as many as `gpu_memory` leaves room for, else all.

        Raises: ConfigError if those asked for are below the floor (experts/budget.py), or not even the floor fits.
        """
        config, options = self.checkpoint.config, self.options
        if options.expert_slots is not None:
            return slots_per_layer(config, options.expert_slots, self.record_nbytes)
        most, least = config.num_experts, config.experts_per_token
        if options.gpu_memory is None:
            return dict.fromkeys(config.moe_layers, most)
        for each in range(most, least - 1, -1):
            slots = dict.fromkeys(config.moe_layers, each)
            if sum(self.terms(slots).values()) <= options.gpu_memory:
                return slots
        raise _refusal(f"{format_bytes(options.gpu_memory)} of GPU memory are allowed", self.terms(slots))

    def terms(self, slots: dict[int, int]) -> dict[str, int]:
        """Bytes on the device by what they are for. KV on a CPU costs memory when it is used, so not here."""
        dense, config = self.checkpoint.dense_elements() * self.dtype.itemsize, self.checkpoint.config
        number = sum(slots.values())
        terms = {"dense weights": dense, f"{number} expert slots": number * self.record_nbytes}
        kv = kv_bytes_per_token(config, self.dtype)
        if self.draft:
            terms["the draft"] = self.draft.elements() * self.dtype.itemsize
            kv += kv_bytes_per_token(self.draft.config, self.dtype)
        if self.by_device:
            from outrider.engine.build_device import passing_places, working_nbytes
            from outrider.spec.device_drafter import block_pages

            places = passing_places(config, slots, self.rows, self.prompt_rows)
            if places:
                terms[f"{places} places for experts that pass"] = places * self.record_nbytes
            draft = self.draft.config if self.draft else None
            batch = self.options.max_batch
            terms |= working_nbytes(config, draft, self.rows, self.prompt_rows, batch, self.width, self.dtype)
            rope = sum(2 * 4 * self.max_context * of.head_dim // 2 for of in (config, draft) if of)
            own = batch * block_pages(draft) * PAGE_SIZE * kv_bytes_per_token(draft, self.dtype) if draft else 0
            terms["RoPE tables and pages of blocks"] = rope + own
        if self.device.type == "cuda":
            terms[f"KV of {self.kv_tokens} tokens"] = self.kv_tokens * kv
        if self.options.gpu_memory is not None:
            terms["CUDA context, kernels and graphs (assumed)"] = RUNTIME_NBYTES
        return terms

    def pinned(self, slots: dict[int, int]) -> int:
        """Bytes of experts in pinned memory: all of them where some have no slot."""
        config = self.checkpoint.config
        if self.device.type != "cuda" or min(slots.values()) == config.num_experts:
            return 0
        return len(config.moe_layers) * config.num_experts * self.record_nbytes

    def check(self, slots: dict[int, int], pinned: int) -> None:
        """Refuse what cannot fit. Raises: ConfigError with every term of the sum."""
        terms, allowed = self.terms(slots), self.options.gpu_memory
        needed = sum(terms.values())
        if allowed is not None and needed > allowed:
            raise _refusal(f"{format_bytes(allowed)} of GPU memory are allowed", terms)
        what = "GPU memory" if self.device.type == "cuda" else "RAM"
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else available_ram()
        if free is not None and needed > free:
            raise _refusal(f"{format_bytes(free)} of {what} are free", terms)
        if pinned and (ram := available_ram()) is not None and pinned > ram:
            raise _refusal(f"{format_bytes(ram)} of RAM are free", {"pinned experts": pinned})


def _refusal(found: str, terms: dict[str, int]) -> ConfigError:
    listed = " + ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in terms.items())
    needed = format_bytes(sum(terms.values()))
    return ConfigError(f"{found}, and {listed} come to {needed}; lower --expert-slots or --max-context")


def available_ram() -> int | None:
    """Bytes that can be allocated without swapping, None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
