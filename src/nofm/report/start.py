"""From which step on the network of a run is as sparse as it will be, as its configuration tells. The one place that knows it.

An evaluation before that step is of another network, one with more weights, so it is no "best" of this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .read import Run

__all__ = ["Start", "start_of"]


@dataclass(frozen=True, slots=True)
class Start:
    """The part of a run in which its network has more weights than in the end: all of them up to step `dense`, then fewer and fewer up to
    step `until`. What is evaluated at `until` has come to its sparsity."""

    dense: int
    until: int

    @property
    def words(self) -> str:
        dense, narrowing = f"dense up to step {self.dense:,}", f"with fewer and fewer weights up to step {self.until:,}"
        return dense if self.dense == self.until else narrowing if self.dense == 0 else f"{dense}, {narrowing}"


def start_of(run: Run) -> Start | None:
    """None where a network is as sparse at once as it will be, is dense throughout, or where nobody knew it when the run began: the
    thresholds of STR open as they learn."""
    make = _STARTS.get(str(run.method.get("kind")).lower())
    start = None if make is None else make(run)
    return None if start is None or start.until <= 0 else start


def _srste(run: Run) -> Start:
    until, ramp = _steps(run, "begin_at"), run.method.get("ramp_at")
    return Start(until if ramp is None else _steps(run, "ramp_at"), until)


def _asp(run: Run) -> Start:
    return Start(_steps(run, "prune_at"), _steps(run, "prune_at"))


def _gmp(run: Run) -> Start:
    return Start(_steps(run, "begin_at"), _steps(run, "end_at"))


def _lottery(run: Run) -> Start:
    """Up to the pruning that the last of its trainings begins with."""
    first, rounds = _steps(run, "every"), run.method.get("rounds")
    again = first - _steps(run, "rewind_to")
    return Start(first, first + ((rounds if isinstance(rounds, int) else _ROUNDS) - 1) * again)


def _snip(run: Run) -> Start:
    """The batches that it measures by: always steps, whatever a run counts in."""
    batches = run.method.get("batches")
    batches = batches if isinstance(batches, int) else 1
    return Start(batches, batches)


_ROUNDS = 7  # of `LotteryTicket`, where nothing is said
_STARTS: dict[str, Callable[[Run], Start]] = {"srste": _srste, "asp": _asp, "gmp": _gmp, "lottery": _lottery, "snip": _snip}


def _steps(run: Run, option: str) -> int:
    """A length among the options of the method, in steps as the engine counts them; 0 where it is not given."""
    length = run.method.get(option)
    if not isinstance(length, int | float):
        return 0
    in_epochs = run.info["config"].get("engine", {}).get("epochs") is not None
    return round(length * _epoch(run)) if in_epochs else int(length)


def _epoch(run: Run) -> int:
    """The steps of an epoch, which are known by a line that counts both: the last, since a resumed run may have another batch size."""
    return next((round(event.step / epoch) for event in reversed(run.events) if (epoch := event.data.get("epoch"))), 0)
