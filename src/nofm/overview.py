"""`summary(model)`: what each layer of a model is, sparse in which pattern, or dense and why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from . import shards
from .columns import table
from .errors import LayerError
from .kinds import known_weights
from .layers import SparseModule, dense_class
from .site import kept_weights, layer_name, unwrap

__all__ = [
    "LayerRow",
    "Summary",
    "forget_reasons",
    "refuse_packed",
    "remember_reason",
    "seen_now",
    "summary",
    "zeros_counted",
]

_REASONS = "_nofm_dense"  # on a module: why each of its weights stays dense
_MANY = 0.1  # of a weight: more zeros than training leaves by chance


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One weight of a model. `pattern` is "" for a dense one, and `note` then says why."""

    name: str
    kind: str
    shape: tuple[int, ...]
    pattern: str
    groups: int
    kept: int
    note: str

    @property
    def weights(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Summary:
    """The rows of all layers; printed, a table. A tied weight counts once, at the first of its layers.

    now   a sentence on layers that do not compute with their pattern at present (a dense or gradual start, ASP before it prunes, `Dense`),
          "" where all of them do. Rows and density go by the pattern, or by a stored mask.
    zeros a sentence on dense layers with many zeros, as `fold_` leaves them, which count as weights; "" where there are none.
    """

    rows: tuple[LayerRow, ...]
    now: str = ""
    zeros: str = ""

    @property
    def sparse(self) -> tuple[LayerRow, ...]:
        """The sparse layers."""
        return tuple(row for row in self.rows if row.pattern)

    @property
    def dense(self) -> tuple[LayerRow, ...]:
        """The layers that stay dense, each with its reason in `note`."""
        return tuple(row for row in self.rows if not row.pattern)

    @property
    def density(self) -> float:
        """The share of all these weights that is kept."""
        counted = [row for row in self.rows if not row.note.startswith("tied")]
        return sum(row.kept for row in counted) / max(1, sum(row.weights for row in counted))

    def __str__(self) -> str:
        header = ("layer", "kind", "shape", "pattern", "groups", "weights kept", "note")
        cells = [
            (r.name, r.kind, "x".join(map(str, r.shape)), r.pattern or "dense", f"{r.groups:,}" if r.pattern else "", f"{r.kept:,}", r.note)
            for r in self.rows
        ]
        total = f"{len(self.sparse)} of {len(self.rows)} layers sparse; weights kept in all layers: {self.density:.1%}"
        return "\n".join([*table([header, *cells], right=(4, 5)), total, *filter(None, (self.now, self.zeros))])


def refuse_packed(model: nn.Module) -> None:
    """Raise where layers of `model` compute without their zeros, and have no parameters to look at."""
    names = [name for name, module in model.named_modules() if getattr(module, "nofm_packed", False)]
    if names:
        more = f", ... ({len(names)} in all)" if len(names) > 3 else ""
        raise LayerError(f"{', '.join(names[:3])}{more} of this {type(model).__name__} are packed; nofm.unpack_(model) first")


def summary(model: nn.Module) -> Summary:
    """One row for each layer of `model`, whether it is sparse, and if not why."""
    model = unwrap(model)
    refuse_packed(model)
    return Summary(tuple(_rows(model)), seen_now(model), zeros_counted(model))


def seen_now(model: nn.Module) -> str:
    """A sentence on the layers that do not compute with their pattern yet, for those who count by it; "" where all of them do."""
    sparse = [held for module in model.modules() if isinstance(module, SparseModule) for held in module._nofm.values()]
    if not (wider := [held.now for held in sparse if held.now]):
        return ""
    layers = f"{len(wider)} of {len(sparse)} sparse layers" if len(sparse) > 1 else "the sparse layer"
    compute = "computes with more weights than its" if len(wider) == 1 else "compute with more weights than their"
    return f"now {layers} {compute} pattern keeps ({', '.join(dict.fromkeys(wider))}); what is kept is counted by the pattern"


@torch.no_grad()
def zeros_counted(model: nn.Module) -> str:
    """A sentence on the zeros in dense layers, for those who count them as weights; "" where there are not many."""
    dense = {
        id(weight): shards.local(weight.detach())
        for module in model.modules()
        for param, weight, _ in _weights(module)
        if not (isinstance(module, SparseModule) and param in module._nofm)
    }
    # Of each process its own part. What has no values (meta, fake) or other ones than numbers (quantized) is not looked at.
    parts = [part for part in dense.values() if type(part) is Tensor and not part.is_meta and part.is_floating_point()]
    zeros = [part.numel() - int(part.count_nonzero()) for part in parts]
    # One that is all zeros was begun with so: the last layer of a block, an adapter.
    many = [count for count, part in zip(zeros, parts, strict=True) if _MANY * part.numel() <= count < part.numel()]
    if not many:
        return ""
    layers = f"{len(many)} dense layers have" if len(many) > 1 else "one dense layer has"
    return f"{layers} many zeros ({sum(many):,}), counted here as weights; count before nofm.fold_, or look at nofm.verify(model)"


def _rows(model: nn.Module) -> Iterator[LayerRow]:
    seen: dict[int, str] = {}
    for prefix, module in model.named_modules():
        sparse = module._nofm if isinstance(module, SparseModule) else {}
        kind = (dense_class(type(module)) if isinstance(module, SparseModule) else type(module)).__name__
        for param, weight, known in _weights(module):
            name, shape = layer_name(prefix, param), weight.shape
            tied = f"tied to {seen[id(weight)]}" if id(weight) in seen else ""
            seen.setdefault(id(weight), name)
            if param in sparse:
                assert isinstance(module, SparseModule)
                grouping = sparse[param].grouping
                note = tied or ("flat groups" if grouping.axis == "flat" else "")
                kept = kept_weights(module, param)
                yield LayerRow(name, kind, tuple(shape), str(grouping.pattern), grouping.groups(shape), kept, note)
            else:
                reason = module.__dict__.get(_REASONS, {}).get(param, "" if known else "kind not known")
                yield LayerRow(name, kind, tuple(shape), "", 0, weight.numel(), tied or reason)


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Name, value and whether it is known, of each weight of `module` itself; of what a weight is computed from, nothing."""
    known = [weight.param for weight in known_weights(module)]
    yield from ((param, getattr(module, param), True) for param in known)
    if isinstance(module, parametrize.ParametrizationList) or any(param not in module._parameters for param in known):
        return
    for param, weight in module._parameters.items():
        if weight is not None and param not in known and weight.dim() >= 2:
            yield param, weight, False


def remember_reason(module: nn.Module, param: str, reason: str) -> None:
    """Note on `module` why `param` stays dense."""
    module.__dict__.setdefault(_REASONS, {})[param] = reason


def forget_reasons(model: nn.Module) -> None:
    """Take all such notes away."""
    for module in model.modules():
        module.__dict__.pop(_REASONS, None)
