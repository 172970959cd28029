"""Long runs of the device-driven cache at a quarter of the experts with random resets: `python tests/soak.py`.

What it checks: the tokens of the demo stay those of its first run, device and host memory do not grow, every resident
slot holds its expert's bytes, and the counters add up. Exit code 1 and one sentence where one of them fails.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable

import torch

from outrider.bench.step import uniform_trace
from outrider.bench.synthetic import SyntheticTarget
from outrider.checkpoint.presets import load_config
from outrider.config import EngineOptions, SamplingParams, parse_slots
from outrider.engine.build import build_engine
from outrider.experts.device_provider import DeviceProvider
from outrider.experts.home import Home, PackedRecords
from outrider.experts.store import MappedStore

PROMPT = list(range(100, 140))
TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100_000, help="of the demo")
    parser.add_argument("--full-rounds", type=int, default=2_000, help="of synthetic gpt-oss-20b")
    given = parser.parse_args()
    print(json.dumps({"demo": soak_demo(given.rounds), "gpt-oss-20b": soak_full(given.full_rounds)}, indent=1))


def soak_demo(rounds: int) -> dict[str, float]:
    engine = build_engine("demo", EngineOptions(parse_slots("25%"), driver="device"))
    assert isinstance(engine.provider, DeviceProvider)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    random = torch.Generator().manual_seed(0)
    expected: list[int] = []

    def generate() -> None:
        if float(torch.rand(1, generator=random)) < 0.2:
            engine.reset_cache()
        session = engine.submit(PROMPT, params)
        while engine.step():
            pass
        expected.extend([] if expected else session.output)
        require(session.output == expected, "a token changed")

    grown = watch(generate, rounds // (TOKENS - 1))
    records = PackedRecords(MappedStore(engine.checkpoint), engine.provider.kernel, engine.decoder.embedding.device)
    compare(engine.provider, {key: records.read(key) for key in engine.checkpoint.expert_keys()})
    seen = engine.stats()
    require(engine.kv.pool.num_used == 0, "pages were lost")
    accesses = seen.decode_steps * engine.config.num_layers * engine.config.experts_per_token
    require(seen.expert_accesses == accesses, f"{seen.expert_accesses} accesses were counted, not {accesses}")
    engine.close()
    return grown | {"rounds": seen.decode_steps, "hit_rate": seen.expert_cache_hit_rate or 0.0}


def soak_full(rounds: int) -> dict[str, float]:
    config = load_config("gpt-oss-20b")
    target = SyntheticTarget(config, parse_slots("25%"), trace=uniform_trace(config))
    assert isinstance(target.home, Home)
    random = torch.Generator().manual_seed(0)

    def decode() -> None:
        if float(torch.rand(1, generator=random)) < 0.05:
            target.provider.reset_cache()
        target.decode(16)

    grown = watch(decode, rounds // 16)
    compare(target.provider, {key: target.home.record(key) for key in target.home.experts()})
    seen = target.provider.snapshot()
    accesses = seen.steps * config.num_layers * config.experts_per_token
    require(seen.hits + seen.misses == accesses, f"{seen.hits + seen.misses} accesses were counted, not {accesses}")
    result = grown | {"rounds": seen.steps, "hit_rate": seen.hits / accesses}
    target.provider.close()
    return result


def watch(run: Callable[[], None], times: int) -> dict[str, float]:
    """Run it and see what grows after the first tenth."""
    began = time.perf_counter()
    for turn in range(times):
        if turn == times // 10:
            device, host = torch.cuda.memory_reserved(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
    grown = torch.cuda.memory_reserved() - device
    host_grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host) * 1024
    require(grown == 0, f"device memory grew by {grown} bytes")
    require(host_grown < 64 << 20, f"host memory grew by {host_grown} bytes")
    return {"seconds": time.perf_counter() - began, "device_bytes_grown": grown, "host_bytes_grown": host_grown}


def compare(provider: DeviceProvider, records: dict) -> None:
    """Every resident slot against its record."""
    resident = provider.resident_keys()
    require(len(set(resident)) == len(resident) == provider.slots_total, "slots are empty or hold an expert twice")
    for key in resident:
        weights = provider.weights_of(key)
        assert weights is not None
        for name, part in provider.layout.view(records[key]).items():
            same = torch.equal(weights[name].cpu().view(torch.uint8), part.cpu().view(torch.uint8))
            require(same, f"expert {key.expert} of layer {key.layer} has a wrong byte in {name}")


def require(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(what)


if __name__ == "__main__":
    main()
