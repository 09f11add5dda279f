"""Which layers of a model become sparse, and why the others do not.

Every weight of a known kind is a *candidate*; a *choice* is one request and gives each candidate a grouping or a reason to stay
dense. Nothing here touches the model.
"""

from __future__ import annotations

import difflib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from torch import Tensor, nn

from . import shards
from .errors import LayerError
from .kinds import KnownWeight, known_weights
from .masks import Axis, Grouping
from .patterns import Pattern, PatternLike
from .readers import children_read
from .site import layer_name, parameter_name, plain_name

__all__ = ["Candidate", "Choice", "Preset", "Rules", "find_candidates", "globs_of", "no_candidates", "parse_rules", "share_ties"]

Preset: TypeAlias = Literal["default", "paper", "asp", "all"]
Rules: TypeAlias = PatternLike | Mapping[str, PatternLike | None]


@dataclass(slots=True, eq=False)
class Candidate:
    """A weight that could be sparse, and the decision about it: a grouping, or a reason to stay dense."""

    name: str
    module_name: str
    module: nn.Module
    known: KnownWeight
    grouping: Grouping | None = None
    reason: str = ""
    complaint: str = ""  # what to say if the user has insisted on groups that do not fit
    firmly: str = ""  # why not even a tie to a sparse weight may make it sparse

    @property
    def names(self) -> set[str]:
        """What a rule may call it."""
        return {self.name, self.module_name, parameter_name(self.module_name, self.known.param)}

    @property
    def weight(self) -> Tensor:
        return getattr(self.module, self.known.param)

    def matches(self, glob: str) -> bool:
        return glob in self.names or any(fnmatchcase(name, glob) for name in self.names)


def find_candidates(model: nn.Module) -> Iterator[Candidate]:
    """Every weight of a known kind."""
    for prefix, module in model.named_modules():
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module._parameters.values()):
            raise LayerError(
                f"{prefix or type(module).__name__}: its weights do not exist yet (lazy module); run one forward before sparsify_"
            )
        for known in known_weights(module):
            yield Candidate(layer_name(prefix, known.param), prefix, module, known)


def globs_of(skip: str | Iterable[str]) -> tuple[str, ...]:
    """One glob or several. What is neither is refused with the rules (`Choice.decide`)."""
    return tuple(skip) if isinstance(skip, Iterable) and not isinstance(skip, str) else (skip,)


def no_candidates(model: nn.Module) -> str:
    """What to say of a model without any."""
    return f"this {type(model).__name__} has no layer of a kind that nofm knows; teach it with nofm.register_layer"


def parse_rules(rules: Rules) -> dict[str, Pattern | None]:
    """A lone pattern is the rule for all layers."""
    if not isinstance(rules, Mapping):
        return {"*": Pattern(rules)}
    if not rules:
        raise LayerError('rules are empty; give a pattern, or {glob: pattern} such as {"layer4.*": "1:4", "*": "2:4"}')
    return {glob: None if pattern is None else Pattern(pattern) for glob, pattern in rules.items()}


@dataclass(slots=True)
class Choice:
    """One request, and how it decides about each candidate."""

    rules: dict[str, Pattern | None]
    preset: Preset
    skip: tuple[str, ...]
    axis: Literal["input", "flat"]
    pad: bool

    def decide(self, model: nn.Module, candidates: list[Candidate]) -> None:
        """Give each candidate its grouping or its reason; raise where the request cannot be met."""
        for glob in (*self.rules, *self.skip):
            if not isinstance(glob, str):
                raise LayerError(f"{glob!r} is no name of a layer; rules and skip take names and globs of them, such as 'layer4.*'")
            if not any(c.matches(glob) for c in candidates):
                raise LayerError(_no_match(glob, model, candidates))
        winners = {id(c): next((glob for glob in self.rules if c.matches(glob)), None) for c in candidates}
        for glob in self.rules:
            if glob not in winners.values():
                raise LayerError(f"rule {glob!r} has no effect: rules before it take all its layers; put it before them")
        first_conv, last, bypassed = _first_conv(candidates), classifiers(model, candidates), _bypassed(model)
        impossible = []
        for c in candidates:
            rule = winners[id(c)]
            by_custom = self._by_preset(c, c is first_conv, c in last)
            self._decide_one(c, rule, _BYPASSED if id(c.module) in bypassed else _unsuited(c), by_custom)
            if c.complaint and (self.preset == "all" or rule in c.names):
                impossible.append(f"{c.name}: {c.complaint}")
        if impossible:
            raise LayerError("\n".join(impossible))

    def _decide_one(self, c: Candidate, rule: str | None, unsuited: str, by_custom: str) -> None:
        c.firmly = unsuited
        if rule is None:
            c.reason = "no rule matches it"
            return
        pattern = self.rules[rule]
        skipping = next((glob for glob in self.skip if c.matches(glob)), None)
        if skipping is not None and pattern is not None and rule in c.names:
            raise LayerError(f"{c.name}: rule {rule!r} makes it {pattern} and skip={skipping!r} keeps it dense; drop one of them")
        on_purpose = rule != "*" or c.module_name == ""  # the user named it, or handed over this one layer
        if skipping is not None:
            c.reason = c.firmly = f"skip={skipping!r}"
        elif pattern is None:
            c.reason = f"rule {rule!r} keeps it dense"
            c.firmly = unsuited if rule == "*" else c.reason
        elif unsuited:
            c.reason = unsuited
        elif not on_purpose and isinstance(c.module, nn.Embedding | nn.EmbeddingBag):
            c.reason = "embedding: only sparse by a rule that names it"
        elif not on_purpose and by_custom:
            c.reason = f"{by_custom} (preset {self.preset})"
        else:
            self._lay_groups(c, pattern)

    def _by_preset(self, c: Candidate, is_first_conv: bool, is_classifier: bool) -> str:
        if self.preset == "default" and is_first_conv:
            return "first convolution"
        if self.preset in ("default", "paper") and is_classifier:
            return "classifier"
        if self.preset == "asp":
            outputs = c.weight.shape[0]
            if c.known.axis != 1 or outputs % 8 or c.known.fan % 16:
                return f"needs outputs divisible by 8 and inputs by 16, got {outputs} and {c.known.fan}"
        return ""

    def _lay_groups(self, c: Candidate, pattern: Pattern) -> None:
        shape = c.weight.shape
        axis: Axis = c.known.axis
        size, what = c.known.fan, _fan_word(c.module)
        if self.axis == "flat":
            if c.known.axis != 1:
                c.reason = "flat groups need a weight that starts with its output axis"
                return
            axis, size, what = "flat", shape[1:].numel(), "the flattened filter"
        if not pattern.divides(size):
            need = f"{pattern} needs {what} divisible by {pattern.m}, got {size}"
            if not self.pad:
                c.reason, c.complaint = need, f"{need}; add it to skip or pass pad=True"
                return
            if axis != "flat" and size != shape[axis]:
                c.reason = f"{need}; padding would run into the next conv group"
                c.complaint = f"{c.reason}; add it to skip"
                return
        grouping = Grouping(pattern, axis, self.pad)
        shards.check_groups_whole(c.name, c.weight, grouping)
        c.grouping = grouping

    def warn_about(self, candidates: list[Candidate]) -> None:
        """What is as asked and may still surprise, each once."""
        chosen = [c for c in candidates if c.grouping is not None]
        for pattern in sorted({c.grouping.pattern for c in chosen if c.grouping and c.grouping.pattern.n == c.grouping.pattern.m > 1}):
            warnings.warn(f"{pattern} keeps every weight: its layers stay dense in effect", stacklevel=3)
        told: set[int] = set()
        for glob, asked in self.rules.items():
            idle = [c for c in candidates if c.matches(glob)]
            if glob != "*" and asked is not None and all(c.grouping is None for c in idle):
                warnings.warn(f"rule {glob!r} makes no layer sparse; {idle[0].name}: {idle[0].reason}", stacklevel=3)
                told |= set(map(id, idle))
        unfit = [c for c in candidates if c.complaint and c.grouping is None and id(c) not in told]
        left, all_weights = (sum({id(c.weight): c.weight.numel() for c in of}.values()) for of in (unfit, candidates))
        if left > _MUCH * all_weights:
            who = f"{unfit[0].name} stays" if len(unfit) == 1 else f"{unfit[0].name} and {len(unfit) - 1} more stay"
            them = "it" if len(unfit) == 1 else "them"
            pads = ", pass pad=True" if any("pad=True" in c.complaint for c in unfit) else ""
            warnings.warn(
                f"{who} dense, with {left / all_weights:.0%} of these weights: {unfit[0].reason}. "
                f"Give {them} a rule with a pattern that does{pads}, or name {them} in skip if that is meant; "
                "sparsify_ returns all layers and reasons",
                stacklevel=3,
            )
        standardised = [c.name for c in chosen if "StdConv" in type(c.module).__name__]
        if standardised:
            warnings.warn(
                f"{standardised[0]} and {len(standardised) - 1} more standardise their weight after it is masked, which moves the zeros: "
                "their stored weight is N:M, the one they convolve with is not",
                stacklevel=3,
            )


_MUCH = 0.1  # of the weights: more than a few small layers, such as squeezes of a few channels, that nobody would miss
_BYPASSED = "its forward was replaced on the object (a hook?), where no mask reaches; undo that, sparsify_, and do it again"


def _bypassed(model: nn.Module) -> set[int]:
    """The modules whose weights are read by a forward that somebody has put on an object: swapping a class does not reach it."""
    replaced = [module for module in model.modules() if "forward" in vars(module)]
    return {id(part) for module in replaced for part in (module, *map(module.get_submodule, children_read(module)))}


def _unsuited(c: Candidate) -> str:
    """Why a layer is no place for N:M groups whatever the pattern, or nothing."""
    module = c.module
    if module._parameters.get(c.known.param) is None:
        return "its weight is computed from others (parametrized); remove the parametrization first"
    if not c.weight.is_floating_point():
        return f"its weight is {c.weight.dtype}, not floating point"
    if isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1 and module.in_channels == module.groups:
        return "depthwise: one input channel a filter"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.max_norm is not None or module.sparse):
        return "embedding with max_norm or sparse gradients"
    return ""


def _first_conv(candidates: list[Candidate]) -> Candidate | None:
    return next((c for c in candidates if isinstance(c.module, nn.modules.conv._ConvNd)), None)


def classifiers(model: nn.Module, candidates: list[Candidate]) -> list[Candidate]:
    """The layers that the model says are its classifier (timm does), or else its last linear layer outside Transformer blocks."""
    config = getattr(model, "pretrained_cfg", None)
    named = (config.get("classifier") if isinstance(config, Mapping) else None) or ()
    named = (named,) if isinstance(named, str) else tuple(named)
    if named:
        return [c for c in candidates if any(f"{plain_name(c.module_name)}.".startswith(f"{name}.") for name in named)]
    blocks = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    inside = {id(part) for module in model.modules() if isinstance(module, blocks) for part in module.modules()}
    return [c for c in candidates if isinstance(c.module, nn.Linear) and id(c.module) not in inside][-1:]


def _fan_word(module: nn.Module) -> str:
    if isinstance(module, nn.modules.conv._ConvNd):
        return "in_channels" if module.groups == 1 else "in_channels / groups"
    return "in_features" if isinstance(module, nn.Linear) else "the input axis"


def _no_match(glob: str, model: nn.Module, candidates: list[Candidate]) -> str:
    module = dict(model.named_modules()).get(glob)
    if module is not None and not any(c.module_name.startswith(f"{glob}.") for c in candidates):
        return f"{glob!r} is a {type(module).__name__}, whose weights nofm does not know; teach it with nofm.register_layer"
    parents = dict.fromkeys(".".join(parts[:i]) for c in candidates for parts in (c.name.split("."),) for i in range(1, len(parts)))
    spelled = [c.name for c in candidates] + ([f"{parent}.*" for parent in parents] if "*" in glob else [])
    close = difflib.get_close_matches(glob, spelled, n=3, cutoff=0.75)
    if module is not None:
        close = [f"{glob}.*"]
    names = [candidate.name for candidate in candidates]
    few = ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:8])}, ..."
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"layers are {few}"
    return f"{glob!r} matches no layer; {hint}"


def share_ties(model: nn.Module, candidates: list[Candidate]) -> None:
    """A parameter that several modules share has one mask: if one of them is sparse, all are, in the same way."""
    users: dict[int, list[str]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for param, weight in module._parameters.items():
            users[id(weight)].append(parameter_name(prefix, param))
    shared: dict[int, list[Candidate]] = defaultdict(list)
    for c in candidates:
        shared[id(c.module._parameters.get(c.known.param))].append(c)
    for weight_id, group in shared.items():
        decided = next((c for c in group if c.grouping is not None), None)
        if decided is None or len(users[weight_id]) == 1:
            continue
        for c in group:
            if c.grouping not in (None, decided.grouping) or c.known.axis != decided.known.axis:
                raise LayerError(f"{c.name} and {decided.name} share one weight but would group it differently; give both the same rule")
            if c.firmly:
                raise LayerError(
                    f"{c.name} and {decided.name} share one weight, but {c.name} stays dense ({c.firmly}) and {decided.name} would not; "
                    "keep both dense or make both sparse"
                )
            c.grouping = decided.grouping
        unknown = set(users[weight_id]) - {parameter_name(c.module_name, c.known.param) for c in group}
        if unknown:
            raise LayerError(
                f"{decided.name} shares its weight with {', '.join(sorted(unknown))}, of a kind that nofm does not know and "
                "would leave dense; teach it with nofm.register_layer, or add the layer to skip"
            )
