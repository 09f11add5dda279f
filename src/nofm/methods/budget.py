"""How many weights each layer keeps, as whole numbers that add up exactly.

Unstructured methods are compared at one sparsity over all sparse weights together. `allocate` cuts that budget into layers:

    uniform   in proportion to a layer's weights: every layer has the same density
    erk       in proportion to the sum of its dimensions (out + in + kernel height + kernel width), so that small layers are denser;
              a layer that would get more than it has is dense, and the others share what is left      Evci et al. 2020, section 3

`shares` is the arithmetic of both, and of methods that move weights from layer to layer while they train.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from ..allocate import in_proportion
from ..errors import OptimizerError
from .options import check_one_of, check_share

__all__ = ["Allocation", "allocate", "shares"]

Allocation: TypeAlias = Literal["uniform", "erk"]


def allocate(shapes: Sequence[Sequence[int]], sparsity: float, allocation: Allocation) -> list[int]:
    """How many weights each layer keeps: round((1 - sparsity) * all of them) together, and at least one each.

    >>> allocate([(4, 4), (4, 12)], 0.75, "uniform"), allocate([(4, 4), (4, 12)], 0.75, "erk")
    ([4, 12], [5, 11])
    """
    check_share("sparsity", sparsity)
    check_one_of("allocation", allocation, Allocation)
    sizes = [math.prod(shape) for shape in shapes]
    total = round((1 - sparsity) * sum(sizes))
    if total < len(sizes):
        raise OptimizerError(f"sparsity={sparsity!r} keeps {total} weights of {len(sizes)} layers; each needs at least one")
    return shares(total, sizes if allocation == "uniform" else [sum(shape) for shape in shapes], sizes, least=1)


def shares(total: int, parts: Sequence[float], room: Sequence[int], least: int = 0) -> list[int]:
    """`total` cut in proportion to `parts`, each between `least` and its `room`. What does not fit goes to the others, in proportion.

    Whole numbers: each is its exact share rounded down, and what is left goes one by one to those that lost most, the first among
    equals.
    """
    assert least * len(room) <= total <= sum(room), f"{total} does not fit in {list(room)}"
    exact = in_proportion(float(total), parts, room)
    counts = [min(most, max(least, int(share))) for share, most in zip(exact, room, strict=True)]
    while sum(counts) < total:
        counts[min((i for i, most in enumerate(room) if counts[i] < most), key=lambda i: counts[i] - exact[i])] += 1
    while sum(counts) > total:  # where `least` gave more than the share
        counts[max((i for i in range(len(room)) if counts[i] > least), key=lambda i: counts[i] - exact[i])] -= 1
    return counts
