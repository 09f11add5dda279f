"""The processes of a run, as torchrun starts them: how many, which one this is, and how the task is spread over them."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..errors import NofmError
from ..tasks.base import Task
from .config import ConfigError
from .meeting import meeting_place

__all__ = ["Polls", "World", "cpu_name", "joined_world"]


@dataclass(frozen=True)
class World:
    """One process among `size`."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def spread(self, task: Task, parallel: str) -> nn.Module:
        """What the loop calls: the task itself, or one that reduces gradients over all processes."""
        if self.size == 1:
            return task
        if parallel == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for child in task.model.children():
                if any(True for _ in child.parameters()):
                    fully_shard(child)
            fully_shard(task.model)
            return task
        return nn.parallel.DistributedDataParallel(task, device_ids=[self.device] if self.device.type == "cuda" else None)

    @contextmanager
    def reducing(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Reduce gradients in the backward of the last micro-batch only."""
        module: Any = getattr(wrapped, "_orig_mod", wrapped)
        if isinstance(module, nn.parallel.DistributedDataParallel) and not last:
            with module.no_sync():
                yield
            return
        model: Any = getattr(module, "model", None)
        if self.size > 1 and hasattr(model, "set_requires_gradient_sync"):  # FSDP2
            model.set_requires_gradient_sync(last)
        yield

    @contextmanager
    def silent(self, task: Task) -> Iterator[None]:
        """For evaluation, where processes may have different numbers of batches: no forward inside talks to the others."""
        sharded: list[Any] = [module for module in task.modules() if hasattr(module, "set_reshard_after_forward")]
        for module in sharded:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in sharded:
                module.reshard()
                module.set_reshard_after_forward(module is not task.model, recurse=False)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def agree(self, *numbers: int) -> tuple[int, ...]:
        """The largest of all processes, for each of `numbers`."""
        if self.size == 1:
            return numbers
        values = torch.tensor(numbers, device=self.device)
        distributed.all_reduce(values, distributed.ReduceOp.MAX)
        return tuple(values.tolist())

    @contextmanager
    def first_may_refuse(self) -> Iterator[None]:
        """For what only the first process does: if that ends in an error for the user, the others end too, and do not wait for it."""
        refusal: NofmError | None = None
        try:
            yield
        except NofmError as error:
            refusal = error
        (refused,) = self.agree(refusal is not None)
        if refusal is not None:
            raise refusal
        if refused:
            raise ConfigError("the first process could not go on; its own message says why")

    def gathered(self, mine: Any) -> list[Any]:
        """What every process holds, in order of rank."""
        if self.size == 1:
            return [mine]
        held: list[Any] = [None] * self.size
        distributed.all_gather_object(held, mine)
        return held

    def wait(self) -> None:
        if self.size > 1:
            distributed.barrier()


class Polls:
    """When the processes ask each other whether one of them was told to stop: about once a second, after the same steps on all.

    Asking at a number of steps would be too rare where steps are slow and costly where they are fast, and clocks alone would let
    processes ask after different steps and wait for each other for ever. So the time that the last steps took is agreed on too.
    """

    def __init__(self, world: World, seconds: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._world, self._seconds, self._clock = world, seconds, clock
        self._asked: int | None = None  # after which step
        self._next, self._since = 0, clock()

    def due(self, step: int) -> bool:
        """Whether to ask after this step."""
        return step >= self._next

    def ask(self, step: int, number: int) -> int:
        """The largest `number` of all processes."""
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)  # steps that are only launched have not taken their time yet
        number, microseconds = self._world.agree(number, int(1e6 * (self._clock() - self._since)))
        steps = 0 if self._asked is None else step - self._asked
        wanted = int(steps * self._seconds * 1e6 / max(1, microseconds))
        self._asked, self._next, self._since = step, step + max(1, min(wanted, 2 * steps)), self._clock()
        return number


@contextmanager
def joined_world(device: str) -> Iterator[World]:
    """The world that torchrun's environment describes, or a world of one."""
    size, rank, local = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    where = _device(device, local if size > 1 else None)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if size == 1:
        yield World(where)
        return
    store, rank, size = meeting_place()
    distributed.init_process_group("nccl" if where.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    try:
        yield World(where, rank, size)
        distributed.barrier()  # nobody hangs up while another one is still talking
    finally:
        gc.collect()  # what holds the group (DDP does) must go first, or its threads are cut off at exit
        distributed.destroy_process_group()


def cpu_name() -> str:
    """What the maker calls the processor, where the system says so; else its kind."""
    try:
        named = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        named = []
    return next(filter(None, named), platform.processor() or platform.machine())


def _device(name: str, local: int | None) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = local if local is not None else device.index or 0
        if index >= count:
            raise ConfigError(f"device = {name}: this machine has {count} CUDA devices; allowed here: {'cuda:N, ' if count else ''}cpu")
        return torch.device("cuda", index)
    return device
