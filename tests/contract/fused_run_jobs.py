"""A model trained with `attach(..., fused=True)` and in the usual way, side by side: see fused_jobs.py."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fused_register import job
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import nofm
from nofm.kernels.select import use


class Plain(nn.Module):
    """Gradients that are exact: a sum of weights, each times a number with few digits."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.c = nn.Linear(16, 8), nn.Linear(16, 8, bias=False), nn.Conv2d(16, 4, 2, bias=False)
        self.norm = nn.LayerNorm(16)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_((p * 16).round() / 4)

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        convolved = self.c(torch.eye(16).view(16, 16, 1, 1).expand(16, 16, 2, 2))
        seen = [self.a(torch.eye(16)), self.b(torch.eye(16)), convolved, self.norm.weight, self.norm.bias]
        return sum((y * torch.randint(-2, 3, y.shape, generator=generator)).sum() for y in seen)


def prepared(make: Callable[[Any], Optimizer], fused: bool, method: nofm.Method | None = None) -> tuple[nn.Module, Optimizer, nofm.Handle]:
    model = Plain()
    nofm.sparsify_(model, {"a": "2:4", "b": "1:4", "c": "2:8"}, preset="all")
    optimizer = make(model.parameters() if make.__name__ != "grouped" else model)
    return model, optimizer, nofm.attach(method or nofm.SRSTE(decay=0.5), model, optimizer, fused=fused)


def take_step(optimizer: Optimizer, *closure: Any) -> Any:
    """Only fused steps go through the interpreter, which is slow."""
    with use("triton") if "_init_group" in vars(optimizer) else nullcontext():
        return optimizer.step(*closure)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        take_step(optimizer)


def assert_same(a: tuple[Any, ...], b: tuple[Any, ...], exactly: bool = True) -> None:
    """The same weights and the same state."""
    close = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 2e-6, "atol": 2e-6}
    for (name, p), q in zip(a[0].named_parameters(), b[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, **close, msg=lambda text: f"{name} {text}")  # noqa: B023
    mine, other = a[1].state_dict(), b[1].state_dict()
    assert mine["param_groups"] == other["param_groups"]
    torch.testing.assert_close(mine["state"], other["state"], **close)


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.5, momentum=0.5, weight_decay=0.5, dampening=0.5)


def nesterov(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.5, momentum=0.5, nesterov=True, maximize=True)


def plain_sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.5)


def grouped(model: Any) -> Optimizer:
    groups = [
        {"params": list(model.a.parameters()), "lr": 0.25, "weight_decay": 0.5},
        {"params": list(model.b.parameters()), "momentum": 0.0, "maximize": True},
        {"params": [*model.c.parameters(), *model.norm.parameters()], "nesterov": True},
    ]
    return SGD(groups, lr=0.5, momentum=0.5)


def adam(parameters: Any) -> Optimizer:
    return Adam(parameters, lr=0.01, weight_decay=0.1)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.01, weight_decay=0.1)


def both(make: Callable[[Any], Optimizer], method: nofm.Method | None = None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return prepared(make, True, method), prepared(make, False, method)


@job
def sgd_is_the_usual_way_bit_for_bit() -> None:
    for make in (sgd, nesterov, plain_sgd, grouped):
        for placement in ("gradient", "decoupled"):
            fused, usual = both(make, nofm.SRSTE(decay=0.5, placement=placement))
            for run in (fused, usual):
                train(run[0], run[1], range(3))
            assert_same(fused, usual)
            assert not fused[2].unfused


@job
def adam_is_the_usual_way() -> None:
    for make, refine, placement in ((adam, "weight", "gradient"), (adamw, "sign", "decoupled"), (adamw, "gradient", "gradient")):
        fused, usual = both(make, nofm.SRSTE(decay=0.5, refine=refine, placement=placement))
        for run in (fused, usual):
            train(run[0], run[1], range(4))
        assert_same(fused, usual, exactly=False)


@job
def a_learning_rate_on_the_device_is_read_there() -> None:
    for make in (sgd, adamw):
        fused, usual = both(make)
        lr = torch.tensor(0.25)
        for step, value in enumerate((0.25, 0.5, 0.0)):
            lr.fill_(value)
            for run, its in ((fused, lr), (usual, value)):
                run[1].param_groups[0]["lr"] = its
                train(run[0], run[1], range(step, step + 1))
        fused[1].param_groups[0]["lr"] = 0.0
        assert_same(fused, usual, exactly=make is sgd)


@job
def gradients_stay_what_backward_left() -> None:
    (model, optimizer, _), _ = both(sgd)
    for micro_batch in range(3):  # accumulated
        model(micro_batch).backward()
    before = [p.grad.clone() for p in model.parameters()]
    take_step(optimizer)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


@job
def micro_batches_add_the_term_once() -> None:
    fused, usual = both(sgd)
    for model, optimizer, _ in (fused, usual):
        for micro_batch in range(3):
            model(micro_batch).backward()
        take_step(optimizer)
    assert_same(fused, usual)


@job
def frozen_weights_and_weights_without_a_gradient_rest() -> None:
    fused, usual = both(adamw)
    for model, optimizer, _ in (fused, usual):
        model.a.weight.requires_grad_(False)
        before = model.a.weight.clone(), model.b.weight.clone()
        model(0).backward()
        model.b.weight.grad = None
        take_step(optimizer)
        assert torch.equal(model.a.weight, before[0])
        assert torch.equal(model.b.weight, before[1])
        assert model.b.weight not in optimizer.state
    assert_same(fused, usual, exactly=False)


@job
def a_weight_of_two_layers_moves_once() -> None:
    runs = []
    for fused in (True, False):
        model = Plain()
        model.b.weight = model.a.weight
        nofm.sparsify_(model, {"a": "2:4", "b": "2:4"}, preset="all")
        optimizer = sgd(model.parameters())
        nofm.attach(nofm.SRSTE(decay=0.5), model, optimizer, fused=fused)
        train(model, optimizer, range(2))
        runs.append((model, optimizer))
    assert_same(*runs)


@job
def a_closure_gives_the_gradients() -> None:
    fused, usual = both(sgd)
    for model, optimizer, _ in (fused, usual):

        def closure(model: nn.Module = model, optimizer: Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(0)
            loss.backward()
            return loss

        assert take_step(optimizer, closure) is not None
    assert_same(fused, usual)


@job
def other_hooks_see_what_they_would_see() -> None:
    model, optimizer, handle = both(sgd)[0]
    handle.detach()
    seen: list[Any] = []
    start = model.a.weight.clone()
    optimizer.register_step_post_hook(lambda *_: seen.append(not torch.equal(model.a.weight, start)))  # before ours
    nofm.attach(nofm.SRSTE(decay=0.0), model, optimizer, fused=True)

    def clear(*_: Any) -> None:
        for p in model.parameters():
            p.grad.zero_()

    optimizer.register_step_pre_hook(clear)  # after ours
    optimizer.param_groups[0]["weight_decay"] = 0.0
    model(0).backward()
    take_step(optimizer)
    assert torch.equal(model.a.weight, start), "the hook's gradients count"
    optimizer.param_groups[0]["weight_decay"] = 0.5
    take_step(optimizer)
    assert seen == [False, True]


@job
def a_gradient_that_is_replaced_by_another_kind_is_an_error() -> None:
    model, optimizer, _ = both(sgd)[0]

    def replace(*_: Any) -> None:
        model.a.weight.grad = torch.ones(16, 8).t()

    model(0).backward()
    optimizer.register_step_pre_hook(replace)
    with pytest.raises(nofm.OptimizerError, match=r"the gradient of a\.weight was replaced"):
        take_step(optimizer)


@job
def state_moves_to_plain_torch_and_back_bit_for_bit() -> None:
    for make in (sgd, nesterov, adamw):
        whole, first = prepared(make, True), prepared(make, True)
        train(whole[0], whole[1], range(3))
        train(first[0], first[1], range(1))
        for step, fused in ((1, False), (2, True)):
            then = prepared(make, fused)
            then[0].load_state_dict(first[0].state_dict())
            then[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
            train(then[0], then[1], range(step, step + 1))
            first = then
        assert_same(first, whole, exactly=make is not adamw)


@job
def what_is_kept_from_step_to_step_follows_the_optimizer() -> None:
    for make in (sgd, adamw):
        fused, usual = both(make)
        for model, optimizer, _ in (fused, usual):
            train(model, optimizer, range(1))
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.state.clear()
            train(model, optimizer, range(1, 3))
            optimizer.load_state_dict(saved)
            train(model, optimizer, range(3, 4))
            model.a.weight.data = model.a.weight.data.t().contiguous().t()
            optimizer.state[model.a.weight].update({k: v.clone() for k, v in optimizer.state[model.a.weight].items()})
            optimizer.param_groups[0]["lr"] *= 0.5
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the state lies in another order now
                train(model, optimizer, range(4, 5))
        assert_same(fused, usual, exactly=False)
