"""SET, RigL, SNFS, DSR and DEEP R: one step with a pencil.

The network has two layers of eight weights, and the loss is the sum of its outputs, so that the gradient of a layer's weight is its
input. All numbers are sums of few powers of two and are compared with ==. Random choices are those of the generator: `DRAWS` are its
numbers in step 1, written down, so that a change of them is seen. DEEP R has a generator of its own: `HASHED` and `NORMAL`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nofm
from nofm.methods.draws import draw
from nofm.methods.rewiring import chance

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWS = {
    "a": [0.612, 0.369, 0.283, 0.367, 0.185, 0.320, 0.349, 0.160],  # 0, 1, 3, 6, 5, 2, 4, 7 from the largest to the smallest
    "b": [0.790, 0.422, 0.128, 0.557, 0.622, 0.920, 0.811, 0.552],  # 5, 6, 0, 4, 3, 7, 1, 2
}
HASHED = {
    "a": [0.3429, 0.2662, 0.3661, 0.3510, 0.5221, 0.1301, 0.3288, 0.9224],  # 7, 4, 2, 3, 0, 6, 1, 5
    "b": [0.1984, 0.3171, 0.0390, 0.7741, 0.5580, 0.6596, 0.7041, 0.5550],
}
NORMAL = {
    "a": [0.1159, -0.1597, 1.4128, 0.7502, 1.5056, -0.7732, -0.5305, 2.4268],
    "b": [0.9525, -0.9815, -1.6394, -2.0506, 0.8766, 0.3739, -0.6294, 0.6878],
}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 1, bias=False), nn.Linear(8, 1, bias=False)

    def forward(self, x: dict[str, list[float]]) -> Tensor:
        return (self.a(torch.tensor([x["a"]])) + self.b(torch.tensor([x["b"]]))).sum()


def pencil(method: nofm.Method, weights: dict[str, list[float]], alive: dict[str, set[int]], lr: float, **options: float):
    """The network with these weights (for DEEP R: their signs), of which those alive are kept; the method and SGD are attached."""
    model = Two()
    nofm.sparsify_(model, "1:1", preset="all")
    for name, values in weights.items():
        getattr(model, name).weight.data = torch.tensor([values])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **options)
    handle = nofm.attach(method, model, optimizer)
    for site in nofm.sites(model):
        mask = torch.tensor([[i in alive[site.name] for i in range(8)]])
        site.freeze(mask, site.lens)
        site.weight.data = torch.where(mask, torch.tensor([weights[site.name]]), 0.0)
    return model, optimizer, handle


def step_with(model: Two, optimizer: torch.optim.Optimizer, x: dict[str, list[float]]) -> None:
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()


def state_of(model: nn.Module) -> tuple[dict[str, set[int]], dict[str, list[float]]]:
    masks = {site.name: set(site.stored_mask[0].nonzero().flatten().tolist()) for site in nofm.sites(model)}
    return masks, {site.name: site.weight[0].tolist() for site in nofm.sites(model)}


FOUR, SIX = set(range(4)), set(range(6))
ZEROS = [0.0] * 8
NO_GRADIENT = {"a": ZEROS, "b": ZEROS}

RIGL_W = {"a": [4.0, -3.0, 3.0, -1.0, *ZEROS[4:]], "b": [1.0, 1.0, 1.0, 1.0, *ZEROS[4:]]}
RIGL_G = {"a": [1.0, 2.0, 1.0, 4.0, -2.0, 0.5, 1.0, -3.0], "b": [0.0, 0.0, 0.0, 0.0, 2.0, -2.0, 2.0, 1.0]}


def rigl(end_at: int) -> nofm.RigL:
    return nofm.RigL(sparsity=0.5, allocation="uniform", every=1, end_at=end_at, drop=0.75)


def dsr(**options: float) -> nofm.DSR:
    return nofm.DSR(sparsity=0.5, every=1, threshold=1.0, drop=0.25, **options)


SNFS = nofm.SNFS(sparsity=0.5, every=1, smoothing=0.5)
SIGNS = [1.0, -1.0, 0.5, -0.5, 1.0, 1.0, -1.0, -1.0]

# The method, weights, who is alive, gradients, learning rate -> who is alive after the step, and the weights.
ONE_STEP = {
    # a: of 0.5 0.25 0.125 the last goes, of -3 -1 -2 the -1; among 3 4 6 7 draw 3 and 6. By magnitude alone 2 and 4 would go.
    # b: of three 1 the last goes, of -2 -1 -1 the last; among 0 3 6 7 draw 6 and 0.
    "set": (
        nofm.SET(sparsity=0.25, allocation="uniform", every=1, drop=0.4),
        {"a": [0.5, -3.0, 0.25, -1.0, 0.125, -2.0, 0.0, 0.0], "b": [0.0, 1.0, 1.0, 1.0, -2.0, -1.0, -1.0, 0.0]},
        {"a": SIX, "b": {1, 2, 3, 4, 5, 6}},
        (NO_GRADIENT, 0.0),
        {"a": {0, 1, 2, 5, 3, 6}, "b": {1, 2, 4, 5, 6, 0}},
        {"a": [0.5, -3.0, 0.25, 0.0, 0.0, -2.0, 0.0, 0.0], "b": [0.0, 1.0, 1.0, 0.0, -2.0, -1.0, 0.0, 0.0]},
    ),
    # a: of 1 and two 0 that have never moved the last goes, and only that; b: nothing, for 0.4 of one is no whole weight.
    "set, zeros go first": (
        nofm.SET(sparsity=0.6875, allocation="uniform", every=1, drop=0.4),
        {"a": [0.0, 0.0, 1.0, *ZEROS[3:]], "b": [1.0, -1.0, *ZEROS[2:]]},
        {"a": {2, 3, 6}, "b": {0, 1}},
        (NO_GRADIENT, 0.0),
        {"a": {2, 3, 0}, "b": {0, 1}},
        {"a": [0.0, 0.0, 1.0, *ZEROS[3:]], "b": [1.0, -1.0, *ZEROS[2:]]},
    ),
    # a: 3.5 -4 2.5 -3 after the step; 2.5 and -3 go; the largest gradients elsewhere are at 3 (it stays) and 7.
    # b: all equal, the last two go; three equal gradients, the first two grow.
    "rigl": (
        rigl(end_at=1000),
        RIGL_W,
        {"a": FOUR, "b": FOUR},
        (RIGL_G, 0.5),
        {"a": {0, 1, 3, 7}, "b": {0, 1, 4, 5}},
        {"a": [3.5, -4.0, 0.0, -3.0, *ZEROS[4:]], "b": [1.0, 1.0, *ZEROS[2:]]},
    ),
    "rigl, half way: one instead of two": (
        rigl(end_at=2),
        RIGL_W,
        {"a": FOUR, "b": FOUR},
        (RIGL_G, 0.5),
        {"a": {0, 1, 3, 7}, "b": {0, 1, 2, 4}},
        {"a": [3.5, -4.0, 0.0, -3.0, *ZEROS[4:]], "b": [1.0, 1.0, 1.0, *ZEROS[3:]]},
    ),
    # Both drop two. |M| of the alive is 3/2 in a and 1/2 in b, so a grows three of the four and b one.
    # a: 2.5 -1.5 1.5 -2.5 after the step; grow 5, 6 and the first of the equal 1 and 2, which stays what it was.
    # b: 3.5 0.5 -1.5 3.5 after the step; grow 5.
    "snfs": (
        SNFS,
        {"a": [4.0, -3.0, 3.0, -1.0, *ZEROS[4:]], "b": [4.0, 1.0, -2.0, 3.0, *ZEROS[4:]]},
        {"a": FOUR, "b": FOUR},
        ({"a": [3.0, -3.0, 3.0, 3.0, 1.0, 5.0, -4.0, 2.0], "b": [1.0, 1.0, -1.0, -1.0, 2.0, 6.0, 3.0, 0.0]}, 0.5),
        {"a": {0, 3, 5, 6, 1}, "b": {0, 3, 5}},
        {"a": [2.5, -1.5, 0.0, -2.5, *ZEROS[4:]], "b": [3.5, 0.0, 0.0, 3.5, *ZEROS[4:]]},
    ),
    # The same half way: both drop one, and of the two a grows 1.5 and b 0.5, the half that is left for the first.
    # a: of the equal -1.5 and 1.5 the second goes; grow 5 and 6. b: 0.5 goes.
    "snfs, half way: one instead of two": (
        nofm.SNFS(sparsity=0.5, every=1, smoothing=0.5, end_at=2),
        {"a": [4.0, -3.0, 3.0, -1.0, *ZEROS[4:]], "b": [4.0, 1.0, -2.0, 3.0, *ZEROS[4:]]},
        {"a": FOUR, "b": FOUR},
        ({"a": [3.0, -3.0, 3.0, 3.0, 1.0, 5.0, -4.0, 2.0], "b": [1.0, 1.0, -1.0, -1.0, 2.0, 6.0, 3.0, 0.0]}, 0.5),
        {"a": {0, 1, 3, 5, 6}, "b": {0, 2, 3}},
        {"a": [2.5, -1.5, 0.0, -2.5, *ZEROS[4:]], "b": [3.5, 0.0, -1.5, 3.5, *ZEROS[4:]]},
    ),
    # Three fall below 1; four and one survive, so a grows 2.4 and b 0.6 of the three: 2 and 1.
    "dsr": (
        dsr(),
        {"a": [4.0, -3.0, 1.0, -2.0, *ZEROS[4:]], "b": [2.0, 0.5, -0.25, 0.125, *ZEROS[4:]]},
        {"a": FOUR, "b": FOUR},
        (NO_GRADIENT, 0.0),
        {"a": {0, 1, 2, 3, 6, 5}, "b": {0, 5}},
        {"a": [4.0, -3.0, 1.0, -2.0, *ZEROS[4:]], "b": [2.0, *ZEROS[1:]]},
    ),
    # Three and one survive of four pruned: a grows three, one of them where it has just lost one.
    "dsr, what was pruned starts anew": (
        dsr(),
        {"a": [4.0, -3.0, 1.0, -0.5, *ZEROS[4:]], "b": [2.0, 0.5, -0.25, 0.125, *ZEROS[4:]]},
        {"a": FOUR, "b": FOUR},
        (NO_GRADIENT, 0.0),
        {"a": {0, 1, 2, 3, 6, 5}, "b": {0, 5}},
        {"a": [4.0, -3.0, 1.0, *ZEROS[3:]], "b": [2.0, *ZEROS[1:]]},
    ),
    "dsr, a layer keeps its largest": (
        dsr(),
        {"a": [4.0, -3.0, 1.0, -2.0, *ZEROS[4:]], "b": [0.5, 0.25, 0.125, -0.75, *ZEROS[4:]]},
        {"a": FOUR, "b": FOUR},
        (NO_GRADIENT, 0.0),
        {"a": {0, 1, 2, 3, 6, 5}, "b": {3, 5}},
        {"a": [4.0, -3.0, 1.0, -2.0, *ZEROS[4:]], "b": [0.0, 0.0, 0.0, -0.75, *ZEROS[4:]]},
    ),
    # a: 2 and 3 would change sign; among 2 to 7 draw 7 and 4. b: everything goes on as it was.
    "deepr": (
        nofm.DeepRewiring(sparsity=0.5, allocation="uniform", l1=0.0, temperature=0.0),
        {"a": SIGNS, "b": SIGNS},
        {"a": FOUR, "b": FOUR},
        ({"a": [1.0, 1.0, 2.0, -2.0, *ZEROS[4:]], "b": [1.0, 1.0, 1.0, -1.0, *ZEROS[4:]]}, 0.5),
        {"a": {0, 1, 4, 7}, "b": FOUR},
        {"a": [0.5, -1.5, *ZEROS[2:]], "b": [0.5, -1.5, *ZEROS[2:]]},
    ),
    # All lose 1/4 of their magnitude: 1/8 dies, 1/4 is 0 now and lives on.
    "deepr, l1": (
        nofm.DeepRewiring(sparsity=0.5, allocation="uniform", l1=0.5, temperature=0.0),
        {"a": [1.0, -1.0, 0.125, -0.25, *SIGNS[4:]], "b": SIGNS},
        {"a": FOUR, "b": FOUR},
        (NO_GRADIENT, 0.5),
        {"a": {0, 1, 3, 7}, "b": FOUR},
        {"a": [0.75, -0.75, *ZEROS[2:]], "b": [0.75, -0.75, 0.25, -0.25, *ZEROS[4:]]},
    ),
}


@pytest.mark.parametrize(("method", "weights", "alive", "moved", "alive_after", "after"), ONE_STEP.values(), ids=ONE_STEP)
def test_one_step(method, weights, alive, moved, alive_after, after):
    gradients, lr = moved
    model, optimizer, _ = pencil(method, weights, alive, lr)
    step_with(model, optimizer, gradients)
    assert state_of(model) == (alive_after, after)


ENDING = {
    "rigl": rigl(end_at=2),
    "set": nofm.SET(sparsity=0.5, allocation="uniform", every=1, end_at=2),
    "snfs": nofm.SNFS(sparsity=0.5, every=1, end_at=2),
}


@pytest.mark.parametrize("method", ENDING.values(), ids=ENDING)
def test_from_its_end_on_connections_stay(method):
    model, optimizer, _ = pencil(method, RIGL_W, {"a": FOUR, "b": FOUR}, 0.5)
    step_with(model, optimizer, RIGL_G)
    then, _ = state_of(model)
    assert then != {"a": FOUR, "b": FOUR}
    step_with(model, optimizer, RIGL_G)
    assert state_of(model)[0] == then


def test_the_draws_that_all_of_this_rests_on():
    model, _, _ = pencil(SNFS, RIGL_W, {"a": FOUR, "b": FOUR}, 0.0)
    for site in nofm.sites(model):
        assert torch.allclose(chance(0, 1, site), torch.tensor([DRAWS[site.name]]), atol=5e-4, rtol=0)
        hashed = draw(0, site.key, torch.tensor(1), site.weight.shape)
        assert torch.allclose(hashed.uniform, torch.tensor([HASHED[site.name]]), atol=1e-4, rtol=0)
        assert torch.allclose(hashed.normal, torch.tensor([NORMAL[site.name]]), atol=1e-4, rtol=0)


# K is what falls below 1 of the eight that are alive; N_p = 4, and from 3.6 to 4.4 is near enough.
THRESHOLDS = {
    "too few: doubled": ([4.0, -3.0, 1.0, -2.0, *ZEROS[4:]], 0.1, 2.0),
    "enough": ([4.0, -3.0, 1.0, -0.5, *ZEROS[4:]], 0.1, 1.0),
    "too many: halved": ([4.0, -3.0, 0.5, -0.5, *ZEROS[4:]], 0.1, 0.5),
    "too few, but near enough": ([4.0, -3.0, 1.0, -2.0, *ZEROS[4:]], 0.3, 1.0),
    "too many, but near enough": ([4.0, -3.0, 0.5, -0.5, *ZEROS[4:]], 0.3, 1.0),
}


@pytest.mark.parametrize(("a", "tolerance", "expected"), THRESHOLDS.values(), ids=THRESHOLDS)
def test_the_threshold_of_dsr(a, tolerance, expected):
    weights = {"a": a, "b": [2.0, 0.5, -0.25, 0.125, *ZEROS[4:]]}
    model, optimizer, handle = pencil(dsr(tolerance=tolerance), weights, {"a": FOUR, "b": FOUR}, 0.0)
    step_with(model, optimizer, NO_GRADIENT)
    assert handle.memory.tensors["threshold"].item() == expected
    assert sum(site.kept() for site in nofm.sites(model)) == 8


def test_the_smoothed_gradient_of_snfs():
    """M <- M / 2 + G / 2, of pruned weights too; the optimizer sees the gradient of the others only."""
    method = nofm.SNFS(sparsity=0.5, every=10, smoothing=0.5)
    model, optimizer, handle = pencil(method, RIGL_W, {"a": FOUR, "b": FOUR}, 0.5, momentum=0.5)
    for x in ([4.0] * 8, [2.0] * 8):
        step_with(model, optimizer, {"a": x, "b": ZEROS})
    assert handle.memory.tensors["smoothed:a.weight"].tolist() == [[2.0] * 8]  # (4 / 2) / 2 + 2 / 2
    assert optimizer.state[model.a.weight]["momentum_buffer"].tolist() == [[4.0] * 4 + [0.0] * 4]  # 4 / 2 + 2
    assert model.a.weight.tolist() == [[0.0, -7.0, -1.0, -5.0, 0.0, 0.0, 0.0, 0.0]]  # -4 / 2, then -(4 / 2 + 2) / 2


SKIPPED = {"goes": (0.0, [1.0] * 8), "is skipped": (1.0, [0.0] * 8)}


@pytest.mark.parametrize(("found_inf", "smoothed"), SKIPPED.values(), ids=SKIPPED)
def test_the_smoothed_gradient_under_a_loss_scale(found_inf, smoothed):
    """A fused optimizer sees gradients that are still scaled, and skips a step inside its kernel."""
    method = nofm.SNFS(sparsity=0.5, every=10, smoothing=0.5)
    model, optimizer, handle = pencil(method, RIGL_W, {"a": FOUR, "b": FOUR}, 0.5, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(found_inf)
    step_with(model, optimizer, {"a": [8.0] * 8, "b": ZEROS})
    assert handle.memory.tensors["smoothed:a.weight"].tolist() == [smoothed]


def test_a_connection_is_born_with_the_sign_of_its_place():
    """After the first step of the row "deepr" of the table: 4 and 7 are born, a place of positive and one of negative sign."""
    method, weights, alive, (gradients, lr), _, _ = ONE_STEP["deepr"]
    model, optimizer, _ = pencil(method, weights, alive, lr)
    step_with(model, optimizer, gradients)
    step_with(model, optimizer, {"a": [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0], "b": ZEROS})
    masks, after = state_of(model)
    assert 7 in masks["a"]
    assert after["a"] == [0.5, -1.5, 0.0, 0.0, 0.0, 0.0, 0.0, -0.5]  # 4 would be -0.5 and has died


def test_the_noise_of_deep_rewiring():
    """sqrt(2 * 1/2 * 1/4) = 1/2 times the normal draws of the step, on those alive."""
    method = nofm.DeepRewiring(sparsity=0.5, allocation="uniform", l1=0.0, temperature=0.25)
    weights = {"a": [16.0, -16.0, 16.0, -16.0, *SIGNS[4:]], "b": SIGNS}
    model, optimizer, _ = pencil(method, weights, {"a": FOUR, "b": FOUR}, 0.5)
    step_with(model, optimizer, NO_GRADIENT)
    expected = torch.tensor([w + n / 2 for w, n in zip(weights["a"][:4], NORMAL["a"][:4], strict=True)] + [0.0] * 4)
    assert torch.allclose(model.a.weight[0], expected, atol=1e-4, rtol=0)


def test_signs_are_those_of_the_start_and_drawn_where_there_is_none():
    model = Two()
    nofm.sparsify_(model, "1:1", preset="all")
    model.b.weight.data.zero_()
    before = model.a.weight.detach().clone()
    handle = nofm.attach(nofm.DeepRewiring(sparsity=0.5), model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(handle.memory.tensors["negative:a.weight"], before < 0)
    assert handle.memory.tensors["negative:b.weight"].unique().tolist() == [False, True]
