"""`pack_(model, example)`: layers compute without their zeros where that is faster on this machine. `unpack_`: plain layers again.

Whether leaving zeros out pays depends on the pattern, the layer, the batch and the processor: 1:16 nearly always, 2:4 where the batch is
small. So each layer is timed during one forward of an example, as it is and packed, in turns, and the faster one stays; where rounds differ
by more than what is gained, the layer as it is. Whatever is decided is in the report that is returned, layer by layer, with a reason where
a layer could not be packed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..columns import table_that_fits, wrapped
from ..errors import LayerError, NoZerosError
from ..kernels import products
from ..kinds import known_weights
from ..overview import refuse_packed
from ..plain import plain_number
from ..readers import children_read
from ..site import sites, unwrap
from .layers import PackedLayer, why_not_packed
from .timing import Seconds, Spread, in_turns

__all__ = ["PackedRow", "Packing", "pack_", "unpack_"]

_ROUNDS = 7  # of timing
_LOST = 1  # rounds in which a layer that is packed may have been slower: with as many, a coin would decide for it once in sixteen times
_WORTH = 0.95  # of the dense time: what must be gained for a layer to be packed
_PACKED, _UNSURE = "packed", "not faster in nearly all rounds"
_ZEROS = 0.4  # of a weight: with fewer, leaving them out cannot pay


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One layer: its times on the example's input in seconds (medians; 0.0 where it was not timed), and what was decided."""

    name: str
    shape: tuple[int, ...]
    kept: float
    input: tuple[int, ...]
    dense: float
    without_zeros: float
    packed: bool
    note: str
    calls: int = 0  # in a forward of the example; the first of them is timed
    speed_up: Spread | None = None  # without zeros, beside dense; None where it was not timed


@dataclass(frozen=True, slots=True)
class Packing:
    """What `pack_` did; printed, a table. Times are of this machine, with `threads` threads."""

    rows: tuple[PackedRow, ...]
    threads: int

    @property
    def packed(self) -> int:
        return sum(row.packed for row in self.rows)

    def __str__(self) -> str:
        timed = [row for row in self.rows if row.speed_up is not None]
        lines = [*_timed_lines(timed), *_untimed_lines(self.rows)]
        lines += wrapped(f"{self.packed} of {len(self.rows)} weights with many zeros are packed{_kept_of(self.rows)}.")
        if timed:
            before = sum(row.calls * row.dense for row in timed)
            after = sum(row.calls * (row.without_zeros if row.packed else row.dense) for row in timed)
            threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
            took = f"{_ms(after)} ms instead of {_ms(before)}"
            lines += wrapped(f"Timed layers, all calls: {took}, {before / after:.2f} x, {threads}.")
            lines += wrapped(_doubts(timed))
        return "\n".join(lines)


# ---- how it is printed: in lines that a terminal of 80 columns has room for ----


def _timed_lines(timed: Sequence[PackedRow]) -> list[str]:
    """A table, and how it was measured."""
    if not timed:
        return []
    lines = table_that_fits([("layer", *_HEADER), *((row.name, *_cells(row)) for row in timed)], right=(2, 3))
    how = f"Milliseconds of a call: medians of {_ROUNDS} rounds in turns; range: from the lowest to the highest speed-up of a round."
    if not all(row.packed for row in timed):
        how += f" A layer is packed where it gains {1 - _WORTH:.0%} or more and is faster in all rounds but {_LOST}."
    return [*lines, *wrapped(how)]


def _doubts(timed: Sequence[PackedRow]) -> str:
    """What speaks against taking these times for more than they are."""
    unsure = sum(row.speed_up is not None and row.speed_up.lowest < 1 < row.speed_up.highest for row in timed)
    said = [f"In {unsure} of {len(timed)} layers the range holds 1: what is faster there is not certain."] if unsure else []
    if close := sum(row.note == _UNSURE for row in timed):
        said.append(
            f"{close} of {len(timed)} would gain by the medians, but not in {_LOST + 1} or more of {_ROUNDS} rounds, and stay as they are."
        )
    if any(len(row.shape) == 4 for row in timed):
        said.append(
            "Layers are compared as they lie in memory; a dense network in channels_last may be faster, and nofm bench times it, too."
        )
    return " ".join(said)


_HEADER = ("weight", "dense", "packed", "speed-up (range)", "chosen")


def _cells(row: PackedRow) -> tuple[str, ...]:
    assert row.speed_up is not None, "only of rows that were timed"
    often = f", {row.calls} calls" if row.calls != 1 else ""
    chosen = f"{'packed' if row.packed else 'dense'}{often}"
    return _shape(row), _ms(row.dense), _ms(row.without_zeros), row.speed_up.told(2), chosen


def _untimed_lines(rows: Sequence[PackedRow]) -> list[str]:
    """The other layers, by what there is to say of them."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.speed_up is None:
            reasons.setdefault(row.note, []).append(f"{row.name} ({_shape(row)})")
    return [line for note, names in reasons.items() for line in wrapped(f"{note}: {', '.join(names)}", indent="  ")]


def _kept_of(rows: Sequence[PackedRow]) -> str:
    """How much of a weight is left, from the least to the most."""
    shares = sorted(row.kept for row in rows)
    least_and_most = dict.fromkeys(f"{share:.1%}" for share in (shares[:1] + shares[-1:]))
    return f"; {' to '.join(least_and_most)} of each is not zero" if shares else ""


def _shape(row: PackedRow) -> str:
    return "x".join(map(str, row.shape))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


@torch.no_grad()
def pack_(model: nn.Module, example: Any = None, *, only_faster: bool = True) -> Packing:
    """Let the layers of a folded model compute without their zeros, in place, where that is faster: fp32 on the CPU, for inference.

    example      an input of the size that will be computed with: a tensor, a shape (of normal numbers), a tuple of arguments, or a dict of
                 keyword arguments. Other sizes can be computed too; what is faster was measured on this one, with as many threads as torch
                 has now. A layer must gain 5 %, and be faster in all of seven rounds but one, to be packed.
    only_faster  False packs every layer that can be packed, and needs no example.

    Linear, Conv1d and Conv2d layers of which 40 % or more are zeros are tried, N:M or not. State dicts keep their keys and values;
    `unpack_` brings plain layers back.
    """
    model = unwrap(model)
    if next(iter(sites(model)), None) is not None:
        raise LayerError("this model is sparsified, with dense weights behind its N:M ones; nofm.fold_(model) first")
    if example is None and only_faster:
        raise LayerError(
            "give an example input, by which layers are timed: pack_(model, torch.randn(1, 3, 224, 224)); or only_faster=False"
        )
    if model.training:
        raise LayerError("this model is in training mode, and packed layers are for inference; model.eval() first")
    if reason := products.unavailable():
        raise LayerError(f"packed layers need a C compiler at first use: {reason}")
    refuse_packed(model)
    rows = {name: _row(weight, name, reason) for name, weight, reason in _with_zeros(model)}
    if not rows:
        raise NoZerosError(f"no layer has zeros worth leaving out, {_ZEROS:.0%} or more of a weight; see nofm.verify(model)")
    tried = {name: layer for name, layer in model.named_modules() if name in rows and not rows[name].note}
    if example is not None:
        _time(model, example, tried, rows, only_faster)
    for name, layer in tried.items():
        if not rows[name].note:
            note = "not called by the example" if only_faster else "packed, not timed"
            rows[name] = replace(rows[name], packed=not only_faster, note=note)
        if rows[name].packed:
            _put(model, name, PackedLayer(layer, name))
    return Packing(tuple(rows.values()), torch.get_num_threads())


def unpack_(model: nn.Module) -> int:
    """Make packed layers plain again, in place, with zeros written in; returns how many there were."""
    packed = [(name, layer) for name, layer in unwrap(model).named_modules() if isinstance(layer, PackedLayer)]
    for name, layer in packed:
        _put(unwrap(model), name, layer.plain())
    return len(packed)


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent)._modules[child] = layer


# ---- which layers ----


def _with_zeros(model: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """The weights that have many zeros, by the names of their layers, and why these cannot be packed."""
    read = {f"{prefix}.{name}".lstrip(".") for prefix, module in model.named_modules() for name in children_read(module)}
    owners: dict[int, str] = {}
    shared = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if owners.setdefault(id(parameter), name) != name:
            shared |= {name.rpartition(".")[0], owners[id(parameter)].rpartition(".")[0]}
    for name, layer in model.named_modules():
        for known in known_weights(layer):
            weight: Tensor = getattr(layer, known.param)
            if weight.numel() and float((weight == 0).float().mean()) >= _ZEROS:
                yield name if known.param == "weight" else f"{name}.{known.param}", weight, _why_not(name, layer, read, shared)


def _why_not(name: str, layer: nn.Module, read: set[str], shared: set[str]) -> str:
    if reason := why_not_packed(layer):
        return reason
    if not name:
        return "it is the model itself, which cannot be replaced in place: take nn.Sequential(model).eval()"
    if name in read:
        return "another module reads its weight"
    if name in shared:
        return "its weight has another name, too"
    if "parametrizations" in layer._modules:
        return "its weight is computed by a parametrization"
    return "it has hooks" if layer._forward_hooks or layer._forward_pre_hooks else ""


def _row(weight: Tensor, name: str, reason: str) -> PackedRow:
    return PackedRow(name, tuple(weight.shape), float((weight != 0).float().mean()), (), 0.0, 0.0, False, reason)


# ---- which are faster ----


def _time(model: nn.Module, example: Any, tried: Mapping[str, nn.Module], rows: dict[str, PackedRow], only_faster: bool) -> None:
    """One forward of the example, in which each layer is timed where it stands."""
    hooks = [layer.register_forward_hook(_timing(name, rows, only_faster)) for name, layer in tried.items()]
    try:
        if isinstance(example, Mapping):
            model(**example)
        elif isinstance(example, Sequence) and all(isinstance(plain_number(extent), int) for extent in example):
            model(torch.randn(tuple(example)))
        else:
            model(*(example if isinstance(example, Sequence) else (example,)))
    finally:
        for hook in hooks:
            hook.remove()


def _timing(name: str, rows: dict[str, PackedRow], only_faster: bool) -> Callable[..., None]:
    """A hook that times its layer, as it is and packed, when it is first called."""

    def hook(layer: Any, args: tuple[Tensor, ...], y: Tensor) -> None:
        if not rows[name].note:
            rows[name] = _measured(rows[name], layer, args[0], y, only_faster)
        rows[name] = replace(rows[name], calls=rows[name].calls + 1)

    return hook


def _measured(row: PackedRow, layer: Any, x: Tensor, y: Tensor, only_faster: bool) -> PackedRow:
    if not x.numel():
        raise LayerError(f"{row.name}: is given nothing by the example, so that it cannot be timed; give a larger one")
    trial = PackedLayer(copy.deepcopy(layer), row.name)
    _check_same(row.name, trial(x), y)
    as_it_is, trials = in_turns([lambda: layer.forward(x), lambda: trial(x)], _ROUNDS)
    note = _choice(as_it_is, trials) if only_faster else _PACKED
    times: dict[str, Any] = {"dense": as_it_is.median, "without_zeros": trials.median, "speed_up": trials.speed_up_from(as_it_is)}
    return replace(row, input=tuple(x.shape), packed=note == _PACKED, note=note, **times)


def _choice(dense: Seconds, without_zeros: Seconds) -> str:
    """What is chosen by these times, as a note: `_PACKED`, or why not.

    A layer must gain enough in the middle, and be faster in all rounds but `_LOST`, each beside the dense one of the same round: where
    rounds differ by more than what is gained, the middle of a few of them says little, and the dense layer is known to be right.
    """
    if without_zeros.median >= dense.median:
        return "dense is faster"
    if without_zeros.median >= _WORTH * dense.median:
        return f"gains less than {1 - _WORTH:.0%}"
    return _PACKED if without_zeros.rounds_slower_than(dense) <= _LOST else _UNSURE


def _check_same(name: str, ours: Tensor, dense: Tensor) -> None:
    """Sums in another order differ by roundings; anything more is an error of ours, and must not become somebody's result."""
    if not torch.isfinite(dense).all():
        raise LayerError(f"{name}: its output for the example is not finite; give an example that the network can compute")
    worst = float((ours - dense).abs().max() / dense.abs().max().clamp(min=1e-30))
    if not worst < 1e-3:
        raise LayerError(f"{name}: packed, its output differs from the dense one by {worst:.1e} of its largest; this is a bug of nofm")
