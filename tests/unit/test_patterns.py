"""`Pattern` is a value: one spelling, parsed once, never half right.

A pattern that is read wrongly trains the wrong network without a sign of it, so every text that is not exactly "N:M" has to be
refused, with a message that says what is allowed. The tables below are the near misses people write.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import nofm
from nofm import Pattern, PatternError

ALLOWED = 'a pattern is "N:M" with whole numbers 1 <= N <= M <= 99999, such as "2:4": keep N of every M consecutive weights'


def test_every_n_and_m_up_to_64():
    for m in range(1, 65):
        for n in range(1, m + 1):
            pattern = Pattern(f"{n}:{m}")
            assert (pattern.n, pattern.m) == (n, m)
            assert pattern.density == n / m
            assert str(pattern) == f"{n}:{m}"
            assert repr(pattern) == f'Pattern("{n}:{m}")'
            assert eval(repr(pattern)) == pattern


@pytest.mark.parametrize("text", ["1:1", "1:256", "128:256", "10:99999", "99999:99999"])
def test_large_groups(text: str):
    assert str(Pattern(text)) == text


SUGGESTED = {
    "2-4": "2:4",
    "4:2": "2:4",
    "2:4 ": "2:4",
    " 2:4": "2:4",
    "2:4\n": "2:4",
    "2 : 4": "2:4",
    "2/4": "2:4",
    "2,4": "2:4",
    "2 of 4": "2:4",
    "2::4": "2:4",
    "02:4": "2:4",
    "2:04": "2:4",
    "-1:4": "1:4",
    "+2:4": "2:4",
    "n2m4": "2:4",
    "2\uff1a4": "2:4",  # a full-width colon
}


@pytest.mark.parametrize(("text", "meant"), SUGGESTED.items(), ids=map(ascii, SUGGESTED))
def test_a_near_miss_is_refused_and_the_pattern_that_was_meant_is_named(text: str, meant: str):
    with pytest.raises(PatternError) as caught:
        Pattern(text)
    message = str(caught.value)
    assert message.startswith(repr(text))
    assert ALLOWED in message
    assert message.endswith(f'; did you mean "{meant}"?')
    assert Pattern(meant)  # the advice works


REFUSED = [
    "",
    "2",
    ":",
    "2:",
    ":4",
    "0:4",
    "0:0",
    "2:0",
    "4-2",
    "2:4:1",
    "2.0:4",
    "2:4.0",
    "2e0:4",
    "1_0:1_6",
    "2:100000",
    "1:" + "9" * 5000,  # int() raises an error of its own at this length
    "\u0662:\u0664",  # Arabic-Indic digits, which \d and int() would take
    "\uff12:\uff14",  # full-width digits
    "two:four",
    2.0,
    2,
    None,
    True,
    (2, 4),
    [2, 4],
    {2: 4},
    b"2:4",
    Pattern,
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: ascii(value)[:20])
def test_anything_else_is_refused_and_what_is_allowed_is_said(value: object):
    with pytest.raises(PatternError) as caught:
        Pattern(value)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(repr(value))
    assert ALLOWED in message


@pytest.mark.parametrize(("text", "why"), [("0:4", "keeps nothing"), ("5:4", "keeps more than it has"), (2.0, "is no pattern")])
def test_the_message_says_what_is_wrong(text: object, why: str):
    with pytest.raises(PatternError, match=why):
        Pattern(text)  # type: ignore[arg-type]


def test_no_suggestion_where_there_is_nothing_to_suggest():
    for text in ("", "0:4", "4-2", "2:4:1", "2:100000"):
        with pytest.raises(PatternError) as caught:
            Pattern(text)
        assert "did you mean" not in str(caught.value)


def test_the_error_is_a_value_error_of_the_family():
    assert issubclass(PatternError, nofm.NofmError)
    assert issubclass(PatternError, ValueError)


def test_equal_by_value_and_hashable():
    assert Pattern("2:4") == Pattern("2:4")
    assert Pattern("2:4") != Pattern("1:4")
    assert Pattern("2:4") != Pattern("2:8")
    assert Pattern("2:4") != Pattern("1:2")  # the same density is not the same pattern
    assert Pattern("2:4") != "2:4"  # nothing below the edge compares with text
    assert len({Pattern("2:4"), Pattern("2:4"), Pattern("4:8")}) == 2
    assert {Pattern("2:4"): "found"}[Pattern("2:4")] == "found"
    assert sorted([Pattern("2:8"), Pattern("1:16"), Pattern("2:4")]) == [Pattern("1:16"), Pattern("2:4"), Pattern("2:8")]


@pytest.mark.parametrize("attribute", ["n", "m", "density", "anything_else"])
def test_frozen(attribute: str):
    pattern = Pattern("2:4")
    with pytest.raises((AttributeError, TypeError)):
        setattr(pattern, attribute, 3)
    with pytest.raises((AttributeError, TypeError)):
        delattr(pattern, attribute)
    assert pattern == Pattern("2:4")


COPIES = {
    "Pattern": Pattern,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {protocol}": lambda p, protocol=protocol: pickle.loads(pickle.dumps(p, protocol)) for protocol in range(2, 6)},
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_is_the_same_value(duplicate):
    pattern = Pattern("2:4")
    twin = duplicate(pattern)
    assert type(twin) is Pattern
    assert twin == pattern
    assert hash(twin) == hash(pattern)
    assert (twin.n, twin.m) == (2, 4)


@pytest.mark.parametrize(
    ("pattern", "size", "divides", "kept"),
    [
        ("2:4", 0, True, 0),
        ("2:4", 4, True, 2),
        ("2:4", 12, True, 6),
        ("2:4", 13, False, 7),
        ("2:4", 14, False, 8),
        ("2:4", 15, False, 8),
        ("3:4", 2, False, 2),
        ("1:16", 15, False, 1),
        ("1:1", 7, True, 7),
        ("7:7", 14, True, 14),
    ],
)
def test_divides_and_kept(pattern: str, size: int, divides: bool, kept: int):
    assert Pattern(pattern).divides(size) is divides
    assert Pattern(pattern).kept(size) == kept


@pytest.mark.parametrize(
    ("pattern", "axis", "expected"), [("2:4", 1, True), ("1:4", 1, False), ("1:2", 0, False), ("2:4", "flat", True), ("2:2", 0, True)]
)
def test_is_satisfied(pattern: str, axis: int | str, expected: bool):
    weight = torch.tensor([[1.0, 0.0, 2.0, 0.0], [3.0, 0.0, 0.0, 4.0]])
    assert Pattern(pattern).is_satisfied(weight, axis) is expected


def test_is_satisfied_needs_whole_groups():
    with pytest.raises(PatternError, match="divisible by 3"):
        Pattern("2:3").is_satisfied(torch.zeros(2, 4))


@pytest.mark.parametrize(("shape", "axis"), [((4,), 1), ((4,), "flat"), ((2, 4), 2), ((2, 4), -3), ((), 0)])
def test_is_satisfied_needs_an_axis_that_exists(shape: tuple[int, ...], axis: int | str):
    with pytest.raises(PatternError, match=f"axis {axis!r} does not exist in a weight of shape"):
        Pattern("2:4").is_satisfied(torch.zeros(shape), axis)
