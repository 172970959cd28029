"""Generate from a checkpoint on disk and report the peak of anonymous memory (page cache excluded), as JSON.

python tests/peak_memory.py MODEL --expert-slots 25% --dtype bfloat16 --tokens 16
"""

import argparse
import json
import threading
from pathlib import Path

from outrider import LLM, SamplingParams


def anonymous_bytes() -> int:
    """RssAnon of this process: private memory, without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not report RssAnon")


def watch(peak: list[int], stop: threading.Event) -> None:
    """Keep the largest value in `peak[0]`."""
    while not stop.wait(0.002):
        peak[0] = max(peak[0], anonymous_bytes())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--expert-slots", default="25%")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    before = anonymous_bytes()
    peak, stop = [before], threading.Event()
    watcher = threading.Thread(target=watch, args=(peak, stop))
    watcher.start()
    llm = LLM(args.model, expert_slots=args.expert_slots, dtype=args.dtype, device="cpu", max_context=32768)
    (completion,) = llm.generate([list(range(1, 33))], SamplingParams(max_tokens=args.tokens, ignore_eos=True))
    stop.set()
    watcher.join()
    stats, provider = llm.stats(), llm.engine.provider
    slots = stats.expert_slots_total * provider.store.layout.record_nbytes
    dense = llm.engine.decoder.nbytes
    print(
        json.dumps(
            {
                "experts_bytes": sum(provider.store.expert_nbytes.values()),
                "slots_bytes": slots,
                "dense_bytes": dense,
                "allowed_bytes": int(1.2 * (slots + dense)),
                "before_bytes": before,
                "peak_bytes": peak[0],
                "kv_room_bytes": llm.engine.kv.pool.num_pages * llm.engine.kv.page_nbytes,
                "tokens": len(completion.token_ids),
                "cold_bytes": stats.cold_bytes,
            }
        )
    )


if __name__ == "__main__":
    main()
