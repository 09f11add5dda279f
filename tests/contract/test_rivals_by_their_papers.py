"""The rivals beside a second writing of each, from the update rules of their papers in plain torch: masks and weights after every step.

The second writing knows nothing of nofm: a dense twin of the network, whose forward is given the weights that the rule says, and an
ordinary optimizer. It steps as the first does, with several groups, clipping and accumulation. What is random in a method (the first
connections of RigL and SNFS) is taken over from nofm; the methods that draw later are tested by hand (`test_rewiring_by_hand`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nofm

SPARSITY = 0.8
STEPS = 32


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.grouped, self.up = nn.Conv2d(8, 16, 3, padding=1, groups=2), nn.ConvTranspose2d(16, 8, 2)
        self.middle, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.norm(self.first(x)).relu()).relu()
        return self.head(self.middle(self.up(x).relu().mean((2, 3))).relu())


def groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if p.dim() > 1 and "head" not in name], "lr": lr, "weight_decay": 1e-3},
        {"params": [p for name, p in named if p.dim() > 1 and "head" in name], "lr": lr / 3, "weight_decay": 2e-3},
        {"params": [p for name, p in named if p.dim() == 1], "lr": lr / 2, "weight_decay": 0.0},
    ]


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(groups(model, 0.05), momentum=0.9, nesterov=True),
    "adamw": lambda model: torch.optim.AdamW(groups(model, 0.003), eps=1e-3),  # some gradients before a norm layer are rounding alone
}


def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Two micro-batches in every other step."""
    generator = torch.Generator().manual_seed(step)
    for _ in range(1 + step % 2):
        yield torch.randn(8, 4, 5, 5, generator=generator), torch.randint(4, (8,), generator=generator)


def largest(scores: list[Tensor], counts: list[int], among: list[Tensor]) -> list[Tensor]:
    """The largest magnitudes of each tensor, or of all together where there is one count; the first among equals."""
    if len(counts) < len(scores):
        joined = largest([torch.cat([s.flatten() for s in scores])], counts, [torch.cat([a.flatten() for a in among])])[0]
        return [part.view_as(s) for part, s in zip(joined.split([s.numel() for s in scores]), scores, strict=True)]
    masks = []
    for score, count, inside in zip(scores, counts, among, strict=True):
        order = torch.where(inside, score.abs(), -1.0).flatten().argsort(descending=True, stable=True)
        mask = torch.zeros(score.numel(), dtype=torch.bool)
        mask[order[:count]] = True
        masks.append(mask.view_as(score))
    return masks


def in_proportion(total: int, parts: list[float], rooms: list[int]) -> list[int]:
    """Whole numbers that add up to `total`: shares rounded down, what is left to those that lost most; what is full leaves the rest."""
    full: set[int] = set()
    while True:
        left, open_ = total - sum(rooms[i] for i in full), [i for i in range(len(parts)) if i not in full]
        unit = left / sum(parts[i] for i in open_)
        if not (more := {i for i in open_ if unit * parts[i] >= rooms[i]}):
            break
        full |= more
    exact = [rooms[i] if i in full else unit * part for i, part in enumerate(parts)]
    counts = [int(share) for share in exact]
    for i in sorted(range(len(parts)), key=lambda i: counts[i] - exact[i])[: total - sum(counts)]:
        counts[i] += 1
    return counts


# ---- the rules ----


class Rule:
    """Dense training of the weights `names`; each method says what it does otherwise."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, masks: dict[str, Tensor]) -> None:
        self.model, self.optimizer, self.number = model, optimizer, 0
        self.all = dict(model.named_parameters())
        self.weights = {name: self.all[name] for name in masks}
        self.masks = {name: torch.ones_like(mask) for name, mask in masks.items()}
        with torch.no_grad():
            self.start(masks)

    def start(self, masks: dict[str, Tensor]) -> None: ...

    def seen(self, name: str) -> Tensor:
        return torch.where(self.masks[name], self.weights[name].detach(), 0.0)

    def gradient(self, name: str, grad: Tensor) -> Tensor:
        return torch.where(self.masks[name], grad, 0.0)

    def before(self) -> None: ...

    def after(self) -> None:
        self.prune()

    def prune(self, masks: list[Tensor] | None = None) -> None:
        self.masks = self.masks if masks is None else dict(zip(self.masks, masks, strict=True))
        for name, weight in self.weights.items():
            weight.masked_fill_(~self.masks[name], 0.0)

    def budget(self, allocation: str) -> list[int]:
        sizes = [weight.numel() for weight in self.weights.values()]
        total = round((1 - SPARSITY) * sum(sizes))
        sums: list[float] = [sum(weight.shape) for weight in self.weights.values()]
        return [total] if allocation == "global" else in_proportion(total, sums if allocation == "erk" else list(sizes), sizes)

    def tops(self, scores: list[Tensor], counts: list[int]) -> list[Tensor]:
        return largest(scores, counts, list(self.masks.values()))

    def rooms(self, counts: list[int]) -> list[int]:
        sizes = [weight.numel() for weight in self.weights.values()]
        return sizes if len(counts) == len(sizes) else [sum(sizes)]

    def step(self, clip: float) -> None:
        self.optimizer.zero_grad()
        micro_batches = list(batches(self.number))
        for x, y in micro_batches:
            shown = {name: self.seen(name).contiguous().requires_grad_() for name in self.weights}
            loss = F.cross_entropy(torch.func.functional_call(self.model, {**self.all, **shown}, (x,)), y) / len(micro_batches)
            loss.backward()
            for name, weight in self.weights.items():
                grad = self.gradient(name, shown[name].grad)
                weight.grad = grad.contiguous() if weight.grad is None else weight.grad + grad
        nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.number += 1
        with torch.no_grad():
            self.before()
            self.optimizer.step()
            self.after()


class GMP(Rule):
    begin_at, end_at, every, allocation = 3, 27, 5, "uniform"

    def after(self) -> None:
        self.prune()
        t, span = self.number, self.end_at - self.begin_at
        if t == self.end_at or (self.begin_at < t < self.end_at and (t - self.begin_at) % self.every == 0):
            share, final = 1 - (1 - (t - self.begin_at) / span) ** 3, self.budget(self.allocation)
            counts = [room - round((room - keep) * share) for room, keep in zip(self.rooms(final), final, strict=True)]
            self.prune(self.tops(list(self.weights.values()), counts))


class GlobalGMP(GMP):
    allocation = "global"


class ErkGMP(GMP):
    allocation = "erk"


class Ticket(Rule):
    every, rounds, rewind_to, allocation = 9, 3, 2, "global"

    def start(self, masks: dict[str, Tensor]) -> None:
        self.clock, self.round = 0, 0
        self.remember()

    def remember(self) -> None:
        state = copy.deepcopy({name: self.optimizer.state[p] for name, p in self.all.items() if p in self.optimizer.state})
        self.then = {name: p.detach().clone() for name, p in self.all.items()}, state

    def after(self) -> None:
        self.prune()
        self.clock += 1
        if self.clock == self.rewind_to and self.round == 0:
            self.remember()
        if self.clock < self.every or self.round == self.rounds:
            return
        self.round, final = self.round + 1, self.budget(self.allocation)
        counts = [round(room * (keep / room) ** (self.round / self.rounds)) for room, keep in zip(self.rooms(final), final, strict=True)]
        masks = self.tops(list(self.weights.values()), counts)
        for name, param in self.all.items():
            param.copy_(self.then[0][name])
            self.optimizer.state.pop(param, None)
            if name in self.then[1]:
                self.optimizer.state[param] = copy.deepcopy(self.then[1][name])
        self.clock = self.rewind_to
        self.prune(masks)


class TicketFromTheStart(Ticket):
    rewind_to, allocation = 0, "uniform"


class SNIP(Rule):
    batches = 2

    def start(self, masks: dict[str, Tensor]) -> None:
        self.summed = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    def before(self) -> None:
        if self.number <= self.batches:
            for name, weight in self.weights.items():
                self.summed[name] += weight.grad
                weight.grad = None  # it does not move

    def after(self) -> None:
        if self.number == self.batches:
            self.prune(self.tops([self.summed[name] * weight for name, weight in self.weights.items()], self.budget("global")))
        self.prune()


class TopSTE(Rule):
    allocation = "uniform"

    def start(self, masks: dict[str, Tensor]) -> None:
        self.after()

    def gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad

    def after(self) -> None:
        weights = list(self.weights.values())
        tops = largest(weights, self.budget(self.allocation), [torch.ones_like(w, dtype=torch.bool) for w in weights])
        self.masks = dict(zip(self.masks, tops, strict=True))


class GlobalTopSTE(TopSTE):
    allocation = "global"


class RigL(Rule):
    drop, every, end_at = 0.4, 4, 25

    def start(self, masks: dict[str, Tensor]) -> None:
        self.prune(list(masks.values()))

    def gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad  # of all weights, also for clipping

    def before(self) -> None:
        self.scores = {name: weight.grad.clone() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            weight.grad = torch.where(self.masks[name], weight.grad, 0.0)

    def after(self) -> None:
        self.prune()
        if self.number % self.every == 0 and self.number < self.end_at:
            share = self.drop / 2 * (1 + math.cos(math.pi * self.number / self.end_at))
            dropped = {name: int(share * int(mask.sum())) for name, mask in self.masks.items()}
            self.move(dropped, lambda stays: dropped)

    def move(self, dropped: dict[str, int], grown: Any) -> None:
        stays = {}
        for name, mask in self.masks.items():
            (stays[name],) = largest([self.weights[name]], [int(mask.sum()) - dropped[name]], [mask])
        counts = grown(stays)
        for name, stay in stays.items():
            (grow,) = largest([self.scores[name]], [counts[name]], [~stay])
            new = grow & ~self.masks[name]
            self.masks[name] = stay | grow
            for value in self.optimizer.state[self.weights[name]].values():
                if value.shape == new.shape:
                    value.masked_fill_(new, 0.0)
        self.prune()


class SNFS(RigL):
    drop, smoothing = 0.5, 0.9

    def start(self, masks: dict[str, Tensor]) -> None:
        super().start(masks)
        self.smoothed = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    def before(self) -> None:
        super().before()
        for name, grad in self.scores.items():
            self.smoothed[name].mul_(self.smoothing).add_((1 - self.smoothing) * grad)
        self.scores = self.smoothed

    def after(self) -> None:
        self.prune()
        if self.number % self.every == 0:
            dropped = {name: int(self.drop * int(mask.sum())) for name, mask in self.masks.items()}
            means = [self.smoothed[name][mask].abs().double().mean().item() for name, mask in self.masks.items()]

            def grown(stays: dict[str, Tensor]) -> dict[str, int]:
                rooms = [int((~stay).sum()) for stay in stays.values()]
                return dict(zip(stays, in_proportion(sum(dropped.values()), means, rooms), strict=True))

            self.move(dropped, grown)


RULES: dict[str, tuple[nofm.Method, type[Rule]]] = {
    "gmp": (nofm.GMP(SPARSITY, 3, 27, 5), GMP),
    "gmp, erk": (nofm.GMP(SPARSITY, 3, 27, 5, "erk"), ErkGMP),
    "gmp, global": (nofm.GMP(SPARSITY, 3, 27, 5, "global"), GlobalGMP),
    "lottery": (nofm.LotteryTicket(SPARSITY, 3, 9, 2), Ticket),
    "lottery, from the start": (nofm.LotteryTicket(SPARSITY, 3, 9, 0, "uniform"), TicketFromTheStart),
    "snip": (nofm.SNIP(SPARSITY, 2), SNIP),
    "ste": (nofm.UnstructuredSTE(SPARSITY), TopSTE),
    "ste, global": (nofm.UnstructuredSTE(SPARSITY, "global"), GlobalTopSTE),
    "rigl": (nofm.RigL(SPARSITY, every=4, end_at=25, drop=0.4), RigL),
    "snfs": (nofm.SNFS(SPARSITY, every=4), SNFS),
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("method", "rule"), RULES.values(), ids=RULES)
def test_every_step_is_that_of_the_paper(method, rule, make_optimizer):
    model, clip = Network(), 0.3
    nofm.sparsify_(model, "1:1", preset="all")
    optimizer = make_optimizer(model)
    nofm.attach(method, model, optimizer)
    twin = Network()
    paper = rule(twin, make_optimizer(twin), {site.key: site.mask().clone() for site in nofm.sites(model)})
    seen = set()
    for number in range(STEPS):
        optimizer.zero_grad()
        micro_batches = list(batches(number))
        for x, y in micro_batches:
            (F.cross_entropy(model(x), y) / len(micro_batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        paper.step(clip)
        for site in nofm.sites(model):
            assert torch.equal(site.mask(), paper.masks[site.key]), f"{site.key} after step {number + 1}"
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, msg=f"{name} after step {number + 1}")
        seen.add(sum(int(mask.sum()) for mask in paper.masks.values()))
    assert min(seen) == round((1 - SPARSITY) * sum(weight.numel() for weight in paper.weights.values()))
