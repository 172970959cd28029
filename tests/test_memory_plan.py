"""`plan`: exact bytes from the config, bounds that repeat the measured machine's figures, refusals with every term."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from outrider.checkpoint import read_config
from outrider.checkpoint.inspect import inspect
from outrider.checkpoint.presets import PRESETS, load_config
from outrider.config import SlotBudget
from outrider.engine.memory_plan import HARDWARE, Hardware, MemoryPlan, make_plan, render
from outrider.errors import ConfigError
from outrider.kvcache.pages import PagePool
from outrider.kvcache.storage import KVStorage
from tiny import tiny_gpt_oss, tiny_qwen3_moe

GPT_OSS = load_config("gpt-oss-20b")
QWEN3 = load_config("qwen3-coder-30b-a3b")
RECORD = 13_236_736  # 13,236,480 and the padding of two parts to 256 bytes
HALF, QUARTER = SlotBudget(fraction=0.5), SlotBudget(fraction=0.25)


def on_gpu(plan: MemoryPlan, word: str) -> int:
    return sum(line.nbytes for line in plan.lines if line.where == "GPU" and word in line.what)


def elsewhere(plan: MemoryPlan) -> dict[str, int]:
    return {line.where: line.nbytes for line in plan.lines if line.where != "GPU"}


# --- the figures that the design stands on ----------------------------------------------------------------------------


def test_hbm_limit_of_gpt_oss_20b() -> None:
    plan = make_plan(GPT_OSS)
    assert plan.bound("HBM") == pytest.approx(1160, rel=0.005)
    assert plan.token_nbytes == pytest.approx(3.7e9, rel=0.005)
    assert plan.resident_fraction == plan.hit_rate == 1
    assert plan.cold_nbytes_per_token == 0
    assert {bound.name for bound in plan.bounds} == {"HBM", "HBM, full context"}
    assert elsewhere(plan) == {}
    assert "All experts fit" in plan.verdict and "1160" in plan.verdict


@pytest.mark.parametrize(("slots", "cold", "limit"), [(HALF, 635.4e6, 81), (QUARTER, 953.0e6, 54)])
def test_pcie_limit_of_gpt_oss_20b(slots: SlotBudget, cold: float, limit: float) -> None:
    """The design's 81 and 54 tokens/s count the copy and the resident step one after the other."""
    plan = make_plan(GPT_OSS, expert_slots=slots)
    assert plan.cold_nbytes_per_token == pytest.approx(cold, rel=1e-3)
    assert plan.bound("no overlap") == pytest.approx(limit, rel=0.02)
    for name in ("PCIe", "perfect overlap"):
        assert plan.bound(name) == pytest.approx(55e9 / cold, rel=1e-3)
    assert "limited by PCIe" in plan.verdict


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [lambda f: tiny_gpt_oss(f, mxfp4=True), lambda f: tiny_gpt_oss(f, mxfp4=False), lambda f: tiny_qwen3_moe(f)],
)
def test_bytes_are_those_of_the_checkpoint_and_of_the_kv_pool(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path)
    config, found = read_config(tmp_path), inspect(tmp_path)
    plan = make_plan(config, context=100, concurrency=3)
    assert on_gpu(plan, "dense weights") == sum(found.dense_nbytes.values())
    assert found.expert_nbytes <= plan.expert_record_nbytes < found.expert_nbytes + 6 * 256
    assert on_gpu(plan, "expert slots") == config.num_experts * len(config.moe_layers) * plan.expert_record_nbytes
    pool = KVStorage(config, PagePool(3 * 7), torch.bfloat16, torch.device("cpu"))  # 100 tokens take 7 pages of 16
    tensors = [*pool._keys, *pool._values]
    assert on_gpu(plan, "KV") == sum(tensor.nbytes for tensor in tensors)
    assert plan.gpu_nbytes == on_gpu(plan, "")


def test_float32_doubles_dense_weights_and_kv_only() -> None:
    half, full = make_plan(GPT_OSS), make_plan(GPT_OSS, dtype="float32")
    for word in ("dense weights", "KV"):
        assert on_gpu(full, word) == 2 * on_gpu(half, word)
    assert on_gpu(full, "expert slots") == on_gpu(half, "expert slots") == 24 * 32 * RECORD


def test_a_tied_embedding_is_read_whole() -> None:
    tied = replace(GPT_OSS, tie_embeddings=True)
    assert make_plan(tied).token_nbytes == make_plan(GPT_OSS).token_nbytes
    assert on_gpu(make_plan(tied), "dense weights") < on_gpu(make_plan(GPT_OSS), "dense weights")


def test_kv_is_counted_at_full_length_but_read_within_windows() -> None:
    plan = make_plan(GPT_OSS, context=4096)
    per_layer_token = 2 * 8 * 64 * 2
    assert on_gpu(plan, "KV") == 24 * 4096 * per_layer_token
    assert plan.kv_nbytes_per_token == 12 * (4096 + 128) * per_layer_token
    assert any("12 sliding ones" in text for text in plan.assumptions)
    assert not any("sliding" in text for text in make_plan(QWEN3).assumptions)
    full = plan.bound("HBM, full context")
    assert full == pytest.approx(4.3e12 / (plan.token_nbytes + plan.kv_nbytes_per_token))


# --- what fits --------------------------------------------------------------------------------------------------------


def test_slots_take_what_the_gpu_has_left() -> None:
    plan = make_plan(QWEN3, gpu_memory=24 * 2**30)
    assert plan.gpu_nbytes <= 24 * 2**30 < plan.gpu_nbytes + plan.expert_record_nbytes
    assert set(plan.slots.values()) <= {min(plan.slots.values()), min(plan.slots.values()) + 1}
    assert plan.resident_fraction == pytest.approx(sum(plan.slots.values()) / (48 * 128))
    assert make_plan(GPT_OSS, gpu_memory=24 * 2**30).resident_fraction == 1


def test_the_floor_of_slots_is_the_least_that_fits() -> None:
    rest = make_plan(GPT_OSS, expert_slots=SlotBudget(slots=4)).gpu_nbytes
    assert set(make_plan(GPT_OSS, gpu_memory=rest).slots.values()) == {4}
    with pytest.raises(ConfigError) as caught:
        make_plan(GPT_OSS, gpu_memory=rest - 1)
    text = str(caught.value)
    for term in (
        "5.98 GB of GPU",
        "dense weights 3.60 GB",
        "KV of 1 sequence of 4096 tokens 201.33 MB",
        "working space",
    ):
        assert term in text
    assert "4 expert slots in each of 24 layers 1.27 GB come to 5.98 GB" in text


def test_slots_that_were_asked_for_must_fit_too() -> None:
    with pytest.raises(ConfigError, match=r"16 expert slots in each of 24 layers 5\.08 GB come to"):
        make_plan(GPT_OSS, gpu_memory=8 * 10**9, expert_slots=HALF)
    with pytest.raises(ConfigError, match="below the floor of 4"):
        make_plan(GPT_OSS, expert_slots=SlotBudget(slots=3))


def test_what_exceeds_ram_stays_on_disk() -> None:
    everything = 24 * 32 * RECORD
    assert elsewhere(make_plan(GPT_OSS, expert_slots=HALF)) == {"pinned RAM": everything}
    assert elsewhere(make_plan(GPT_OSS, expert_slots=HALF, ram=everything)) == {"pinned RAM": everything}
    plan = make_plan(GPT_OSS, expert_slots=HALF, ram=192 * RECORD + 5)
    assert elsewhere(plan) == {"pinned RAM": 192 * RECORD, "disk": 576 * RECORD}
    assert plan.disk_nbytes_per_token == pytest.approx(0.75 * plan.cold_nbytes_per_token)
    assert plan.bound("disk") == pytest.approx(3e9 / plan.disk_nbytes_per_token)
    assert "limited by disk" in plan.verdict and any("page cache" in text for text in plan.assumptions)
    assert elsewhere(make_plan(GPT_OSS, ram=0)) == {}  # all in slots: nothing is kept in RAM


# --- the cost model ---------------------------------------------------------------------------------------------------


def test_the_hit_rate_is_the_resident_fraction_unless_given() -> None:
    plan = make_plan(GPT_OSS, expert_slots=HALF)
    assert (plan.hit_rate, plan.hit_rate_given) == (0.5, False)
    assert plan.cold_nbytes_per_token == 24 * 4 * 0.5 * RECORD
    assert "uniform" in plan.model and "24 layers x 4 experts x (1 - hit rate) x 13,236,736 B" in plan.model
    given = make_plan(GPT_OSS, expert_slots=HALF, hit_rate=0.75)
    assert (given.hit_rate, given.hit_rate_given) == (0.75, True)
    assert given.cold_nbytes_per_token == plan.cold_nbytes_per_token / 2
    assert "as given" in given.model
    perfect = make_plan(GPT_OSS, expert_slots=HALF, hit_rate=1.0)
    assert perfect.bound("PCIe") is None and "limit of device memory" in perfect.verdict


def test_bounds_are_sums_and_maxima_of_times() -> None:
    hardware = Hardware(2e12, 20e9, 2e9, name="mine")
    plan = make_plan(GPT_OSS, expert_slots=HALF, ram=384 * RECORD, hardware=hardware)
    times = [plan.token_nbytes / 2e12, plan.cold_nbytes_per_token / 20e9, plan.disk_nbytes_per_token / 2e9]
    for name, seconds in zip(("HBM", "PCIe", "disk"), times, strict=True):
        assert plan.bound(name) == pytest.approx(1 / seconds)
    assert plan.bound("no overlap") == pytest.approx(1 / sum(times))
    assert plan.bound("perfect overlap") == pytest.approx(1 / max(times))
    assert all(bound.formula for bound in plan.bounds)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 0}, "context is 0"),
        ({"context": 131073}, "1 to 131072"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"hit_rate": 1.5}, "between 0 and 1"),
        ({"hit_rate": float("nan")}, "between 0 and 1"),
        ({"gpu_memory": 0}, "too little"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(GPT_OSS, **options)


def test_bandwidths_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Hardware(0)


# --- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("card", HARDWARE)
def test_every_preset_on_every_card_reads_well_and_is_json(name: str, card: str) -> None:
    plan = make_plan(load_config(name), gpu_memory=16 * 10**9, ram=16 * 10**9, hardware=HARDWARE[card])
    console = Console(file=io.StringIO(), width=150)
    console.print(render(plan))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for line in plan.lines:
        assert line.what in text and f"{line.nbytes:,}" in text
    for bound in plan.bounds:
        assert bound.name in text and bound.formula in text
    for sentence in (plan.verdict, plan.model, plan.hardware.name):
        assert " ".join(sentence.split()) in " ".join(text.split())
    again = json.loads(json.dumps(plan.to_dict()))
    assert again["gpu_nbytes"] == plan.gpu_nbytes
    assert again["slots"]["0"] == plan.slots[0]
    assert [bound["name"] for bound in again["bounds"]] == [bound.name for bound in plan.bounds]
