"""Budgets of layers: by hand, against the definition of ERK, and the sums that must be exact."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nofm import OptimizerError
from nofm.methods.budget import allocate, shares
from nofm.methods.options import check_share, check_whole

BY_HAND = {
    "uniform": ([(4, 4), (4, 12)], 0.75, "uniform", [4, 12]),
    "uniform, a rest goes to the larger loss": ([(1, 7), (1, 8)], 0.5, "uniform", [4, 4]),  # 8 of 15: 3.73 and 4.27
    "uniform, equal losses: the first": ([(1, 3), (1, 3), (1, 3)], 0.5, "uniform", [2, 1, 1]),  # round(4.5) = 4: 1.33 each
    "erk": ([(4, 4), (4, 12)], 0.75, "erk", [5, 11]),  # 16 by 8 to 16: 5.33 and 10.67
    "erk, kernels count": ([(8, 8, 3, 3), (8, 8, 1, 1)], 0.85, "erk", [53, 43]),  # 96 by 22 to 18: 52.8 and 43.2
    "erk, a full layer": ([(2, 2), (20, 20)], 0.5, "erk", [4, 198]),  # 202 by 4 to 40: 18.4 and 183.6; the first has only 4
    "erk, two full one after the other": ([(2, 2), (6, 6), (20, 20)], 0.25, "erk", [4, 36, 290]),
    "one each": ([(1, 100), (1, 1), (1, 1)], 0.95, "uniform", [3, 1, 1]),  # 4.9, 0.05, 0.05
}


@pytest.mark.parametrize(("shapes", "sparsity", "allocation", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_by_hand(shapes, sparsity, allocation, expected):
    assert allocate(shapes, sparsity, allocation) == expected


shapes = st.lists(st.lists(st.integers(1, 12), min_size=2, max_size=4), min_size=1, max_size=8)


@settings(deadline=None, derandomize=True)
@given(shapes, st.floats(0.01, 0.99), st.sampled_from(["uniform", "erk"]))
def test_budgets_add_up_and_follow_their_rule(shapes, sparsity, allocation):
    sizes = [math.prod(shape) for shape in shapes]
    total = round((1 - sparsity) * sum(sizes))
    assume(total >= len(shapes))
    counts = allocate(shapes, sparsity, allocation)
    assert sum(counts) == total
    assert all(1 <= count <= size for count, size in zip(counts, sizes, strict=True))
    # Layers that are neither full nor at the least have one factor in common, up to the rounding of each.
    parts = sizes if allocation == "uniform" else [sum(shape) for shape in shapes]
    between = [(c, p) for c, p, size in zip(counts, parts, sizes, strict=True) if 1 < c < size]
    slack = 1 + sum(c == 1 for c in counts)  # a least of one is taken from the others
    for count, part in between:
        for other, its_part in between:
            assert (count - slack) / part <= (other + slack) / its_part


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 20)), min_size=1, max_size=8), st.integers(0, 160))
def test_shares_fit_and_add_up(layers, total):
    parts, room = [part for part, _ in layers], [most for _, most in layers]
    assume(total <= sum(room))
    counts = shares(total, parts, room)
    assert sum(counts) == total
    assert all(0 <= count <= most for count, most in zip(counts, room, strict=True))


SHARES = {
    "in proportion": (6, [1.0, 2.0], [9, 9], [2, 4]),
    "what does not fit goes on": (6, [1.0, 2.0, 3.0], [9, 9, 1], [2, 3, 1]),  # 5 by 1 to 2: 1.67 and 3.33
    "nothing to those without a part": (4, [0.0, 1.0], [9, 9], [0, 4]),
    "to those without a part only what fits nowhere else": (4, [0.0, 1.0], [9, 3], [1, 3]),
    "no parts at all: by room": (3, [0.0, 0.0], [2, 4], [1, 2]),
    "nothing": (0, [1.0, 1.0], [2, 2], [0, 0]),
    "no room": (0, [1.0, 1.0], [0, 0], [0, 0]),
}


@pytest.mark.parametrize(("total", "parts", "room", "expected"), SHARES.values(), ids=SHARES)
def test_shares_by_hand(total, parts, room, expected):
    assert shares(total, parts, room) == expected


REFUSED = {
    "dense": (lambda: allocate([(2, 2)], 0.0, "erk"), "sparsity=0.0 must be 0 < sparsity < 1"),
    "empty": (lambda: allocate([(2, 2)], 1, "erk"), "sparsity=1 must be 0 < sparsity < 1"),
    "a word": (lambda: check_share("drop", "0.3"), "drop='0.3' must be 0 < drop < 1"),
    "a truth": (lambda: check_share("drop", True), "drop=True must be 0 < drop < 1"),
    "not a number": (lambda: check_share("drop", math.nan), "drop=nan must be 0 < drop < 1"),
    "allocation": (lambda: allocate([(2, 2)], 0.5, "er"), "allocation='er' is not one of 'uniform', 'erk'"),
    "fewer weights than layers": (lambda: allocate([(2, 2)] * 3, 0.9, "erk"), "sparsity=0.9 keeps 1 weights of 3 layers"),
    "no step": (lambda: check_whole("every", 0, least=1), "every=0 must be a whole number, 1 or more"),
    "a broken step": (lambda: check_whole("every", 1.5), "every=1.5 must be a whole number, 0 or more"),
    "a true step": (lambda: check_whole("every", True), "every=True must be a whole number"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(make, message):
    with pytest.raises(OptimizerError, match=message):
        make()
