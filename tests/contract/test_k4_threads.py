"""K4 between threads: two forwards of one sparse layer at once would take each other's masked weights away. The second raises; what
it must never do is compute with dense weights, or leave a masked one behind. Threads are made to meet by events, not by sleeping."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from layer_oracle import assert_same, assert_weights_are_the_parameters, masked_twin
from torch import Tensor, nn

import nofm
from nofm.kernels import multi, ops
from nofm.masks import Grouping
from nofm.patterns import Pattern

_X = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))


class Waits(nn.Linear):
    """Stops in the middle of its forward until told to go on."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.gate: tuple[threading.Event, threading.Event] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            inside, go_on = self.gate
            self.gate = None  # only the first to come waits
            inside.set()
            assert go_on.wait(60)
        return super().forward(x)


def _one_thread() -> None:
    """For a pool: a new thread of Python's has sums made by as many threads as the environment says, whatever the first one was told, until
    torch's first loop in parallel; and sums in parts have other last bits."""
    torch.set_num_threads(1)


@contextmanager
def _while_in_forward(layer: Waits, call: Callable[[], Tensor]) -> Iterator[Future[Tensor]]:
    """Another thread is in the middle of `call`, inside `layer`."""
    inside, go_on = threading.Event(), threading.Event()
    layer.gate = inside, go_on
    with ThreadPoolExecutor(1, initializer=_one_thread) as pool:
        future = pool.submit(call)
        try:
            assert inside.wait(60)
            yield future
        finally:
            go_on.set()


def test_a_second_thread_in_the_same_layer_raises_and_the_first_is_right() -> None:
    torch.manual_seed(0)
    layer = Waits()
    twin = masked_twin(layer, {"weight": 1})
    nofm.sparsify_(layer, "2:4")
    teaches = pytest.raises(nofm.LayerError, match=r"SparseWaits is in forward in another thread, .* give each thread a copy, or fold_")
    with _while_in_forward(layer, lambda: layer(_X)) as first, teaches:
        layer(_X)
    assert_same(first.result(), twin(_X))
    assert_weights_are_the_parameters(layer)
    assert_same(layer(_X), twin(_X))


def _encoder_layer() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    layer.linear1 = Waits()
    twin = masked_twin(layer, {name: 1 for name, p in layer.named_parameters() if p.dim() == 2})
    nofm.sparsify_(layer, "2:4", preset="all")
    return layer, twin


@pytest.mark.parametrize(
    ("first_call", "second_call"),
    [
        (lambda layer: layer(_X), lambda layer: layer(_X)),
        (lambda layer: layer(_X), lambda layer: layer.linear1(_X)),
        (lambda layer: layer(_X), lambda layer: layer.linear2(_X)),
        (lambda layer: layer(_X), lambda layer: layer.self_attn(_X, _X, _X)),
        (lambda layer: layer.linear1(_X), lambda layer: layer(_X)),
    ],
    ids=["unit-unit", "unit-child", "unit-other-child", "unit-inner-unit", "child-unit"],
)
def test_threads_that_meet_in_a_unit(first_call: Any, second_call: Any) -> None:
    layer, twin = _encoder_layer()
    raises = pytest.raises(nofm.LayerError, match="in another thread")
    with _while_in_forward(layer.linear1, lambda: first_call(layer)) as first, raises:
        second_call(layer)
    assert_same(first.result(), first_call(twin))
    assert_weights_are_the_parameters(layer)
    assert_same(layer(_X), twin(_X))


def test_threads_in_different_layers_do_not_meet() -> None:
    layer, twin = _encoder_layer()
    with _while_in_forward(layer.linear1, lambda: layer.linear1(_X)) as first:
        assert_same(layer.linear2(_X), twin.linear2(_X))
    assert_same(first.result(), twin.linear1(_X))


def test_many_threads_each_get_the_right_result_or_the_error() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    twin = masked_twin(layer, {"weight": 1})
    expected = twin(_X)
    nofm.sparsify_(layer, "2:4")

    def attempt(_: int) -> bool:
        try:
            assert_same(layer(_X), expected)
        except nofm.LayerError:
            return False
        return True

    with ThreadPoolExecutor(4, initializer=_one_thread) as pool:
        assert any(pool.map(attempt, range(400)))
    assert_weights_are_the_parameters(layer)


_MANY = """
import gc, sys
from concurrent.futures import ThreadPoolExecutor
import torch, nofm
sys.setswitchinterval(1e-6)
gc.set_threshold(20)
x = torch.randn(4, 16)
for _ in range(30):
    layer = torch.nn.Linear(16, 16)
    nofm.sparsify_(layer, "2:4")
    def attempt(_):
        garbage = [torch.zeros(1)]
        garbage.append(garbage)
        try:
            layer(x)
        except nofm.LayerError:
            pass
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attempt, range(300)))
"""


def test_threads_never_wait_for_each_other_for_ever() -> None:
    """Python's lock and those of a parameter and of the list of threads could be asked for in two orders. A process of its own, since one
    that hangs cannot be ended from within; it takes three seconds."""
    subprocess.run([sys.executable, "-c", _MANY], check=True, timeout=90)


def test_threads_with_two_views_of_a_weight_do_not_plan_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is stopped while it plans how to walk the weight, the other walks its transpose meanwhile, and again afterwards."""
    w, grouping = torch.randn(16, 16), Grouping(Pattern("2:4"), 1)
    inside, go_on, first = threading.Event(), threading.Event(), threading.get_ident()
    real = multi._plan

    def pausing(*args: Any) -> Any:
        if threading.get_ident() != first:
            inside.set()
            assert go_on.wait(60)
        return real(*args)

    def strides(view: Tensor, out: Tensor) -> list[int]:
        return [launch.stride for launch in ops._fleet_of(view, grouping)._ready([grouping], [[view], [out]], "masked")]

    monkeypatch.setattr(multi, "_plan", pausing)
    outs = [torch.empty_like(w) for _ in range(3)]  # alive together, so that no address comes twice
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(strides, w, outs[0])
        try:
            assert inside.wait(60)
            assert strides(w.t(), outs[1].t()) == [16]
        finally:
            go_on.set()
        assert future.result() == [1]
    assert strides(w.t(), outs[2].t()) == [16]


def test_a_fork_masks_large_weights_too() -> None:
    """A forked data loader or server has the pool of threads that its parent made, but not the threads."""
    code = (
        "import os, signal, torch; torch.set_num_threads(2)\n"
        "from nofm.kernels import cpu, ops; from nofm.masks import Grouping; from nofm.patterns import Pattern\n"
        "w, grouping = torch.randn(1024, 1024), Grouping(Pattern('2:4'))\n"
        "for _ in range(500):  # until the pool has all its threads: with one to come, a fork would do with that\n"
        "    expected = ops.mask(w, grouping)\n"
        "    if len(cpu._pool()._threads) == 2: break\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    os._exit(0 if torch.equal(ops.mask(w, grouping), expected) else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
