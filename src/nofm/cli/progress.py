"""What a run shows while it goes: a live bar on a terminal, plain lines when the output is piped.

Of several runs that differ in the seed alone, ten pages of such lines would say less than ten lines: what they are is told once, each has
one line when it has ended, and where that takes long, a line now and then. Warnings go another way (stderr), and all of them are shown.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..columns import wrapped
from ..engine.folder import Sink
from .opening import opening

__all__ = ["Bar", "Lines", "Turn", "looking", "make_progress"]

_NOW_AND_THEN = 30.0  # seconds between two lines of one of several runs


@dataclass(frozen=True)
class Turn:
    """Which of several runs one is that differ in the seed alone and go one after another."""

    number: int
    count: int
    name: str

    def __str__(self) -> str:
        return f"[{self.number}/{self.count}] {self.name}"


def make_progress(out: Path, stream: TextIO, turn: Turn | None = None) -> Sink:
    """A sink that shows events; only the first process of a run ever calls it."""
    terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return Bar(out, turn) if terminal else Lines(out, stream, turn)


class _Seen:
    """The latest of every number."""

    def __init__(self) -> None:
        self.train: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}
        self.measured_at = 0
        self.found: dict[str, float] = {}
        self.sad: int | None = None
        self.unit = "images"

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self.unit, self.found = event.get("unit", self.unit), event.get("found", {})
        elif event["event"] == "train":
            self.train = event
        elif event["event"] == "eval":
            self.metrics, self.measured_at = event["metrics"], event["step"]
        elif event["event"] == "found":
            self.found = event["values"]
        elif event["event"] == "sad":
            self.sad = sum(event["changed"].values())

    def words(self, *, metric: bool) -> list[str]:
        """Everything but the metric is of this line; the metric is of the last evaluation, and says of which step."""
        said = []
        if self.train:
            said += [f"loss {self.train['loss']:.4f}", f"lr {self.train['lr']:.2g}"]
        said += [f"{name} {value:.2g}" for name, value in self.found.items()]
        said += [f"{name} {value:.2f} at step {self.measured_at}" for name, value in list(self.metrics.items())[:1] if metric]
        if self.sad is not None:
            said.append(f"SAD {self.sad:,} weight{'s' * (self.sad != 1)}")  # that changed between kept and pruned
        if self.train:
            said.append(f"{self.train['images_per_second']:,.0f} {self.unit}/s")
        return said


def _first_lines(out: Path, event: dict[str, Any], turn: Turn | None) -> list[str]:
    """What is trained; of several runs the first one says it, and those that go on from a checkpoint do."""
    return opening(out, event) if turn is None or turn.number == 1 or event["resumed_from"] is not None else []


def _last_line(event: dict[str, Any], turn: Turn, found: dict[str, float]) -> str:
    numbers = [f"{name} {value:.4g}" for name, value in event["metrics"].items()] + [f"{name} {v:.3g} found" for name, v in found.items()]
    return f"{turn}: {', '.join(numbers)} ({event['seconds']:.1f} s)"


def looking(out: Path, several: bool = False) -> str:
    """Where the network of a run is, or those of several in a folder, and the command that shows what has become of them."""
    if several:
        return f"the networks: {out}/*/model.safetensors; to look at the runs: nofm report {shlex.quote(str(out))}"
    return f"the network: {out / 'model.safetensors'}; to look at the run: nofm report {shlex.quote(str(out))}"


class Lines:
    """One plain line for each measurement; of several runs one for each run."""

    def __init__(
        self, out: Path, stream: TextIO | None = None, turn: Turn | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out, self._seen, self._stream, self._turn, self._clock = out, _Seen(), stream or sys.stdout, turn, clock
        self._said_at = clock()

    def log(self, event: dict[str, Any]) -> None:
        self._seen.take(event)
        if event["event"] == "start":
            for line in _first_lines(self._out, event, self._turn):
                self._say(line)
        elif self._turn is None:
            self._every_measurement(event)
        else:
            self._now_and_then(event, self._turn)

    def _now_and_then(self, event: dict[str, Any], turn: Turn) -> None:
        if event["event"] == "end":
            self._say(_last_line(event, turn, self._seen.found))
        elif event["event"] == "sad" and self._clock() - self._said_at >= _NOW_AND_THEN:
            self._say(f"{turn}: step {event['step']}  " + "  ".join(self._seen.words(metric=True)))

    def _every_measurement(self, event: dict[str, Any]) -> None:
        kind, step = event["event"], event["step"]
        if kind == "sad":  # the last event of a line of the log
            self._say(f"step {step}  " + "  ".join(self._seen.words(metric=False)))  # evaluations have lines of their own
        elif kind == "found":
            self._say(f"step {step}  found  " + "  ".join(f"{name} {value:.3g}" for name, value in event["values"].items()))
        elif kind == "eval":
            which = "eval, moving average" if event["ema"] else "eval"
            self._say(f"step {step}  {which}  " + "  ".join(f"{name} {value:.4f}" for name, value in event["metrics"].items()))
        elif kind == "end":
            self._say(f"done in {event['seconds']:.1f} s  " + "  ".join(f"{name} {value:.4f}" for name, value in event["metrics"].items()))
            self._say(looking(self._out))

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)
        self._said_at = self._clock()

    def close(self) -> None:
        pass


class Bar:
    """A rich progress bar with steps and the time left, and below it loss, metric, SAD and images per second.
    Of several runs a line is left when it goes."""

    def __init__(self, out: Path, turn: Turn | None = None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.text import Text

        class TwoLines(Progress):  # in one line of 80 characters, the numbers would leave no room for the bar
            def get_renderables(self) -> Iterator[Any]:
                yield self.make_tasks_table(self.tasks)
                for task in self.tasks:
                    yield Text(task.fields["words"], style="dim", no_wrap=True, overflow="ellipsis")

        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._progress = TwoLines(*columns, transient=turn is not None)
        self._out, self._seen, self._turn = out, _Seen(), turn
        self._shown: Any = None

    def log(self, event: dict[str, Any]) -> None:
        self._seen.take(event)
        if event["event"] == "start":
            for line in _first_lines(self._out, event, self._turn):
                self._say(*wrapped(line, indent="  "))
            self._progress.start()
            self._shown = self._progress.add_task(str(self._turn or self._out.name), total=event.get("steps"), words="")
        if self._shown is not None:
            self._progress.update(self._shown, completed=event["step"], words="  ".join(self._seen.words(metric=True)))
        if event["event"] == "end":
            self._progress.stop()
            if self._turn is not None:
                self._say(_last_line(event, self._turn, self._seen.found))
            else:
                self._say(f"{self._out}: " + "  ".join(f"{n} {v:.4f}" for n, v in event["metrics"].items()), looking(self._out))

    def _say(self, *lines: str) -> None:
        for line in lines:  # as they are: a folder's name is no markup, and a command is copied in one piece
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()
