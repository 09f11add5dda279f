"""Choosing lambda by the flip rate: how often weights change between kept and pruned, which is what SR-STE's decay is there to calm.

    r = || E_t - E_{t-1} ||_1 / D          the share of D sparse weights whose mask bit changed in step t: SAD_{t-1:t} / D

The paper (Fig. 4) compares four lambdas by training four times. Hu et al. 2024 (arXiv:2404.01847) see in Transformers that a good one
brings the flip rate to a fraction, 0.6 to 0.95, of what it is without, and try candidates in the warm-up. Flip rates fall by themselves
as training goes on and move with the learning rate, so a fraction only means something at the same step. Therefore one run has both:
in its first `probe` steps the odd outputs of every layer are trained by STE, as a control, and the even ones by SR-STE. After a dense
or gradual start these are the first steps with the pattern itself: the more weights a layer keeps, the more it takes to calm it, so
what is found with a wider one does not serve it (means of three seeds: 0.02 at 8:16, 0.007 at 4:16, 0.0035 at 1:16, by
`nofm train digits --sparsity.pattern 8:16 --sparsity.method.decay auto --sparsity.method.probe 100 --seeds 3`).

    log lambda <- log lambda + 20 / probe * clip(3 * log(r_even / (SHARE * r_odd)), -1, 1)      at each step of the probe
    log lambda <- its mean over the second half of the probe                                    at the last one; then for all outputs

Where `target` says which flip rate is wanted, that stands for SHARE * r_odd, and all outputs are trained alike. Pruned weights shrink by
about lr * lambda / (1 - momentum) in a step, so what is found calms the mask within the time of the probe: a probe of a tenth of the
run is what was tried (results/README.md: level with a lambda by hand or up to 0.4 points below), and a short one, or one that ends while
the learning rate is still warming up, finds a large lambda.
Its steps are run by the host, which looks at the masks after each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import shards
from ..errors import OptimizerError
from ..following import level_of_the_user
from ..kernels import ops
from ..masks import pack, unpack
from ..site import Site
from .base import Memory, OwnedWeight, Step
from .options import check_share, check_whole
from .pruning import check_one_optimizer

__all__ = ["PROBE", "SHARE", "SHORT", "Search", "check_options", "decay_of", "remember", "spare_control_", "watch"]

PROBE = 1000  # steps
# On digits (400 steps, five seeds) 40 find 0.026 to 0.052, at which masks freeze; 100 find 0.003 to 0.007, and 0.005 was set by hand.
SHORT = 100
SHARE = 0.6  # of STE's own flip rate
_FIRST, _LEAST, _MOST = 2e-4, 1e-7, 1.0  # lambda: the paper's, and how far a search may go
_REACH, _STEEP = 20.0, 3.0  # how far all steps of a search together can move log lambda; 1/3 off the goal in log is full speed


@dataclass(frozen=True)
class Search:
    """When a run searches, and for which flip rate. begin_at: the step after which layers have their pattern."""

    begin_at: int
    probe: int
    target: float | None

    def probes(self, number: int) -> bool:
        """Whether step `number` is one of its steps."""
        return 0 < number - self.begin_at <= self.probe

    def is_over(self, number: int) -> bool:
        """Whether lambda is settled after `number` steps."""
        return number >= self.begin_at + self.probe

    def look(self, step: Step) -> None:
        """Look at the flips of this step, and move lambda."""
        held, number = step.memory.tensors, step.number - self.begin_at
        (flips_even, even), (flips_odd, odd) = _flips(step)
        rate, goal = (flips_even / max(even, 1), SHARE * flips_odd / max(odd, 1))
        if self.target is not None:
            rate, goal = (flips_even + flips_odd) / max(even + odd, 1), self.target
        if even + odd == 0:
            rate = goal  # no sparse weight had a gradient, so that this step says nothing
        one = 1 / max(even + odd, 1)  # so that a step without a flip, which small networks have, is no minus infinity
        pull = min(1.0, max(-1.0, _STEEP * math.log((rate + one) / (goal + one))))
        found = min(math.log(_MOST), max(math.log(_LEAST), math.log(decay_of(step.memory)) + _REACH / self.probe * pull))
        if number > self.probe // 2:
            held["decay:found"] += torch.tensor([found, 1.0])
        total, steps = held["decay:found"].tolist()
        held["decay"].fill_(math.exp(found if number < self.probe else total / steps))

    def spoils(self, was: Search, number: int) -> str:
        """What would come of `was`, a search that has had `number` steps; "" if it is the same, or both are over."""
        if was == self or (was.is_over(number) and self.is_over(number)):
            return ""
        fate = "be cut off" if self.is_over(number) else "begin again" if was.is_over(number) else "go on otherwise"
        return f"its search for lambda would {fate}"

    def unfinished(self, number: int) -> str:
        """Until when it lasts, as `Method.unfinished` says it; "" where it is over."""
        if self.is_over(number):
            return ""
        spared = "" if self.target else ", and every other output of each layer has none"
        return (
            f'its search for lambda (decay="auto") ends at step {self.begin_at + self.probe} (probe={self.probe}; give a '
            f"tenth of the steps that you train): until then lambda is not settled{spared}"
        )


def check_options(decay: object, target: float | None, probe: int | None) -> None:
    """Raise for options of a search that mean nothing, or where there is none."""
    for name, value in (("target", target), ("probe", probe)):
        if value is not None and decay != "auto":
            raise OptimizerError(f'{name}={value!r} has no effect with decay={decay!r}; it belongs to decay="auto"')
    if target is not None:
        check_share("target", target)
    if probe is not None:
        check_whole("probe", probe, least=8)


def watch(sites: Sequence[Site], memory: Memory, probe: int) -> None:
    """Begin: remember the masks as they are."""
    check_one_optimizer('decay="auto"', memory)
    if probe < SHORT:
        warnings.warn(
            f'decay="auto" searches in {probe} steps (probe), and so short a search may find too large a lambda; give {SHORT} or more, '
            "beyond the warm-up of the learning rate, or set decay yourself",
            stacklevel=level_of_the_user(),
        )
    memory.tensors["decay"] = torch.tensor(_FIRST, dtype=torch.float64)
    memory.tensors["decay:found"] = torch.zeros(2, dtype=torch.float64)  # sum of log lambda, and over how many steps
    for site in sites:
        part = ops.mask(shards.local(site.weight.detach()), site.grouping)
        memory.tensors[f"{site.key}:mask"] = pack(shards.whole_of(part, site.weight))


def remember(weights: Iterable[OwnedWeight], memory: Memory) -> None:
    """Forget the masks of the start: layers have others now, by their own pattern, and that is no flip."""
    for owned in weights:
        memory.tensors[f"{owned.site.key}:mask"] = pack(shards.whole_of(owned.mask(), owned.param))


def decay_of(memory: Memory) -> float:
    """The lambda of the next step."""
    return float(memory.tensors["decay"])  # on the host, where reading it makes no GPU wait


def spare_control_(term: Tensor, owned: OwnedWeight) -> Tensor:
    """SR-STE's term without the outputs that STE trains."""
    return term.masked_fill_(~shards.part_of(_even(owned), owned.param), 0.0)


def _flips(step: Step) -> list[list[int]]:
    """How many mask bits have changed since the last look, and how many there are: of even outputs and of odd ones."""
    counts = torch.zeros(2, 2, dtype=torch.int64)
    for owned in step.weights:
        now, name, even = shards.whole_of(owned.mask(), owned.param), f"{owned.site.key}:mask", _even(owned)
        changed = now != unpack(step.memory.tensors[name].to(now.device), now.shape)
        step.memory.tensors[name] = pack(now)
        parts = [(changed & even).sum(), even.sum(), (changed & ~even).sum(), (~even).sum()]
        counts += torch.stack(parts).view(2, 2).to(counts.device)
    rows: list[list[int]] = counts.tolist()
    return rows


def _even(owned: OwnedWeight) -> Tensor:
    """True at the weights of every other output, the first among them. No group has weights of two outputs."""
    weight, along = owned.param, owned.site.grouping.axis
    axis = 1 if along != "flat" and along % weight.dim() == 0 else 0
    even = torch.arange(weight.shape[axis], device=weight.device) % 2 == 0
    return even.view([-1 if i == axis else 1 for i in range(weight.dim())]).expand(weight.shape)
