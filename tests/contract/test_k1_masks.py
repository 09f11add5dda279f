"""K1, which weights are kept: `nofm.mask` against the contract in plain Python, and against the slow twin in torch.

Exhaustive where that is possible (every group of four over the values most likely to go wrong, every bf16 number in every slot),
random with planted ties for the rest. How the same mask comes out of other dtypes, layouts and modes is in
test_k1_everywhere.py.
"""

from __future__ import annotations

import pytest
import torch
from k1_oracle import NASTY, all_in_order, assert_same_mask, mask_from_order, nasty_weight, oracle_mask
from torch import Tensor

import nofm
from nofm import Pattern, masks
from nofm.kernels import reference
from nofm.masks import Grouping


def test_every_group_of_four_nasty_values():
    alphabet = torch.tensor(NASTY, dtype=torch.float32)
    assert alphabet.double().tolist() == NASTY
    assert alphabet.view(torch.int32).unique().numel() == len(NASTY) == 24
    w_GM = torch.cartesian_prod(*[alphabet] * 4)
    assert w_GM.shape == (24**4, 4)
    order_GM = all_in_order(w_GM)
    for n in (1, 2, 3):
        expected = mask_from_order(order_GM, n)
        assert_same_mask(nofm.mask(w_GM, f"{n}:4"), expected, w_GM)
        assert_same_mask(reference.mask(w_GM, Grouping(Pattern(f"{n}:4"))), expected, w_GM)


FILLERS = {
    "ones": (1.0, -1.0, 1.0),
    "zeros and a denormal": (-0.0, 0.0, -(2.0**-133)),
    "extremes": (2.0**-126, -(2 - 2**-7) * 2.0**127, 2.0**-133),
}


@pytest.mark.parametrize("filler", FILLERS.values(), ids=FILLERS)
def test_every_finite_bf16_number_in_every_slot(filler: tuple[float, float, float]):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    assert every.numel() == 2**16 - 256
    others = torch.tensor(filler, dtype=torch.bfloat16)
    assert others.double().tolist() == list(filler)
    for slot in range(4):
        w_GM = others.repeat(len(every), 1)
        w_GM = torch.cat([w_GM[:, :slot], every[:, None], w_GM[:, slot:]], dim=1)
        order_GM = all_in_order(w_GM)
        for n in (1, 2, 3):
            assert_same_mask(nofm.mask(w_GM, f"{n}:4"), mask_from_order(order_GM, n), w_GM)


RANDOM_GROUPS = {
    "1:2": 160_000,
    "2:4": 160_000,
    "1:4": 160_000,
    "3:4": 120_000,
    "4:8": 120_000,
    "2:8": 100_000,
    "8:16": 80_000,
    "1:16": 60_000,
    "16:32": 40_000,
    "16:64": 20_000,
}


def test_a_million_random_groups_are_enough():
    assert sum(RANDOM_GROUPS.values()) >= 1_000_000


@pytest.mark.parametrize(("pattern", "groups"), RANDOM_GROUPS.items())
def test_random_groups_three_in_ten_with_ties(pattern: str, groups: int):
    n, m = Pattern(pattern).n, Pattern(pattern).m
    w_GM = random_groups(groups, m, tied=0.3)
    assert 0.29 < share_with_ties(w_GM) < 0.34
    weight = w_GM.view(-1, 10 * m)  # ten groups a row
    kept = nofm.mask(weight, pattern)
    assert_same_mask(kept, reference.mask(weight, Grouping(Pattern(pattern))), weight)
    sample = slice(None, None, groups // 2_000)
    assert_same_mask(kept.view(-1, m)[sample], oracle_mask(w_GM[sample], n), w_GM[sample])


def random_groups(groups: int, m: int, tied: float) -> Tensor:
    """Normal weights of many scales; in a share of the groups one weight is another one, or its negative."""
    generator = torch.Generator().manual_seed(m)
    w_GM = torch.randn(groups, m, generator=generator) * 2.0 ** torch.randint(-20, 20, (groups, 1), generator=generator)
    to = torch.randint(m, (groups, 1), generator=generator)
    source = (to + torch.randint(1, m, (groups, 1), generator=generator)) % m  # never `to` itself
    sign = torch.randint(2, (groups, 1), generator=generator) * 2 - 1
    tie = torch.rand(groups, 1, generator=generator) < tied
    return w_GM.scatter(1, to, torch.where(tie, sign * w_GM.gather(1, source), w_GM.gather(1, to)))


def share_with_ties(w_GM: Tensor) -> float:
    ordered = w_GM.abs().sort(dim=-1).values
    return (ordered[:, 1:] == ordered[:, :-1]).any(-1).double().mean().item()


@pytest.mark.parametrize("m", range(2, 41))
def test_both_ways_to_the_top_agree_with_each_other_and_with_the_oracle(m: int):
    # Both are on the training path, and M decides which: neither may be right only where the other is not used.
    w_GM = torch.cat([random_groups(40, m, tied=0.5), torch.tensor(NASTY)[torch.arange(40 * m).view(40, m) * 7 % 24]])
    key_GM = masks.magnitude_key(w_GM)
    order_GM = all_in_order(w_GM)
    for n in sorted({1, 2, m // 2, m - 1, m} - {0}):
        expected = mask_from_order(order_GM, n)
        assert_same_mask(masks._keep_by_rank(key_GM, n), expected, w_GM)
        assert_same_mask(masks._keep_by_threshold(key_GM, n), expected, w_GM)
        assert_same_mask(masks.keep_top(key_GM, n), expected, w_GM)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_selection_finds_what_sorting_finds(dtype: torch.dtype):
    """Of one group the n-th largest key is selected on the CPU, of several it is sorted for; many of these weights are equal."""
    w_M = torch.tensor(NASTY)[torch.arange(1000) * 7 % 24].to(dtype)
    key_1M = masks.magnitude_key(w_M)[None]
    expected = sorted(key_1M[0].tolist(), reverse=True)
    assert [masks._nth_largest(key_1M, n).item() for n in range(1, 1001)] == expected
    assert [masks._nth_largest(key_1M.expand(2, -1), n)[1].item() for n in range(1, 1001)] == expected


@pytest.mark.parametrize("pattern", ["1:1", "4:4", "1:3", "5:7", "16:17", "1:256", "200:256", "1:1000"])
def test_unusual_patterns(pattern: str):
    n, m = Pattern(pattern).n, Pattern(pattern).m
    w_GM = nasty_weight(50, m)
    assert_same_mask(nofm.mask(w_GM, pattern), oracle_mask(w_GM, n), w_GM)


def test_groups_of_one_magnitude_keep_the_first_n():
    for value in (0.0, -0.0, 1.0, -(2.0**-149)):
        for m in (4, 16, 17, 64):
            kept = nofm.mask(torch.full((3, m), value), f"2:{m}")
            assert kept.tolist() == [[True, True] + [False] * (m - 2)] * 3


def test_the_largest_equal_weights_are_never_more_than_n_as_in_the_papers_equation():
    # Eq. 2 keeps every |w| >= xi, xi the N-th largest: on this group that is all four.
    weight = torch.tensor([[0.5, -0.5, 0.5, -0.5]])
    xi = weight.abs().sort(dim=-1, descending=True).values[:, 1:2]
    assert (weight.abs() >= xi).sum() == 4
    assert nofm.mask(weight, "2:4").tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1, -2, "flat"])
@pytest.mark.parametrize("pattern", ["2:4", "3:7", "5:24"])
def test_a_convolution_along_every_axis_is_the_oracle_row_by_row(pattern: str, axis: int | str):
    weight = nasty_weight(12, 10, 9, 7)
    kept = nofm.mask(weight, pattern, axis=axis, pad=True)
    assert_same_mask(kept, reference.mask(weight, Grouping(Pattern(pattern), axis, pad=True)), weight)
    n, m = Pattern(pattern).n, Pattern(pattern).m
    rows, kept_rows = (x.flatten(1) if axis == "flat" else x.movedim(axis, -1) for x in (weight, kept))
    for start in range(0, rows.shape[-1], m):
        group = rows[..., start : start + m]
        assert_same_mask(kept_rows[..., start : start + m], oracle_mask(group, n), group)


def test_the_slow_twin_agrees_on_what_has_no_place_in_a_weight():
    # `nofm.mask` refuses these; a layer's forward meets them before anyone has looked, and must still keep N.
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -1.0, 2.0**-149, 3.4e38])
    w_GM = torch.cartesian_prod(*[special] * 4)
    for n in (1, 2, 3):
        grouping = Grouping(Pattern(f"{n}:4"))
        kept = grouping.mask(w_GM)
        assert (kept.sum(-1) == n).all()
        assert torch.equal(kept, reference.mask(w_GM, grouping))
