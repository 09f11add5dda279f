"""Where every pixel of a frame goes: RAFT on the field's data sets from files, or on flying stamps from memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...data.errors import DataError
from ...data.flow_layouts import LAYOUTS, Part, find_pairs
from ..complaints import Complaints, batch_divides, folder, number
from ..config import RunConfig
from ..resolve import near
from .base import Problem

if TYPE_CHECKING:
    from torch import nn

    from ...analysis import Cost
    from ...data.loader import Loader, Tests
    from ...tasks.base import Task
    from ..world import World

__all__ = ["RAFTS", "Flow"]

RAFTS = ("raft_large", "raft_small", "raft_tiny")


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
        "data.test",
    )
    test_fields = ("data.name", "data.root", "data.test", "data.corrupt", "task.test_updates")
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
        if d.test not in ("val", None):
            yield "data.test", "must be val for training, the part that is not trained on; all is for nofm evaluate"
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
        yield from self._check_files(c, ("train", _part(c)))

    def _check_files(self, c: RunConfig, parts: tuple[Part, ...]) -> Complaints:
        missing = list(folder(c))
        yield from missing
        if missing or c.data.root is None:
            return
        root = Path(c.data.root)
        if c.data.name == "stamps":
            for part in parts:
                if not (root / f"{part}.npz").is_file():
                    yield "data.root", f"has no {part}.npz; examples/make_stamps.py makes one"
            return
        try:
            for part in parts:
                find_pairs(c.data.name, root, part)
        except DataError as error:
            yield "data.root", str(error)

    # ---- network ----

    def draft(self, c: RunConfig) -> nn.Module:
        from ...tasks.flow import build_flow_model

        return build_flow_model(c.model.name)

    def task(self, c: RunConfig, loader: Any, *, blank: bool = False) -> Task:
        from ...tasks.flow import OpticalFlow, build_flow_model

        t = c.task
        given = {name: value for name in ("updates", "test_updates", "gamma", "max_flow") if (value := getattr(t, name)) is not None}
        return OpticalFlow(build_flow_model(c.model.name, pretrained=c.model.pretrained and not blank), **given)

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
            train, test = (shared_pack(root / f"{part}.npz", world.device) for part in ("train", _part(c)))
            return ResidentFlow(train, test, Order(len(train), e.batch_size, c.seed), share, world.device, _crop(c))
        pairs, held_out = find_pairs(d.name, root, "train"), find_pairs(d.name, root, _part(c))
        order, pin = Order(len(pairs), e.batch_size, c.seed), world.device.type == "cuda"
        return FlowFiles(pairs, held_out, order, share, Augmentation(size=_crop(c)), e.workers, pin, d.corrupt == "skip")

    # ---- measuring a finished network ----

    def for_tests(self, own: RunConfig, c: RunConfig) -> RunConfig:
        """Of data that it was not trained on all pairs are measured, of its own those that were held out."""
        d = c.data
        loader: Literal["resident", "workers"] = "resident" if d.name == "stamps" else "workers"
        elsewhere = d.name != own.data.name and d.name != "stamps"
        test = d.test or ("all" if elsewhere else None)
        return dataclasses.replace(c, data=dataclasses.replace(d, loader=loader, test=test))

    def check_tests(self, c: RunConfig) -> Complaints:
        yield from number("task.test_updates", c.task.test_updates, 1, 64, open_high=False)
        if c.data.test not in ("val", "all", None) or (c.data.name == "stamps" and c.data.test == "all"):
            yield "data.test", "must be val for stamps" if c.data.name == "stamps" else "must be val, what is usually held out, or all"
        elif c.data.name == "stamps" and c.data.corrupt == "skip":
            yield "data.corrupt", "has no effect on stamps, which are one file; allowed: error"
        else:
            yield from self._check_files(c, (_part(c),))

    def tests(self, own: RunConfig, c: RunConfig, world: World, run: Path) -> Tests:
        from ...data.flow import FlowFileTests, ResidentFlowTests
        from ...data.order import Share
        from ...data.stamp_sets import shared_pack

        d, root = c.data, Path(c.data.root or "")
        if d.loader == "resident":
            return ResidentFlowTests(shared_pack(root / f"{_part(c)}.npz", world.device), Share(), world.device)
        pin = world.device.type == "cuda"
        return FlowFileTests(find_pairs(d.name, root, _part(c)), c.engine.workers, pin, d.corrupt == "skip")


def _part(c: RunConfig) -> Part:
    return "all" if c.data.test == "all" else "val"


def _crop(c: RunConfig) -> tuple[int, int]:
    return c.data.crop_size or (368, 496)
