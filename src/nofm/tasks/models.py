"""Networks by name. torchvision's and timm's are theirs; here are only the small ones that neither has.

cnn               three convolutions for digits and clothes
cifar/resnet20    He et al. 2016, section 4.2: three stages of widths 16, 32, 64, option A shortcuts (no weights)
cifar/resnet32
cifar/resnet18    torchvision's ResNet-18 with a 3x3 stem of stride 1 and no pooling after it, for 32x32 images
cifar/regnetx_002 timm's RegNetX, and 004 to 032, with stem and first stage of stride 1: they halve a 32x32 image three times, not five
resnet50x1.25     timm's ResNet-50 with stages of 80 to 640 channels instead of 64 to 512, the wide one of the paper's Table 1
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import NofmError
from .narrow import NarrowConv2d, one_by_one, side_by_side

__all__ = ["MODELS", "REGNETS", "build_model"]

Norm = Callable[[int], nn.Module]


def build_model(name: str, classes: int, channels: int, *, pretrained: bool = False, **options: Any) -> nn.Module:
    """A network for images of `channels` channels and `classes` classes."""
    if name in MODELS:
        given = {key: value for key, value in options.items() if value is not None}
        return MODELS[name](classes, channels, **given)
    home, _, model = name.partition("/")
    _check_installed(home, name)
    if home == "torchvision":
        from torchvision import models

        if model not in (known := models.list_models(module=models)):
            raise NofmError(_unknown("torchvision", model, known))
        weights = "DEFAULT" if pretrained else None
        network: nn.Module = models.get_model(model, weights=weights, **({} if pretrained else {"num_classes": classes}))
        return network
    import timm

    if not timm.is_model(model):
        raise NofmError(_unknown("timm", model, timm.list_models()))
    made: nn.Module = timm.create_model(model, pretrained=pretrained, num_classes=classes, in_chans=channels)
    return made


def _check_installed(package: str, name: str) -> None:
    if find_spec(package) is None:
        raise NofmError(f"{name} needs the package {package}, which is not installed: pip install 'nofm[vision]' (in a clone '.[vision]')")


def _unknown(home: str, model: str, known: list[str]) -> str:
    close = difflib.get_close_matches(model, known, n=3, cutoff=0.75)
    hint = f"; did you mean {' or '.join(repr(f'{home}/{name}') for name in close)}?" if close else ""
    return f"model.name = {home}/{model}: {home} has no such model; it has {len(known)} others{hint}"


def _norm(kind: str) -> Norm:
    return nn.BatchNorm2d if kind == "batch" else lambda channels: nn.GroupNorm(4, channels)


def cnn(classes: int, channels: int, width: int = 16, dropout: float = 0.0, norm: str = "batch") -> nn.Module:
    """Three 3x3 convolutions and a classifier."""
    make, parts = _norm(norm), dict[str, nn.Module]()
    sizes = ((channels, width, 1), (width, width, 2), (width, 2 * width, 2))
    for i, (c_in, c_out, stride) in enumerate(sizes, start=1):
        parts |= {f"conv{i}": nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), f"norm{i}": make(c_out), f"relu{i}": nn.ReLU()}
    parts |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "dropout": nn.Dropout(dropout), "fc": nn.Linear(2 * width, classes)}
    return nn.Sequential(OrderedDict(parts))


class _Block(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int, norm: Norm, conv: type[nn.Conv2d] = nn.Conv2d) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(c_in, c_out, 3, stride, 1, bias=False), norm(c_out)
        self.conv2, self.norm2 = conv(c_out, c_out, 3, 1, 1, bias=False), norm(c_out)
        self.stride, self.grow = stride, c_out - c_in

    def forward(self, x: Tensor, *parts: int) -> Tensor:  # of the batch, side by side; none for plain convolutions
        y = F.relu(self.norm1(self.conv1(x, *parts)))
        y = self.norm2(self.conv2(y, *parts))
        if self.grow:  # option A: every second pixel, and zeros for the new channels
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.grow // 2, self.grow - self.grow // 2))
        return F.relu(x + y)


class CifarResNet(nn.Module):
    """ResNet of 6n+2 layers for 32x32 images. `batch_parts` pieces of a batch go through its narrow first stage side by side."""

    def __init__(
        self, n: int, classes: int, channels: int, width: int = 16, dropout: float = 0.0, norm: str = "batch", batch_parts: int = 1
    ) -> None:
        super().__init__()
        make, self.batch_parts = _norm(norm), batch_parts
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False), make(width)
        narrow = NarrowConv2d if batch_parts > 1 else nn.Conv2d
        self.layer1 = nn.Sequential(*(_Block(width, width, 1, make, narrow) for _ in range(n)))
        self.layer2 = nn.Sequential(*(_Block((2 if i else 1) * width, 2 * width, 1 if i else 2, make) for i in range(n)))
        self.layer3 = nn.Sequential(*(_Block((4 if i else 2) * width, 4 * width, 1 if i else 2, make) for i in range(n)))
        self.dropout, self.fc = nn.Dropout(dropout), nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = self.layer1(x) if self.batch_parts == 1 or len(x) % self.batch_parts else self._layer1_in_parts(x)
        x = self.layer3(self.layer2(x))
        result: Tensor = self.fc(self.dropout(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)))
        return result

    def _layer1_in_parts(self, x: Tensor) -> Tensor:
        x = side_by_side(x, self.batch_parts)
        for block in self.layer1:
            x = block(x, self.batch_parts)
        return one_by_one(x, self.batch_parts)


def _cifar_resnet18(classes: int, channels: int, width: int = 64, dropout: float = 0.0, norm: str = "batch") -> nn.Module:
    from torchvision.models import ResNet
    from torchvision.models.resnet import BasicBlock

    # torchvision's first width is 64, and BasicBlock refuses to be scaled by its own option.
    if width != 64:
        raise NofmError(f"model.width = {width}: cifar/resnet18 has width 64; cifar/resnet20 and cifar/resnet32 take any")
    model = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=classes, norm_layer=_norm(norm))
    model.conv1 = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    model.fc = nn.Sequential(nn.Dropout(dropout), model.fc) if dropout else model.fc
    return model


REGNETS = ("002", "004", "006", "008", "016", "032")  # of the paper


def _cifar_regnet(size: str, classes: int, channels: int) -> nn.Module:
    _check_installed("timm", f"cifar/regnetx_{size}")
    import timm

    model: Any = timm.create_model(f"regnetx_{size}", num_classes=classes, in_chans=channels)
    for halving in (model.stem.conv, model.s1.b1.conv2.conv, model.s1.b1.downsample.conv):
        halving.stride = (1, 1)
    network: nn.Module = model
    return network


def _wide_resnet50(classes: int, channels: int) -> nn.Module:
    _check_installed("timm", "resnet50x1.25")
    import timm

    model: nn.Module = timm.create_model("resnet50", channels=(80, 160, 320, 640), num_classes=classes, in_chans=channels)
    return model


MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn": cnn,
    "cifar/resnet20": lambda classes, channels, **options: CifarResNet(3, classes, channels, **options),
    "cifar/resnet32": lambda classes, channels, **options: CifarResNet(5, classes, channels, **options),
    "cifar/resnet18": _cifar_resnet18,
    **{f"cifar/regnetx_{size}": partial(_cifar_regnet, size) for size in REGNETS},
    "resnet50x1.25": _wide_resnet50,
}
