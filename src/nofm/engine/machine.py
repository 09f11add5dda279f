"""The machine that a run or an evaluation is made on: settings of torch that are the process's, and what is written down of it."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import torch

from ..tasks.base import Task
from ..version import __version__
from .config import RunConfig
from .world import World, cpu_name

__all__ = ["conditions", "set_torch"]


def set_torch(config: RunConfig) -> None:
    """Threads, TF32 and determinism, as the configuration says."""
    e = config.engine
    if e.threads is not None:
        torch.set_num_threads(e.threads)
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32" if e.tf32 else "ieee"  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(e.deterministic)
    torch.backends.cudnn.benchmark = not e.deterministic
    if e.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def conditions(task: Task, world: World) -> dict[str, Any]:
    """Versions, commit and hardware: what a number must be read with."""
    cuda = world.device.type == "cuda"
    return {
        "versions": {"nofm": __version__, "torch": str(torch.__version__), "python": platform.python_version(), **task.versions()},
        "commit": _commit(),
        "hardware": {
            "device": str(world.device),
            "name": torch.cuda.get_device_name(world.device) if cuda else cpu_name(),
            "cpus": os.cpu_count(),
            "world_size": world.size,
        },
    }


def _commit() -> str | None:
    """The commit of the working folder, with a + if it has changes; None outside of a repository."""
    try:
        git = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
