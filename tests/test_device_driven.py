"""The whole engine driven by the device. On a GPU: captured graphs, and the same tokens whatever the residency, width,
batch or bucket. On a CPU: the same kernels in Triton's interpreter, against the host-driven engine.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider import SamplingParams
from outrider.checkpoint.hf_config import read_config
from outrider.config import EngineOptions, parse_slots
from outrider.core import ExpertKey, Phase
from outrider.engine import device_target, memory_needs, queued_rounds
from outrider.engine.build import _driver, build_engine
from outrider.engine.engine import Engine
from outrider.engine.queued_rounds import MOST_ROUNDS
from outrider.errors import ConfigError, RequestError
from outrider.experts.device_provider import DeviceProvider
from outrider.experts.home import PackedRecords
from outrider.experts.store import MappedStore
from outrider.kernels.device import attention
from outrider.kernels.device.set_rows import Standing
from outrider.kvcache.pages import PageTable
from outrider.models import long_prompt
from outrider.spec import device_drafter
from outrider.spec.observation import Observation
from outrider.spec.session import SpecSession
from pairs import finish, greedy, ids, make_pair, open_pair
from test_speculation import SAMPLED
from tiny import MAKERS

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
PROMPTS = [ids(seed, length, 4096) for seed, length in enumerate((5, 40, 23, 140, 12))]
TOKENS = 48


def open_demo(slots: str = "100%", draft: str | None = None, **options: object) -> Engine:
    engine = build_engine("demo", EngineOptions(parse_slots(slots), draft=draft, driver="device", **options))  # type: ignore[arg-type]
    assert isinstance(engine.provider, DeviceProvider)
    return engine


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[SpecSession]:
    """All prompts together, to their end."""
    sessions = [engine.submit(prompt, params) for prompt in prompts]
    while engine.step():
        pass
    return sessions


def outputs(engine: Engine, params: SamplingParams, alone: bool = False) -> list[list[int]]:
    groups = [[prompt] for prompt in PROMPTS] if alone else [PROMPTS]
    return [session.output for group in groups for session in run(engine, group, params)]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Greedy tokens of the demo, resident, one prompt at a time."""
    engine = open_demo()
    said = outputs(engine, greedy(TOKENS), alone=True)
    engine.close()
    return said


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs every split of every row and head one after the other: four of them say as much."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(attention, "SPLITS", 4)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@on_gpu
@pytest.mark.parametrize("max_batch", [16, 40])
@pytest.mark.parametrize("slots", ["100%", "75%", "50%", "38%", "25%", "4"])
def test_tokens_do_not_depend_on_residency_batch_or_bucket(plain: list[list[int]], slots: str, max_batch: int) -> None:
    engine = open_demo(slots, max_batch=max_batch)
    assert outputs(engine, greedy(TOKENS)) == plain
    engine.reset_cache()
    assert outputs(engine, greedy(TOKENS), alone=True) == plain
    seen = engine.stats()
    assert (seen.evictions > 0) == (slots != "100%") == (seen.cold_bytes > 0)
    assert (seen.measured_h2d_bytes_per_second is None) == (slots == "100%")
    assert seen.expert_accesses == seen.expert_hits + seen.expert_misses
    check_slots(engine)
    engine.close()


@on_gpu
@pytest.mark.parametrize("slots", ["100%", "50%", "25%"])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_tokens_do_not_depend_on_the_width_of_a_verify(plain: list[list[int]], slots: str, width: int) -> None:
    engine = open_demo(slots, "demo", width=width)
    assert outputs(engine, greedy(TOKENS)) == plain
    assert outputs(engine, greedy(TOKENS), alone=True) == plain
    seen = engine.stats()
    assert seen.mean_acceptance_length is not None
    assert (seen.mean_acceptance_length > 1.2) == (width > 1)
    check_slots(engine)
    engine.close()


@on_gpu
def test_widths_may_change_from_round_to_round(plain: list[list[int]]) -> None:
    engine = open_demo("50%", "demo")
    random = torch.Generator().manual_seed(0)

    def width(session: SpecSession) -> int:
        return int(torch.randint(1, 9, (1,), generator=random))

    sessions = [engine.begin_session(prompt, greedy(TOKENS)) for prompt in PROMPTS]
    assert finish(engine, sessions, width) == plain
    engine.close()


@on_gpu
@pytest.mark.parametrize("width", ["auto", 4])
def test_rounds_without_the_host_are_those_with_it(plain: list[list[int]], width: str | int) -> None:
    """Tokens, and what was drafted, tested and accepted at each place; with stop tokens in the middle of blocks."""
    counted = []
    for queued in (True, False):
        engine = open_demo("50%", "demo", width=width)
        stops = [frozenset(said[i] for i in (len(said) // 2, -3)) for said in plain]
        params = [greedy(TOKENS, stop_token_ids=tuple(own)) for own in stops]
        if queued:
            sessions = [run(engine, [prompt], own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
        else:
            sessions = [engine.begin_session(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
            for session in sessions:
                finish(engine, [session])
        assert [s.output for s in sessions] == [
            said[: min(said.index(stop) for stop in own) + 1] for said, own in zip(plain, stops, strict=True)
        ]
        seen = engine.stats()
        assert seen.draft_seconds is not None and 0 < seen.draft_seconds < seen.decode_seconds  # type: ignore[operator]
        told = [seen.rounds, seen.tokens_generated, seen.drafted_tokens, seen.tested_drafts, seen.accepted_drafts]
        counted.append([told, seen.acceptance_by_position, seen.expert_accesses, seen.decode_steps])
        engine.close()
    assert counted[0] == counted[1]


@on_gpu
def test_sampled_tokens_do_not_depend_on_residency(plain: list[list[int]]) -> None:
    said = []
    for slots in ("100%", "25%"):
        engine = open_demo(slots, "demo")
        said.append(outputs(engine, SAMPLED))
        engine.close()
    assert said[0] == said[1] != plain


@on_gpu
def test_without_graphs_the_same_kernels_give_the_same(plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (device_target, queued_rounds, device_drafter, long_prompt):
        monkeypatch.setattr(module, "captured", lambda run: run)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: pytest.fail("a graph was replayed"))
    engine = open_demo("50%", "demo")
    assert outputs(engine, greedy(TOKENS)) == plain
    engine.close()


@on_gpu
@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "gpt_oss-bf16-tied-sharded", "qwen3_moe"])
def test_both_families_and_forms_of_experts(tmp_path: Path, name: str) -> None:
    """Groups of 64 columns that are not full, biases, q and k norms."""
    MAKERS[name](tmp_path)
    said = []
    for slots in ("100%", "50%", "25%"):
        engine = build_engine(str(tmp_path), EngineOptions(parse_slots(slots), driver="device"))
        prompts = [ids(seed, length, engine.config.vocab_size) for seed, length in enumerate((5, 40, 23))]
        said.append([session.output for session in run(engine, prompts, greedy(24))])
        check_slots(engine)
        engine.close()
    assert said[0] == said[1] == said[2]


@on_gpu
@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "gpt_oss-bf16-tied-sharded", "qwen3_moe"])
def test_logits_are_as_near_to_float32_as_those_of_the_host_driven_engine(tmp_path: Path, name: str) -> None:
    """A router near a tie may choose otherwise in bfloat16: the host-driven engine says how far that goes."""
    MAKERS[name](tmp_path)
    exact, host, device = (
        prefill_logits(tmp_path, options)
        for options in (
            EngineOptions(device="cpu", dtype="float32"),
            EngineOptions(device="cpu", dtype="bfloat16"),
            EngineOptions(parse_slots("50%"), driver="device"),
        )
    )
    assert 0 < (device - exact).norm() < 1.5 * (host - exact).norm()
    assert 0 < (device - exact).norm(dim=-1).median() < 1.5 * (host - exact).norm(dim=-1).median()


def prefill_logits(folder: Path, options: EngineOptions) -> Tensor:
    """float32 [90, vocabulary] on the CPU, of one seeded prompt."""
    engine = build_engine(str(folder), options)
    target, table = engine.rounds._target, PageTable(engine.kv.pool)
    hidden, _ = target.forward(Phase.PREFILL, [table], [ids(3, 90, engine.config.vocab_size)], Observation(()))
    logits = target.logits(hidden).float().cpu()
    engine.close()
    return logits


@on_gpu
@pytest.mark.parametrize("slots", ["100%", "50%", "25%"])
def test_long_prompts_have_the_bits_of_their_chunks(slots: str) -> None:
    """Hidden rows at every position, whatever the chunks; an offloaded layer comes once a chunk and evicts nothing."""
    prompt, seen = ids(9, 1337, 4096), []
    for stream, chunk in ((1024, 512), (2048, 512), (0, 512), (0, 100), (0, 16)):
        engine = open_demo(slots, max_context=2048, stream_chunk=stream, prefill_chunk=chunk)
        target, table = engine.rounds._target, PageTable(engine.kv.pool)
        if slots != "100%":
            run(engine, PROMPTS, greedy(8))
        before = engine.provider.resident_keys()
        rows = []
        for end in range(stream or chunk, 1337 + (stream or chunk), stream or chunk):
            some = prompt[end - (stream or chunk) : end]
            rows.append(target.forward(Phase.PREFILL, [table], [some], Observation(()))[0].clone())
            target.commit(range(len(some)))
            if len(some) > 512:
                assert engine.provider.resident_keys() == before
        seen.append(torch.cat(rows))
        if stream:
            assert engine.stats().streamed_prefill_steps == 1  # what is left behind 1024 fits a bucket
        check_slots(engine)
        table.release()
        (session,) = run(engine, [prompt], greedy(8))
        seen.append(torch.tensor(session.output))
        engine.close()
    for other in range(2, len(seen), 2):
        assert torch.equal(seen[other], seen[0]) and torch.equal(seen[other + 1], seen[1])


@on_gpu
def test_a_long_prompt_fills_an_empty_cache() -> None:
    engine = open_demo("50%", max_context=2048)
    run(engine, [ids(9, 1337, 4096)], greedy(2))
    assert len(engine.provider.resident_keys()) == engine.provider.slots_total
    seen = engine.stats()
    moved = (seen.prefill_misses + seen.expert_misses) * engine.provider.layout.record_nbytes
    assert seen.h2d_bytes["ON_DEMAND"] >= moved > 0 and seen.streamed_prefill_steps == 1
    check_slots(engine)
    engine.close()


@on_gpu
def test_a_hundred_resets_change_no_token_and_no_byte(plain: list[list[int]]) -> None:
    engine = open_demo("25%")
    for turn in range(100):
        if turn % 3 == 0:
            engine.reset_cache()
        assert run(engine, PROMPTS[turn % 5 : turn % 5 + 1], greedy(TOKENS))[0].output == plain[turn % 5]
    check_slots(engine)
    engine.close()


def check_slots(engine: Engine) -> None:
    """Every resident expert's bytes equal its packed checkpoint's."""
    assert isinstance(engine.provider, DeviceProvider)
    device = engine.decoder.embedding.device
    records = PackedRecords(MappedStore(engine.checkpoint), engine.provider.kernel, device)
    resident = engine.provider.resident_keys()
    assert resident
    for key in resident:
        weights = engine.provider.weights_of(key)
        assert weights is not None
        for name, part in records.layout.view(records.read(key)).items():
            assert torch.equal(weights[name].view(torch.uint8), part.view(torch.uint8)), f"{key} {name}"


# --- on a CPU ---------------------------------------------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize("name", ["gpt_oss-bf16-tied-sharded", "qwen3_moe"])
def test_the_interpreter_gives_the_host_driven_tokens_and_counts(tmp_path: Path, name: str) -> None:
    MAKERS[name](tmp_path)
    both = []
    for driver in ("host", "device"):
        options = EngineOptions(parse_slots("38%"), device="cpu", driver=driver, prefill_chunk=16, max_batch=2)  # type: ignore[arg-type]
        engine = build_engine(str(tmp_path), options)
        prompts = [ids(seed, length, engine.config.vocab_size) for seed, length in enumerate((3, 7))]
        said = [session.output for session in run(engine, prompts, greedy(4))]
        seen = engine.stats().to_dict()
        counts = {k: v for k, v in seen.items() if k.startswith(("expert_", "prefill_", "cold", "evict", "rounds"))}
        both.append((said, counts))
        if driver == "device":
            check_slots(engine)
        engine.close()
    assert both[0] == both[1]


@on_cpu
def test_a_stop_ends_the_rounds_that_are_queued(tmp_path: Path) -> None:
    MAKERS["qwen3_moe"](tmp_path)
    options = EngineOptions(parse_slots("50%"), device="cpu", driver="device", prefill_chunk=16, max_batch=1)
    engine = build_engine(str(tmp_path), options)
    prompt = ids(4, 6, engine.config.vocab_size)
    (session,) = run(engine, [prompt], greedy(4))
    stop = session.output[2]
    (stopped,) = run(engine, [prompt], greedy(4, stop_token_ids=(stop,)))
    assert stopped.output == session.output[: session.output.index(stop) + 1]
    assert engine.kv.pool.num_used == 0
    engine.close()


@on_cpu
@pytest.mark.parametrize("draft", [{"reduced_vocab": 40}, {"sample_from_anchor": True}])
def test_rounds_with_drafts_give_the_host_driven_tokens_and_counts(tmp_path: Path, draft: dict[str, object]) -> None:
    make_pair(tmp_path, "qwen3_moe", block=4, **draft)
    both = []
    for driver in ("host", "device"):
        options = {"device": "cpu", "driver": driver, "prefill_chunk": 16, "max_batch": 2, "max_context": 32}
        engine = open_pair(tmp_path, "50%", width=3, **options)
        prompts = [ids(seed, length, engine.config.vocab_size) for seed, length in ((1, 14), (2, 7))]
        said = [session.output for session in run(engine, prompts, greedy(6))]
        seen = engine.stats().to_dict()
        kept = ("expert_", "prefill_", "cold", "evict", "rounds", "drafted", "tested", "accept", "decode_steps")
        both.append((said, {name: value for name, value in seen.items() if name.startswith(kept)}))
        assert engine.kv.pool.num_used == 0
        engine.close()
    assert both[0] == both[1]


@on_cpu
@pytest.mark.parametrize("draft", [{"bias": True, "reduced_vocab": 40}, {"windows": (6, 6), "causal": True}])
def test_the_device_s_drafts_are_the_host_s(tmp_path: Path, draft: dict[str, object]) -> None:
    """Two sequences, two rounds: contexts that grow by accepted and by rejected rows, over the end of a page."""
    make_pair(tmp_path, "qwen3_moe", **draft)
    seen, said = [], []
    for driver in ("host", "device"):
        engine = open_pair(tmp_path, "100%", device="cpu", driver=driver, prefill_chunk=16, max_batch=2, max_context=32)
        prompts = [ids(seed, length, engine.config.vocab_size) for seed, length in ((1, 15), (2, 9))]
        sessions = [engine.begin_session(prompt, greedy(9)) for prompt in prompts]
        rounds = []
        for width in (3, 8):
            rounds.append([(r.tokens, r.token_probs) for r in engine.draft_round(sessions)])
            engine.verify_round(sessions, [min(width, len(s.draft.tokens) + 1) for s in sessions if s.draft])
        seen.append(rounds)
        said.append([session.output for session in sessions])
        engine.close()
    assert said[0] == said[1]
    for host, device in zip(*seen, strict=True):
        for (tokens, probs), (other, near) in zip(host, device, strict=True):
            assert tokens == other and probs == pytest.approx(near, rel=1e-3)


@on_cpu
def test_a_long_prompt_gives_the_tokens_of_its_chunks(tmp_path: Path) -> None:
    MAKERS["qwen3_moe"](tmp_path)
    both = []
    for stream in (512, 0):
        options = EngineOptions(
            parse_slots("38%"), device="cpu", driver="device", prefill_chunk=16, max_batch=1, max_context=64,
            stream_chunk=stream,
        )  # fmt: skip
        engine = build_engine(str(tmp_path), options)
        (session,) = run(engine, [ids(1, 40, engine.config.vocab_size)], greedy(3))
        seen = engine.stats()
        both.append((session.output, seen.expert_accesses))
        assert seen.streamed_prefill_steps == (1 if stream else 0)
        assert seen.prefill_hits + seen.prefill_misses > 0
        check_slots(engine)
        engine.close()
    assert both[0] == both[1]


@on_cpu
def test_a_drafter_without_finite_logits_ends_the_call_and_leaves_the_session(tmp_path: Path) -> None:
    make_pair(tmp_path, "qwen3_moe", block=4)
    engine = open_pair(tmp_path, device="cpu", driver="device", prefill_chunk=16, max_batch=1, max_context=32)
    session = engine.submit(ids(0, 4, engine.config.vocab_size), greedy(6))
    engine.step()
    before, pages = (list(session.output), session.table.length), engine.kv.pool.num_used
    drafter = engine.rounds.drafter
    assert isinstance(drafter, device_drafter.DeviceDrafter)
    norm = drafter._norm.clone()
    drafter._norm.fill_(float("nan"))
    with pytest.raises(RequestError, match="the drafter gave infinite or NaN logits"):
        engine.step()
    assert (session.output, session.table.length) == before and engine.kv.pool.num_used == pages
    drafter._norm.copy_(norm)
    while engine.step():
        pass
    plain = open_pair(tmp_path, speculate=False, device="cpu", driver="host", max_context=32)
    (expected,) = run(plain, [session.prompt], greedy(6))
    assert session.output == expected.output
    engine.close()


@on_cpu
def test_a_chunk_that_is_no_bucket_has_room_for_the_bucket_s_rows(tmp_path: Path) -> None:
    """A prompt between the two runs in the bucket: its pairs must fit the work lists, which nothing guards."""
    MAKERS["qwen3_moe"](tmp_path)
    options = EngineOptions(device="cpu", driver="device", prefill_chunk=18, max_batch=1, max_context=64)
    engine = build_engine(str(tmp_path), options)
    assert isinstance(engine.provider, DeviceProvider)
    (session,) = run(engine, [ids(1, 31, engine.config.vocab_size)], greedy(1))
    assert len(engine.provider._work.pairs) >= 31 * engine.config.experts_per_token
    assert len(session.output) == 1
    engine.close()


@on_cpu
def test_a_stop_that_is_no_token_stops_nothing(tmp_path: Path) -> None:
    MAKERS["qwen3_moe"](tmp_path)
    engine = build_engine(str(tmp_path), EngineOptions(device="cpu", driver="device", prefill_chunk=16, max_batch=1))
    (session,) = run(engine, [[1, 2, 3]], greedy(3, stop_token_ids=(1 << 40, -1, -3)))
    assert len(session.output) == 3
    engine.close()


@on_cpu
def test_more_than_a_step_can_hold_is_refused(tmp_path: Path) -> None:
    """And a wider verify than the engine's own width is not."""
    make_pair(tmp_path, "qwen3_moe", block=8)
    engine = open_pair(tmp_path, device="cpu", driver="device", width=2, prefill_chunk=16, max_batch=3, max_context=32)
    sessions = [engine.begin_session(ids(seed, 3, engine.config.vocab_size), greedy(9)) for seed in range(4)]
    with pytest.raises(ValueError, match="4 sessions were given; this engine takes 3 at once"):
        engine.draft_round(sessions)
    engine.draft_round(sessions[:3])
    with pytest.raises(ValueError, match="a verify of 24 rows was asked for; this engine runs 16 at once"):
        engine.verify_round(sessions[:3], [8, 8, 8])
    assert all(result.accepted_ids for result in engine.verify_round(sessions[:2], [8, 7]))
    engine.close()


@on_cpu
def test_what_the_device_cannot_drive_is_said(tmp_path: Path) -> None:
    MAKERS["gpt_oss-mxfp4"](tmp_path)
    with pytest.raises(
        ConfigError, match="driver is 'device', but MXFP4 experts need a CUDA GPU there; use --driver host"
    ):
        build_engine(str(tmp_path), EngineOptions(device="cpu", driver="device"))
    assert build_engine(str(tmp_path), EngineOptions(device="cpu")).note is None
    config, cuda = read_config(tmp_path), torch.device("cuda")
    assert _driver(config, EngineOptions(), 512, cuda, torch.bfloat16) == ("device", None)
    for rows, dtype, why in ((512, torch.float32, "bfloat16"), (600, torch.bfloat16, "600 rows")):
        driver, note = _driver(config, EngineOptions(), rows, cuda, dtype)
        assert driver == "host" and note is not None and why in note
    with pytest.raises(ConfigError, match="a step may have 513 rows"):
        MAKERS["qwen3_moe"](tmp_path / "q")
        build_engine(str(tmp_path / "q"), EngineOptions(device="cpu", driver="device", prefill_chunk=513))
    with pytest.raises(ConfigError, match="a step may have 520 rows"):
        make_pair(tmp_path / "p", "qwen3_moe", block=8)
        open_pair(tmp_path / "p", device="cpu", driver="device", width=2, max_batch=65)
    with pytest.raises(ConfigError, match="driver is 'gpu'"):
        EngineOptions(driver="gpu")  # type: ignore[arg-type]


@on_cpu
def test_a_refusal_names_what_the_device_needs_beside_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MAKERS["qwen3_moe"](tmp_path)
    monkeypatch.setattr(memory_needs, "available_ram", lambda: 1 << 20)
    options = EngineOptions(parse_slots("50%"), device="cpu", driver="device", prefill_chunk=64)
    with pytest.raises(ConfigError, match=r"places for experts that pass .* \+ activations .* \+ logits"):
        build_engine(str(tmp_path), options)


@on_cpu
def test_queued_rounds_before_logits_that_are_not_finite_stand(tmp_path: Path) -> None:
    """As host-driven ones do: their tokens come out, and what could not be settled is not counted, however often."""
    MAKERS["qwen3_moe"](tmp_path)
    both, third = [], -1
    for driver in ("host", "device"):
        options = EngineOptions(device="cpu", driver=driver, prefill_chunk=16, max_batch=1, max_context=32)  # type: ignore[arg-type]
        engine = build_engine(str(tmp_path), options)
        prompt = ids(0, 4, engine.config.vocab_size)
        if third < 0:
            third = run(engine, [prompt], greedy(6))[0].output[2]
            engine.reset_counters()
        session = engine.submit(prompt, greedy(6))
        engine.step()
        engine.decoder.embedding[third] = float("nan")  # it is fed in the third round
        told = set()
        for _ in range(4):
            try:
                engine.step()
            except RequestError as error:
                told.add(str(error))
        seen = engine.stats()
        both.append((session.output, told, seen.decode_steps, seen.rounds, seen.expert_accesses))
        assert len(told) == 1 and len(session.output) == 3
        engine.close()
    assert both[0] == both[1]


@on_cpu
def test_many_queued_calls_in_which_drafts_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle drafts the plain tokens, four of five times right; three sequences that end by stops and lengths."""
    make_pair(tmp_path, "qwen3_moe", block=4)
    monkeypatch.setattr(attention, "SPLITS", 2)
    random = torch.Generator().manual_seed(0)

    def below(most: int) -> int:
        return int(torch.randint(most, (1,), generator=random))

    host = open_pair(tmp_path, speculate=False, device="cpu", driver="host", max_context=48)
    prompts = [ids(seed, length, 240) for seed, length in enumerate((3, 14, 7, 15))]
    plain = [run(host, [prompt], greedy(16))[0].output for prompt in prompts]
    host.close()
    running: list[int] = []

    def draft(self: device_drafter.DeviceDrafter, standing: Standing, bucket: int) -> Tensor:
        out = torch.zeros(len(self._choices), dtype=torch.int32)
        for s, which in enumerate(running[: int(standing.number)]):
            at = int(standing.lengths[s]) - len(prompts[which])
            assert int(standing.anchors[s]) == plain[which][at]
            for place, token in enumerate([*plain[which][at + 1 :], 0, 0, 0][:3]):
                out[4 * s + place] = token if below(5) else (token + 1) % 240
        return out

    monkeypatch.setattr(device_drafter.DeviceDrafter, "draft", draft)
    for width in (2, 4):
        engine = open_pair(
            tmp_path, "50%", width=width, device="cpu", driver="device", prefill_chunk=16, max_batch=3, max_context=48
        )
        calls = 0
        for _ in range(2):
            chosen = torch.randperm(4, generator=random)[:3].tolist()
            lengths = [2 + below(14) for _ in chosen]
            stops = [(plain[i][3 + below(11)],) if below(2) else () for i in chosen]
            sessions = [
                engine.submit(prompts[i], greedy(n, stop_token_ids=stop))
                for i, n, stop in zip(chosen, lengths, stops, strict=True)
            ]
            while engine.scheduler.has_work:
                running[:] = [chosen[sessions.index(s)] for s in engine.scheduler._running]
                calls += engine.step() is not None
            for i, n, stop, session in zip(chosen, lengths, stops, sessions, strict=True):
                ends = [at + 1 for at, token in enumerate(plain[i][:n]) if token in stop]
                assert session.output == plain[i][: min([n, *ends])]
            assert engine.kv.pool.num_used == 0
        mean = engine.stats().mean_acceptance_length
        assert mean is not None and mean > 1.3 and calls > 10
        engine.close()


@on_cpu
def test_a_long_prompt_feeds_the_drafter_as_its_chunks_do(tmp_path: Path) -> None:
    make_pair(tmp_path, "qwen3_moe", block=4)
    seen = []
    for driver, stream in (("host", 512), ("device", 0), ("device", 512)):
        options = {"prefill_chunk": 16, "max_batch": 2, "max_context": 64, "stream_chunk": stream}
        engine = open_pair(tmp_path, "38%", device="cpu", driver=driver, **options)
        sessions = [engine.begin_session(ids(1, n, engine.config.vocab_size), greedy(6)) for n in (33, 18)]
        drafts = engine.draft_round(sessions)
        counted = engine.stats()
        assert counted.streamed_prefill_steps == (2 if driver == "device" and stream else 0)
        assert counted.prefill_hits + counted.prefill_misses > 0 and counted.prefill_cold_bytes > 0
        if stream and driver == "device":
            # Every expert of a layer that a row visits counts once a chunk.
            assert (
                counted.prefill_hits + counted.prefill_misses
                <= 2 * engine.config.num_layers * engine.config.num_experts
            )
        seen.append([(draft.tokens, draft.token_probs) for draft in drafts])
        engine.close()
    for other in seen[1:]:
        for (tokens, probs), (own, near) in zip(seen[0], other, strict=True):
            assert tokens == own and probs == pytest.approx(near, rel=1e-3)


@on_cpu
def test_logits_that_are_not_finite_end_the_call_and_leave_the_session(tmp_path: Path) -> None:
    MAKERS["qwen3_moe"](tmp_path)
    options = EngineOptions(device="cpu", driver="device", prefill_chunk=16, max_batch=1)
    engine = build_engine(str(tmp_path), options)
    session = engine.submit(ids(0, 4, engine.config.vocab_size), greedy(6))
    engine.step()
    before = (list(session.output), session.table.length)
    engine.decoder.head[7] = float("nan")
    with pytest.raises(RequestError, match=f"NaN logits at position {before[1]}"):
        engine.step()
    assert (session.output, session.table.length) == before
    engine.cancel(session)
    assert engine.kv.pool.num_used == 0
    engine.close()


@on_cpu
def test_a_burst_is_no_longer_than_what_is_left(tmp_path: Path) -> None:
    MAKERS["qwen3_moe"](tmp_path)
    engine = build_engine(
        str(tmp_path), EngineOptions(device="cpu", driver="device", prefill_chunk=16, max_batch=1, max_context=32)
    )
    session = engine.submit(ids(0, 4, engine.config.vocab_size), greedy(3))
    steps = 0
    while engine.step():
        steps += 1
    assert len(session.output) == 3 and steps == 2 and MOST_ROUNDS > 2
    assert engine.stats().decode_steps == 2
    assert engine.provider.prefetch([ExpertKey(0, 0)]) == []
    assert engine.stats().dropped_prefetches == 1
    engine.close()
