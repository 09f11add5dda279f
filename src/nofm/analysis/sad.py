"""SAD, Sparse Architecture Divergence (paper section 3.2.1): in how many weights the mask has changed.

    SAD_{i:j} = || E_j - E_i ||_1        E_i: the mask of the weights after step i

`SAD(model)` keeps the masks it is told to record, one bit a weight, and answers for any two of them. Dense layers of a `Dense`
method have masks too: those that pruning them would give, the paper's ^D SAD. Counting stays on the device of the masks and
nothing is read back before somebody asks, so that recording does not make a GPU wait.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import following, shards, ste
from ..errors import NofmError
from ..kernels.layout import axis_stride
from ..kernels.multi import Fleet, bits_bytes, bits_lane, unpack_bits
from ..kernels.select import Path, choose, forced_path
from ..layers import SparseModule
from ..masks import Grouping, differing, pack
from ..plain import plain_number
from ..site import Site, sites, unwrap

__all__ = ["SAD", "Divergence", "sad_of_forwards"]


class Divergence(dict[str, int]):
    """SAD by layer; `total` is their sum, `weights` the number of weights that could have changed."""

    def __init__(self, counts: Mapping[str, int], weights: int) -> None:
        super().__init__(counts)
        self.weights = weights

    @property
    def total(self) -> int:
        return sum(self.values())

    def __repr__(self) -> str:
        return f"Divergence({super().__repr__()}: {self.total:,} of {self.weights:,} weights)"


@dataclass(frozen=True, slots=True)
class _Order:
    """In which order the bits of a mask lie: that of the flattened index, or (`lane` > 0) that in which a kernel walks the weight."""

    shape: torch.Size
    strides: tuple[int, ...] = ()
    stride: int = 0
    lane: int = 0


@dataclass(frozen=True, slots=True)
class _Bits:
    """A mask, one bit a weight."""

    data: Tensor
    order: _Order

    def is_beside(self, order: _Order, device: torch.device) -> bool:
        return self.order == order and self.data.device == device

    def in_index_order(self) -> Tensor:
        order = self.order
        return pack(unpack_bits(self.data, order.lane, order.shape, order.strides, order.stride)) if order.lane else self.data

    def differing(self, other: _Bits) -> Tensor:
        if self.order == other.order and self.data.device == other.data.device:
            return differing(self.data, other.data)
        return differing(self.in_index_order(), other.in_index_order().to(self.data.device))  # a model may move between two records


@dataclass(frozen=True, slots=True)
class _Record:
    step: int
    masks: dict[str, _Bits] | None  # None once dropped
    changed: list[tuple[list[str], Tensor]]  # since the record before: names and their counts, on their device
    kept: dict[str, Tensor | int]  # how many weights: of a stored mask on its device, and by each process what it has

    def counts(self) -> dict[str, Tensor]:
        return {name: count for names, counts in self.changed for name, count in zip(names, counts.unbind(), strict=True)}


@dataclass(slots=True)
class _Fleet:
    """The weights whose bits one kernel writes together, what must not have changed for that, and where their bits go."""

    sites: list[Site]
    weights: list[Tensor]
    groupings: list[Grouping]
    orders: list[_Order]
    edges: list[int]  # where in one buffer the bits of each begin, and the end
    forced: Path | None
    launches: Fleet = field(default_factory=Fleet)

    @staticmethod
    def of(found: list[Site]) -> _Fleet:
        fleet = _Fleet([], [], [], [], [0], forced_path())
        for site in found:
            weight, grouping = site.weight, site.grouping
            size = bits_bytes(weight, grouping) if site.stored_mask is None and choose(weight, grouping) == "triton" else None
            if size is not None and fleet.is_at_home(weight):
                fleet.sites.append(site)
                fleet.weights.append(weight)
                fleet.groupings.append(grouping)
                fleet.orders.append(_Order(weight.shape, weight.stride(), axis_stride(weight, grouping) or 0, bits_lane(grouping)))
                fleet.edges.append(fleet.edges[-1] + -(-size // 16) * 16)
        return fleet

    def is_at_home(self, weight: Tensor) -> bool:
        """Whether `weight` is where the others are; a model may be spread over several devices."""
        return not self.weights or weight.device == self.weights[0].device

    def holds(self) -> bool:
        if self.forced != forced_path() or not all(map(self.is_at_home, self.weights)):
            return False
        for site, weight, order in zip(self.sites, self.weights, self.orders, strict=True):
            if site.module._parameters.get(site.param) is not weight or weight.stride() != order.strides or site.stored_mask is not None:
                return False
        return True

    def look(self, before: Mapping[str, _Bits]) -> tuple[dict[str, _Bits], list[tuple[list[str], Tensor]]]:
        """The masks as they are now, and what changed where the bits before lie in the same order on the same device."""
        device = self.weights[0].device
        buffer = torch.empty(self.edges[-1], dtype=torch.uint8, device=device)
        bits = [buffer[begin : begin + order.shape.numel() // 8] for begin, order in zip(self.edges, self.orders, strict=False)]
        names = [site.name for site in self.sites]
        beside = all(name in before and before[name].is_beside(order, device) for name, order in zip(names, self.orders, strict=True))
        counts = self.launches.bits_into(self.weights, self.groupings, bits, [before[name].data for name in names] if beside else None)
        masks = {name: _Bits(data, order) for name, data, order in zip(names, bits, self.orders, strict=True)}
        return masks, [(names, counts)] if beside else []


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
        self._model, self._keep, self._device = unwrap(model), plain_number(keep), device
        self._records: list[_Record] = []
        self._sites: list[Site] = []  # of the last record, for whose weights records can be read when the network has been folded
        self._fleet: _Fleet | None = None
        if keep is not None and keep < 1:
            raise NofmError(f"keep={keep} holds no mask; give at least 1, or None for all")
        if not list(sites(self._model)):
            raise NofmError(f"this {type(self._model).__name__} has no sparse layer to record; sparsify_ comes first")

    def record(self, step: int) -> None:
        """Remember the masks of the weights as they are now, as those after `step`."""
        step, last = plain_number(step), self._records[-1] if self._records else None
        if last is not None and step <= last.step:
            raise NofmError(f"step {step} is recorded after step {last.step}; steps must grow")
        with torch.no_grad():
            masks, changed = self._look(last.masks if last is not None and last.masks is not None else {})
            kept = {site.name: _kept(site) for site in self._sites}
        self._records.append(_Record(step, masks, changed, kept))
        if self._keep is not None and len(self._records) > self._keep:
            old = self._records[-self._keep - 1]
            self._records[-self._keep - 1] = _Record(old.step, None, old.changed, old.kept)

    def _look(self, before: Mapping[str, _Bits]) -> tuple[dict[str, _Bits], list[tuple[list[str], Tensor]]]:
        """The masks as they are now and what changed since `before`: on a GPU in one launch for all weights."""
        if self._fleet is None or not self._fleet.holds() or not all(isinstance(site.module, SparseModule) for site in self._sites):
            if not (found := list(sites(self._model))):
                raise NofmError(f"this {type(self._model).__name__} has no sparse layer any more (fold_, densify_), so nothing to record")
            if gone := before.keys() - {site.name for site in found}:
                first = next(name for name in before if name in gone)
                raise NofmError(f"{first} is no sparse layer any more, and its masks were recorded before; begin a new SAD")
            self._sites = found
            self._fleet = _Fleet.of(self._sites)
        masks, changed = self._fleet.look(before) if self._fleet.sites else ({}, [])
        for site in self._sites if len(masks) < len(self._sites) else ():
            if site.name not in masks:
                mask = site.mask()
                masks[site.name] = _Bits(pack(mask), _Order(mask.shape))
        if self._device is not None:
            masks = {name: _Bits(bits.data.to(self._device), bits.order) for name, bits in masks.items()}
        counted = {name for names, _ in changed for name in names}
        rest = [name for name in masks if name in before and name not in counted]
        if rest:
            changed = [*changed, *(([name], masks[name].differing(before[name]).reshape(1)) for name in rest)]
        return masks, changed

    def __repr__(self) -> str:
        seen = f"{len(self.steps)} records, steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "nothing recorded"
        return f"SAD({len(self._sites or list(sites(self._model)))} layers, {seen})"

    @property
    def steps(self) -> list[int]:
        """The steps recorded so far."""
        return [record.step for record in self._records]

    def packed(self, step: int) -> dict[str, Tensor]:
        """The masks of a step by layer, as bytes of eight weights each (`nofm.masks.unpack` undoes it)."""
        return {name: bits.in_index_order() for name, bits in self._held(step).items()}

    def _held(self, step: int) -> dict[str, _Bits]:
        held = {record.step: record.masks for record in self._records if record.masks is not None}
        if step not in held:
            steps = ", ".join(map(str, list(held)[:8])) + (", ..." if len(held) > 8 else "")
            dropped = f" (step {step} was dropped: keep={self._keep})" if step in self.steps else ""
            others = f"only for step{'s' * (len(held) > 1)} {steps}" if held else "nor for any other; record(step) comes first"
            raise NofmError(f"no mask is held for step {step}{dropped}, {others}")
        return held[step]

    def between(self, i: int, j: int) -> Divergence:
        """SAD_{i:j} of every layer, between two recorded steps."""
        masks_i, masks_j = self._held(i), self._held(j)
        return self._divergence({name: masks_i[name].differing(masks_j[name]) for name in masks_i})

    def flip_rate(self) -> dict[int, float]:
        """For each recorded step but the first: the share of sparse weights that changed, per step since the record before."""
        rates = {}
        for before, record in zip(self._records, self._records[1:], strict=False):
            divergence = self._divergence(record.counts())
            rates[record.step] = divergence.total / divergence.weights / (record.step - before.step)
        return rates

    def lifetime(self) -> dict[str, float]:
        """How many steps a kept weight of each layer stays kept, on average: kept weights x steps watched / departures.

        Of what changes half are departures where a layer keeps a fixed number of weights, and more where it keeps fewer and fewer
        (GMP). Weights that have not left yet count with the time watched, so a short watch does not bias it; infinite where nothing
        ever left. Comings and goings between two records are not seen: record every step for the true value.
        """
        if not self._records or self._records[-1].step == self._records[0].step:
            raise NofmError("a lifetime needs at least two recorded steps")
        stayed: dict[str, int] = {}
        left: dict[str, int] = {}
        for before, record in pairwise(self._records):
            kept_before, kept = self._kept(before), self._kept(record)
            for name, changed in self._divergence(record.counts()).items():
                stayed[name] = stayed.get(name, 0) + kept_before[name] * (record.step - before.step)
                left[name] = left.get(name, 0) + (changed + kept_before[name] - kept[name]) // 2
        return {name: stayed[name] / departures if departures else float("inf") for name, departures in left.items()}

    def _kept(self, record: _Record) -> dict[str, int]:
        """How many weights each layer kept then."""
        weights = {site.name: site.weight for site in self._sites}
        return {name: kept if isinstance(kept, int) else int(shards.summed(kept, weights[name])) for name, kept in record.kept.items()}

    def _divergence(self, counts: Mapping[str, Tensor]) -> Divergence:
        found = {site.name: site for site in self._sites}
        summed = {name: int(shards.summed(count, found[name].weight)) for name, count in counts.items()}
        return Divergence(summed, sum(found[name].weight.numel() for name in counts))


def _kept(site: Site) -> Tensor | int:
    return site.grouping.kept(site.weight.shape) if site.stored_mask is None else site.mask().sum()


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
        following.forget_copy(trained)  # of a method, where the model has one
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
