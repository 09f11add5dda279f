"""Convolutions of few channels, with parts of the batch side by side.

A GPU's matrix units work on tiles of 32 channels and more, so a convolution of 16 throws most of its work away. Here `parts` pieces of
a batch of N images lie beside each other as groups of channels, (N / parts, parts * C, H, W), and one grouped convolution, its weight
repeated for each group, does what the plain one does. In channels_last memory the same bytes are also a tensor (N / parts, C, H,
W * parts): whatever looks at one pixel or one channel at a time, batch norm, ReLU and sums, runs on that view as it is. So a stage of a
network is copied on its way in and on its way out, and nowhere between.

One convolution of 16 channels, 512 images of 32 x 32 in bf16, forward and both gradients, on an H200: 222 us, and 90 us with 4 parts,
which is 64 channels; 8 and 16 parts are no better, 32 channels gain little, and convolutions with a stride become slower
(`python benchmarks/narrow_gpu.py`).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["NarrowConv2d", "one_by_one", "side_by_side"]


class NarrowConv2d(nn.Conv2d):
    """A convolution of groups 1, without a bias, that also takes its images `parts` at a time, as `side_by_side` lays them."""

    def forward(self, x: Tensor, parts: int = 1) -> Tensor:
        if parts == 1:
            return super().forward(x)
        n, channels, height, wide = x.shape
        groups_NHWC = x.permute(0, 2, 3, 1).reshape(n, height, wide // parts, parts * channels)
        weight = self.weight.repeat(parts, 1, 1, 1)
        y = F.conv2d(groups_NHWC.permute(0, 3, 1, 2), weight, None, self.stride, self.padding, self.dilation, groups=parts)
        pixels_NHWC = y.permute(0, 2, 3, 1).reshape(n, y.shape[2], y.shape[3] * parts, self.out_channels)
        return pixels_NHWC.permute(0, 3, 1, 2)


def side_by_side(x: Tensor, parts: int) -> Tensor:
    """(N, C, H, W) -> (N / parts, C, H, W * parts) in channels_last memory, the pixels of `parts` images in turn."""
    n, channels, height, width = x.shape
    pixels_NHWPC = x.unflatten(0, (parts, n // parts)).permute(1, 3, 4, 0, 2)
    return pixels_NHWPC.reshape(n // parts, height, width * parts, channels).permute(0, 3, 1, 2)


def one_by_one(x: Tensor, parts: int) -> Tensor:
    """What `side_by_side` was given, in channels_last memory."""
    n, channels, height, wide = x.shape
    pixels_PNHWC = x.permute(0, 2, 3, 1).unflatten(2, (wide // parts, parts)).permute(3, 0, 1, 2, 4)
    return pixels_PNHWC.reshape(n * parts, height, wide // parts, channels).permute(0, 3, 1, 2)
