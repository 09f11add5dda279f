"""What a network does, for people to judge: the samples of its last evaluation, as tasks leave them in a run's samples/ folder.

translations.jsonl   {"source", "reference", "hypothesis"} a line
flow-N.npz           "frame" (H, W, 3), "prediction" and "truth" (H, W, 2), "valid" (H, W)
objects-N.npz        "image" (H, W, 3), "names" of labels; "found_" and "truth_" "boxes", "labels", "scores" and "masks"

Evaluations on other data leave the same in folders of their own. Of each group the first run that has some is shown. Where groups were
measured on the same example, it is shown once, with what each makes of it.
"""

from __future__ import annotations

import base64
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .boxes import detection_sheet
from .compare import Group
from .errors import ReportError
from .evaluations import named
from .flow_colors import flow_sheet
from .read import Run

__all__ = ["shown"]

_TEXTS = ("source", "reference", "hypothesis")
_SHAPES = {
    "flow": {"frame": 3, "prediction": 3, "truth": 3, "valid": 2},
    "objects": {"image": 3, "names": 1, "truth_boxes": 2, "found_boxes": 2},
}
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Samples:
    """Where samples lie, and what they are of."""

    folder: Path
    seed: int
    averaged: bool


def shown(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The sections' values for the template: what the last evaluation of training has left, then what each on other data has."""
    sections = [_section("What it does", "the last evaluation", groups, _of_training)]
    for name in sorted({found.name for group in groups for run in group.runs for found in run.evaluations}):
        sections.append(_section(f"What it does: {name}", f"the evaluation {name}", groups, partial(_of_evaluation, name)))
    return [section for section in sections if section["translations"] or section["pictures"]]


def _section(title: str, of: str, groups: Sequence[Group], find: Callable[[Run], _Samples | None]) -> dict[str, Any]:
    found = {group.label: next((samples for run in group.runs if (samples := find(run)) is not None), None) for group in groups}
    there = {label: samples for label, samples in found.items() if samples is not None}
    rows = _translations({label: samples.folder / "translations.jsonl" for label, samples in there.items()})
    translators = [label for label in there if any(label in row for row in rows.values())]
    return {
        "title": title,
        "words": _words(of, there),
        "header": ["source", "reference", *(translators if len(groups) > 1 else ["translation"])],
        "translations": [[*texts, *(row.get(label, "") for label in translators)] for texts, row in rows.items()],
        "pictures": _pictures({label: samples.folder for label, samples in there.items()}, alone=len(groups) == 1),
    }


def _of_training(run: Run) -> _Samples | None:
    said = next((event.data for event in reversed(run.of("samples"))), None)
    return None if said is None else _Samples(run.folder / "samples", run.seed, bool(said.get("ema")))


def _of_evaluation(name: str, run: Run) -> _Samples | None:
    found = named(run.evaluations, name)
    return None if found is None or not found.samples.is_dir() else _Samples(found.samples, run.seed, found.averaged)


def _words(of: str, there: Mapping[str, _Samples]) -> str:
    seeds = ", ".join(dict.fromkeys(str(samples.seed) for samples in there.values()))
    averaged = [label for label, samples in there.items() if samples.averaged]
    by = (
        ""
        if not averaged
        else ", by the moving average of the weights"
        if len(averaged) == len(there)
        else f", {', '.join(averaged)} by the moving average of the weights"
    )
    return f"Examples of {of}, seed {seeds}{by}. They were not chosen."


# ---- texts ----


def _translations(files: dict[str, Path]) -> dict[tuple[str, str], dict[str, str]]:
    """By source and reference: the translation of each label."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for label, path in files.items():
        for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else [], start=1):
            try:
                sample = json.loads(line)
                source, reference, hypothesis = (sample[name] for name in _TEXTS)
            except (ValueError, KeyError, TypeError):
                raise ReportError(path, f"an object with {', '.join(_TEXTS)} is expected", number) from None
            rows.setdefault((str(source), str(reference)), {})[label] = str(hypothesis)
    return rows


# ---- pictures ----


def _pictures(folders: Mapping[str, Path], alone: bool) -> list[dict[str, Any]]:
    pictures = []
    for kind, truth in (("flow", "truth"), ("objects", "truth_boxes")):
        found: dict[tuple[str, bytes], dict[str, Arrays]] = {}
        for label, folder in folders.items():
            for path in sorted(folder.glob(f"{kind}-*.npz")):
                arrays = _read(path, kind)
                found.setdefault((path.name, arrays[truth].tobytes()), {})["network" if alone else label] = arrays
        for (name, _), by_label in found.items():
            sheet = _flow(by_label) if kind == "flow" else _objects(by_label)
            file = io.BytesIO()
            sheet.save(file, "PNG", optimize=True)
            words = f"{name.removesuffix('.npz')}: {', '.join(by_label)} and the truth"
            png = base64.b64encode(file.getvalue()).decode()
            pictures.append({"png": png, "width": sheet.width, "height": sheet.height, "words": words})
    return pictures


def _read(path: Path, kind: str) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise ReportError(path, f"cannot be read ({error})") from None
    for name, dimensions in _SHAPES[kind].items():
        if name not in arrays or arrays[name].ndim != dimensions:
            raise ReportError(path, f"an array {name!r} of {dimensions} dimensions is expected")
    return arrays


def _flow(by_label: dict[str, Arrays]) -> Any:
    first = next(iter(by_label.values()))
    predictions = {label: arrays["prediction"] for label, arrays in by_label.items()}
    return flow_sheet(first["frame"], predictions, first["truth"], first["valid"])


@dataclass(frozen=True, slots=True)
class _Objects:
    boxes: NDArray[Any]
    labels: NDArray[Any]
    scores: NDArray[Any] | None
    masks: NDArray[Any] | None

    @classmethod
    def of(cls, arrays: Arrays, side: str) -> _Objects:
        return cls(arrays[f"{side}_boxes"], arrays[f"{side}_labels"], arrays.get(f"{side}_scores"), arrays.get(f"{side}_masks"))


def _objects(by_label: dict[str, Arrays]) -> Any:
    first = next(iter(by_label.values()))
    found = {label: _Objects.of(arrays, "found") for label, arrays in by_label.items()}
    return detection_sheet(first["image"], found, _Objects.of(first, "truth"), [str(name) for name in first["names"]])
