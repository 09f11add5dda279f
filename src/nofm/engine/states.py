"""A state as two byte strings and back: JSON for its structure, safetensors for its tensors.

A state is a dict with text keys whose leaves are tensors, int, float, bool, str, None, and lists, tuples and dicts of these. In the
JSON a dict is an object and a leaf is itself, except for what JSON lacks: an object with one key that starts with "/", which no key
of a state can, says what is meant: `/tensor`, `/complex`, `/tuple`, `/int` (too long to be read as decimal), `/float` (not finite).
A tensor's name in the safetensors file is its path, "model/conv1.weight", so that any safetensors reader can open the file.

The JSON also holds dtype and shape of every tensor. With them the header of the tensor file is known before it is read: it is
compared, byte for byte, and never parsed. That leaves a hostile header (bombs, overlaps, duplicates) nothing to work on. The file
is written here rather than by safetensors.torch.save, which needs numpy and all bytes in memory at once, three times over.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import NofmError

__all__ = ["MAX_JSON", "CheckpointError", "Packed", "Plan", "pack", "parse_json", "plan"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_MAX_DEPTH = 100  # far more than a state needs, far less than the stack bears
MAX_JSON = 8 << 20  # bytes; ten thousand tensors take one million, and more than this would take seconds to refuse
_MIN_ENTRY = 48  # bytes that the header takes for a tensor, at least
_MAX_DIMS = 64  # as in torch itself
_LONG_INT = 1024  # bits; Python reads decimals of up to 4300 digits


class CheckpointError(NofmError):
    """A checkpoint that cannot be written, or none that can be read. Names the path and the reason."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a tensor lies in the tensor file: the same at saving and at loading, since both know name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return _DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Packed:
    """A state, ready to be written. Tensors are turned into bytes one at a time, as they are asked for."""

    json: bytes
    header: bytes
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return len(self.json) + len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def chunks(self) -> Iterator[bytes | bytearray]:
        """The bytes of the tensor file."""
        yield self.header
        yield from (_bytes_of(tensor) for tensor in self.tensors if tensor.numel())


def pack(state: dict[str, Any]) -> Packed:
    """Take a state apart. Everything that cannot be saved is found here, before the disk is touched."""
    if not isinstance(state, dict):
        raise CheckpointError(f"a state is a dict, got {type(state).__name__}")
    tensors: dict[_Slot, Tensor] = {}
    text = json.dumps(_plain(state, (), tensors), separators=(",", ":")).encode()
    if len(text) > MAX_JSON:
        raise CheckpointError(
            f"what is not tensors in the state takes {len(text):,} bytes, more than {MAX_JSON:,}; make tensors of long lists"
        )
    slots = _in_order(tensors)
    return Packed(text, _header(slots), tuple(tensors[slot] for slot in slots))


@dataclass(frozen=True, slots=True)
class Plan:
    """What the JSON of a state says, before its tensor file is read."""

    plain: dict[str, Any]
    header: bytes
    starts: dict[_Slot, int]

    def state(self, data: bytearray) -> dict[str, Any]:
        """The state, with its tensors from the contents of the tensor file."""
        if not data.startswith(self.header):
            raise CheckpointError("the header of the tensor file is not the one that state.json calls for")
        try:
            state: dict[str, Any] = _rebuilt(self.plain, (), lambda slot: _tensor(slot, data, self.starts[slot]))
            return state
        except (RuntimeError, TypeError, OverflowError) as error:  # torch's words for shapes that it cannot make
            raise CheckpointError(f"state.json describes a tensor that cannot be: {error}") from error


def plan(text: bytes | bytearray, size: int) -> Plan:
    """Read the JSON of a state whose tensor file is of `size` bytes; `CheckpointError` unless the two fit to the byte."""
    plain = parse_json(text)
    slots: list[_Slot] = []

    def note(slot: _Slot) -> None:
        slots.append(slot)
        if len(slots) * _MIN_ENTRY > size:  # soon said, however many there are
            raise CheckpointError("state.json calls for more tensors than the tensor file can hold")

    if not isinstance(_rebuilt(plain, (), note), dict):
        raise CheckpointError("state.json holds no state")
    slots = _in_order(slots)
    header = _header(slots)
    starts = dict(zip(slots, accumulate((slot.nbytes for slot in slots), initial=len(header)), strict=False))
    if size != len(header) + sum(slot.nbytes for slot in slots):
        raise CheckpointError("the tensor file is longer or shorter than the tensors that state.json calls for")
    return Plan(plain, header, starts)


def parse_json(text: bytes | bytearray) -> Any:
    """JSON as this package writes it: no key twice, no NaN, no nesting that would break the stack."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not the JSON that was written: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise CheckpointError("a key occurs twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise CheckpointError(f"{name} is no JSON")


def _plain(value: Any, path: tuple[str, ...], tensors: dict[_Slot, Tensor]) -> Any:
    """`value` in the words of JSON; the tensors in it go to `tensors`. Subclasses, of dict for example, become the plain type."""
    where = "/".join(path)
    if len(path) > _MAX_DEPTH:
        raise CheckpointError(f"{where[:80]}...: a state holds at most {_MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _LONG_INT else {"/int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"/float": struct.pack(">d", value).hex()}
    if isinstance(value, Tensor):
        return _described(value, where, tensors)
    if isinstance(value, dict):
        return {_checked_key(key, where): _plain(item, (*path, key), tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
        return {"/tuple": items} if isinstance(value, tuple) else items
    raise CheckpointError(f"{where}: {type(value).__name__} cannot be saved; a state holds tensors, numbers, text, None, lists and dicts")


def _checked_key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise CheckpointError(f"{where or 'state'}: key {key!r} is {type(key).__name__}; the keys of a state are text")
    if "/" in key:
        raise CheckpointError(f'{where or "state"}: key {key!r} holds a "/", which separates the levels of a state')
    return str.__str__(key)


def _described(tensor: Tensor, name: str, tensors: dict[_Slot, Tensor]) -> dict[str, list[Any]]:
    """The JSON that stands for a tensor, which goes to `tensors` in the form in which it is written."""
    kind, stored = "/tensor", tensor.detach()
    if type(stored) is not Tensor or stored.layout != torch.strided or stored.device.type == "meta":
        what = "meta tensor" if tensor.device.type == "meta" else f"{type(tensor).__name__} ({tensor.layout})"
        raise CheckpointError(f"{name}: a {what} cannot be saved; give a plain dense tensor (of a DTensor, full_tensor())")
    if tensor.dim() >= _MAX_DIMS:  # one more for the parts of complex numbers
        raise CheckpointError(f"{name}: a tensor of {tensor.dim()} dimensions cannot be saved")
    if stored.is_complex():
        kind, stored = "/complex", torch.view_as_real(stored.resolve_conj())
    if stored.dtype not in _NAMES:
        raise CheckpointError(f"{name}: {tensor.dtype} cannot be saved; possible are {', '.join(_DTYPES)} and complex")
    if name == "__metadata__" or not _is_utf8(name):
        raise CheckpointError(f"{name!r}: not a name that a tensor can have in a safetensors file")
    slot = _Slot(name, _NAMES[stored.dtype], tuple(stored.shape))
    tensors[slot] = stored
    return {kind: [slot.dtype, list(slot.shape)]}


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _rebuilt(plain: Any, path: tuple[str, ...], take: Callable[[_Slot], Tensor | None]) -> Any:
    """The inverse of `_plain`. Every tensor is asked for with `take`."""
    if len(path) > _MAX_DEPTH:
        raise CheckpointError(f"state.json holds more than {_MAX_DEPTH} levels")
    if isinstance(plain, list):
        return [_rebuilt(item, (*path, str(i)), take) for i, item in enumerate(plain)]
    if isinstance(plain, float) and not math.isfinite(plain):
        raise CheckpointError("state.json holds a number out of range")
    if not isinstance(plain, dict):
        return plain
    marked = [key for key in plain if "/" in key]
    if not marked:
        return {key: _rebuilt(item, (*path, key), take) for key, item in plain.items()}
    kind, content = marked[0], plain[marked[0]]
    match kind, content:
        case _ if len(plain) > 1:
            pass
        case "/tuple", list():
            return tuple(_rebuilt(content, path, take))
        case "/int", str() if re.fullmatch("-?0x[0-9a-f]+", content):
            return int(content, 16)
        case "/float", str() if re.fullmatch("[0-9a-f]{16}", content):
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "/tensor" | "/complex", [str(dtype), list(shape)] if dtype in _DTYPES and _is_shape(shape):
            tensor = take(_Slot("/".join(path), dtype, tuple(shape)))
            return torch.view_as_complex(tensor) if kind == "/complex" and tensor is not None else tensor
    raise CheckpointError(f"state.json holds {reprlib.repr(kind)}: {reprlib.repr(content)}, which means nothing in a state")


def _is_shape(shape: list[Any]) -> bool:
    return len(shape) <= _MAX_DIMS and all(type(n) is int and 0 <= n < 2**63 for n in shape)


def _in_order(slots: Iterable[_Slot]) -> list[_Slot]:
    """The order in the tensor file: by size of item, so that each tensor is aligned, then by name."""
    return sorted(slots, key=lambda slot: (-slot.itemsize, slot.name))


def _header(slots: list[_Slot]) -> bytes:
    """The start of the tensor file: the length of the JSON as 8 bytes, then the JSON, filled up with spaces to a multiple of 8."""
    entries, end = {}, 0
    for slot in slots:
        start, end = end, end + slot.nbytes
        entries[slot.name] = {"dtype": slot.dtype, "shape": slot.shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes_of(tensor: Tensor) -> bytearray:
    """The bits of a tensor in the order of its logical index, whatever its strides and device."""
    data = bytearray(tensor.nbytes)
    flat = tensor.resolve_neg().contiguous().view(-1)
    torch.frombuffer(data, dtype=torch.uint8).copy_(flat.view(torch.uint8))
    return data


def _tensor(slot: _Slot, data: bytearray, start: int) -> Tensor:
    """A tensor with memory of its own."""
    if slot.nbytes == 0:  # frombuffer wants at least one byte
        return torch.empty(slot.shape, dtype=_DTYPES[slot.dtype])
    flat = torch.frombuffer(data, dtype=torch.uint8, count=slot.nbytes, offset=start).clone()
    return flat.view(_DTYPES[slot.dtype]).view(slot.shape)
