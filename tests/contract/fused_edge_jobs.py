"""What a fused step must not do: move when a scaler says no, hide a NaN, serve what it cannot. See fused_jobs.py."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from fused_register import job, stretches_of
from fused_run_jobs import Plain, assert_same, both, prepared, sgd, take_step, train
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import nofm
from nofm.kernels.select import use
from nofm.masks import Grouping


@job
def a_scaler_skips_the_whole_step() -> None:
    def fused_sgd(parameters: Any) -> Optimizer:
        return SGD(parameters, lr=0.5, momentum=0.5, dampening=0.5, fused=True)

    def fused_adamw(parameters: Any) -> Optimizer:
        return AdamW(parameters, lr=0.01, fused=True)

    for make in (fused_sgd, fused_adamw, sgd):
        fused, usual = both(make)
        for model, optimizer, handle in (fused, usual):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10_000)
            for step, broken in enumerate((True, False, False, True, False)):
                if step == 1 and make is fused_sgd:  # torch's own momentum is not initialised when its first step is skipped
                    optimizer.state.clear()
                before = [p.detach().clone() for p in model.parameters()]
                states = copy.deepcopy(optimizer.state_dict()["state"])
                optimizer.zero_grad()
                scaler.scale(model(step)).backward()
                if broken:
                    model.norm.weight.grad[0] = torch.inf
                with use("triton") if handle is fused[2] else nullcontext():
                    scaler.step(optimizer)
                scaler.update()
                if broken:
                    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
                    if step and make is not fused_sgd:
                        torch.testing.assert_close(optimizer.state_dict()["state"], states, rtol=0, atol=0)
                if step == 0 and handle is fused[2] and make is fused_sgd:
                    assert "momentum_buffer" not in optimizer.state[model.a.weight], "no momentum has begun"
            assert handle.step == 3
        assert_same(fused, usual, exactly=make is not fused_adamw)
        if make is fused_sgd:
            assert torch.equal(fused[0].norm.weight.grad, usual[0].norm.weight.grad)


@job
def a_dense_start_has_no_term() -> None:
    for placement in ("gradient", "decoupled"):
        fused, usual = both(sgd, nofm.SRSTE(decay=0.5, placement=placement, begin_at=2))
        for steps in (range(1), range(1, 2), range(2, 4)):  # in the start, its last step, and after it
            for model, optimizer, _ in (fused, usual):
                train(model, optimizer, steps)
            assert_same(fused, usual)


@job
def a_gradual_start_has_the_term_of_what_is_pruned_by_then() -> None:
    for placement in ("gradient", "decoupled"):
        fused, usual = both(sgd, nofm.SRSTE(decay=0.5, placement=placement, ramp_at=1, begin_at=4))
        for step in range(6):
            for model, optimizer, _ in (fused, usual):
                train(model, optimizer, range(step, step + 1))
            assert_same(fused, usual)


@job
def momentum_that_begins_again_may_lie_elsewhere() -> None:
    for ends_by in ("a skipped step", "somebody who clears it"):
        layer = nn.Linear(16, 4, bias=False)
        nofm.sparsify_(layer, "2:4", preset="all")
        layer.weight.grad = torch.zeros(4, 16)  # stays where it is
        optimizer = SGD(layer.parameters(), lr=0.5, momentum=0.5, fused=True)
        nofm.attach(nofm.SRSTE(decay=0.5), layer, optimizer, fused=True)
        scaler, taken = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10_000), []
        for step in range(2):
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(layer(torch.ones(1, 16)).sum()).backward()
            if step == 0 and ends_by == "a skipped step":
                layer.weight.grad[0, 0] = torch.inf
            with use("triton"):
                scaler.step(optimizer)
            scaler.update()
            if step == 0:
                if ends_by != "a skipped step":
                    optimizer.state.clear()
                taken = [torch.zeros(4, 16) for _ in range(64)]  # the memory of the first momentum is among it
        assert (optimizer.state[layer.weight]["momentum_buffer"] != 0).all(), ends_by
        assert not any(t.any() for t in taken), f"{ends_by}: memory of somebody else's was written to"


@job
def unscaled_gradients_are_left_as_torch_leaves_them() -> None:
    layer = nn.Linear(16, 4, bias=False)
    nofm.sparsify_(layer, "2:4", preset="all")
    optimizer = SGD(layer.parameters(), lr=0.5, fused=True)
    with use("triton"):
        nofm.attach(nofm.SRSTE(decay=0.5), layer, optimizer, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(layer(torch.ones(1, 16)).sum()).backward()
        scaler.step(optimizer)
    assert torch.equal(layer.weight.grad, torch.ones(4, 16))


@job
def a_weight_that_is_not_finite_is_named() -> None:
    for dtype, value in ((torch.float32, torch.inf), (torch.float32, torch.nan), (torch.float16, 60000.0), (torch.bfloat16, torch.inf)):
        for module in (nn.Linear(16, 4, bias=False), nn.Conv2d(16, 4, 3, bias=False)):
            with stretches_of(256), use("triton"):
                layer = module.to(dtype)
                nofm.sparsify_(layer, "2:4", preset="all")
                optimizer = SGD(layer.parameters(), lr=2.0)
                nofm.attach(nofm.SRSTE(decay=0.5), layer, optimizer, fused=True)
                layer.weight.grad = torch.zeros_like(layer.weight)
                optimizer.step()
                layer.weight.grad[1, 2] = value
                with pytest.raises(nofm.NonFiniteWeightError, match=r"weight\[1, 2.* after step 2"):
                    optimizer.step()
                with torch.no_grad():
                    layer.weight.zero_()
                layer.weight.grad.zero_()
                optimizer.step()  # repaired


@job
def an_infinite_weight_stays_what_torch_makes_of_it() -> None:
    """Without weight decay: 0 times Inf would make a NaN of it, and the error that comes a step later would tell of a NaN."""
    for make in (lambda p: SGD(p, lr=1.0, momentum=0.5), lambda p: AdamW(p, lr=0.5, weight_decay=0.0)):
        runs = []
        for fused in (True, False):
            torch.manual_seed(0)
            layer = nn.Linear(16, 4, bias=False)
            nofm.sparsify_(layer, "2:4", preset="all")
            optimizer = make(layer.parameters())
            with use("triton") if fused else nullcontext():
                nofm.attach(nofm.SRSTE(decay=0.5), layer, optimizer, fused=fused)
                with torch.no_grad():
                    layer.weight[1, 2] = -torch.inf
                layer.weight.grad = torch.ones_like(layer.weight)
                with pytest.raises(nofm.NonFiniteWeightError, match=r"weight\[1, 2\] is -inf after step 1"):
                    optimizer.step()
            runs.append(layer.weight.detach())
        torch.testing.assert_close(*runs)


@job
def weights_that_no_kernel_serves_take_the_usual_way() -> None:
    runs = []
    for fused in (True, False):
        model = Plain()
        nofm.sparsify_(model, {"a": "2:4", "b": "1:4", "c": "2:8"}, preset="all")
        model.b.weight = nn.Parameter(model.b.weight.detach().repeat_interleave(2, dim=1)[:, ::2])  # gaps in memory
        optimizer = sgd(model.parameters())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            handle = nofm.attach(nofm.SRSTE(decay=0.5), model, optimizer, fused=fused)
            with _triton_where_it_can():
                train(model, optimizer, range(2))
        if fused:
            assert list(handle.unfused) == ["b.weight"]
            assert "gaps" in handle.unfused["b.weight"]
            assert [str(w.message) for w in said if "fused=True does not serve 1 of 3" in str(w.message)], said
        runs.append((model, optimizer))
    assert_same(*runs)


@contextmanager
def _triton_where_it_can() -> Iterator[None]:
    """What a GPU would do, where no path is forced and weights with gaps go to plain torch."""
    from nofm.kernels import ops, select

    before = select.choose

    def choose(weight: torch.Tensor, grouping: Grouping) -> Any:
        return "torch" if select._why_not("triton", weight, grouping) else "triton"

    select.choose = ops.choose = choose
    try:
        yield
    finally:
        select.choose = ops.choose = before


@job
def amsgrad_and_forced_paths_take_the_usual_way() -> None:
    def amsgrad(parameters: Any) -> Optimizer:
        return Adam(parameters, lr=0.01, amsgrad=True)

    for make, path in ((amsgrad, "triton"), (sgd, "torch")):
        runs = []
        for fused in (True, False):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = prepared(make, fused)
                for step in range(2):
                    run[1].zero_grad()
                    run[0](step).backward()
                    with use(path):
                        run[1].step()
            assert len(run[2].unfused) == (3 if fused else 0)
            runs.append(run)
        assert_same(*runs)


@job
def a_probe_for_lambda_takes_the_usual_way() -> None:
    fused, usual = both(sgd, nofm.SRSTE(decay="auto", probe=8))
    for model, optimizer, handle in (fused, usual):
        for step in range(9):
            optimizer.zero_grad()
            model(step).backward()
            grads = model.a.weight.grad.clone()
            with use("triton") if handle is fused[2] and step in (0, 8) else nullcontext():
                optimizer.step()
            assert torch.equal(model.a.weight.grad, grads) == (handle is fused[2] and step == 8)
    for p, q in zip(fused[0].parameters(), usual[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@job
def detach_gives_the_weights_back() -> None:
    fused, usual = both(sgd)
    for model, optimizer, handle in (fused, usual):
        train(model, optimizer, range(1))
        handle.detach()
        handle.detach()
        train(model, optimizer, range(1, 2))
        nofm.attach(nofm.SRSTE(decay=0.5), model, optimizer, fused=handle is fused[2])
        train(model, optimizer, range(2, 3))
    assert_same(fused, usual)


@job
def new_weights_bump_their_version() -> None:
    (model, optimizer, _), _ = both(sgd)
    model(0).backward()
    saved = (model.a.weight * model.a.weight).sum()
    take_step(optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@job
def compiled_steps_take_the_usual_way() -> None:
    """Also where steps that were not compiled came before: a compiled step asks for its weights once, while it is traced."""
    fused, usual = both(sgd)
    for model, optimizer, handle in (fused, usual):
        compiled = torch.compile(optimizer.step, backend="eager")
        for step, take in enumerate((optimizer.step, optimizer.step, compiled, compiled, compiled, optimizer.step)):
            optimizer.zero_grad()
            model(step).backward()
            with use("triton") if handle is fused[2] else nullcontext(), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                take()
            if handle is fused[2]:
                assert set(handle.unfused.values()) == ({"optimizer.step is compiled"} if take is compiled else set()), step
                assert any("fused=True does not serve 3 of 3" in str(w.message) for w in said) == (step == 2), "told once"
        assert handle.step == 6
    assert_same(fused, usual)


@job
def a_step_that_does_not_come_by_is_refused() -> None:
    (model, optimizer, _), _ = both(sgd)
    model(0).backward()
    take_step(optimizer)
    del vars(optimizer)["_init_group"]  # as whoever compiles or replaces the step may leave it
    with pytest.raises(nofm.OptimizerError, match=r"has passed by a.weight and 2 more, .* attach without fused=True"), use("triton"):
        optimizer.step()
