"""A register of jobs: functions that test_fused_step.py runs in a process of its own, see fused_jobs.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nofm.kernels import ways

JOBS: dict[str, Callable[[], None]] = {}


def job(function: Callable[[], None]) -> Callable[[], None]:
    JOBS[function.__name__] = function
    return function


@contextmanager
def stretches_of(weights: int) -> Iterator[None]:
    """Programs that work on fewer weights, so that small weights have several and a last one that is not full."""
    before, ways.STEP_WEIGHTS = ways.STEP_WEIGHTS, weights
    try:
        yield
    finally:
        ways.STEP_WEIGHTS = before
