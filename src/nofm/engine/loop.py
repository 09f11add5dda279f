"""The training loop: batch -> task(batch)["loss"] -> backward -> step. No sparse code in it.

A step is finished before anything else happens: log, evaluate, checkpoint, in this order, at the steps where each is due. A request
to stop is looked for after every step and every test batch. So a checkpoint is always of a whole step, and says whether the
evaluation that belongs to the step has been done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..data.loader import Batch, Loader
from ..methods import Handle
from ..tasks.base import Task
from . import snapshot
from .average import Average
from .build import Lengths
from .checkpoint import Store
from .export import folded_weights
from .folder import RunFolder
from .movement import Movement, packed_masks
from .precision import LossWatch, Precision
from .signals import Stopped, StopRequest
from .world import World

__all__ = ["Meter", "Trainer"]


class Meter:
    """The mean loss since the last line of the log. The sum stays on the device until it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.loss, self.steps = torch.zeros((), dtype=torch.float64, device=device), 0
        self.began = time.perf_counter()

    def add(self, loss: Tensor) -> None:
        self.loss += loss
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss.clone(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.steps = state["loss"].to(self.loss.device), int(state["steps"])


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
    batch_size: int
    log_every: int
    channels_last: bool
    average: Average | None
    store: Store | None  # of the first process only, as is
    folder: RunFolder | None
    stop: StopRequest
    step: int = 0  # steps taken
    position: int = 0  # steps' batches drawn from the loader
    evaluated: bool = True  # whether the evaluation that is due at `step`, if one is, has been done
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.movement, self.meter, self.watch = Movement(self.task.model), Meter(self.world.device), LossWatch()

    # ---- the run ----

    def run(self, resumed_from: int | None) -> dict[str, float]:
        """Train to the end; the metrics of the last evaluation. Raises `Stopped` after a signal."""
        began = time.perf_counter()
        self._event("start", resumed_from=resumed_from, steps=self.lengths.total)
        try:
            if self.step == 0 and self.folder is not None:
                self.folder.write_masks(0, self.task.model, self.movement.state_dict()["masks"])  # what SAD is counted from
            self._look_for_stop(always=True)
            if not self.evaluated:
                self._evaluate()
            batches = self.loader.train(self.position)
            while self.step < self.lengths.total:
                self._train_step(batches)
                self._after_step()
        finally:
            self.loader.close()
        if self.loader.skipped:
            self.metrics["skipped_images"] = float(self.loader.skipped)
        self._export()
        self._event("end", metrics=self.metrics, seconds=time.perf_counter() - began)
        return self.metrics

    def _train_step(self, batches: Iterator[Batch]) -> None:
        self.wrapped.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.world.device)
        for i in range(self.accumulate):
            batch = self._on_device(next(batches))
            with self.world.reducing(self.wrapped, last=i == self.accumulate - 1):
                with self.precision.autocast():
                    loss = self.wrapped(batch)["loss"] / self.accumulate
                self.precision.backward(loss)
            total += loss.detach()
        self.watch.look(self.step + 1, total)
        self.precision.step(self.optimizer, self.task.parameters())
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.schedule.step()
        if self.average is not None:
            self.average.update(self.task)
        self.meter.add(total)
        self.step += 1
        self.position += 1

    def _on_device(self, batch: Batch) -> Batch:
        layout = torch.channels_last if self.channels_last else torch.preserve_format
        moved = {name: value.to(self.world.device, non_blocking=True) for name, value in batch.items()}
        return {name: value.contiguous(memory_format=layout) if value.dim() == 4 else value for name, value in moved.items()}

    def _after_step(self) -> None:
        last = self.step == self.lengths.total
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
        seconds = time.perf_counter() - self.meter.began
        speed = self.meter.steps * self.batch_size / seconds
        self._event("train", loss=loss, lr=self.lr, images_per_second=speed, epoch=self.epoch)
        self._event("sad", **self.movement.look(self.step))
        self.meter = Meter(self.world.device)

    def _evaluate(self) -> None:
        tasks = [(self.task, False)] if self.average is None else [(self.task, False), (self.average.task, True)]
        measured: dict[str, float] = {}
        for task, ema in tasks:
            metrics = self._measured(task)
            measured.update({f"ema_{name}": value for name, value in metrics.items()} if ema else metrics)
            self._event("eval", metrics=metrics, epoch=self.epoch, ema=ema)
        self.metrics = measured
        self.evaluated = True
        self.meter.began = time.perf_counter() if self.meter.steps == 0 else self.meter.began

    @torch.no_grad()
    def _measured(self, task: Task) -> dict[str, float]:
        task.eval()
        sums: dict[str, Tensor] = {}
        with self.world.silent(task):
            for batch in self.loader.test():
                with self.precision.autocast():
                    for name, value in task.measure(self._on_device(batch)).items():
                        sums[name] = sums[name] + value if name in sums else value
                if self.world.size == 1:
                    self._look_for_stop()
        names = sorted(sums)
        totals = self.world.total(torch.stack([sums[name] for name in names])).tolist()
        return task.metrics(dict(zip(names, totals, strict=True)))

    def save(self) -> None:
        """Write a checkpoint of this moment, which lies between two steps."""
        self.watch.settle()
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
            number = self.world.agree(number) if always or self.step % self.log_every == 0 else 0
        if number:
            if not saved:
                self.save()
            raise Stopped(number, self.step)

    def _export(self) -> None:
        weights = folded_weights(self.task.model)
        average = None if self.average is None else folded_weights(self.average.task.model)
        if self.folder is not None:
            self.folder.write_weights("model.safetensors", weights)
            if average is not None:
                self.folder.write_weights("model-ema.safetensors", average)

    def _event(self, name: str, **fields: Any) -> None:
        if self.folder is not None:
            self.folder.event(name, self.step, **fields)
