"""SIGTERM and SIGINT ask a run to stop: it notices at the next step or test batch, writes a checkpoint and leaves. Needs no torch."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "Stopped", "listening"]


class Stopped(Exception):
    """The run was asked to stop and has written a checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(number, step)
        self.number, self.step, self.go_on = number, step, "--resume"

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name} after step {self.step}; a checkpoint is written, go on with {self.go_on}"

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that such a signal ended."""
        return 128 + self.number


class StopRequest:
    """Holds the first signal that came, 0 while there was none."""

    number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number


@contextmanager
def listening() -> Iterator[StopRequest]:
    """While inside, signals set the request and do nothing else. The handlers from before come back afterwards."""
    request = StopRequest()
    before = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
