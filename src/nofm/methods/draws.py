"""Random numbers by a hash of seed, layer, step and place, for a method that draws in every step.

A generator is seeded by the host, so a step that seeds one cannot be replayed by a CUDA graph, and a CPU and a GPU draw different numbers.
Here the number of the step is a tensor on the device, and the arithmetic is of whole numbers up to a table that the host has made: the
same numbers everywhere, bit for bit, in a graph or not, and nothing to save but the number of the step.

The hash is SplitMix64 (Steele, Lea & Flood 2014): the places of a weight are the steps of its sequence, which begins at a hash of the
rest. Of the 64 bits of a place, two times 16 look up a normal quantile, whose sum is normal out to six standard deviations, and 24
others are a number between 0 and 1.
"""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import selection

__all__ = ["Drawn", "draw"]


class Drawn(NamedTuple):
    """Two independent numbers for every weight of a layer."""

    normal: Tensor  # of mean 0 and variance 1
    uniform: Tensor  # from 0 to below 1


def draw(seed: int, name: str, number: Tensor, shape: torch.Size) -> Drawn:
    """The numbers of step `number`, a whole number on the device that is to have them, for the weight `name` of this shape."""
    key = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little", signed=True)
    if selection.draws_on(number, shape.numel()):
        return Drawn(*selection.drawn(key, number, _normal_quantiles(number.device), shape))
    begin = _mixed_(number * _STEP + key)
    bits = _mixed_(torch.arange(shape.numel(), device=number.device).view(shape).mul_(_STEP).add_(begin))
    quantiles = _normal_quantiles(number.device)
    normal = (quantiles[bits & 0xFFFF] + quantiles[(bits >> 16) & 0xFFFF]) * 0.5**0.5
    return Drawn(normal, ((bits >> 40) & 0xFFFFFF).float() * 2.0**-24)


def _signed(bits: int) -> int:
    """64 bits as torch's int64 has them; its products are right modulo 2^64."""
    return int.from_bytes(bits.to_bytes(8, "little"), "little", signed=True)


_STEP = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def _mixed_(x: Tensor) -> Tensor:
    """SplitMix64's output function, in place."""
    for shift, factor in _ROUNDS:
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(factor)  # torch shifts the sign in, the hash zeros
    return x


@functools.cache
def _normal_quantiles(device: torch.device) -> Tensor:
    """The normal distribution in 2^16 equally likely numbers, of variance 1."""
    middle = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    quantiles = torch.special.ndtri(middle)
    return (quantiles / quantiles.square().mean().sqrt()).float().to(device)
