"""Where every pixel of a frame goes: RAFT on the field's data sets from files, or on flying stamps from memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.errors import DataError
from ...data.flow_layouts import LAYOUTS, find_pairs
from ..complaints import Complaints, batch_divides, folder, number
from ..config import RunConfig
from ..resolve import near
from .base import Problem

if TYPE_CHECKING:
    from torch import nn

    from ...analysis import Cost
    from ...data.loader import Loader
    from ...tasks.base import Task
    from ..world import World

__all__ = ["RAFTS", "Flow"]

RAFTS = ("raft_large", "raft_small", "raft_tiny")
_PACKS = ("train.npz", "val.npz")


class Flow(Problem):
    """Training sees crops, tests whole frames."""

    fields = (
        "task.updates",
        "task.test_updates",
        "task.gamma",
        "task.max_flow",
        "model.pretrained",
        "data.crop_size",
        "data.loader",
        "data.corrupt",
    )
    data = (*LAYOUTS, "stamps")
    packages, extra = ("torchvision",), "vision"
    unit = items = "pairs"

    # ---- settings ----

    def check(self, c: RunConfig) -> Complaints:
        t, m, d = c.task, c.model, c.data
        for name in ("updates", "test_updates"):
            yield from number(f"task.{name}", getattr(t, name), 1, 64, open_high=False)
        yield from number("task.gamma", t.gamma, 0, 1, open_low=True, open_high=False)
        yield from number("task.max_flow", t.max_flow, 0, open_low=True)
        if m.name not in RAFTS:
            yield "model.name", f"must be {', '.join(RAFTS[:-1])} or {RAFTS[-1]} for flow{near(m.name, RAFTS)}"
        if m.name == "raft_tiny" and m.pretrained:
            yield "model.pretrained", "has no effect on raft_tiny, which has no published weights; it belongs to raft_large and raft_small"
        if d.crop_size is not None and any(side % 8 or side < 128 for side in d.crop_size):
            yield "data.crop_size", "must be a height and a width, both divisible by 8 and at least 128, for RAFT"
        if d.name == "stamps":
            if d.loader == "workers":
                yield "data.loader", "must be resident for stamps, which are kept on the device"
            if d.corrupt == "skip":
                yield "data.corrupt", "has no effect on stamps, which are one file; allowed: error"
        elif d.loader == "resident":
            yield "data.loader", f"must be workers for {d.name}, whose pairs are read from files"
        yield from batch_divides(c)
        yield from self._check_files(c)

    def _check_files(self, c: RunConfig) -> Complaints:
        missing = list(folder(c))
        yield from missing
        if missing or c.data.root is None:
            return
        root = Path(c.data.root)
        if c.data.name == "stamps":
            for pack in _PACKS:
                if not (root / pack).is_file():
                    yield "data.root", f"has no {pack}; examples/make_stamps.py makes one"
            return
        try:
            for part in ("train", "val"):
                find_pairs(c.data.name, root, part)
        except DataError as error:
            yield "data.root", str(error)

    # ---- network ----

    def draft(self, c: RunConfig) -> nn.Module:
        from ...tasks.flow import build_flow_model

        return build_flow_model(c.model.name)

    def task(self, c: RunConfig, loader: Any) -> Task:
        from ...tasks.flow import OpticalFlow, build_flow_model

        t = c.task
        given = {name: value for name in ("updates", "test_updates", "gamma", "max_flow") if (value := getattr(t, name)) is not None}
        return OpticalFlow(build_flow_model(c.model.name, pretrained=c.model.pretrained), **given)

    def cost(self, c: RunConfig, task: Task) -> Cost | None:
        from ...analysis import cost

        return cost(task.model, [(1, 3, *_crop(c))] * 2)

    # ---- data ----

    def loader(self, c: RunConfig, world: World) -> Loader:
        from ...data.flow import FlowFiles, ResidentFlow
        from ...data.flow_augment import Augmentation
        from ...data.order import Order, Share
        from ...data.stamp_sets import shared_pack

        d, e, root = c.data, c.engine, Path(c.data.root or "")
        share = Share(world.rank, world.size, e.accumulate)
        if d.loader == "resident":
            train, test = (shared_pack(root / pack, world.device) for pack in _PACKS)
            return ResidentFlow(train, test, Order(len(train), e.batch_size, c.seed), share, world.device, _crop(c))
        pairs, held_out = find_pairs(d.name, root, "train"), find_pairs(d.name, root, "val")
        order, pin = Order(len(pairs), e.batch_size, c.seed), world.device.type == "cuda"
        return FlowFiles(pairs, held_out, order, share, Augmentation(size=_crop(c)), e.workers, pin, d.corrupt == "skip")


def _crop(c: RunConfig) -> tuple[int, int]:
    return c.data.crop_size or (368, 496)
