"""Contract K1 in plain Python, for the tests beside this file: which N weights of a group are kept.

No torch in the decision: the weights are turned into Python floats (exactly, a double holds them all) and sorted by what the
contract says, magnitude descending and then index ascending.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def in_order(group: Sequence[float]) -> list[int]:
    """The indices of a group, those that are kept first in front."""
    return sorted(range(len(group)), key=lambda i: (-abs(group[i]), i))


def all_in_order(w_GM: Tensor) -> Tensor:
    """`in_order` of each of many groups, so that one sort serves every N."""
    values = iter(w_GM.detach().double().flatten().tolist())
    groups = zip(*[values] * w_GM.shape[-1], strict=True)  # one at a time: a list of them all keeps the garbage collector busy
    return torch.tensor([i for group in groups for i in in_order(group)]).view(w_GM.shape)


def mask_from_order(order_GM: Tensor, n: int) -> Tensor:
    """True at the first `n` indices of each order."""
    return torch.zeros(order_GM.shape, dtype=torch.bool).scatter_(1, order_GM[:, :n], True)


def oracle_mask(w_GM: Tensor, n: int) -> Tensor:
    """The mask of groups (..., M), all of them full."""
    return mask_from_order(all_in_order(w_GM.reshape(-1, w_GM.shape[-1])), n).view(w_GM.shape)


def assert_same_mask(mask: Tensor, expected: Tensor, weight: Tensor) -> None:
    """Bit for bit; shows the first weights that differ."""
    assert mask.dtype == torch.bool
    assert mask.shape == weight.shape == expected.shape
    if not torch.equal(mask, expected):
        rows = (mask != expected).reshape(-1, mask.shape[-1]).any(-1).nonzero()[:, 0]
        at = int(rows[0])
        shown = [t.reshape(-1, t.shape[-1])[at].tolist() for t in (weight, mask, expected)]
        raise AssertionError(f"{len(rows)} rows differ; row {at} of weights {shown[0]} has mask {shown[1]}, not {shown[2]}")


# Of both signs: zero, the smallest denormals, the largest, the smallest normals, neighbours one ulp apart around 1 and at the very top.
_ULP = 2.0**-23
_TOP = (2 - _ULP) * 2.0**127
NASTY = [
    *(0.0, -0.0),
    *(2.0**-149, -(2.0**-149)),
    *(2.0**-148, -(2.0**-148)),
    *((1 - _ULP) * 2.0**-126, -(1 - _ULP) * 2.0**-126),
    *(2.0**-126, -(2.0**-126)),
    -(1 + _ULP) * 2.0**-126,
    *(1 - _ULP / 2, -(1 - _ULP / 2)),
    *(1.0, -1.0),
    *(1 + _ULP, -(1 + _ULP)),
    *(0.09375, 65504.0, -(2.0**100)),
    *((2 - 2 * _ULP) * 2.0**127, -(2 - 2 * _ULP) * 2.0**127),
    *(_TOP, -_TOP),
]


def nasty_weight(*shape: int, seed: int = 0) -> Tensor:
    """A float32 weight drawn from `NASTY`: most of its groups hold ties or denormals."""
    choice = torch.randint(len(NASTY), shape, generator=torch.Generator().manual_seed(seed))
    return torch.tensor(NASTY)[choice]
