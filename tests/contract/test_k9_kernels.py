"""K9: every fast path to a mask gives what the oracle gives, and what training by it gives is what plain torch gives.

The C kernels run here as they are; the Triton kernels through Triton's interpreter, in a process of their own; tests/gpu runs them
on a GPU.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import nofm
from nofm.kernels import cpu, ops, reference
from nofm.kernels.select import choose, explain, use
from nofm.masks import Grouping
from nofm.patterns import Pattern

PATTERNS = ("1:2", "2:4", "1:4", "3:4", "4:8", "2:8", "1:16", "8:16", "16:32", "5:12", "3:3", "40:64")


def weights(m: int) -> dict[str, tuple[torch.Tensor, int]]:
    torch.manual_seed(m)

    def tied(*shape: int) -> torch.Tensor:
        w = torch.randn(shape)
        w = torch.where(torch.rand(shape) < 0.5, (w * 2).round() / 2, w)
        w.view(-1)[::97], w.view(-1)[1::89], w.view(-1)[2::61] = -0.0, 1e-40, 3.4e38
        return w

    return {
        "linear": (tied(37, 6 * m), 1),
        "one group": (tied(1, m), 1),
        "conv": (tied(7, 3 * m, 3, 3), 1),
        "conv channels_last": (tied(7, 3 * m, 3, 3).to(memory_format=torch.channels_last), 1),
        "transposed": (tied(3 * m, 131).t(), 1),
        "transposed conv": (tied(2 * m, 5, 2, 2), 0),
        "many groups": (tied(300_000 // m, m), 1),
    }


@pytest.mark.parametrize("pattern", PATTERNS)
def test_c_kernels_are_the_oracle_bit_for_bit(pattern):
    n, m = Pattern(pattern).n, Pattern(pattern).m
    for name, (w, axis) in weights(m).items():
        grouping = Grouping(Pattern(pattern), axis)
        expected = reference.mask(w, grouping)
        assert choose(w, grouping) == "cpu", name
        assert torch.equal(ops.mask(w, grouping), expected), name
        seen = ops.masked(w, grouping)
        assert torch.equal(seen, torch.where(expected, w, 0.0)), name
        assert not torch.signbit(seen[~expected]).any(), name
        assert seen.stride() == w.stride(), name
        for sign in (False, True):
            out = torch.randn_like(w)
            term = torch.where(expected, 0.0, w.sign() if sign else w)
            plain = out.add(term, alpha=0.3)  # no power of two: it matters whether the product is rounded by itself
            cpu.refine_(w, out, 0.3, sign, n, m, w.stride(axis))
            assert torch.equal(out, plain), name
        moved = w.clone(memory_format=torch.preserve_format)
        cpu.refine_(moved, moved, -0.5, False, n, m, w.stride(axis))
        assert torch.equal(moved, w - 0.5 * torch.where(expected, 0.0, w)), "also onto the weight itself"


@pytest.mark.parametrize("threads", [1, 3])
def test_c_kernels_in_threads(threads):
    w, grouping = torch.randn(2048, 512), Grouping(Pattern("2:4"))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(ops.mask(w, grouping), reference.mask(w, grouping))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_weights_in_one_call_of_c_are_the_oracle(threads, monkeypatch):
    monkeypatch.setattr(cpu, "_WEIGHTS_OF_A_TASK", 500)  # so that tasks end inside weights, and weights inside tasks
    torch.manual_seed(threads)
    chosen = [((40, 16), "2:4"), ((6, 16, 3, 3), "1:16"), ((1, 4), "1:4"), ((300, 8), "4:8"), ((8, 32), "1:2")]
    ws = [torch.randn(shape).mul(4).round() for shape, _ in chosen]
    groupings = [Grouping(Pattern(text)) for _, text in chosen]
    masks = [reference.mask(w, g) for w, g in zip(ws, groupings, strict=True)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shapes = [(w.numel() // g.pattern.m, g.pattern.n, g.pattern.m, w.stride(1)) for w, g in zip(ws, groupings, strict=True)]
        jobs = cpu.Jobs([w.data_ptr() for w in ws], shapes)
    finally:
        torch.set_num_threads(before)
    outs, grads = [torch.full_like(w, 7.0) for w in ws], [torch.ones_like(w) for w in ws]
    jobs.masked([out.data_ptr() for out in outs])
    jobs.refine([grad.data_ptr() for grad in grads], [0.5, 1.0, 2.0, 4.0, 8.0], sign=False)
    for i, (w, mask) in enumerate(zip(ws, masks, strict=True)):
        assert torch.equal(outs[i], torch.where(mask, w, 0.0))
        assert torch.equal(grads[i], 1 + 0.5 * 2**i * torch.where(mask, 0.0, w))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_the_largest_magnitude_in_c_sees_what_is_not_finite(value):
    ws = [torch.full((3, 5), 3e38), torch.zeros(2, 7, 3, 3), torch.ones(1)]
    largest = cpu.Largest(ws)
    assert largest.find() == ws[0][0, 0].item()
    for w in ws:
        w.view(-1)[-1] = value
        assert not math.isfinite(largest.find())
        w.zero_()


def test_what_is_kept_from_step_to_step_follows_the_optimizer():
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False)
    nofm.sparsify_(layer, "2:4", preset="all")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    nofm.attach(nofm.SRSTE(decay=0.25, placement="decoupled"), layer, optimizer)
    for lr, maximize in ((1.0, False), (0.5, False), (0.5, True), (0.25, False)):
        optimizer.param_groups[0].update(lr=lr, maximize=maximize)
        before = layer.weight.detach().clone()
        layer.weight.grad = torch.zeros(8, 8)
        optimizer.step()
        pruned = ~reference.mask(before, Grouping(Pattern("2:4")))
        torch.testing.assert_close(layer.weight.detach(), before - lr * 0.25 * torch.where(pruned, before, 0.0))


class Interrupted(nn.Sequential):
    stop = False

    def forward(self, x):
        x = self[0](x)
        if self.stop:
            self.stop = False
            raise KeyboardInterrupt  # torch calls no hooks after it
        return self[1](x)


def test_masked_weights_of_an_interrupted_forward_are_not_used_again():
    torch.manual_seed(0)
    model = Interrupted(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    nofm.sparsify_(model, "2:4", preset="all")
    model.stop = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(2, 8))
    with torch.no_grad():
        for layer in model:
            layer._parameters["weight"].normal_()
    x = torch.randn(2, 8)
    expected = x
    for layer in model:
        w = layer._parameters["weight"].detach()
        expected = expected @ torch.where(reference.mask(w, Grouping(Pattern("2:4"))), w, 0.0).T
    torch.testing.assert_close(model(x), expected)
    assert all("weight" not in layer.__dict__ for layer in model)


class Notes(nn.Linear):
    """A layer that notes whether its masked weight was there before its forward began."""

    def forward(self, x):
        self.placed = "_nofm_made" in self.__dict__
        return super().forward(x)


def _hooked_network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 16, 3), nn.Flatten(), nn.Sequential(Notes(64, 16), nn.Tanh()), nn.Linear(16, 4))
    nofm.sparsify_(model, {"0": "1:4", "2.0": "2:8"})
    model(torch.randn(3, 4, 4, 4))  # a plan is made, which must not outlive its reasons
    return model


_HOOKS = {  # where a hook hangs, and whether the second layer's masked weight is still made with all others
    "none": (lambda model, hook: None, True),
    "on a neighbour": (lambda model, hook: model[1].register_forward_hook(hook), True),
    "on the layer": (lambda model, hook: model[2][0].register_forward_pre_hook(hook), False),
    "above the layer": (lambda model, hook: model[2].register_forward_pre_hook(hook), False),
    "on the model, after ours": (lambda model, hook: model.register_forward_pre_hook(hook), False),
    "on the model, before ours": (lambda model, hook: model.register_forward_pre_hook(hook, prepend=True), True),
    "on all modules": (lambda model, hook: nn.modules.module.register_module_forward_pre_hook(hook), False),
}


@pytest.mark.parametrize("where", _HOOKS)
def test_a_small_model_on_the_cpu_is_masked_in_one_call_and_learns_as_its_layers_would(where):
    hang, stays = _HOOKS[where]
    results = []
    for whole in (True, False):
        model = _hooked_network()
        layer, seen = model[2][0], []
        handle = hang(model, lambda *args, layer=layer, seen=seen: seen.append(layer.weight))
        x = torch.randn(3, 4, 4, 4)
        for part in (model,) if whole else model:
            x = part(x)
        if handle is not None:
            handle.remove()
        x.square().sum().backward()
        assert layer.placed == (whole and stays)
        assert all(weight is layer._parameters["weight"] for weight in seen), "a hook sees the dense weight"
        assert bool(seen) == (where != "none" and (whole or "on the model" not in where))
        results.append([x, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_model_that_is_being_narrowed_is_masked_in_one_call_too():
    """Stage by stage, 2:8 by way of 6, 4 and 3 of 8, and with the weights that its layers would have come to."""
    results = []
    for whole in (True, False):
        model = _hooked_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        nofm.attach(nofm.SRSTE(decay=0.1, ramp_at=1, begin_at=7), model, optimizer)
        placed = []
        for number in range(9):
            optimizer.zero_grad()
            x = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(number))
            for part in (model,) if whole else model:
                x = part(x)
            placed.append(model[2][0].placed)
            x.square().sum().backward()
            optimizer.step()
        assert placed == ([False] + [True] * 8 if whole else [False] * 9), "the first step is dense"
        results.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("where", ["on the layer", "above the layer", "on the model, after ours", "on the model, before ours"])
def test_a_weight_that_a_hook_has_changed_is_masked_as_it_is_now(where):
    model = _hooked_network()
    layer, changed = model[2][0], torch.randn(16, 64)

    def change(*_: object) -> None:
        layer.weight.data.copy_(changed)

    _HOOKS[where][0](model, change)
    x = torch.randn(3, 4, 4, 4)
    hidden = model[1](model[0](x))
    seen = torch.where(reference.mask(changed, Grouping(Pattern("2:8"))), changed, 0.0)
    expected = model[3](torch.tanh(nn.functional.linear(hidden, seen, layer.bias)))
    torch.testing.assert_close(model(x), expected)
    assert torch.equal(layer.weight, changed)


@pytest.mark.parametrize("refine", ["weight", "sign", "gradient"])
@pytest.mark.parametrize("optimizer_kind", [torch.optim.SGD, torch.optim.AdamW])
def test_training_by_the_c_kernels_is_training_by_plain_torch_bit_for_bit(refine, optimizer_kind):
    results = []
    for path in ("cpu", "torch"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 32), nn.Linear(32, 4))
        with use(path):
            nofm.sparsify_(model, {"1": "2:8", "3": "1:16"})
            optimizer = optimizer_kind(model.parameters(), lr=0.01)
            nofm.attach(nofm.SRSTE(decay=0.1, refine=refine), model, optimizer)
            for step in range(10):
                optimizer.zero_grad()
                model(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_triton_kernels_are_the_oracle_in_the_interpreter():
    script = Path(__file__).with_name("k9_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("NOFM_KERNELS", None)
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(i), "2"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    printed = [process.communicate(timeout=280) for process in started]
    for process, (out, err) in zip(started, printed, strict=True):
        assert process.returncode == 0, out[-2000:] + err[-4000:]
    lines = [line for out, _ in printed for line in out.splitlines()]
    compiled = 0 if torch.__version__.startswith("2.11.") else 3  # see there
    assert sum(line.startswith("compared") for line in lines) >= 33 + 8 + 7 + 3 + 2 + compiled, lines


@pytest.mark.parametrize(
    ("weight", "pattern", "path"),
    [
        (torch.zeros(4, 8), "2:4", "cpu"),
        (torch.zeros(4, 8, dtype=torch.float64), "2:4", "torch"),
        (torch.zeros(4, 8, dtype=torch.bfloat16), "2:4", "torch"),
        (torch.zeros(4, 16)[:, ::2], "2:4", "torch"),
        (torch.zeros(4, 130), "1:65", "torch"),
        (torch.zeros(4, 8, device="meta"), "2:4", "torch"),
        (torch.zeros(0, 8), "2:4", "torch"),
    ],
    ids=["fp32", "fp64", "bf16", "gaps", "large-m", "meta", "empty"],
)
def test_select(weight, pattern, path):
    assert choose(weight, Grouping(Pattern(pattern))) == path


def test_forcing_a_path(monkeypatch):
    w, grouping = torch.randn(4, 8), Grouping(Pattern("2:4"))
    with use("torch"):
        assert choose(w, grouping) == "torch"
        with use("cpu"):
            assert choose(w, grouping) == "cpu"
    monkeypatch.setenv("NOFM_KERNELS", "torch")
    assert choose(w, grouping) == "torch"
    monkeypatch.setenv("NOFM_KERNELS", "cuda")
    with pytest.raises(nofm.NofmError, match="NOFM_KERNELS='cuda' is not one of triton, cpu, torch"):
        choose(w, grouping)
    monkeypatch.delenv("NOFM_KERNELS")
    with use("cpu"), pytest.raises(nofm.NofmError, match=r"cannot serve this weight: the C kernels take fp32, not torch\.float64"):
        choose(w.double(), grouping)


def test_explain_says_which_path_and_why():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double(), nn.Linear(8, 8))
    nofm.sparsify_(model, {"0": "2:4", "1": "2:4"})
    first, second = explain(nofm.sites(model)).splitlines()
    assert first.split() == ["0", "2:4", "cpu"]
    assert second.endswith("torch    the C kernels take fp32, not torch.float64")


def test_without_a_compiler_plain_torch_serves(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    cpu._library.cache_clear()
    try:
        w, grouping = torch.randn(4, 8), Grouping(Pattern("2:4"))
        assert "no-such-compiler" in (cpu.unavailable() or "")
        assert choose(w, grouping) == "torch"
        assert torch.equal(ops.mask(w, grouping), reference.mask(w, grouping))
    finally:
        cpu._library.cache_clear()
