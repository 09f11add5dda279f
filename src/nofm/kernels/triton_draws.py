"""A Triton kernel that draws random numbers by a hash: what `methods/draws.py` does with some 35 operations on 64-bit integers, in one.

Bit for bit the same: whole numbers modulo 2^64, two look-ups, and one sum and one product of fp32, which nothing can contract.
"""

# Another language in Python's clothes: it has no types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["draw_kernel"]

_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_ROOT = tl.constexpr(0.5**0.5)
_UNIT = tl.constexpr(2.0**-24)


@triton.jit
def _mixed(x):
    """SplitMix64's output function. `x` has no sign, so zeros are shifted in."""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["key"])
def draw_kernel(number, quantiles, normal, uniform, key, size, B: tl.constexpr):
    """Two numbers for each of `size` places. `number`, of the step, is on the device; `key` is a hash of seed and layer."""
    place = tl.program_id(0) * B + tl.arange(0, B)
    there = place < size
    begin = _mixed(tl.load(number).to(tl.uint64) * _STEP + key.to(tl.uint64))
    bits = _mixed(place.to(tl.uint64) * _STEP + begin)
    one = tl.load(quantiles + (bits & 0xFFFF).to(tl.int32), mask=there, other=0.0)
    other = tl.load(quantiles + ((bits >> 16) & 0xFFFF).to(tl.int32), mask=there, other=0.0)
    tl.store(normal + place, (one + other) * _ROOT, mask=there)
    tl.store(uniform + place, ((bits >> 40) & 0xFFFFFF).to(tl.int32).to(tl.float32) * _UNIT, mask=there)
