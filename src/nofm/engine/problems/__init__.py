"""The kinds of task that the engine trains. To add one, write a `Problem` in a module of this package and a row here. Needs no torch."""

from __future__ import annotations

from ..config import RunConfig
from .base import SHARED, Problem
from .classification import Classification
from .detection import Detection, Segmentation
from .flow import Flow
from .translation import Translation

__all__ = ["PROBLEMS", "SHARED", "Problem", "problem_of"]

PROBLEMS: dict[str, Problem] = {
    "classification": Classification(),
    "detection": Detection(),
    "segmentation": Segmentation(),
    "translation": Translation(),
    "flow": Flow(),
}


def problem_of(config: RunConfig) -> Problem:
    """The problem that a configuration is about."""
    return PROBLEMS[config.task.kind]
