"""Fifty steps of the library against Algorithm 1 of the paper, replayed in NumPy.

The replay shares nothing with the library: it sorts magnitudes itself, has the gradients of its two-layer network written out,
and updates by Eq. 4. (Algorithm 1 prints the bracket of its last line in another place than Eq. 4; the equation is meant.)
Momentum and weight decay, which the paper's experiments use and its equations leave out, are torch's SGD.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import nofm

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, BATCH = 50, 16


def mask_NM(w_OI: np.ndarray, n: int, m: int) -> np.ndarray:
    """1 at the n largest magnitudes of every m along a row; the lower index among equals."""
    w_OGM = np.abs(w_OI).reshape(w_OI.shape[0], -1, m)
    kept = np.argsort(-w_OGM, axis=-1, kind="stable")[..., :n]
    e_OGM = np.zeros_like(w_OGM)
    np.put_along_axis(e_OGM, kept, 1, axis=-1)
    return e_OGM.reshape(w_OI.shape)


def algorithm_1(weights, n, m, decay, batches, lr, momentum, weight_decay):
    """SR-STE on y = W2 relu(W1 x), mean squared error. Returns the weights after each step."""
    weights, velocity, history = [w.copy() for w in weights], [0.0, 0.0], []
    for x_BI, y_BO in batches:
        masks = [mask_NM(w, n, m) for w in weights]  # E
        w1, w2 = (w * e for w, e in zip(weights, masks, strict=True))  # S(W), Eq. 2
        h = x_BI @ w1.T  # forward
        a = np.maximum(h, 0)
        d_y = 2 * (a @ w2.T - y_BO) / y_BO.size  # backward
        d_h = (d_y @ w2) * (h > 0)
        gradients = [d_h.T @ x_BI, d_y.T @ a]  # g(S(W))
        for i, (w, e, g) in enumerate(zip(weights, masks, gradients, strict=True)):
            g = g + decay * (1 - e) * w + weight_decay * w  # Eq. 4
            velocity[i] = momentum * velocity[i] + g
            weights[i] = w - (lr * velocity[i]).astype(w.dtype)
        history.append(weights.copy())
    return history


class TwoLayers(nn.Module):
    def __init__(self, w1: np.ndarray, w2: np.ndarray) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(w.shape[1], w.shape[0], bias=False) for w in (w1, w2))
        for layer, w in ((self.first, w1), (self.second, w2)):
            layer.weight = nn.Parameter(torch.from_numpy(w.copy()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


OPTIMIZERS = {
    "sgd": {"momentum": 0.0, "weight_decay": 0.0},
    "momentum": {"momentum": 0.9, "weight_decay": 0.0},
    "weight decay": {"momentum": 0.0, "weight_decay": 5e-3},
    "both": {"momentum": 0.9, "weight_decay": 5e-3},
}


@pytest.mark.parametrize("settings", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "2:8", "1:16"])
@pytest.mark.parametrize("decay", [0.05, -0.02, 0.0], ids=lambda d: f"decay {d}")
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
def test_fifty_steps(settings, pattern, decay, dtype):
    rng = np.random.default_rng(0)
    n, m = map(int, pattern.split(":"))
    w1, w2 = rng.normal(0, 0.3, (32, 16)).astype(dtype), rng.normal(0, 0.3, (8, 32)).astype(dtype)
    w1[0, :8] = 0.25  # ties, from the first step on
    batches = [(rng.normal(0, 1, (BATCH, 16)).astype(dtype), rng.normal(0, 1, (BATCH, 8)).astype(dtype)) for _ in range(STEPS)]

    model = TwoLayers(w1, w2)
    nofm.sparsify_(model, pattern, preset="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
    nofm.attach(nofm.SRSTE(decay), model, optimizer)
    replay = algorithm_1([w1, w2], n, m, decay, batches, 0.1, **settings)
    tolerance = 1e-6 if dtype is np.float32 else 1e-12
    for (x, y), expected in zip(batches, replay, strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
        for parameter, w in zip(model.parameters(), expected, strict=True):
            np.testing.assert_allclose(parameter.detach().numpy(), w, rtol=0, atol=tolerance)

    # The replay says something only if masks moved on the way.
    assert sum((mask_NM(w, n, m) != mask_NM(start, n, m)).sum() for w, start in zip(replay[-1], (w1, w2), strict=True)) > 0
