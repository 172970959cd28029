"""Recorded routing in place of the router's: kernels and bytes are real, which experts are visited is a trace's."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.device_decoder import DeviceExperts


@triton.jit
def _replay(
    trace, cursor, ids, count, tokens, layer,
    LAYERS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    now = tl.load(cursor)
    row, rank = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    wanted = (row < tl.load(count)) & (rank < K)
    at = ((now + row) % tokens).to(tl.int64)
    expert = tl.load(trace + (at * LAYERS + layer) * K + rank, mask=wanted, other=0)
    tl.store(ids + row * K + rank, expert.to(tl.int32), mask=wanted)
    tl.debug_barrier()
    if layer == LAYERS - 1:
        tl.store(cursor, now + 1)


class Replayed:
    """`DeviceExperts` that sends row i of a step to the experts of the trace's next token + i.

    Args: trace: uint8 [tokens, layers, k] on the GPU.
    """

    def __init__(self, experts: DeviceExperts, trace: Tensor) -> None:
        self._experts, self._trace = experts, trace
        self._cursor = torch.zeros(1, dtype=torch.int32, device=trace.device)

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
        """Overwrite `ids`, then run the experts."""
        tokens, layers, k = self._trace.shape
        _replay[(1,)](
            self._trace,
            self._cursor,
            ids,
            count,
            tokens,
            layer,
            layers,
            k,
            len(ids),
            triton.next_power_of_2(k),
            enable_fp_fusion=False,
        )
        self._experts.run(layer, x, ids, count, inner, out, room)
