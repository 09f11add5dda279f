"""Runs jobs in two processes that talk over gloo, all of them in one pair: starting processes takes longer than the jobs.

A job is a function in a module that both processes can import; what it returns on each rank comes back, or the error it raised.
"""

from __future__ import annotations

import datetime
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

WORLD = 2

Jobs = Mapping[str, Callable[[int], Any]]


@dataclass(frozen=True)
class Failed:
    """A job that raised. Kept as text: the other jobs still run, and an error need not survive pickling."""

    text: str


def run(jobs: Jobs) -> dict[str, list[Any]]:
    """What each job returned on rank 0 and on rank 1. Fails if a job raised on some rank."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_work, (dict(jobs), folder), nprocs=WORLD)
        by_rank = [torch.load(Path(folder, f"rank{rank}"), weights_only=False) for rank in range(WORLD)]
    return {name: [results[name] for results in by_rank] for name in jobs}


def assert_all_ran(results: Mapping[str, list[Any]]) -> None:
    """Raise with the text of every job that raised."""
    failures = {f"{name}, rank {rank}": r.text for name, ranks in results.items() for rank, r in enumerate(ranks) if isinstance(r, Failed)}
    assert not failures, "\n".join(f"--- {name}\n{text}" for name, text in failures.items())


def _work(rank: int, jobs: Jobs, folder: str) -> None:
    torch.set_num_threads(1)
    # What wraps or spreads a model (DDP, FSDP2) makes no copy that an optimizer moves, and no other optimizer: see `following`.
    warnings.filterwarnings("error", message="this .* moves ")
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=60)
    )
    results: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            results[name] = job(rank)
        except Exception:
            results[name] = Failed(traceback.format_exc())
    torch.save(results, Path(folder, f"rank{rank}"))
    distributed.barrier()
    distributed.destroy_process_group()
