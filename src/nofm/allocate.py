"""Mixed N:M: which pattern each layer gets, under one budget for the whole network.

The paper trains all layers with one pattern and leaves this as future work. `allocate_patterns` chooses among candidates for each layer
so that the share of weights kept, or of multiply-adds, stays within the budget:

    erk           densities in proportion to (out + in + kernel) / (out * in * kernel): small layers denser    Evci et al. 2020
    magnitude     least sum of w^2 over all weights that are pruned
    sensitivity   least loss: what a function of the model says when one layer alone is pruned, or sum of (g * w)^2 over pruned weights
    uniform       one pattern for all layers, the densest that fits

Where nothing is said it is erk, which needs neither trained weights nor data. Magnitude and sensitivity are a choice of one option for
each layer, with a cost and a loss each (a multiple-choice knapsack). It is solved as its relaxation is: go along the lower convex hulls
of all layers, always where a unit of cost saves most loss, as far as the budget reaches; then spend what is left over on whatever still
fits. The loss is at most one such step above the best; costs are exact fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from . import shards
from .analysis.cost import InputLike, cost
from .choose import Candidate, Choice, Preset, find_candidates, globs_of, no_candidates, share_ties
from .errors import LayerError
from .layers import SparseModule
from .masks import Grouping, check_finite
from .patterns import Pattern, PatternLike
from .plain import plain_number
from .site import parameter_name, plain_name, unwrap

__all__ = ["CANDIDATES", "STRATEGY", "Strategy", "allocate_patterns", "in_proportion"]

Strategy: TypeAlias = Literal["magnitude", "sensitivity", "uniform", "erk"]
# Where nothing is said, here and in a run's configuration. Very sparse ones are among them, so that some layers can give what others take.
CANDIDATES: tuple[str, ...] = ("1:64", "1:32", "1:16", "1:8", "1:4", "2:4", "dense")
STRATEGY: Strategy = "erk"
_DENSE = Fraction(1)


@dataclass(slots=True)
class _Option:
    """A pattern for a layer (None: dense), the share of its weights that it keeps, what it costs and what is lost with it."""

    pattern: Pattern | None
    density: Fraction
    cost: Fraction
    loss: float = 0.0


@dataclass(slots=True)
class _Layer:
    """One weight, with all layers that share it, and its options: the sparsest first, and of equal ones the smallest M."""

    members: list[Candidate]
    size: int  # in units of the budget: weights or multiply-adds
    options: list[_Option]

    @property
    def weight(self) -> Tensor:
        return self.members[0].weight

    def at_most(self, density: float | Fraction) -> int:
        """The densest option that keeps no more than `density`, or the sparsest there is."""
        return max((i for i, option in enumerate(self.options) if option.density <= density), default=0)


def allocate_patterns(
    model: nn.Module,
    budget: float,
    patterns: PatternLike | Iterable[PatternLike | None] = CANDIDATES,
    *,
    by: Strategy = STRATEGY,
    of: Literal["weights", "macs"] = "weights",
    input_shape: InputLike | Sequence[InputLike] | None = None,
    gradients: Mapping[str, Tensor] | None = None,
    loss: Callable[[nn.Module], float] | None = None,
    preset: Preset = "default",
    skip: str | Iterable[str] = (),
    axis: Literal["input", "flat"] = "input",
) -> dict[str, Pattern | None]:
    """A pattern for each layer, as rules for `sparsify_`: {"layer1.0.conv1": 2:4, "layer1.0.conv2": None, ...}, None for dense.

    budget       share that is kept, above 0 and up to 1, of all layers that can be sparse: those that `preset` and `skip` do not keep
                 dense and that some pattern divides. Never exceeded.
    patterns     what to choose from; "dense" (or None) among them where layers may stay dense.
    by           "erk", "magnitude", "sensitivity" or "uniform", see above.
    of           what the budget counts: "weights" or "macs", multiply-adds of a forward with `input_shape` (as for `cost`).
    gradients    for "sensitivity": by parameter name, of the dense model.
    loss         for "sensitivity", instead: a function that measures the model, smaller is better. It is called once for the dense
                 model and once for each layer and pattern. The model is changed while it runs, and put back.

        rules = nofm.allocate_patterns(model, 0.25)
        nofm.sparsify_(model, rules)
    """
    model, budget = unwrap(model), plain_number(budget)
    _check_request(budget, by, of, input_shape, gradients, loss)
    chosen_from = _parse(patterns)
    layers, dense = _layers(model, chosen_from, preset, globs_of(skip), axis)
    _set_costs(model, layers, None if of == "weights" else input_shape)
    limit = Fraction(budget).limit_denominator(10**9) * sum(layer.size for layer in layers)  # so that 1 / 3 is a third
    least = sum(layer.options[0].cost for layer in layers)
    if least > limit:
        raise LayerError(
            f"budget={budget} cannot be met: with the sparsest pattern of each layer {float(least / sum(x.size for x in layers)):.4g} of "
            f"the {of} are kept; give a larger budget or sparser patterns"
        )
    if by == "uniform":
        picks = _uniform(layers, limit)
    elif by == "erk":
        picks = _erk(layers, limit)
    else:
        _set_losses(model, layers, axis, by, gradients, loss)
        picks = _hulls(layers, limit)
    assert _total(layers, picks) <= limit, "the budget is exceeded"
    by_name = {c.name: layer.options[i].pattern for layer, i in zip(layers, picks, strict=True) for c in layer.members}
    by_name |= dict.fromkeys(dense)
    return {c.name: by_name[c.name] for c in find_candidates(model) if c.name in by_name}


def _check_request(budget: float, by: str, of: str, input_shape: object, gradients: object, loss: object) -> None:
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise LayerError(f"budget={budget!r} must be 0 < budget <= 1: the share that is kept")
    if by not in get_args(Strategy):
        raise LayerError(f"by={by!r} is not one of {', '.join(map(repr, get_args(Strategy)))}")
    if of not in ("weights", "macs"):
        raise LayerError(f'of={of!r} is not one of "weights", "macs"')
    if (of == "macs") != (input_shape is not None):
        raise LayerError('of="macs" needs the input_shape of a forward' if of == "macs" else 'input_shape has no effect on of="weights"')
    given = [name for name, value in (("gradients", gradients), ("loss", loss)) if value is not None]
    if by == "sensitivity" and len(given) != 1:
        raise LayerError(f'by="sensitivity" needs gradients or loss, one of them; got {" and ".join(given) or "neither"}')
    if by != "sensitivity" and given:
        raise LayerError(f'{given[0]} has no effect on by="{by}"; it belongs to "sensitivity"')


def _parse(patterns: PatternLike | Iterable[PatternLike | None]) -> list[Pattern | None]:
    patterns = (patterns,) if isinstance(patterns, str | Pattern) else patterns
    found = [None if pattern in (None, "dense") else Pattern(pattern) for pattern in patterns]
    unique = {pattern: None for pattern in found if pattern is None or pattern.n < pattern.m}
    if any(pattern is not None and pattern.n == pattern.m for pattern in found):
        unique[None] = None  # N of N is dense
    if not any(unique):
        raise LayerError("patterns has none that prunes; give those to choose from, such as 1:4, 2:4 and dense")
    return sorted(unique, key=lambda p: (Fraction(1), 0) if p is None else (Fraction(p.n, p.m), p.m))


# ---- the layers and what each option costs and loses ----


def _layers(
    model: nn.Module, patterns: list[Pattern | None], preset: Preset, skip: tuple[str, ...], axis: Literal["input", "flat"]
) -> tuple[list[_Layer], list[str]]:
    """The layers that have a choice, and the names of those that no pattern divides."""
    if any(isinstance(module, SparseModule) for module in model.modules()):
        raise LayerError("this model is sparse already; densify_ it first, or allocate before sparsify_")
    candidates = list(find_candidates(model))
    if not candidates:
        raise LayerError(no_candidates(model))
    Choice({"*": Pattern("1:1")}, preset, skip, axis, pad=False).decide(model, candidates)  # 1:1 divides everything
    share_ties(model, candidates)
    tied: dict[int, list[Candidate]] = {}
    for c in candidates:
        if c.grouping is not None:
            tied.setdefault(id(c.module._parameters[c.known.param]), []).append(c)
    layers, dense = [], []
    for members in tied.values():
        length = members[0].weight.shape[1:].numel() if axis == "flat" else members[0].known.fan
        fitting = [p for p in patterns if p is None or p.divides(length)]
        if any(fitting):
            options = [_Option(p, _DENSE if p is None else Fraction(p.n, p.m), Fraction(0)) for p in fitting]
            layers.append(_Layer(members, members[0].weight.numel(), options))
        else:
            dense += [c.name for c in members]
    if not layers:
        reasons = "\n  ".join(f"{c.name}: {c.reason or 'no pattern divides it'}" for c in candidates)
        raise LayerError(f"no layer would become sparse:\n  {reasons}\nChoose other patterns or another preset")
    return layers, dense


def _set_costs(model: nn.Module, layers: list[_Layer], input_shape: InputLike | Sequence[InputLike] | None) -> None:
    if input_shape is not None:
        macs = {layer.name: layer.macs for layer in cost(model, input_shape).layers}
        for layer in layers:
            layer.size = sum(macs.get(c.name, 0) for c in layer.members)
    for layer in layers:
        for option in layer.options:
            option.cost = option.density * layer.size


@torch.no_grad()
def _set_losses(
    model: nn.Module,
    layers: list[_Layer],
    axis: Literal["input", "flat"],
    by: str,
    gradients: Mapping[str, Tensor] | None,
    loss: Callable[[nn.Module], float] | None,
) -> None:
    base = _checked(loss(model), "the dense model") if loss is not None else 0.0
    gradients = None if gradients is None else {plain_name(name): gradient for name, gradient in gradients.items()}
    for layer in layers:
        c, weight = layer.members[0], shards.whole(layer.weight.detach())
        name = parameter_name(c.module_name, c.known.param)
        check_finite(weight, name)
        if gradients is not None and gradients.get(name) is None:
            raise LayerError(f"gradients has no {name!r}; give one for each weight, by its name in named_parameters()")
        if gradients is not None and gradients[name].shape != weight.shape:
            raise LayerError(f"gradients[{name!r}] has shape {tuple(gradients[name].shape)}, the weight {tuple(weight.shape)}")
        if gradients is not None and not gradients[name].isfinite().all():
            raise LayerError(f"gradients[{name!r}] is not finite; take those of a step without overflow")
        score = weight if gradients is None else weight * gradients[name]
        for option in layer.options:
            if option.pattern is None:
                continue
            kept = Grouping(option.pattern, "flat" if axis == "flat" else c.known.axis).mask(weight)
            if loss is None:
                option.loss = float(torch.where(kept, 0.0, score.double()).square().sum())
            else:
                option.loss = max(0.0, _measured(model, layer, kept, loss) - base)


def _measured(model: nn.Module, layer: _Layer, kept: Tensor, loss: Callable[[nn.Module], float]) -> float:
    """The loss with this layer alone pruned."""
    part = shards.local(layer.weight.detach())
    before = part.clone()
    try:
        part.masked_fill_(~shards.part_of(kept, layer.weight), 0.0)
        return _checked(loss(model), f"the model with {layer.members[0].name} pruned")
    finally:
        part.copy_(before)


def _checked(loss: object, of: str) -> float:
    """A loss as a number: one that is none could not be compared with others, and the choice would be any."""
    try:
        found = float(loss)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise LayerError(f"loss has returned {loss!r} for {of}; it must return a finite number, smaller for a better model")
    return found


# ---- the strategies: the place of the option taken, for each layer ----


def _total(layers: list[_Layer], picks: Sequence[int]) -> Fraction:
    return sum((layer.options[i].cost for layer, i in zip(layers, picks, strict=True)), Fraction(0))


def _uniform(layers: list[_Layer], limit: Fraction) -> list[int]:
    """Every layer the same; one that the pattern does not divide takes the densest of its own that is not denser."""
    found = [0] * len(layers)
    known = {(o.density, 0 if o.pattern is None else o.pattern.m): o.pattern for layer in layers for o in layer.options}
    for _, pattern in sorted(known.items(), key=lambda item: item[0]):
        density = _DENSE if pattern is None else Fraction(pattern.n, pattern.m)
        picks = [
            next((i for i, option in enumerate(layer.options) if option.pattern == pattern), layer.at_most(density)) for layer in layers
        ]
        if _total(layers, picks) <= limit:
            found = picks
    return found


def _erk(layers: list[_Layer], limit: Fraction) -> list[int]:
    """The largest Erdos-Renyi-kernel network that, rounded down to patterns, fits."""
    sizes, parts = ([count(layer.weight.shape) for layer in layers] for count in (math.prod, sum))

    def rounded(total: int) -> list[int]:
        kept = zip(in_proportion(Fraction(total), parts, sizes), sizes, strict=True)
        densities = [_DENSE if share == size else share / size for share, size in kept]
        return [layer.at_most(density) for layer, density in zip(layers, densities, strict=True)]

    low, high = 0, sum(sizes)  # the densities of all layers grow with the total, so the cost does
    while low < high:
        middle = (low + high + 1) // 2
        if _total(layers, rounded(middle)) <= limit:
            low = middle
        else:
            high = middle - 1
    return rounded(low)


def in_proportion(total: float | Fraction, parts: Sequence[float], room: Sequence[int]) -> list[Any]:
    """`total` cut in proportion to `parts`; those that would get more than they have room for are full, and the others share what that
    leaves, and so on. Exact where `total` is a fraction and `parts` are whole numbers."""
    exact: list[Any] = [0] * len(room)
    open_ = list(range(len(room)))
    while open_:
        left = total - sum(exact)
        weights = parts if sum(parts[i] for i in open_) > 0 else room  # without parts there is no other proportion than room
        whole = sum(weights[i] for i in open_) or 1
        full = [i for i in open_ if left * weights[i] >= room[i] * whole]
        for i in full or open_:
            exact[i] = room[i] if full else left * weights[i] / whole
        open_ = [i for i in open_ if i not in full] if full else []
    return exact


def _hulls(layers: list[_Layer], limit: Fraction) -> list[int]:
    """Along the convex hulls, steepest first; then whatever still fits."""
    picks = [_cheapest(layer) for layer in layers]
    left = limit - _total(layers, picks)
    moves = [move for place, layer in enumerate(layers) for move in _hull_moves(place, layer, picks[place])]
    for _, place, start, end in sorted(moves, key=lambda move: (-move[0], move[1], move[2])):
        more = layers[place].options[end].cost - layers[place].options[start].cost
        if picks[place] == start and more <= left:
            picks[place], left = end, left - more
    while (move := _best_move(layers, picks, left)) is not None:
        place, end = move
        left -= layers[place].options[end].cost - layers[place].options[picks[place]].cost
        picks[place] = end
    return picks


def _cheapest(layer: _Layer) -> int:
    return min(range(len(layer.options)), key=lambda i: (layer.options[i].cost, layer.options[i].loss, i))


def _saving(layer: _Layer, start: int, end: int) -> float:
    """Loss saved for each unit of cost."""
    saved, more = layer.options[start].loss - layer.options[end].loss, layer.options[end].cost - layer.options[start].cost
    return saved / float(more) if more > 0 else float("inf") if saved > 0 else 0.0


def _hull_moves(place: int, layer: _Layer, first: int) -> Iterator[tuple[float, int, int, int]]:
    """The steps of a layer's lower convex hull, each saving less than the one before."""
    start = first
    while True:
        dearer = [i for i, option in enumerate(layer.options) if option.cost > layer.options[start].cost]
        end = max(dearer, key=lambda i: (_saving(layer, start, i), -i), default=None)
        if end is None or _saving(layer, start, end) <= 0:
            return
        yield _saving(layer, start, end), place, start, end
        start = end


def _best_move(layers: list[_Layer], picks: list[int], left: Fraction) -> tuple[int, int] | None:
    """The change of one layer that fits in what is left and saves most for each unit of cost; None where nothing saves."""
    best, found = 0.0, None
    for place, layer in enumerate(layers):
        now = layer.options[picks[place]]
        for end, option in enumerate(layer.options):
            if option.cost - now.cost <= left and option.loss < now.loss and _saving(layer, picks[place], end) > best:
                best, found = _saving(layer, picks[place], end), (place, end)
    return found
