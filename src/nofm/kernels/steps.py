"""An optimizer's step with the SR-STE term inside, over many weights, by the kernels of `triton_steps`.

`Rule` says what kind of step, `numbers` its numbers for each weight:

    lr, weight decay (into the gradient), weight decay (off the weight), decay of the term, 1 or -1 (maximize),
    SGD: momentum, 1 - dampening, -, -     Adam: beta1, beta2, eps, count of steps

Learning rates and counts may be tensors on the weights' device, as CUDA graphs want them; those are read there and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..masks import Grouping
from .multi import Fleet, sent

__all__ = ["Numbers", "Refinement", "Rule", "Squad", "Term", "finished"]

Refinement: TypeAlias = Literal["weight", "sign", "gradient"]
Numbers: TypeAlias = tuple[float, float, float, float, float, float, float, float, float]
WIDTH = 11  # of a row of finished settings
_Row = TypeVar("_Row", bound=tuple[float, ...])


@dataclass(frozen=True, slots=True)
class Term:
    """What SR-STE adds in a step: `decay` times W, sign(W) or lr * g of pruned weights, to the gradient or beside the update."""

    decay: float
    refine: Refinement
    decoupled: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """The kind of step: what the kernels are compiled for."""

    adam: bool
    momentum: bool = False
    nesterov: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the states that it moves beside the weight, as torch has them."""
        return ("exp_avg", "exp_avg_sq") if self.adam else ("momentum_buffer",) if self.momentum else ()


def finished(rule: Rule, numbers: Numbers) -> tuple[float, ...]:
    """The row that the kernels read: lr, weight decay into the gradient, what a weight is multiplied by, decay, sign, and

    SGD: momentum, 1 - dampening, 0, 0, 0, 0     Adam: 1 - beta1, beta2, 1 - beta2, lr / correction1, sqrt(correction2), eps
    """
    lr, into, off, decay, sign, first, second, eps, step = numbers
    shared = (lr, into, 1 - lr * off, decay, sign)
    if not rule.adam:
        return (*shared, first, second, 0.0, 0.0, 0.0, 0.0)
    return (*shared, 1 - first, second, 1 - second, lr / (1 - first**step), math.sqrt(1 - second**step), eps)


class Squad(Fleet):
    """Weights that take their steps together by one rule."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, tuple[Sequence[Any], Tensor]] = {}

    def step(
        self,
        rule: Rule,
        term: Term,
        columns: list[Sequence[Tensor]],
        groupings: Sequence[Grouping],
        settings: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        word: Tensor,
        layout: object,
    ) -> None:
        """Move the weights and states of `columns`: weights, gradients and `rule.states`. `word` becomes Inf where a weight does.

        `layout` is an object of the caller's, the same for as long as nothing but the gradients' addresses changes.
        """
        from .triton_steps import in_order_step_kernel, step_kernel

        none = settings  # some address, which is not read
        for launch in self._ready(groupings, columns, "step", layout):
            kernel = step_kernel if launch.way.kind == "walk" else in_order_step_kernel
            kernel[(launch.programs,)](
                launch.table, launch.block_weight, launch.first_block, settings,
                none if grad_scale is None else grad_scale, none if found_inf is None else found_inf,
                word.view(torch.int32), columns[0][launch.members[0]],
                ADAM=rule.adam, MOMENTUM=rule.momentum, NESTEROV=rule.nesterov, REFINE=term.refine, DECOUPLED=term.decoupled,
                SCALED=grad_scale is not None, SKIPS=found_inf is not None, **launch.constants,
            )  # fmt: skip
        torch.autograd.graph.increment_version([t for column in (columns[0], *columns[2:]) for t in column])

    def settings(
        self,
        rule: Rule,
        numbers: Sequence[Numbers],
        lrs: Sequence[Tensor | None],
        counts: Sequence[Tensor | None],
        found_inf: Tensor | None,
        device: torch.device,
    ) -> Tensor:
        """The settings of a step, on the device. `lrs` and `counts` are tensors there, or None where `numbers` has them; Adam's counts go
        up by one, but where `found_inf`."""
        if not any(t is not None for column in (lrs, counts) for t in column):
            return self._rows("finished", numbers, torch.float32, device, lambda row: finished(rule, row))
        from .triton_steps import settings_kernel

        pairs = [(0 if lr is None else lr.data_ptr(), 0 if n is None else n.data_ptr()) for lr, n in zip(lrs, counts, strict=True)]
        rows = self._rows("numbers", numbers, torch.float64, device)
        addresses = self._rows("addresses", pairs, torch.int64, device)
        settings = torch.empty(len(numbers), WIDTH, device=device)
        settings_kernel[(-(-len(numbers) // 64),)](
            rows, addresses, settings, rows if found_inf is None else found_inf, len(numbers),
            ADAM=rule.adam, SKIPS=found_inf is not None, WIDTH=WIDTH, B=64, num_warps=1,
        )  # fmt: skip
        return settings

    def _rows(
        self, name: str, rows: Sequence[_Row], dtype: torch.dtype, device: torch.device, finish: Callable[[_Row], tuple[float, ...]] = tuple
    ) -> Tensor:
        """`rows`, finished, on the device; sent again when they have changed. A captured graph sends its own, at every replay."""
        last = self._last.get(name)
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if last is not None and last[0] == rows and last[1].device == device and not capturing:
            return last[1]
        distinct = {id(row): row for row in rows}  # weights of one parameter group have the same
        place = {key: i for i, key in enumerate(distinct)}
        table = torch.tensor([finish(row) for row in distinct.values()], dtype=dtype)
        arriving = sent(table[[place[id(row)] for row in rows]], device)
        if not capturing:
            self._last[name] = rows, arriving
        return arriving
