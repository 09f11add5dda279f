"""From a weight to its mask: which N of every M consecutive weights are kept.

The order is total, so that a mask is a pure function of the weight: larger magnitude first, then lower index. Magnitudes are
compared as integers (the IEEE bits without the sign), never as floats: integer comparison gives the same answer for every
dtype that holds the same value, with denormals flushed or not, eager or compiled, on every device. Eq. 2 of the paper keeps
every weight `>= xi`, which is more than N when magnitudes tie (0.4 % of all 2:4 groups in bf16); here it is always N.

Shape suffixes: G groups, M weights of a group. A tensor `x_GM` has any leading dimensions in front of these two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import NonFiniteWeightError, PatternError
from .patterns import Pattern, PatternLike
from .plain import plain_number

__all__ = ["Axis", "Grouping", "check_finite", "differing", "keep_top", "largest", "magnitude_key", "mask", "pack", "unpack"]

Axis: TypeAlias = int | Literal["flat"]

# The formats that are a sign bit and then a magnitude: without the sign, their bits order as their magnitudes do. Others do not
# (float8_e8m0fnu has no sign, the fnuz formats write NaN as -0, float4_e2m1fn_x2 has two numbers in a byte).
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
}

# Up to this M every pair of a group is compared (M(M-1)/2 cheap elementwise operations); above, sorting costs less.
_PAIRWISE_MAX_M = 16


@dataclass(frozen=True, slots=True)
class Grouping:
    """A pattern and where its groups lie: along one axis, or ("flat") along all axes after the first, flattened.

    `pad` lets the last group of a row be short, as if filled up with weights that are never kept.
    """

    pattern: Pattern
    axis: Axis = 1
    pad: bool = False

    def row_size(self, shape: torch.Size) -> int:
        """How many consecutive weights a row holds, the row being what is cut into groups."""
        if self.axis == "flat":
            if len(shape) < 2:
                raise PatternError(f"flat groups need a weight of at least 2 dimensions, got shape {tuple(shape)}")
            return shape[1:].numel()
        if type(self.axis) is not int or not -len(shape) <= self.axis < len(shape):
            raise PatternError(f'axis {self.axis!r} does not exist in a weight of shape {tuple(shape)}; give a dimension, or "flat"')
        return shape[self.axis]

    def check(self, shape: torch.Size) -> None:
        """Raise unless this grouping can be laid on a weight of `shape`."""
        size = self.row_size(shape)
        if not (self.pad or self.pattern.divides(size)):
            where = "the flattened row" if self.axis == "flat" else f"axis {self.axis}"
            raise PatternError(
                f"{self.pattern} needs {where} divisible by {self.pattern.m}, got {size}; pass pad=True for a short last group"
            )

    def groups(self, shape: torch.Size) -> int:
        """How many groups a weight of `shape` has."""
        size = self.row_size(shape)
        return 0 if size == 0 else shape.numel() // size * -(-size // self.pattern.m)

    def kept(self, shape: torch.Size) -> int:
        """How many of its weights are kept."""
        size = self.row_size(shape)
        return 0 if size == 0 else shape.numel() // size * self.pattern.kept(size)

    def split(self, x: Tensor, fill: int = 0) -> Tensor:
        """`x` seen as (..., G, M); a short last group is filled up with `fill`."""
        rows = x.flatten(1) if self.axis == "flat" else x.movedim(self.axis, -1)
        short = -rows.shape[-1] % self.pattern.m
        if short:
            rows = F.pad(rows, (0, short), value=fill)
        return rows.unflatten(-1, (rows.shape[-1] // self.pattern.m, self.pattern.m))

    def join(self, x_GM: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `split`."""
        rows = x_GM.flatten(-2)[..., : self.row_size(shape)]
        return rows.reshape(shape) if self.axis == "flat" else rows.movedim(-1, self.axis)

    def mask(self, weight: Tensor) -> Tensor:
        """True where kept. Non-finite weights are not looked for here: Inf and NaN count as the largest magnitudes."""
        key_GM = self.split(magnitude_key(weight), fill=-1)  # below every real key: padding is never kept
        return self.join(keep_top(key_GM, self.pattern.n), weight.shape)

    def violations(self, weight: Tensor) -> Tensor:
        """How many groups hold more than N non-zero weights, as a 0-d tensor."""
        return (self.split(weight != 0).sum(-1) > self.pattern.n).sum()


def mask(weight: Tensor, pattern: PatternLike, axis: Axis = 1, *, pad: bool = False, name: str = "weight") -> Tensor:
    """The mask of `weight`: a bool tensor of its shape, True at exactly N of every M consecutive weights along `axis`.

    `name` is what an error about a non-finite weight calls it. Inside `torch.compile` nobody looks for one.

    >>> mask(torch.tensor([[1.0, -3.0, 2.0, 0.5]]), "2:4")
    tensor([[False,  True,  True, False]])
    """
    grouping = Grouping(Pattern(pattern), plain_number(axis), pad)
    grouping.check(weight.shape)
    kept = grouping.mask(weight)
    if not torch.compiler.is_compiling():  # reading a value would break the graph
        check_finite(weight, name)
    return kept


def magnitude_key(weight: Tensor) -> Tensor:
    """|weight| as integers that order as the magnitudes do: 0 for +-0, then denormals, ..., Inf, and NaN above all."""
    if weight.dtype not in _BITS:
        raise PatternError(f"an N:M mask is made from floating-point weights ({', '.join(map(str, _BITS))}), got {weight.dtype}")
    if not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(weight):
        return _Key.apply(weight.detach())
    bits = weight.detach().view(_BITS[weight.dtype])
    return bits & torch.iinfo(bits.dtype).max


class _Key(torch.autograd.Function):
    """`magnitude_key` under vmap, for torch versions that cannot look at the bits of a batch."""

    @staticmethod
    def forward(weight: Tensor) -> Tensor:
        return magnitude_key(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], weight: Tensor) -> tuple[Tensor, Any]:
        return magnitude_key(weight), in_dims[0]


def keep_top(key_GM: Tensor, n: int) -> Tensor:
    """True at the `n` largest keys of every group, the lower index first among equals."""
    m = key_GM.shape[-1]
    if n == m:
        return torch.ones_like(key_GM, dtype=torch.bool)
    return _keep_by_rank(key_GM, n) if m <= _PAIRWISE_MAX_M else _keep_by_threshold(key_GM, n)


def _keep_by_rank(key_GM: Tensor, n: int) -> Tensor:
    """A weight's rank is the number of weights of its group that go before it."""
    keys = key_GM.unbind(-1)
    ranks = [torch.zeros_like(key, dtype=torch.int8) for key in keys]  # below _PAIRWISE_MAX_M, so a byte is enough
    for j in range(1, len(keys)):
        for i in range(j):
            i_first = keys[i] >= keys[j]  # i < j, so a tie goes to i
            ranks[j] = ranks[j] + i_first
            ranks[i] = ranks[i] + ~i_first
    return torch.stack([rank < n for rank in ranks], dim=-1)


def _keep_by_threshold(key_GM: Tensor, n: int) -> Tensor:
    """All above the n-th largest key, and the first of those equal to it until there are n."""
    threshold = _nth_largest(key_GM, n)
    above, equal = key_GM > threshold, key_GM == threshold
    room = n - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def _nth_largest(key_GM: Tensor, n: int) -> Tensor:
    """By sorting; of a whole layer on the CPU by selection, which is thirty times as fast for two million weights."""
    m = key_GM.shape[-1]
    if key_GM.device.type == "cpu" and key_GM.numel() == m and not torch.compiler.is_compiling():
        return key_GM.kthvalue(m - n + 1, dim=-1, keepdim=True).values
    return key_GM.sort(dim=-1, descending=True).values[..., n - 1 : n]


def largest(scores: Tensor, keep: int, among: Tensor | None = None) -> Tensor:
    """True at the `keep` scores of largest magnitude of the whole tensor, the lower index first among equals: a mask without groups.

    `among`: a mask outside of which nothing is True; inside, all are where they are fewer than `keep`.

    >>> largest(torch.tensor([[1.0, -3.0], [3.0, 0.5]]), 1)
    tensor([[False,  True],
            [False, False]])
    """
    if not 0 <= keep <= scores.numel():
        raise PatternError(f"cannot keep {keep} of {scores.numel()} weights")
    if keep == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    key = magnitude_key(scores)
    if among is None:
        return keep_top(key.reshape(1, -1), keep).view(scores.shape)
    key = key.masked_fill(~among, -1)  # below a kept weight that happens to be zero
    return keep_top(key.reshape(1, -1), keep).view(scores.shape) & among


def check_finite(weight: Tensor, name: str, step: int | None = None) -> None:
    """Raise `NonFiniteWeightError` with the first NaN or Inf of `weight`, if there is one."""
    if weight.device.type == "meta" or hasattr(weight, "fake_mode"):  # a shape without values
        return
    values = weight.float() if weight.element_size() == 1 else weight  # torch 2.11 knows little about float8
    if values.isfinite().all():
        return
    index = tuple((~values.isfinite()).nonzero()[0].tolist())
    raise NonFiniteWeightError(name, index, weight[index].item(), step)


# Masks that are kept over time are kept as bits: one a weight, in the order of the flattened (logical) index, lowest bit first.


def pack(mask: Tensor) -> Tensor:
    """A bool mask as bytes, eight weights in each."""
    flat = mask.reshape(-1)
    bits = F.pad(flat, (0, -flat.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `pack`, for a mask of `shape`."""
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.view(-1)[: shape.numel()].view(shape).bool()


def differing(packed_a: Tensor, packed_b: Tensor) -> Tensor:
    """In how many weights two packed masks differ, as a 0-d tensor: ||E_a - E_b||_1."""
    x = packed_a ^ packed_b
    # Count the ones of each byte: in pairs of bits, then in fours, then in eights.
    x = (x & 0x55) + ((x >> 1) & 0x55)
    x = (x & 0x33) + ((x >> 2) & 0x33)
    return ((x & 0x0F) + (x >> 4)).sum(dtype=torch.int64)
