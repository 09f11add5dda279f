"""Fifty steps of a method on the digits network: what golden losses are made of."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import nofm
from nofm.tasks.models import build_model

STEPS = 50


def losses(pattern: str, method: nofm.Method) -> list[float]:
    """The mean losses of steps 1 to 25 and 26 to 50."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    model = build_model("cnn", 10, 1)
    nofm.sparsify_(model, pattern)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    nofm.attach(method, model, optimizer)
    found = []
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (32,))
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [sum(found[:25]) / 25, sum(found[25:]) / 25]
