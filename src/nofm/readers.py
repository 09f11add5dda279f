"""Which modules read the weights of modules below them without calling them.

A layer's masked weight is in place during its own forward. A module that takes `self.qkv.weight` and computes with it itself
would find the dense weight there and nothing would tell: nn.MultiheadAttention does this with its output projection,
nn.TransformerEncoderLayer in eval with all its weights, torchvision's Swin and timm's BEiT and EVA with their attention. There is
no list of all such modules, so the source of each forward is read. Naming one too many is harmless, since its children's masked
weights are then made a little earlier; so where there is no source to read, the module counts as a reader of everything below it,
and where a weight is read of something that is not spelled out (`for layer in self.layers: ... layer.weight`), of all that have a
weight of that name. A weight that a function outside of the class is handed the layer for, or finds by `parameters()`, is not seen.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch import nn

__all__ = ["children_read"]

_FACTS = frozenset({"device", "dim", "dtype", "is_cuda", "layout", "ndim", "numel", "requires_grad", "shape", "size"})  # not values


def children_read(module: nn.Module) -> list[str]:
    """The names, below `module`, of the modules whose parameters its forward reads."""
    if not module._modules:
        return []
    cls: Any = type(module)
    reads = _reads(cls)
    if reads is None:
        return [name for name, _ in module.named_modules() if name]
    spelled, loose = reads
    named = [path for chain in spelled if (path := _owner_of_read_parameter(module, chain))]
    if loose:
        named += [name for name, child in module.named_modules() if name and loose & _matrices(child)]
    return list(dict.fromkeys(named))


def _matrices(module: nn.Module) -> set[str]:
    """The names of its own parameters that may be sparse: not of biases and scales, which are read in many places."""
    return {name for name, parameter in module._parameters.items() if parameter is not None and parameter.dim() > 1}


def _owner_of_read_parameter(module: nn.Module, chain: tuple[str, ...]) -> str:
    """For the chain attn.qkv.weight.t of a module that has such a parameter: "attn.qkv". Else ""."""
    for depth, name in enumerate(chain):
        child = module._modules.get(name)
        if child is None:
            is_read = name in module._parameters and not _FACTS.intersection(chain[depth + 1 : depth + 2])
            return ".".join(chain[:depth]) if is_read else ""
        module = child
    return ""


@functools.cache
def _reads(cls: type[Any]) -> tuple[tuple[tuple[str, ...], ...], frozenset[str]] | None:
    """What the forward of `cls` and the methods that it calls read: chains of names that follow `self.`, and names that follow anything
    else. None where there is no source."""
    chains: dict[tuple[str, ...], None] = {}
    loose: set[str] = set()
    todo, seen = ["forward"], {"forward"}
    while todo:
        method = todo.pop()
        for definer in cls.__mro__[: cls.__mro__.index(nn.Module)]:
            if method not in vars(definer):
                continue
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(definer, method))))
            except (OSError, TypeError, SyntaxError):
                return None
            found = _Attributes(tree)
            chains.update(dict.fromkeys(found.of_self))
            loose |= found.of_others
            called = [
                name for name, *rest in found.of_self if not rest and name not in seen and inspect.isroutine(getattr(cls, name, None))
            ]
            todo += called
            seen.update(called)
    return tuple(chains), frozenset(loose)


class _Attributes(ast.NodeVisitor):
    """The attributes that a method reads."""

    def __init__(self, tree: ast.Module) -> None:
        self.of_self: list[tuple[str, ...]] = []
        self.of_others: set[str] = set()
        function = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
        arguments = [] if function is None else [*function.args.posonlyargs, *function.args.args]
        self._self = arguments[0].arg if arguments else "self"
        self.visit(tree)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names: list[str] = []
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            names.append(root.attr)
            root = root.value
        chain = tuple(reversed(names))
        if isinstance(root, ast.Name) and root.id == self._self:
            self.of_self.append(chain)
        else:
            self.of_others |= {name for name, then in zip(chain, (*chain[1:], ""), strict=True) if then not in _FACTS}
            self.visit(root)
