"""`attach(..., fused=True)`: the term inside the optimizer's own pass gives what two passes give, and leaves alone what is not its own.

What needs Triton's kernels runs through its interpreter, in a process of its own (`fused_jobs.py`), once for all tests here;
tests/gpu/test_fused_cuda.py runs them on a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import nofm
from nofm.bulk import _EmptyCopies
from nofm.kernels import ops, reference
from nofm.kernels.layout import lie_alike
from nofm.kernels.multi import Fleet
from nofm.kernels.steps import Rule, Term
from nofm.masks import Grouping
from nofm.patterns import Pattern

SCRIPT = Path(__file__).with_name("fused_jobs.py")
FILES = [SCRIPT.with_name(f"fused_{part}_jobs.py") for part in ("kernel", "run", "edge")]
JOBS = [name for file in FILES for name in re.findall(r"^@job\ndef (\w+)", file.read_text(), re.MULTILINE)]


@pytest.fixture(scope="module")
def interpreted(request) -> str:
    """The output of all jobs that have been asked for."""
    ours = [item for item in request.session.items if getattr(item, "originalname", "") == "test_through_the_interpreter"]
    wanted = [item.callspec.params["job"] for item in ours]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("NOFM_KERNELS", None)
    result = subprocess.run([sys.executable, str(SCRIPT), *wanted], env=environment, capture_output=True, text=True, timeout=280)
    return result.stdout + result.stderr


@pytest.mark.parametrize("job", JOBS)
def test_through_the_interpreter(job, interpreted):
    assert f"holds {job}\n" in interpreted, interpreted[interpreted.find(f"BREAKS {job}") :][:4000]


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 8, bias=False)

    def forward(self, step: int) -> torch.Tensor:
        return self.layer(torch.randn(4, 32, generator=torch.Generator().manual_seed(step))).square().sum()


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, Rule(False)),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}, Rule(False, momentum=True)),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, Rule(False, momentum=True, nesterov=True)),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, "maximize": True}, Rule(True)),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.01}, Rule(True)),
}


@pytest.mark.parametrize("placement", ["gradient", "decoupled"])
@pytest.mark.parametrize("refine", ["weight", "sign", "gradient"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_reference_is_torch_and_the_usual_way_bit_for_bit(name, refine, placement):
    make, options, rule = OPTIMIZERS[name]
    model = Counted()
    nofm.sparsify_(model, "2:4", preset="all")
    optimizer = make(model.parameters(), foreach=False, **options)
    nofm.attach(nofm.SRSTE(decay=0.05, refine=refine, placement=placement), model, optimizer)
    weight = model.layer.weight.detach().clone()
    states, term = [torch.zeros_like(weight) for _ in rule.states], Term(0.05, refine, placement == "decoupled")
    decay, lr, sign = options.get("weight_decay", 0.0), options["lr"], -1.0 if options.get("maximize") else 1.0
    for step in range(1, 6):
        optimizer.zero_grad()
        model(step).backward()
        grad = model.layer.weight.grad.clone()
        optimizer.step()
        if rule.adam:
            numbers = (lr, 0.0 if name == "adamw" else decay, decay if name == "adamw" else 0.0, 0.05, sign, 0.9, 0.999, 1e-8, float(step))
        else:
            numbers = (lr, decay, 0.0, 0.05, sign, options.get("momentum", 0.0), 1 - options.get("dampening", 0.0), 0.0, 0.0)
        reference.step_(rule, term, numbers, weight, grad, states, Grouping(Pattern("2:4")), first=step == 1)
        assert torch.equal(weight, model.layer.weight), step
        for state, kind in zip(states, rule.states, strict=True):
            assert torch.equal(state, optimizer.state[model.layer.weight][kind]), step


class Mine(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("method", "make", "message"),
    [
        (nofm.SRSTE(), lambda p: torch.optim.RMSprop(p), "fused=True knows the steps of torch.optim.SGD, Adam and AdamW, not of RMSprop"),
        (nofm.SRSTE(), lambda p: Mine(p, lr=0.1), "not of Mine"),
        (nofm.SRSTE(placement="backward"), lambda p: torch.optim.SGD(p, lr=0.1), "has none there; attach without it"),
        (nofm.STE(), lambda p: torch.optim.SGD(p, lr=0.1), r"STE\(\) has none there"),
    ],
    ids=["another optimizer", "a subclass", "backward", "no term"],
)
def test_what_cannot_be_fused_is_refused(method, make, message):
    model = Counted()
    nofm.sparsify_(model, "2:4", preset="all")
    with pytest.raises(nofm.OptimizerError, match=message):
        nofm.attach(method, model, make(model.parameters()), fused=True)
    nofm.attach(method, model, make(model.parameters()))  # nothing is left of the attempt


def test_one_optimizer_takes_one_fused_method():
    first, second = Counted(), Counted()
    for model in (first, second):
        nofm.sparsify_(model, "2:4", preset="all")
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    handle = nofm.attach(nofm.SRSTE(), first, optimizer, fused=True)
    with pytest.raises(nofm.OptimizerError, match="has a fused method attached already"):
        nofm.attach(nofm.SRSTE(), second, optimizer, fused=True)
    handle.detach()
    nofm.attach(nofm.SRSTE(), second, optimizer, fused=True)


def test_on_the_cpu_it_is_the_usual_way_and_says_so():
    runs = []
    for fused in (True, False):
        model = Counted()
        nofm.sparsify_(model, "2:4", preset="all")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = nofm.attach(nofm.SRSTE(decay=0.1), model, optimizer, fused=fused)
        model(0).backward()
        if fused:
            with pytest.warns(UserWarning, match=r"does not serve 1 of 1 .* layer.weight: Triton kernels run on CUDA tensors"):
                optimizer.step()
            assert list(handle.unfused) == ["layer.weight"]
        else:
            optimizer.step()
        runs.append(model.layer.weight)
    assert torch.equal(*runs)


@pytest.mark.parametrize(("kernel", "served"), [(1, True), (3, False)], ids=["1x1", "3x3"])
def test_strides_of_axes_of_size_one_say_nothing(kernel, served):
    """A convolution in channels_last whose gradient came contiguous."""
    weight = torch.randn(8, 16, kernel, kernel).to(memory_format=torch.channels_last)
    grad, grouping = torch.zeros(8, 16, kernel, kernel), Grouping(Pattern("2:4"))
    assert weight.stride() != grad.stride()
    assert lie_alike(weight, grad) == served
    others = ops.refine_all_(Fleet(), [weight], [grouping], [grad], [0.5], None, sign=False)
    assert others == ([] if served else [0])
    if served:
        assert torch.equal(grad, 0.5 * torch.where(reference.mask(weight, grouping), 0.0, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=["cast", "copy"])
def test_empty_copies_have_the_derivative_and_layout_of_copies_and_nothing_in_them(dtype, monkeypatch):
    weight = nn.Parameter(torch.randn(4, 8, 3, 3).to(memory_format=torch.channels_last))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: torch.full_like(*a, 7.0, **k))
    with _EmptyCopies():
        copied = weight.clone() if dtype is None else weight.to(dtype)
    assert (copied == 7).all(), "copied for nothing"
    assert copied.dtype == (dtype or torch.float32)
    assert copied.stride() == weight.stride()
    (copied * torch.arange(8.0).view(1, 8, 1, 1)).sum().backward()
    assert torch.equal(weight.grad, torch.arange(8.0).view(1, 8, 1, 1).expand_as(weight))
    with forward_ad.dual_level(), _EmptyCopies():
        dual = forward_ad.make_dual(weight, torch.ones_like(weight))
        tangent = forward_ad.unpack_dual(dual.clone() if dtype is None else dual.to(dtype)).tangent
    assert (tangent == 1).all(), "a tangent is no weight"
