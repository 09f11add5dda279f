"""`cost(model, input_shape)`: parameters and multiply-adds, dense and sparse.

The model is run once on meta tensors, which have shapes but no values: no memory, no arithmetic. Each matrix product and
convolution reports its size through torch's own formulas (`torch.utils.flop_counter`); if one of its operands is a sparse weight,
its sparse cost is the dense one times the share of weights kept. A layer that runs twelve times counts twelve times, whoever
calls it. Multiply-adds (MACs) are what the paper's "Flops" column counts: 4.09 G for ResNet-50.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import ste
from ..errors import NofmError
from ..overview import refuse_packed, seen_now, zeros_counted
from ..plain import plain_number
from ..site import layer_name, named_weights, parameter_name, sites, unwrap

__all__ = ["Cost", "LayerCost", "cost"]

InputLike: TypeAlias = Sequence[int] | Tensor
_UNITS = {"G": 1e9, "M": 1e6}  # and thousands below


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The weights and multiply-adds of one layer (all its uses in a forward together)."""

    name: str
    density: float
    params: int
    params_kept: int
    macs: int
    macs_sparse: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What a model costs, dense and sparse; printed, a short table.

    params        all parameters.
    weights       all but the scales and shifts of normalisation layers, which is how the paper counts its sparse rows.
    macs          multiply-adds of one forward; sparse ones are dense ones times density for products with a sparse weight.
    now           a sentence on layers that do not compute with their pattern at present, by which they are counted; "" where all do.
    zeros         a sentence on dense layers with many zeros, as `fold_` leaves them, which count as weights; "" where there are none.
    """

    params: int
    params_sparse: int
    weights: int
    weights_sparse: int
    macs: int
    macs_sparse: float
    layers: tuple[LayerCost, ...]
    now: str = ""
    zeros: str = ""

    def __str__(self) -> str:
        rows = [
            ("", "dense", "sparse", "share kept"),
            _row("parameters", self.params, (self.params, self.params_sparse)),
            _row("  without norm layers", self.params, (self.weights, self.weights_sparse)),
            _row("multiply-adds", self.macs, (self.macs, self.macs_sparse)),
        ]
        lines = [f"{name:27}{dense:>10}{sparse:>10}{ratio:>12}" for name, dense, sparse, ratio in rows]
        lines.append("sparse multiply-adds: dense ones times the share that is kept of the weight")
        return "\n".join([*lines, *filter(None, (self.now, self.zeros))])


def _row(name: str, largest: float, counts: tuple[float, float]) -> tuple[str, str, str, str]:
    """A line of the table, in a unit that shows `largest` with a digit at least: millions from a tenth of a million on."""
    unit, size = next(((unit, size) for unit, size in _UNITS.items() if largest >= 0.1 * size), ("k", 1e3))
    dense, sparse = counts
    return f"{name} ({unit})", f"{dense / size:.3f}", f"{sparse / size:.3f}", f"{sparse / max(dense, 1):.3f}"


def cost(model: nn.Module, input_shape: InputLike | Sequence[InputLike]) -> Cost:
    """Count the parameters and multiply-adds of `model` for one input, or several, each given by its shape or by a tensor.

    >>> import torchvision
    >>> cost(torchvision.models.resnet50(), (1, 3, 224, 224)).macs
    4089184256
    """
    model = unwrap(model)
    refuse_packed(model)
    kept, now, zeros = {site.key: site.kept() for site in sites(model)}, seen_now(model), zeros_counted(model)
    model = _on_meta(model)
    for site in sites(model):
        site.look_through(ste.dense)  # count with the weight itself, so that it can be told from other tensors
    meter = _Meter(model)
    inputs = _inputs(input_shape)
    try:
        with torch.no_grad(), _no_fused_attention(), meter:
            model.eval()(*inputs)
    except NotImplementedError:
        raise  # an operation that has no shapes-only form: no other input would help
    except (ValueError, RuntimeError) as error:
        shapes = ", ".join(str(tuple(each.shape)) for each in inputs)
        raise NofmError(
            f"the model's forward fails for {shapes}: {error}; shapes begin with the batch, as in (1, 3, 224, 224), and stand for numbers "
            "with a fraction: for tokens give an example tensor"
        ) from error

    layers = []
    sizes = {key: weight.numel() for key, weight in named_weights(model)}
    for prefix, module in model.named_modules():
        for param in module._parameters:
            key = parameter_name(prefix, param)
            if key in meter.macs or key in kept:
                size, macs = sizes[key], meter.macs.get(key, 0)
                density = kept.get(key, size) / max(size, 1)
                layers.append(LayerCost(layer_name(prefix, param), density, size, kept.get(key, size), macs, macs * density))
    pruned = sum(sizes[key] - kept[key] for key in kept)
    norms = sum(p.numel() for module in model.modules() for p in _scales_and_shifts(module))
    params, macs = sum(sizes.values()), sum(meter.macs.values()) + meter.other
    macs_sparse = sum(layer.macs_sparse for layer in layers) + meter.other
    return Cost(params, params - pruned, params - norms, params - norms - pruned, macs, macs_sparse, tuple(layers), now, zeros)


def _scales_and_shifts(module: nn.Module) -> list[nn.Parameter]:
    own = [p for p in module._parameters.values() if p is not None]
    return own if all(p.dim() <= 1 for p in own) else []


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` whose tensors have no values. They are handed to deepcopy as already copied, so nothing real is."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(p.detach().to("meta"), p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = b.detach().to("meta")
    return copy.deepcopy(model, memo)


def _inputs(given: InputLike | Sequence[InputLike]) -> list[Tensor]:
    one = isinstance(given, Tensor) or all(isinstance(plain_number(extent), int) for extent in given)
    several: Any = [given] if one else given
    return [(x if isinstance(x, Tensor) else torch.empty(tuple(x))).to("meta") for x in several]


@contextmanager
def _no_fused_attention() -> Iterator[None]:
    """Fused Transformer kernels take all weights at once and have no formula; the plain path is the same arithmetic."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_BILINEAR = torch.ops.aten._trilinear  # what nn.Bilinear is to the dispatcher; torch has no formula for it


def _bilinear_flops(x1_BI: Tensor, w_OIJ: Tensor, *rest: Any, out_val: Tensor) -> int:
    """Of the products with the weight: each of its elements in each of the batch."""
    return 2 * x1_BI.shape[0] * w_OIJ.numel()


class _Meter(TorchDispatchMode):
    """Adds up multiply-adds by the parameter that takes part in them, `other` for products of activations alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # brings Triton along, so not before somebody counts

        self.formulas: Mapping[Any, Any] = {**flop_registry, _BILINEAR: _bilinear_flops}
        # A view (a transpose, a slice of in_proj) shares its parameter's storage, which is how it is known again.
        self.names = {_storage(p): name for name, p in named_weights(model) if p.dim() > 1}
        self.macs: dict[str, int] = {}
        self.other = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        formula = self.formulas.get(func._overloadpacket)
        if formula is None:
            with self:
                result = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if result is NotImplemented else result
        out = func(*args, **kwargs)
        macs = formula(*args, **kwargs, out_val=out) // 2
        name = next((self.names[_storage(x)] for x in args if isinstance(x, Tensor) and _storage(x) in self.names), None)
        if func._overloadpacket is _BILINEAR:
            self.other += out.numel() * args[2].shape[-1]  # the second input times what the weight has made of the first
        if name is None:
            self.other += macs
        else:
            self.macs[name] = self.macs.get(name, 0) + macs
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
