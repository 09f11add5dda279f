"""The moving average against torch's own update, which waits for the device in every step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nofm
from nofm.engine.average import Average
from nofm.tasks.base import Task
from nofm.tasks.classification import Classification


def small_task() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    nofm.sparsify_(model, "2:4", preset="all")
    return Classification(model)


def moved(task: Task) -> None:
    """As a training step moves weights and buffers."""
    with torch.no_grad():
        for value in (*task.parameters(), *task.buffers()):
            value.add_(torch.randn(value.shape) if value.is_floating_point() else 1)


@pytest.mark.parametrize("resumed_at", [None, 0, 1, 3])
def test_it_is_torchs_average(resumed_at):
    task = small_task()
    ours, theirs = Average(task, 0.9), AveragedModel(task, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(5):
        if step == resumed_at:
            ours.settle(task)
            state = copy.deepcopy(ours.model.state_dict())
            ours = Average(small_task(), 0.9)
            ours.model.load_state_dict(state)
        moved(task)
        ours.update(task)
        theirs.update_parameters(task)
    ours.settle(task)
    expected = theirs.state_dict()
    assert {name: value.tolist() for name, value in ours.model.state_dict().items()} == {k: v.tolist() for k, v in expected.items()}


def test_a_replay_counts_as_an_update():
    task = small_task()
    average = Average(task, 0.9)
    average.update(task)
    average.replayed()
    average.settle(task)
    assert average.model.n_averaged.item() == 2


def test_a_mask_that_is_frozen_later_is_taken_over():
    task = small_task()
    average = Average(task, 0.9)
    average.update(task)
    frozen = [torch.zeros_like(site.weight, dtype=torch.bool) for site in nofm.sites(task.model)]
    for site, mask in zip(nofm.sites(task.model), frozen, strict=True):
        site.freeze(mask, site.lens)
    average.update(task)
    average.settle(task)
    assert all(torch.equal(site.stored_mask, mask) for site, mask in zip(nofm.sites(average.task.model), frozen, strict=True))
