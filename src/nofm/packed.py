"""N:M weights without their zeros: the tensors of a packed file, and back, bit for bit.

A folded weight has its zeros written in, so it takes as many bytes as the dense one. Packed, it is two tensors:

    NAME             the kept values in the order of their groups, flat, in the weight's dtype
    NAME.nm_places   where they stand, as bytes, lowest bit first:
                     "index"  the place of each kept value in its group, ceil(log2 M) bits each, ascending
                     "bits"   a bit for each weight, 1 where it is kept

All other tensors lie there as they are, under their names. The metadata have one entry, "nofm.packed": JSON with a version, a line for each
packed weight, {"NAME": {"pattern": "1:16", "axis": 1, "shape": [64, 32, 3, 3], "places": "index"}}, and the names of weights that are
the same as others. Of the two ways to write places the shorter is taken: 1:16 in bf16 is 1.25 bits a weight instead of 16, 2:4 is 9. A
weight whose zeros lie anywhere has no pattern (null) and bits. Groups lie as in `masks`: along an axis, or "flat"; the last one of a row
may be short.

The values have the weight's own name, so that a reader who does not know of packing finds a weight of the wrong shape and says so. Under
another name it would find none, and some readers then go on with random weights (transformers' from_pretrained; strict=False).

A file comes from anywhere. So everything is checked against everything else before memory is taken for the weight, and what is wrong
is an error that names the weight.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import LayerError, PackedError, PatternError
from .masks import Axis, Grouping, check_finite, magnitude_key, pack, unpack
from .patterns import Pattern

__all__ = [
    "KEY",
    "PackedWeight",
    "is_packed",
    "metadata_of",
    "other_metadata",
    "pack_weight",
    "smaller_packed",
    "tensors_of",
    "unpack_weight",
    "unpacked",
]

_PLACES = ".nm_places"
KEY, _VERSION = "nofm.packed", 1


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight without its zeros. `grouping` is None where they lie anywhere."""

    values: Tensor
    places: Tensor
    grouping: Grouping | None
    shape: torch.Size

    @property
    def line(self) -> dict[str, Any]:
        """What the metadata say of it."""
        shape = list(self.shape)
        if self.grouping is None:
            return {"pattern": None, "axis": None, "shape": shape, "places": "bits"}
        pattern = self.grouping.pattern
        return {"pattern": str(pattern), "axis": self.grouping.axis, "shape": shape, "places": "index" if _by_index(pattern) else "bits"}

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.places.nbytes


def pack_weight(name: str, weight: Tensor, grouping: Grouping | None) -> PackedWeight:
    """`weight` without its zeros; raises where it has more weights in a group than its pattern keeps. -0.0 is a zero like any other."""
    check_finite(weight, name)
    if grouping is None:
        kept = magnitude_key(weight) != 0
        return PackedWeight(_bits(weight)[kept].view(weight.dtype), pack(kept), None, weight.shape)
    kept_GM = grouping.split(grouping.mask(weight))
    broken = int(((grouping.split(magnitude_key(weight)) != 0) & ~kept_GM).any(-1).sum())
    if broken:
        raise LayerError(
            f"{name}: {broken:,} of its {grouping.groups(weight.shape):,} groups hold more than {grouping.pattern} keeps; "
            "a model that trains has dense weights, which fold_ or the layers themselves mask"
        )
    values = grouping.split(_bits(weight))[kept_GM].view(weight.dtype)
    if not _by_index(grouping.pattern):
        return PackedWeight(values, pack(kept_GM), grouping, weight.shape)
    places_K = kept_GM.nonzero()[:, -1]
    width = _width(grouping.pattern)
    return PackedWeight(values, pack((places_K[:, None] >> torch.arange(width, device=weight.device)) & 1 == 1), grouping, weight.shape)


def unpack_weight(name: str, line: Any, values: Tensor, places: Tensor) -> Tensor:
    """The weight that a line of the metadata and its two tensors stand for, with +0.0 where nothing was kept."""
    shape, grouping = _read_line(name, line)
    if values.dim() != 1 or places.dim() != 1 or places.dtype != torch.uint8:
        raise PackedError(f"{name}: its values and places must be flat, and these bytes; the file is damaged, or not from nofm")
    if not values.is_floating_point():
        raise PackedError(f"{name}: its values are {values.dtype}, which no weight is")
    bits = _bits(values)
    kept_GM = _kept(name, places, values.numel(), shape, grouping)
    x_GM = torch.zeros(kept_GM.shape, dtype=bits.dtype, device=values.device)
    x_GM[kept_GM] = bits
    return (x_GM if grouping is None else grouping.join(x_GM, shape)).contiguous().view(values.dtype)


def smaller_packed(weight: Tensor) -> bool:
    """Whether a weight with zeros anywhere takes fewer bytes as values and bits."""
    zeros = int((magnitude_key(weight) == 0).sum())
    return zeros * weight.element_size() > -(-weight.numel() // 8)


def _bits(x: Tensor) -> Tensor:
    """The numbers as integers of their size: torch moves those of every dtype, and leaves -0.0 and denormals as they are."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


# ---- a file ----


def tensors_of(name: str, weight: PackedWeight) -> dict[str, Tensor]:
    """What stands for a weight in a file."""
    return {name: weight.values, name + _PLACES: weight.places}


def metadata_of(lines: Mapping[str, Any], same: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file with these packed weights, with weights that are the same as others, and what else is to be kept."""
    return {**others, KEY: json.dumps({"version": _VERSION, "weights": dict(lines), "same": dict(same)})}


def is_packed(file: Any) -> bool:
    """Whether an open safetensors file has packed weights."""
    return KEY in (file.metadata() or {})


def other_metadata(file: Any) -> dict[str, str]:
    """The metadata of an open file, but for those of packing."""
    return {key: text for key, text in (file.metadata() or {}).items() if key != KEY}


def unpacked(path: Path, file: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an open packed file, one by one, zeros written in; shared ones last."""
    lines, same = _metadata(path, file.metadata()[KEY])
    names: set[str] = set(file.keys())
    shared: dict[str, Tensor] = {}
    for name in lines:
        if not {name, name + _PLACES} <= names:
            raise PackedError(f"{path}: {name} should be there as {name} and {name + _PLACES}; the file is damaged")
    for name in sorted(names - {name + _PLACES for name in lines}):
        weight = file.get_tensor(name)
        if name in lines:
            weight = unpack_weight(name, lines[name], weight, file.get_tensor(name + _PLACES))
        shared |= {name: weight} if name in same.values() else {}
        yield name, weight
    for name, original in same.items():
        if name in names or original not in shared:
            raise PackedError(f"{path}: {name} is said to be the same as {original!r}, which cannot be; the file is damaged")
        yield name, shared[original]


def _metadata(path: Path, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        about = json.loads(text)
    except ValueError as error:
        raise PackedError(f"{path}: its metadata are no JSON ({error}); the file is damaged") from None
    version = about.get("version") if isinstance(about, dict) else None
    if version != _VERSION:
        raise PackedError(f"{path}: version {version!r} of the packed format; this nofm reads {_VERSION}")
    lines, same = about.get("weights"), about.get("same")
    if not isinstance(lines, dict) or not isinstance(same, dict):
        raise PackedError(f"{path}: its metadata do not say which weights are packed; the file is damaged")
    return lines, same


# ---- places ----


def _width(pattern: Pattern) -> int:
    """The bits of one place in a group."""
    return max(1, (pattern.m - 1).bit_length())


def _by_index(pattern: Pattern) -> bool:
    return pattern.n * _width(pattern) < pattern.m


def _kept(name: str, places: Tensor, kept: int, shape: torch.Size, grouping: Grouping | None) -> Tensor:
    """The mask that `places` tell, in groups; raises where they cannot be those of `kept` weights in a weight of this shape."""
    expected = kept if grouping is None else grouping.kept(shape)
    if kept != expected:
        raise PackedError(f"{name}: {kept:,} values for a weight of shape {tuple(shape)}, which keeps {expected:,}; the file is damaged")
    by_index = grouping is not None and _by_index(grouping.pattern)
    whole = shape if grouping is None else grouping.split(torch.empty(shape, device="meta")).shape
    width = _width(grouping.pattern) if grouping is not None and by_index else 0
    size = -(-(kept * width if by_index else whole.numel()) // 8)
    if places.numel() != size:
        raise PackedError(f"{name}: {places.numel():,} bytes of places where {size:,} are needed; the file is damaged")
    if grouping is None:
        mask = unpack(places, whole)
        right = int(mask.sum()) == kept
    else:
        mask = _from_index(name, unpack(places, torch.Size((kept, width))), whole, shape, grouping) if by_index else unpack(places, whole)
        in_row = grouping.split(torch.ones(shape, dtype=torch.bool))  # not so: what fills up a short last group
        right = bool((mask.sum(-1) == _counts(shape, grouping, mask.device)).all()) and not bool((mask & ~in_row).any())
    if not right:
        raise PackedError(f"{name}: its places do not have as many weights in each group as its values; the file is damaged")
    return mask


def _from_index(name: str, bits_KW: Tensor, whole: torch.Size, shape: torch.Size, grouping: Grouping) -> Tensor:
    places_K = (bits_KW.to(torch.int64) << torch.arange(bits_KW.shape[1], device=bits_KW.device)).sum(-1)
    counts_G = _counts(shape, grouping, bits_KW.device).expand(whole[:-1]).reshape(-1)
    group_K = torch.arange(counts_G.numel(), device=bits_KW.device).repeat_interleave(counts_G)
    ascending = (places_K[1:] > places_K[:-1]) | (group_K[1:] != group_K[:-1])
    if bool((places_K >= whole[-1]).any()) or not bool(ascending.all()):
        raise PackedError(f"{name}: its places are not ascending places of a group of {whole[-1]}; the file is damaged")
    mask = torch.zeros(whole.numel(), dtype=torch.bool, device=bits_KW.device)
    mask[group_K * whole[-1] + places_K] = True
    return mask.view(whole)


def _counts(shape: torch.Size, grouping: Grouping, device: torch.device) -> Tensor:
    """How many weights each group of a row keeps: N, and no more than it has in a short last one."""
    size, pattern = grouping.row_size(shape), grouping.pattern
    lengths = [min(pattern.m, size - start) for start in range(0, size, pattern.m)]
    return torch.tensor([min(pattern.n, length) for length in lengths], device=device)


# ---- a line of the metadata ----


def _read_line(name: str, line: Any) -> tuple[torch.Size, Grouping | None]:
    fields = {"pattern", "axis", "shape", "places"}
    if not isinstance(line, Mapping) or set(line) != fields:
        raise PackedError(f"{name}: the metadata say {line!r} of it, and should have {', '.join(sorted(fields))}")
    sizes = line["shape"]
    if not isinstance(sizes, list) or not all(type(size) is int and 0 < size < 2**40 for size in sizes) or math.prod(sizes) >= 2**48:
        raise PackedError(f"{name}: {sizes!r} is no shape of a weight")
    shape = torch.Size(sizes)
    if line["pattern"] is None:
        expected, grouping = "bits", None
    else:
        grouping = _grouping(name, line["pattern"], line["axis"], shape)
        expected = "index" if _by_index(grouping.pattern) else "bits"
    if line["places"] != expected:
        raise PackedError(f"{name}: places as {line['places']!r}, and {line['pattern']} has them as {expected!r}")
    return shape, grouping


def _grouping(name: str, pattern: Any, axis: Any, shape: torch.Size) -> Grouping:
    if not (axis == "flat" or type(axis) is int):
        raise PackedError(f'{name}: groups along {axis!r}; an axis is a whole number, or "flat"')
    known: Axis = axis
    try:
        grouping = Grouping(Pattern(pattern), known, pad=True)
        grouping.row_size(shape)
    except PatternError as error:
        raise PackedError(f"{name}: {error}") from None
    return grouping
