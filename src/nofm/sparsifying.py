"""`sparsify_`: choose the layers of a model that become N:M, in place. `fold_`, `densify_`: make them plain again.

Which layers: *rules* map name globs to patterns, first match wins; a *preset* says which of the matched layers stay dense by
custom (the first convolution, the classifier). A rule other than "*" names its layers on purpose and goes before the preset.
Nothing is decided silently: a layer is sparse, or has a reason not to be that `summary` prints, and a request without effect
is an error. The model is touched only after everything has been decided.

(The room is not called `sparsify`: `nofm.sparsify(model)`, a slip for the verb, would find the module, which cannot be called.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from . import bulk, shards, ste
from .choose import Choice, Preset, Rules, find_candidates, globs_of, no_candidates, parse_rules, share_ties
from .errors import LayerError
from .layers import SparseModule, make_sparse_, restore_class_, swap_readers_
from .masks import check_finite
from .overview import Summary, forget_reasons, refuse_packed, remember_reason, summary
from .site import Site, sites, unwrap
from .unfinished import too_early, trainings, unfollowed, who_keeps_more, why_more

__all__ = ["Preset", "Rules", "densify_", "fold_", "follow_", "sparsify_"]


def sparsify_(
    model: nn.Module,
    pattern_or_rules: Rules,
    *,
    preset: Preset = "default",
    skip: str | Iterable[str] = (),
    axis: Literal["input", "flat"] = "input",
    pad: bool = False,
) -> Summary:
    """Make the layers of `model` N:M sparse, in place: from now on they compute with the N largest of every M weights.

    Parameters keep their names, objects and dense values; a dense checkpoint loads strictly before and after.

    pattern_or_rules  "2:4" for all layers, or {glob: pattern}, first match wins, None for dense:
                      {"layer4.*": "1:4", "*.downsample.0": None, "*": "2:4"}. Globs match layer or parameter names.
    preset            what stays dense by custom among layers that only "*" matches.
                      "default": the first convolution and the classifier. "paper": the classifier. "asp": layers whose outputs
                      do not divide by 8 or inputs by 16. "all": nothing. A layer that its pattern does not divide stays dense
                      too, except under "all" or where a rule spells its name out: then it is an error.
                      An embedding is sparse only where a rule other than "*" matches it,
                      or where a linear layer that is sparse has the same weight (tied).
    skip              globs of layers that stay dense.
    axis              "input": groups run along the input channels, as sparse hardware reads them. "flat": along the flattened
                      (input, kernel) axes of a filter, as in the paper's first results.
    pad               let the last group of a row be short instead of leaving the layer dense.

    Call it before `attach`: a method follows the layers that were sparse when it was attached, and of others a warning says so.

    Call it on the whole model or on whole blocks: a module that reads the weights of its children by itself, as
    nn.TransformerEncoderLayer does in eval, must be in sight to be told.
    """
    model = unwrap(model)
    if preset not in get_args(Preset):
        raise LayerError(f"preset={preset!r} is not one of {', '.join(map(repr, get_args(Preset)))}")
    if axis not in ("input", "flat"):
        raise LayerError(f'axis={axis!r} is not one of "input", "flat"')
    already = sum(isinstance(module, SparseModule) for module in model.modules())
    if already:
        raise LayerError(f"{already} modules of this model are sparse already; densify_ or fold_ it first, or sparsify_ another part of it")

    refuse_packed(model)
    candidates = list(find_candidates(model))
    if not candidates:
        raise LayerError(no_candidates(model))
    choice = Choice(parse_rules(pattern_or_rules), preset, globs_of(skip), axis, pad)
    choice.decide(model, candidates)
    share_ties(model, candidates)
    chosen = [c for c in candidates if c.grouping is not None]
    if not chosen:
        reasons = "\n  ".join(f"{c.name}: {c.reason}" for c in candidates)
        raise LayerError(f"no layer would become sparse:\n  {reasons}\nName layers in a rule, or choose another preset")
    choice.warn_about(candidates)
    for c in candidates:
        if c.grouping is not None:
            make_sparse_(c.module, c.known.param, c.grouping)
        else:
            remember_reason(c.module, c.known.param, c.reason)
    swap_readers_(model)
    bulk.hang_on_(model)
    if said := unfollowed({c.name: c.module for c in chosen}):
        warnings.warn(said, stacklevel=2)
    return summary(model)


@torch.no_grad()
def fold_(model: nn.Module) -> nn.Module:
    """Write the zeros in: every weight becomes what its layer computes with, every layer a plain module again."""
    model = unwrap(model)
    shards.reshard_(model)
    found = list(sites(model))
    for site in found:
        shards.check_groups_whole(site.name, site.weight, site.grouping)
        check_finite(shards.local(site.weight), site.key)
    _warn_about(found)
    for site in found:
        shards.local(site.weight).copy_(site.seen())
    return densify_(model)


def _warn_about(found: list[Site]) -> None:
    """Say so where folding leaves more weights than their pattern keeps, or ends a method before it has finished."""
    who = who_keeps_more(found)
    first = "handle.detach(), " * bool(trainings(found))
    how = f"No weight of the pattern is lost: to prune by the weights as they are, {first}sparsify_ it again as before, and fold_"
    said = f"{who}, so fold_ does not write all zeros: {why_more(found)}. {how}" if who else too_early("folded", trainings(found))
    if said:
        warnings.warn(said, stacklevel=4)  # who has called fold_, under torch's no_grad


def densify_(model: nn.Module) -> nn.Module:
    """Undo `sparsify_`: plain modules again, with their dense weights."""
    model = unwrap(model)
    swapped = [module for module in model.modules() if isinstance(module, SparseModule)]
    if not swapped:
        refuse_packed(model)
        raise LayerError(
            f"this {type(model).__name__} has no sparse layer; sparsify_ comes first. Or was it folded already? nofm.verify(model) tells"
        )
    for module in swapped:
        restore_class_(module)
    bulk.take_off_(model)
    forget_reasons(model)
    return model


def follow_(average: nn.Module, model: nn.Module) -> nn.Module:
    """Let `average`, a copy of `model` (EMA), see its weights as `model` sees its own now: through the same pattern, which a dense or
    gradual start may have changed since it was copied, and under the same frozen masks, which are buffers. Returns `average`.

    Call it before an average is updated, or at least before it is looked at: no method is attached to it. Its weights are untouched.
    A wrapper that has the copy as its `module` (torch's AveragedModel, timm's ModelEma) may be passed as it is.
    """
    for ours, theirs in _pairs(_inside(average, unwrap(model)), model):
        if isinstance(theirs.lens, ste.SoftThreshold):
            _take_threshold(ours, theirs.lens)
        elif theirs.stored_mask is None:
            ours.thaw(theirs.lens)
        else:  # copied whether or not it has changed, since to ask a GPU would be to wait for it
            ours.freeze(theirs.stored_mask.to(ours.weight.device), theirs.lens)
    return average


def _inside(average: nn.Module, model: nn.Module) -> nn.Module:
    """The copy inside what averages it. A model may have a part of that name itself, and a plain copy of it then has it too."""
    inside = getattr(average, "module", None)
    wraps = isinstance(average, AveragedModel) or not isinstance(getattr(model, "module", None), nn.Module)
    return inside if wraps and isinstance(inside, nn.Module) else average


def _take_threshold(ours: Site, lens: ste.SoftThreshold) -> None:
    """A threshold of our own, since theirs goes on being trained, in the place of the one before; and the mask that it gives our weight."""
    own = ours.lens
    if not isinstance(own, ste.SoftThreshold) or own.s is lens.s or own.s.device != ours.weight.device:
        own = ste.SoftThreshold(lens.s.detach().to(ours.weight.device, copy=True))
    own.s.detach().copy_(lens.s.detach())  # no new tensor: a CUDA graph and compiled code look for it where it was
    ours.freeze(own.kept(shards.whole(ours.weight.detach())), own)


def _pairs(average: nn.Module, model: nn.Module) -> Iterator[tuple[Site, Site]]:
    """The sparse weights of `average` beside those of `model`; raises where they are not those of a copy."""
    ours, theirs = (list(sites(unwrap(of))) for of in (average, model))
    if not theirs and not ours:
        raise LayerError("neither model has a sparse layer, so there is nothing to follow; sparsify_ comes first, before the copy is made")
    unlike = next((pair for pair in zip_longest(ours, theirs) if not _are_alike(*pair)), None)
    if unlike is not None:
        what = [f"{site.name} {site.grouping.pattern}" if site else "no sparse layer" for site in unlike]
        raise LayerError(
            f"{what[0]} would follow {what[1]}: this is no copy of that model; copy it after sparsify_, and of a "
            "wrapper pass the copy inside"
        )
    return zip(ours, theirs, strict=True)


def _are_alike(one: Site | None, other: Site | None) -> bool:
    return bool(one and other and (one.key, one.grouping) == (other.key, other.grouping) and one.weight.shape == other.weight.shape)
