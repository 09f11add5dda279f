"""The machine that a run or an evaluation is made on: settings of torch that are the process's, and what is written down of it."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from ..tasks.base import Task
from ..version import __version__
from .commits import source_commit, workdir_commit
from .config import RunConfig
from .problems import problem_of
from .world import World, cpu_name

__all__ = ["conditions", "set_torch"]


def set_torch(config: RunConfig) -> None:
    """Threads, TF32 and determinism, as the configuration says."""
    e = config.engine
    if e.threads is not None:
        torch.set_num_threads(e.threads)
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32" if e.tf32 else "ieee"  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(e.deterministic)
    # Trying out all algorithms pays where shapes come again. In detectors the number of proposals is another one in every step.
    torch.backends.cudnn.benchmark = not e.deterministic and problem_of(config).same_shapes
    if e.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def conditions(task: Task, world: World) -> dict[str, Any]:
    """Versions, commit and hardware: what a number must be read with."""
    cuda = world.device.type == "cuda"
    return {
        "versions": {"nofm": __version__, "torch": str(torch.__version__), "python": platform.python_version(), **task.versions()},
        "commit": source_commit(),
        "workdir_commit": workdir_commit(),
        "hardware": {
            "device": str(world.device),
            "name": torch.cuda.get_device_name(world.device) if cuda else cpu_name(),
            "cpus": os.cpu_count(),
            "world_size": world.size,
        },
    }
