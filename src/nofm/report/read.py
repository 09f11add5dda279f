"""A run folder, read and checked: `load(folder)` -> Run.

The folder may come from a crash, a copy cut short or another version, so nothing in it is taken on trust: what the report needs
is checked here, once, and everything after this file can rely on it. One thing is forgiven: a last line of events.jsonl without
its end, which is what a crash leaves behind. It is left out, and the report says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import ReportError
from .evaluations import Evaluated, named, read_evaluations

__all__ = ["FOUND", "Event", "Layer", "Run", "load", "settled"]

FORMAT = 1
FOUND = "found:"  # what the name of an option begins with in files, where a method has settled it by itself

_RUN_KEYS: dict[str, tuple[type, ...]] = {
    "recipe": (str,),
    "config": (dict,),
    "command": (list,),
    "earlier": (list,),
    "seed": (int,),
    "versions": (dict,),
    "hardware": (dict,),
    "started": (str,),
    "layers": (list,),
    "commit": (str, type(None)),
    "workdir_commit": (str, type(None)),
    "cost": (dict, type(None)),
}
_COST_MAY_HAVE = {f"{what}{which}": (int, float) for what in ("params", "weights", "macs") for which in ("", "_sparse")}
_LAYER_KEYS: dict[str, tuple[type, ...]] = {"name": (str,), "kind": (str,), "shape": (list,), "pattern": (str,), "kept": (int,)}
_LAYER_MAY_HAVE: dict[str, tuple[type, ...]] = {"groups": (int, type(None)), "note": (str, type(None)), "macs": (int, float)}
_NUMBER = (int, float, type(None))  # None: JSON has no NaN, so a writer may say null
_EVENT_KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "start": {"resumed_from": (int, type(None))},
    "train": {"loss": _NUMBER},
    "eval": {"metrics": (dict,)},
    "found": {"values": (dict,)},
    "sad": {"since": (int,), "changed": (dict,), "weights": (int,)},
    "sad_from_start": {"changed": (dict,), "weights": (int,)},
    "end": {"metrics": (dict,), "seconds": _NUMBER},
    "error": {"message": (str,)},
}
_EVENT_MAY_HAVE: dict[str, dict[str, tuple[type, ...]]] = {"end": {"kept": (int,), "kept_in": (dict,), "unfinished": (str,)}}


@dataclass(frozen=True, slots=True)
class Event:
    """A line of events.jsonl."""

    kind: str
    step: int
    data: Mapping[str, Any]
    line: int


@dataclass(frozen=True, slots=True)
class Layer:
    """A row of the run's layer table. `pattern` is "" for a dense layer, and `note` then says why. `kept` is what the end of the run says,
    and before that, or where a run does not say it, what its beginning does. `macs` are those of all its weights, in one forward."""

    name: str
    kind: str
    shape: tuple[int, ...]
    pattern: str
    groups: int
    kept: int
    note: str
    macs: float | None = None
    ended: bool = field(default=False, repr=False)  # whether `kept` is what the end says; layer tables of runs are compared by repr

    @property
    def unstructured(self) -> bool:
        """Whether its method prunes anywhere: then the layer was whole when the run began, and its groups say nothing."""
        return self.pattern == "1:1"

    @property
    def settled(self) -> bool:
        """Whether `kept` is what the trained layer keeps."""
        return self.ended or not self.unstructured

    @property
    def macs_kept(self) -> float | None:
        """Multiply-adds of the weights that are kept, where both are known."""
        return None if self.macs is None or not self.settled else self.macs * self.kept / max(1, self.weights)

    @property
    def words(self) -> str:
        """Its pattern as a reader wants it."""
        return "unstructured" if self.unstructured else self.pattern

    @property
    def weights(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its folder tells it. `events` are those that count: what a resumed run did again is there once."""

    folder: Path
    info: Mapping[str, Any]
    layers: tuple[Layer, ...]
    events: tuple[Event, ...]
    notices: tuple[str, ...]
    evaluations: tuple[Evaluated, ...] = ()  # on other data, afterwards

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def seed(self) -> int:
        return int(self.info["seed"])

    @property
    def method(self) -> Mapping[str, Any]:
        """The options of its method and, as "kind", its name."""
        sparsity = self.info["config"].get("sparsity")
        method = sparsity.get("method") if isinstance(sparsity, dict) else None
        return method if isinstance(method, dict) else {"kind": method}

    def evaluated(self, name: str, metric: str) -> float | None:
        """A metric of an evaluation, where it has that."""
        found = named(self.evaluations, name)
        return None if found is None else found.metrics.get(metric)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def commands(self) -> list[tuple[tuple[str, ...], int]]:
        """The commands that made it, in their order: the words of each, and the step from which on it did. Each changed something."""
        typed = [*(row["command"] for row in self.info["earlier"]), self.info["command"]]
        begins = [0, *(row["until"] for row in self.info["earlier"])]
        return [(tuple(map(str, words)), begin) for words, begin in zip(typed, begins, strict=True)]

    @property
    def last_step(self) -> int:
        return max(event.step for event in self.events)

    @property
    def resumes(self) -> int:
        """How often the run went on from a checkpoint."""
        return sum(event.data["resumed_from"] is not None for event in self.of("start"))

    @property
    def status(self) -> str:
        """ "finished", "failed" or "unfinished": what the last word of the run was."""
        words = {"start": "unfinished", "end": "finished", "error": "failed"}
        return next((words[event.kind] for event in reversed(self.events) if event.kind in words), "unfinished")

    @property
    def found(self) -> dict[str, float]:
        """What its method has settled by itself, by the name of the option that was left to it."""
        return {name: value for event in self.of("found") for name, value in event.data["values"].items()}

    @property
    def unfinished(self) -> str:
        """What its method had yet to do when it ended: "" where nothing was left, and in runs from before they told."""
        return next((event.data.get("unfinished", "") for event in reversed(self.of("end"))), "")

    @property
    def seconds(self) -> float | None:
        """How long it took, as its end says."""
        return next((event.data["seconds"] for event in reversed(self.of("end"))), None)


def settled(found: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """The options that the methods of some runs have settled by themselves, each run's as its `found`, and what files call each of them."""
    return {name: f"{FOUND}{name}" for values in found for name in values}


def load(folder: Path) -> Run:
    """Read `folder`, or raise a `ReportError` that names the file and line that is wrong."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ReportError(folder, "no such folder; a run folder is what `nofm train --out DIR` leaves in DIR")
    info = _run_json(folder / "run.json")
    layers = tuple(_layer(folder / "run.json", index, row) for index, row in enumerate(info["layers"]))
    events, notices = _events(folder / "events.jsonl")
    _check_sad(folder / "events.jsonl", events, {layer.name for layer in layers})
    for event in events:
        if event.kind == "found":
            _check(folder / "events.jsonl", event.line, event.data["values"], dict.fromkeys(event.data["values"], (int, float)), "values.")
    counting = resumed(events)
    layers = _at_the_end(folder / "events.jsonl", layers, counting)
    if not any(event.kind in ("train", "eval", "sad") for event in counting):
        raise ReportError(folder / "events.jsonl", "no train, eval or sad event yet, so there is nothing to report")
    ended = next((event.step for event in reversed(counting) if event.kind == "end"), None)
    evaluations = read_evaluations(folder)
    past = [found.name for found in evaluations if found.step != ended]
    notices += [f"evaluations/{name}.json is left out, since the run has gone on after it; nofm evaluate --again" for name in past]
    return Run(folder, info, layers, counting, tuple(notices), tuple(found for found in evaluations if found.name not in past))


def resumed(events: Sequence[Event]) -> tuple[Event, ...]:
    """The events that count: a start from step s takes back what came before it after s, a start from nothing all of it."""
    counting: list[Event] = []
    for event in events:
        if event.kind == "start":
            since = event.data["resumed_from"]
            counting = [] if since is None else [before for before in counting if before.step <= since]
        counting.append(event)
    return tuple(counting)


def _run_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ReportError(path, "no such file; every run folder has one, so this folder is not a run or its copy is incomplete")
    info = _json(path, path.read_bytes(), 1)
    if not isinstance(info, dict):
        raise ReportError(path, f"an object is expected, got {type(info).__name__}")
    if info.get("format") != FORMAT:
        raise ReportError(path, f"format {info.get('format')!r} is not known, only {FORMAT}; read it with the nofm that wrote it")
    info = {"workdir_commit": None, "earlier": [], **info}  # which the first runs do not have
    _check(path, None, info, _RUN_KEYS)
    for index, row in enumerate(info["earlier"]):
        _check(path, None, row if isinstance(row, dict) else {}, {"command": (list,), "until": (int,)}, f"earlier[{index}].")
    _check(path, None, info["cost"] or {}, _among(_COST_MAY_HAVE, info["cost"] or {}), "cost.")
    return info


def _layer(path: Path, index: int, row: Any) -> Layer:
    if not isinstance(row, dict):
        raise ReportError(path, f"layers[{index}] is {type(row).__name__}, an object is expected")
    _check(path, None, row, _LAYER_KEYS | _among(_LAYER_MAY_HAVE, row), f"layers[{index}].")
    if not all(type(extent) is int and extent >= 0 for extent in row["shape"]):
        raise ReportError(path, f"layers[{index}].shape is {row['shape']}, whole numbers are expected")
    name, kind, shape, pattern, kept = (row[key] for key in _LAYER_KEYS)
    return Layer(name, kind, tuple(shape), pattern, row.get("groups") or 0, kept, row.get("note") or "", row.get("macs"))


def _at_the_end(path: Path, layers: tuple[Layer, ...], events: Sequence[Event]) -> tuple[Layer, ...]:
    """The layers with what they keep when the run has ended."""
    end = next((event for event in reversed(events) if event.kind == "end" and "kept_in" in event.data), None)
    if end is None:
        return layers
    kept = end.data["kept_in"]
    _check(path, end.line, kept, {layer.name: (int,) for layer in layers if layer.name in kept}, "kept_in.")
    return tuple(replace(layer, kept=kept[layer.name], ended=True) if layer.name in kept else layer for layer in layers)


def _events(path: Path) -> tuple[list[Event], list[str]]:
    if not path.is_file():
        raise ReportError(path, "no such file; the run has not begun, or its copy is incomplete")
    lines = path.read_bytes().split(b"\n")
    notices, events = [], []
    tail = lines.pop()  # empty, unless the last line was never finished
    if tail:
        try:
            json.loads(tail)
        except ValueError:  # a UnicodeDecodeError is one too
            notices.append(f"line {len(lines) + 1} of events.jsonl is cut short, as after a crash; it is left out")
        else:
            lines.append(tail)
    for number, line in enumerate(lines, start=1):
        event = _json(path, line, number)
        if not isinstance(event, dict):
            raise ReportError(path, f"an object is expected, got {type(event).__name__}", number)
        _check(path, number, event, {"event": (str,), "step": (int,)})
        kind = event["event"]
        _check(path, number, event, _EVENT_KEYS.get(kind, {}) | _among(_EVENT_MAY_HAVE.get(kind, {}), event))
        events.append(Event(kind, event["step"], event, number))
    if not events:
        raise ReportError(path, "no events; the run ended before its first line was complete")
    return events, notices


def _check_sad(path: Path, events: Sequence[Event], layers: set[str]) -> None:
    for event in events:
        if event.kind not in ("sad", "sad_from_start"):
            continue
        if event.data.get("since", 0) >= event.step or event.data["weights"] <= 0:
            raise ReportError(
                path, f"sad from step {event.data.get('since', 0)} to {event.step} of {event.data['weights']} weights", event.line
            )
        if unknown := sorted(set(event.data["changed"]) - layers):
            raise ReportError(path, f"sad of layer {unknown[0]!r}, which run.json does not list", event.line)
        if odd := [item for item in event.data["changed"].items() if type(item[1]) is not int]:
            raise ReportError(path, f"sad of layer {odd[0][0]!r} is {odd[0][1]!r}, a count is expected", event.line)


def _json(path: Path, text: bytes, first_line: int) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ReportError(path, f"not valid JSON: {error.msg} at column {error.colno}", first_line + error.lineno - 1) from error
    except UnicodeDecodeError as error:
        raise ReportError(path, f"not UTF-8: {error.reason} at byte {error.start}", first_line) from error


def _among(keys: Mapping[str, tuple[type, ...]], data: Mapping[str, Any]) -> dict[str, tuple[type, ...]]:
    """Those of `keys` that `data` has; the first runs have none of them."""
    return {key: types for key, types in keys.items() if key in data}


def _check(path: Path, line: int | None, data: Mapping[str, Any], keys: Mapping[str, tuple[type, ...]], prefix: str = "") -> None:
    """Raise unless `data` has all `keys` with one of their types. True and False are no numbers here."""
    for key, types in keys.items():
        if key not in data:
            raise ReportError(path, f'"{prefix}{key}" is missing', line)
        value = data[key]
        if not isinstance(value, types) or isinstance(value, bool):
            wanted = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise ReportError(path, f'"{prefix}{key}" is {value!r:.60}, {wanted} is expected', line)
