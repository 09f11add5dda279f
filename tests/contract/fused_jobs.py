"""What `attach(..., fused=True)` promises, through Triton's interpreter. A process of its own, started by test_fused_step.py with
TRITON_INTERPRET=1, which has to be set before Triton is imported. Each function here is a job, and prints its name when it holds.

Where bits are compared, all numbers have so few digits that no operation rounds: the order of operations then makes no difference, and
neither does a fused multiply-add.
"""

from __future__ import annotations

import copy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import nofm
from nofm.kernels import reference, ways
from nofm.kernels.select import use
from nofm.kernels.steps import Rule, Squad, Term, finished
from nofm.masks import Grouping
from nofm.patterns import Pattern

JOBS: dict[str, Callable[[], None]] = {}


def job(function: Callable[[], None]) -> Callable[[], None]:
    JOBS[function.__name__] = function
    return function


# ---- the kernels against the reference ----


def exact(*shape: int) -> torch.Tensor:
    """Few digits; ties in most groups, zeros of both signs."""
    w = (torch.randn(shape) * 4).round() / 4
    w.view(-1)[::7] = -0.0
    return w


def layouts(m: int) -> dict[str, tuple[torch.Tensor, int]]:
    torch.manual_seed(m)
    return {
        "linear": (exact(6, 2 * m), 1),
        "conv": (exact(8, 2 * m, 3, 3), 1),
        "conv channels_last": (exact(4, 2 * m, 3, 3).to(memory_format=torch.channels_last), 1),
        "transposed": (exact(2 * m, 20).t(), 1),
        "transposed conv": (exact(m, 3, 2, 2), 0),
        "unaligned": (exact(5 * m + 1)[1:].view(5, m), 1),
    }


# lr, weight decay into the gradient, off the weight, decay, sign, then the rule's own: see kernels.steps
SGD_NUMBERS = (0.5, 0.25, 0.0, 0.5, 1.0, 0.5, 0.75, 0.0, 0.0)
ADAM_NUMBERS = (0.01, 0.0, 0.1, 0.5, 1.0, 0.9, 0.99, 1e-8, 3.0)


def compare(rule: Rule, term: Term, numbers: tuple[float, ...], pattern: str, dtype: torch.dtype = torch.float32, steps: int = 1) -> None:
    """Some steps of weights, one step in all layouts: SGD bit for bit, Adam within four units in the last place of the larger of value
    and 1."""
    chosen = {name: laid for name, laid in layouts(Pattern(pattern).m).items() if steps == 1 or "conv" not in name}
    named = [(name, w.to(dtype), Grouping(Pattern(pattern), axis)) for name, (w, axis) in chosen.items()]
    ours = [w.clone(memory_format=torch.preserve_format) for _, w, _ in named]
    ours[-1] = named[-1][1]  # a clone would be aligned
    theirs = [w.float().clone() for w in ours]
    states = [[torch.zeros_like(w) for w in ours] for _ in rule.states]
    their_states = [[torch.zeros_like(w) for w in theirs] for _ in rule.states]
    squad, word, groupings = Squad(), torch.zeros(()), [g for _, _, g in named]
    for step in range(1, steps + 1):
        grads = [exact(*w.shape).to(dtype).as_strided(w.shape, w.stride()) for w in ours]
        rows = [(*numbers[:3], numbers[3] * 2.0 ** (i % 2), *numbers[4:8], step) for i in range(len(ours))]
        settings = squad.settings(rule, rows, [None] * len(ours), [None] * len(ours), None, torch.device("cpu"))
        squad.step(rule, term, [ours, grads, *states], groupings, settings, None, None, word, layout=("same", dtype))
        for i, (name, _, grouping) in enumerate(named):
            mine = [column[i] for column in their_states]
            reference.step_(rule, term, rows[i], theirs[i], grads[i].float(), mine, grouping)
            for a, b in zip((ours[i], *(column[i] for column in states)), (theirs[i], *mine), strict=True):
                if rule.adam:
                    torch.testing.assert_close(a, b, rtol=4e-7, atol=4e-7, msg=lambda text: f"{name} {pattern} {term} {text}")  # noqa: B023
                    a.copy_(b)  # so that the next step has the same mask
                else:
                    assert torch.equal(a.float(), b), (name, pattern, rule, term, step)
    assert word == 0


TERMS = [Term(0.0, refine, decoupled) for refine, decoupled in product(("weight", "sign", "gradient"), (False, True))]


@job
def sgd_is_the_reference_bit_for_bit() -> None:
    compare(Rule(False), TERMS[0], SGD_NUMBERS, "2:4")
    compare(Rule(False, momentum=True), TERMS[3], SGD_NUMBERS, "2:4", steps=2)
    for term in TERMS:
        compare(Rule(False, momentum=True, nesterov=True), term, SGD_NUMBERS, "2:4", steps=2)
    compare(Rule(False, momentum=True), TERMS[0], (*SGD_NUMBERS[:4], -1.0, *SGD_NUMBERS[5:]), "2:4", steps=2)


@job
def every_pattern_and_layout() -> None:
    for pattern in ("1:2", "3:4", "4:8", "1:16", "16:32", "5:12", "4:4"):
        compare(Rule(False, momentum=True), TERMS[0], SGD_NUMBERS, pattern)


@job
def other_types_are_rounded_once() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        compare(Rule(False, momentum=True), TERMS[0], (1.0, 0.0, 0.0, 1.0, 1.0, 0.5, 1.0, 0.0, 0.0), "2:4", dtype)


@job
def adam_is_the_reference() -> None:
    compare(Rule(True), TERMS[0], ADAM_NUMBERS, "2:4")
    for term in TERMS:
        compare(Rule(True), term, ADAM_NUMBERS, "2:4", steps=2)
    compare(Rule(True), TERMS[0], (0.01, 0.125, 0.0, 0.5, -1.0, 0.6, 0.99, 1e-8, 3.0), "1:4", steps=2)  # weight decay into the gradient


@contextmanager
def stretches_of(weights: int) -> Iterator[None]:
    """Programs that work on fewer weights, so that small weights have several and a last one that is not full."""
    before, ways.STEP_WEIGHTS = ways.STEP_WEIGHTS, weights
    try:
        yield
    finally:
        ways.STEP_WEIGHTS = before


@job
def strided_groups_in_order() -> None:
    for pattern in ("1:2", "2:4", "4:8"):  # 2:4 has blocks for masks, but a step has too many numbers for them
        assert (9, Pattern(pattern).m) in ways.IN_ORDER
        with stretches_of(512 if pattern == "4:8" else 256):
            compare(Rule(False, momentum=True), TERMS[0], SGD_NUMBERS, pattern)
            compare(Rule(True), TERMS[0], ADAM_NUMBERS, pattern)
            squad, w = Squad(), exact(8, 2 * Pattern(pattern).m, 3, 3)
            launches = squad._ready([Grouping(Pattern(pattern))], [[w], [w.clone()]], "step")
            assert [launch.way.kind for launch in launches] == ["exchange"]
            before, word = w.clone(), torch.zeros(())
            settings = squad.settings(Rule(False), [SGD_NUMBERS], [None], [None], None, w.device)
            skips = torch.ones(())
            squad.step(Rule(False), TERMS[0], [[w], [w.clone()]], [Grouping(Pattern(pattern))], settings, None, skips, word, layout=1)
            assert torch.equal(w, before), "a skipped step writes nothing"


@job
def a_state_that_is_not_aligned_is_not_read_as_vectors() -> None:
    w, grouping = exact(8, 16), Grouping(Pattern("2:4"))
    for shift in (0, 1):
        state = torch.zeros(129)[shift : 128 + shift].view(8, 16)
        (launch,) = Squad()._ready([grouping], [[w], [w.clone()], [state]], "step")
        assert launch.constants["VECTOR"] == (shift == 0)


@job
def masks_with_special_values() -> None:
    """A step that only moves pruned weights says what the mask is."""
    values = torch.tensor([[0.0, -0.0, 2.0**100, -(2.0**100), 2.0**-100, 1.0, -1.0, 1.0] * 4])
    for pattern in ("1:2", "2:4", "2:8", "5:16"):
        grouping, w, word = Grouping(Pattern(pattern)), values.clone(), torch.zeros(())
        squad = Squad()
        settings = squad.settings(Rule(False), [(1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)], [None], [None], None, w.device)
        squad.step(Rule(False), TERMS[0], [[w], [torch.zeros_like(w)]], [grouping], settings, None, None, word, layout=1)
        assert torch.equal(w, torch.where(reference.mask(values, grouping), values, 0.0)), pattern


@job
def settings_made_on_the_device_are_those_of_the_host() -> None:
    numbers = [(0.1, 0.01, 0.02, 2e-4, -1.0, beta1, beta2, 1e-8, 0.0) for beta1, beta2 in ((0.9, 0.999), (0.0, 0.95), (0.5, 0.0))] * 30
    for rule, skips in ((Rule(True), None), (Rule(True), 0.0), (Rule(True), 1.0), (Rule(False, momentum=True), None)):
        lrs = [torch.tensor(0.125 * (i + 1)) for i in range(90)]
        counts = [torch.tensor(float(i * i)) for i in range(90)]
        found_inf = None if skips is None else torch.tensor(skips)
        made = Squad().settings(rule, numbers, lrs, counts if rule.adam else [None] * 90, found_inf, torch.device("cpu"))
        for i, row in enumerate(numbers):
            whole = finished(rule, (float(lrs[i]), *row[1:8], i * i + 1.0))
            used = 11 if rule.adam else 7
            torch.testing.assert_close(made[i][:used], torch.tensor(whole)[:used], rtol=2e-7, atol=0)
            assert counts[i] == i * i + (rule.adam and not skips), "a skipped step is not counted"
    mixed = Squad().settings(Rule(True), [(*numbers[0][:8], 7.0)], [torch.tensor(0.5)], [None], None, torch.device("cpu"))
    torch.testing.assert_close(mixed[0], torch.tensor(finished(Rule(True), (0.5, *numbers[0][1:8], 7.0))), rtol=2e-7, atol=0)


# ---- a method attached ----


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


if __name__ == "__main__":
    for name in sys.argv[1:] or list(JOBS):
        try:
            JOBS[name]()
        except Exception:
            print("BREAKS", name, traceback.format_exc(), flush=True)
        else:
            print("holds", name, flush=True)
