"""A full-size target without a checkpoint: true shapes and bytes, random weights, straight into memory.

Every expert record has an address of its own but the bytes of one of a few; caches go by address, so nothing is faster
for it. Routing is the random router's own, near uniform, or replayed from a trace.
"""

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

from outrider.bench.replay import Replayed
from outrider.checkpoint.draft import draft_tensors
from outrider.checkpoint.inventory import dense_tensors, expert_nbytes, expert_parts
from outrider.config import DraftConfig, ModelConfig, PolicyName, SlotBudget
from outrider.core import ExpertKey, Phase
from outrider.engine.build_device import expert_kernel
from outrider.engine.device_target import DeviceTarget
from outrider.experts.budget import slots_per_layer
from outrider.experts.device_provider import DeviceProvider
from outrider.experts.home import Home
from outrider.experts.layout import ExpertLayout
from outrider.kernels.device.experts import ExpertKernel
from outrider.kernels.device.mxfp4_packing import SCALE_SHIFT
from outrider.kvcache.pages import PagePool, PageTable, pages_for
from outrider.kvcache.storage import KVStorage
from outrider.models.device_decoder import DeviceDecoder, DeviceExperts
from outrider.models.rows import BUCKETS
from outrider.models.target import QueuedTokens
from outrider.spec.device_drafter import DeviceDrafter, block_pages

_DISTINCT = 4
_SCALES = (115 + SCALE_SHIFT, 119 + SCALE_SHIFT)
"""Packed scales of weights with a standard deviation near 1 / sqrt(2880)."""


class SyntheticTarget:
    """A captured target with random weights on the current GPU, and one sequence of `context` random tokens.

    Args:
        rows: most rows of a step. room: tokens that may follow the context.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: SlotBudget,
        policy: PolicyName = "decayed-lfu",
        context: int = 1024,
        room: int = 2048,
        rows: int = 16,
        overlap: bool = True,
        graphs: bool = True,
        home: Home | None = None,
        trace: Tensor | None = None,
        draft: DraftConfig | None = None,
        prompt_rows: int = 0,
        mark: Callable[[int, str], None] | None = None,
    ) -> None:
        self.config, device, dtype = config, torch.device("cuda"), torch.bfloat16
        generator = torch.Generator(device).manual_seed(0)
        kernel = expert_kernel(config, dtype)
        layout = ExpertLayout.of(kernel.parts())
        counts = slots_per_layer(config, slots, layout.record_nbytes)
        resident = min(counts.values()) == config.num_experts
        records = [random_record(kernel, layout, generator) for _ in range(_DISTINCT)]
        self.home = home
        if self.home is None and not resident:
            self.home = Home(list(counts), config.num_experts, layout.record_nbytes)
            for key in self.home.experts():
                self.home.record(key).copy_(records[(key.layer + key.expert) % _DISTINCT])
        payload = expert_nbytes(expert_parts(config))
        keys = [ExpertKey(layer, expert) for layer in config.moe_layers for expert in range(config.num_experts)]
        self.provider = DeviceProvider(
            kernel,
            None if resident else self.home,
            dict.fromkeys(keys, payload),
            counts,
            config.num_experts,
            config.experts_per_token,
            rows,
            policy,
            device,
            overlap,
        )
        if mark:
            self.provider.mark = mark
        if resident:
            for _ in self.provider.preload((key, records[(key.layer + key.expert) % _DISTINCT]) for key in keys):
                pass
        shapes = dense_tensors(config)
        decoder = DeviceDecoder(config, lambda name: _random(name, shapes[name].shape, generator), context + room)
        pool = PagePool(pages_for(context + room))
        self.kv = KVStorage(config, pool, dtype, device)
        for layer in range(config.num_layers):
            for part in self.kv.layer(layer):
                part.normal_(generator=generator)
        self.table = PageTable(pool)
        self.table.append(context)
        experts: DeviceExperts | None = None if trace is None else Replayed(self.provider, trace)
        if mark:
            experts = Marked(experts or self.provider, mark)
        drafter, width = None, 1
        if draft:
            width = draft.num_drafts + 1
            drafter = _drafter(draft, decoder, pool, rows, context + room, generator)
        self.target = DeviceTarget(
            decoder, self.kv, self.provider, rows, 1, pool.num_pages, drafter, width, prompt_rows, graphs, experts
        )
        self._anchor, self._room, self._chunk = 1, room, prompt_rows or BUCKETS[-1]

    def decode(self, rounds: int) -> list[QueuedTokens]:
        """Run that many rounds and take them back from the page table, so that the context stays as long as it was."""
        start = self.table.length
        said = [own for (own,) in self.target.decode([self.table], [self._anchor], [self._room], [frozenset()], rounds)]
        self.table.truncate(start)
        self._anchor = said[-1].tokens[-1]
        return said

    def prefill(self, tokens: int) -> None:
        """Run a prompt of so many random tokens in the target's longest chunks, then forget it."""
        table = PageTable(self.kv.pool)
        ids = torch.randint(
            0, self.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(tokens)
        ).tolist()
        chunk = self._chunk
        for start in range(0, tokens, chunk):
            self.target.forward(Phase.PREFILL, [table], [ids[start : start + chunk]], _Nobody())
            self.target.commit([])
        torch.cuda.synchronize()
        table.release()


class Marked:
    """`DeviceExperts` that marks where each layer begins; the first, where its routes are known."""

    def __init__(self, experts: DeviceExperts, mark: Callable[[int, str], None]) -> None:
        self._experts, self._mark = experts, mark

    def run(
        self,
        layer: int,
        x: Tensor,
        ids: Tensor,
        count: Tensor,
        inner: Tensor,
        out: Tensor,
        room: Tensor | None = None,
    ) -> None:
        """Run the experts; what follows belongs to the next layer."""
        if layer == 0:
            self._mark(0, "layer")
        self._experts.run(layer, x, ids, count, inner, out, room)
        self._mark(layer + 1, "layer")


class _Nobody:
    """An observer that does not look."""

    def residual(self, layer: int, x: Tensor) -> None:
        """Nothing."""

    def routed(self, layer: int, expert_ids: Tensor) -> None:
        """Nothing."""


def random_record(kernel: ExpertKernel, layout: ExpertLayout, generator: torch.Generator) -> Tensor:
    """A valid packed record whose outputs stay finite, uint8 [record_nbytes] on the generator's device."""
    record = torch.zeros(layout.record_nbytes, dtype=torch.uint8, device=generator.device)
    for name, part in layout.view(record).items():
        if part.dtype != torch.uint8:
            part.normal_(0, 0.02, generator=generator)
        elif name.endswith("scales"):
            part.random_(*_SCALES, generator=generator)
        else:
            part.random_(0, 256, generator=generator)
    return record


def _drafter(
    config: DraftConfig, decoder: DeviceDecoder, pool: PagePool, rows: int, positions: int, generator: torch.Generator
) -> DeviceDrafter:
    """With random weights and a random context, for one sequence."""
    shapes = draft_tensors(config)
    context = KVStorage(config, pool, torch.bfloat16, generator.device, more_pages=block_pages(config))
    for layer in range(config.num_layers):
        for part in context.layer(layer):
            part.normal_(generator=generator)
    return DeviceDrafter(
        config, lambda name: _random(name, shapes[name], generator), decoder.embedding, decoder.head, None, context,
        rows, 1, positions,
    )  # fmt: skip


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    weight = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    if "norm" in name:
        return weight.fill_(1.0)
    return weight.normal_(0, 1 / sqrt(shape[-1]) if len(shape) > 1 else 0.02, generator=generator)
