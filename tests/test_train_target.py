"""The demo target's training loop, export and gates, small and on the CPU."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from outrider.kernels.mxfp4 import pack, unpack
from outrider.train.evaluate import evaluate, windows
from outrider.train.export import read_target, start_from, write_target
from outrider.train.gates import shipped_bytes
from outrider.train.moe import expert_inputs, grouped_experts, looped_experts, mxfp4_values
from outrider.train.optim import orthogonalise
from outrider.train.prepare import Ids, Prepared, Record
from outrider.train.target_model import TargetConfig, TargetModel, swiglu
from outrider.train.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from outrider.train.train_target import Recipe, Trainer
from outrider.train.wake import wake_experts

SHIPPED = Path(__file__).parents[1] / "src" / "outrider" / "demo" / "target"
TINY = TargetConfig(
    vocab=300,
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    experts=8,
    top_k=2,
    intermediate=32,
    window=16,
    context=64,
)
RECIPE = Recipe(steps=40, batch=4, rate=1e-2, config=TINY)
RECORD = Record([], [], ["a.py"], 1000, 300, 200, 4000, 0, 1, "")


@pytest.fixture(scope="module", autouse=True)
def one_thread():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ready() -> Prepared:
    tokenizer = train_tokenizer(["def f(x):\n    return x + 1\n" * 50], 300)
    pattern = np.random.default_rng(0).integers(6, 290, 37)
    tokens: Ids = np.tile(pattern, 120).astype(np.uint16)
    return Prepared(tokenizer, tokens, [tokens[:150]], tokens[:200], RECORD)


def make(seed: int = 0, config: TargetConfig = TINY) -> TargetModel:
    model = TargetModel(config)
    model.initialise(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "bias" in name or "sinks" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def test_training_lowers_the_loss(ready: Prepared) -> None:
    trainer = Trainer(RECIPE, ready, torch.device("cpu"))
    losses = [float(trainer.advance()[0]) for _ in range(RECIPE.steps)]
    assert losses[0] == pytest.approx(np.log(300), abs=0.3)
    assert losses[-1] < 0.5 * losses[0]


def test_a_resumed_run_ends_with_the_same_weights(ready: Prepared, tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=12)
    whole = Trainer(recipe, ready, torch.device("cpu"))
    whole.run()
    first = Trainer(recipe, ready, torch.device("cpu"))
    first.run(stop_after=7)
    first.save(tmp_path / "checkpoint.pt")
    second = Trainer(replace(recipe, seed=0), ready, torch.device("cpu"))
    second.resume(tmp_path / "checkpoint.pt")
    assert second.step == 7
    second.run()
    for (name, a), b in zip(whole.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_batches_cover_an_epoch_once_and_differ_between_epochs(ready: Prepared) -> None:
    batches = Trainer(RECIPE, ready, torch.device("cpu")).batches
    epoch = [batches.batch(i)[0] for i in range(batches.per_epoch)]
    assert torch.equal(epoch[1], batches.batch(1)[0])
    assert not torch.equal(
        torch.cat(epoch), torch.cat([batches.batch(batches.per_epoch + i)[0] for i in range(len(epoch))])
    )
    inputs, targets = batches.batch(3)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("scale", [1.0, 3e-3, 1e-7])
def test_fake_rounding_is_what_pack_stores(scale: float) -> None:
    weight = torch.randn(4, 16, 128, generator=torch.Generator().manual_seed(1)) * scale
    weight[0, 0] = 0
    weight[0, 1] = torch.arange(-64, 64) * 0.25 * scale  # ties
    assert torch.equal(mxfp4_values(weight), unpack(*pack(weight)))


def test_grouped_experts_agree_with_the_loop() -> None:
    def run(grouped: bool) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(2)
        draw = lambda *shape: torch.randn(*shape, generator=g).bfloat16().requires_grad_()  # noqa: E731
        x, up, down, b_up, b_down = draw(24, 32), draw(6, 32, 32), draw(6, 32, 16), draw(6, 32), draw(6, 32)
        logits = torch.randn(24, 6, generator=g)
        top, chosen = logits.topk(2)
        arguments = (top.softmax(-1), (up, down), (b_up, b_down), swiglu)
        if grouped:
            y = grouped_experts(x, expert_inputs(chosen, 6), *arguments)
        else:
            y = looped_experts(x, chosen, *arguments)
        y.float().square().sum().backward()
        return [y.detach(), *(t.grad for t in (x, up, down, b_up, b_down) if t.grad is not None)]

    for a, b in zip(run(False), run(True), strict=True):
        assert (a.float() - b.float()).norm() < 2e-2 * a.float().norm()


def test_orthogonalise_flattens_singular_values() -> None:
    stack = torch.randn(3, 24, 10, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonalise(stack))
    assert values.min() > 0.6 and values.max() < 1.3


def test_export_gives_transformers_the_same_logits(tmp_path: Path) -> None:
    model = make()
    write_target(model, tmp_path, 0, [0, 4])
    own = read_target(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    ids = torch.randint(6, 300, (2, 50), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = theirs(ids).logits
        got = own.logits(own(ids)[0])
    assert (expected - got).abs().max() < 1e-4
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [0, 4]


def test_windows_count_every_token_once(ready: Prepared) -> None:
    files = [np.arange(6, 6 + n, dtype=np.uint16) for n in (1, 63, 64, 65, 200)]
    rows = windows(files, 64, 0)
    counted = rows.targets[rows.counted].tolist()
    assert sorted(counted) == sorted([t for f in files for t in [*f.tolist(), 0]])
    assert rows.counted.sum(1).max() <= 64


def test_bits_per_byte_of_a_uniform_model(ready: Prepared) -> None:
    model = make()
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
    result = evaluate(model, windows([ready.tokens[:99]], 64, 0), total_bytes=100, batch=3)
    assert result.bits_per_byte == pytest.approx(np.log2(300))
    assert all(0 <= layer.overlap <= 1 and layer.entropy <= 1.0001 for layer in result.routing)


def test_waking_gives_each_expert_its_floor_and_changes_router_biases_only() -> None:
    model = make()
    with torch.no_grad():
        model.layers[0].mlp.router.bias[3] = -5.0  # type: ignore[union-attr, operator]
    before = copy.deepcopy(model.state_dict())
    probe = torch.randint(6, 300, (4, 64), generator=torch.Generator().manual_seed(5))
    assert wake_experts(model, probe, 0.5) >= 1
    for name, tensor in model.state_dict().items():
        if not name.endswith("router.bias"):
            assert torch.equal(tensor, before[name])
    for routing in model(probe)[1]:
        shares = torch.bincount(routing.chosen.flatten(), minlength=8) * 8 / routing.chosen.numel()
        assert shares.min() >= 0.5


def test_starting_from_an_export_follows_the_spelling_of_tokens(tmp_path: Path) -> None:
    old = train_tokenizer(["aaa bbb " * 40], 270)
    config = replace(TINY, vocab=old.get_vocab_size())
    save_tokenizer(old, tmp_path, 64)
    write_target(make(config=config), tmp_path, 0, [0])
    stored = read_target(tmp_path).embed_tokens.weight
    new = train_tokenizer(["bbb ccc ddd eee " * 40], old.get_vocab_size())
    model = TargetModel(config)
    start_from(model, tmp_path, new)
    for token in ("<|mask|>", "b", "q"):
        row = model.embed_tokens.weight[new.token_to_id(token)]
        assert torch.equal(row, stored[old.token_to_id(token)])
    fresh = model.embed_tokens.weight[new.token_to_id("cc")]
    assert torch.allclose(fresh, stored[old.token_to_id("c")])


def test_the_shipped_checkpoint_has_the_published_layout() -> None:
    config = json.loads((SHIPPED / "config.json").read_text())
    layers, experts, hidden, inner = (
        config[k] for k in ("num_hidden_layers", "num_local_experts", "hidden_size", "intermediate_size")
    )
    assert config["model_type"] == "gpt_oss" and config["quantization_config"]["quant_method"] == "mxfp4"
    assert layers >= 6 and experts >= 16 and config["num_experts_per_tok"] == 4 and config["tie_word_embeddings"]
    expected = {
        "gate_up_proj_blocks": ("U8", [experts, 2 * inner, hidden // 32, 16]),
        "gate_up_proj_scales": ("U8", [experts, 2 * inner, hidden // 32]),
        "gate_up_proj_bias": ("BF16", [experts, 2 * inner]),
        "down_proj_blocks": ("U8", [experts, hidden, inner // 32, 16]),
        "down_proj_scales": ("U8", [experts, hidden, inner // 32]),
        "down_proj_bias": ("BF16", [experts, hidden]),
    }
    with safe_open(SHIPPED / "model.safetensors", "pt") as stored:
        found = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        for layer in range(layers):
            for name, (dtype, shape) in expected.items():
                tensor = found.pop(f"model.layers.{layer}.mlp.experts.{name}")
                assert (tensor.get_dtype(), tensor.get_shape()) == (dtype, shape), name
        assert all(tensor.get_dtype() == "BF16" for tensor in found.values())
        assert len(found) == 2 + layers * 13
    size = sum(p.stat().st_size for p in SHIPPED.iterdir() if p.name.startswith(("model.", "tokenizer")))
    assert size <= 16_000_000


def test_the_shipped_card_reports_gates_that_hold() -> None:
    report = json.loads((SHIPPED / "training.json").read_text())
    gates = report["gates"]
    assert gates["bytes"] == shipped_bytes(SHIPPED)
    assert gates["bits_per_byte_ok"] and gates["experts_alive"] and gates["bytes_ok"]
    assert len(json.loads((SHIPPED / "heldout.json").read_text())["heldout"]) == 48
    card = (SHIPPED / "README.md").read_text()
    assert f"{gates['mxfp4_bits_per_byte']:.4f}" in card and "FAILED" not in card


def test_the_shipped_model_continues_python() -> None:
    model, tokenizer = read_target(SHIPPED), load_tokenizer(SHIPPED)
    ids = tokenizer.encode("import os\nimport sys\n\n\ndef main(argv):\n    for name in os.listdir(").ids
    with torch.no_grad():
        hidden, _ = model(torch.tensor([ids]))
        best = model.logits(hidden[0, -1]).topk(20).indices.tolist()
        losses = torch.nn.functional.cross_entropy(model.logits(hidden[0, :-1]), torch.tensor(ids[1:]))
    assert float(losses) < 2.5
    assert any(tokenizer.id_to_token(i) in ("path", "self", "directory", "name", "dir", "os", "'") for i in best)
