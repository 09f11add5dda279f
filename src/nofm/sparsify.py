"""`sparsify_`: choose the layers of a model that become N:M, in place. `fold_`, `densify_`: make them plain again.

Which layers: *rules* map name globs to patterns, first match wins; a *preset* says which of the matched layers stay dense by
custom (the first convolution, the classifier). A rule other than "*" names its layers on purpose and goes before the preset.
Nothing is decided silently: a layer is sparse, or has a reason not to be that `summary` prints, and a request without effect
is an error. The model is touched only after everything has been decided.
"""

from __future__ import annotations

import difflib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, get_args

import torch
from torch import nn

from . import shards
from .errors import LayerError
from .layers import (
    KnownWeight,
    SparseModule,
    known_weights,
    layer_name,
    make_sparse_,
    parameter_name,
    restore_class_,
    sites,
    swap_readers_,
)
from .masks import Axis, Grouping, check_finite
from .patterns import Pattern, PatternLike
from .summary import Summary, forget_reasons, remember_reason, summary

__all__ = ["Preset", "Rules", "densify_", "fold_", "sparsify_", "unwrap"]

Preset: TypeAlias = Literal["default", "paper", "asp", "all"]
Rules: TypeAlias = PatternLike | Mapping[str, PatternLike | None]


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
    skip              globs of layers that stay dense.
    axis              "input": groups run along the input channels, as sparse hardware reads them. "flat": along the flattened
                      (input, kernel) axes of a filter, as in the paper's first results.
    pad               let the last group of a row be short instead of leaving the layer dense.
    """
    model = unwrap(model)
    if preset not in get_args(Preset):
        raise LayerError(f"preset={preset!r} is not one of {', '.join(map(repr, get_args(Preset)))}")
    if axis not in ("input", "flat"):
        raise LayerError(f'axis={axis!r} is not one of "input", "flat"')
    already = sum(isinstance(module, SparseModule) for module in model.modules())
    if already:
        raise LayerError(f"{already} modules of this model are sparse already; densify_ or fold_ it first, or sparsify_ another part of it")

    candidates = list(_candidates(model))
    choice = _Choice(_parse_rules(pattern_or_rules), preset, (skip,) if isinstance(skip, str) else tuple(skip), axis, pad)
    choice.decide(model, candidates)
    _share_ties(model, candidates)
    chosen = [c for c in candidates if c.grouping is not None]
    if not chosen:
        reasons = "\n  ".join(f"{c.name}: {c.reason}" for c in candidates) or "it has no layer of a known kind"
        raise LayerError(f"no layer would become sparse:\n  {reasons}\nName layers in a rule, or choose another preset")
    _warn_about(chosen)
    for c in candidates:
        if c.grouping is not None:
            make_sparse_(c.module, c.known.param, c.grouping)
        else:
            remember_reason(c.module, c.known.param, c.reason)
    swap_readers_(model)
    return summary(model)


@torch.no_grad()
def fold_(model: nn.Module) -> nn.Module:
    """Write the zeros in: every weight becomes what its layer computes with, every layer a plain module again."""
    model = unwrap(model)
    found = list(sites(model))
    for site in found:
        check_finite(shards.local(site.weight), site.key)
    for site in found:
        shards.local(site.weight).copy_(site.seen())
    return densify_(model)


def densify_(model: nn.Module) -> nn.Module:
    """Undo `sparsify_`: plain modules again, with their dense weights."""
    model = unwrap(model)
    swapped = [module for module in model.modules() if isinstance(module, SparseModule)]
    if not swapped:
        raise LayerError(f"this {type(model).__name__} has no sparse layer; sparsify_ comes first")
    for module in swapped:
        restore_class_(module)
    forget_reasons(model)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel, DataParallel or torch.compile, so that names are the user's names."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


# ---- deciding ----


@dataclass(slots=True)
class _Candidate:
    """A weight that could be sparse, and the decision about it: a grouping, or a reason to stay dense."""

    name: str
    module_name: str
    module: nn.Module
    known: KnownWeight
    grouping: Grouping | None = None
    reason: str = ""

    def matches(self, glob: str) -> bool:
        names = {self.name, self.module_name, parameter_name(self.module_name, self.known.param)}
        return any(fnmatchcase(name, glob) for name in names)


def _candidates(model: nn.Module) -> Iterator[_Candidate]:
    for prefix, module in model.named_modules():
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module._parameters.values()):
            raise LayerError(
                f"{prefix or type(module).__name__}: its weights do not exist yet (lazy module); run one forward before sparsify_"
            )
        for known in known_weights(module):
            yield _Candidate(layer_name(prefix, known.param), prefix, module, known)


def _parse_rules(rules: Rules) -> dict[str, Pattern | None]:
    if not isinstance(rules, Mapping):
        return {"*": Pattern(rules)}
    if not rules:
        raise LayerError('rules are empty; give a pattern, or {glob: pattern} such as {"layer4.*": "1:4", "*": "2:4"}')
    return {glob: None if pattern is None else Pattern(pattern) for glob, pattern in rules.items()}


@dataclass(slots=True)
class _Choice:
    """One request, and how it decides about each candidate."""

    rules: dict[str, Pattern | None]
    preset: Preset
    skip: tuple[str, ...]
    axis: Literal["input", "flat"]
    pad: bool

    def decide(self, model: nn.Module, candidates: list[_Candidate]) -> None:
        for glob in (*self.rules, *self.skip):
            if not any(c.matches(glob) for c in candidates):
                raise LayerError(_no_match(glob, model, candidates))
        winners = {id(c): next((glob for glob in self.rules if c.matches(glob)), None) for c in candidates}
        for glob in self.rules:
            if glob not in winners.values():
                raise LayerError(f"rule {glob!r} has no effect: rules before it take all its layers; put it before them")
        first_conv, classifiers = _first_conv(candidates), _classifiers(model, candidates)
        impossible = []
        for c in candidates:
            rule = winners[id(c)]
            self._decide_one(c, rule, c is first_conv, c in classifiers)
            spelled_out = self.preset == "all" or rule in (c.name, c.module_name)
            if c.reason.endswith(_DOES_NOT_DIVIDE) and spelled_out:
                impossible.append(f"{c.name}: {c.reason.removesuffix(_DOES_NOT_DIVIDE)}; add it to skip or pass pad=True")
        if impossible:
            raise LayerError("\n".join(impossible))

    def _decide_one(self, c: _Candidate, rule: str | None, is_first_conv: bool, is_classifier: bool) -> None:
        if rule is None:
            c.reason = "no rule matches it"
            return
        skipping = next((glob for glob in self.skip if c.matches(glob)), None)
        if skipping is not None and rule in (c.name, c.module_name):
            raise LayerError(f"{c.name}: rule {rule!r} makes it {self.rules[rule]} and skip={skipping!r} keeps it dense; drop one of them")
        pattern = self.rules[rule]
        on_purpose = rule != "*" or c.module_name == ""  # the user named it, or handed over this one layer
        if skipping is not None:
            c.reason = f"skip={skipping!r}"
        elif pattern is None:
            c.reason = f"rule {rule!r} keeps it dense"
        elif reason := _unsuited(c, on_purpose):
            c.reason = reason
        elif not on_purpose and (reason := self._by_preset(c, is_first_conv, is_classifier)):
            c.reason = f"{reason} (preset {self.preset})"
        else:
            self._lay_groups(c, pattern)

    def _by_preset(self, c: _Candidate, is_first_conv: bool, is_classifier: bool) -> str | None:
        if self.preset == "default" and is_first_conv:
            return "first convolution"
        if self.preset in ("default", "paper") and is_classifier:
            return "classifier"
        if self.preset == "asp":
            shape = getattr(c.module, c.known.param).shape
            if c.known.axis != 1 or shape[0] % 8 or c.known.fan % 16:
                return f"needs outputs divisible by 8 and inputs by 16, got {shape[0]} and {c.known.fan}"
        return None

    def _lay_groups(self, c: _Candidate, pattern: Pattern) -> None:
        shape = getattr(c.module, c.known.param).shape
        axis: Axis = c.known.axis
        size, what = c.known.fan, _fan_word(c.module)
        if self.axis == "flat":
            if c.known.axis != 1:
                c.reason = "flat groups need a weight that starts with its output axis"
                return
            axis, size, what = "flat", shape[1:].numel(), "the flattened filter"
        if not pattern.divides(size):
            if not self.pad:
                c.reason = f"{pattern} needs {what} divisible by {pattern.m}, got {size}{_DOES_NOT_DIVIDE}"
                return
            if axis != "flat" and size != shape[axis]:
                c.reason = f"{pattern} needs {what} divisible by {pattern.m}, got {size}; padding would run into the next conv group"
                return
        grouping = Grouping(pattern, axis, self.pad)
        shards.check_groups_whole(c.name, getattr(c.module, c.known.param), grouping)
        c.grouping = grouping


_DOES_NOT_DIVIDE = " (does not divide)"


def _unsuited(c: _Candidate, on_purpose: bool) -> str | None:
    """Why a layer is no place for N:M groups whatever the pattern."""
    module = c.module
    if module._parameters.get(c.known.param) is None:
        return "its weight is computed from others (parametrized); remove the parametrization first"
    if isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1 and module.in_channels == module.groups:
        return "depthwise: one input channel a filter"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if not on_purpose:
            return "embedding: only sparse by a rule that names it"
        if module.max_norm is not None or module.sparse:
            return "embedding with max_norm or sparse gradients"
    return None


def _first_conv(candidates: list[_Candidate]) -> _Candidate | None:
    return next((c for c in candidates if isinstance(c.module, nn.modules.conv._ConvNd)), None)


def _classifiers(model: nn.Module, candidates: list[_Candidate]) -> list[_Candidate]:
    """The layers that the model says are its classifier (timm does), or else its last linear layer outside Transformer blocks."""
    named = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    named = (named,) if isinstance(named, str) else tuple(named)
    if found := [c for c in candidates if c.module_name in named]:
        return found
    blocks = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    inside = {id(part) for module in model.modules() if isinstance(module, blocks) for part in module.modules()}
    return [c for c in candidates if isinstance(c.module, nn.Linear) and id(c.module) not in inside][-1:]


def _fan_word(module: nn.Module) -> str:
    if isinstance(module, nn.modules.conv._ConvNd):
        return "in_channels" if module.groups == 1 else "in_channels / groups"
    return "in_features" if isinstance(module, nn.Linear) else "the input axis"


def _no_match(glob: str, model: nn.Module, candidates: list[_Candidate]) -> str:
    module = dict(model.named_modules()).get(glob)
    if module is not None and not any(c.module_name.startswith(f"{glob}.") for c in candidates):
        return f"{glob!r} is a {type(module).__name__}, whose weights nofm does not know; teach it with nofm.register_layer"
    close = difflib.get_close_matches(glob, [c.name for c in candidates], n=3)
    if module is not None:
        close = [f"{glob}.*"]
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"layers are {', '.join(c.name for c in candidates[:8])}, ..."
    return f"{glob!r} matches no layer; {hint}"


def _share_ties(model: nn.Module, candidates: list[_Candidate]) -> None:
    """A parameter that several modules share has one mask: if one of them is sparse, all are, in the same way."""
    users: dict[int, list[str]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for param, weight in module._parameters.items():
            users[id(weight)].append(parameter_name(prefix, param))
    shared: dict[int, list[_Candidate]] = defaultdict(list)
    for c in candidates:
        shared[id(c.module._parameters.get(c.known.param))].append(c)
    for weight_id, group in shared.items():
        decided = next((c for c in group if c.grouping is not None), None)
        if decided is None or len(users[weight_id]) == 1:
            continue
        for c in group:
            if c.grouping not in (None, decided.grouping) or c.known.axis != decided.known.axis:
                raise LayerError(f"{c.name} and {decided.name} share one weight but would group it differently; give both the same rule")
            c.grouping = decided.grouping
        unknown = set(users[weight_id]) - {parameter_name(c.module_name, c.known.param) for c in group}
        if unknown:
            raise LayerError(
                f"{decided.name} shares its weight with {', '.join(sorted(unknown))}, of a kind that nofm does not know and "
                "would leave dense; teach it with nofm.register_layer, or add the layer to skip"
            )


def _warn_about(chosen: list[_Candidate]) -> None:
    for pattern in sorted({c.grouping.pattern for c in chosen if c.grouping and c.grouping.pattern.n == c.grouping.pattern.m}):
        warnings.warn(f"{pattern} keeps every weight: its layers stay dense in effect", stacklevel=3)
    standardised = [c.name for c in chosen if "StdConv" in type(c.module).__name__]
    if standardised:
        warnings.warn(
            f"{standardised[0]} and {len(standardised) - 1} more standardise their weight after it is masked, which moves the zeros: "
            "their stored weight is N:M, the one they convolve with is not",
            stacklevel=3,
        )
