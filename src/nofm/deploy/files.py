"""`save_packed(model, path)` and `load_packed(path)`: a network's file without its zeros, one safetensors file, nothing to unpickle.

What is in it is said in `nofm.packed`. Here is what a user hands over: a model that is sparse, one that was folded, or a state dict.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..analysis import verify
from ..choose import Rules
from ..errors import LayerError, NofmError, NoZerosError, PackedError
from ..masks import Grouping
from ..packed import KEY, PackedWeight, is_packed, metadata_of, other_metadata, pack_weight, smaller_packed, tensors_of, unpacked
from ..site import sites, unwrap
from ..unfinished import too_early, trainings, who_keeps_more, why_more
from .folded import folded_weights

__all__ = ["PackedFile", "load_packed", "repack", "save_packed"]

_PT = {"format": "pt"}  # which other readers of safetensors ask for


@dataclass(frozen=True, slots=True)
class PackedFile:
    """What was written; printed, a line.

    dense_bytes   of the file that was read, header included; of a model or a state dict, or of a file that was packed, all its tensors.
    bytes         of the file that was written, header included.
    """

    path: Path
    packed: int  # weights without their zeros
    tensors: int
    dense_bytes: int
    bytes: int

    def __str__(self) -> str:
        if not self.packed:
            return f"{self.path}: {self.tensors} tensors, {_size(self.bytes)}"
        share = self.bytes / self.dense_bytes
        return (
            f"{self.path}: {self.packed} of {self.tensors} tensors packed, {_size(self.dense_bytes)} -> {_size(self.bytes)} ({share:.1%})"
        )


def _size(count: int) -> str:
    return f"{count / 1e6:,.2f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def save_packed(
    model_or_weights: nn.Module | Mapping[str, Tensor],
    path: str | Path,
    pattern: Rules | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> PackedFile:
    """Write a model, or a state dict with zeros in it, to `path` without its zeros.

    A sparsified model is written as its layers see it, as `fold_` would leave it, and stays as it is. Of a folded model or a state dict
    the pattern of each weight is found, or taken from `pattern` (one, or rules, as for `verify`). `metadata` are texts of
    your own beside those of the format. With weights spread over processes (FSDP2), call it on all of them; rank 0 writes.
    """
    path = _target(path)
    _check_given(model_or_weights, metadata)
    named, groupings = (
        _of_model(model_or_weights, pattern) if isinstance(model_or_weights, nn.Module) else _of_state(model_or_weights, pattern)
    )
    first, same = _shared(named)
    tensors: dict[str, Tensor] = {}
    lines: dict[str, Any] = {}
    for name, tensor in first.items():
        found = _packed(name, tensor, groupings)
        if found is None:
            _add(tensors, name, tensor)
            continue
        lines[name] = found.line
        for part, half in tensors_of(name, found).items():
            _add(tensors, part, half)
    if not lines:
        raise NoZerosError(
            "no weight has zeros worth leaving out. The state dict of a sparsified model, and a checkpoint of a framework, hold its dense "
            "weights: give the model itself, or fold_ it first. What is dense is a matter for safetensors.torch.save_file"
        )
    data = save(tensors, metadata_of(lines, same, {**_PT, **(metadata or {})}))
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()) or torch.distributed.get_rank() == 0:
        _write_whole(path, data)
    return PackedFile(path, len(lines), len(first), sum(t.nbytes for t in first.values()), len(data))


def repack(path: Path, target: Path, form: Literal["packed", "plain"]) -> PackedFile:
    """Write the weights of a safetensors file, packed or not, to another one in this form."""
    target = _target(target)
    with _opened(path) as file:
        others = other_metadata(file)
        was_packed = is_packed(file)
        named = unpacked(path, file) if was_packed else ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        weights = {name: tensor.clone() for name, tensor in named}  # a file that has zeros has shared weights twice
    if form == "packed":
        read = path.stat().st_size
        written = save_packed(weights, target, metadata=others)
        return written if was_packed else replace(written, dense_bytes=read)
    data = save(weights, {**_PT, **others})
    _write_whole(target, data)
    return PackedFile(target, 0, len(weights), sum(t.nbytes for t in weights.values()), len(data))


def load_packed(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a packed file, with its zeros: for `model.load_state_dict(...)` of the dense model, or of the sparsified one."""
    path = Path(path)
    with _opened(path) as file:
        if not is_packed(file):
            raise PackedError(f"{path}: is not packed; safetensors.torch.load_file reads it")
        return dict(unpacked(path, file))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise NofmError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; give a safetensors file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise PackedError(f"{path}: not a readable safetensors file ({error}); other formats are not opened, for safety") from None


# ---- what is written ----


def _of_model(model: nn.Module, pattern: Rules | None) -> tuple[dict[str, Tensor], dict[str, Grouping]]:
    model = unwrap(model)
    _check_tensors(model.state_dict())
    found = list(sites(model))
    if who := who_keeps_more(found):
        how = "Train until then, or handle.detach() first, which leaves layers their pattern; of a copy, densify_ and sparsify_ it first"
        raise LayerError(f"{who}, and a packed file holds its pattern: {why_more(found)}. {how}")
    if said := too_early("packed", trainings(found)):
        warnings.warn(said, stacklevel=3)  # who has called save_packed
    groupings = {site.key: site.grouping for site in found}
    if not groupings:
        return _of_state(folded_weights(model), pattern)
    if pattern is not None:
        raise LayerError(f"pattern={pattern!r}: a sparsified model has patterns of its own; leave it out")
    return folded_weights(model), groupings


def _of_state(state: Mapping[str, Any], pattern: Rules | None) -> tuple[dict[str, Tensor], dict[str, Grouping]]:
    _check_tensors(state)
    found = verify(state, pattern)
    wrong = [f"{w.name} ({w.violations:,} of {w.groups:,} groups)" for w in found.weights if w.pattern is not None and not w.ok]
    if pattern is not None and wrong:
        raise LayerError(f"pattern={pattern!r}: {', '.join(wrong[:5])}{', ...' * (len(wrong) > 5)} do not have it; see nofm.verify")
    groupings = {
        w.name: Grouping(w.pattern, w.axis, pad=True) for w in found.weights if w.ok and w.pattern is not None and w.axis is not None
    }
    return dict(state), groupings


def _check_tensors(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise LayerError(f"{name}: is no tensor but a {type(value).__name__}, and a file of weights holds tensors only; leave it out")
        if value.is_meta:
            raise LayerError(f"{name}: is on the meta device, so it has no values to write; load the weights first")


def _shared(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor by its first name, and the other names of those that have several."""
    first: dict[str, Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}
    same: dict[str, str] = {}
    for name, tensor in named.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if place in names:
            same[name] = names[place]
        else:
            first[names.setdefault(place, name)] = tensor.detach()
    return first, same


def _packed(name: str, tensor: Tensor, groupings: Mapping[str, Grouping]) -> PackedWeight | None:
    """The tensor without its zeros, where that is smaller."""
    if tensor.dim() < 2 or not tensor.is_floating_point() or not tensor.numel():
        return None
    grouping = groupings.get(name)
    if grouping is None or grouping.pattern.m == 1:  # unstructured: zeros anywhere
        return pack_weight(name, tensor, None) if smaller_packed(tensor) else None
    found = pack_weight(name, tensor, grouping)
    return found if found.nbytes < tensor.nbytes else None


def _add(tensors: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    if name in tensors:
        raise LayerError(f"{name}: two tensors of the file would have this name; rename the one in the model")
    tensors[name] = tensor.cpu().contiguous().clone()  # safetensors writes no views


def _target(path: str | Path) -> Path:
    path = Path(path)
    if path.is_dir():
        raise NofmError(f"{path}: is a folder; give the file's name in it, such as {path / 'model.packed.safetensors'}")
    if not path.absolute().parent.is_dir():
        raise NofmError(f"{path}: there is no folder {path.absolute().parent}; make it first")
    return path


def _check_given(model_or_weights: Any, metadata: Mapping[str, str] | None) -> None:
    if not isinstance(model_or_weights, nn.Module | Mapping):
        raise LayerError(f"save_packed takes a model or a state dict, got {type(model_or_weights).__name__}")
    for key, text in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise LayerError(f"metadata {key!r}: {text!r} is no text, and a safetensors file keeps texts only")
        if key == KEY:
            raise LayerError(f"metadata {key!r}: is the format's own entry; use another name")


def _write_whole(path: Path, data: bytes) -> None:
    """All of it or nothing: a file of that name is replaced when the new one is safely there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
