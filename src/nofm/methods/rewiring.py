"""What methods share that train with a fixed number of weights and move them about: connections die in one place and grow in another.

A layer computes with a stored mask, and pruned weights are +0.0 after every step, whatever momentum and weight decay do to them. Which
connections live is chosen by one total order (larger magnitude first, then lower index), also at random: then by random magnitudes.
Chance comes from (seed, step, layer), so that all processes, and a run that is resumed, choose the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import shards, ste
from ..errors import OptimizerError
from ..kernels import selection
from ..site import Site
from .base import Memory, Method, OwnedWeight, Step
from .budget import Allocation, allocate
from .inside import states_of
from .options import check_one_of, check_share, check_whole

__all__ = ["Connections", "Rewiring", "alive", "best", "chance", "reset_momentum_"]

# What optimizers keep for each weight that starts as something else than zero: Rprop's step sizes, which are no memory of gradients.
# All else of a weight's shape is one, by whatever name: of gradients, or of the weight itself, which is zero where a connection begins.
_NO_MEMORY = ("step_size",)


@dataclass(frozen=True)
class Connections(Method):
    """Random connections at the start, as many as the budget says; pruned weights stay zero.

    sparsity    share of all sparse weights that is pruned.
    allocation  how layers share what is kept: "erk" (small layers denser) or "uniform".
    seed        decides all chance of the method.
    """

    unstructured: ClassVar[bool] = True

    sparsity: float = 0.9
    allocation: Allocation = "erk"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("sparsity", self.sparsity)
        check_one_of("allocation", self.allocation, Allocation)
        check_whole("seed", self.seed)

    def lens(self) -> ste.Lens:
        """How layers see their weights: pruned ones get no gradient, except for methods that look at it."""
        return ste.frozen

    def begun_with(self) -> tuple[str, ...]:
        return ("sparsity", "allocation")

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        counts = allocate([site.weight.shape for site in sites], self.sparsity, self.allocation)
        frozen = [site for site in sites if site.stored_mask is not None]
        if frozen and sum(site.kept() for site in sites) != sum(counts):
            raise OptimizerError(
                f"{frozen[0].name} has a frozen mask, and with such masks {sum(site.kept() for site in sites)} weights are kept, not "
                f"{sum(counts)} as sparsity={self.sparsity} says; densify_ and sparsify_ the model again to choose masks anew"
            )
        for site, count in zip(sites, counts, strict=True):
            everywhere = torch.ones(site.weight.shape, dtype=torch.bool, device=site.weight.device)
            random = best(chance(self.seed, 0, site), everywhere, count)
            site.freeze(random if site.stored_mask is None else site.stored_mask, self.lens())
            shards.local(site.weight.detach()).masked_fill_(~site.mask(), 0.0)

    def after_step(self, step: Step) -> None:
        for owned in (*step.weights, *step.resting):
            owned.weight.masked_fill_(~owned.mask(), 0.0)

    def move_(self, step: Step, owned: OwnedWeight, stay: Tensor, grow: Tensor) -> None:
        """Keep the weights where `stay` as they are; those where `grow` start at zero, as if they had never moved."""
        owned.site.freeze(stay | grow, self.lens())
        owned.weight.masked_fill_(~shards.part_of(stay, owned.param), 0.0)
        reset_momentum_(step.memory, owned, grow)


@dataclass(frozen=True)
class Rewiring(Connections):
    """Rewires at every step that `every` divides, before step `end_at`; between them nothing but the weights moves.

    every   steps between two rewirings.
    end_at  the step from which on masks stay; None for never.
    drop    the share of connections that a rewiring replaces.
    """

    every: int = 100
    end_at: int | None = None
    drop: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("every", self.every, least=1)
        if self.end_at is not None:
            check_whole("end_at", self.end_at, least=1)
            if self.end_at <= self.every:
                raise OptimizerError(
                    f"end_at={self.end_at} comes before the first rewiring, after {self.every} steps (every), so that masks would stay "
                    "as they were drawn; give a smaller every"
                )
        check_share("drop", self.drop)

    def rewires(self, number: int) -> bool:
        """Whether step `number` is one that rewires."""
        return number % self.every == 0 and (self.end_at is None or number < self.end_at)

    def phase(self, number: int) -> str | None:
        return None if self.rewires(number) else "train"

    def after_step(self, step: Step) -> None:
        super().after_step(step)
        if self.rewires(step.number):
            self.rewire(step)

    def rewire(self, step: Step) -> None:
        """Choose the connections of the weights that this step has moved anew."""
        raise NotImplementedError


def alive(site: Site) -> Tensor:
    """The connections of `site`: its stored mask, which these methods always have."""
    assert site.stored_mask is not None
    return site.stored_mask


def best(scores: Tensor, among: Tensor, count: int | Tensor) -> Tensor:
    """True at the `count` scores of largest magnitude where `among` is True, the lower index first among equals.

    >>> best(torch.tensor([1.0, -3.0, 2.0, -2.0]), torch.tensor([True, False, True, True]), 1)
    tensor([False, False,  True, False])
    """
    return selection.largest([scores], [count], [among])[0]


def chance(seed: int, number: int, site: Site) -> Tensor:
    """Random numbers between 0 and 1 for all weights of `site` in step `number`."""
    # A digest, for the generators of two steps or layers must not be near each other, and torch's reads 32 bits of a seed only. Its last
    # word says nothing, but without it every run of these methods would be another one.
    digest = hashlib.blake2b(f"{seed} {number} {site.key} False".encode(), digest_size=4).digest()
    device = site.weight.device
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
    return torch.rand(site.weight.shape, generator=generator, device=device, dtype=torch.float32)


def reset_momentum_(memory: Memory, owned: OwnedWeight, where: Tensor) -> None:
    """Let the optimizer forget what it knows about the weights where `where`, a mask of the whole weight."""
    part = shards.part_of(where, owned.param)
    for optimizer in memory.optimizers:
        for _, state in states_of(optimizer, owned.param):
            for name, moment in state.items():
                if name not in _NO_MEMORY and isinstance(moment, Tensor) and _is_of_each(moment, owned.param):
                    shards.local(moment).masked_fill_(part, 0.0)


def _is_of_each(moment: Tensor, param: Tensor) -> bool:
    """Whether it has a number for each weight; numbers in bytes (8-bit optimizers) are codes, of which 0 may mean anything."""
    return moment.shape == param.shape and moment.is_floating_point()
