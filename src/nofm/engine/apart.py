"""Several runs in several processes, for networks whose steps wait for the host, such as detectors: `train_together` can do nothing for
them, and one process leaves most of a GPU idle, and most cores. (Under NVIDIA's MPS kernels of several processes run side by side;
without it they take turns.)

Each process takes the next run of one list when it has a lane free, and makes it as `train_together` does: runs differ in length, and with
fixed shares one process would still train where the others have long ended. Signals are the parent's to pass on: a process that is still
starting may not hear the first, so it is told until it ends. A process whose parent has gone stops by itself, with checkpoints.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from ..errors import NofmError
from .config import ConfigError
from .signals import Stopped, StopRequest, listening
from .train import Job, train_taken

__all__ = ["train_apart"]

_Result: TypeAlias = dict[str, float] | NofmError


def train_apart(jobs: Sequence[Job], *, processes: int, lanes: int = 4, stop: StopRequest) -> list[_Result]:
    """As `train_together`, by so many processes, each with `lanes`. Raises `Stopped` when `stop` is asked to and all have ended."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("several processes with runs of their own cannot be started under torchrun; start them without it")
    processes = min(processes, len(jobs))
    lanes = min(lanes, math.ceil(len(jobs) / max(1, processes)))  # so that whoever starts first does not take them all
    results: dict[int, _Result] = {}
    stopped: Stopped | None = None
    with _started(jobs, processes, lanes) as children:
        _wait(children, stop)
        for child in children:
            found = child.answer
            if isinstance(found, Stopped):
                stopped = stopped or found
            elif found is not None:
                results |= found
    if len(results) < len(jobs):
        raise stopped or Stopped(stop.number, 0)
    return [results[number] for number in range(len(jobs))]


class _Child:
    """One of the processes, and what it has answered."""

    def __init__(self, process: BaseProcess, line: Connection) -> None:
        self.process, self._line = process, line
        self.answer: dict[int, _Result] | Stopped | None = None

    def has_ended(self) -> bool:
        """Whether it has; takes its answer."""
        has_ended = not self.process.is_alive()  # asked first, so that no answer is missed
        if self.answer is None and self._line.poll():
            try:
                self.answer = self._line.recv()
            except EOFError:  # it has gone without a word
                self.process.join()
        return has_ended

    def tell(self, number: int) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)


@contextmanager
def _started(jobs: Sequence[Job], processes: int, lanes: int) -> Iterator[list[_Child]]:
    context, children = multiprocessing.get_context("spawn"), []
    taken = context.Value("q", 0)  # runs that a process has
    try:
        # Ctrl-C reaches all processes of a terminal, and one that is still importing would answer with a traceback: it is born deaf to it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for _ in range(processes):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_make, args=(jobs, taken, lanes, theirs))
                process.start()
                theirs.close()
                children.append(_Child(process, ours))
        finally:
            signal.signal(signal.SIGINT, before)
        yield children
    finally:
        for child in children:
            child.tell(signal.SIGTERM)
        for child in children:
            child.process.join()


def _wait(children: Sequence[_Child], stop: StopRequest) -> None:
    """Until all have ended. Raises where one has ended without an answer, after telling the others to stop."""
    told = 0.0
    while not all(child.has_ended() for child in children):
        lost = next((child for child in children if child.has_ended() and child.answer is None), None)
        number = stop.number or (signal.SIGTERM if lost is not None else 0)
        if number and time.monotonic() - told > 1.0:
            told = time.monotonic()
            for child in children:
                child.tell(number)
        time.sleep(0.1)
    lost = next((child for child in children if child.answer is None), None)
    if lost is not None and not stop.number:
        raise RuntimeError(f"a process of this command has ended by itself, with exit code {lost.process.exitcode}; see above")


def _make(jobs: Sequence[Job], taken: Any, lanes: int, line: Any) -> None:
    """What a process does."""
    with listening() as stop:
        threading.Thread(target=_mourn, args=(stop,), daemon=True).start()
        try:
            found = train_taken(jobs, _next_ones(taken, len(jobs)), lanes=lanes, stop=stop)
            # Errors have constructors of their own, which pickle does not know; what they say is what counts.
            line.send({number: result if isinstance(result, dict) else NofmError(str(result)) for number, result in found.items()})
        except Stopped as stopped:
            line.send(Stopped(stopped.number, stopped.step))


def _next_ones(taken: Any, number: int) -> Iterator[int]:
    """Which of `number` runs are this process's, each asked for when it can be trained."""
    while True:
        with taken.get_lock():
            mine = taken.value
            taken.value += 1
        if mine >= number:
            return
        yield mine


def _mourn(stop: StopRequest) -> None:
    """Ask to stop when the parent has gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        stop(signal.SIGTERM, None)
