"""`Store`: checkpoints that survive a crash, say themselves whether they are whole, and are read without running any code.

    checkpoints/latest                            one line: the name of the checkpoint to go on from
    checkpoints/step-00000400/manifest.json       format, step, size and SHA-256 of the other two, versions
                              state.json          the structure of the state and all that is not tensors (see states.py)
                              tensors.safetensors
    checkpoints/step-00000400.1/                  the same step saved again: a checkpoint is never written over
    checkpoints/.tmp-*                            what an interrupted save left; the next one deletes it
    checkpoints/.lock                             who writes here

The order of a save, each line on the disk before the next begins, is what makes it safe to stop anywhere:

    write the files into .tmp-step-N and sync each        else a whole-looking checkpoint may hold holes
    sync .tmp-step-N                                      else its files may have no names
    rename it to step-N, sync the folder                  else `latest` may name what is not there
    write .tmp-latest, sync it, rename it to `latest`     else `latest` may be empty
    sync the folder                                       else the save may be undone, and
    delete what is beyond `keep`                          ... what `latest` then still names may be gone

A load follows `latest` and checks everything against the manifest; what does not verify is skipped with a warning that names it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import platform
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..version import __version__
from .files import Disk, HeldError, hold, make_folder, remove, write_file
from .states import MAX_JSON, CheckpointError, Packed, pack, parse_json, plan

__all__ = ["CheckpointError", "Store"]

_FORMAT = 1
_MANIFEST, _STATE, _TENSORS = "manifest.json", "state.json", "tensors.safetensors"
_MAX_MANIFEST = 1 << 16  # bytes; ours takes about 500
_TEMPORARY = ".tmp-"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOOKS = 100  # how often a load looks again when a writer deletes what it is reading


@dataclass(frozen=True, slots=True)
class _Name:
    """The folder of a checkpoint: its step, and the how-manyeth save of that step it is."""

    step: int
    take: int = 0

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f".{self.take}" if self.take else "")

    @staticmethod
    def parse(text: str) -> _Name | None:
        match = re.fullmatch(r"step-([0-9]{8,20})(?:\.([0-9]{1,9}))?", text)
        name = match and _Name(int(match[1]), int(match[2] or 0))
        return name if name and str(name) == text else None  # one spelling of each


def _newest_first(names: Iterable[_Name], current: int) -> list[_Name]:
    """In the order in which a run at step `current` would want them.

    Steps beyond it belong to a past from which the run was taken back to an earlier step: they are older than all others.
    """
    return sorted(names, key=lambda name: (name.step <= current, name.step, name.take), reverse=True)


class Store:
    """The checkpoints of one run, the last `keep` of them, in `folder`.

    A process that has saved owns the folder until it ends or calls `close`: another one that saves there is refused. Reading is
    free for all, at any time.
    """

    def __init__(self, folder: str | Path, keep: int = 2, *, disk: Disk | None = None) -> None:
        if type(keep) is not int or keep < 1:
            raise CheckpointError(f"keep={keep!r}: the number of checkpoints to keep is a whole number, at least 1")
        self.folder = Path(folder)
        self.keep = keep
        self._disk = disk or Disk()

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write `state` as the checkpoint of `step`, then delete those beyond `keep`. Where it is, once it will last."""
        if type(step) is not int or not 0 <= step < 10**18:
            raise CheckpointError(f"step {step!r}: a step is a whole number, at least 0")
        packed = pack(state)
        try:
            make_folder(self._disk, self.folder)
            self._own()
            self._sweep()
            return self._write(step, packed)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._sweep()  # make room again
            raise CheckpointError(self._explain(error, step, packed)) from error

    def load(self, step: int | None = None) -> dict[str, Any]:
        """The newest state that verifies, or that of `step`. Tensors are on the CPU, each with memory of its own."""
        found = self._search(step)
        if found is None:
            raise CheckpointError(f"{self.folder}: there is no checkpoint")
        return found[1]

    def newest(self) -> dict[str, Any] | None:
        """What `load` gives; None if nothing was ever saved here."""
        found = self._search(None)
        return None if found is None else found[1]

    def latest(self) -> int | None:
        """The step that `load` gives; None if nothing was ever saved here. An error if there are checkpoints and none verifies."""
        found = self._search(None)
        return None if found is None else found[0].step

    def close(self) -> None:
        """Let another process save here."""
        self._disk.unlock(self.folder / ".lock")

    # Saving.

    def _own(self) -> None:
        try:
            hold(self._disk, self.folder / ".lock")
        except HeldError as holder:
            raise CheckpointError(f"{self.folder}: {holder} saves here; stop it, or give this run a folder of its own") from None

    def _sweep(self) -> None:
        """Delete what interrupted saves left. That it cannot be deleted is no reason not to save."""
        for name in self._disk.names(self.folder):
            if name.startswith(_TEMPORARY):
                self._delete(self.folder / name)

    def _delete(self, path: Path) -> None:
        try:
            remove(self._disk, path)
        except OSError as error:
            warnings.warn(f"{path}: cannot be deleted ({error.strerror}); delete it by hand", stacklevel=5)

    def _write(self, step: int, packed: Packed) -> Path:
        disk, taken = self._disk, self._disk.names(self.folder)
        name = _Name(step, max((other.take + 1 for other in map(_Name.parse, taken) if other and other.step == step), default=0))
        target, temporary = self.folder / str(name), self.folder / _free(f"{_TEMPORARY}{name}", taken)
        disk.mkdir(temporary)
        files = {
            _TENSORS: write_file(disk, temporary / _TENSORS, packed.chunks()),
            _STATE: write_file(disk, temporary / _STATE, [packed.json]),
        }
        write_file(disk, temporary / _MANIFEST, [_manifest(step, files)])
        disk.sync_dir(temporary)
        disk.rename(temporary, target)
        disk.sync_dir(self.folder)

        pointer = self.folder / _free(f"{_TEMPORARY}latest", taken)
        write_file(disk, pointer, [f"{name}\n".encode()])
        disk.rename(pointer, self.folder / "latest")
        disk.sync_dir(self.folder)
        self._retire(name)
        return target

    def _retire(self, current: _Name) -> None:
        """Delete all but the last take of the newest `keep` steps, of which `current`, to which `latest` points, is the first."""
        try:
            names = self._names()
        except OSError as error:
            warnings.warn(f"{self.folder}: old checkpoints cannot be deleted ({error.strerror})", stacklevel=4)
            return
        kept: dict[int, _Name] = {}
        for name in _newest_first(names, current.step):
            if len(kept) < self.keep and name.step not in kept:
                kept[name.step] = name
            else:
                self._delete(self.folder / str(name))

    def _explain(self, error: OSError, step: int, packed: Packed) -> str:
        where = f" at {error.filename}" if error.filename else ""
        room = ""
        if error.errno in _NO_ROOM:
            with contextlib.suppress(OSError):
                room = f"; {packed.nbytes:,} bytes are needed, {self._disk.free(self.folder):,} are free"
        return f"{self.folder / str(_Name(step))}: not saved: {error.strerror}{where}{room}. Earlier checkpoints are untouched"

    # Loading.

    def _names(self) -> list[_Name]:
        try:
            return [name for name in map(_Name.parse, self._disk.names(self.folder)) if name]
        except FileNotFoundError:
            return []

    def _search(self, step: int | None) -> tuple[_Name, dict[str, Any]] | None:
        """The first checkpoint that verifies; None if there is none at all."""
        for _ in range(_LOOKS):
            pointer = self._pointer()
            found, skipped = self._try_all(pointer, step)
            if not skipped or self._pointer() == pointer:
                break  # else a writer has moved on, and may have deleted what was read here: look again
        if found is None and (skipped or step is not None):
            reasons = "; ".join(skipped) or f"it holds {', '.join(map(str, self._names())) or 'none'}"
            raise CheckpointError(f"{self.folder}: no checkpoint{'' if step is None else f' of step {step}'} can be read: {reasons}")
        for reason in skipped:
            warnings.warn(f"{reason}; skipped", stacklevel=3)
        return found

    def _try_all(self, pointer: _Name | str | None, step: int | None) -> tuple[tuple[_Name, dict[str, Any]] | None, list[str]]:
        try:
            names = set(self._names())
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be read: {error.strerror}") from error
        skipped = []
        if isinstance(pointer, str):
            skipped, pointer = [pointer], None
        if pointer is None:
            order = _newest_first(names, max((name.step for name in names), default=0))
        else:
            order = [pointer, *_newest_first(names - {pointer}, pointer.step)]
        for name in order:
            if step in (None, name.step):
                try:
                    return (name, self._read(name)), skipped
                except CheckpointError as error:
                    skipped.append(f"{self.folder / str(name)}: {error}")
        return None, skipped

    def _pointer(self) -> _Name | str | None:
        """What `latest` names; a text that says what is wrong with it; None if it does not exist."""
        path = self.folder / "latest"
        try:
            text = self._disk.read(path, 100).decode()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            return f"{path}: {getattr(error, 'strerror', 'not text')}"
        return (text.endswith("\n") and _Name.parse(text[:-1])) or f"{path}: {text!r} is not the name of a checkpoint"

    def _read(self, name: _Name) -> dict[str, Any]:
        path = self.folder / str(name)
        try:
            if not self._disk.is_dir(path):
                raise CheckpointError("no such folder")
            if (held := set(self._disk.names(path))) != {_MANIFEST, _STATE, _TENSORS}:
                raise CheckpointError(f"holds {', '.join(sorted(held)[:5]) or 'nothing'} where a checkpoint has three files")
            entries = _checked_manifest(parse_json(self._disk.read(path / _MANIFEST, _MAX_MANIFEST)), name.step)
            # The small file first: it says how large the other one must be, before that is read.
            text = self._verified(path / _STATE, *entries[_STATE], limit=MAX_JSON)
            wanted = plan(text, entries[_TENSORS][0])
            return wanted.state(self._verified(path / _TENSORS, *entries[_TENSORS]))
        except OSError as error:
            raise CheckpointError(f"{error.filename}: {error.strerror}") from error

    def _verified(self, path: Path, size: int, digest: str, limit: int | None = None) -> bytearray:
        """The content of a file, if it is what the manifest says."""
        data = self._disk.read(path, size if limit is None else min(size, limit))
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            raise CheckpointError(f"{path.name} is not what its manifest says: it has changed since it was written")
        return data


def _free(name: str, taken: list[str]) -> str:
    """`name`, or with a number if it is taken: by something that could not be deleted."""
    numbered = (f"{name}-{i}" for i in range(len(taken)))
    return name if name not in taken else next(other for other in numbered if other not in taken)


def _manifest(step: int, files: dict[str, tuple[int, str]]) -> bytes:
    manifest = {
        "format": _FORMAT,
        "step": step,
        "files": {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()},
        "versions": {"nofm": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    }
    return json.dumps(manifest, indent=1).encode()


def _checked_manifest(manifest: Any, step: int) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of the two files. Their names are known here, so that no name in a manifest ever becomes a path."""
    if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
        raise CheckpointError(f"its {_MANIFEST} is not a manifest")
    if manifest["format"] != _FORMAT:
        raise CheckpointError(f"has format {manifest['format']}, this version of nofm reads format {_FORMAT}")
    files = manifest.get("files")
    if set(manifest) != {"format", "step", "files", "versions"} or not isinstance(files, dict) or set(files) != {_STATE, _TENSORS}:
        raise CheckpointError(f"its {_MANIFEST} does not have the entries of format {_FORMAT}")
    if type(manifest["step"]) is not int or manifest["step"] != step:
        raise CheckpointError(f"its {_MANIFEST} is of another step")
    return {name: _checked_entry(entry) for name, entry in files.items()}


def _checked_entry(entry: Any) -> tuple[int, str]:
    match entry:
        case {"size": int(size), "sha256": str(digest)} if len(entry) == 2 and size >= 0:
            return size, digest
    raise CheckpointError(f"its {_MANIFEST} has no size and SHA-256 of a file")
