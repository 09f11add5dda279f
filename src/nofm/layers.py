"""How a layer sees its masked weight during forward, for every kind of layer that holds weights.

Sparsifying a layer swaps its class, in place, for a subclass made from it: parameters, names and hooks stay what they are. The
subclass's `forward` puts the masked weight in front of the stored one (an instance attribute hides a parameter of the same
name), runs the layer's own forward, and takes it away again. So outside of forward `.weight` is the dense parameter that
optimizers, initialisers, EMA, DDP and FSDP2 expect, and inside it the layer's own code, whatever it is, computes with the N:M
weight. The mask is made from the weight in every forward, so it cannot be stale. Tried and left: parametrizations (rename the
keys), a weight property that is always masked (breaks FSDP2).

Some modules read the weights of their children without calling them (`readers`). They are *units*: the parent puts its
children's masked weights in place as well as its own. While they are in place they belong to one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from . import following, readers, shards, ste
from .errors import LayerError
from .kinds import forward_by
from .masks import Grouping, largest

__all__ = [
    "SparseModule",
    "casts",
    "dense_class",
    "forget_mask_",
    "in_onnx_export",
    "make_sparse_",
    "restore_class_",
    "store_mask_",
    "stored_mask",
    "swap_readers_",
]


# ---- what a sparse module holds ----


@dataclass(frozen=True, slots=True)
class _Sparse:
    """What a swapped module remembers of one of its weights."""

    grouping: Grouping
    lens: ste.Lens = ste.straight_through

    @property
    def seen_grouping(self) -> Grouping:
        """That of the mask which the layer computes with, where it does by one: wider than its own while a method narrows it."""
        return self.lens.grouping if isinstance(self.lens, ste.Wider) else self.grouping

    @property
    def now(self) -> str:
        """What the layer computes with, "dense" or a pattern, where that is more than its own pattern keeps: by `Dense`, or before a
        method has pruned it. "" where it is no more."""
        own = self.grouping.pattern
        kept = own.m if self.lens is ste.dense else self.seen_grouping.pattern.n
        return "" if kept <= own.n else "dense" if kept == own.m else f"{kept}:{own.m}"


def _buffer(param: str) -> str:
    return f"_nofm_mask_{param}"


def stored_mask(module: nn.Module, param: str) -> Tensor | None:
    """The frozen mask of the whole weight, where a method has set one."""
    return module._buffers.get(_buffer(param))


def store_mask_(module: nn.Module, param: str, mask: Tensor) -> None:
    """Freeze `mask`, in the place of the one before, where there is one: a CUDA graph reads it there again, and other users of a tied
    weight do."""
    stored = stored_mask(module, param)
    if stored is not None and stored.device == mask.device:
        stored.copy_(mask)
    else:
        module.register_buffer(_buffer(param), mask, persistent=False)  # adds no key to the state dict


def forget_mask_(module: nn.Module, param: str) -> None:
    """Undo `store_mask_`."""
    module._buffers.pop(_buffer(param), None)
    module._non_persistent_buffers_set.discard(_buffer(param))


def _mask_anew(weight: Tensor, grouping: Grouping, before: Tensor | None) -> Tensor:
    """The mask of a new weight in place of a stored one: by the pattern, or as many of the largest where the stored one has fewer."""
    assert before is not None
    keep = int(before.sum())
    return largest(weight, keep) if keep < grouping.kept(weight.shape) else grouping.mask(weight)


def in_onnx_export() -> bool:
    """Whether it is torch.onnx.export that traces."""
    return torch.onnx.is_in_onnx_export()


# The exporter tries again by Dynamo where its first way fails, and Dynamo takes torch's function for False without asking; this one it
# asks. It is what torch.compiler.assume_constant_result does, which would import all of the compiler.
in_onnx_export.__dict__["_dynamo_marked_constant"] = True


# ---- the class swap ----


def _memoize(make: Callable[[type[Any]], type[Any]]) -> Callable[[type[Any]], type[Any]]:
    made: dict[type[Any], type[Any]] = {}
    return lambda cls: made[cls] if cls in made else made.setdefault(cls, make(cls))


class SparseModule(nn.Module):
    """The part that a sparse layer's class adds to the layer's own class."""

    _nofm: dict[str, _Sparse]
    _nofm_reads: tuple[str, ...]  # the names of the modules below whose weights this one reads
    _nofm_traced: bool  # whether the masked weight stands in the parameter's place, for the compiler
    _nofm_forward: Any = None  # of the layer's own class, with the weight as its first argument; see `kinds.forward_by`
    _nofm_own: tuple[Any, Any]  # that class, and its forward at the time

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if in_onnx_export():
                raise LayerError(
                    f"{type(self).__name__}: a file in ONNX would hold its dense weights, where runtimes look for zeros; export "
                    "nofm.fold_(copy.deepcopy(model)), or that copy after nofm.densify_ for a dense network"
                )
            return self._traced_forward(*args, **kwargs)
        thread = threading.get_ident()
        made: Any = self.__dict__.get("_nofm_made")  # by `bulk`, for a thread: a name and the masked weight of that name
        if made is not None and made[0] == thread and self._takes_a_weight():
            return self._nofm_forward(made[2], *args, **kwargs)
        if torch._C._is_tracing():
            raise LayerError(
                f"{type(self).__name__}: torch.jit.trace, and what is built on it such as ONNX's old exporter, cannot record a mask and "
                "would leave a dense network; trace nofm.fold_(copy.deepcopy(model)), or use torch.export"
            )
        shown: list[SparseModule] = []
        try:
            for module in _unit_of(self):
                owner = module.__dict__.setdefault("_nofm_thread", thread)  # one step, so that two threads cannot both pass
                if owner != thread:
                    raise LayerError(
                        f"{type(module).__name__} is in forward in another thread, which would take its masked weights away; "
                        "give each thread a copy, or fold_ the model"
                    )
                if "_nofm_hidden" in module.__dict__:
                    continue  # an enclosing unit has the masked weights in place, or the layer calls itself
                shown.append(module)
                module.__dict__["_nofm_hidden"] = {}
                made = module.__dict__.get("_nofm_made")
                masked = {made[1]: made[2]} if made is not None and made[0] == thread else _masked(module)
                module.__dict__["_nofm_hidden"] = {name: module.__dict__.get(name) for name in masked}
                module.__dict__.update(masked)  # hides the parameters of these names
            return super().forward(*args, **kwargs)
        finally:
            for module in shown:
                for name, before in module.__dict__.pop("_nofm_hidden").items():
                    if before is None:
                        del module.__dict__[name]
                    else:
                        module.__dict__[name] = before
                del module.__dict__["_nofm_thread"]

    def _takes_a_weight(self) -> bool:
        """Whether `_nofm_forward` is all that the forward does, so that nothing has to be put in place for it."""
        if self._nofm_forward is None or self._nofm_reads or "weight" not in self._nofm or "_conv_forward" in self.__dict__:
            return False
        own, forward = self._nofm_own
        return own.forward is forward  # or somebody has put another one in its place since

    def _traced_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same for the compiler, which cannot follow attributes that come and go: here the masked weight stands in the
        parameter's own place. What it runs is traced once and then is a graph, without threads and without modules.

        What is put in place is written back by each call of the graph, though nothing has changed, and each then looks anew whether the
        modules are as they were: 3 us a layer of the host. So nothing is, where a forward takes the weight as an argument."""
        if self._takes_a_weight() and not self._nofm_traced:
            return self._nofm_forward(_masked(self)["weight"], *args, **kwargs)
        hidden: list[tuple[dict[str, Any], str, Any]] = []
        shown: list[SparseModule] = []
        try:
            for module in _unit_of(self):
                if module.__dict__["_nofm_traced"]:
                    continue
                module.__dict__["_nofm_traced"] = True
                shown.append(module)
                for name, masked in _masked(module).items():
                    place = module._parameters if name in module._parameters else module.__dict__
                    hidden.append((place, name, place[name]))
                    place[name] = masked
            return super().forward(*args, **kwargs)
        finally:
            for place, name, stored in hidden:
                place[name] = stored
            for module in shown:
                module.__dict__["_nofm_traced"] = False

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        # A frozen mask belongs to the weight it was made from: new weight, new mask. (A method's own state may set it after.)
        for param, sparse in self._nofm.items():
            if prefix + param in state_dict and stored_mask(self, param) is not None:
                weight = shards.whole(getattr(self, param).detach())
                store_mask_(self, param, _mask_anew(weight, sparse.grouping, stored_mask(self, param)))

    def extra_repr(self) -> str:
        patterns = {param: str(sparse.grouping.pattern) for param, sparse in self._nofm.items()}
        text = ", ".join(pattern if param == "weight" else f"{param} {pattern}" for param, pattern in patterns.items())
        return ", ".join(part for part in (super().extra_repr(), text) if part)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Classes made at run time cannot be found by name, so copies are rebuilt from the class they were made from. Masked weights that
        # are there for the forward that is running are not the copy's: nobody would take them away again.
        module: Any = self
        state = module.__getstate__()
        if isinstance(state, dict):
            state = _between_forwards(state)
        said = following.said_of(module)
        return _rebuild, (dense_class(type(self)), *((said,) if said else ())), state


@_memoize
def _sparse_class(plain: type[Any]) -> type[SparseModule]:
    body = {"__module__": plain.__module__, "_nofm_forward": forward_by(plain), "_nofm_own": (plain, plain.forward)}
    return type(f"Sparse{plain.__name__}", (SparseModule, plain), body)


def _between_forwards(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a sparse module as they are while no forward runs."""
    hidden = attributes.get("_nofm_hidden", {})
    passing = {"_nofm_made", "_nofm_hidden", "_nofm_thread", *hidden}
    stored = {name: before for name, before in hidden.items() if before is not None}
    return {name: value for name, value in attributes.items() if name not in passing} | stored


def _rebuild(plain: type[nn.Module], said: following.Said = ()) -> nn.Module:
    module: nn.Module = nn.Module.__new__(_sparse_class(plain))
    following.note_copy(module, said)
    return module


def make_sparse_(module: nn.Module, param: str, grouping: Grouping) -> None:
    """From now on `module` computes with the N:M form of its `param`."""
    _swap_class_(module)._nofm[param] = _Sparse(grouping)


def swap_readers_(model: nn.Module) -> None:
    """Make units of the modules that read the weights of sparse children without calling them."""
    for module in model.modules():
        reads = tuple(name for name in readers.children_read(module) if isinstance(module.get_submodule(name), SparseModule))
        if reads:
            _swap_class_(module).__dict__["_nofm_reads"] = reads


def _swap_class_(module: nn.Module) -> SparseModule:
    if not isinstance(module, SparseModule):
        module.__class__ = _sparse_class(type(module))
        module.__dict__.update(_nofm={}, _nofm_reads=(), _nofm_traced=False)
    assert isinstance(module, SparseModule)
    return module


def restore_class_(module: SparseModule) -> None:
    """Make `module` plain again, also under a class that someone else (FSDP2) has since made on top of ours."""
    for param in module._nofm:
        forget_mask_(module, param)
    for attribute in ("_nofm", "_nofm_reads", "_nofm_traced"):
        del module.__dict__[attribute]
    module.__class__ = dense_class(type(module))
    following.forget(module)


@_memoize
def dense_class(cls: type[Any]) -> type[Any]:
    """The class that the class `cls` of a sparse module was made from."""
    if SparseModule in cls.__bases__:
        return cls.__bases__[1]
    bases = tuple(dense_class(base) if issubclass(base, SparseModule) else base for base in cls.__bases__)
    body = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__.replace("Sparse", "", 1), bases, body)


# ---- during forward ----


def _unit_of(module: SparseModule) -> list[SparseModule]:
    """`module` and the sparse modules below it whose weights it reads itself."""
    read = [module.get_submodule(name) for name in module._nofm_reads]
    return [module, *(child for child in read if isinstance(child, SparseModule))]


def _masked(module: SparseModule) -> dict[str, Any]:
    """The attributes of `module` that its forward is to see instead of the stored ones."""
    masked: dict[str, Any] = {}
    for param, sparse in module._nofm.items():
        # Asked of `_modules` first: `hasattr` runs Python in every call of a compiled model, to see that the answer is still no.
        if "parametrizations" in module._modules and parametrize.is_parametrized(module, param):
            raise LayerError(
                f"{param!r} of {type(module).__name__} was parametrized after sparsify_, which hides its mask; parametrize first "
                "(the layer then stays dense), or not at all"
            )
        weight = getattr(module, param)
        if sparse.lens is ste.straight_through or isinstance(sparse.lens, ste.Wider):
            seen = ste.straight_through(weight, sparse.seen_grouping, None, _autocast_type(module, weight))
        else:
            seen = sparse.lens(weight, sparse.grouping, stored_mask(module, param))
        masked[param] = _laid_out_like(weight, seen)
    if isinstance(module, nn.RNNBase):  # reads this list instead of its attributes
        masked["_flat_weights"] = [masked.get(name, getattr(module, name)) for name in module._flat_weights_names]
    return masked


# Their own forward does nothing with a weight but multiply by it, which autocast does in a smaller type.
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CASTING = frozenset(kind.forward for kind in (nn.Linear, *_CONVOLUTIONS, nn.MultiheadAttention))


def _autocast_type(module: SparseModule, weight: Tensor) -> torch.dtype | None:
    """The type that autocast is going to cast `weight` to inside the layer's forward, or None."""
    device = weight.device.type
    if weight.dtype != torch.float32 or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device) if casts(module) else None


def casts(module: SparseModule) -> bool:
    """Whether autocast casts this layer's weight, whole and unchanged, before anything else is done with it."""
    return dense_class(type(module)).forward in _CASTING


def _laid_out_like(weight: Tensor, seen: Tensor) -> Tensor:
    """`seen` in the memory layout of `weight`, which decides the layout of a convolution's output, and its last bits."""
    if seen.stride() == weight.stride():
        return seen
    outer_first = sorted(range(weight.dim()), key=weight.stride, reverse=True)
    copied = seen.permute(outer_first).clone(memory_format=torch.contiguous_format)  # sets strides of axes of size 1 as well
    return copied.permute([outer_first.index(axis) for axis in range(weight.dim())])
