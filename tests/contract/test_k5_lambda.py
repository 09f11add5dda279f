"""K5: the lambda that acts is the lambda that was asked for, however a step is made.

Lambda is measured (`lambda_cells`) in every combination of processes, micro-batches, loss scale, uses of a weight in a forward,
optimizer, fused kernels and placement. The placement of the code released with the paper is measured too: it must be wrong by
the known factors, or it would not reproduce that code's numbers. Cells of two processes all run in one pair of them.
"""

from __future__ import annotations

import copy
import functools

import lambda_cells
import pytest
import torch
import two_ranks
from lambda_cells import Cell
from torch import nn

import nofm

TOLERANCE = 1e-6

# What the released placement multiplies lambda by.
RELEASED = {
    "as written": (Cell(placement="backward"), 1.0),
    "sign": (Cell(placement="backward", refine="sign"), 1.0),
    "4 micro-batches": (Cell(placement="backward", micro_batches=4), 4.0),
    "called 12 times": (Cell(placement="backward", uses=12), 12.0),
    "both": (Cell(placement="backward", micro_batches=4, uses=12), 48.0),
    "loss scale 2^16": (Cell(placement="backward", scale=2.0**16), 2.0**-16),
    "loss scale 2^16, fused": (Cell(placement="backward", scale=2.0**16, fused=True), 2.0**-16),
    "adamw, 4 micro-batches": (Cell("adamw", placement="backward", micro_batches=4), 4.0),
}
RELEASED_ON_TWO = {
    "averaged over 2 ranks": (Cell(placement="backward"), 1.0),
    "summed over 2 ranks": (Cell(placement="backward", sums_over_ranks=True), 2.0),
}

OURS_ON_ONE = [cell for cell in lambda_cells.exact_cells() if not cell.sums_over_ranks]
OURS_ON_TWO = lambda_cells.exact_cells()


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[Cell, float]]:
    cells = [*OURS_ON_TWO, *(cell for cell, _ in RELEASED_ON_TWO.values())]
    results = two_ranks.run({"cells": functools.partial(lambda_cells.measure_all, cells)})
    two_ranks.assert_all_ran(results)
    return results["cells"]


@pytest.mark.parametrize("cell", OURS_ON_ONE, ids=str)
def test_lambda_is_exact_in_one_process(cell):
    assert lambda_cells.measure(cell) == pytest.approx(1.0, rel=TOLERANCE)


@pytest.mark.parametrize("cell", OURS_ON_TWO, ids=str)
def test_lambda_is_exact_on_two_ranks(cell, on_two_ranks):
    assert [ratios[cell] for ratios in on_two_ranks] == pytest.approx([1.0, 1.0], rel=TOLERANCE)


@pytest.mark.parametrize("refine", ["weight", "sign"])
@pytest.mark.parametrize("uses", [1, 12])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_lambda_is_exact_where_the_released_code_is_farthest_off(refine, uses, micro_batches):
    cell = Cell(refine=refine, uses=uses, micro_batches=micro_batches, scale=2.0**16)
    assert lambda_cells.measure(cell) == pytest.approx(1.0, rel=TOLERANCE)


@pytest.mark.parametrize(("cell", "factor"), RELEASED.values(), ids=RELEASED)
def test_the_released_placement_is_off_by_its_factor(cell, factor):
    assert lambda_cells.measure(cell) == pytest.approx(factor, rel=TOLERANCE)


@pytest.mark.parametrize(("cell", "factor"), RELEASED_ON_TWO.values(), ids=RELEASED_ON_TWO)
def test_the_released_placement_is_off_by_its_factor_on_two_ranks(cell, factor, on_two_ranks):
    assert [ratios[cell] for ratios in on_two_ranks] == pytest.approx([factor, factor], rel=TOLERANCE)


# ---- a step that a gradient scaler skips ----


def scaled_backward(model: nn.Module, scaler: torch.amp.GradScaler, x: torch.Tensor) -> None:
    model.zero_grad()
    scaler.scale(model(x).square().mean()).backward()


OPTIMIZERS = {
    "sgd": lambda params, fused: torch.optim.SGD(params, lr=0.5, momentum=0.9, fused=fused),
    "adamw": lambda params, fused: torch.optim.AdamW(params, lr=0.01, fused=fused),
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("unscale_first", [False, True], ids=["step unscales", "user unscales"])
@pytest.mark.parametrize(
    "method",
    [
        nofm.SRSTE(0.1),
        nofm.SRSTE(0.1, placement="decoupled"),
        nofm.SRSTE(0.1, refine="gradient"),
        nofm.SRSTE(0.1, refine="gradient", placement="decoupled"),  # its term is Inf where the gradient is
        nofm.ASP(prune_at=2),
    ],
    ids=["gradient", "decoupled", "eq 6", "eq 6 decoupled", "asp"],
)
def test_a_skipped_step_leaves_no_trace(method, make_optimizer, fused, unscale_first):
    """Three steps, the second with an Inf in the gradient, are the two steps without it."""
    torch.manual_seed(0)
    start = nn.Linear(16, 8, dtype=torch.float64)
    start.weight.data[0, 0] = -0.0  # even the sign of a zero stays
    nofm.sparsify_(start, "2:4")
    x = torch.randn(4, 16, dtype=torch.float64)
    ends = {}
    for bad_steps in (0, 1):
        model = copy.deepcopy(start)
        optimizer = make_optimizer(model.parameters(), fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        handle = nofm.attach(method, model, optimizer)
        for bad in [False, *[True] * bad_steps, False]:
            scaled_backward(model, scaler, x)
            if bad:
                model.weight.grad[:, 3] = torch.inf
            if unscale_first:
                scaler.unscale_(optimizer)
            before, steps = model.weight.detach().clone(), handle.step
            scaler.step(optimizer)
            scaler.update()
            assert handle.step == steps + (not bad)
            assert torch.equal(model.weight.view(torch.int64), before.view(torch.int64)) == bad
        ends[bad_steps] = model.weight.detach()
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-12, atol=0)


def test_a_fused_step_under_a_scaler_in_which_nothing_has_a_gradient():
    model = nn.Linear(8, 8)
    nofm.sparsify_(model, "2:4")
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cpu")
    nofm.attach(nofm.SRSTE(), model, optimizer)
    scaler.scale(torch.ones(()))
    before = model.weight.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("placement", ["gradient", "decoupled"])
def test_lambda_stays_exact_over_many_steps_and_changing_scales(placement):
    """Two hundred steps of momentum under a scale that doubles every third step end where unscaled ones do."""
    torch.manual_seed(0)
    start = nn.Linear(16, 8, dtype=torch.float64)
    nofm.sparsify_(start, "2:4")
    ends = {}
    for scaled in (False, True):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=3, enabled=scaled)
        nofm.attach(nofm.SRSTE(0.01, placement=placement), model, optimizer)
        generator = torch.Generator().manual_seed(1)
        for _ in range(200):
            x = torch.randn(8, 16, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            scaler.scale((model(x) - x[:, :8]).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        ends[scaled] = model.weight.detach()
    torch.testing.assert_close(ends[True], ends[False], rtol=1e-9, atol=1e-12)
