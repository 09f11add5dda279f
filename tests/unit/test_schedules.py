"""Schedules against numbers worked out by hand, and what must hold at their ends."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nofm.schedules import constant, cosine, cubic

BY_HAND = {
    "constant": (constant(7, 0.25), 0.25),
    "cubic, before": (cubic(3, 10, 20, 0.5), 0.0),
    "cubic, half way": (cubic(15, 10, 20, 0.5), 0.5 - 0.5 / 8),  # half of the way is left: its cube is missing
    "cubic, half way from a start": (cubic(15, 10, 20, 0.75, start=0.25), 0.75 - 0.5 / 8),
    "cubic, its last step": (cubic(20, 10, 20, 0.5), 0.5),
    "cubic, one step": (cubic(10, 10, 10, 0.5), 0.5),
    "cubic, before its one step": (cubic(9, 10, 10, 0.5), 0.0),
    "cosine, step 0": (cosine(0, 40, 0.5), 0.5),
    "cosine, a third": (cosine(20, 60, 0.5), 0.375),  # cos 60 degrees = 1/2
    "cosine, half way": (cosine(20, 40, 0.5), 0.25),
    "cosine, its end": (cosine(40, 40, 0.5), 0.0),
    "cosine, after": (cosine(50, 40, 0.5), 0.0),
}


@pytest.mark.parametrize(("value", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_by_hand(value, expected):
    assert math.isclose(value, expected, rel_tol=1e-12, abs_tol=0)


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 100), st.integers(0, 100), st.floats(0, 1), st.integers(0, 250))
def test_shares_move_one_way_and_stay_between_their_ends(begin_at, length, final, number):
    pruned = [cubic(n, begin_at, begin_at + length, final) for n in (number, number + 1)]
    assert 0 <= pruned[0] <= pruned[1] <= final
    rewired = [cosine(n, begin_at + 1, final) for n in (number, number + 1)]
    assert 0 <= rewired[1] <= rewired[0] <= final
