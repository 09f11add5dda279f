"""Which images make up which step: a pure function of seed and step, so that a resumed run needs no sampler state but a number."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .errors import DataError

__all__ = ["Order", "Share", "Steps", "mix"]


def mix(*numbers: int) -> int:
    """A seed from several numbers; nearby numbers give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of every step's batch this process takes: as `accumulate` micro-batches, one of `world` parts of each."""

    rank: int = 0
    world: int = 1
    accumulate: int = 1

    def micro_batches(self, batch: Tensor) -> list[Tensor]:
        """This process's micro-batches. The first micro-batches of all processes together are the first part of the batch."""
        parts = batch.unflatten(0, (self.accumulate, self.world, -1))
        return list(parts[:, self.rank])


class Steps(Protocol):
    """What the engine asks of an order, of images or of anything else."""

    @property
    def seed(self) -> int: ...

    @property
    def steps_per_epoch(self) -> int: ...


@dataclass(slots=True)
class Order:
    """Every epoch a new permutation; images that do not fill a last batch wait for another epoch."""

    size: int
    batch: int
    seed: int
    _epoch: int = -1
    _permutation: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        if self.batch > self.size:
            raise DataError(f"engine.batch_size = {self.batch}: there are only {self.size} training images; choose a smaller batch")

    @property
    def steps_per_epoch(self) -> int:
        return self.size // self.batch

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that `step`, from 0, belongs to."""
        return step // self.steps_per_epoch

    def indices(self, step: int) -> Tensor:
        """The images of `step`, from 0."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return self.epoch_indices(epoch)[position * self.batch : (position + 1) * self.batch]

    def epoch_indices(self, epoch: int) -> Tensor:
        """The images of an epoch, from 0, one step's after the other's."""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mix(self.seed, epoch))
            self._epoch, self._permutation = epoch, torch.randperm(self.size, generator=generator)
        return self._permutation[: self.steps_per_epoch * self.batch]
