"""What optimizers remember elsewhere than torch's do: in their groups, and in an optimizer that they wrap.

A ticket that is taken back to a step must train on from there exactly as the first time, whatever the optimizer. Here nothing is pruned
away (8 of 8 weights are kept), and each step has a gradient of its own, so that the second training is the first one, bit for bit.
"""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import timm.optim
import torch
from accelerate import Accelerator
from torch import Tensor, nn

import nofm
from nofm.methods.inside import groups_of, optimizers_in, states_of

EVERY = 8
GRADS = torch.randn(EVERY + 1, 1, 8, generator=torch.Generator().manual_seed(0))


def layer() -> nn.Linear:
    torch.manual_seed(1)
    linear = nn.Linear(8, 1)
    nofm.sparsify_(linear, "1:1")
    return linear


class OwnLookahead(torch.optim.Optimizer):
    """As some others write it: what it adds is in a state and in groups of its own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {"count": 0, "lr": base.defaults["lr"]})
        self.parts = [base]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.parts[0].step()
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.detach().clone())
                if group["count"] % 3 == 0:
                    param.copy_(slow.lerp_(param, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"own": super().state_dict(), "base": self.parts[0].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["own"])
        self.parts[0].load_state_dict(state["base"])


class CountsFromNone(torch.optim.SGD):
    """Its groups begin with nothing, where others begin with 0 or without an entry, and it changes a pair of numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.25)
        for group in self.param_groups:
            group.update(seen=None, pair=(0, 1.0), note="not a number")

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] = (group["seen"] or 0) + 1
            group["pair"] = (group["pair"][0] + 1, group["pair"][1] / 2)
            for param in group["params"]:
                param.grad *= group["seen"] * group["pair"][1]
        super().step()


def lookahead(base: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return timm.optim.Lookahead(base, alpha=0.5, k=3)


OPTIMIZERS = {
    "lamb": lambda params: timm.optim.Lamb(params, lr=0.25),
    "adan": lambda params: timm.optim.Adan(params, lr=0.25),
    "lookahead of sgd": lambda params: lookahead(torch.optim.SGD(params, lr=0.25, momentum=0.5)),
    "lookahead of adamw": lambda params: lookahead(torch.optim.AdamW(params, lr=0.25)),
    "lookahead of lamb": lambda params: lookahead(timm.optim.Lamb(params, lr=0.25)),
    "lookahead of one's own": lambda params: OwnLookahead(timm.optim.Lamb(params, lr=0.25)),
    "counts from None": CountsFromNone,
}


def step(model: nn.Linear, optimizer: Any, number: int) -> list[Tensor]:
    optimizer.zero_grad()
    (model(GRADS[number]).sum() * (1 + number)).backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def reloaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("rewind_to", [0, 1, 4])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_second_training_is_the_first_one(make_optimizer, rewind_to):
    model = layer()
    optimizer = make_optimizer(model.parameters())
    nofm.attach(nofm.LotteryTicket(sparsity=0.01, rounds=2, every=EVERY, rewind_to=rewind_to), model, optimizer)
    first = {number: step(model, optimizer, number) for number in range(1, EVERY + 1)}
    del first[EVERY]  # whose weights are those of step `rewind_to` again
    for round_number in (1, 2):
        for number in range(rewind_to + 1, EVERY):
            again = step(model, optimizer, number)
            assert all(map(torch.equal, again, first[number])), f"round {round_number}, step {number}"
        step(model, optimizer, EVERY)


def test_behind_the_wrapper_of_accelerate():
    """Which hands its steps on, so that hooks are at the optimizer inside, and that one is a wrapper itself."""
    model = layer()
    wrapper = Accelerator(cpu=True).prepare(OPTIMIZERS["lookahead of lamb"](model.parameters()))
    nofm.attach(nofm.LotteryTicket(sparsity=0.01, rounds=1, every=EVERY, rewind_to=4), model, wrapper)
    first = [step(model, wrapper, number) for number in range(1, EVERY + 1)]
    for number in range(5, EVERY):
        assert all(map(torch.equal, step(model, wrapper, number), first[number - 1]))


@pytest.mark.parametrize("stops_at", range(EVERY + 3))
@pytest.mark.parametrize("rewind_to", [0, 2])
@pytest.mark.parametrize("name", ["lamb", "lookahead of adamw", "lookahead of one's own"])
def test_a_ticket_that_is_saved_anywhere_goes_on(name, rewind_to, stops_at):
    def begun():
        model = layer()
        optimizer = OPTIMIZERS[name](model.parameters())
        return model, optimizer, nofm.attach(method, model, optimizer)

    method = nofm.LotteryTicket(sparsity=0.01, rounds=1, every=EVERY, rewind_to=rewind_to)
    numbers = [*range(1, EVERY + 1), *range(rewind_to + 1, EVERY)]
    whole = begun()
    expected = [step(*whole[:2], number) for number in numbers]
    before, after = begun(), begun()
    for number in numbers[:stops_at]:
        step(*before[:2], number)
    states = reloaded([part.state_dict() for part in before])
    for part, state in zip(after, states, strict=True):
        part.load_state_dict(state)
    for number, weights in zip(numbers[stops_at:], expected[stops_at:], strict=True):
        assert all(map(torch.equal, step(*after[:2], number), weights))


@pytest.mark.parametrize("rewind_to", [0, 3])
def test_what_the_loop_sets_in_groups_is_the_loops(rewind_to):
    """A learning rate that a scheduler has set stays, and so does what somebody sets by hand, though both change from step to step."""
    model = layer()
    optimizer = OPTIMIZERS["lamb"](model.parameters())
    handle = nofm.attach(nofm.LotteryTicket(sparsity=0.01, rounds=1, every=EVERY, rewind_to=rewind_to), model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for number in range(1, EVERY + 1):
        optimizer.param_groups[0]["weight_decay"] = number / 100
        step(model, optimizer, number)
        if number < EVERY:
            scheduler.step()
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.25 / 2 ** (EVERY - 1), EVERY / 100)
    assert int(group.get("step", 0)) == rewind_to
    assert [name for name in handle.memory.tensors if name.startswith("rewind:0.0:")] == ["rewind:0.0:step"]


def test_a_loop_that_is_resumed_without_its_handle_is_told_behind_a_wrapper():
    model = layer()
    optimizer = OPTIMIZERS["lookahead of adamw"](model.parameters())
    step(model, optimizer, 1)
    nofm.attach(nofm.LotteryTicket(every=EVERY), model, optimizer)
    with pytest.warns(UserWarning, match="LotteryTicket begins at step 0, though its optimizer has taken steps before"):
        step(model, optimizer, 2)


@pytest.mark.parametrize("name", ["lookahead of adamw", "lookahead of one's own"])
def test_a_connection_that_grows_is_new_behind_a_wrapper(name):
    model = nn.Linear(64, 8)
    nofm.sparsify_(model, "1:1")
    optimizer = OPTIMIZERS[name](model.parameters())
    nofm.attach(nofm.SET(sparsity=0.5, every=5, drop=0.5), model, optimizer)
    kept = []
    for _ in range(5):
        kept.append(next(nofm.sites(model)).stored_mask.clone())
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
    grown = next(nofm.sites(model)).stored_mask & ~kept[-1]
    moments = [v for _, state in states_of(optimizer, model.weight) for v in state.values() if getattr(v, "shape", 0) == model.weight.shape]
    assert grown.any()
    assert len(moments) == 3  # two of Adam or Lamb, and slow weights
    assert not any(moment[grown].any() for moment in moments)


def test_after_snip_a_wrapped_optimizer_begins():
    model = layer()
    optimizer = OPTIMIZERS["lookahead of adamw"](model.parameters())
    nofm.attach(nofm.SNIP(sparsity=0.5, batches=2), model, optimizer)
    step(model, optimizer, 1)
    step(model, optimizer, 2)
    assert not optimizer._base_optimizer.state[model.weight]["exp_avg"].any()


def test_str_takes_its_thresholds_out_of_a_wrapped_optimizer_too():
    model = layer()
    optimizer = OPTIMIZERS["lookahead of adamw"](model.parameters())
    handle = nofm.attach(nofm.STR(initial=-3.0), model, optimizer)
    step(model, optimizer, 1)
    assert len(optimizer._base_optimizer.state) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle.detach()
    assert set(optimizer._base_optimizer.state) == set(model.parameters())


def test_an_optimizer_that_another_only_keeps_is_not_inside_it():
    model, other = layer(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.__dict__["kept"] = torch.optim.SGD(other.parameters(), lr=0.1)
    assert optimizers_in(optimizer) == [optimizer]
    wrapper = lookahead(copy.deepcopy(optimizer))
    assert optimizers_in(wrapper) == [wrapper, wrapper._base_optimizer]
    assert len(groups_of(wrapper)) == 1
