"""The Triton kernels that choose the largest of many weights, and that draw, against plain torch, through Triton's interpreter.

A process of its own, started by test_selection.py with TRITON_INTERPRET=1, which has to be set before Triton is imported. Prints a line for
each comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

import nofm
from nofm.kernels import selection, triton_selection
from nofm.kernels.select import use
from nofm.methods.draws import draw
from nofm.methods.pruning import strongest
from nofm.methods.rewiring import best

selection._BLOCK = 256  # so that small tensors have several programs
SHARES = (0.0, 0.001, 0.3, 0.5, 0.9, 1.0)


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, -1.0, 0.0, -0.0, 1e-40, -1e-40, 3.4e38])
    return {
        "random": torch.randn(700),
        "ties": (torch.randn(20, 31) * 2).round(),
        "all equal": torch.full((600,), -0.5),
        "zeros": torch.zeros(513),
        "special values": special.repeat(30),
        "all bits": torch.tensor([0x7FFFFFFF, -1, 0, 1, 127, 128], dtype=torch.int32).repeat(50).view(torch.float32),
        "last bits": torch.arange(0x3F800000, 0x3F800000 + 300, dtype=torch.int32).flip(0).view(torch.float32),
        "channels_last": (torch.randn(5, 8, 3, 3) * 4).round().to(memory_format=torch.channels_last),
        "whole blocks": torch.randn(512),
        "one": torch.ones(1),
        "none": torch.ones(0),
    }


def plain_top(score: Tensor, among: Tensor, count: int) -> Tensor:
    """By a sort of pairs, in Python."""
    key = (score.reshape(-1).view(torch.int32) & 0x7FFFFFFF).tolist()
    order = sorted((i for i, allowed in enumerate(among.reshape(-1).tolist()) if allowed), key=lambda i: (-key[i], i))
    mask = torch.zeros(score.numel(), dtype=torch.bool)
    mask[order[: max(0, count)]] = True
    return mask.view(score.shape)


def compare_largest(share: float, allowed: float | None, on_device: bool) -> None:
    named = weights()
    counts = [round(share * w.numel()) for w in named.values()]
    inside = [torch.rand(w.shape) < (1 if allowed is None else allowed) for w in named.values()]
    given = torch.tensor(counts) if on_device else counts
    found = selection.largest(list(named.values()), given, None if allowed is None else inside)
    for (name, w), mask, among, count in zip(named.items(), found, inside, counts, strict=True):
        assert torch.equal(mask, plain_top(w, among, count)), (name, share)
    print("compared largest", share, allowed, on_device)


def compare_long_stretches() -> None:
    """Programs that work on several blocks."""
    triton_selection.MOST_PROGRAMS, before = 2, triton_selection.MOST_PROGRAMS
    try:
        for name, w in weights().items():
            for count in (w.numel() // 3, w.numel() * 2 // 3, w.numel() - 1):
                assert torch.equal(selection.largest([w], [count])[0], plain_top(w, torch.ones(w.shape, dtype=torch.bool), count)), name
    finally:
        triton_selection.MOST_PROGRAMS = before
    print("compared long stretches")


def compare_counts_out_of_range() -> None:
    w = torch.tensor([torch.nan, 3.0, 0.0, -1.0])
    w.view(torch.int32)[0] = -1  # the largest key there is
    for count in (-1, 0, 5, 2**31 - 1):
        for given in ([count], torch.tensor([count])):
            assert selection.largest([w], given)[0].tolist() == [count > 0] * 4
    print("compared counts out of range")


def compare_callers() -> None:
    """The functions of methods, by Triton and not; what Triton does not serve goes the other way."""
    torch.manual_seed(1)
    scores = [(torch.randn(20, 31) * 3).round(), torch.randn(900), torch.randn(5, 4, 3, 3).to(memory_format=torch.channels_last)]
    among = [torch.rand(s.shape) < 0.6 for s in scores]
    counts = [torch.tensor(c) for c in (0, 100, 33)]

    def all_of_them(dtype: torch.dtype) -> list[Tensor]:
        ours = [s.to(dtype) for s in scores]
        each, joined = strongest(ours, [100, 0, 180]), strongest(ours, [700])
        inside, joined_inside = strongest(ours, [600, 9, 50], among), strongest(ours, [500], among)
        grown = selection.largest(ours, counts, among)
        return [*each, *joined, *inside, *joined_inside, *grown, best(ours[0], among[0], 7), best(ours[1], among[1], counts[1])]

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        expected = all_of_them(dtype)
        with use("triton"):
            assert selection.serves([s.to(dtype) for s in scores]) == (dtype == torch.float32)
            assert all(torch.equal(a, b) for a, b in zip(all_of_them(dtype), expected, strict=True)), dtype
    with use("triton"):
        assert not selection.serves([scores[0], scores[1].double()])
        assert strongest([], []) == selection.largest([], [], []) == []
    assert not selection.serves(scores), "the interpreter serves only who asks for it"
    print("compared callers")


def compare_draws() -> None:
    for number in (0, 1, 7, 123_456_789, 2**62):
        for shape in (torch.Size([33, 77]), torch.Size([]), torch.Size([0, 3]), torch.Size([1024]), torch.Size([2, 3, 5, 7])):
            expected = draw(3, f"layer {number}", torch.tensor(number), shape)
            with use("triton"):
                assert selection.draws_on(torch.tensor(number), shape.numel())
                found = draw(3, f"layer {number}", torch.tensor(number), shape)
            assert torch.equal(found.normal, expected.normal), (number, shape)
            assert torch.equal(found.uniform, expected.uniform), (number, shape)
    for name in map(str, range(20)):  # keys of both signs
        expected = draw(0, name, torch.tensor(3), torch.Size([64]))
        with use("triton"):
            assert torch.equal(draw(0, name, torch.tensor(3), torch.Size([64])).normal, expected.normal), name
    print("compared draws")


def compare_training(method: nofm.Method) -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 6)).to(memory_format=torch.channels_last)
        nofm.sparsify_(model, "1:1", preset="all")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        nofm.attach(method, model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3, 4, 4)).square().mean().backward()
            optimizer.step()
        return [*model.parameters(), *(site.stored_mask for site in nofm.sites(model))]

    def by_triton() -> list[Tensor]:
        with use("triton"):
            return trained()

    assert all(torch.equal(a, b) for a, b in zip(trained(), by_triton(), strict=True))
    print("compared training", method)


def jobs() -> Iterator[Callable[[], None]]:
    """All that is compared."""
    for i, share in enumerate(SHARES):
        yield partial(compare_largest, share, None, bool(i % 2))
        yield partial(compare_largest, share, (0.6, 0.02)[i % 2], not i % 2)
    yield compare_long_stretches
    yield compare_counts_out_of_range
    yield compare_callers
    yield compare_draws
    yield partial(compare_training, nofm.UnstructuredSTE(sparsity=0.75))
    yield partial(compare_training, nofm.UnstructuredSTE(sparsity=0.75, allocation="global"))
    yield partial(compare_training, nofm.DeepRewiring(sparsity=0.75, l1=1e-2, temperature=1e-4))


if __name__ == "__main__":
    share, of = map(int, sys.argv[1:])  # two processes side by side take half the time
    for job in list(jobs())[share::of]:
        job()
