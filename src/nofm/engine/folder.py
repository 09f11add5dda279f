"""The run folder: what a run leaves behind, and all that reports and analyses read.

run.json                       written once, at the start, and again where a run goes on with a changed configuration
events.jsonl                   one event a line, only ever appended to; the source of truth
checkpoints/                   see checkpoint.py
masks/step-00000400.safetensors    the masks of a step, one bit a weight
samples/                       of the last evaluation: something to look at (translations, fields of flow, detections)
model.safetensors              at the end: the weights with their zeros written in (model-ema.safetensors: of the average)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ..patterns import PatternLike
from ..site import sites
from .config import ConfigError
from .files import Disk, HeldError, hold, make_folder, write_file
from .movement import packed_masks

__all__ = ["RunFolder", "Sink"]


class Sink(Protocol):
    """Somewhere that events go besides events.jsonl."""

    def log(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class RunFolder:
    """The folder of one run, for the one process that writes it."""

    def __init__(self, path: Path, *, resume: bool, disk: Disk | None = None) -> None:
        self.path, self._disk = path, disk or Disk()
        self._made, self._own = not path.exists(), _is_unbegun(path)
        if not resume and not self._own:
            again = f"--resume (or nofm resume {path})"
            raise ConfigError(f"--out {path}: this folder is not empty; go on with that run by {again}, or give another folder")
        make_folder(self._disk, path / "checkpoints")
        make_folder(self._disk, path / "masks")
        try:
            hold(self._disk, path / "checkpoints" / ".lock")
        except HeldError as holder:
            raise ConfigError(f"--out {path}: {holder} is writing this run; stop it, or give another folder") from None
        self.sinks: list[Sink] = []
        self._events = open(path / "events.jsonl", "a+b", buffering=0)  # noqa: SIM115 - open as long as the run
        self._drop_torn_line()

    def _drop_torn_line(self) -> None:
        """A process that is killed in the middle of a write leaves half a line, which never was an event."""
        text = (self.path / "events.jsonl").read_bytes()
        self._events.truncate(text.rfind(b"\n") + 1)

    def earlier_config(self) -> dict[str, Any] | None:
        """The configuration that this run was started with, or None if it was not started before."""
        path = self.path / "run.json"
        if not path.exists():
            return None
        try:
            config = json.loads(path.read_text())["config"]
            if not isinstance(config, dict):
                raise TypeError
        except (ValueError, TypeError, KeyError, OSError):
            raise ConfigError(f"{path}: does not hold the configuration of a run; give another --out") from None
        return config

    def earlier_patterns(self) -> dict[str, PatternLike | None] | None:
        """The pattern of each sparse layer that this run was started with, or None if it was not started before."""
        path = self.path / "run.json"
        if not path.exists():
            return None
        try:
            return {layer["name"]: layer["pattern"] for layer in json.loads(path.read_text())["layers"] if layer["pattern"]}
        except (ValueError, TypeError, KeyError, OSError):
            raise ConfigError(f"{path}: does not hold the layers of a run; give another --out") from None

    def earlier_commands(self, command: Sequence[str], step: int) -> list[dict[str, Any]]:
        """The commands that have led to `step`, from where `command` goes on: in their order, each with the step at which the next one
        did. Those that trained nothing of it are left out, and so is `command` itself, given again; but a resume has its options from
        the command that began the run, whatever that has trained."""
        path = self.path / "run.json"
        if not path.exists():
            return []
        try:
            info = json.loads(path.read_text())
            found = [(list(map(str, row["command"])), int(row["until"])) for row in info.get("earlier", [])]
            found.append((list(map(str, info["command"])), step))
        except (ValueError, TypeError, KeyError, OSError):
            raise ConfigError(f"{path}: does not hold the commands of a run; give another --out") from None
        kept: list[dict[str, Any]] = []
        goes_on = list(command[1:2]) == ["resume"]
        for words, until in found:
            if min(until, step) > (kept[-1]["until"] if kept else 0) or (goes_on and not kept):
                kept.append({"command": words, "until": min(until, step)})
        return kept[:-1] if kept and kept[-1]["command"] == list(command) else kept

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Append an event, and tell the sinks."""
        event = {"event": name, "step": step, "time": time.time(), **fields}
        rest = json.dumps(event).encode() + b"\n"
        while rest:  # one write, so that lines never mix; a disk that is full takes a part without a word, and complains at the next
            rest = rest[self._events.write(rest) :]
        self._tell(event)

    def show(self, name: str, step: int, **fields: Any) -> None:
        """Tell the sinks alone, of what is too large for a line of events.jsonl."""
        self._tell({"event": name, "step": step, "time": time.time(), **fields})

    def _tell(self, event: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.log(event)

    def sync(self) -> None:
        """Make all events so far last."""
        os.fsync(self._events.fileno())

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file: there is the old one or the new one, never a part."""
        target = self.path / name
        temporary = target.with_name(f".tmp-{target.name}")
        temporary.unlink(missing_ok=True)
        write_file(self._disk, temporary, [data])
        self._disk.rename(temporary, target)
        self._disk.sync_dir(target.parent)

    def write_masks(self, step: int, model: nn.Module, masks: Mapping[str, Tensor] | None = None) -> None:
        """Keep the masks of a step, so that SAD between any two steps can be had later."""
        packed = {name: mask.cpu() for name, mask in (masks or packed_masks(model)).items()}
        facts = {
            "shapes": json.dumps({site.name: list(site.weight.shape) for site in sites(model)}),
            "patterns": json.dumps({site.name: str(site.grouping.pattern) for site in sites(model)}),
        }
        self.write(f"masks/step-{step:08d}.safetensors", save(packed, facts))

    def write_samples(self, files: Mapping[str, bytes]) -> None:
        """What the last evaluation has to show, by name."""
        make_folder(self._disk, self.path / "samples")
        for name, data in files.items():
            self.write(f"samples/{name}", data)

    def write_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Weights as a safetensors file, each with memory of its own."""
        own = {key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in weights.items()}
        self.write(name, save(own, {"format": "pt"}))

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        self._events.close()
        lock = self.path / "checkpoints" / ".lock"
        if self._own and _is_unbegun(self.path):
            self._vanish(lock)
        else:
            self._disk.unlock(lock)

    def _vanish(self, lock: Path) -> None:
        """Of a run that was refused before it began nothing is left, or the next try would be told to go on with it."""
        (self.path / "events.jsonl").unlink(missing_ok=True)
        self._disk.unlock(lock, remove=True)
        with suppress(OSError):  # whatever somebody has put there by now stays, and with it its folders
            for folder in (self.path / "checkpoints", self.path / "masks", *([self.path] if self._made else [])):
                folder.rmdir()


def _is_unbegun(path: Path) -> bool:
    """Whether nothing is in a folder but what a run makes there before it begins: not yet run.json, and no event."""
    if not path.exists():
        return True
    if {entry.name for entry in path.iterdir()} - {"checkpoints", "masks", "events.jsonl"}:
        return False
    inside = {entry.name for part in ("checkpoints", "masks") if (path / part).is_dir() for entry in (path / part).iterdir()}
    events = path / "events.jsonl"
    return inside <= {".lock"} and not (events.exists() and events.stat().st_size)
