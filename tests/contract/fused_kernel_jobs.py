"""The kernels of a fused step against the reference: see fused_jobs.py."""

from __future__ import annotations

from itertools import product

import torch
from fused_register import job, stretches_of

from nofm.kernels import reference, ways
from nofm.kernels.steps import Rule, Squad, Term, finished
from nofm.masks import Grouping
from nofm.patterns import Pattern


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
