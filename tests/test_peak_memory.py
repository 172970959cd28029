"""A model read from disk costs slots and dense weights, not its experts: one larger than memory can run."""

import json
import subprocess
import sys
from pathlib import Path

from outrider.checkpoint.synth import synthesize

CONFIG = {
    "model_type": "gpt_oss",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 64,
    "num_experts_per_tok": 4,
    "quantization_config": {"quant_method": "mxfp4"},
}


def test_anonymous_memory_is_bounded_by_slots_and_dense_weights(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    synthesize(config, tmp_path / "model")
    script = Path(__file__).parent / "peak_memory.py"
    command = [sys.executable, str(script), str(tmp_path / "model"), "--expert-slots", "25%", "--tokens", "8"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    grown = report["peak_bytes"] - report["before_bytes"]
    # The interpreter's own growth (libraries, threads' stacks) is not the model's; here it is a third of the experts.
    assert report["experts_bytes"] > 200e6 > 2 * report["slots_bytes"]
    assert report["cold_bytes"] > 0 and report["tokens"] == 8
    assert grown < report["allowed_bytes"] + 60e6, report
    # KV pages cost memory when they are used: 131,072 tokens of room, 40 in use.
    assert report["kv_room_bytes"] > 250e6
    assert grown < 0.75 * report["experts_bytes"], report
