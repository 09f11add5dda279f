"""Which modules read the weights of modules below them without calling them.

A layer's masked weight is in place during its own forward. A module that takes `self.qkv.weight` and computes with it itself
would find the dense weight there and nothing would tell: nn.MultiheadAttention does this with its output projection,
nn.TransformerEncoderLayer in eval with all its weights, torchvision's Swin and timm's BEiT and EVA with their attention. There is
no list of all such modules, so the source of each forward is read. Naming one too many is harmless, since its children's masked
weights are then made a little earlier; so where there is no source to read, the module counts as a reader of everything below it.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from torch import nn

__all__ = ["children_read"]

_CHAIN = re.compile(r"\bself\.([A-Za-z_][\w.]*)")
_FACTS = frozenset({"device", "dim", "dtype", "is_cuda", "layout", "ndim", "numel", "requires_grad", "shape", "size"})  # not values


def children_read(module: nn.Module) -> list[str]:
    """The names, below `module`, of the modules whose parameters its forward reads."""
    if not module._modules:
        return []
    cls: Any = type(module)
    chains = _chains(cls)
    if chains is None:
        return [name for name, _ in module.named_modules() if name]
    return list(dict.fromkeys(path for chain in chains if (path := _owner_of_read_parameter(module, chain))))


def _owner_of_read_parameter(module: nn.Module, chain: str) -> str:
    """For the chain "attn.qkv.weight.t" of a module that has such a parameter: "attn.qkv". Else ""."""
    names = chain.split(".")
    for depth, name in enumerate(names):
        child = module._modules.get(name)
        if child is None:
            is_read = name in module._parameters and names[depth + 1 : depth + 2] not in ([fact] for fact in _FACTS)
            return ".".join(names[:depth]) if is_read else ""
        module = child
    return ""


@functools.cache
def _chains(cls: type[Any]) -> tuple[str, ...] | None:
    """The dotted names that follow `self.` in the forward of `cls` and in methods it calls; None where there is no source."""
    chains: dict[str, None] = {}
    todo, seen = ["forward"], {"forward"}
    while todo:
        method = todo.pop()
        for definer in cls.__mro__[: cls.__mro__.index(nn.Module)]:
            if method not in vars(definer):
                continue
            try:
                source = inspect.getsource(getattr(definer, method))
            except (OSError, TypeError):
                return None
            found = _CHAIN.findall(source)
            chains.update(dict.fromkeys(found))
            called = [name for name in found if name not in seen and inspect.isroutine(getattr(cls, name, None))]
            todo += called
            seen.update(called)
    return tuple(chains)
