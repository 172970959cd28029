"""The ends of a queued round against plain Python: rows that the device sets itself, and which drafts stand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.device.accept import DRAFTS_NOT_FINITE, FIELDS, accept
from outrider.kernels.device.attention import UNIT
from outrider.kernels.device.set_rows import MOST_STOPS, Standing, set_block_rows, set_verify_rows
from outrider.models.rows import Rows
from outrider.spec.acceptance import accept_greedy, committed_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEQUENCES, PAGES, ROWS, TURNS = 5, 4, 64, 3
MASK = 99


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rows_with_tables() -> Rows:
    rows = Rows(ROWS, SEQUENCES, PAGES, DEVICE)
    rows.set_tables(torch.arange(SEQUENCES * PAGES).flip(0).view(SEQUENCES, PAGES).tolist())
    return rows


def check_rows(rows: Rows, wanted: list[tuple[int, int, int, int]]) -> None:
    """`wanted`: (token, position, limit, sequence) of every row."""
    number = len(wanted)
    assert rows.count.item() == number
    tables = rows.tables.tolist()
    columns = (rows.ids, rows.positions, rows.limits, rows.sequences)
    assert list(zip(*(column[:number].tolist() for column in columns), strict=True)) == wanted
    assert rows.slots[:number].tolist() == [tables[s][p // 16] * 16 + p % 16 for _, p, _, s in wanted]
    units, at = [], 0
    for sequence in dict.fromkeys(s for *_, s in wanted):
        own = sum(s == sequence for *_, s in wanted)
        units += [(at + u, min(UNIT, own - u)) for u in range(0, own, UNIT)]
        at += own
    first, length, many = rows.units
    assert many.item() == len(units)
    assert list(zip(first[: len(units)].tolist(), length[: len(units)].tolist(), strict=True)) == units


@st.composite
def rounds(draw: st.DrawFn) -> dict[str, list]:
    width = draw(st.integers(1, 6))
    number = draw(st.integers(1, SEQUENCES))
    token = st.integers(0, 4)  # so few that drafts stand often
    return {
        "width": width,
        "anchors": draw(st.lists(token, min_size=number, max_size=number)),
        "lengths": draw(st.lists(st.integers(0, 40), min_size=number, max_size=number)),
        "left": draw(st.lists(st.integers(1, 9), min_size=number, max_size=number)),
        "stops": [frozenset(draw(st.lists(st.integers(3, 6), max_size=2))) for _ in range(number)],
        "drafts": draw(st.lists(st.lists(token, min_size=6, max_size=6), min_size=number, max_size=number)),
        "choices": draw(st.lists(st.lists(token, min_size=6, max_size=6), min_size=number, max_size=number)),
    }


@settings(deadline=None, max_examples=60)
@given(case=rounds(), num_drafts=st.sampled_from([0, 3, 5]))
def test_a_round_is_settled_as_the_host_settles_it(case: dict[str, list], num_drafts: int) -> None:
    rows, standing = rows_with_tables(), Standing(SEQUENCES, TURNS, DEVICE)
    width = min(case["width"], num_drafts + 1)
    standing.start(case["anchors"], case["lengths"], case["left"], case["stops"])
    number, stride = len(case["anchors"]), 6
    drafts = ints([d for line in case["drafts"] for d in line]) if num_drafts else None
    set_verify_rows(standing, rows.columns, width, drafts, stride)
    widths = [min(width, left) for left in case["left"]]
    check_rows(
        rows,
        [
            (([case["anchors"][s], *case["drafts"][s]])[i], case["lengths"][s] + i, case["lengths"][s] + i, s)
            for s in range(number)
            for i in range(widths[s])
        ],
    )
    said = torch.full((TURNS, SEQUENCES, FIELDS + width), -7, dtype=torch.int32, device=DEVICE)
    rows.kept.fill_(-7)
    flat = [choice for s in range(number) for choice in case["choices"][s][: widths[s]]]
    accept(
        standing,
        width,
        ints([*flat, *[0] * (ROWS - len(flat))]),
        rows.count,
        rows.kept,
        said,
        drafts,
        num_drafts,
        stride,
    )
    kept, ended = [], False
    for s in range(number):
        tested = torch.full((1, width), -1)
        tested[0, : min(num_drafts, width)] = torch.tensor(case["drafts"][s])[: min(num_drafts, width)]
        choices = torch.tensor([case["choices"][s][:width]])
        accepted, last = (int(x) for x in accept_greedy(choices, tested, torch.tensor([widths[s]])))
        tokens = [*tested[0, :accepted].tolist(), *([last] if last >= 0 else [])]
        stopped = next((i for i, token in enumerate(tokens) if token in case["stops"][s]), None)
        tokens = tokens if stopped is None else tokens[: stopped + 1]
        line = said[0, s].tolist()
        assert line[:FIELDS] == [accepted, widths[s], len(tokens)] and line[FIELDS:][: len(tokens)] == tokens
        stay = committed_rows(accepted, widths[s], len(tokens))
        kept += [1] * stay + [0] * (widths[s] - stay)
        ended |= stopped is not None or len(tokens) == case["left"][s]
        assert standing.anchors[s] == tokens[-1] and standing.left[s] == case["left"][s] - len(tokens)
        assert standing.lengths[s] == case["lengths"][s] + stay
    assert rows.kept[: len(kept)].tolist() == kept and (rows.kept[len(kept) :] == -7).all()
    assert standing.number.item() == (0 if ended else number) and standing.turn.item() == 1
    assert rows.count.item() == sum(widths)

    set_verify_rows(standing, rows.columns, width, drafts, stride)
    assert (rows.count.item() == 0) == ended
    accept(standing, width, ints([3] * ROWS), rows.count, rows.kept, said, drafts, num_drafts, stride)
    assert ((said[1, :, 2] == 0).all()) == ended and (said[2] == -7).all()


def test_rows_of_a_block() -> None:
    rows, standing = rows_with_tables(), Standing(SEQUENCES, TURNS, DEVICE)
    standing.start([7, 8], [14, 3], [1, 1], [frozenset(), frozenset()])
    set_block_rows(standing, rows.columns, 6, MASK)
    wanted = [(7 if i == 0 else MASK, 14 + i, 19, 0) for i in range(6)]
    check_rows(rows, wanted + [(8 if i == 0 else MASK, 3 + i, 8, 1) for i in range(6)])
    standing.number.zero_()
    set_block_rows(standing, rows.columns, 6, MASK)
    assert rows.count.item() == rows.units[2].item() == 0


@pytest.mark.parametrize("place", [0, 1])
def test_logits_that_are_not_finite_end_the_queue(place: int) -> None:
    """The target's stand as -1 among the tokens, at the place where they would have counted."""
    rows, standing = rows_with_tables(), Standing(SEQUENCES, TURNS, DEVICE)
    said = torch.zeros(TURNS, SEQUENCES, FIELDS + 3, dtype=torch.int32, device=DEVICE)
    standing.start([1], [5], [9], [frozenset()])
    drafts, choices = ints([2, 3, 4]), [2, 3, 4]
    choices[place] = -1
    set_verify_rows(standing, rows.columns, 3, drafts, 3)
    accept(standing, 3, ints(choices), rows.count, rows.kept, said, drafts, 3, 3)
    assert said[0, 0].tolist()[: FIELDS + place + 1] == [place, 3, place + 1, *[2, 3][:place], -1]
    assert standing.number.item() == rows.count.item() == 0


def test_drafts_that_are_not_finite_are_told_and_never_looked_up() -> None:
    rows, standing = rows_with_tables(), Standing(SEQUENCES, TURNS, DEVICE)
    said = torch.zeros(TURNS, SEQUENCES, FIELDS + 3, dtype=torch.int32, device=DEVICE)
    standing.start([1], [5], [9], [frozenset()])
    drafts = ints([2, -1, 4])
    set_verify_rows(standing, rows.columns, 3, drafts, 3)
    assert rows.ids[:3].tolist() == [1, 2, 0]
    accept(standing, 3, ints([2, 3, 4]), rows.count, rows.kept, said, drafts, 3, 3)
    assert said[0, 0, 0] == DRAFTS_NOT_FINITE and standing.number.item() == rows.count.item() == 0


def test_the_last_stop_token_of_the_last_sequence_counts() -> None:
    rows, standing = rows_with_tables(), Standing(SEQUENCES, TURNS, DEVICE)
    said = torch.zeros(TURNS, SEQUENCES, FIELDS + 1, dtype=torch.int32, device=DEVICE)
    stops = [frozenset[int]()] * 4 + [frozenset(range(100, 100 + MOST_STOPS))]
    for token, ended in ((100 + MOST_STOPS - 1, True), (100 + MOST_STOPS, False)):
        standing.start([1] * 5, [5] * 5, [9] * 5, stops)
        set_verify_rows(standing, rows.columns, 1)
        accept(standing, 1, ints([100, 100, 100, 100, token, *[0] * 11]), rows.count, rows.kept, said)
        assert (standing.number.item() == 0) == ended
