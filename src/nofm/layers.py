"""How a layer sees its masked weight during forward, for every kind of layer that holds weights.

Sparsifying a layer swaps its class, in place, for a subclass made from it: parameters, names and hooks stay what they are. The
subclass's `forward` puts the masked weight in front of the stored one (an instance attribute hides a parameter of the same
name), runs the layer's own forward, and takes it away again. So outside of forward `.weight` is the dense parameter that
optimizers, initialisers, EMA, DDP and FSDP2 expect, and inside it the layer's own code, whatever it is, computes with the N:M
weight. The mask is made from the weight in every forward, so it cannot be stale. Tried and left: parametrizations (rename the
keys), a weight property that is always masked (breaks FSDP2).

Some modules read the weights of their children without calling them. They are *units*: the parent puts its children's masked
weights in place as well as its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from . import shards, ste
from .errors import LayerError
from .masks import Grouping

__all__ = [
    "KnownWeight",
    "Site",
    "SparseModule",
    "known_weights",
    "layer_name",
    "make_sparse_",
    "parameter_name",
    "register_layer",
    "restore_class_",
    "sites",
    "swap_readers_",
]


# ---- which weights a module has, and along which axis its inputs run ----


@dataclass(frozen=True, slots=True)
class KnownWeight:
    """A weight that N:M groups can be laid on: `param` of a module, inputs along `axis`, `fan` of them for one output."""

    param: str
    axis: int
    fan: int


_Describe = Callable[[Any], list[KnownWeight]]
_KINDS: dict[type[nn.Module], _Describe] = {}


def register_layer(kind: type[nn.Module], **axes: int) -> None:
    """Teach nofm a layer of your own: `register_layer(MyLinear, weight=1)` says that the inputs of `weight` run along axis 1."""
    if not axes:
        raise LayerError(f"register_layer({kind.__name__}): name at least one parameter and its input axis, such as weight=1")
    _KINDS[kind] = lambda module: [KnownWeight(param, axis, getattr(module, param).shape[axis]) for param, axis in axes.items()]


def known_weights(module: nn.Module) -> list[KnownWeight]:
    """The weights of `module` itself (not of its children) that can be sparse; empty for a kind that is not known."""
    for kind in type(module).__mro__:
        if kind in _KINDS:
            return _KINDS[kind](module)
        if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
            return [KnownWeight("weight", 0, module.get_parameter("weight").shape[0])]  # a linear layer stored (in, out)
    return []


def _conv(module: nn.modules.conv._ConvNd) -> list[KnownWeight]:
    return [KnownWeight("weight", 0 if module.transposed else 1, module.in_channels // module.groups)]


def _attention(module: nn.MultiheadAttention) -> list[KnownWeight]:
    names = ["in_proj_weight"] if module._qkv_same_embed_dim else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    return [KnownWeight(name, 1, getattr(module, name).shape[1]) for name in names]


def _recurrent(module: nn.Module) -> list[KnownWeight]:
    weights = ((name, p) for name, p in module._parameters.items() if name.startswith("weight_") and p is not None)
    return [KnownWeight(name, 1, p.shape[1]) for name, p in weights]


register_layer(nn.Linear, weight=1)
register_layer(nn.Embedding, weight=1)
register_layer(nn.EmbeddingBag, weight=1)
_KINDS[nn.modules.conv._ConvNd] = _conv
_KINDS[nn.MultiheadAttention] = _attention
_KINDS[nn.RNNBase] = _recurrent
_KINDS[nn.RNNCellBase] = _recurrent


# ---- the sparse weight of a module ----


@dataclass(frozen=True, slots=True)
class _Sparse:
    """What a swapped module remembers of one of its weights."""

    grouping: Grouping
    lens: ste.Lens = ste.straight_through


@dataclass(frozen=True, slots=True)
class Site:
    """One sparse weight of a model: where it is and what is done to it. Made anew by `sites`, never stored in the model."""

    name: str  # of the layer, as in a rule
    key: str  # of the parameter, as in the state dict
    module: SparseModule
    param: str

    @property
    def weight(self) -> nn.Parameter:
        """The stored, dense weight, as it is now."""
        weight = self.module._parameters[self.param]
        assert weight is not None
        return weight

    @property
    def grouping(self) -> Grouping:
        return self.module._nofm[self.param].grouping

    @property
    def lens(self) -> ste.Lens:
        return self.module._nofm[self.param].lens

    def look_through(self, lens: ste.Lens) -> None:
        """From now on the layer computes with what `lens` makes of the weight."""
        self.module._nofm[self.param] = replace(self.module._nofm[self.param], lens=lens)

    @property
    def stored_mask(self) -> Tensor | None:
        """The frozen mask of the whole weight, where a method has set one."""
        return _stored_mask(self.module, self.param)

    def freeze(self, mask: Tensor) -> None:
        """Store `mask`, of the whole weight, and look through it from now on."""
        self.module.register_buffer(_buffer(self.param), mask, persistent=False)  # adds no key to the state dict
        self.look_through(ste.frozen)

    def mask(self) -> Tensor:
        """The mask of this process's part of the weight as it is now: of the stored mask, or else the N largest of every M."""
        if self.stored_mask is not None:
            return shards.part_of(self.stored_mask, self.weight)
        return self.grouping.mask(shards.local(self.weight))

    def seen(self) -> Tensor:
        """What the layer computes with, as this process's part of it."""
        stored = None if self.stored_mask is None else self.mask()
        return self.lens(shards.local(self.weight.detach()), self.grouping, stored)


def sites(model: nn.Module) -> Iterator[Site]:
    """Every sparse weight of `model`, a tied one once, in the order of its modules."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if not isinstance(module, SparseModule):
            continue
        for param in module._nofm:
            weight = module._parameters[param]
            if id(weight) not in seen:
                seen.add(id(weight))
                yield Site(layer_name(prefix, param), parameter_name(prefix, param), module, param)


def layer_name(prefix: str, param: str) -> str:
    """The name of a layer: its module's for a plain `weight`, the parameter's where a module has several."""
    return prefix if param == "weight" and prefix else parameter_name(prefix, param)


def parameter_name(prefix: str, param: str) -> str:
    """The name of a parameter in the state dict."""
    return f"{prefix}.{param}" if prefix else param


def _buffer(param: str) -> str:
    return f"_nofm_mask_{param}"


def _stored_mask(module: nn.Module, param: str) -> Tensor | None:
    return module._buffers.get(_buffer(param))


# ---- the class swap ----


def _memoize(make: Callable[[type[Any]], type[Any]]) -> Callable[[type[Any]], type[Any]]:
    made: dict[type[Any], type[Any]] = {}
    return lambda cls: made[cls] if cls in made else made.setdefault(cls, make(cls))


class SparseModule(nn.Module):
    """The part that a sparse layer's class adds to the layer's own class."""

    _nofm: dict[str, _Sparse]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__.get("_nofm_held"):  # an enclosing unit has the masked weights in place
            return super().forward(*args, **kwargs)
        if self.__dict__.get("_nofm_hidden") is not None:
            raise LayerError(f"{type(self).__name__} is already in forward in another thread; give each thread a copy, or fold_ the model")
        unit = _unit(self)
        try:
            for module in unit:
                _show_masked(module, held=module is not self)
            return super().forward(*args, **kwargs)
        finally:
            for module in unit:
                _show_stored(module)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        # A frozen mask belongs to the weight it was made from: new weight, new mask. (A method's own state may set it after.)
        for param, sparse in self._nofm.items():
            if prefix + param in state_dict and _stored_mask(self, param) is not None:
                weight = shards.whole(getattr(self, param).detach())
                self._buffers[_buffer(param)] = sparse.grouping.mask(weight)

    def extra_repr(self) -> str:
        patterns = {param: str(sparse.grouping.pattern) for param, sparse in self._nofm.items()}
        text = ", ".join(pattern if param == "weight" else f"{param} {pattern}" for param, pattern in patterns.items())
        return f"{super().extra_repr()}, {text}" if text else super().extra_repr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Classes made at run time cannot be found by name, so copies are rebuilt from the class they were made from.
        return _rebuild, (_without_sparse(type(self)),), self.__dict__


@_memoize
def _sparse_class(dense_class: type[Any]) -> type[SparseModule]:
    return type(f"Sparse{dense_class.__name__}", (SparseModule, dense_class), {"__module__": dense_class.__module__})


def _rebuild(dense_class: type[nn.Module]) -> nn.Module:
    module: nn.Module = nn.Module.__new__(_sparse_class(dense_class))
    return module


def make_sparse_(module: nn.Module, param: str, grouping: Grouping) -> None:
    """From now on `module` computes with the N:M form of its `param`."""
    _swap_class_(module)._nofm[param] = _Sparse(grouping)


def swap_readers_(model: nn.Module) -> None:
    """Make units of the modules that read the weights of sparse children without calling them."""
    for module in model.modules():
        if _unit(module):
            _swap_class_(module)


def _swap_class_(module: nn.Module) -> SparseModule:
    if not isinstance(module, SparseModule):
        module.__class__ = _sparse_class(type(module))
        module.__dict__["_nofm"] = {}
    assert isinstance(module, SparseModule)
    return module


def restore_class_(module: SparseModule) -> None:
    """Make `module` plain again, also under a class that someone else (FSDP2) has since made on top of ours."""
    for param in module._nofm:
        module._buffers.pop(_buffer(param), None)
        module._non_persistent_buffers_set.discard(_buffer(param))
    for attribute in ("_nofm", "_nofm_held", "_nofm_hidden"):
        module.__dict__.pop(attribute, None)
    module.__class__ = _without_sparse(type(module))


@_memoize
def _without_sparse(cls: type[Any]) -> type[Any]:
    if SparseModule in cls.__bases__:
        return cls.__bases__[1]
    bases = tuple(_without_sparse(base) if issubclass(base, SparseModule) else base for base in cls.__bases__)
    body = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__.replace("Sparse", "", 1), bases, body)


def _unit(module: nn.Module) -> list[SparseModule]:
    """`module` and the sparse modules below it whose weights it reads itself."""
    members: list[nn.Module] = [module]
    if isinstance(module, nn.MultiheadAttention):
        members += [module.out_proj]
    elif isinstance(module, nn.TransformerEncoderLayer):  # in eval it hands all weights to one fused kernel
        members += [module.self_attn, module.self_attn.out_proj, module.linear1, module.linear2]
    return [member for member in members if isinstance(member, SparseModule)]


def _show_masked(module: SparseModule, held: bool) -> None:
    """Hide each stored weight behind its masked one."""
    hidden: dict[str, Any] = {}
    for param, sparse in module._nofm.items():
        weight = getattr(module, param)
        hidden[param] = sparse.lens(weight, sparse.grouping, _stored_mask(module, param))
    if isinstance(module, nn.RNNBase):  # reads this list instead of its attributes
        hidden["_flat_weights"] = [hidden.get(name, getattr(module, name)) for name in module._flat_weights_names]
    module.__dict__["_nofm_hidden"] = {name: module.__dict__.get(name) for name in hidden}
    module.__dict__["_nofm_held"] = held
    module.__dict__.update(hidden)


def _show_stored(module: SparseModule) -> None:
    """Undo `_show_masked`."""
    for name, before in (module.__dict__.pop("_nofm_hidden", None) or {}).items():
        if before is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = before
    module.__dict__["_nofm_held"] = False
