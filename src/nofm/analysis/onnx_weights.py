"""The weights of an ONNX file, each with the axis along which its node sums: that is where a runtime looks for N of every M.

Exporters move weights about. A Linear on three or more dimensions becomes a MatMul with its weight transposed, [in, out], under a name
such as `val_12`; batch norm is multiplied into convolutions; an attention's three projections may be one Split at run time. So neither
names nor shapes tell the axis, the node that multiplies by the weight does:

    Conv 1    ConvTranspose 0    Gemm 1 if transB, else 0    MatMul the last but one    LSTM, GRU, RNN the last

(of B; where the weight is A, the other of its last two). A weight is followed through what only moves it (Identity, Cast, Transpose,
Split). One that the file computes otherwise, out of constants, is told and not looked at: a runtime does not find zeros there. The
bodies of If and Loop are not entered.

Nothing of a file is run or unpickled: its graph is read, and tensors one by one when they are asked for, from beside the file where
they lie in one of their own. The package onnx is imported here alone, and only when such a file is read, so the library needs it no
more than it did.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import NofmError

__all__ = ["OnnxWeight", "onnx_weights"]

_RECURRENT = ("LSTM", "GRU", "RNN")
_SCOPES = "pkg.torch.onnx.name_scopes"  # where torch's exporter writes the modules that a node comes from


@dataclass(frozen=True, slots=True)
class OnnxWeight:
    """A weight as its node multiplies by it: `tensor` is summed along `axis`. Without a tensor, `note` says why."""

    name: str
    tensor: Tensor | None
    axis: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Constant:
    """What does not depend on the inputs. `load` is None where it is computed, `by` what then computes it."""

    name: str
    load: Callable[[], Tensor] | None
    by: str = ""


def onnx_weights(path: Path) -> Iterator[OnnxWeight]:
    """The weights of all nodes that multiply by one, in the order of the graph; one that several nodes use comes once for each axis."""
    with _readable(path):
        graph = _graph_of(path)
        constants = {proto.name: _stored(proto.name, proto, path) for proto in graph.initializer}
        inputs = {value.name for value in graph.input} - set(constants)
    seen: set[tuple[str, int]] = set()
    for node in graph.node:
        for position, axis in _weight_inputs(node):
            value = node.input[position]
            if value not in constants:
                continue
            with _readable(path, f", {value} of {node.name or node.op_type}"):
                weight = _weight(node, constants[value], axis)
            if weight is not None and (weight.name, weight.axis) not in seen:
                seen.add((weight.name, weight.axis))
                yield weight
        if not inputs.isdisjoint(node.input) or any(attribute.HasField("g") for attribute in node.attribute):
            inputs.update(node.output)  # a number that flows, and no constant
        else:
            with _readable(path, f", {node.name or node.op_type}"):
                constants.update(_made_by(node, constants, path))


# ---- what a node does with a weight ----


def _weight_inputs(node: Any) -> list[tuple[int, int]]:
    """Which inputs may be weights, and the axis each is summed along, from the end for MatMul, whose weights may be stacked."""
    transposed = {attribute.name for attribute in node.attribute if attribute.name in ("transA", "transB") and attribute.i}
    if node.op_type in ("Conv", "ConvTranspose"):
        places = [(1, 1 if node.op_type == "Conv" else 0)]
    elif node.op_type == "Gemm":
        places = [(0, 0 if "transA" in transposed else 1), (1, 1 if "transB" in transposed else 0)]
    elif node.op_type == "MatMul":
        places = [(0, -1), (1, -2)]
    elif node.op_type in _RECURRENT:
        places = [(1, 2), (2, 2)]
    else:
        places = []
    return [(position, axis) for position, axis in places if position < len(node.input)]


def _weight(node: Any, constant: _Constant, axis: int) -> OnnxWeight | None:
    name = _full_name(node, constant.name)
    if constant.load is None:
        return OnnxWeight(name, None, axis, f"not looked at: {constant.by} computes it at run time")
    tensor = constant.load()
    return OnnxWeight(name, tensor, axis % tensor.dim()) if tensor.dim() >= 2 else None


def _full_name(node: Any, name: str) -> str:
    """The parameter's name where the file has kept it, else with the module in front that the node comes from, or the node."""
    if "." in name:
        return name
    scopes = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "")
    try:
        modules = [str(scope) for scope in ast.literal_eval(scopes)][:-1]  # the last is the operation; literals, so nothing is run
        where = modules[-1]
    except (ValueError, SyntaxError, TypeError, IndexError):
        where = node.name
    return f"{where}.{name}" if where else name


# ---- constants ----


def _made_by(node: Any, constants: dict[str, _Constant], path: Path) -> dict[str, _Constant]:
    """The constants that a node makes of constants."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "Constant" and "value" in attributes:
        return {node.output[0]: _stored(node.output[0], attributes["value"].t, path)}
    source = constants.get(node.input[0]) if node.input else None
    if source is None or source.load is None:
        by = node.op_type if source is None else source.by
        return {out: _Constant(out, None, by) for out in node.output}
    load, axis = source.load, attributes["axis"].i if "axis" in attributes else 0
    if node.op_type in ("Identity", "Cast"):
        return {node.output[0]: source}
    if node.op_type == "Transpose":
        order = tuple(attributes["perm"].ints) if "perm" in attributes else None
        return {node.output[0]: _Constant(source.name, lambda: load().permute(order or tuple(range(load().dim()))[::-1]))}
    if node.op_type == "Split":
        sizes = constants[node.input[1]].load if len(node.input) > 1 else None
        parts = [_part(load, axis, i, len(node.output), sizes) for i in range(len(node.output))]
        return {out: _Constant(f"{source.name}:{i}", part) for i, (out, part) in enumerate(zip(node.output, parts, strict=True))}
    return {out: _Constant(out, None, node.op_type) for out in node.output}


def _part(load: Callable[[], Tensor], axis: int, i: int, count: int, sizes: Callable[[], Tensor] | None) -> Callable[[], Tensor]:
    """Part `i` of a Split, into these sizes or into `count` alike, the last of which may be smaller."""

    def part() -> Tensor:
        whole = load()
        return whole.split(sizes().tolist() if sizes else -(-whole.shape[axis] // count), axis)[i]

    return part


def _stored(name: str, proto: Any, path: Path) -> _Constant:
    def load() -> Tensor:
        from onnx import numpy_helper

        array = numpy_helper.to_array(proto, str(path.parent))
        if array.dtype.kind != "V":
            return torch.from_numpy(array.copy())  # of its own: torch warns of arrays that cannot be written to
        bits = torch.from_numpy(array.view(f"i{array.itemsize}").copy())  # numpy has no bfloat16, and torch not the one that stands for it
        return bits.view(getattr(torch, str(array.dtype)))

    return _Constant(name, load)


# ---- the file ----


def _graph_of(path: Path) -> Any:
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    if not model.graph.node or not model.opset_import:
        raise ValueError("it holds no graph, or was cut")
    return model.graph


@contextmanager
def _readable(path: Path, where: str = "") -> Iterator[None]:
    """What goes wrong in here is an error that names the file: it is damaged, or what it holds makes no sense."""
    try:
        import onnx
        from google.protobuf.message import DecodeError  # comes with onnx
    except ImportError:
        raise NofmError(f"{path}: to read ONNX files, the package onnx is needed, which is not installed: pip install onnx") from None
    try:
        yield
    except (DecodeError, onnx.checker.ValidationError, OSError, ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise NofmError(f"{path}{where}: not a readable ONNX file ({said[0]})") from error
