"""What a command prints to: never closed, and never the end of a run.

A run leaves its results in its folder; what it prints is for whoever looks on. So where the reader goes (`nofm train ... | head`), the disk
behind `> log` is full or the terminal has been closed, the run goes on and shows no more. Commands that do nothing but print end there.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

__all__ = ["flush_or_forget", "open_closed_streams", "print_as_long_as_possible"]


def open_closed_streams() -> None:
    """Give a command that was started without stdout or stderr (`>&-`) a place to print to. At once: the next file to be opened would take
    the number that is free, and have in it what somebody prints."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w"))  # noqa: SIM115 - for as long as the process


def print_as_long_as_possible() -> None:
    """From now on nothing that is printed can fail, and who goes on printing is not told."""
    stream = sys.stdout
    if stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):
        return  # somebody collects it: a test, a notebook
    stream.flush()
    raw = io.BufferedWriter(_Unfailing(stream.fileno()))
    sys.stdout = io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering)


def flush_or_forget() -> None:
    """Show what was printed, or nothing more where nobody takes it: Ctrl-C ends the reader of a pipe, too, and Python would complain of it
    when it leaves."""
    try:
        sys.stdout.flush()
    except OSError:
        _lead_nowhere(sys.stdout.fileno())


def _lead_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


class _Unfailing(io.RawIOBase):
    """A file by its number that leads nowhere as soon as it cannot be written to."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return os.write(self._number, data)
        except BlockingIOError:
            raise
        except OSError as error:
            _lead_nowhere(self._number)
            if not isinstance(error, BrokenPipeError):  # there the reader has left on purpose
                print(f"nofm: stdout: {error.strerror}; nothing more is shown, and the run goes on", file=sys.stderr)
            return len(data)
