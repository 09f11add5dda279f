"""`nofm.mask` and `Grouping` at their edges: what is refused and in which words, padding, axes, sizes, counts.

Which weights a mask keeps is contract K1, and is checked in tests/contract.
"""

from __future__ import annotations

import re

import pytest
import torch

import nofm
from nofm import NonFiniteWeightError, Pattern, PatternError
from nofm.masks import Grouping, check_finite, magnitude_key

# ---- what is refused ----


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_a_non_finite_weight_is_named_with_its_parameter_and_index(dtype: torch.dtype, value: float):
    weight = torch.ones(4, 8, 2)
    weight[2, 5, 1] = weight[3, 0, 0] = value
    with pytest.raises(NonFiniteWeightError) as caught:
        nofm.mask(weight.to(dtype), "2:4", name="layer4.0.conv1.weight")
    error = caught.value
    assert (error.parameter, error.index, error.step) == ("layer4.0.conv1.weight", (2, 5, 1), None)
    assert str(error.value) == str(value)
    assert str(error).startswith(f"layer4.0.conv1.weight[2, 5, 1] is {value}; an N:M mask needs finite weights")


def test_the_index_is_the_first_in_logical_order_whatever_the_memory_layout():
    weight = torch.ones(8, 8)
    weight[1, 6] = weight[2, 0] = torch.nan
    for same in (weight, weight.T.contiguous().T, weight.requires_grad_()):
        with pytest.raises(NonFiniteWeightError, match=re.escape("weight[1, 6] is nan;")):
            nofm.mask(same, "2:4")


def test_check_finite_names_the_step_and_passes_what_is_finite():
    check_finite(torch.tensor([0.0, -0.0, 3.4e38, -3.4e38, 2.0**-149]), "w", step=3)
    check_finite(torch.empty(0), "w")
    check_finite(torch.empty(3, device="meta"), "w")
    with pytest.raises(NonFiniteWeightError, match=re.escape("w[1] is inf after step 3;")) as caught:
        check_finite(torch.tensor([0.0, torch.inf]), "w", step=3)
    assert caught.value.step == 3


# The last ones are floating-point to torch, but no sign followed by a magnitude: their bits do not order as their magnitudes do.
NO_WEIGHTS = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64]
NO_WEIGHTS += [torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2]


@pytest.mark.parametrize("dtype", NO_WEIGHTS, ids=str)
def test_a_dtype_that_holds_no_weights_is_refused(dtype: torch.dtype):
    weight = torch.zeros(4, 4 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    with pytest.raises(PatternError, match=f"made from floating-point weights .*, got {re.escape(str(dtype))}$"):
        nofm.mask(weight, "2:4")


@pytest.mark.parametrize(
    ("shape", "pattern", "axis", "message"),
    [
        ((8, 6), "2:4", 1, "2:4 needs axis 1 divisible by 4, got 6; pass pad=True for a short last group"),
        ((6, 8), "2:4", 0, "2:4 needs axis 0 divisible by 4, got 6; pass"),
        ((8, 6), "2:4", -1, "2:4 needs axis -1 divisible by 4, got 6; pass"),
        ((8, 3), "1:16", 1, "1:16 needs axis 1 divisible by 16, got 3; pass"),
        ((8, 3, 3, 3), "2:4", "flat", "2:4 needs the flattened row divisible by 4, got 27; pass"),
        ((8, 8), "2:4", 2, "axis 2 does not exist in a weight of shape (8, 8)"),
        ((8, 8), "2:4", -3, "axis -3 does not exist in a weight of shape (8, 8)"),
        ((8,), "2:4", 1, "axis 1 does not exist in a weight of shape (8,)"),
        ((), "2:4", 0, "axis 0 does not exist in a weight of shape ()"),
        ((8, 8), "2:4", "rows", "axis 'rows' does not exist in a weight of shape (8, 8); give a dimension, or \"flat\""),
        ((8, 8), "2:4", None, "axis None does not exist"),
        ((8, 8), "2:4", True, "axis True does not exist"),
        ((8, 8), "2:4", 1.0, "axis 1.0 does not exist"),
        ((8,), "2:4", "flat", "flat groups need a weight of at least 2 dimensions, got shape (8,)"),
        ((8, 8), "2-4", 1, '"2:4"?'),
        ((8, 8), None, 1, "None is no pattern"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused_and_the_sizes_are_named(shape: tuple[int, ...], pattern, axis, message: str):
    with pytest.raises(PatternError, match=re.escape(message)):
        nofm.mask(torch.ones(shape), pattern, axis)


# ---- padding ----


@pytest.mark.parametrize(
    ("pattern", "row", "kept"),
    [
        ("2:4", [9, 1, 8, 2, 1], [1, 0, 1, 0, 1]),
        ("2:4", [9, 1, 8, 2, 0, 0], [1, 0, 1, 0, 1, 1]),  # zeros are kept before padding
        ("2:4", [9, 1, 8, 2, 1, 2, 3], [1, 0, 1, 0, 0, 1, 1]),
        ("3:4", [1, 2], [1, 1]),
        ("1:4", [0, -0.0, 0], [1, 0, 0]),
        ("2:20", [0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [1, 1] + [0] * 15),
        ("4:20", [0, 0, 0], [1, 1, 1]),
    ],
)
def test_a_short_last_group_keeps_n_or_all_it_has(pattern: str, row: list[float], kept: list[int]):
    weight = torch.tensor(row, dtype=torch.float32)
    expected = torch.tensor(kept, dtype=torch.bool)
    assert torch.equal(nofm.mask(weight, pattern, axis=0, pad=True), expected)
    assert torch.equal(nofm.mask(weight.repeat(3, 1), pattern, pad=True), expected.repeat(3, 1))
    with pytest.raises(PatternError, match="divisible"):
        nofm.mask(weight, pattern, axis=0)


def test_padding_does_nothing_where_groups_are_whole():
    weight = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(nofm.mask(weight, "2:4", pad=True), nofm.mask(weight, "2:4"))


# ---- axes and sizes ----


def test_where_groups_lie():
    # Weights grow with their index, so the later half of each group is kept; what a group is shows in the mask.
    weight = torch.arange(1.0, 33).view(4, 4, 2)
    last_half = torch.tensor([False, False, True, True])
    assert torch.equal(nofm.mask(weight, "2:4"), last_half.view(1, 4, 1).expand(4, 4, 2))
    assert torch.equal(nofm.mask(weight, "2:4", axis=-2), last_half.view(1, 4, 1).expand(4, 4, 2))
    assert torch.equal(nofm.mask(weight, "2:4", axis=0), last_half.view(4, 1, 1).expand(4, 4, 2))
    assert torch.equal(nofm.mask(weight, "1:2", axis=2), torch.tensor([False, True]).expand(4, 4, 2))
    flat = torch.tensor([[False, False], [True, True]]).repeat(2, 1)  # the kernel positions run fastest
    assert torch.equal(nofm.mask(weight, "2:4", axis="flat"), flat.expand(4, 4, 2))
    assert nofm.mask(torch.arange(4.0), "2:4", axis=0).tolist() == last_half.tolist()


@pytest.mark.parametrize("pattern", ["2:4", "4:32"])
@pytest.mark.parametrize("axis", [0, 1, "flat"])
@pytest.mark.parametrize("shape", [(0, 0), (0, 32), (32, 0), (0, 32, 3), (32, 0, 3), (32, 32, 0)], ids=str)
def test_nothing_in_nothing_out(shape: tuple[int, ...], axis: int | str, pattern: str):
    kept = nofm.mask(torch.empty(shape), pattern, axis)
    assert kept.dtype == torch.bool
    assert kept.shape == shape
    grouping = Grouping(Pattern(pattern), axis)
    assert grouping.groups(kept.shape) == grouping.kept(kept.shape) == 0
    assert grouping.violations(torch.empty(shape)).item() == 0


@pytest.mark.parametrize(
    ("shape", "pattern", "axis", "pad", "groups", "kept"),
    [
        ((8, 16), "2:4", 1, False, 32, 64),
        ((8, 16), "2:4", 0, False, 32, 64),
        ((64, 32, 3, 3), "1:16", 1, False, 1152, 1152),
        ((64, 32, 3, 3), "2:4", "flat", False, 4608, 9216),
        ((64, 3, 3, 3), "2:4", "flat", True, 64 * 7, 64 * (6 * 2 + 2)),
        ((8, 18), "3:4", 1, True, 40, 8 * (4 * 3 + 2)),
        ((5, 3), "4:4", 1, True, 5, 15),
    ],
)
def test_counts_of_a_grouping(shape: tuple[int, ...], pattern: str, axis: int | str, pad: bool, groups: int, kept: int):
    grouping = Grouping(Pattern(pattern), axis, pad)
    size = torch.Size(shape)
    assert grouping.groups(size) == groups
    assert grouping.kept(size) == kept
    assert nofm.mask(torch.randn(shape), pattern, axis, pad=pad).sum().item() == kept


def test_a_grouping_is_a_value():
    assert Grouping(Pattern("2:4")) == Grouping(Pattern("2:4"), 1, False)
    assert len({Grouping(Pattern("2:4"), axis) for axis in (0, 1, "flat", 1)}) == 3


# ---- counting what breaks a pattern ----


def test_violations_count_groups_with_more_than_n_non_zero_weights():
    weight = torch.tensor(
        [
            [1.0, 0, 0, 2, 0, 0, 0, 0],  # 2 and 0: both fine
            [1.0, 3, 0, 2, 1, 1, 1, 1],  # 3 and 4: both too many
            [0.0, 0, 1, 1, 1, 1, 0, 0],  # 2 and 2; four in a row, but not in one group
            [-1.0, -0.0, -1, -(2.0**-149), 0, 0, 0, 1],  # a denormal is not zero, -0 is; 3 and 1
        ]
    )
    count = Grouping(Pattern("2:4")).violations(weight)
    assert count.shape == ()
    assert count.item() == 3
    assert Grouping(Pattern("3:4")).violations(weight).item() == 1
    assert Grouping(Pattern("1:4")).violations(weight).item() == 6
    assert Grouping(Pattern("1:2"), axis=0).violations(weight).item() == 4  # columns 0 and 3, then 2 and 3
    assert Grouping(Pattern("2:3"), pad=True).violations(weight).item() == 2
    assert Grouping(Pattern("1:4")).violations(torch.tensor([[torch.nan, torch.inf, 0, 0]])).item() == 1


# ---- the integer that stands for a magnitude ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_magnitude_keys_order_as_magnitudes_do(dtype: torch.dtype):
    info = torch.finfo(dtype)
    tiny = torch.tensor(1, dtype={8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[dtype.itemsize]).view(dtype)
    ascending = [0.0, tiny.item(), info.tiny, 0.5, 1.0, 1 + info.eps, info.max, float("inf"), float("nan")]
    positive = torch.tensor(ascending, dtype=torch.float64).to(dtype)
    keys = magnitude_key(positive).tolist()
    assert keys[0] == 0
    assert keys == sorted(set(keys))
    negative = torch.tensor([-x for x in ascending], dtype=torch.float64).to(dtype)
    assert magnitude_key(negative).tolist() == keys
