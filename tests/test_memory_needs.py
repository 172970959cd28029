"""What an engine takes, before it is allocated: bounds that choose slots, refusals, and a GPU's errors in words."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.checkpoint import Checkpoint, locate, open_checkpoint
from outrider.checkpoint.draft import open_draft
from outrider.checkpoint.locate import locate_draft
from outrider.config import EngineOptions, parse_slots
from outrider.engine.build import _unpinned, build_engine
from outrider.engine.faults import device_faults
from outrider.engine.memory_needs import MemoryNeeds
from outrider.engine.memory_plan import RUNTIME_NBYTES
from outrider.errors import ConfigError, DeviceError
from outrider.experts.store import MappedStore
from outrider.spec.device_drafter import DeviceDrafter, drafter_nbytes
from pairs import greedy, make_pair, open_pair

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return open_checkpoint(locate("demo"))


def needs(demo: Checkpoint, draft: bool = True, by_device: bool = True, **options: object) -> MemoryNeeds:
    own = open_draft(locate_draft("demo", "demo"), demo.config) if draft else None
    settings = EngineOptions(max_batch=4, **options)  # type: ignore[arg-type]
    return MemoryNeeds(
        demo,
        own,
        MappedStore(demo),
        settings,
        by_device,
        8192,
        2048,
        512,
        2048,
        8 if draft else 1,
        CUDA,
        torch.bfloat16,
    )


@settings(max_examples=60, deadline=None)
@given(spare=st.integers(0, 60 << 20), draft=st.booleans(), by_device=st.booleans())
def test_a_bound_gives_as_many_slots_as_fit_it(spare: int, draft: bool, by_device: bool) -> None:
    checkpoint = open_checkpoint(locate("demo"))
    least = dict.fromkeys(checkpoint.config.moe_layers, checkpoint.config.experts_per_token)
    floor = sum(needs(checkpoint, draft, by_device, gpu_memory=1 << 40).terms(least).values())
    bounded = needs(checkpoint, draft, by_device, gpu_memory=floor + spare)
    slots = bounded.slots()
    (each,) = set(slots.values())
    assert sum(bounded.terms(slots).values()) <= floor + spare
    if each < checkpoint.config.num_experts:
        assert sum(bounded.terms({layer: n + 1 for layer, n in slots.items()}).values()) > floor + spare


def test_what_is_asked_for_is_taken_or_refused_with_the_sum(demo: Checkpoint) -> None:
    asked = needs(demo, expert_slots=parse_slots("50%"), gpu_memory=2 << 30)
    slots = asked.slots()
    assert set(slots.values()) == {16}
    terms = asked.terms(slots)
    assert terms["CUDA context, kernels and graphs (assumed)"] == RUNTIME_NBYTES
    assert {
        "activations",
        "logits",
        "the drafter's activations",
        "features",
        "sampling",
        "the draft",
        "KV of 8192 tokens",
    } <= terms.keys()
    assert "64 places for experts that pass" in terms  # 32 of a chunk, and 16 of two layers of a long prompt
    tight = needs(demo, expert_slots=parse_slots("50%"), gpu_memory=sum(terms.values()) - 1)
    with pytest.raises(
        ConfigError, match=r"of GPU memory are allowed, and dense weights .* \+ 96 expert slots .* come to"
    ):
        tight.check(tight.slots(), 0)
    with pytest.raises(ConfigError, match=r"are allowed, and dense weights .* 24 expert slots"):
        needs(demo, gpu_memory=RUNTIME_NBYTES).slots()
    assert set(needs(demo).slots().values()) == {32}


def test_pinned_bytes_are_those_of_all_experts_where_some_have_no_slot(demo: Checkpoint) -> None:
    own = needs(demo, expert_slots=parse_slots("50%"))
    assert own.pinned(own.slots()) == 6 * 32 * own.record_nbytes
    assert own.pinned(dict.fromkeys(range(6), 32)) == 0
    assert replace(own, device=torch.device("cpu")).pinned(own.slots()) == 0
    driver, note = _unpinned(EngineOptions(ram=1 << 20), 5 << 20)
    assert driver == "host" and "read from the checkpoint's files" in note and "1.05 MB" in note
    with pytest.raises(ConfigError, match=r"would have to be pinned and ram allows 1.05 MB; raise --ram"):
        _unpinned(EngineOptions(ram=1 << 20, driver="device"), 5 << 20)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there, they mean something")
@pytest.mark.parametrize("bound", ["gpu_memory", "ram"])
def test_bounds_of_a_gpu_mean_nothing_on_a_cpu(bound: str) -> None:
    with pytest.raises(ConfigError, match="the device is a CPU"):
        build_engine("demo", EngineOptions(**{bound: 1 << 30}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{bound} is 0"):
        EngineOptions(**{bound: 0})  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the same bytes, in the interpreter")
def test_the_drafter_s_activations_are_what_is_counted(tmp_path: Path) -> None:
    make_pair(tmp_path, "qwen3_moe", reduced_vocab=40)
    engine = open_pair(tmp_path, device="cpu", driver="device", prefill_chunk=40, max_batch=3, max_context=32)
    drafter = engine.rounds.drafter
    assert isinstance(drafter, DeviceDrafter)
    held = [*drafter._blocks.values(), *drafter._feeds.values()]
    counted = drafter_nbytes(drafter.config, 40, 3, torch.float32)
    assert counted == sum(t.nbytes for own in held for t in flat(vars(own).values()))
    engine.close()


def flat(values: object) -> Iterator[torch.Tensor]:
    for value in values:  # type: ignore[attr-defined]
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from flat(value)


def test_a_gpu_s_errors_are_sentences() -> None:
    with (
        pytest.raises(ConfigError, match=r"ran out of memory while drafting \(no room\); lower"),
        device_faults("drafting"),
    ):
        raise torch.OutOfMemoryError("no room.\nmore about it")
    with (
        pytest.raises(DeviceError, match=r"failed while drafting \(CUDA error: unspecified\); this process cannot"),
        device_faults("drafting"),
    ):
        raise torch.AcceleratorError("CUDA error: unspecified\nSearch for it")
    with pytest.raises(DeviceError, match=r"Triton Error \[CUDA\]: an illegal"), device_faults("drafting"):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    from cuda.core._utils.cuda_utils import CUDAError

    with pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED"), device_faults("drafting"):
        raise CUDAError("CUDA_ERROR_LAUNCH_FAILED")
    for other in (ZeroDivisionError, RuntimeError):
        with pytest.raises(other), device_faults("drafting"):
            raise other("no GPU's")


def test_a_lost_gpu_ends_a_step_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine("demo", EngineOptions(device="cpu"))
    session = engine.submit([5, 6, 7], greedy(4))

    def lost(*given: object) -> None:
        raise torch.AcceleratorError("CUDA error: the GPU has fallen off the bus")

    monkeypatch.setattr(engine.rounds._target, "forward", lost)
    with pytest.raises(DeviceError, match="fallen off the bus"):
        engine.step()
    assert (session.output, session.table.length) == ([], 0)
    engine.close()


@on_gpu
@pytest.mark.parametrize("slots", [None, "50%"])
def test_memory_stays_within_its_bound(slots: str | None) -> None:
    """What was planned covers what was allocated, through long prompts, drafts and sampling."""
    bound = 1200 << 20
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    options = EngineOptions(parse_slots(slots) if slots else None, gpu_memory=bound, draft="demo", max_context=2048)
    engine = build_engine("demo", options)
    try:
        for params in (greedy(40), replace(greedy(40), temperature=0.8)):
            sessions = [engine.submit(list(range(5, 5 + n)), params) for n in (3, 700, 1500)]
            while engine.step():
                pass
            assert all(len(session.output) == 40 for session in sessions)
        own = MemoryNeeds(
            engine.checkpoint, open_draft(locate_draft("demo", "demo"), engine.config), MappedStore(engine.checkpoint),
            options, True, 4 * 2048, 2048, 512, 2048, 8, CUDA, torch.bfloat16,
        )  # fmt: skip
        planned = sum(own.terms(own.slots()).values())
        assert torch.cuda.max_memory_allocated() - before <= planned - RUNTIME_NBYTES <= bound - RUNTIME_NBYTES
        assert torch.cuda.max_memory_reserved() <= bound - RUNTIME_NBYTES
    finally:
        engine.close()
    torch.empty(2 * bound, dtype=torch.uint8, device=CUDA)  # the bound went with its engine
