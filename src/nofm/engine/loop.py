"""The training loop: batch -> task(batch)["loss"] -> backward -> step. No sparse code in it.

A step is finished before anything else happens: log, evaluate, checkpoint, in this order, at the steps where each is due. A request
to stop is looked for after every step and every test batch. So a checkpoint is always of a whole step, and says whether the
evaluation that belongs to the step has been done.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .. import shards
from ..data.loader import Batch, Loader
from ..deploy import folded_weights
from ..methods import Handle
from ..site import sites
from ..tasks.base import Task
from . import snapshot
from .average import Average
from .checkpoint import Store
from .folder import RunFolder
from .graphs import Graphs
from .measure import laid_out, metrics_of, on_device, summed
from .meter import Meter
from .movement import Movement, packed_masks
from .precision import LossWatch, Precision
from .schedule import Lengths
from .signals import Stopped, StopRequest
from .world import Polls, World

__all__ = ["Trainer"]


@dataclass
class Trainer:
    """A run, ready to go. `wrapped` is what is called in training: the task, or a compiled or distributed form of it."""

    world: World
    task: Task
    wrapped: torch.nn.Module
    loader: Loader
    optimizer: Optimizer
    schedule: LRScheduler
    precision: Precision
    handle: Handle
    lengths: Lengths
    accumulate: int
    step_size: float  # units of a step, on average
    unit: str  # images, tokens or pairs
    items: str  # what the loader may pass by: images or pairs
    log_every: int
    histogram_every: int  # steps, 0 for never
    channels_last: bool
    average: Average | None
    store: Store | None  # of the first process only, as is
    folder: RunFolder | None
    stop: StopRequest
    graphs: Graphs | None = None  # where steps are captured in CUDA graphs
    step: int = 0  # steps taken
    position: int = 0  # steps' batches drawn from the loader
    evaluated: bool = True  # whether the evaluation that is due at `step`, if one is, has been done
    metrics: dict[str, float] = field(default_factory=dict)
    processes_before: int | None = None  # that saved the checkpoint, where they were more or fewer than now
    seconds_before: float = 0.0  # that earlier parts of the run took, up to the checkpoint it goes on from

    def __post_init__(self) -> None:
        self.found: dict[str, float] = {}  # what the method has settled by itself, as far as it has been told
        self.movement, self.meter, self.watch = Movement(self.task.model), Meter(self.world.device), LossWatch()
        self.polls, self.began = Polls(self.world), time.perf_counter()
        self.next_histograms = 0 if self.histogram_every else math.inf  # the step from which on they are due

    # ---- the run ----

    def steps(self, resumed_from: int | None) -> Iterator[None]:
        """Train to the end, pausing after each step, so that several runs can take turns on one GPU. Raises `Stopped` after a signal."""
        self.began = time.perf_counter()
        self.found = self.handle.found
        before: dict[str, Any] = {} if self.processes_before is None else {"processes_before": self.processes_before}
        before |= {"found": self.found} if self.found else {}
        self.wrapped.train()
        self._event("start", resumed_from=resumed_from, steps=self.lengths.total, processes=self.world.size, unit=self.unit, **before)
        try:
            with self._turn():
                if self.step == 0 and self.folder is not None:
                    self.folder.write_masks(0, self.task.model, self.movement.state_dict()["masks"])  # what SAD is counted from
                self._look_for_stop(always=True)
                if not self.evaluated:
                    self._evaluate()
            keys = self.loader.keys(self.position)
            while self.step < self.lengths.total:
                with self._turn():
                    self._train_step([on_device(next(keys), self.world.device) for _ in range(self.accumulate)])
                    self._after_step()
                yield
        finally:
            self.loader.close()
        if self.loader.skipped:
            self.metrics[f"skipped_{self.items}"] = float(self.loader.skipped)
        with self._turn():
            self._export()
        kept_in = {site.name: site.kept() for site in sites(self.task.model)}  # in the end, for methods whose budget moves
        unfinished = {"unfinished": left} if (left := self._said_unfinished()) else {}
        self._event("end", metrics=self.metrics, seconds=self.seconds, kept=sum(kept_in.values()), kept_in=kept_in, **unfinished)

    def _said_unfinished(self) -> str:
        """What the method has not come to, with a warning: steps that fp16 skips are none of its own, and may be more than it had left."""
        left = self.handle.unfinished
        if left and self.world.first:
            warnings.warn(f"{left}. The run has ended before that (steps that fp16 skips are not the method's): train longer", stacklevel=2)
        return left

    @property
    def seconds(self) -> float:
        """How long the run has taken, with its earlier parts; what a kill has undone does not count."""
        return self.seconds_before + time.perf_counter() - self.began

    def _turn(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.graphs is None else self.graphs.turn()

    def _train_step(self, keys: list[Batch]) -> None:
        if not self.task.training:  # after an evaluation; a walk over all modules is not for every step
            self.wrapped.train()
        phase = self.handle.phase
        if self.graphs is None or phase is None:
            loss = self._forward_backward_step(keys)["loss"]
        else:
            loss = self.graphs.run(phase, self._forward_backward_step, keys)["loss"]
            if self.graphs.replayed:
                self.handle.replayed()
                if self.average is not None:
                    self.average.replayed()
                self.watch.look(self.step + 1, loss)
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.schedule.step()
        self.meter.add(loss)
        self.step += 1
        self.position += 1

    def _forward_backward_step(self, keys: list[Batch]) -> dict[str, Tensor]:
        """The device's part of a step. Nothing in it may depend on the number of the step but the learning rate."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.world.device)
        batches = [laid_out(self.loader.make(key), self.channels_last) for key in keys]
        shares = self._shares(batches)
        for i, batch in enumerate(batches):
            with self.world.reducing(self.wrapped, last=i == self.accumulate - 1):
                with self.precision.autocast():
                    loss = self.wrapped(batch)["loss"]
                    loss = loss / self.accumulate if shares is None else loss * shares[i]
                self.precision.backward(loss)
            total += loss.detach()
        if self.graphs is None or not torch.cuda.is_current_stream_capturing():
            self.watch.look(self.step + 1, total)
        self.precision.step(self.optimizer, self.task.parameters())
        if self.average is not None:
            self.average.update(self.task)
        return {"loss": total}

    def _shares(self, batches: list[Batch]) -> list[Tensor] | None:
        """What each micro-batch's loss is multiplied by, so that the mean over processes of their sums is a mean over all that the
        step's losses are means over. None where all count alike."""
        weights = [weight for batch in batches if (weight := self.task.weight(batch)) is not None]
        if not weights:
            return None
        total = self.world.total(torch.stack(weights).sum())
        return [weight * self.world.size / total for weight in weights]

    def _after_step(self) -> None:
        last = self.step == self.lengths.total
        if self.handle.found != self.found:
            self.found = self.handle.found
            self._event("found", values=self.found)
        if (moved := self.movement.look_back(self.step)) is not None:
            self._event("sad_from_start", **moved)
        self.evaluated = not (last or self.step % self.lengths.eval_every == 0)
        if last or self.step % self.log_every == 0:
            self._log()
        self._look_for_stop()
        if not self.evaluated:
            self._evaluate()
        if last or self.step % self.lengths.checkpoint_every == 0:
            self.save()
            self._look_for_stop(saved=True)

    # ---- what is due now and then ----

    @property
    def epoch(self) -> float:
        return self.step / self.lengths.steps_per_epoch

    def _log(self) -> None:
        loss = float(self.world.total(self.meter.loss)) / self.world.size / self.meter.steps
        speed = self.meter.steps_per_second() * self.step_size
        self._event("train", loss=loss, lr=self.lr, images_per_second=speed, epoch=self.epoch)
        self._event("sad", **self.movement.look(self.step))
        if self.step >= self.next_histograms:
            self.next_histograms = self.step + self.histogram_every
            self._show_weights()
        self.meter = Meter(self.world.device)

    def _show_weights(self) -> None:
        """To trackers, which the first process tells: all take part, or it would wait for their shards."""
        shards.reshard_(self.task.model)
        for site in sites(self.task.model):
            weight = shards.whole(site.weight.detach())
            if self.folder is not None:
                self.folder.show("weight", self.step, layer=site.name, weight=weight)

    def _evaluate(self) -> None:
        tasks = [(self.task, False)] if self.average is None else [(self.task, False), (self.average.task, True)]
        self._settle()
        measured: dict[str, float] = {}
        used = sum(site.used() for site in sites(self.task.model))  # a report must not take a dense start for the best of a sparse network
        for task, ema in tasks:
            metrics = self._measured(task)
            measured.update({f"ema_{name}": value for name, value in metrics.items()} if ema else metrics)
            self._event("eval", metrics=metrics, epoch=self.epoch, ema=ema, used=used)
        self.metrics = measured
        if self.step == self.lengths.total:
            self._show(*tasks[-1])
        self.evaluated = True
        self.meter.began = time.perf_counter() if self.meter.steps == self.meter.untimed else self.meter.began

    def _show(self, task: Task, ema: bool) -> None:
        """Leave something of the evaluation for people to look at."""
        if self.folder is not None and (files := task.sample_files()):
            self.folder.write_samples(files)
            self._event("samples", files=sorted(files), ema=ema)

    def _measured(self, task: Task) -> dict[str, float]:
        with self.world.silent(task):
            sums = summed(task, self.loader.test(), partial(self._measure, task), self._stop_in_test)
        self._look_for_stop(always=self.world.size > 1)
        return metrics_of(task, sums, self.world)

    def _stop_in_test(self) -> bool:
        """Whether to leave the other test batches; the other processes, if there are any, learn of it after theirs."""
        if self.world.size == 1:
            self._look_for_stop()
        return bool(self.stop.number)

    def _measure(self, task: Task, batch: Batch) -> dict[str, Tensor]:
        def work(batches: list[Batch]) -> dict[str, Tensor]:
            with self.precision.autocast():
                return task.measure(laid_out(batches[0], self.channels_last))

        batch = on_device(batch, self.world.device)
        if self.graphs is None or self.handle.phase is None or task.measure_on_host:
            return work([batch])
        return self.graphs.run((self.handle.phase, task is self.task), work, [batch])

    def save(self) -> None:
        """Write a checkpoint of this moment, which lies between two steps."""
        self.watch.settle()
        self._settle()
        state, masks = snapshot.capture(self), packed_masks(self.task.model)
        if self.store is not None and self.folder is not None:
            self.folder.write_masks(self.step, self.task.model, masks)
            self.folder.sync()
            path = self.store.save(self.step, state)
            self._event("checkpoint", path=str(path.relative_to(self.folder.path)))
        self.world.wait()

    def _look_for_stop(self, always: bool = False, saved: bool = False) -> None:
        number = self.stop.number
        if self.world.size > 1:  # asking the others takes time, so not after every step
            number = self.polls.ask(self.step, number) if always or self.polls.due(self.step) else 0
        if number:
            if not saved:
                self.save()
            raise Stopped(number, self.step)

    def _settle(self) -> None:
        if self.average is not None:
            self.average.settle(self.task)

    def _export(self) -> None:
        self._settle()
        weights = folded_weights(self.task.model)
        average = None if self.average is None else folded_weights(self.average.task.model)
        if self.folder is not None:
            self.folder.write_weights("model.safetensors", weights)
            if average is not None:
                self.folder.write_weights("model-ema.safetensors", average)

    def _event(self, name: str, **fields: Any) -> None:
        if self.folder is not None:
            self.folder.event(name, self.step, **fields)
