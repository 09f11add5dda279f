"""What loaders share whose examples are read one by one, by loader processes or by this one: classes, flow pairs, objects.

The sampler sends (epoch, index) to the processes, and whatever is drawn for an example is drawn from (seed, epoch, index): which
process reads it, and whether the run was resumed in between, makes no difference.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from .errors import DataError
from .order import Order, Share

__all__ = ["TEST", "ProcessLoader", "ProcessTests", "first_readable", "seeded"]

TEST = -1  # the "epoch" of a test example, which is not augmented


def first_readable(read: Callable[[int], dict[str, Any]], index: int, size: int, skip: bool, nothing: str) -> dict[str, Any]:
    """`read(index)`, with the number of examples "skipped". Where it raises `DataError` and that is to be passed by, the next readable of
    `size` examples stands in. An error comes back as text, since one that crosses a process arrives as a traceback."""
    for skipped in range(size):
        try:
            return {**read((index + skipped) % size), "skipped": skipped}
        except DataError as error:
            if not skip:
                return {"error": str(error)}
    return {"error": nothing}


def _together(collate: Callable[[list[dict[str, Any]]], dict[str, Any]], samples: list[dict[str, Any]]) -> dict[str, Any]:
    """One batch of several samples, with the number of those skipped for it; or the first error among them."""
    if broken := [sample["error"] for sample in samples if "error" in sample]:
        return {"error": broken[0]}
    return {**collate(samples), "skipped": sum(sample["skipped"] for sample in samples)}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's own generator, which torchvision draws from, begins at `seed`. Outside it is as if nothing had been drawn: without
    loader processes it is the one that the network draws from."""
    before = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(before)


class _Keys(Sampler[list[tuple[int, int]]]):
    def __init__(self, make: Callable[[], Iterator[list[tuple[int, int]]]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._make()


def _in_worker(number: int) -> None:
    # A signal to the whole process group must reach the engine, which then ends its workers; a dead worker would end the engine.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class ProcessTests:
    """Test batches put together by `workers` processes (0: by this one), with the protocol of `loader.Tests`.

    examples    reads (epoch, index), as `first_readable` does.
    collate     makes one batch of several.
    test_batch  how many test examples go together.
    """

    def __init__(
        self,
        examples: Dataset[dict[str, Any]],
        collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
        share: Share,
        test_size: int,
        test_batch: int,
        workers: int,
        pin: bool,
    ) -> None:
        self.share, self.skipped = share, 0
        self._examples, self._collate, self._workers, self._pin = examples, partial(_together, collate), workers, pin
        self._mine, self._test_batch = range(share.rank, test_size, share.world), max(1, test_batch)
        self._open: list[Any] = []

    def test(self) -> Iterator[dict[str, Any]]:
        """This process's part of the test examples, once."""

        def keys() -> Iterator[list[tuple[int, int]]]:
            for first in range(0, len(self._mine), self._test_batch):
                yield [(TEST, index) for index in self._mine[first : first + self._test_batch]]

        return self._batches(keys)

    def _batches(self, keys: Callable[[], Iterator[list[tuple[int, int]]]]) -> Iterator[dict[str, Any]]:
        loader = DataLoader(
            self._examples,
            batch_sampler=_Keys(keys),
            num_workers=self._workers,
            collate_fn=self._collate,
            pin_memory=self._pin,
            worker_init_fn=_in_worker,
            generator=torch.Generator(),  # or it would draw a seed from the global one, once more in a resumed run
        )
        batches = iter(loader)
        self._open.append(batches)
        try:
            for batch in batches:
                if "error" in batch:
                    raise DataError(batch["error"])
                self.skipped += batch.pop("skipped")
                yield batch
        finally:
            self._open.remove(batches)
            _end(batches)

    def close(self) -> None:
        """End all loader processes."""
        for batches in list(self._open):
            _end(batches)


def _end(batches: Any) -> None:
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()


class ProcessLoader(ProcessTests):
    """Training batches too, with the protocol of `loader.Loader`."""

    def __init__(
        self,
        examples: Dataset[dict[str, Any]],
        collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
        order: Order,
        share: Share,
        test_size: int,
        test_batch: int,
        workers: int,
        pin: bool,
    ) -> None:
        super().__init__(examples, collate, share, test_size, test_batch, workers, pin)
        self.order = order

    def make(self, key: dict[str, Any]) -> dict[str, Any]:
        """The key is the batch."""
        return key

    def keys(self, start: int) -> Iterator[dict[str, Any]]:
        """This process's micro-batches, from step `start` (from 0) on."""

        def keys() -> Iterator[list[tuple[int, int]]]:
            step = start
            while True:
                epoch = self.order.epoch(step)
                for indices in self.share.micro_batches(self.order.indices(step)):
                    yield [(epoch, index) for index in indices.tolist()]
                step += 1

        return self._batches(keys)
