"""MXFP4: decoding equals transformers', encoding is exact on its own grid, rounds to even and beats the plain rule."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outrider.kernels import mxfp4

CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MIDPOINTS = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
ALL_SCALES = torch.arange(1, 252, dtype=torch.uint8)


def random_blocks(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)


def codes_of(blocks: Tensor) -> Tensor:
    """uint8 [..., 32]"""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)


def block_with(*values: float, fill: float = 0.5) -> Tensor:
    """float32 [32]: `values`, a 6 that fixes the scale at 1, and `fill` (0.5 is lost under any larger scale)."""
    row = torch.full((32,), fill)
    row[: len(values)] = torch.tensor(values)
    row[-1] = 6.0
    return row


def nearest(weight: Tensor, exponent: Tensor) -> Tensor:
    """Weights [n, 32] on the grid of scales 2^exponent [n], by comparing with every code; the smaller code at ties."""
    unit = torch.exp2(exponent.double()).unsqueeze(-1)
    scaled = weight.double() / unit
    distance = (scaled.abs().unsqueeze(-1) - CODES.double()).abs()
    return torch.copysign(CODES.double()[distance.argmin(-1)], scaled) * unit


def square_error(weight: Tensor, approximation: Tensor) -> Tensor:
    return (approximation.double() - weight.double()).square().sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpack_equals_transformers(dtype: torch.dtype) -> None:
    blocks = random_blocks(3, 251, 5)
    scales = ALL_SCALES.view(1, -1, 1).expand(3, -1, 5).contiguous()
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    ours = mxfp4.unpack(blocks, scales, dtype)
    assert ours.shape == (3, 251, 160)
    assert torch.equal(ours.transpose(1, 2), theirs)


def test_low_nibble_is_the_even_column() -> None:
    block = torch.zeros(1, 16, dtype=torch.uint8)
    block[0, 0] = 0x72  # low nibble 2 is 1.0, high nibble 7 is 6.0
    assert mxfp4.unpack(block, torch.tensor([127], dtype=torch.uint8))[:2].tolist() == [1.0, 6.0]


def test_pack_returns_what_it_unpacked_bit_for_bit_where_a_block_uses_4_or_6() -> None:
    blocks = random_blocks(251, 20)
    blocks[:, 10:, 0] |= 0x06  # half of the blocks hold a 4 or 6 for certain, the others most likely
    scales = ALL_SCALES.unsqueeze(1).expand(-1, 20).contiguous()
    again, again_scales = mxfp4.pack(mxfp4.unpack(blocks, scales))
    assert ((codes_of(blocks) & 7) >= 6).any(-1).all()
    assert torch.equal(again, blocks)
    assert torch.equal(again_scales, scales)


def test_pack_keeps_the_values_of_blocks_without_4_and_6() -> None:
    magnitudes = codes_of(random_blocks(251, 20, seed=1)) % 6
    magnitudes[:, 5:] %= 3
    magnitudes[:, 10:] %= 2
    codes = magnitudes | (codes_of(random_blocks(251, 20, seed=2)) & 8)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    scales = ALL_SCALES.unsqueeze(1).expand(-1, 20).contiguous()
    values = mxfp4.unpack(blocks, scales)
    assert torch.equal(mxfp4.unpack(*mxfp4.pack(values)), values)


def test_zeros_get_scale_127_and_stay_zeros() -> None:
    blocks, scales = mxfp4.pack(torch.zeros(3, 64))
    assert scales.tolist() == [[127, 127]] * 3
    assert not blocks.any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("midpoint", "even"), MIDPOINTS.items())
def test_midpoints_round_to_the_even_code(midpoint: float, even: float, sign: float) -> None:
    blocks, scales = mxfp4.pack(block_with(sign * midpoint))
    assert scales.tolist() == [127]
    assert mxfp4.unpack(blocks, scales)[0].item() == sign * even


@pytest.mark.parametrize("midpoint", MIDPOINTS)
def test_just_beside_a_midpoint_rounds_to_the_nearer_code(midpoint: float) -> None:
    beside = [float(torch.tensor(midpoint).nextafter(torch.tensor(end))) for end in (0.0, 8.0)]
    low, high = mxfp4.unpack(*mxfp4.pack(block_with(*beside)))[:2].tolist()
    assert low == max(code for code in CODES.tolist() if code < midpoint)
    assert high == min(code for code in CODES.tolist() if code > midpoint)


def test_a_maximum_beyond_6_saturates_only_where_that_is_cheaper() -> None:
    saturated = torch.full((32,), 0.5)
    saturated[0] = 6.5
    blocks, scales = mxfp4.pack(saturated)
    assert scales.item() == 127
    assert mxfp4.unpack(blocks, scales)[0].item() == 6.0
    alone = torch.zeros(32)
    alone[0] = -7.9
    blocks, scales = mxfp4.pack(alone)
    assert scales.item() == 128
    assert mxfp4.unpack(blocks, scales)[0].item() == -8.0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), power=st.floats(0.5, 6), scale=st.integers(-60, 60))
def test_every_block_is_the_better_of_two_scales_and_within_its_bound(seed: int, power: float, scale: int) -> None:
    normal = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
    weight = torch.copysign(normal.abs() ** power, normal) * 2.0**scale
    largest = weight.abs().amax(-1).double()
    plain = torch.floor(torch.log2(largest)) - 2  # the OCP rule
    blocks, scales = mxfp4.pack(weight)
    error = square_error(weight, mxfp4.unpack(blocks, scales))
    by_plain_rule = square_error(weight, nearest(weight, plain))
    by_next_scale = square_error(weight, nearest(weight, plain + 1))
    assert (error <= by_plain_rule * (1 + 1e-6)).all()
    torch.testing.assert_close(error, torch.minimum(by_plain_rule, by_next_scale), rtol=1e-6, atol=0)
    assert (error <= 32 * (largest / 4) ** 2).all()  # under the next scale no value is off by more than max/4


def test_gaussian_weights_lose_about_a_tenth() -> None:
    weight = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0)) * 0.02
    relative = (mxfp4.unpack(*mxfp4.pack(weight)) - weight).norm() / weight.norm()
    assert 0.09 < relative < 0.12


def test_leading_axes_and_dtypes_are_free() -> None:
    weight = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    blocks, scales = mxfp4.pack(weight)
    assert blocks.shape == (2, 3, 2, 16) and blocks.dtype == torch.uint8
    assert scales.shape == (2, 3, 2) and scales.dtype == torch.uint8
    one_row = mxfp4.pack(weight[1, 2].float())
    assert torch.equal(blocks[1, 2], one_row[0]) and torch.equal(scales[1, 2], one_row[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    weight = torch.zeros(2, 64)
    weight[1, 40] = bad
    with pytest.raises(ValueError, match="infinite or NaN"):
        mxfp4.pack(weight)


@pytest.mark.parametrize("size", [1, 31, 33, 48])
def test_rows_that_are_no_multiple_of_32_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4.pack(torch.zeros(2, size))
