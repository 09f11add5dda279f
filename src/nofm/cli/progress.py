"""What a run shows while it goes: a live bar on a terminal, plain lines when the output is piped."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ..engine.folder import Sink
from .opening import opening

__all__ = ["Bar", "Lines", "make_progress"]


def make_progress(out: Path, stream: TextIO) -> Sink:
    """A sink that shows events; only the first process of a run ever calls it."""
    terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return Bar(out) if terminal else Lines(out, stream)


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
            said.append(f"SAD {self.sad:,}")
        if self.train:
            said.append(f"{self.train['images_per_second']:,.0f} {self.unit}/s")
        return said


def _where(out: Path) -> str:
    return f"the network: {out / 'model.safetensors'}; to look at the run: nofm report {shlex.quote(str(out))}"


class Lines:
    """One plain line for each measurement."""

    def __init__(self, out: Path, stream: TextIO | None = None) -> None:
        self._out, self._seen, self._stream = out, _Seen(), stream or sys.stdout

    def log(self, event: dict[str, Any]) -> None:
        self._seen.take(event)
        kind, step = event["event"], event["step"]
        if kind == "start":
            self._say("\n".join(opening(self._out, event)))
        elif kind == "sad":  # the last event of a line of the log
            self._say(f"step {step}  " + "  ".join(self._seen.words(metric=False)))  # evaluations have lines of their own
        elif kind == "found":
            self._say(f"step {step}  found  " + "  ".join(f"{name} {value:.3g}" for name, value in event["values"].items()))
        elif kind == "eval":
            which = "eval, moving average" if event["ema"] else "eval"
            self._say(f"step {step}  {which}  " + "  ".join(f"{name} {value:.4f}" for name, value in event["metrics"].items()))
        elif kind == "end":
            self._say(f"done in {event['seconds']:.1f} s  " + "  ".join(f"{name} {value:.4f}" for name, value in event["metrics"].items()))
            self._say(_where(self._out))

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class Bar:
    """A rich progress bar with steps and the time left, and below it loss, metric, SAD and images per second."""

    def __init__(self, out: Path) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.text import Text

        class TwoLines(Progress):  # in one line of 80 characters, the numbers would leave no room for the bar
            def get_renderables(self) -> Iterator[Any]:
                yield self.make_tasks_table(self.tasks)
                for task in self.tasks:
                    yield Text(task.fields["words"], style="dim", no_wrap=True, overflow="ellipsis")

        self._progress = TwoLines(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._out, self._seen = out, _Seen()
        self._shown: Any = None

    def log(self, event: dict[str, Any]) -> None:
        self._seen.take(event)
        if event["event"] == "start":
            self._say(*opening(self._out, event))
            self._progress.start()
            self._shown = self._progress.add_task(self._out.name, total=event.get("steps"), words="")
        if self._shown is not None:
            self._progress.update(self._shown, completed=event["step"], words="  ".join(self._seen.words(metric=True)))
        if event["event"] == "end":
            self._progress.stop()
            self._say(f"{self._out}: " + "  ".join(f"{n} {v:.4f}" for n, v in event["metrics"].items()))
            self._say(_where(self._out))

    def _say(self, *lines: str) -> None:
        for line in lines:  # as they are: a folder's name is no markup, and a command is copied in one piece
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()
