"""Optical flow: RAFT from torchvision, its sequence loss, end-point error and outliers.

The loss is that of RAFT's authors: the absolute error of every refinement, the later the heavier, averaged over all pixels with those
left out as 0. Dividing by all pixels rather than by the known ones makes it add up over micro-batches and processes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import NofmError
from .base import Task

__all__ = ["FLOW_MODELS", "OpticalFlow", "build_flow_model", "pad_to_8", "sequence_loss"]

FLOW_MODELS = ("raft_large", "raft_small", "raft_tiny")
_SAMPLES = 4  # pairs kept for a look
_SMALLEST = 128  # pixels of a side, below which RAFT's correlation pyramid runs out


class OpticalFlow(Task):
    """{"image1", "image2", "flow", "valid"} -> sequence loss. `updates` refinements in training, `test_updates` in tests.

    Metrics over all pixels whose flow is known: epe in pixels; outliers_1px, _3px and _5px, in percent, whose error is above that;
    fl_all, in percent, as KITTI counts outliers: an error above 3 pixels and above 5 % of the flow.
    """

    headline = "epe"
    measure_on_host = True  # the first pairs are kept to be looked at; whole frames keep a GPU busy without a graph

    def __init__(
        self, model: nn.Module, updates: int = 12, test_updates: int | None = None, gamma: float = 0.8, max_flow: float = 400.0
    ) -> None:
        super().__init__()
        self.model, self.updates, self.test_updates = model, updates, test_updates or updates
        self.gamma, self.max_flow = gamma, max_flow
        self._seen: list[tuple[Tensor, ...]] = []

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        predictions = self.model(batch["image1"], batch["image2"], num_flow_updates=self.updates)
        loss = sequence_loss(predictions, batch["flow"], batch["valid"], self.gamma, self.max_flow)
        with torch.no_grad():
            error, known = _error(predictions[-1], batch["flow"]), batch["valid"]
            epe = torch.where(known, error, 0).sum() / known.sum().clamp(min=1)
        return {"loss": loss, "epe": epe}

    def predict(self, image1: Tensor, image2: Tensor) -> Tensor:
        """The last refinement for frames of any size, (B, 2, H, W)."""
        height, width = image1.shape[-2:]
        (padded1, padded2), (top, left) = pad_to_8(image1, image2)
        flow: Tensor = self.model(padded1, padded2, num_flow_updates=self.test_updates)[-1]
        return flow[..., top : top + height, left : left + width].float()

    def reset(self) -> None:
        """Forget the pairs of the last evaluation."""
        self._seen.clear()

    def measure(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        flow, known = batch["flow"], batch["valid"]
        predicted = self.predict(batch["image1"], batch["image2"])
        self._seen += list(zip(batch["image1"], predicted, flow, known, strict=True))[: _SAMPLES - len(self._seen)]
        error = _error(predicted, flow)
        length = flow.square().sum(1).sqrt()

        def total(values: Tensor) -> Tensor:
            return torch.where(known, values.double(), 0).sum()

        # Written so that an error that is no number counts as an outlier.
        return {
            "pixels": known.double().sum(),
            "error": total(error),
            **{f"beyond_{limit}px": total(~(error <= limit)) for limit in (1, 3, 5)},
            "fl_all": total(~((error <= 3) | (error <= 0.05 * length))),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        pixels = sums["pixels"] or float("nan")
        return {
            "epe": sums["error"] / pixels,
            **{f"outliers_{limit}px": 100 * sums[f"beyond_{limit}px"] / pixels for limit in (1, 3, 5)},
            "fl_all": 100 * sums["fl_all"] / pixels,
        }

    def sample_files(self) -> dict[str, bytes]:
        """The first pairs: "frame" (H, W, 3) of bytes, "prediction" and "truth" (H, W, 2) in pixels, "valid" (H, W)."""
        return {f"flow-{i}.npz": _npz(*pair) for i, pair in enumerate(self._seen)}


def _npz(image: Tensor, prediction: Tensor, truth: Tensor, valid: Tensor) -> bytes:
    import numpy as np

    frame = ((image.float() + 1) * 127.5).round().clamp(0, 255).byte()
    frame_HW3, prediction_HW2, truth_HW2 = (x.permute(1, 2, 0).cpu().numpy() for x in (frame, prediction.float(), truth.float()))
    file = io.BytesIO()
    np.savez_compressed(file, frame=frame_HW3, prediction=prediction_HW2, truth=truth_HW2, valid=valid.cpu().numpy())
    return file.getvalue()


def sequence_loss(predictions: Sequence[Tensor], flow: Tensor, valid: Tensor, gamma: float = 0.8, max_flow: float = 400.0) -> Tensor:
    """Sum over refinements i = 1..n of gamma^(n - i) x mean |prediction_i - flow|, without what is unknown or longer than `max_flow`."""
    counted = (valid & (flow.square().sum(1) < max_flow**2))[:, None]
    # All refinements at once, since on small frames a GPU waits for every operation. Selected rather than multiplied: an unknown flow may
    # be any number.
    error_IB2HW = torch.where(counted, (torch.stack(list(predictions)).float() - flow).abs(), 0)
    until_end_I = torch.arange(len(predictions) - 1, -1, -1, device=flow.device)
    return (gamma**until_end_I * error_IB2HW.mean(dim=(1, 2, 3, 4))).sum()


def _error(prediction: Tensor, flow: Tensor) -> Tensor:
    """The end-point error of each pixel (B, H, W)."""
    return (prediction.float() - flow).square().sum(1).sqrt()


def pad_to_8(*images: Tensor) -> tuple[list[Tensor], tuple[int, int]]:
    """Images padded by their edges, on all sides alike, until their sides divide by 8 and are large enough; where the old ones begin."""
    height, width = images[0].shape[-2:]
    rows, columns = (max(_SMALLEST, -(-side // 8) * 8) - side for side in (height, width))
    top, left = rows // 2, columns // 2
    padding = (left, columns - left, top, rows - top)
    return [F.pad(image, padding, mode="replicate") if any(padding) else image for image in images], (top, left)


# ---- networks ----


def build_flow_model(name: str = "raft_large", *, pretrained: bool = False) -> nn.Module:
    """raft_large (5.3 M parameters) or raft_small of torchvision, or raft_tiny: the same parts with few channels, for a CPU."""
    if name not in FLOW_MODELS:
        raise NofmError(f"model.name = {name}: is no network for optical flow; there are {', '.join(FLOW_MODELS)}")
    if name == "raft_tiny" and pretrained:
        raise NofmError("model.pretrained = true: there are no published weights of raft_tiny; use raft_large or raft_small")
    from torchvision.models import optical_flow

    from .raft import Correlation, Raft

    if name == "raft_tiny":
        return _tiny()
    build = getattr(optical_flow, name)
    correlation = Correlation(num_levels=4, radius=4 if name == "raft_large" else 3)
    return Raft.of(build(weights="DEFAULT" if pretrained else None, corr_block=correlation))


def _tiny() -> nn.Module:
    from torchvision.models.optical_flow import raft

    from .raft import Correlation, Raft

    hidden, context, motion = 48, 32, 48
    corr_block = Correlation(num_levels=4, radius=3)
    encoder = {"block": raft.ResidualBlock, "norm_layer": nn.InstanceNorm2d}
    motion_encoder = raft.MotionEncoder(
        in_channels_corr=corr_block.out_channels, corr_layers=(64,), flow_layers=(32, 16), out_channels=motion
    )
    recurrent = raft.RecurrentBlock(input_size=motion + context, hidden_size=hidden, kernel_size=(3,), padding=(1,))
    head = raft.FlowHead(in_channels=hidden, hidden_size=64)
    return Raft(
        feature_encoder=raft.FeatureEncoder(layers=(16, 16, 24, 32, 64), **encoder),
        context_encoder=raft.FeatureEncoder(layers=(16, 16, 24, 32, hidden + context), **encoder),
        corr_block=corr_block,
        update_block=raft.UpdateBlock(motion_encoder=motion_encoder, recurrent_block=recurrent, flow_head=head),
        mask_predictor=raft.MaskPredictor(in_channels=hidden, hidden_size=64),
    )
