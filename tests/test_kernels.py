"""The reference kernels against plain formulas, and the promise that rows do not know each other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import SamplingParams, Yarn
from outrider.kernels.attention import KEY_SPLIT, attention
from outrider.kernels.linear import ROW_TILE, linear
from outrider.kernels.rope import apply_rope, rope_frequencies, rope_tables
from outrider.kernels.router import softmax_top_k, top_k_softmax
from outrider.kernels.warp import draw, uniform, warp

SHAPES = [(64, 96), (256, 256), (320, 100), (256, 4096), (2880, 160)]


def rows(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inp", "out"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch(inp: int, out: int, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        weight, x = rows(out, inp, 1).to(dtype), rows(512, inp).to(dtype)
        whole = linear(x, weight)
        for count in (1, 2, 3, 8, 15, 16, 17, 31, 100):
            assert torch.equal(linear(x[:count], weight), whole[:count]), f"{count} rows"
        assert torch.equal(linear(x[300:301], weight), whole[300:301]), "another place in the tile"
        assert torch.equal(linear(x.flip(0), weight), whole.flip(0))
    finally:
        torch.set_num_threads(1)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("rhd,nhd->hrn", q, k.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
    at = torch.arange(k.shape[0])
    position = first + torch.arange(q.shape[0]).unsqueeze(-1)
    visible = at <= position
    if window is not None:
        visible &= at > position - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, q.shape[0], 1)), -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[0]]
    return torch.einsum("hrn,nhd->rhd", weights, v.repeat_interleave(group, 1))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(0, 600), st.sampled_from([None, 1, 8, 300]), st.booleans(), st.integers(1, 3))
def test_attention_equals_the_plain_formula(
    count: int, first: int, window: int | None, with_sinks: bool, group: int
) -> None:
    length = -(-(first + count) // KEY_SPLIT) * KEY_SPLIT
    kv_heads, dim = 2, 16
    q = rows(count, kv_heads * group * dim).view(count, -1, dim)
    k, v = (rows(length, kv_heads * dim, seed).view(length, kv_heads, dim) for seed in (1, 2))
    sinks = rows(1, kv_heads * group, 3)[0] if with_sinks else None
    ours = attention(q, k, v, first, window, sinks)
    torch.testing.assert_close(ours, plain_attention(q, k, v, first, window, sinks), atol=2e-6, rtol=1e-5)
    if count > 1:
        last = attention(q[-1:], k, v, first + count - 1, window, sinks)
        assert torch.equal(last, ours[-1:]), "one row alone must have the same bits"


def test_rotation_by_relative_position() -> None:
    frequencies, factor = rope_frequencies(8, 10000.0, None)
    q, k = rows(1, 8).view(1, 1, 8), rows(1, 8, 1).view(1, 1, 8)

    def score(at_q: int, at_k: int) -> float:
        rotated = [
            apply_rope(x, *rope_tables(torch.tensor([at]), frequencies, factor, torch.float32))
            for x, at in ((q, at_q), (k, at_k))
        ]
        return float((rotated[0] * rotated[1]).sum())

    assert math.isclose(score(5, 3), score(105, 103), rel_tol=1e-4)
    assert not math.isclose(score(5, 3), score(5, 4), rel_tol=1e-2)


def test_yarn_keeps_fast_dimensions_and_stretches_slow_ones() -> None:
    plain, _ = rope_frequencies(64, 150000.0, None)
    yarn, factor = rope_frequencies(64, 150000.0, Yarn(factor=32, original_positions=4096, truncate=False))
    assert torch.equal(yarn[:4], plain[:4])
    torch.testing.assert_close(yarn[-4:], plain[-4:] / 32)
    assert math.isclose(factor, 0.1 * math.log(32) + 1)


def test_yarn_truncates_its_range_to_whole_dimensions_if_asked() -> None:
    sharp, _ = rope_frequencies(64, 10000.0, Yarn(factor=4, original_positions=1024, truncate=False))
    whole, _ = rope_frequencies(64, 10000.0, Yarn(factor=4, original_positions=1024, truncate=True))
    low, high = (64 * math.log(1024 / (turns * 2 * math.pi)) / (2 * math.log(10000.0)) for turns in (32, 1))
    dims = torch.arange(32)
    for got, first, last in ((sharp, low, high), (whole, math.floor(low), math.ceil(high))):
        keep = 1 - ((dims - first) / (last - first)).clamp(0, 1)
        plain = 10000.0 ** -(dims / 32)
        torch.testing.assert_close(got, plain / 4 * (1 - keep) + plain * keep, rtol=1e-5, atol=0)
    assert not torch.equal(sharp, whole)


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([1.0, 5.0, 4.9])
    for temperature in (1e-6, 1e-40, 1e-300):
        assert warp(logits, SamplingParams(temperature=temperature)).tolist() == [0, 1, 0]


def test_routers() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    mix, ids = top_k_softmax(logits, 2)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(mix, torch.softmax(torch.tensor([[3.0, 2.0]]), -1))
    plain, _ = softmax_top_k(logits, 2, normalize=False)
    torch.testing.assert_close(plain, torch.softmax(logits, -1)[:, [1, 2]])
    normal, _ = softmax_top_k(logits, 2, normalize=True)
    torch.testing.assert_close(normal.sum(-1), torch.ones(1))


def test_warp_in_its_order() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    torch.testing.assert_close(warp(logits, SamplingParams(temperature=1)), logits.exp())
    two = warp(logits, SamplingParams(temperature=1, top_k=2))
    torch.testing.assert_close(two, torch.tensor([4 / 7, 3 / 7, 0, 0]))
    # Of the three that top-k keeps (4/9, 3/9, 2/9) the second crosses 0.5 and stays.
    both = warp(logits, SamplingParams(temperature=1, top_k=3, top_p=0.5))
    torch.testing.assert_close(both, torch.tensor([4 / 7, 3 / 7, 0, 0]))
    first = warp(logits, SamplingParams(temperature=1, top_p=1e-9))
    torch.testing.assert_close(first, torch.tensor([1.0, 0, 0, 0]))
    sharp = warp(logits, SamplingParams(temperature=0.5))
    torch.testing.assert_close(sharp, logits.exp().square() / logits.exp().square().sum())


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(lambda p: sum(p) > 1e-3), st.floats(0, 1, exclude_max=True)
)
def test_draw_never_takes_an_impossible_token(weights: list[float], u: float) -> None:
    probs = torch.tensor(weights) / sum(weights)
    (token,) = draw(probs.unsqueeze(0), torch.tensor([u], dtype=torch.float64)).tolist()
    assert probs[token] > 0


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2]).expand(4000, 4)
    uniforms = torch.tensor([uniform(1, index, "draw") for index in range(4000)], dtype=torch.float64)
    counts = draw(probs, uniforms).bincount(minlength=4).tolist()
    expected = [2000, 0, 1200, 800]
    chi2 = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e)
    assert counts[1] == 0 and chi2 < 13.8  # p > 0.001 at two degrees of freedom


def test_uniform_depends_on_seed_and_place_only() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    assert len({uniform(s, i, what) for s in range(30) for i in range(30) for what in "ab"}) == 1800
    assert ROW_TILE == 16
