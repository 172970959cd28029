"""The host-driven provider on a GPU: pinned store, copy stream, device-clock waits. Runs where there is one."""

from pathlib import Path

import pytest
import torch

from oracle_drafter import install_oracle
from outrider.config import EngineOptions, parse_slots
from outrider.core import Band, ExpertKey
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.experts.store import MappedStore, PinnedStore
from pairs import greedy, ids, make_pair, open_pair
from test_parity import generate, make_texts
from test_speculation import SAMPLED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def check_slots(engine: Engine) -> int:
    """Every resident expert's bytes equal the checkpoint's; how many were compared."""
    torch.cuda.synchronize()
    source = MappedStore(engine.checkpoint)
    resident = engine.provider.resident_keys()
    for key in resident:
        record = torch.zeros(source.layout.record_nbytes, dtype=torch.uint8)
        source.copy_range(key, 0, len(record), record)
        weights = engine.provider.weights_of(key)
        assert weights is not None
        for name, part in source.layout.view(record).items():
            assert torch.equal(weights[name].cpu().view(torch.uint8), part.view(torch.uint8)), f"{key} {name}"
    return len(resident)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_and_bytes_at_any_residency(folder: Path, dtype: str) -> None:
    outputs = []
    for slots in ("100%", "50%", "38%", "3", "25%"):
        engine = build_engine(str(folder), EngineOptions(parse_slots(slots), device="cuda", driver="host", dtype=dtype))
        assert isinstance(engine.provider.store, MappedStore if slots == "100%" else PinnedStore)
        outputs.append(generate(engine, make_texts([5, 40, 23], engine.config.vocab_size), 48))
        stats = engine.stats()
        assert (stats.evictions > 0) == (slots != "100%")
        assert stats.exposed_fetch_seconds is not None
        assert (stats.measured_h2d_bytes_per_second is None) == (slots == "100%")
        assert check_slots(engine) > 0
        engine.close()
    assert all(output == outputs[0] for output in outputs)


def test_float32_tokens_equal_the_cpu_s(folder: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    both = []
    for device in ("cpu", "cuda"):
        options = EngineOptions(parse_slots("50%"), device=device, driver="host", dtype="float32")  # type: ignore[arg-type]
        engine = build_engine(str(folder), options)
        both.append(generate(engine, make_texts([5, 40, 23], engine.config.vocab_size), 32))
        engine.close()
    assert both[0] == both[1]


def test_prefetch_and_resets(folder: Path) -> None:
    engine = build_engine(str(folder), EngineOptions(parse_slots("50%"), device="cuda", driver="host"))
    texts = make_texts([6], engine.config.vocab_size)
    first = generate(engine, texts, 8)
    layers = engine.config.moe_layers
    for turn in range(50):
        engine.reset_cache()
        keys = [ExpertKey(layer, (turn + i) % 8) for layer in layers for i in range(4)]
        assert engine.provider.prefetch(keys, Band.ROUTE_AHEAD if turn % 2 else Band.BACKGROUND) == keys
        if turn % 3 == 0:
            engine.provider.cancel_prefetches()
        assert generate(engine, texts, 8) == first
    assert check_slots(engine) > 0
    seen = engine.stats()
    assert seen.prefetched_bytes > 0
    assert seen.wasted_prefetch_bytes <= seen.prefetched_bytes
    engine.close()


def test_speculation_runs_on_the_gpu_and_gives_the_same_at_any_residency(tmp_path: Path) -> None:
    """Host-driven, cuBLAS promises no width invariance: tokens are compared between residencies, and in float32, where
    near ties are rare enough for an oracle's drafts to stand. Device-driven: tests/test_device_driven.py."""
    make_pair(tmp_path, "gpt_oss-mxfp4")
    outputs, accepted = [], []
    for slots in ("100%", "50%", "25%"):
        engine = open_pair(tmp_path, slots, device="cuda", driver="host", dtype="float32")
        prompts = [ids(seed, length, engine.config.vocab_size) for seed, length in enumerate((5, 40, 23))]
        first = [engine.submit(prompt, greedy(32)) for prompt in prompts]
        while engine.step():
            pass
        oracle = install_oracle(engine, 0.2)
        again = [engine.submit(prompt, params) for prompt in prompts for params in (greedy(32), SAMPLED)]
        for session in again:
            oracle.know(session, first[again.index(session) // 2].output)
        engine.reset_counters()
        while engine.step():
            pass
        outputs.append([s.output for s in (*first, *again)])
        accepted.append(engine.stats().mean_acceptance_length or 0)
        assert check_slots(engine) > 0
        engine.close()
    assert outputs[1:] == outputs[:1] * 2
    assert min(accepted) > 1.2  # half of the requests are sampled, whose text the oracle does not know
