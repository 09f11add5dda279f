"""SAD, Sparse Architecture Divergence (paper section 3.2.1): in how many weights the mask has changed.

    SAD_{i:j} = || E_j - E_i ||_1        E_i: the mask of the weights after step i

`SAD(model)` keeps the masks it is told to record, one bit a weight, and answers for any two of them. Dense layers of a `Dense`
method have masks too: those that pruning them would give, the paper's ^D SAD. Counting stays on the device of the masks and
nothing is read back before somebody asks, so that recording does not make a GPU wait.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import shards, ste
from ..errors import NofmError
from ..layers import Site, sites
from ..masks import differing, pack
from ..sparsify import unwrap

__all__ = ["SAD", "Divergence", "sad_of_forwards"]


class Divergence(dict[str, int]):
    """SAD by layer; `total` is their sum, `weights` the number of weights that could have changed."""

    def __init__(self, counts: Mapping[str, int], weights: int) -> None:
        super().__init__(counts)
        self.weights = weights

    @property
    def total(self) -> int:
        return sum(self.values())


@dataclass(frozen=True, slots=True)
class _Record:
    step: int
    masks: dict[str, Tensor] | None  # packed; None once dropped
    changed: dict[str, Tensor]  # since the record before: 0-d counts, on their device
    kept: dict[str, int]


class SAD:
    """Records masks over a training run.

        sad = nofm.SAD(model)
        for step, batch in enumerate(loader, start=1):
            ...
            sad.record(step)
        sad.between(1, 100).total       # weights whose state differs after step 100 from that after step 1
        sad.flip_rate()                 # share of weights that changed, per step

    keep     how many of the latest masks to hold, None for all. What changed from record to record is held for all.
    device   where masks are held, None for where the weights are.
    """

    def __init__(self, model: nn.Module, keep: int | None = None, device: torch.device | str | None = None) -> None:
        self._model, self._keep, self._device = unwrap(model), keep, device
        self._records: list[_Record] = []
        if keep is not None and keep < 1:
            raise NofmError(f"keep={keep} holds no mask; give at least 1, or None for all")
        if not list(sites(self._model)):
            raise NofmError(f"this {type(self._model).__name__} has no sparse layer to record; sparsify_ comes first")

    def record(self, step: int) -> None:
        """Remember the masks of the weights as they are now, as those after `step`."""
        last = self._records[-1] if self._records else None
        if last is not None and step <= last.step:
            raise NofmError(f"step {step} is recorded after step {last.step}; steps must grow")
        found = list(sites(self._model))
        with torch.no_grad():
            masks = {site.name: pack(site.mask()).to(self._device, non_blocking=True) for site in found}
            before = last.masks if last is not None and last.masks is not None else {}
            changed = {name: differing(before[name], packed) for name, packed in masks.items() if name in before}
        kept = {site.name: site.grouping.kept(site.weight.shape) for site in found}
        self._records.append(_Record(step, masks, changed, kept))
        if self._keep is not None and len(self._records) > self._keep:
            old = self._records[-self._keep - 1]
            self._records[-self._keep - 1] = _Record(old.step, None, old.changed, old.kept)

    @property
    def steps(self) -> list[int]:
        """The steps recorded so far."""
        return [record.step for record in self._records]

    def packed(self, step: int) -> dict[str, Tensor]:
        """The masks of a step by layer, as bytes of eight weights each (`nofm.masks.unpack` undoes it)."""
        held = {record.step: record.masks for record in self._records if record.masks is not None}
        if step not in held:
            steps = ", ".join(map(str, list(held)[:8])) + (", ..." if len(held) > 8 else "")
            dropped = f" (step {step} was dropped: keep={self._keep})" if step in self.steps else ""
            raise NofmError(f"no mask is held for step {step}{dropped}; there are {steps or 'none'}")
        return held[step]

    def between(self, i: int, j: int) -> Divergence:
        """SAD_{i:j} of every layer, between two recorded steps."""
        masks_i, masks_j = self.packed(i), self.packed(j)
        return self._divergence({name: differing(masks_i[name], masks_j[name]) for name in masks_i})

    def flip_rate(self) -> dict[int, float]:
        """For each recorded step but the first: the share of sparse weights that changed, per step since the record before."""
        rates = {}
        for before, record in zip(self._records, self._records[1:], strict=False):
            divergence = self._divergence(record.changed)
            rates[record.step] = divergence.total / divergence.weights / (record.step - before.step)
        return rates

    def lifetime(self) -> dict[str, float]:
        """How many steps a kept weight of each layer stays kept, on average: kept weights x steps watched / departures.

        Every layer keeps a fixed number of weights, so half of what changes are departures. Weights that have not left yet
        count with the time watched, so a short watch does not bias it; infinite where nothing ever left. Comings and goings
        between two records are not seen: record every step for the true value.
        """
        watched = self._records[-1].step - self._records[0].step if self._records else 0
        if watched == 0:
            raise NofmError("a lifetime needs at least two recorded steps")
        left: dict[str, float] = {}
        for record in self._records[1:]:
            for name, count in self._divergence(record.changed).items():
                left[name] = left.get(name, 0) + count / 2
        kept = self._records[-1].kept
        return {name: kept[name] * watched / departures if departures else float("inf") for name, departures in left.items()}

    def _divergence(self, counts: Mapping[str, Tensor]) -> Divergence:
        found = {site.name: site for site in sites(self._model)}
        summed = {name: _over_processes(count, found[name]) for name, count in counts.items()}
        return Divergence({name: int(count) for name, count in summed.items()}, sum(found[name].weight.numel() for name in counts))


def _over_processes(count: Tensor, site: Site) -> Tensor:
    """The sum of a count over the processes that a weight is spread over."""
    for group in shards.groups_of(site.weight):
        count = count.to(site.weight.device)
        torch.distributed.all_reduce(count, group=group)
    return count


def sad_of_forwards(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss_of: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    at: tuple[int, ...] = (1, 10),
) -> dict[str, dict[int, Divergence]]:
    """The paper's Fig. 3: SAD_{0:t} of each layer when trained by a dense forward and by a sparse one (STE), for each t in `at`.

    `model` is sparsified and is not changed: two copies of it see the same batches. Returns {"dense": {t: ...}, "sparse": {t: ...}}.
    The paper finds dense below sparse in every layer, and the gap growing with t.
    """
    seen = list(batches)
    if len(seen) < max(at):
        raise NofmError(f"SAD at step {max(at)} needs {max(at)} batches, got {len(seen)}")
    lenses: dict[str, ste.Lens] = {"dense": ste.dense, "sparse": ste.straight_through}
    result = {}
    for forward, lens in lenses.items():
        trained = copy.deepcopy(unwrap(model))
        for site in sites(trained):
            site.look_through(lens)
        optimizer, sad = make_optimizer(trained), SAD(trained)
        sad.record(0)
        for step, batch in enumerate(seen[: max(at)], start=1):
            optimizer.zero_grad()
            loss_of(trained, batch).backward()
            optimizer.step()
            if step in at:
                sad.record(step)
        result[forward] = {t: sad.between(0, t) for t in at}
    return result
