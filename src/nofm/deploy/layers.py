"""`PackedLayer`: a linear layer or convolution that computes without its zeros, for inference in fp32 on the CPU.

It stands where the plain layer stood and holds the kept weights only (as values and bits, as `nofm.packed` writes them). In a state dict
it has the plain layer's keys and values, zeros written in, so that a checkpoint goes either way. How the weights are laid out for the
kernels depends, for convolutions, on the size of the input: a *plan* is made when a size is first seen and kept for the next time.

For `torch.compile` a packed layer is one operator, `nofm::without_zeros`, which knows it by a number; what stands around it is compiled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..errors import LayerError
from ..kernels import products
from ..kinds import forward_by
from ..layers import in_onnx_export
from ..packed import pack_weight, unpack_weight

__all__ = ["PackedLayer", "why_not_packed"]

_MOST_PLANS = 8  # sizes of inputs that a layer remembers

_numbers = itertools.count()
_known: WeakValueDictionary[int, PackedLayer] = WeakValueDictionary()  # by the number that compiled code has


def why_not_packed(layer: nn.Module) -> str | None:
    """Why `layer` cannot compute without its zeros, or None where it can."""
    kind: type[Any] = type(layer)
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d) or forward_by(kind) is None:
        return f"{kind.__name__} is no plain Linear, Conv1d or Conv2d"
    if layer.weight.dtype != torch.float32 or layer.weight.device.type != "cpu":
        return f"its weight is {layer.weight.dtype} on {layer.weight.device}, and packed layers are fp32 on the CPU"
    if isinstance(layer, nn.Linear):
        return None
    if layer.padding_mode != "zeros":
        return f"it is padded by {layer.padding_mode}, not by zeros"
    return None if _padding(layer) is not None else 'its padding="same" is larger on one side'


def _padding(layer: nn.Conv1d | nn.Conv2d) -> tuple[int, ...] | None:
    """Rows or columns of zeros on each side, or None where the two sides differ."""
    if not isinstance(layer.padding, str):
        return tuple(layer.padding)
    if layer.padding == "valid":
        return tuple(0 for _ in layer.kernel_size)
    total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return None if any(t % 2 for t in total) else tuple(t // 2 for t in total)


class PackedLayer(nn.Module):
    """A plain layer without its zeros; `plain()` gives it back. `name` is what errors call it."""

    nofm_packed = True  # for those who look at layers, and may not import this one
    values: Tensor
    places: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear | nn.Conv1d | nn.Conv2d, name: str) -> None:
        super().__init__()
        if reason := why_not_packed(layer):
            raise LayerError(f"{name}: {reason}")
        self.name = name
        packed = pack_weight(name, layer.weight.detach(), None)
        self._line, self._most = packed.line, packed.values.numel()
        self.register_buffer("values", packed.values, persistent=False)
        self.register_buffer("places", packed.places, persistent=False)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())
        layer.weight.data = layer.weight.data.new_empty(0)  # the same parameter, for optimizers that know it, without its numbers
        self._layer = (layer,)  # in a tuple, so that it is no module of this one
        self._plans: dict[tuple[int, ...], products.Plan] = {}
        self._number = _numbered(self)
        self.train(layer.training)

    @property
    def weight(self) -> Tensor:
        """The weight with its zeros, made anew each time."""
        return unpack_weight(self.name, self._line, self.values, self.places)

    def plain(self) -> nn.Module:
        """The layer as it was, with its zeros written in."""
        (layer,) = self._layer
        layer.weight.data = self.weight
        if layer.bias is not None and self.bias is not None:
            layer.bias.data = self.bias
        return layer.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """What the plain layer computes, but for the order of its sums and for zeros times Inf, which are left out."""
        if x.dtype != torch.float32 or x.device.type != "cpu":
            raise LayerError(
                f"{self.name}: is packed, for fp32 on the CPU, and was given {x.dtype} on {x.device}; model.float() and no autocast, or "
                "nofm.unpack_(model)"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise LayerError(f"{self.name}: is packed, and has no gradient; use torch.inference_mode(), or nofm.unpack_(model) to train")
        if in_onnx_export() if torch.compiler.is_compiling() else torch._C._is_tracing():
            raise LayerError(f"{self.name}: is packed, which neither torch.jit.trace nor ONNX can write down; nofm.unpack_(model) first")
        if torch.compiler.is_compiling():
            result: Tensor = torch.ops.nofm.without_zeros(x, self._number)
            return result
        return self.compute(x.detach())

    def compute(self, x: Tensor) -> Tensor:
        """`forward`, of an input that has been looked at."""
        (layer,) = self._layer
        if isinstance(layer, nn.Linear):
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            if rows.shape[1] != layer.in_features or not len(rows):
                return self._dense(x)  # nothing to compute, or torch's own message
            return self._plan(rows, ())(rows).view(*x.shape[:-1], layer.out_features)
        batched = x if x.dim() == len(layer.kernel_size) + 2 else x.unsqueeze(0)
        if batched.dim() != len(layer.kernel_size) + 2 or batched.shape[1] != layer.in_channels or not batched.numel():
            return self._dense(x)
        images = (batched if isinstance(layer, nn.Conv2d) else batched.unsqueeze(2)).contiguous()
        y = self._plan(images, tuple(images.shape))(images)
        y = y if isinstance(layer, nn.Conv2d) else y.squeeze(2)
        return y if batched is x else y.squeeze(0)

    def _dense(self, x: Tensor) -> Tensor:
        (layer,) = self._layer
        forward = forward_by(type(layer))
        assert forward is not None, "looked at when it was packed"
        return forward(layer, self.weight, x)

    def _plan(self, x: Tensor, size: tuple[int, ...]) -> products.Plan:
        plan = self._plans.pop(size, None) or self._new_plan(x)
        self._plans[size] = plan  # the latest is last
        if len(self._plans) > _MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    def _new_plan(self, x: Tensor) -> products.Plan:
        weight, (layer,) = self.weight, self._layer
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise LayerError(
                f"{self.name}: is packed, for fp32 on the CPU, and was moved to {weight.dtype} on {weight.device}; move it back"
            )
        if reason := products.unavailable():
            raise LayerError(f"{self.name}: packed layers need a C compiler at first use: {reason}; nofm.unpack_(model) does without")
        if isinstance(layer, nn.Linear):
            return products.linear(weight, self.bias)
        stride, padding, dilation = layer.stride, _padding(layer), layer.dilation
        if isinstance(layer, nn.Conv1d):
            weight, stride, padding, dilation = weight.unsqueeze(2), (1, *stride), (0, *(padding or ())), (1, *dilation)
        images, _, height, width = x.shape
        options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": layer.groups}
        return products.convolution(weight, self.bias, size=(images, height, width), **options)

    # ---- what torch asks of a module ----

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLayer:
        self._plans.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}  # plans hold addresses

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._number = _numbered(self)  # a copy is another layer

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight  # first, as in the plain layer
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        meta: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        key = f"{prefix}weight"
        weight = state_dict.get(key)
        rest = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(rest, prefix, meta, strict, missing, unexpected, errors)
        self._plans.clear()  # the bias is in them
        if weight is None:
            missing.append(key)
        elif list(weight.shape) != self._line["shape"]:
            errors.append(f"{key}: shape {tuple(weight.shape)}, and the packed layer has {tuple(self._line['shape'])}")
        else:
            self._take(key, weight, errors)

    def _take(self, key: str, weight: Tensor, errors: list[str]) -> None:
        packed = pack_weight(key, weight.detach().to(self.values), None)
        if packed.values.numel() > 1.05 * self._most:  # some kept weights may have been zero by chance
            errors.append(
                f"{key}: {packed.values.numel():,} weights, and the packed layer keeps {self._most:,}; nofm.unpack_ the model first"
            )
        else:
            self.values, self.places, self._line = packed.values, packed.places, packed.line

    def extra_repr(self) -> str:
        (layer,) = self._layer
        return f"{layer.extra_repr()}, kept={self.values.numel() / math.prod(self._line['shape']):.1%}"


# ---- for the compiler ----


def _numbered(layer: PackedLayer) -> int:
    if not hasattr(torch.ops.nofm, "without_zeros"):
        torch.library.custom_op("nofm::without_zeros", _without_zeros, mutates_args=()).register_fake(_its_shape)
    number = next(_numbers)
    _known[number] = layer
    return number


def _without_zeros(x: Tensor, number: int) -> Tensor:
    return _known[number].compute(x)


def _its_shape(x: Tensor, number: int) -> Tensor:
    (layer,) = _known[number]._layer
    if isinstance(layer, nn.Linear):
        return x.new_empty((*x.shape[:-1], layer.out_features))
    places = len(layer.kernel_size)
    rows = zip(x.shape[-places:], layer.kernel_size, layer.stride, _padding(layer) or (), layer.dilation, strict=True)
    sizes = [(size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, pad, dilation in rows]
    return x.new_empty((*x.shape[: -places - 1], layer.out_channels, *sizes))
