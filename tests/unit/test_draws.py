"""Draws by a hash: SplitMix64 to the bit, normal and even numbers, and nothing in common between steps, layers, seeds and places."""

from __future__ import annotations

import hashlib
import itertools
import math

import pytest
import torch
from torch import Tensor

from nofm.methods.draws import _mixed_, draw

MANY = torch.Size([400, 500])
SIGMAS = 5  # that a sample may be away from what is expected


def split_mix(state: int, count: int) -> list[int]:
    """SplitMix64 with Python's whole numbers, which know no overflow."""
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        found.append(z ^ (z >> 31))
    return found


def signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def test_the_oracle_is_split_mix():
    """The first numbers of the generator that starts at 1234567, as they are published."""
    assert split_mix(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("state", [0, 1, 1234567, 2**63 - 1, 2**63, 2**64 - 1])
def test_the_hash_is_split_mix(state):
    states = [signed((state + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in range(64)]
    assert _mixed_(torch.tensor(states)).tolist() == [signed(bits) for bits in split_mix(state, 64)]


def test_numbers_follow_from_the_bits():
    """Of the place (1, 2) of a weight of three columns, in step 7 of seed 3."""
    key = int.from_bytes(hashlib.blake2b(b"3 layer.weight", digest_size=8).digest(), "little")
    begin = split_mix((key + 6 * 0x9E3779B97F4A7C15) % 2**64, 1)[0]  # the oracle adds the seventh itself
    bits = split_mix((begin - 0x9E3779B97F4A7C15) % 2**64, 6)[5]
    drawn = draw(3, "layer.weight", torch.tensor(7), torch.Size([2, 3]))
    assert drawn.uniform[1, 2].item() == (bits >> 40) / 2**24
    halves = [torch.special.ndtri(torch.tensor(((bits >> shift) % 2**16 + 0.5) / 2**16, dtype=torch.float64)) for shift in (0, 16)]
    assert drawn.normal[1, 2].item() == pytest.approx(sum(halves).item() / 2**0.5, rel=1e-4)


def normal_parts(x: Tensor) -> dict[str, tuple[Tensor, float, float]]:
    """By name: numbers whose mean is to be looked at, what it should be, and the standard deviation of one."""
    parts: dict[str, tuple[Tensor, float, float]] = {f"x^{k}": (x**k, float(mean), var**0.5) for k, mean, var in MOMENTS}
    for z in (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0):
        below = (1 + math.erf(z / 2**0.5)) / 2
        parts[f"below {z}"] = ((x < z).double(), below, (below * (1 - below)) ** 0.5)
    return parts


# k, E[x^k] and Var[x^k] of the normal distribution
MOMENTS = ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170))


def assert_mean(name: str, x: Tensor, mean: float, sd: float) -> None:
    found = x.double().mean().item()
    assert abs(found - mean) < SIGMAS * sd / x.numel() ** 0.5, f"{name}: {found}, not {mean}"


@pytest.mark.parametrize("number", [1, 2, 1_000_000])
def test_the_noise_is_normal(number):
    for name, part in normal_parts(draw(0, "layer.weight", torch.tensor(number), MANY).normal.double()).items():
        assert_mean(name, *part)


def test_the_noise_of_one_place_over_steps_is_normal():
    noise = torch.stack([draw(0, "layer.weight", torch.tensor(number), torch.Size([8])).normal for number in range(4000)])
    for name, part in normal_parts(noise.double()).items():
        assert_mean(name, *part)


def test_the_other_number_is_even():
    uniform = draw(0, "layer.weight", torch.tensor(1), MANY).uniform
    assert 0 <= uniform.min() < uniform.max() < 1
    for k in range(16):
        assert_mean(f"bin {k}", (uniform * 16).floor() == k, 1 / 16, (15 / 256) ** 0.5)


def test_nothing_is_shared_between_steps_layers_seeds_and_places():
    first = draw(0, "a.weight", torch.tensor(5), MANY)
    others = {
        "the next step": draw(0, "a.weight", torch.tensor(6), MANY).normal,
        "a step far away": draw(0, "a.weight", torch.tensor(100_005), MANY).normal,
        "another layer": draw(0, "b.weight", torch.tensor(5), MANY).normal,
        "another seed": draw(1, "a.weight", torch.tensor(5), MANY).normal,
        "the next place": first.normal.roll(1),
        "the next row": first.normal.roll(1, 0),
        "the choice of places": (first.uniform - 0.5) * 12**0.5,
    }
    for (one, x), (two, y) in itertools.combinations({"itself": first.normal, **others}.items(), 2):
        assert_mean(f"{one} and {two}", x * y, 0, 1)
        assert_mean(f"squares of {one} and {two}", (x**2 - 1) * (y**2 - 1), 0, 2)
    assert torch.equal(first.normal, draw(0, "a.weight", torch.tensor(5), MANY).normal)


def test_a_draw_leaves_torchs_chance_and_the_number_alone():
    before, number = torch.get_rng_state(), torch.tensor(5)
    draw(0, "layer.weight", number, MANY)
    assert torch.equal(before, torch.get_rng_state())
    assert number.item() == 5
