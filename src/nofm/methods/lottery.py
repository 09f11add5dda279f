"""Lottery tickets: iterative magnitude pruning with rewinding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import shards
from ..errors import OptimizerError
from ..masks import check_finite
from ..site import Site
from . import pruning
from .base import Memory, Method, Step
from .inside import ABSENT, clear_, number_tensor, numbers_in_groups, put_back, rememberers
from .options import check_given, check_one_of, check_share, check_whole
from .pruning import Pool

__all__ = ["LotteryTicket"]


@dataclass(frozen=True)
class LotteryTicket(Method):
    """Trains, prunes, goes back and trains again, `rounds` times: in all every + rounds * (every - rewind_to) steps.

    Paper: Frankle & Carbin, "The Lottery Ticket Hypothesis: Finding Sparse, Trainable Neural Networks", ICLR 2019, arXiv:1803.03635,
    section 1; Frankle et al., "Linear Mode Connectivity and the Lottery Ticket Hypothesis", ICML 2020, arXiv:1912.05671, Algorithm 2, who
    go back to an early step instead of to the start.

        train W_0 for T steps, keeping a copy W_k of step k
        repeat:  mask <- the largest (1 - p) of what is kept, by |W_T|;   W <- mask * W_k;   train T - k steps

    After r rounds (1 - p)^r of the weights are kept. The last training is that of the "ticket".

    sparsity    share of all sparse weights that is pruned in the end.
    rounds      in how many prunings; each takes the same share p of what is left: (1 - p)^rounds = 1 - sparsity. The papers prune
                20 % a round, which is 7 rounds for 80 % and 13 to 14 for 95 %.
    every       T: steps of the first training. Must be given.
    rewind_to   k: the step to go back to, 0 for the start. Frankle et al. need a few hundred for residual networks.
    allocation  "global" (the papers, for deep networks): the smallest of the whole network. "uniform", "erk": of each layer.

    Everything that the optimizer trains goes back, and so does its own state; running statistics of norm layers, which it does not
    own, do not, and are forgotten by training. Of the optimizer's groups what its own step k changes goes back (step 1 for the start):
    timm's Lamb and Lookahead count steps there. The rest of them is the loop's, like the learning-rate schedule, which should go back to
    step k as well. Of an optimizer that wraps another attach to the outer one, whose steps the loop takes.
    """

    unstructured: ClassVar[bool] = True

    sparsity: float = 0.9
    rounds: int = 7
    every: int = 0  # must be given
    rewind_to: int = 0
    allocation: Pool = "global"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("sparsity", self.sparsity)
        check_whole("rounds", self.rounds, least=1)
        check_given(self, "every", "the steps of its first training; all together it trains every + rounds * (every - rewind_to) steps")
        check_whole("every", self.every, least=1)
        check_whole("rewind_to", self.rewind_to)
        check_one_of("allocation", self.allocation, Pool)
        if self.rewind_to >= self.every:
            raise OptimizerError(f"rewind_to={self.rewind_to} must come before the end of the first training, every={self.every}")

    def begun_with(self) -> tuple[str, ...]:
        return ("sparsity", "allocation", "rewind_to", "rounds", "every")

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        pruning.check_one_optimizer("rewinding", memory)
        pruning.set_budget(sites, memory, self.sparsity, self.allocation)
        pruning.check_masks(sites, memory, self.sparsity)
        pruning.keep_all_(sites)
        if self.rewind_to == 0:
            _remember(memory)

    def phase(self, number: int) -> str | None:
        return None if number in (self.rewind_to, self._shown_in) or self._round(number) else "frozen"

    def unfinished(self, sites: Sequence[Site], memory: Memory, number: int) -> str:
        again = self.every - self.rewind_to
        last = self.every + (self.rounds - 1) * again
        if number < last:
            return f"its last pruning is at step {last} (every, rounds)"
        ticket = f"its ticket, which its last pruning has taken back to step {self.rewind_to}, trains until step {last + again}"
        return f"{ticket} (every, rounds)" if number < last + again else ""

    def _round(self, number: int) -> int:
        """Which round ends with step `number`, from 1; 0 if none does."""
        rounds, rest = divmod(number - self.every, self.every - self.rewind_to)
        return rounds + 1 if rest == 0 and 0 <= rounds < self.rounds else 0

    @property
    def _shown_in(self) -> int:
        """The step that shows what the optimizer itself changes in its groups."""
        return max(self.rewind_to, 1)

    def before_step(self, step: Step) -> None:
        if step.number == self._shown_in:
            step.carried.update(numbers_in_groups(step.memory.optimizers))
        if step.number > self.rewind_to:
            _check_remembered(step.memory, self.rewind_to)

    def after_step(self, step: Step) -> None:
        pruning.keep_zero_(step)
        if step.number == self.rewind_to:
            _remember(step.memory)
        if step.number == self._shown_in:
            _remember_groups(step, at_the_start=self.rewind_to == 0)
        if not (number := self._round(step.number)):
            return
        owned = pruning.owned_of(step)
        weights = pruning.whole_weights(owned)
        for one, weight in zip(owned, weights, strict=True):
            check_finite(weight, one.site.key, step.number)
        budget = [round(room * (keep / room) ** (number / self.rounds)) for room, keep in pruning.room_and_budget(step, weights)]
        masks = pruning.strongest(weights, budget, pruning.stored_masks(owned))
        _rewind(step.memory)
        for one, mask in zip(owned, masks, strict=True):
            pruning.put_on_(one.site, one.param, mask)


def _trained(memory: Memory) -> Iterator[tuple[str, nn.Parameter, list[tuple[Optimizer, dict[str, object]]]]]:
    """Every parameter that the optimizer moves, by its place in it, and what it and the optimizers inside it remember of it."""
    for i, optimizer in enumerate(memory.optimizers):
        knowing = rememberers(optimizer)
        for j, group in enumerate(optimizer.param_groups):
            for k, param in enumerate(group["params"]):
                yield f"{i}.{j}.{k}", param, [(each, each.state.get(param, {})) for each in knowing]


def _remember(memory: Memory) -> None:
    for place, param, states in _trained(memory):
        memory.tensors[f"rewind:{place}"] = shards.whole(param.detach()).clone()
        for prefix, (_, state) in zip(_prefixes(place), states, strict=False):
            for what, value in state.items():
                if isinstance(value, Tensor):
                    memory.tensors[f"{prefix}{what}"] = shards.whole(value).clone()
                elif isinstance(value, int | float):  # steps that an optimizer from elsewhere counts
                    memory.tensors[f"{prefix}{what}"] = number_tensor(value)


def _prefixes(place: str) -> Iterator[str]:
    """Names of what is remembered of the parameter at `place`: by the optimizer, and by those inside it."""
    yield f"rewind:{place}:"
    yield from (f"rewind:{place}:inside {depth}:" for depth in itertools.count(1))


def _remember_groups(step: Step, at_the_start: bool) -> None:
    """Remember what this step of the optimizer has changed in its groups, as it is now or (at the start) as it was before."""
    if not (before := step.carried):
        return  # the optimizer has not called its closure
    after = numbers_in_groups(step.memory.optimizers)
    for name in dict.fromkeys([*before, *after]):
        was, now = before.get(name, ABSENT), after.get(name, ABSENT)
        if was.shape != now.shape or not torch.equal(was, now.to(was.device)):
            step.memory.tensors[f"rewind:{name}"] = was if at_the_start else now


def _check_remembered(memory: Memory, rewind_to: int) -> None:
    """Raise where the optimizer has a parameter of which step `rewind_to` knows nothing, before a training is spent on it."""
    for place, param, _ in _trained(memory):
        then = memory.tensors.get(f"rewind:{place}")
        if then is None or then.shape != param.shape:
            raise OptimizerError(
                f"the optimizer has a parameter of shape {tuple(param.shape)} that it had not at step {rewind_to} (rewind_to), to which "
                "all that it trains goes back; give it all parameters, also those that are frozen at first, before attach"
            )


def _rewind(memory: Memory) -> None:
    put_back(memory.optimizers, {name.removeprefix("rewind:"): then for name, then in memory.tensors.items() if name.startswith("rewind:")})
    for place, param, states in _trained(memory):
        _copy_(param, memory.tensors[f"rewind:{place}"])
        for prefix, (optimizer, state) in zip(_prefixes(place), states, strict=False):
            _rewind_state(state, optimizer, memory, prefix)


def _rewind_state(state: dict[str, object], optimizer: Optimizer, memory: Memory, prefix: str) -> None:
    before = {what: then for what in state if (then := memory.tensors.get(f"{prefix}{what}")) is not None}
    if not before:
        clear_(state, optimizer)  # what was not there yet
        return
    for what, value in list(state.items()):
        if isinstance(value, Tensor | int | float) and what not in before:
            del state[what]  # nor was this: Lookahead's slow weights begin when they are first asked for
        elif isinstance(value, Tensor):
            _copy_(value, before[what])
        elif isinstance(value, int | float):
            state[what] = type(value)(before[what].item())


def _copy_(tensor: Any, whole: Tensor) -> None:
    shards.local(tensor.detach()).copy_(shards.part_of(whole.to(tensor.device), tensor))
