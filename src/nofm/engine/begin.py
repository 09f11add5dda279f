"""Weights to begin with (model.weights): those of a finished run or of a safetensors file, in the place of random ones."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from ..choose import classifiers, find_candidates
from ..tasks.weights import listed, misfits, read_weights
from .complaints import weights_of
from .config import ConfigError, RunConfig

__all__ = ["begin_with_", "told"]


def begin_with_(model: nn.Module, config: RunConfig, companions: Mapping[str, bytes]) -> None:
    """Load them, all of them. Only a classifier may be of other classes than these data have; it keeps its random weights then.

    companions: files of a run that tell what outputs mean, such as the names of classes, as they follow from these data.
    """
    source = weights_of(config)
    given, wanted = read_weights(_file(source)), model.state_dict()
    other = _other_classes(model, given, wanted)
    if Path(source).is_dir():
        _check_run(Path(source), config, {} if other else companions)
    # Files from elsewhere may lack the count of batches, which matters to no result but where BatchNorm has no momentum.
    if found := misfits(wanted, {**given, **{key: wanted[key] for key in other}}, lambda key: key.endswith(".num_batches_tracked")):
        raise ConfigError(f"model.weights = {source}: these are not the weights of this network ({listed(found)})")
    model.load_state_dict({key: wanted[key] if key in other else given.get(key, wanted[key]) for key in wanted})
    if other:
        said = ", ".join(f"{key} {tuple(given[key].shape)} for {tuple(wanted[key].shape)}" for key in other)
        warnings.warn(f"model.weights = {source}: is of other classes; the classifier begins at random ({said})", UserWarning, stacklevel=2)


def told(config: RunConfig) -> dict[str, str]:
    """Which weights these are, for run.json: a path alone would not tell, since another file may lie there tomorrow."""
    path = _file(weights_of(config))
    with path.open("rb") as file:
        return {"file": str(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _file(source: str) -> Path:
    path = Path(source)
    return path / "model.safetensors" if path.is_dir() else path


def _other_classes(model: nn.Module, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """The keys of the classifier, where it is all that has another shape."""
    modules = [c.module_name for c in classifiers(model, list(find_candidates(model)))]
    differ = [key for key in wanted if key in given and given[key].shape != wanted[key].shape]
    return differ if all(key.rpartition(".")[0] in modules for key in differ) else []


def _check_run(run: Path, config: RunConfig, companions: Mapping[str, bytes]) -> None:
    """Raise where its weights fit and yet would mislead: outputs that mean other things, held-out images that they were trained on."""
    for name, data in companions.items():
        if (run / name).is_file() and (run / name).read_bytes() != data:
            raise ConfigError(f"model.weights = {run}: its {name} is not that of these data, so its outputs mean other things")
    d = config.data
    if d.held_out is None or not (run / "run.json").is_file():
        return
    theirs = json.loads((run / "run.json").read_text())["config"]["data"]
    if theirs["name"] == d.name and theirs.get("held_out") != d.held_out:
        raise ConfigError(
            f"data.held_out = {d.held_out}: among these are images that the weights of {run} were trained on; give weights of a run that "
            "has held out as many"
        )
