"""The network of a finished run, with the weights that it has ended with: for whoever wants to run it, not to measure its score.

`evaluate` needs the data that a run was trained on, or others; a network by itself needs the run's folder only.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import nn

from .config import ConfigError, RunConfig
from .evaluate import AVERAGE, PLAIN, load_weights_
from .problems.classification import blank_network

__all__ = ["classifier"]


def classifier(run: Path, own: RunConfig) -> tuple[nn.Module, tuple[int, int, int]]:
    """The network of the finished run in `run`, which was trained by `own`, ready to be used, and the sizes of an image.

    Of a run that averages its weights it is the average, as in tables and reports.
    """
    if own.task.kind != "classification":
        raise ConfigError(f"{run}: is a run of {own.task.kind}; only the networks of classification can be run by themselves yet")
    weights = run / (PLAIN if own.engine.ema is None else AVERAGE)
    if not weights.is_file():
        raise ConfigError(f"{weights}: is not there; has the run ended? Go on with it by nofm resume {run}")
    # By parts of a batch is how it was trained, and not what it computes.
    plain = dataclasses.replace(own, model=dataclasses.replace(own.model, batch_parts=None))
    model, shape = blank_network(plain, run)
    load_weights_(model, weights)
    return model.eval(), shape
