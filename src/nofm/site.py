"""Where the sparse weights of a model are, and what methods, analyses and the engine do to them.

A `Site` is a view, made anew each time it is asked for: what it shows lives in the layer (`layers`), and a copy of the model has it too.
A weight that several modules share is one site, and what is done to it is done in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from . import shards, ste
from .errors import LayerError
from .kernels import ops
from .layers import SparseModule, forget_mask_, store_mask_, stored_mask
from .masks import Grouping

__all__ = ["Site", "kept_weights", "layer_name", "named_weights", "parameter_name", "plain_name", "shortly", "sites", "unwrap"]


@dataclass(frozen=True, slots=True)
class Site:
    """One sparse weight of a model: where it is and what is done to it. Made anew by `sites`, never stored in the model.

    What methods use of it:

    weight                     the stored, dense weight, a parameter (`param` is its name in `module`: "weight").
    grouping                   its pattern and where groups lie; `grouping.mask(scores)` is the N:M mask of any scores.
    look_through(lens)         how the layer sees its weight from now on: a lens of `nofm.ste`.
    freeze(mask), thaw(lens)   store a mask that the layer computes with, which states hold too; forget it again.
    stored_mask, mask()        the stored mask, if there is one; the mask as it is now, stored or of the weight.
    """

    name: str  # of the layer, as in a rule
    key: str  # of the parameter, as in the state dict
    module: SparseModule
    param: str  # the name of the weight in `module`, such as "weight"; the parameter itself is `Site.weight`
    users: tuple[tuple[SparseModule, str], ...]  # all modules that hold this weight, `module` first: several where it is tied

    @property
    def weight(self) -> nn.Parameter:
        """The stored, dense weight, as it is now."""
        weight = self.module._parameters[self.param]
        assert weight is not None
        return weight

    @property
    def grouping(self) -> Grouping:
        """The layer's pattern, and the axis and padding by which it is laid on the weight.

        `grouping.mask(scores)` is its N:M mask of scores that have the shape of the whole weight: True at the N of largest magnitude of
        every M, so that signs do not count, and the lower index first among equals.
        """
        return self.module._nofm[self.param].grouping

    @property
    def lens(self) -> ste.Lens:
        return self.module._nofm[self.param].lens

    @property
    def seen_grouping(self) -> Grouping:
        return self.module._nofm[self.param].seen_grouping

    @property
    def keeps_more(self) -> bool:
        """Whether the layer computes with more weights than its pattern keeps: by `Dense`, or before a method has pruned it."""
        return bool(self.module._nofm[self.param].now)

    def look_through(self, lens: ste.Lens) -> None:
        """From now on the layer computes with what `lens` makes of the weight."""
        for module, param in self.users:
            module._nofm[param] = replace(module._nofm[param], lens=lens)

    @property
    def stored_mask(self) -> Tensor | None:
        """The frozen mask of the whole weight, where a method has set one."""
        return stored_mask(self.module, self.param)

    def freeze(self, mask: Tensor, lens: ste.Lens = ste.frozen) -> None:
        """Store `mask`, of the whole weight, and look through it from now on: with `ste.frozen` pruned weights get no gradient,
        with `ste.held` as if they were kept at zero. They keep their values, unseen, unless the caller sets them to zero."""
        stored = self.stored_mask
        if stored is None or stored.device != mask.device:
            mask = _laid_out_as(self.weight, mask)  # a copy, or the next one would be written into the caller's
        for module, param in self.users:
            store_mask_(module, param, mask)
        self.look_through(lens)

    def thaw(self, lens: ste.Lens) -> None:
        """Forget the stored mask and look through `lens` from now on."""
        for module, param in self.users:
            forget_mask_(module, param)
        self.look_through(lens)

    def kept(self) -> int:
        """How many weights are kept: as the pattern says, or fewer where a stored mask has fewer."""
        return kept_weights(self.module, self.param)

    def used(self) -> int:
        """How many weights the layer computes with now: those that are kept, or more before a method has pruned it."""
        if self.lens is ste.dense:
            return self.weight.numel()
        return self.kept() if self.stored_mask is not None else self.seen_grouping.kept(self.weight.shape)

    def mask(self) -> Tensor:
        """The mask of this process's part of the weight as it is now: of the stored mask, or else the N largest of every M."""
        if isinstance(self.lens, ste.SoftThreshold):
            return self.lens.kept(shards.local(self.weight))  # not that of the weight when somebody last looked
        if self.stored_mask is not None:
            return shards.part_of(self.stored_mask, self.weight)
        return ops.mask(shards.local(self.weight), self.grouping)

    def seen(self) -> Tensor:
        """What the layer computes with, as this process's part of it."""
        stored = None if self.stored_mask is None else self.mask()
        return self.lens(shards.local(self.weight.detach()), self.grouping, stored)


def _laid_out_as(weight: Tensor, mask: Tensor) -> Tensor:
    """A copy of `mask` that lies in memory as its weight does: the two are read together in every step, and of different layouts
    (channels_last) that takes a GPU several times as long."""
    if shards.local(weight) is not weight or weight.shape != mask.shape or weight.device != mask.device:  # not all of it is here
        return mask.clone()
    return torch.empty_like(weight.detach(), dtype=torch.bool).copy_(mask)


def sites(model: nn.Module) -> Iterator[Site]:
    """Every sparse weight of `model`, a tied one once, in the order of its modules."""
    found: dict[int, list[tuple[str, SparseModule, str]]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, SparseModule):
            for param in module._nofm:
                if (weight := module._parameters.get(param)) is None:
                    raise LayerError(
                        f"{layer_name(prefix, param)}: its {param} is no parameter any more, since somebody has parametrized, "
                        "normalised or pruned it after sparsify_; undo that first"
                    )
                found.setdefault(id(weight), []).append((prefix, module, param))
    for (prefix, module, param), *others in found.values():
        users = ((module, param), *((other, its_param) for _, other, its_param in others))
        yield Site(layer_name(prefix, param), parameter_name(prefix, param), module, param, users)


def kept_weights(module: SparseModule, param: str) -> int:
    """How many weights of `param` are kept: as the pattern says, or as many as a stored mask has, or as are above a threshold."""
    stored, weight, lens = stored_mask(module, param), getattr(module, param), module._nofm[param].lens
    if isinstance(lens, ste.SoftThreshold) and type(weight) is nn.Parameter and not weight.is_meta:  # all of it is here
        return int(lens.kept(weight).sum())
    return module._nofm[param].grouping.kept(weight.shape) if stored is None or stored.is_meta else int(stored.sum())


def layer_name(prefix: str, param: str) -> str:
    """The name of a layer: its module's for a plain `weight`, the parameter's where a module has several."""
    return (plain_name(prefix) if param == "weight" else "") or parameter_name(prefix, param)


def parameter_name(prefix: str, param: str) -> str:
    """The name of a parameter in the state dict."""
    return plain_name(f"{prefix}.{param}" if prefix else param)


def named_weights(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters of `model` by their names in the state dict."""
    return ((plain_name(name), weight) for name, weight in model.named_parameters(remove_duplicate=remove_duplicate))


def plain_name(name: str) -> str:
    """Without what torch's `checkpoint_wrapper` puts into names, and leaves out of the state dict: a network is the same with it."""
    return ".".join(part for part in name.split(".") if part != "_checkpoint_wrapped_module")


def shortly(given: object) -> str:
    """A class or a name as it is written, anything else (a whole network) by its type."""
    return repr(given) if isinstance(given, str | type | None) else f"a {type(given).__name__}"


def unwrap(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel, DataParallel or torch.compile, so that names are the user's names."""
    if not isinstance(model, nn.Module):
        raise LayerError(f"a model is needed here, an nn.Module, got {shortly(model)}")
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
