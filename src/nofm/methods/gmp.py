"""GMP, gradual magnitude pruning: the rival of the paper's Table 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import OptimizerError
from ..masks import check_finite
from ..schedules import cubic
from ..site import Site
from .base import Memory, Method, Step
from .options import check_given, check_one_of, check_share, check_whole
from .pruning import (
    Pool,
    check_masks,
    keep_all_,
    keep_zero_,
    keeps_more,
    owned_of,
    put_on_,
    room_and_budget,
    set_budget,
    stored_masks,
    strongest,
    whole_weights,
)

__all__ = ["GMP"]


@dataclass(frozen=True)
class GMP(Method):
    """Prunes the smallest weights little by little; what is pruned is zero, gets no gradient and does not come back.

    Paper: Zhu & Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression", 2017, arXiv:1710.01878, Eq. 1;
    as in Gale, Elsen & Hooker, "The State of Sparsity in Deep Neural Networks", 2019, arXiv:1902.09574.

        s_t = s_f * (1 - (1 - (t - begin_at) / (end_at - begin_at))^3)        t = begin_at + every, begin_at + 2 * every, ..., end_at
        mask <- the (1 - s_t) * n largest of |W|;   W <- mask * W

    Sparsity rises from nothing, fast while weights are plenty and slowly at the end, and then stays.

    sparsity    share of all sparse weights that is pruned in the end, s_f.
    begin_at    the step from which sparsity rises; the network is dense until then.
    end_at      the step at which it is reached, exactly. Must be given: only the loop knows how long it is.
    every       steps between two prunings (the paper: 100 to 1000).
    allocation  "uniform": the same s_t in every layer (Zhu & Gupta). "erk": each layer goes to its own share (see `budget`).
                "global": the smallest weights of the whole network go first.

    In the released code of the paper a pruned weight keeps its last value and may be chosen again at the next pruning; here, as in
    most later work, the pruned ones only grow in number.
    """

    unstructured: ClassVar[bool] = True

    sparsity: float = 0.9
    begin_at: int = 0
    end_at: int = 0  # must be given
    every: int = 100
    allocation: Pool = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("sparsity", self.sparsity)
        check_whole("begin_at", self.begin_at)
        check_given(self, "end_at", "the step at which its sparsity is reached, such as three quarters of the steps that you train")
        check_whole("end_at", self.end_at, least=1)
        check_whole("every", self.every, least=1)
        check_one_of("allocation", self.allocation, Pool)
        if self.end_at < self.begin_at:
            raise OptimizerError(f"end_at={self.end_at} comes before begin_at={self.begin_at}")

    def begun_with(self) -> tuple[str, ...]:
        return ("sparsity", "allocation")

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        set_budget(sites, memory, self.sparsity, self.allocation)
        check_masks(sites, memory, self.sparsity)
        keep_all_(sites)

    def phase(self, number: int) -> str | None:
        return None if self._prunes(number) else "frozen"

    def is_late(self, sites: Sequence[Site], memory: Memory, number: int) -> bool:
        return number >= self.end_at and keeps_more(sites, memory)

    def unfinished(self, sites: Sequence[Site], memory: Memory, number: int) -> str:
        when = f"at step {self.end_at} (end_at)" if number < self.end_at else f"in the next step (end_at={self.end_at} is past)"
        return f"it comes to sparsity {self.sparsity} {when}" if keeps_more(sites, memory) else ""

    def _prunes(self, number: int) -> bool:
        between = self.begin_at < number < self.end_at
        return number == self.end_at or (between and (number - self.begin_at) % self.every == 0)

    def after_step(self, step: Step) -> None:
        keep_zero_(step)
        if not (self._prunes(step.number) or step.is_late):
            return
        owned = owned_of(step)
        weights, masks = whole_weights(owned), stored_masks(owned)
        for one, weight in zip(owned, weights, strict=True):
            check_finite(weight, one.site.key, step.number)
        share = cubic(step.number, self.begin_at, self.end_at, final=1.0)
        budget = [room - round((room - keep) * share) for room, keep in room_and_budget(step, weights)]
        for one, mask in zip(owned, strongest(weights, budget, masks), strict=True):
            put_on_(one.site, one.param, mask)
