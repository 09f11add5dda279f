"""Which weights each kind of layer has, and along which axis its inputs run: N:M groups are laid along the inputs. And which kinds do
nothing in their forward but multiply by their weight, so that it can be run with any weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .errors import LayerError

__all__ = ["Forward", "KnownWeight", "forward_by", "known_weights", "register_layer"]


@dataclass(frozen=True, slots=True)
class KnownWeight:
    """A weight that N:M groups can be laid on: `param` of a module, inputs along `axis`, `fan` of them for one output."""

    param: str
    axis: int
    fan: int


_Describe = Callable[[Any], list[KnownWeight]]
_KINDS: dict[type[nn.Module], _Describe] = {}


def register_layer(kind: type[nn.Module], **axes: int) -> None:
    """Teach nofm a layer of your own: `register_layer(MyLinear, weight=1)` says that the inputs of `weight` run along axis 1."""
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise LayerError(f"register_layer takes a class of modules, got {kind!r}")
    if not axes:
        raise LayerError(f"register_layer({kind.__name__}): name at least one parameter and its input axis, such as weight=1")
    _KINDS[kind] = lambda module: [_registered(kind, module, param, axis) for param, axis in axes.items()]


def _registered(kind: type[nn.Module], module: nn.Module, param: str, axis: int) -> KnownWeight:
    weight = getattr(module, param, None)
    if not isinstance(weight, Tensor) or not -weight.dim() <= axis < weight.dim():
        raise LayerError(f"register_layer({kind.__name__}, {param}={axis}) does not fit: {param!r} there is {_describe(weight)}")
    return KnownWeight(param, axis % weight.dim(), weight.shape[axis])


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "no tensor"


def known_weights(module: nn.Module) -> list[KnownWeight]:
    """The weights of `module` itself (not of its children) that can be sparse; empty for a kind that is not known."""
    for kind in type(module).__mro__:
        if kind in _KINDS:
            return _KINDS[kind](module)
        if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):  # a linear layer stored (in, out)
            return [_registered(kind, module, "weight", 0)]
    return []


def _conv(module: nn.modules.conv._ConvNd) -> list[KnownWeight]:
    return [KnownWeight("weight", 0 if module.transposed else 1, module.in_channels // module.groups)]


def _attention(module: nn.MultiheadAttention) -> list[KnownWeight]:
    names = ["in_proj_weight"] if module._qkv_same_embed_dim else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    return [KnownWeight(name, 1, getattr(module, name).shape[1]) for name in names]


def _recurrent(module: nn.Module) -> list[KnownWeight]:
    names = module._flat_weights_names if isinstance(module, nn.RNNBase) else ["weight_ih", "weight_hh"]
    return [KnownWeight(name, 1, getattr(module, name).shape[1]) for name in names if name.startswith("weight_")]


register_layer(nn.Linear, weight=1)
register_layer(nn.Embedding, weight=1)
register_layer(nn.EmbeddingBag, weight=1)
_KINDS[nn.modules.conv._ConvNd] = _conv
_KINDS[nn.MultiheadAttention] = _attention
_KINDS[nn.RNNBase] = _recurrent
_KINDS[nn.RNNCellBase] = _recurrent


# ---- forwards that can be run with any weight ----

Forward = Callable[..., Tensor]  # of a layer, the weight to compute with, and the input


def _linear(layer: Any, weight: Tensor, input: Tensor) -> Tensor:
    return F.linear(input, weight, layer.bias)


def _convolution(layer: Any, weight: Tensor, input: Tensor) -> Tensor:
    return layer._conv_forward(input, weight, layer.bias)


# As torch has them: where somebody puts another forward in their place, for all layers of a class, it is that one which must run.
_LINEAR = nn.Linear.forward
_CONVOLUTIONS = [(kind.forward, kind._conv_forward) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)]


def forward_by(cls: type[Any]) -> Forward | None:
    """The forward of `cls` with its weight as an argument, or None where it is not that of a plain linear layer or convolution."""
    if cls.forward is _LINEAR:
        return _linear
    is_plain = any(cls.forward is forward and cls._conv_forward is inner for forward, inner in _CONVOLUTIONS)
    return _convolution if is_plain else None
