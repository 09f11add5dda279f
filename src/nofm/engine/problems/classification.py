"""Images and their classes: small data on the device, or a folder laid out as ImageNet is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..complaints import Complaints, batch_divides, folder, number
from ..config import ConfigError, DataConfig, RunConfig
from ..resolve import near
from .base import CLASSES, Problem, known_classes

if TYPE_CHECKING:
    from torch import nn

    from ...analysis import Cost
    from ...data.arrays import Arrays
    from ...data.loader import Loader, Tests
    from ...tasks.base import Task
    from ..world import World

__all__ = ["MODEL_PREFIXES", "OWN_MODELS", "SMALL_MODELS", "Classification"]

RESNETS_OF_CIFAR = ("cifar/resnet20", "cifar/resnet32")
REGNETS_OF_CIFAR = tuple(f"cifar/regnetx_{size}" for size in ("002", "004", "006", "008", "016", "032"))
_ADJUSTABLE = ("cnn", *RESNETS_OF_CIFAR, "cifar/resnet18")  # in width, dropout and norm
SMALL_MODELS = (*_ADJUSTABLE, *REGNETS_OF_CIFAR)
OWN_MODELS = (*SMALL_MODELS, "resnet50x1.25")
MODEL_PREFIXES = ("torchvision/", "timm/")
_CLASSES = 10  # of the small data sets, all of them
_SHAPES = {"digits": (1, 8, 8), "fashion": (1, 28, 28), "cifar10": (3, 32, 32)}


class Classification(Problem):
    """Networks of nofm, torchvision and timm on images."""

    fields = (
        "task.label_smoothing",
        "model.width",
        "model.dropout",
        "model.norm",
        "model.batch_parts",
        "model.pretrained",
        "data.size",
        "data.crop",
        "data.flip",
        "data.held_out",
        "data.loader",
        "data.corrupt",
    )
    test_fields = ("data.name", "data.root", "data.size", "data.corrupt", "data.held_out")
    data = ("digits", "fashion", "cifar10", "folder")

    # ---- settings ----

    def check(self, c: RunConfig) -> Complaints:
        yield from number("task.label_smoothing", c.task.label_smoothing, 0, 1)
        yield from self._check_model(c)
        yield from self._check_data(c)
        yield from batch_divides(c)

    def _check_model(self, c: RunConfig) -> Complaints:
        m = c.model
        own = m.name in OWN_MODELS
        if not own and not (m.name.startswith(MODEL_PREFIXES) and m.name.partition("/")[2]):
            yield "model.name", f"must be {', '.join(OWN_MODELS)}, torchvision/NAME or timm/NAME{near(m.name, OWN_MODELS)}"
        yield from number("model.width", m.width, 1)
        yield from number("model.dropout", m.dropout, 0, 1)
        if m.norm not in ("batch", "group", None):
            yield "model.norm", "must be batch or group for classification"
        if m.norm == "group" and m.width is not None and m.width % 4:
            yield "model.width", "must be divisible by 4 with model.norm group, which has groups of channels"
        if m.name not in _ADJUSTABLE:
            for name in ("width", "dropout", "norm"):
                if getattr(m, name) is not None:
                    yield f"model.{name}", f"has no effect on {m.name}; it belongs to {', '.join(_ADJUSTABLE)}"
        yield from number("model.batch_parts", m.batch_parts, 1)
        if m.batch_parts is not None and m.name not in RESNETS_OF_CIFAR:
            yield "model.batch_parts", f"has no effect on {m.name}; it belongs to {', '.join(RESNETS_OF_CIFAR)}"
        if m.batch_parts is not None and m.norm == "group":
            yield "model.batch_parts", "would mix images under model.norm group, which looks at one at a time; leave it out, or use batch"
        if own and m.pretrained:
            yield (
                "model.pretrained",
                f"has no effect on {m.name}, which has no published weights; it belongs to torchvision/ and timm/ models",
            )

    def _check_data(self, c: RunConfig, parts: tuple[str, ...] = ("train", "val")) -> Complaints:
        d = c.data
        if d.name != "digits":
            yield from folder(c)
        elif d.root is not None:
            yield "data.root", "has no effect on digits, which come with scikit-learn"
        if d.name == "folder":
            if d.loader == "resident":
                yield "data.loader", "must be workers for a folder of images, which does not fit on a device"
            if d.held_out is not None:
                yield "data.held_out", "has no effect on a folder of images, which is measured on those in val/; put others there"
            if d.crop:
                yield "data.crop", "has no effect on a folder of images, which is cut at random anyway; allowed: 0"
            if d.root is not None and Path(d.root).is_dir():
                for part in parts:
                    there = Path(d.root, part)
                    if not there.is_dir() or not any(p.is_dir() for p in there.iterdir()):
                        yield "data.root", f"needs {part}/CLASS/ folders with images in it, as ImageNet is laid out"
        else:
            if d.size is not None:
                yield "data.size", f"has no effect on {d.name}, whose images have one size"
            if d.corrupt == "skip":
                yield "data.corrupt", f"has no effect on {d.name}: only a folder of images can skip one; allowed: error"
        yield from number("data.size", d.size, 8)
        yield from number("data.crop", d.crop, 0, 16, open_high=False)
        yield from number("data.held_out", d.held_out, 1)

    # ---- network ----

    def draft(self, c: RunConfig) -> nn.Module:
        m, classes = c.model, _classes(c)
        if m.pretrained and m.name.startswith("torchvision/") and classes != 1000:
            raise ConfigError(
                f"model.pretrained = true: torchvision's weights are for 1000 classes, these data have {classes}; use a timm/ model"
            )
        model = _model(c, classes, pretrained=False)
        if m.name not in OWN_MODELS:  # of which it is known; without memory a forward makes torch import its compiler
            _try_forward(m.name, model, _shape(c), classes)
        return model

    def task(self, c: RunConfig, loader: Any, *, blank: bool = False) -> Task:
        from ...tasks.classification import Classification as ClassificationTask

        model = _model(c, len(loader.names) or _CLASSES, pretrained=c.model.pretrained and not blank)
        return ClassificationTask(model, c.task.label_smoothing)

    def cost(self, c: RunConfig, task: Task) -> Cost | None:
        from ...analysis import cost

        return cost(task.model, (1, *_shape(c)))

    # ---- data ----

    def loader(self, c: RunConfig, world: World) -> Loader:
        from ...data.loader import ResidentLoader
        from ...data.order import Order, Share

        d, e = c.data, c.engine
        share = Share(world.rank, world.size, e.accumulate)
        if d.loader == "resident":
            arrays = _arrays(d)
            order = Order(len(arrays.train_labels), e.batch_size, c.seed)
            return ResidentLoader(arrays, order, share, world.device, d.crop, d.flip)

        from ...data.workers import ArrayImages, FolderImages, WorkerLoader

        images: ArrayImages | FolderImages
        if d.name == "folder":
            images = FolderImages(d.root or "", d.size or 224, d.flip)
        else:
            images = ArrayImages(_arrays(d), d.crop, d.flip)
        order = Order(images.train_size, e.batch_size, c.seed)
        return WorkerLoader(images, order, share, e.workers, world.device.type == "cuda", d.corrupt == "skip")

    def companions(self, loader: Any) -> dict[str, bytes]:
        return {CLASSES: json.dumps(loader.names, indent=1).encode()} if loader.names else {}

    # ---- measuring a finished network ----

    def for_tests(self, own: RunConfig, c: RunConfig) -> RunConfig:
        """A network for CIFAR-10 can look at a folder of images, too; else networks keep to the data that their layers fit. Of its training
        images it is measured on those that were held out, or on none."""
        given, was = c.data.name, own.data.name
        if given != was and (was, given) != ("cifar10", "folder"):
            also = ", or folder, a ROOT/val/CLASS/ of images" if was == "cifar10" else ""
            raise ConfigError(f"data.name = {given}: this network was trained on {was}, and can be measured on {was}{also}")
        kept, asked = own.data.held_out, c.data.held_out
        if given == was and asked not in (None, kept):
            allowed = "none, the test images" if kept is None else f"{kept}, which were held out, or none, the test images"
            raise ConfigError(f"data.held_out = {asked}: among these are images that the network was trained on; allowed: {allowed}")
        if given == was:
            return c
        if c.data.size is not None:
            raise ConfigError(f"data.size = {c.data.size}: has no effect on a network for {was}, which sees images at the size of its own")
        left = None if asked == kept else asked  # of the run's own data, where the folder was all that was asked for
        return dataclasses.replace(c, data=dataclasses.replace(c.data, loader="workers", crop=0, held_out=left))

    def check_tests(self, c: RunConfig) -> Complaints:
        yield from self._check_data(c, ("val",))

    def tests(self, own: RunConfig, c: RunConfig, world: World, run: Path) -> Tests:
        from ...data.arrays import CIFAR_CLASSES, CIFAR_MEAN, CIFAR_STD
        from ...data.loader import ResidentLoader
        from ...data.order import Order, Share

        d, e = c.data, c.engine
        if d.loader == "resident":
            arrays = _arrays(d)
            return ResidentLoader(arrays, Order(len(arrays.train_labels), 1, c.seed), Share(), world.device)

        from ...data.workers import ArrayImages, FolderTests, WorkerTests, as_arrays, centre

        images: ArrayImages | FolderTests
        if d.name == "folder" and own.data.name == "cifar10":
            images = FolderTests(d.root or "", CIFAR_CLASSES, as_arrays(_SHAPES["cifar10"][1], CIFAR_MEAN, CIFAR_STD))
        elif d.name == "folder":
            images = FolderTests(d.root or "", known_classes(run) or _trained_on(c, run), centre(d.size or 224))
        else:
            images = ArrayImages(_arrays(d), 0, False)
        return WorkerTests(images, e.batch_size, e.workers, world.device.type == "cuda", d.corrupt == "skip")


def _arrays(d: DataConfig) -> Arrays:
    from ...data.arrays import read_arrays

    arrays = read_arrays(d.name, d.root)
    return arrays if d.held_out is None else arrays.holding_out(d.held_out)


def _trained_on(c: RunConfig, run: Path) -> list[str]:
    """The classes of a run that has not written them down: those of the training images beside the ones to be measured."""
    there = Path(c.data.root or "", "train")
    if not there.is_dir():
        raise ConfigError(
            f"{run / CLASSES}: is missing, which names the network's classes, and there is no {there} to take them from; write the "
            "names of the classes that it was trained on into it, a JSON list in the order of their names"
        )
    return sorted(entry.name for entry in there.iterdir() if entry.is_dir())


def blank_network(c: RunConfig, run: Path) -> tuple[nn.Module, tuple[int, int, int]]:
    """The network of the run in this folder, which was trained by `c`, before its weights are loaded, and the sizes of an image."""
    classes = _CLASSES if c.data.name != "folder" else len(known_classes(run) or _trained_on(c, run))
    return _model(c, classes, pretrained=False), _shape(c)


def _shape(c: RunConfig) -> tuple[int, int, int]:
    """Channels, height and width of the images."""
    size = c.data.size or 224
    return _SHAPES.get(c.data.name, (3, size, size))


def _classes(c: RunConfig) -> int:
    if c.data.name != "folder":
        return _CLASSES
    return sum(entry.is_dir() for entry in Path(c.data.root or "", "train").iterdir())


def _model(c: RunConfig, classes: int, *, pretrained: bool) -> nn.Module:
    from ...tasks.models import build_model

    m = c.model
    options = {"width": m.width, "dropout": m.dropout, "norm": m.norm, "batch_parts": m.batch_parts}
    return build_model(m.name, classes, _shape(c)[0], pretrained=pretrained, **options)


def _try_forward(name: str, model: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Raise unless the network takes the images and gives one score for each class."""
    import torch

    try:
        with torch.no_grad():  # in training mode, in which some networks give more than scores
            out = model(torch.empty(2, *shape))
    except (RuntimeError, ValueError, AssertionError) as error:
        size = "x".join(map(str, shape))
        raise ConfigError(f"model.name = {name}: does not take images of {size}: {str(error).splitlines()[0]}") from None
    if tuple(getattr(out, "shape", ())) != (2, classes):
        raise ConfigError(f"model.name = {name}: does not give one score for each of {classes} classes; classification needs such a model")
