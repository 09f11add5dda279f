"""K1 and K2 as laws that hold for any weight: hypothesis looks for one that breaks them.

The laws need no oracle, so they would also catch a mistake that the oracle shares with the code.
"""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nofm
from nofm import Pattern
from nofm.masks import Grouping
from nofm.ste import select

checked = settings(deadline=None, derandomize=True, max_examples=200)

any_finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
often_tied = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, 2.0**-149, -(2.0**-149)])
far_from_the_ends = st.floats(min_value=2.0**-60, max_value=2.0**60, width=32).flatmap(lambda x: st.sampled_from([x, -x, 0.0]))


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    m = draw(st.integers(1, 24))
    return Pattern(f"{draw(st.integers(1, m))}:{m}")


@st.composite
def weights_and_patterns(draw: st.DrawFn, numbers: st.SearchStrategy[float] = any_finite | often_tied) -> tuple[Tensor, Pattern]:
    """A matrix of whole groups."""
    pattern = draw(patterns())
    rows, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    size = rows * groups * pattern.m
    return torch.tensor(draw(st.lists(numbers, min_size=size, max_size=size))).view(rows, groups * pattern.m), pattern


def in_groups(x: Tensor, pattern: Pattern) -> Tensor:
    return x.reshape(-1, pattern.m)


@checked
@given(weights_and_patterns())
def test_exactly_n_of_every_m_and_none_of_them_smaller_than_one_pruned(case: tuple[Tensor, Pattern]):
    weight, pattern = case
    for group, kept in zip(in_groups(weight, pattern), in_groups(nofm.mask(weight, pattern), pattern), strict=True):
        inside, outside = group[kept].abs().tolist(), group[~kept].abs().tolist()
        assert len(inside) == pattern.n
        assert len(outside) == pattern.m - pattern.n
        assert not outside or min(inside) >= max(outside)


@checked
@given(weights_and_patterns())
def test_among_equals_the_kept_ones_come_first(case: tuple[Tensor, Pattern]):
    weight, pattern = case
    for group, kept in zip(in_groups(weight, pattern), in_groups(nofm.mask(weight, pattern), pattern), strict=True):
        for magnitude in group.abs().unique():
            among_equals = kept[group.abs() == magnitude].tolist()
            assert among_equals == sorted(among_equals, reverse=True)


@checked
@given(weights_and_patterns())
def test_masking_a_masked_weight_changes_nothing(case: tuple[Tensor, Pattern]):
    weight, pattern = case
    once = select(weight, nofm.mask(weight, pattern))
    again = nofm.mask(once, pattern)
    assert again[once != 0].all()
    assert torch.equal(select(once, again) != 0, once != 0)
    assert torch.equal(select(once, again), once)


@checked
@given(weights_and_patterns(), st.randoms(use_true_random=False))
def test_signs_do_not_matter(case: tuple[Tensor, Pattern], rng: random.Random):
    weight, pattern = case
    sign = torch.tensor([rng.choice([-1.0, 1.0]) for _ in range(weight.numel())]).view(weight.shape)
    assert torch.equal(nofm.mask(weight * sign, pattern), nofm.mask(weight, pattern))


@checked
@given(weights_and_patterns(far_from_the_ends), st.integers(-60, 60))
def test_a_power_of_two_does_not_matter(case: tuple[Tensor, Pattern], exponent: int):
    weight, pattern = case
    assert torch.equal(nofm.mask(weight * 2.0**exponent, pattern), nofm.mask(weight, pattern))


@checked
@given(weights_and_patterns(), st.randoms(use_true_random=False))
def test_permuting_groups_permutes_masks(case: tuple[Tensor, Pattern], rng: random.Random):
    weight, pattern = case
    w_GM = in_groups(weight, pattern)
    order = rng.sample(range(len(w_GM)), len(w_GM))
    assert torch.equal(nofm.mask(w_GM[order], pattern), in_groups(nofm.mask(weight, pattern), pattern)[order])


@checked
@given(weights_and_patterns(), st.data())
def test_a_larger_weight_is_never_pruned_for_having_grown(case: tuple[Tensor, Pattern], data: st.DataObject):
    weight, pattern = case
    kept = nofm.mask(weight, pattern)
    grown = weight.clone()
    at = data.draw(st.sampled_from(kept.nonzero().tolist()))
    grown[tuple(at)] = torch.finfo(torch.float32).max
    assert nofm.mask(grown, pattern)[tuple(at)]


# ---- K2 ----


@checked
@given(patterns(), st.integers(1, 40), st.integers(1, 4), st.data())
def test_a_group_never_straddles_rows(pattern: Pattern, size: int, rows: int, data: st.DataObject):
    # Rows that do not divide, so that a group that ran on into the next row would show.
    numbers = st.lists(any_finite | often_tied, min_size=rows * size, max_size=rows * size)
    weight = torch.tensor(data.draw(numbers)).view(rows, size)
    row_by_row = torch.stack([nofm.mask(row, pattern, axis=0, pad=True) for row in weight])
    assert torch.equal(nofm.mask(weight, pattern, axis=1, pad=True), row_by_row)
    assert torch.equal(nofm.mask(weight, pattern, axis="flat", pad=True), row_by_row)
    assert torch.equal(nofm.mask(weight.T, pattern, axis=0, pad=True), row_by_row.T)
    assert (row_by_row.sum(-1) == pattern.kept(size)).all()


@checked
@given(patterns(), st.lists(st.integers(0, 7), min_size=1, max_size=5), st.data())
def test_split_and_join_are_inverse_and_counts_are_what_the_mask_shows(pattern: Pattern, sizes: list[int], data: st.DataObject):
    axes = [*range(-len(sizes), len(sizes)), *(["flat"] if len(sizes) > 1 else [])]
    grouping = Grouping(pattern, data.draw(st.sampled_from(axes)), pad=True)
    shape = torch.Size(sizes)
    x = torch.arange(1.0, shape.numel() + 1).view(shape)
    x_GM = grouping.split(x, fill=-1)
    assert x_GM.shape[-1] == pattern.m
    assert torch.equal(grouping.join(x_GM, shape), x)
    assert sorted(x_GM[x_GM != -1].tolist()) == sorted(x.flatten().tolist())  # the rest is filling
    assert x_GM[..., 0].numel() == grouping.groups(shape)
    kept = nofm.mask(x, pattern, grouping.axis, pad=True)
    assert kept.shape == shape
    assert kept.sum().item() == grouping.kept(shape)
    assert grouping.violations(select(x, kept)).item() == 0
