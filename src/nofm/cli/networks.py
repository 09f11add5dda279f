"""Networks as commands are given them: by the name of a model, with weights from chance, or as the folder of a finished run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch

from .. import fold_, sparsify_
from ..choose import Preset
from ..engine.config import ConfigError
from ..engine.finished import classifier
from ..engine.problems.classification import MODEL_PREFIXES, OWN_MODELS, SMALL_MODELS
from ..engine.resolve import near
from ..recipes import RECIPES
from ..tasks.models import build_model
from .folders import started_with

__all__ = ["check_name", "folded", "named", "of_run", "usual_sizes"]


def usual_sizes(model: str) -> tuple[int, ...]:
    """Channels, height and width of the images that a network is made for: counted for others, it would seem far more expensive."""
    if model == "cnn":
        return (1, 8, 8)  # the recipe digits
    return (3, 32, 32) if model in SMALL_MODELS else (3, 224, 224)


def named(model: str, input: tuple[int, ...]) -> Any:
    """A model by its name, for images of these sizes."""
    if len(input) != 3 or min(input) < 1:
        raise ConfigError(f"--input {' '.join(map(str, input))}: must be three sizes above 0: channels, height, width")
    check_name(model)
    return build_model(model, 10 if model in SMALL_MODELS else 1000, input[0])


def check_name(model: str, nor: str = "") -> None:
    """Raise unless a model can have this name; `nor` says what else it is not."""
    if model not in OWN_MODELS and not model.startswith(MODEL_PREFIXES):
        raise ConfigError(f"{model!r} is no model{nor}; write torchvision/NAME, timm/NAME or one of {', '.join(OWN_MODELS)}{_meant(model)}")


def _meant(model: str) -> str:
    """A hint for who has named a recipe or a run instead of its network, or has left out where a network comes from."""
    if (Path(model) / "run.json").is_file():
        return f"; {model} is a run, and the page of nofm report {shlex.quote(model)} has its parameters and multiply-adds"
    if model in RECIPES and (name := RECIPES[model]().model.name) in OWN_MODELS:
        return f"; {model} is a recipe, and its network is {name}"
    from torchvision.models import list_models

    return near(model, [*OWN_MODELS, *(f"torchvision/{name}" for name in list_models())])


def folded(model: str, pattern: str, preset: Preset, input: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
    """A model by its name, with N:M zeros; and the sizes of its images."""
    network = named(model, input).eval()
    for weight in network.parameters():  # some networks begin with zeros in their classifier, which are of no pattern
        if weight.dim() > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=0.02)
    _try(network, input, model)
    sparsify_(network, pattern, preset=preset)
    fold_(network)
    return network, input


def of_run(run: Path, input: tuple[int, ...] | None) -> tuple[Any, tuple[int, ...]]:
    """The network of a finished run with its own weights; and the sizes of its images, where no others are asked for."""
    _, config = started_with(run)
    network, own = classifier(run, config)
    _try(network, input or own, str(run))
    return network, input or own


def _try(network: Any, input: tuple[int, ...], name: str) -> None:
    """Raise where the network cannot compute images of these sizes."""
    try:
        with torch.no_grad():
            network(torch.randn(2, *input))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ConfigError(f"--input {' '.join(map(str, input))}: {name} cannot compute it: {error}") from None
