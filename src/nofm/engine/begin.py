"""Weights to begin with (model.weights): those of a finished run or of a safetensors file, in the place of random ones.

That the keys fit is not enough: outputs may mean other classes, BatchNorm may have been frozen, held-out images may have been trained
on. Of a run all of that is known, whether its folder is given or the file in it; of a file from elsewhere it is not.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..choose import classifiers, find_candidates
from ..tasks.weights import listed, misfits, read_weights
from .complaints import weights_file, weights_of
from .config import ConfigError, RunConfig
from .files import sha256_of
from .resolve import completed

__all__ = ["begin_with_", "told"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def begin_with_(model: nn.Module, config: RunConfig, companions: Mapping[str, bytes]) -> None:
    """Load them, all of them. Only a classifier of other classes is left at random, and told of.

    companions: files of a run that tell what outputs mean, such as the names of classes, as they follow from these data.
    """
    source, file = weights_of(config), weights_file(weights_of(config))
    given, wanted = read_weights(file), model.state_dict()
    theirs = _config_of(file.parent)
    means_other = theirs is not None and _means_other(file.parent, theirs, config, companions)
    if theirs is not None:
        _check_run(source, theirs, config)
    classifier = _classifier(model) if config.task.kind == "classification" else []
    left = classifier if means_other or _has_other_classes(classifier, given, wanted) else []
    if means_other and not left:
        raise ConfigError(f"model.weights = {source}: its {' and '.join(companions)} is not that of these data: outputs mean other things")
    # The file alone may count batches, for which a BatchNorm that is frozen here has no place.
    fitting = {**given, **{key: wanted[key] for key in left}}
    if found := misfits(wanted, fitting, lambda key: key.endswith(".num_batches_tracked") and key not in wanted):
        frozen = any(key.endswith(".num_batches_tracked") for key in found.get("missing", ()))
        hint = "; a BatchNorm that was frozen has no count of batches: of a detector give model.norm frozen" * frozen
        raise ConfigError(f"model.weights = {source}: these are not the weights of this network ({listed(found)}){hint}")
    begun = {key: fitting[key] for key in wanted}
    for key, value in begun.items():
        if wanted[key].is_floating_point() and (value.dtype not in _FLOATS or not value.isfinite().all()):
            what = f"{value.dtype}" if value.dtype not in _FLOATS else "not finite"
            raise ConfigError(f"model.weights = {source}: {key} is {what}, so it is no trained weight")
    model.load_state_dict(begun)
    if left:
        warnings.warn(
            f"model.weights = {source}: is of other classes, so the classifier begins at random ({', '.join(left)})",
            UserWarning, stacklevel=2,
        )  # fmt: skip


def told(config: RunConfig) -> dict[str, str]:
    """Which weights these are, for run.json: a path alone would not tell, since another file may lie there tomorrow."""
    path = weights_file(weights_of(config))
    return {"file": str(path), "sha256": sha256_of(path)}


def _classifier(model: nn.Module) -> list[str]:
    """The keys of the layers that give the scores."""
    modules = [c.module_name for c in classifiers(model, list(find_candidates(model)))]
    return [key for key in model.state_dict() if key.rpartition(".")[0] in modules]


def _has_other_classes(classifier: list[str], given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Whether the classifier is the same but for the number of its outputs."""
    shapes = [(given[key].shape, wanted[key].shape) for key in classifier if key in given]
    return any(one[:1] != other[:1] for one, other in shapes) and all(one[1:] == other[1:] for one, other in shapes)


def _config_of(run: Path) -> dict[str, Any] | None:
    """The configuration of the run in a folder; None where there is no run."""
    path = run / "run.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text())["config"]
        return completed(config)
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        raise ConfigError(f"model.weights: {path} does not hold the configuration of a run; give a file of weights") from None


def _means_other(run: Path, theirs: Mapping[str, Any], config: RunConfig, companions: Mapping[str, bytes]) -> bool:
    """Whether outputs of the run mean something else than those of this one will: by the names it has written down, or by its data, where
    these have none."""
    beside = [name for name in companions if (run / name).is_file()]
    if beside or config.task.kind != "classification":
        return any((run / name).read_bytes() != companions[name] for name in beside)
    return bool(theirs["data"]["name"] != config.data.name)


def _check_run(source: str, theirs: Mapping[str, Any], config: RunConfig) -> None:
    """Raise where weights fit, and something else that is known of their run does not."""
    d, model = config.data, theirs["model"]
    held, same_data = theirs["data"]["held_out"] or 0, theirs["data"]["name"] == d.name
    # The last images are held out, so that fewer are among more, but for digits, where they are evenly spaced.
    if d.held_out is not None and same_data and (held < d.held_out or (d.name == "digits" and held != d.held_out)):
        raise ConfigError(
            f"data.held_out = {d.held_out}: among these are images that the weights of {source} were trained on; give weights of a run "
            "that has held them out"
        )
    if config.task.kind in ("detection", "segmentation"):
        norm = model["norm"] or ("frozen" if model["backbone"] else "batch")
        if norm != (config.model.norm or "batch"):
            raise ConfigError(f"model.norm: the weights of {source} were trained with norm {norm}; give --model.norm {norm}")
