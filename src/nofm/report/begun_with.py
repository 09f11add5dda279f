"""What weights a run began with, from its configuration. Trained ones make a shorter training look better than it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["begun_with"]


def begun_with(config: Mapping[str, Any]) -> str:
    """In words; "" for random ones."""
    model = config.get("model", {})
    if model.get("weights"):
        return f"the weights of {model['weights']}"
    if model.get("backbone"):
        return f"the backbone of {model['backbone']}"
    return "published weights" if model.get("pretrained") else ""
