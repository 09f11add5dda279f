"""`torch.compile` in a process that trains many networks.

torch keeps what it compiles with the function that it has compiled, and all runs of a process share one: `Task.__call__`. Runs of a kind
use the same code; another pattern, another way of seeing weights or another network is compiled anew beside it. After eight of them
torch gives up, and all kinds that come later run uncompiled. So each run brings its own eight along. What this costs is looking through
the list in steps that are no CUDA graphs, up to 0.03 ms for each that does not fit; the one that was used last is looked at first, and
such runs do not take turns.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from typing import Any

import torch
from torch import nn

__all__ = ["compiled"]

_OF_ONE_RUN = 8  # times that one function may be compiled: as many as torch allows all runs together
_runs = itertools.count(1)


def compiled(task: nn.Module) -> nn.Module:
    """The compiled form of `task`, for one more run of this process."""
    from torch._dynamo import config  # takes a second, which others need not wait for

    config.recompile_limit = max(config.recompile_limit, next(_runs) * _OF_ONE_RUN)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_say_that_it_was_not_enough)  # once: it is the same one
    result: Any = torch.compile(task)
    return result


def _say_that_it_was_not_enough(record: logging.LogRecord) -> bool:
    """In plain words, before torch's own message, the only thing by which it can be told."""
    if record.getMessage().startswith("torch._dynamo hit config."):
        warnings.warn(
            "engine.compile: torch has compiled a part of this process's networks as often as it may, and runs it uncompiled from now on, "
            "which may be slower than without engine.compile; its own message says which part and why. Make fewer kinds of runs in one "
            "process, or leave engine.compile out",
            stacklevel=1,
        )
    return True
