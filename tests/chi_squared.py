"""Pearson's test of counts against expectations."""

import torch
from torch import Tensor


def p_value(counts: Tensor, expected: Tensor, smallest: float = 5.0) -> float:
    """Probability of counts at least as far from `expected` (both [cells], equal sums); small cells are pooled.

    A count where nothing is expected has probability 0.
    """
    counts, expected = counts.double(), expected.double()
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    large = expected >= smallest
    rest = expected[~large].sum()
    o, e = counts[large], expected[large]
    if rest > 0:
        o, e = torch.cat((o, counts[~large].sum().view(1))), torch.cat((e, rest.view(1)))
    statistic = ((o - e) ** 2 / e).sum()
    return float(torch.special.gammaincc(torch.tensor((len(e) - 1) / 2, dtype=torch.float64), statistic / 2))
