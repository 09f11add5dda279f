"""Batches for optical flow, from one of two loaders with the protocol of `loader.Loader`.

`ResidentFlow` keeps pairs of one size on the device, frames as bytes and flow in 1/64 pixel as int16, and cuts and mirrors there.
`FlowFiles` reads the real data sets pair by pair in loader processes. A batch is {"image1", "image2"}: (B, 3, H, W) from -1 to 1,
{"flow"}: (B, 2, H, W) in pixels, {"valid"}: (B, H, W), whether the flow is known there. Training batches are crops whose sides
divide by 8, as RAFT needs; tests are whole frames, which the task pads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .errors import DataError
from .flow_augment import Augmentation, Example, augment
from .flow_files import KITTI_UNIT, read_flow, read_frame
from .flow_layouts import Pair
from .loader import Batch
from .order import Order, Share, mix
from .processes import TEST, ProcessLoader, ProcessTests, first_readable

__all__ = ["FlowArrays", "FlowFileTests", "FlowFiles", "ResidentFlow", "ResidentFlowTests", "read_example"]

_SMALLEST = 128  # pixels of a side: RAFT's correlation pyramid halves 1/8 of it three times
_TEST_BATCH = 8  # pairs


def _check_crop(crop: tuple[int, int]) -> None:
    if any(side % 8 or side < _SMALLEST for side in crop):
        raise DataError(f"data.crop_size = {crop[0]} {crop[1]}: sides must be divisible by 8 and at least {_SMALLEST}, for RAFT")


def _normalised(frames: Tensor) -> Tensor:
    return frames.float() / 127.5 - 1


# ---- on the device ----


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class FlowArrays:
    """Pairs of one size: frames (N, 3, H, W) of bytes, flow (N, 2, H, W) in 1/64 pixel as int16, where it is known (None: all over)."""

    frames1: Tensor
    frames2: Tensor
    flow: Tensor
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        n, _, height, width = self.frames1.shape
        shapes = {"frames2": (n, 3, height, width), "flow": (n, 2, height, width), "valid": (n, height, width)}
        for name, shape in shapes.items():
            found = getattr(self, name)
            if found is not None and tuple(found.shape) != shape:
                raise DataError(f"{name} of {tuple(found.shape)} do not fit frames of {tuple(self.frames1.shape)}; expected {shape}")

    def __len__(self) -> int:
        return len(self.frames1)

    def __getitem__(self, chosen: Any) -> FlowArrays:
        valid = None if self.valid is None else self.valid[chosen]
        return FlowArrays(self.frames1[chosen], self.frames2[chosen], self.flow[chosen], valid)

    def to(self, device: torch.device) -> FlowArrays:
        if self.flow.device == device:
            return self
        valid = None if self.valid is None else self.valid.to(device)
        return FlowArrays(self.frames1.to(device), self.frames2.to(device), self.flow.to(device), valid)

    def batch(self) -> Batch:
        """All of it as one batch."""
        known = torch.ones(len(self), *self.flow.shape[-2:], dtype=torch.bool, device=self.flow.device)
        return {
            "image1": _normalised(self.frames1),
            "image2": _normalised(self.frames2),
            "flow": self.flow.float() / KITTI_UNIT,
            "valid": known if self.valid is None else self.valid,
        }


class ResidentFlowTests:
    """Pairs to be measured, on the device."""

    skipped = 0

    def __init__(self, test: FlowArrays, share: Share, device: torch.device) -> None:
        self._whole_test = test  # what others may share with this loader (`shared_pack`) lives as long as it does
        self._test = test[share.rank :: share.world].to(device)

    def test(self) -> Iterator[Batch]:
        for first in range(0, len(self._test), _TEST_BATCH):
            yield self._test[first : first + _TEST_BATCH].batch()

    def close(self) -> None:
        pass


class ResidentFlow(ResidentFlowTests):
    """All pairs on the device. What a step sees is a function of the seed and the step."""

    def __init__(
        self,
        train: FlowArrays,
        test: FlowArrays,
        order: Order,
        share: Share,
        device: torch.device,
        crop: tuple[int, int],
    ) -> None:
        _check_crop(crop)
        height, width = train.flow.shape[-2:]
        if crop[0] > height or crop[1] > width:
            raise DataError(f"data.crop_size = {crop[0]} {crop[1]}: is larger than the frames of {height}x{width} pixels")
        super().__init__(test, share, device)
        self.order, self.share, self.crop = order, share, crop
        self._whole_train = train  # as of the test pairs
        self._train, self._device = train.to(device), device

    def keys(self, start: int) -> Iterator[Batch]:
        per_epoch, batch = self.order.steps_per_epoch, self.order.batch
        step, drawn_for = start, -1
        while True:
            epoch, position = divmod(step, per_epoch)
            if epoch != drawn_for:
                key_E5, drawn_for = self._draws(epoch).to(self._device), epoch
            for part in self.share.micro_batches(key_E5[position * batch : (position + 1) * batch]):
                yield {"key": part}
            step += 1

    def _draws(self, epoch: int) -> Tensor:
        """For each pair of an epoch: its index, its crop's first row and column, whether to mirror it, whether to turn it upside down."""
        order = self.order.epoch_indices(epoch)
        generator = torch.Generator().manual_seed(mix(self.order.seed, epoch, 1))  # of the CPU, so that all devices see the same
        height, width = self._train.flow.shape[-2:]
        limits = (height - self.crop[0] + 1, width - self.crop[1] + 1, 2, 2)
        return torch.stack([order, *(torch.randint(limit, (len(order),), generator=generator) for limit in limits)], dim=1)

    def make(self, key: Batch) -> Batch:
        return _cut(self._train, key["key"], self.crop).batch()


def _cut(arrays: FlowArrays, key_B5: Tensor, crop: tuple[int, int]) -> FlowArrays:
    """The pairs of a key, each cut and turned as it says."""
    index, top, left, mirror, turn = key_B5.T[:, :, None]
    row_H, column_W = torch.arange(crop[0], device=index.device), torch.arange(crop[1], device=index.device)
    row_BH = torch.where(turn == 1, crop[0] - 1 - row_H, row_H) + top
    column_BW = torch.where(mirror == 1, crop[1] - 1 - column_W, column_W) + left
    b, y, x = index[:, :, None], row_BH[:, :, None], column_BW[:, None, :]

    def cut(stack: Tensor) -> Tensor:
        found = stack.movedim(1, -1)[b, y, x] if stack.dim() == 4 else stack[b, y, x]
        return found.movedim(-1, 1).contiguous() if stack.dim() == 4 else found

    signs_B2 = 1 - 2 * torch.stack([mirror, turn], dim=1)[..., 0].to(arrays.flow.dtype)
    valid = None if arrays.valid is None else cut(arrays.valid)
    return FlowArrays(cut(arrays.frames1), cut(arrays.frames2), cut(arrays.flow) * signs_B2[:, :, None, None], valid)


# ---- from files ----


def read_example(pair: Pair) -> Example:
    """A pair with its flow, as tensors; sizes must agree."""
    frames = [torch.from_numpy(read_frame(path)).permute(2, 0, 1) for path in (pair.frame1, pair.frame2)]
    flow, valid = read_flow(pair.flow)
    for path, shape in ((pair.frame2, frames[1].shape[1:]), (pair.flow, valid.shape)):
        if tuple(shape) != tuple(frames[0].shape[1:]):
            expected = "x".join(map(str, frames[0].shape[1:]))
            raise DataError(f"{path}: is {shape[0]}x{shape[1]} pixels, but {pair.frame1} is {expected}")
    return Example(frames[0], frames[1], torch.from_numpy(flow).permute(2, 0, 1), torch.from_numpy(valid))


class _Examples(Dataset[dict[str, Any]]):
    """Reads (epoch, index)."""

    def __init__(self, train: Sequence[Pair], test: Sequence[Pair], augmentation: Augmentation, seed: int, skip: bool) -> None:
        self._train, self._test, self._augmentation, self._seed, self._skip = train, test, augmentation, seed, skip

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        size = len(self._test if epoch == TEST else self._train)
        return first_readable(partial(self._sample, epoch), index, size, self._skip, "no pair of this data set can be read")

    def _sample(self, epoch: int, at: int) -> dict[str, Any]:
        if epoch == TEST:
            return {"example": read_example(self._test[at])}
        chance = torch.Generator().manual_seed(mix(self._seed, epoch, at))
        return {"example": augment(read_example(self._train[at]), self._augmentation, chance)}


def _collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    parts = {name: torch.stack([getattr(s["example"], name) for s in samples]) for name in ("image1", "image2", "flow", "valid")}
    return {name: _normalised(part) if name in ("image1", "image2") else part for name, part in parts.items()}


class FlowFiles(ProcessLoader):
    """Pairs read and augmented by `workers` processes (0: by this one); tests one by one, since their sizes may differ."""

    def __init__(
        self,
        train: Sequence[Pair],
        test: Sequence[Pair],
        order: Order,
        share: Share,
        augmentation: Augmentation,
        workers: int = 0,
        pin: bool = False,
        skip: bool = False,
    ) -> None:
        _check_crop(augmentation.size)
        examples = _Examples(list(train), list(test), augmentation, order.seed, skip)
        super().__init__(examples, _collate, order, share, len(test), test_batch=1, workers=workers, pin=pin)


class FlowFileTests(ProcessTests):
    """Pairs to be measured, one by one."""

    def __init__(self, test: Sequence[Pair], workers: int = 0, pin: bool = False, skip: bool = False) -> None:
        examples = _Examples([], list(test), Augmentation(), 0, skip)
        super().__init__(examples, _collate, Share(), len(test), test_batch=1, workers=workers, pin=pin)
