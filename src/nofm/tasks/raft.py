"""RAFT from torchvision's parts, with a forward that takes nothing from the host, so that whole steps can be CUDA graphs, and that asks
for fewer operations: on small frames a GPU waits for each of thousands to begin, twelve refinements of hundreds each.

torchvision's own forward makes its grids of coordinates on the CPU and copies them to the device, the window of the correlations again
at every refinement; a graph cannot hold that, and each copy makes the host wait. Here they are made where they are used. What no later
refinement needs, the flow at full size, is made of all of them at once. Under autocast the flow that goes into the refinement has the type
that its layers cast to anyhow: in fp32, everything that it is put beside would become fp32, and be cast back six times over.
Layers, names of weights and the arithmetic are torchvision's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.optical_flow import raft
from torchvision.models.optical_flow._utils import make_coords_grid, upsample_flow

from ..errors import NofmError

__all__ = ["Correlation", "Raft", "enlarged"]

_LAYOUTS = {False: torch.contiguous_format, True: torch.channels_last}


class Correlation(raft.CorrBlock):
    """How alike the surroundings of two points are, at several resolutions.

    Computed in fp32 also under autocast, as RAFT's authors do: these are sums of hundreds of products, and it is the small differences
    between them that say where a pixel has gone.
    """

    def build_pyramid(self, fmap1: Tensor, fmap2: Tensor) -> None:
        kind = fmap1.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():  # none on meta
            super().build_pyramid(fmap1.float(), fmap2.float())

    def windows(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """For each level (window, scale): in the units of `grid_sample`, where an image goes from -1 to 1, the neighbours of a point p
        lie at window + scale * p. Windows are (1, S, S, 2), S = 2 * radius + 1. Rows come first, as torchvision has it."""
        offset_S = torch.arange(-self.radius, self.radius + 1, device=device).float()
        offset_1SS2 = torch.stack(torch.meshgrid(offset_S, offset_S, indexing="ij"), dim=-1)[None]
        found = []
        for level, volume in enumerate(self.corr_pyramid):
            height, width = volume.shape[-2:]
            unit_2 = torch.stack([torch.full((), 2 / (side - 1), device=device) for side in (width, height)])
            found.append((offset_1SS2 * unit_2 - 1, unit_2 / 2**level))
        return found

    def look_up(self, coords_B2HW: Tensor, windows: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The correlations (B, levels * S * S, H, W) of each point of frame 1 with the neighbourhood of `coords` in frame 2."""
        batch, _, height, width = coords_B2HW.shape
        centre_N112 = coords_B2HW.permute(0, 2, 3, 1).reshape(-1, 1, 1, 2)
        levels = []
        for volume, (window_1SS2, scale_2) in zip(self.corr_pyramid, windows, strict=True):
            found = _sampled(volume, torch.addcmul(window_1SS2, centre_N112, scale_2))
            levels.append(found.view(batch, height, width, -1))
        by_channel = coords_B2HW.is_contiguous(memory_format=torch.channels_last)
        return torch.cat(levels, dim=-1).permute(0, 3, 1, 2).contiguous(memory_format=_LAYOUTS[by_channel])

    def forget(self) -> None:
        """Drop the pyramid: it is large, part of an autograd graph, and of no use after the forward."""
        self.corr_pyramid: list[Tensor] = []


def _sampled(volume_N1HW: Tensor, point_NSS2: Tensor) -> Tensor:
    """Bilinear samples (N, 1, S, S), 0 outside, at points from -1 to 1."""
    if torch.are_deterministic_algorithms_enabled():
        found: Tensor = _SampledInOrder.apply(volume_N1HW, point_NSS2)
        return found
    return F.grid_sample(volume_N1HW, point_NSS2, align_corners=True)


class _SampledInOrder(torch.autograd.Function):
    """The same samples; their gradient is added up in one order, which torch's own is not on a GPU.

    The points of a window are a grid, x going along its first axis and y along its second, so that samples are Y V X' with matrices of
    linear interpolation, and the gradient of V is a product of matrices too.
    """

    @staticmethod
    def forward(ctx: Any, volume_N1HW: Tensor, point_NSS2: Tensor) -> Tensor:
        ctx.save_for_backward(point_NSS2)
        ctx.size = volume_N1HW.shape[-2:]
        return F.grid_sample(volume_N1HW, point_NSS2, align_corners=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (point_NSS2,) = ctx.saved_tensors
        height, width = ctx.size
        x_NSW = _shares(point_NSS2[:, :, 0, 0], width)
        y_NSH = _shares(point_NSS2[:, 0, :, 1], height)
        gradient_NHW = y_NSH.transpose(1, 2) @ gradients[0][:, 0].transpose(1, 2) @ x_NSW
        return gradient_NHW[:, None], None


def _shares(at_NS: Tensor, size: int) -> Tensor:
    """How much of each of `size` places, which lie from -1 to 1, is in a sample, (N, S, size)."""
    at_NS = (at_NS + 1) * ((size - 1) / 2)
    return (1 - (at_NS[..., None] - torch.arange(size, device=at_NS.device)).abs()).clamp(min=0)


def enlarged(flow_N2HW: Tensor, mask_N576HW: Tensor) -> Tensor:
    """The flow at eight times the size: each pixel a mean of the nine flows around it, weighed by the softmax of `mask`.

    As `upsample_flow`, whose `F.unfold` starts a kernel for each frame of the batch.
    """
    frames, _, height, width = flow_N2HW.shape
    weight_N1964HW = mask_N576HW.view(frames, 1, 9, 64, height, width).softmax(dim=2)
    around_N2HW33 = F.pad(8 * flow_N2HW, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
    around_N291HW = around_N2HW33.permute(0, 1, 4, 5, 2, 3).reshape(frames, 2, 9, 1, height, width)
    large_N264HW = (weight_N1964HW * around_N291HW).sum(dim=2)
    return large_N264HW.view(frames, 2, 8, 8, height, width).permute(0, 1, 4, 2, 5, 3).reshape(frames, 2, 8 * height, 8 * width)


class Raft(raft.RAFT):
    """torchvision's RAFT with a `Correlation`."""

    corr_block: Correlation

    @classmethod
    def of(cls, model: nn.Module) -> Raft:
        """`model`, which torchvision has built with a `Correlation`, with this class's forward."""
        assert type(model) is raft.RAFT
        model.__class__ = cls
        assert isinstance(model, Raft)
        return model

    def forward(self, image1: Tensor, image2: Tensor, num_flow_updates: int = 12) -> list[Tensor]:
        """The flow (B, 2, H, W) after each refinement."""
        batch, _, height, width = image1.shape
        if image1.shape != image2.shape or height % 8 or width % 8:
            sizes = " and ".join("x".join(map(str, image.shape[-2:])) for image in (image1, image2))
            raise NofmError(f"RAFT takes two frames of one size whose sides divide by 8, got {sizes}; pad them (tasks.flow.pad_to_8)")
        features1, features2 = self.feature_encoder(torch.cat([image1, image2])).chunk(2)
        self.corr_block.build_pyramid(features1, features2)
        windows = self.corr_block.windows(image1.device)
        start = self._start(batch, height // 8, width // 8, image1.device)
        hidden, context = self._context(image1)
        flow, flows, states = torch.zeros_like(start), [], []
        for _ in range(num_flow_updates):
            flow = flow.detach()  # each refinement learns from where it starts, not from how it came there
            correlations = self.corr_block.look_up(start + flow, windows)
            hidden, step = self.update_block(hidden, context, correlations, flow.to(hidden.dtype))
            flow = flow + step
            flows.append(flow)
            states.append(hidden)
        self.corr_block.forget()
        return self._at_full_size(flows, states)

    def _at_full_size(self, flows: list[Tensor], states: list[Tensor]) -> list[Tensor]:
        """All at once in training, which keeps what they are made of in any case; one by one to save memory otherwise."""
        if not torch.is_grad_enabled() and len(flows) > 1:
            return [self._at_full_size([flow], [state])[0] for flow, state in zip(flows, states, strict=True)]
        flow_N2HW = torch.cat(flows)
        masks = None if self.mask_predictor is None else self.mask_predictor(torch.cat(states))
        large = upsample_flow(flow_N2HW) if masks is None else enlarged(flow_N2HW, masks)
        return list(large.chunk(len(flows)))

    def _start(self, batch: int, height: int, width: int, device: Any) -> Tensor:
        """The place of each point, laid out as the weights are: everything that flow is put beside would be copied to its layout."""
        by_channel = next(self.parameters()).is_contiguous(memory_format=torch.channels_last)
        return make_coords_grid(batch, height, width, device=device).contiguous(memory_format=_LAYOUTS[by_channel])

    def _context(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """The first hidden state, and what frame 1 tells at every refinement."""
        both = self.context_encoder(image)
        size = self.update_block.hidden_state_size
        hidden, context = both.split([size, both.shape[1] - size], dim=1)
        return torch.tanh(hidden), F.relu(context)
