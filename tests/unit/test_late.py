"""A pruning whose time has passed in the state that a run goes on from, by an option that was changed, is made up for in the next step;
and what has yet to be done is asked of the network, not of the clock alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nofm

GMP, ASP = nofm.GMP, nofm.ASP


def trained(method: nofm.Method, steps: int, pattern: str = "1:1", optimizers: int = 1) -> list:
    """A network after so many steps: model, optimizers and handle."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    nofm.sparsify_(model, pattern, preset="all")
    moved = [model] if optimizers == 1 else [model[0], model[2]]
    parts = [model, [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in moved]]
    parts.append(nofm.attach(method, *parts))
    train(parts, steps)
    return parts


def train(parts: list, steps: int) -> None:
    model, optimizers, _ = parts
    for _ in range(steps):
        model(torch.randn(8, 16)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def gone_on(saved: nofm.Method, steps: int, method: nofm.Method, pattern: str = "1:1", optimizers: int = 1) -> list:
    """A network of `method` that goes on from a state of `saved` after so many steps."""
    before, parts = (trained(each, number, pattern, optimizers) for each, number in ((saved, steps), (method, 0)))
    parts[0].load_state_dict(before[0].state_dict())
    for optimizer, saved_one in zip(parts[1], before[1], strict=True):  # or a first step that is skipped would leave momentum unwritten
        optimizer.load_state_dict(saved_one.state_dict())
    with pytest.warns(UserWarning, match=f"which holds from step {steps} on"):
        parts[2].load_state_dict(before[2].state_dict())
    return parts


def kept(parts: list) -> list[float]:
    return [site.kept() / site.weight.numel() for site in nofm.sites(parts[0])]


@pytest.mark.parametrize(("pool", "optimizers"), [("uniform", 1), ("uniform", 2), ("erk", 2), ("global", 1)])
def test_gmp_comes_to_its_sparsity_though_its_end_is_past(pool, optimizers):
    parts = gone_on(
        GMP(0.75, end_at=20, every=5, allocation=pool), 10, GMP(0.75, end_at=8, every=5, allocation=pool), optimizers=optimizers
    )
    model, _, handle = parts
    before = [site.mask() for site in nofm.sites(model)]
    assert sum(kept(parts)) / 2 > 0.25
    assert handle.unfinished == "GMP has taken 10 steps, and it comes to sparsity 0.75 in the next step (end_at=8 is past)"
    assert handle.phase is None, "a step unlike the others, which no CUDA graph may replay"
    train(parts, 1)
    assert sum(kept(parts)) / 2 == 0.25
    assert all(not (site.mask() & ~mask).any() for site, mask in zip(nofm.sites(model), before, strict=True)), "nothing comes back"
    assert (handle.unfinished, handle.phase) == ("", "frozen")


def test_gmp_waits_for_a_step_that_is_taken():
    """A fused optimizer under a gradient scaler skips inside its kernel."""
    parts = gone_on(GMP(0.75, end_at=20, every=5), 10, GMP(0.75, end_at=8, every=5))
    (optimizer,) = parts[1]
    optimizer.param_groups[0]["fused"], optimizer.found_inf = True, torch.tensor(1.0)
    train(parts, 1)
    assert kept(parts)[0] > 0.25
    assert parts[2].phase is None
    del optimizer.found_inf
    train(parts, 1)
    assert kept(parts) == [0.25, 0.25]


def test_gmp_that_has_come_to_its_sparsity_has_finished_whatever_its_end():
    parts = gone_on(GMP(0.75, end_at=4, every=2), 6, GMP(0.75, end_at=100, every=2))
    assert parts[2].unfinished == ""
    train(parts, 6)  # prunings of the new schedule, which would keep more
    assert kept(parts) == [0.25, 0.25]
    assert parts[2].unfinished == ""


def test_a_state_of_the_same_options_is_not_late():
    parts = trained(GMP(0.75, end_at=4, every=2), 6)
    parts[2].load_state_dict(parts[2].state_dict())
    assert parts[2].phase == "frozen"


def test_asp_prunes_in_the_next_step_and_the_host_runs_it():
    parts = gone_on(ASP(prune_at=50), 10, ASP(prune_at=5), "2:4")
    handle = parts[2]
    assert handle.unfinished == "ASP has taken 10 steps, and it prunes in the next step (prune_at=5 is past)"
    assert handle.phase is None
    with pytest.warns(UserWarning, match=r"does not write all zeros: ASP has taken 10 steps, and it prunes in the next step \(prune_at=5"):
        nofm.fold_(parts[0])
    parts = gone_on(ASP(prune_at=50), 10, ASP(prune_at=5), "2:4")
    train(parts, 1)
    assert [site.stored_mask is not None for site in nofm.sites(parts[0])] == [True, True]
    assert (parts[2].unfinished, parts[2].phase) == ("", "frozen")


def test_asp_that_has_pruned_prunes_no_more():
    assert gone_on(ASP(prune_at=5), 10, ASP(prune_at=50), "2:4")[2].unfinished == ""
    model, optimizers, handle = trained(ASP(), 3, "2:4")
    handle.detach()
    assert nofm.attach(ASP(prune_at=50), model, optimizers).unfinished == ""


def test_snip_says_that_it_has_not_pruned_where_nothing_had_a_gradient():
    _, optimizers, handle = trained(nofm.SNIP(0.5, batches=1), 0)
    with pytest.raises(nofm.OptimizerError, match=r"0\.weight had no gradient in the first batches"):
        optimizers[0].step()
    assert handle.unfinished.endswith("it prunes at step 1 (batches)")


def test_what_is_folded_can_still_be_asked():
    parts = trained(GMP(0.75, end_at=4, every=2), 6)
    nofm.fold_(parts[0])
    assert parts[2].unfinished == ""
