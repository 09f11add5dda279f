"""`verify(model_or_path)`: is it really N:M? Layer by layer, on which axis, and how far from it if not.

Takes what people have: a sparsified model, a plain (folded) model, a state dict, a safetensors file (packed or not) or an ONNX file
(`onnx_weights`), which are read tensor by tensor and never unpickled. Without a pattern it says which one each weight has. A weight
whose mask would be all ones, the sign of pruning that silently did not happen, is told apart from one that breaks the pattern here and
there.

Zeros anywhere fulfil some N:M by chance: of a network pruned to 10 % without structure, no 32 neighbours hold more than 12 weights
or so, which is no 12:32 network. So a pattern counts as found where groups fill it, half of them at least, and no more than one in a
hundred breaks it: those are its violations. All else with zeros is unstructured, and so are the layers of a model that were marked
"1:1". A pattern that is asked for is checked as it is.

Not every tensor of a file is the weight of a layer: networks have tokens and tables of positions. A file tells by names alone, so what is
not called a weight there is listed, but held to no pattern unless it has zeros or a rule names it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .. import shards
from ..choose import Rules, parse_rules
from ..columns import table_that_fits, wrapped
from ..errors import NofmError
from ..kinds import known_weights
from ..masks import Axis, Grouping
from ..packed import is_packed, unpacked
from ..patterns import Pattern
from ..site import named_weights, parameter_name, sites, unwrap
from .onnx_weights import onnx_weights

__all__ = ["Verification", "WeightReport", "verify"]

Verifiable: TypeAlias = nn.Module | Mapping[str, Tensor] | str | Path

# Patterns that are looked for when none is given: any N with these M, smallest share of weights first.
_USUAL_M = (2, 4, 8, 16, 32)

_STRAYS = 0.01  # share of groups that may break a pattern which the others have
_CHANCE = 0.001  # share of zeros that nobody has pruned
_ALL_ONES = "nothing is pruned"
# As torch names the weights of its layers (kinds.py): weight, in_proj_weight, weight_ih_l0; also where they are parametrized.
_A_WEIGHT = re.compile(r"(^|[._])weight([._]|$)")


@dataclass(frozen=True, slots=True)
class WeightReport:
    """One weight. `pattern` is what it was checked against, or the one found; None where it has none."""

    name: str
    shape: tuple[int, ...]
    pattern: Pattern | None
    axis: Axis | None
    groups: int
    violations: int
    zeros: float
    note: str
    unstructured: bool = False  # zeros, but in no pattern
    of_layer: bool = True  # False where it belongs to no layer that is known and is not called a weight either

    @property
    def ok(self) -> bool:
        """Whether the weight has its pattern."""
        return self.pattern is not None and self.violations == 0

    @property
    def all_ones(self) -> bool:
        """Whether nothing at all is pruned."""
        return self.zeros == 0.0

    @property
    def is_dense(self) -> bool:
        """Whether nothing is pruned, but for zeros that come by chance. Of one that could not be looked at, nothing is known."""
        return bool(self.shape) and self.zeros < _CHANCE

    @property
    def is_pruned(self) -> bool:
        """Whether it has its pattern by its zeros: rows may be too short to break one, and what is zero throughout has every one."""
        return self.ok and self.pattern is not None and (1 - self.pattern.density) / 2 <= self.zeros < 1.0


@dataclass(frozen=True, slots=True)
class Verification:
    """The reports of all weights of two or more dimensions; printed, a table. Indexed by name."""

    weights: tuple[WeightReport, ...]

    @property
    def ok(self) -> bool:
        """Whether some weight is N:M and every weight that should be is."""
        checked = [w for w in self.weights if w.pattern is not None]
        return bool(checked) and all(w.ok for w in checked)

    def __getitem__(self, name: str) -> WeightReport:
        found = next((w for w in self.weights if w.name == name), None)
        if found is None:
            raise KeyError(f"{name} is not among the {len(self.weights)} weights of two or more dimensions")
        return found

    def __str__(self) -> str:
        """A table, in lines of 80 columns: with notes where there is room for them, else they stand below, with the weights they are of."""
        rows = [("weight", "shape", "N:M", "axis", "groups", "violations", "zeros", ""), *map(_cells, self.weights)]
        lines = table_that_fits(rows)
        if len(lines) > len(rows):  # not even names have room beside the rest
            lines = [*table_that_fits([row[:-1] for row in rows]), *self._notes()]
        return "\n".join([*lines, *wrapped(self._in_total())])

    def _notes(self) -> list[str]:
        """Each note once, and what it is of; without the share of zeros, which a column has."""
        of: dict[str, list[str]] = {}
        for w in self.weights:
            of.setdefault(w.note.replace(f", {w.zeros:.1%} zeros", ""), []).append(w.name)
        alone = len(of) == 1 and len(self.weights) > 1
        named = {note: "all of them" if alone else ", ".join(names) for note, names in of.items() if note}
        return [line for note, names in named.items() for line in wrapped(f"{note}: {names}", indent="  ")]

    def _in_total(self) -> str:
        said = f"{sum(w.ok for w in self.weights)} of {len(self.weights)} weights are N:M"
        if loose := [w for w in self.weights if w.unstructured]:
            size = sum(math.prod(w.shape) for w in loose)
            zeros = sum(w.zeros * math.prod(w.shape) for w in loose) / size
            said += f", {len(loose)} {'is' if len(loose) == 1 else 'are'} unstructured, {zeros:.1%} zeros"
        return said


def _cells(w: WeightReport) -> tuple[str, ...]:
    axis = "-" if w.axis is None else str(w.axis)
    shape, pattern = "x".join(map(str, w.shape)), str(w.pattern or "-")
    return w.name, shape, pattern, axis, f"{w.groups:,}", f"{w.violations:,}", f"{w.zeros:.1%}", w.note


def verify(model_or_path: Verifiable, pattern: Rules | None = None) -> Verification:
    """Check every weight of a model, a state dict, a safetensors file or an ONNX file.

    Without `pattern`: a sparsified model is checked against its own patterns, by the weights its layers compute with; of
    anything else the pattern is found. With `pattern`: every weight is checked against it, or against the first of its rules
    that matches ({"layer4.*": "1:4", "fc": None, "*": "2:4"}, as for `sparsify_`; None and no match: not checked). Biases and
    other vectors are left out. Of an ONNX file, those weights are checked that a node multiplies by, along the axis on which it sums.

    Layers that are meant to be dense (the first convolution, the classifier) break a pattern that is asked for: give them a rule
    with None. Tokens and tables of positions (cls_token, pos_embed: of no known layer, and not called a weight) do not; they are
    listed as not checked, unless they have zeros or a rule other than "*" names them.
    """
    if isinstance(pattern, Mapping):
        return _by_rules(_looked_at(model_or_path, None), parse_rules(pattern), model_or_path)
    found = _looked_at(model_or_path, None if pattern is None else Pattern(pattern))
    return Verification(tuple(map(_let_off, found.weights)))


def _looked_at(model_or_path: Verifiable, wanted: Pattern | None) -> Verification:
    if isinstance(model_or_path, nn.Module):
        return Verification(tuple(_of_model(unwrap(model_or_path), wanted)))
    if not isinstance(model_or_path, Mapping) and Path(model_or_path).suffix.lower() == ".onnx":
        return Verification(tuple(_of_onnx(Path(model_or_path), wanted)))
    named = _of_state(model_or_path) if isinstance(model_or_path, Mapping) else _of_file(Path(model_or_path))
    return Verification(tuple(_by_name(_report(name, weight, wanted)) for name, weight in named if _is_weight(name, weight)))


def _by_name(w: WeightReport) -> WeightReport:
    return w if _A_WEIGHT.search(w.name) else replace(w, of_layer=False)


def _let_off(w: WeightReport) -> WeightReport:
    """As found, but for what is no weight of a layer and pruned by nobody, which has no pattern to break."""
    if w.of_layer or w.pattern is None or not (w.is_dense or w.zeros == 1.0):
        return w
    return _not_checked(w, "not checked: by its name no layer's weight")


def _not_checked(w: WeightReport, note: str) -> WeightReport:
    return replace(w, pattern=None, axis=None, groups=0, violations=0, note=note)


def _by_rules(found: Verification, rules: Mapping[str, Pattern | None], model_or_path: Verifiable) -> Verification:
    names = [w.name for w in found.weights]
    winners = {name: next((glob for glob in rules if _matches(name, glob)), None) for name in names}
    for glob in rules:
        if not any(_matches(name, glob) for name in names):
            close = difflib.get_close_matches(glob, [name.rpartition(".")[0] or name for name in names], n=1, cutoff=0.75)
            hint = f"did you mean {close[0]!r}?" if close else f"weights are {', '.join(names[:8])}, ..."
            raise NofmError(f"rule {glob!r} matches no weight; {hint}")
    checked = {pattern: _looked_at(model_or_path, pattern) for pattern in {rules[glob] for glob in winners.values() if glob is not None}}
    return Verification(tuple(_ruled(w, winners[w.name], rules, checked) for w in found.weights))


def _ruled(w: WeightReport, glob: str | None, rules: Mapping[str, Pattern | None], checked: Mapping[Any, Verification]) -> WeightReport:
    if glob is not None and rules[glob] is not None:
        asked = checked[rules[glob]][w.name]
        return _let_off(asked) if glob == "*" else asked
    why = "no rule matches it" if glob is None else f"rule {glob!r} keeps it dense"
    return _not_checked(replace(w, unstructured=False), f"not checked: {why}")


def _matches(name: str, glob: str) -> bool:
    """Whether a rule means this weight, by its own name or by its layer's."""
    return fnmatchcase(name, glob) or fnmatchcase(name.rpartition(".")[0], glob)


def _is_weight(name: str, tensor: Tensor) -> bool:
    if tensor.is_meta:
        raise NofmError(f"{name}: is on the meta device, so it has no values to look at; load the weights first")
    return tensor.dim() >= 2 and tensor.is_floating_point()


def _of_model(model: nn.Module, wanted: Pattern | None) -> Iterator[WeightReport]:
    sparse = {site.key: site for site in sites(model)}
    axes = {parameter_name(prefix, known.param): known.axis for prefix, m in model.named_modules() for known in known_weights(m)}
    for key, weight in named_weights(model):
        if not _is_weight(key, weight):
            continue
        if key not in sparse:
            found = _report(key, shards.whole(weight.detach()), wanted, axes.get(key))
            yield found if key in axes else _by_name(found)
            continue
        site = sparse[key]
        expected = site.grouping if wanted is None else Grouping(wanted, site.grouping.axis, site.grouping.pad)
        yield _checked(key, shards.whole_of(site.seen(), site.weight), expected, "as its layer sees it; fold_ writes it in")
    for prefix, module in model.named_modules():
        if getattr(module, "nofm_packed", False):  # no parameter, but the weight that stands for it
            yield _report(parameter_name(prefix, "weight"), module.weight, wanted, 1)


def _of_state(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state dict. What else modules put there (extra state) is no weight."""
    for name, value in state.items():
        if isinstance(value, Mapping) and not name.endswith("_extra_state"):
            raise NofmError(f"{name!r} is a dict of its own, so this holds a state dict and is none; verify that one")
        if isinstance(value, Tensor):
            yield name, value


def _of_file(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    _check_is_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            if is_packed(file):
                yield from unpacked(path, file)
                return
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        said = "other formats may run code when they are opened; give verify the state dict, or save that with safetensors.torch.save_file"
        raise NofmError(f"{path}: not a readable safetensors file ({error}); {said}") from error


def _of_onnx(path: Path, wanted: Pattern | None) -> Iterator[WeightReport]:
    _check_is_file(path)
    for weight in onnx_weights(path):
        if weight.tensor is None:  # where it should have a pattern, nothing tells that it has
            yield WeightReport(weight.name, (), wanted, None, 0, int(wanted is not None), 0.0, weight.note)
        elif _is_weight(weight.name, weight.tensor):
            yield _on_axes(weight.name, weight.tensor, wanted, [weight.axis])


def _check_is_file(path: Path) -> None:
    if not path.is_file():
        what = "is a folder; of a run give its model.safetensors" if path.is_dir() else "no such file"
        raise NofmError(f"{path}: {what}; verify takes a model, a state dict, a safetensors file or an ONNX file")


def _report(name: str, weight: Tensor, wanted: Pattern | None, axis: int | None = None) -> WeightReport:
    """Check one plain weight on the axes that its groups may run along, the usual one first."""
    axes: list[Axis] = [1, 0] if axis is None else [axis]
    if weight.dim() > 2:
        axes.append("flat")
    return _on_axes(name, weight, wanted, axes)


def _on_axes(name: str, weight: Tensor, wanted: Pattern | None, axes: list[Axis]) -> WeightReport:
    if wanted is not None:
        reports = [_checked(name, weight, Grouping(wanted, a, pad=True)) for a in axes]
        return next((report for report in reports if report.ok), reports[0])
    found = [(pattern, a) for a in axes if (pattern := _pattern_of(weight, a)) is not None]
    if not found:
        return _unstructured(name, weight)
    pattern, axis_found = min(found, key=lambda row: row[0].density)
    return _checked(name, weight, Grouping(pattern, axis_found))


def _pattern_of(weight: Tensor, axis: Axis) -> Pattern | None:
    """The N:M with the fewest kept weights, then the smallest M, that `weight` has along `axis`, but for strays, and that half of its
    groups fill."""
    best, kept, out = None, weight != 0, 1 if axis == 0 else 0
    kept = kept.movedim(out, 0)[kept.movedim(out, 0).flatten(1).any(1)].movedim(0, out)  # outputs that died say nothing of groups
    for m in _USUAL_M:
        grouping = Grouping(Pattern(f"{m}:{m}"), axis)
        if grouping.row_size(weight.shape) % m or not kept.numel():
            break
        counts_G = grouping.split(kept).sum(-1)
        share_C = torch.bincount(counts_G.flatten(), minlength=m + 1).double() / counts_G.numel()  # of groups by how many they keep
        n = int((share_C.flip(0).cumsum(0).flip(0)[1:] > _STRAYS).sum())  # the largest number that more than strays reach
        if n < m and share_C[n] >= 0.5 and (best is None or n / m < best.density):
            best = Pattern(f"{n}:{m}")
    return best


def _unstructured(name: str, weight: Tensor, note: str = "") -> WeightReport:
    """A weight without a pattern: zeros anywhere, or none but what comes by chance (a weight that was never used, a padding row)."""
    zeros = _zeros(weight)
    if zeros < _CHANCE:
        said = f"{_ALL_ONES}; {round(zeros * weight.numel()):,} zeros" if zeros else _ALL_ONES
        return WeightReport(name, tuple(weight.shape), None, None, 0, 0, zeros, said)
    said = f"unstructured, {zeros:.1%} zeros" + (note and f", {note}")
    return WeightReport(name, tuple(weight.shape), None, None, 0, 0, zeros, said, unstructured=True)


def _checked(name: str, weight: Tensor, grouping: Grouping, note: str = "") -> WeightReport:
    if grouping.pattern.m == 1:  # says which layers are sparse, not where
        return _unstructured(name, weight, note)
    shape, violations = weight.shape, int(grouping.violations(weight))
    if bool((weight != 0).all()) and grouping.pattern.n < grouping.pattern.m:
        note, violations = _ALL_ONES, grouping.groups(shape)  # also where rows are too short to break the pattern
    return WeightReport(name, tuple(shape), grouping.pattern, grouping.axis, grouping.groups(shape), violations, _zeros(weight), note)


def _zeros(weight: Tensor) -> float:
    return float((weight == 0).to(torch.float64).mean()) if weight.numel() else 0.0
