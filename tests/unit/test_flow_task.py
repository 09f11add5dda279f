"""Optical flow: loss and metrics by hand, frames of any size, fp32 correlations, and RAFT's convolutions 2:4 with lambda exact."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.optical_flow import raft, raft_large
from torchvision.models.optical_flow._utils import upsample_flow

import nofm
from nofm.tasks.flow import OpticalFlow, build_flow_model, pad_to_8, sequence_loss
from nofm.tasks.raft import Correlation, enlarged

DECAY = 2e-4
NO_GROUPS = ["feature_encoder.convnormrelu.0", "context_encoder.convnormrelu.0", "update_block.motion_encoder.convflow1.0"]


def constant(u: float, v: float, height: int = 2, width: int = 3) -> Tensor:
    return torch.tensor([u, v]).view(1, 2, 1, 1).expand(1, 2, height, width).clone()


class Fixed(nn.Module):
    """Predicts what it is told to."""

    def __init__(self, *predictions: Tensor) -> None:
        super().__init__()
        self.predictions = list(predictions)

    def forward(self, image1: Tensor, image2: Tensor, num_flow_updates: int) -> list[Tensor]:
        return self.predictions


class Copies(nn.Module):
    """Predicts the first two channels of frame 1 and the number of refinements."""

    def forward(self, image1: Tensor, image2: Tensor, num_flow_updates: int) -> list[Tensor]:
        assert image1.shape == image2.shape
        assert image1.shape[-1] % 8 == image1.shape[-2] % 8 == 0
        assert min(image1.shape[-2:]) >= 128
        self.updates = num_flow_updates
        return [image1[:, :2]] * num_flow_updates


# ---- loss ----


def test_the_loss_weighs_later_refinements_more():
    truth, valid = constant(1.0, -2.0), torch.ones(1, 2, 3, dtype=torch.bool)
    predictions = [constant(0, 0), constant(1, 0), constant(1, -1)]  # mean absolute errors 1.5, 1, 0.5
    expected = 0.64 * 1.5 + 0.8 * 1.0 + 0.5
    assert sequence_loss(predictions, truth, valid, gamma=0.8).item() == pytest.approx(expected, rel=1e-6)


def test_the_loss_leaves_out_what_is_unknown_or_too_long_and_divides_by_all_pixels():
    truth, valid = constant(1.0, 1.0), torch.ones(1, 2, 3, dtype=torch.bool)
    truth[0, :, 0, 0] = torch.tensor([300.0, 300.0])  # 424 pixels long
    truth[0, :, 0, 1], valid[0, 0, 1] = math.nan, False
    truth[0, :, 0, 2] = torch.tensor([240.0, 319.0])  # 399.2 pixels long
    prediction = torch.zeros(1, 2, 2, 3, requires_grad=True)
    loss = sequence_loss([prediction], truth, valid)
    assert loss.item() == pytest.approx((240 + 319 + 3 * 2) / 12)
    loss.backward()
    assert prediction.grad.isfinite().all()
    assert prediction.grad[0, :, 0, :2].abs().sum() == 0


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.integers(0, 10_000))
def test_the_loss_adds_up_over_micro_batches_however_much_of_each_is_known(seed):
    generator = torch.Generator().manual_seed(seed)
    predictions = [torch.randn(4, 2, 5, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    truth = torch.randn(4, 2, 5, 6, generator=generator, dtype=torch.float64)
    valid = torch.rand(4, 5, 6, generator=generator) < torch.rand(4, 1, 1, generator=generator)
    parts = [sequence_loss([p[i : i + 2] for p in predictions], truth[i : i + 2], valid[i : i + 2]) for i in (0, 2)]
    assert sum(parts).item() / 2 == pytest.approx(sequence_loss(predictions, truth, valid).item(), rel=1e-6)


# ---- metrics ----


def measured(prediction: Tensor, truth: Tensor, valid: Tensor) -> dict[str, float]:
    frames = torch.zeros(len(truth), 3, *truth.shape[-2:])
    task = OpticalFlow(Fixed(prediction))
    padded, _ = pad_to_8(prediction)
    task.model.predictions = padded
    sums = task.measure({"image1": frames, "image2": frames, "flow": truth, "valid": valid})
    return task.metrics({name: value.item() for name, value in sums.items()})


def test_metrics_of_known_errors():
    """Errors of 0.5, 2, 4, 6 and, for a flow of 100 pixels, 4: that is below 5 % of it, and no outlier for KITTI."""
    truth = torch.zeros(1, 2, 1, 6)
    truth[0, 0, 0, 4] = 100.0
    prediction = truth.clone()
    prediction[0, 1, 0] = torch.tensor([0.5, 2.0, 4.0, 6.0, 4.0, 99.0])
    valid = torch.tensor([[[True, True, True, True, True, False]]])
    found = measured(prediction, truth, valid)
    expected = {"epe": 16.5 / 5, "outliers_1px": 80.0, "outliers_3px": 60.0, "outliers_5px": 20.0, "fl_all": 40.0}
    assert found == pytest.approx(expected)


def test_a_prediction_that_is_no_number_is_an_outlier():
    found = measured(torch.full((1, 2, 2, 2), math.nan), torch.zeros(1, 2, 2, 2), torch.ones(1, 2, 2, dtype=torch.bool))
    assert math.isnan(found.pop("epe"))
    assert set(found.values()) == {100.0}


def test_sums_add_up_over_batches_of_different_sizes():
    generator = torch.Generator().manual_seed(0)
    cases = [
        (
            torch.randn(n, 2, h, 9, generator=generator) * 4,
            torch.randn(n, 2, h, 9, generator=generator) * 4,
            torch.rand(n, h, 9, generator=generator) < 0.5,
        )
        for n, h in ((2, 7), (1, 12))
    ]
    total: dict[str, float] = {}
    for prediction, truth, valid in cases:
        task = OpticalFlow(Fixed(*pad_to_8(prediction)[0]))
        frames = torch.zeros(len(truth), 3, *truth.shape[-2:])
        for name, value in task.measure({"image1": frames, "image2": frames, "flow": truth, "valid": valid}).items():
            total[name] = total.get(name, 0.0) + value.item()
    errors = torch.cat([(prediction - truth).square().sum(1).sqrt()[valid] for prediction, truth, valid in cases]).double()
    found = task.metrics(total)
    assert found["epe"] == pytest.approx(errors.mean().item(), rel=1e-6)
    assert found["outliers_3px"] == pytest.approx(100 * (errors > 3).double().mean().item())


def test_nothing_known_gives_no_metric():
    assert math.isnan(measured(torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, dtype=torch.bool))["epe"])


# ---- sizes ----


@pytest.mark.parametrize(("height", "width"), [(128, 136), (130, 141), (436, 1024), (20, 300), (1, 1)])
def test_frames_of_any_size_are_padded_by_their_edges_and_cut_back(height, width):
    image1, image2 = torch.rand(2, 1, 3, height, width)
    task = OpticalFlow(Copies(), updates=3, test_updates=5)
    assert torch.equal(task.predict(image1, image2), image1[:, :2])
    assert task.model.updates == 5
    (padded,), (top, left) = pad_to_8(image1)
    assert padded.shape[-2] - height - top - top in (0, 1), "as much above as below"
    assert padded.shape[-1] - width - left - left in (0, 1)
    assert torch.equal(padded[..., 0, 0], image1[..., 0, 0])
    assert torch.equal(padded[..., -1, -1], image1[..., -1, -1])


# ---- networks ----


def test_unknown_networks_are_named():
    with pytest.raises(
        nofm.NofmError, match=r"model.name = raft_huge: is no network for optical flow; there are raft_large, raft_small, raft_tiny"
    ):
        build_flow_model("raft_huge")
    with pytest.raises(nofm.NofmError, match="no published weights of raft_tiny"):
        build_flow_model("raft_tiny", pretrained=True)


def torchvisions(name: str) -> nn.Module:
    """The same parts with torchvision's own forward and correlations."""
    torch.manual_seed(0)
    model = build_flow_model(name)
    model.__class__ = raft.RAFT
    model.corr_block = raft.CorrBlock(num_levels=model.corr_block.num_levels, radius=model.corr_block.radius)
    return model


@pytest.mark.parametrize("name", ["raft_large", "raft_small", "raft_tiny"])
def test_refinements_and_gradients_are_torchvisions(name):
    """To fp32's rounding: the same sums in another order."""
    theirs, ours = torchvisions(name), build_flow_model(name)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    frames = torch.rand(2, 2, 3, 128, 136, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = []
    for model in (ours, theirs):
        predictions = model(*frames, num_flow_updates=3)
        sum(flow.abs().mean() for flow in predictions).backward()
        found.append((predictions, {key: p.grad for key, p in model.named_parameters()}))
    (flows, gradients), (their_flows, their_gradients) = found
    assert len(flows) == len(their_flows) == 3
    for flow, their_flow in zip(flows, their_flows, strict=True):
        assert their_flow.abs().max() > 0.1
        torch.testing.assert_close(flow, their_flow, rtol=0, atol=1e-4)
    for key, gradient in their_gradients.items():  # of a bias before a norm: nothing but rounding, which also makes a ReLU or two flip
        torch.testing.assert_close(gradients[key], gradient, rtol=0, atol=1e-6 + 1e-3 * gradient.abs().max().item(), msg=key)
    assert sum(gradient.abs().max() > 1e-4 for gradient in their_gradients.values()) > len(their_gradients) / 2


def test_refinements_are_the_same_without_gradients():
    """There they are made large one by one."""
    model = build_flow_model("raft_tiny")
    frames = torch.rand(2, 2, 3, 128, 136, generator=torch.Generator().manual_seed(0)) * 2 - 1
    learning = model(*frames, num_flow_updates=3)
    with torch.no_grad():
        found = model(*frames, num_flow_updates=3)
    for flow, expected in zip(found, learning, strict=True):
        torch.testing.assert_close(flow, expected.detach(), rtol=0, atol=1e-5)


def test_flow_is_enlarged_as_torchvision_does():
    generator = torch.Generator().manual_seed(0)
    flow, mask = torch.randn(3, 2, 5, 7, generator=generator), torch.randn(3, 576, 5, 7, generator=generator)
    for layout in (torch.contiguous_format, torch.channels_last):
        found = [arrange(flow, mask.contiguous(memory_format=layout)) for arrange in (enlarged, upsample_flow)]
        assert torch.equal(*found)


def test_correlations_are_looked_up_as_torchvision_does():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 2, 8, 16, 18, generator=generator)
    coords = torch.rand(2, 2, 16, 18, generator=generator) * 30 - 6
    ours, theirs = Correlation(num_levels=4, radius=3), raft.CorrBlock(num_levels=4, radius=3)
    for block in (ours, theirs):
        block.build_pyramid(*features)
    found, expected = ours.look_up(coords, ours.windows(coords.device)), theirs.index_pyramid(coords)
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


class Casts(TorchDispatchMode):
    """Notes the shapes of what is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is not None:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_a_refinement_casts_what_comes_from_outside_and_nothing_else():
    """Flow in fp32 makes fp32 of all that it is put beside, and each of six convolutions casts it back, in every refinement."""
    model = build_flow_model("raft_large")
    frames = torch.rand(2, 1, 3, 128, 128)
    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        model(*frames, num_flow_updates=2)
    of_points = sorted(shape[1] for shape in casts.shapes if shape[0] == 1 and shape[2:] == (16, 16))
    assert of_points == [2, 2, 256, 256, 324, 324]  # flow; the features of both frames, for fp32 correlations; and these


def test_raft_large_has_the_size_of_torchvisions():
    assert sum(p.numel() for p in build_flow_model("raft_large").parameters()) == 5_257_536
    assert list(build_flow_model("raft_large").state_dict()) == list(raft_large().state_dict())


def nodes_of(tensor: Tensor) -> set[str]:
    """The operations that a gradient goes back through."""
    waiting, names = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        names.add(type(node).__name__)
        waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return names


@pytest.mark.parametrize("size", [(16, 17), (2, 3)])
def test_look_ups_in_one_order_have_the_same_gradient(size):
    """Points in the middle, on whole pixels, over the edges and far outside."""
    generator = torch.Generator().manual_seed(0)
    coords = torch.rand(2, 2, *size, generator=generator) * 40 - 12
    coords[0] = coords[0].round()
    weigh = torch.randn(2, 49, *size, generator=generator)
    found = []
    for in_order in (False, True):
        block = Correlation(num_levels=1, radius=3)
        volume = torch.randn(2 * size[0] * size[1], 1, *size, generator=torch.Generator().manual_seed(1), requires_grad=True)
        block.corr_pyramid = [volume]
        torch.use_deterministic_algorithms(in_order)
        try:
            looked_up = block.look_up(coords, block.windows(coords.device))
        finally:
            torch.use_deterministic_algorithms(False)
        assert ("_SampledInOrderBackward" in nodes_of(looked_up)) == in_order
        (looked_up * weigh).sum().backward()
        found.append((looked_up.detach(), volume.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1].abs().max() > 1
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=1e-4)


class MadeElsewhere(TorchDispatchMode):
    """Notes operations whose result lies on the CPU and is more than a number, which a kernel takes as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type == "cpu" and out.dim():
            self.names.append(str(func))
        return out


@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "torchvision's"])
def test_a_forward_takes_nothing_from_the_host(theirs):
    """Or it could not be captured. A device that is not the CPU stands for a GPU."""
    with torch.device("meta"):
        model = torchvisions("raft_tiny") if theirs else build_flow_model("raft_tiny")
        frames = torch.rand(2, 1, 3, 128, 128)
    with MadeElsewhere() as elsewhere:
        model(*frames, num_flow_updates=2)[-1].sum().backward()
    assert bool(elsewhere.names) == theirs


def test_frames_that_raft_cannot_take_are_refused():
    model = build_flow_model("raft_tiny")
    for sizes in ((128, 132), (128, 136)):
        with pytest.raises(nofm.NofmError, match=rf"sides divide by 8, got 128x{sizes[1]} and 128x"):
            model(torch.zeros(1, 3, *sizes), torch.zeros(1, 3, 128, sizes[1] if sizes[1] % 8 else 128))


def test_correlations_are_fp32_under_autocast_and_so_are_loss_and_flow():
    torch.manual_seed(0)
    task = OpticalFlow(build_flow_model("raft_tiny"), updates=2)
    seen, volumes = [], []
    look_up = task.model.corr_block.look_up
    task.model.corr_block.look_up = lambda *args: volumes.append(task.model.corr_block.corr_pyramid[0]) or look_up(*args)
    task.model.feature_encoder.register_forward_hook(lambda module, args, out: seen.append(out))
    frames = torch.rand(2, 1, 3, 128, 128) * 2 - 1
    flow, valid = torch.zeros(1, 2, 128, 128), torch.ones(1, 128, 128, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        out = task({"image1": frames[0], "image2": frames[1], "flow": flow, "valid": valid})
        predicted = task.predict(*frames)
    features = seen[-1]
    assert features.dtype == torch.bfloat16
    first, second = features.float().flatten(2)
    volume = volumes[-1]
    assert volume.dtype == torch.float32
    exact = (first.double().T @ second.double() / 8).view_as(volume)
    assert torch.allclose(volume.double(), exact, atol=1e-5 * exact.abs().max().item())
    assert out["loss"].dtype == predicted.dtype == torch.float32


def test_a_network_can_be_copied_after_a_training_step():
    """torchvision's correlation block keeps the last forward's pyramid, with its graph, which cannot be copied."""
    model = build_flow_model("raft_tiny")
    frames = torch.rand(2, 1, 3, 128, 128)
    model(*frames, num_flow_updates=1)[-1].sum().backward()
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        assert torch.equal(twin(*frames, num_flow_updates=1)[-1], model.eval()(*frames, num_flow_updates=1)[-1])


# ---- sparse ----


def test_raft_is_sparse_in_every_convolution_that_divides_and_has_half_the_parameters():
    """The paper: 5.3 M parameters dense, 2.65 M at 2:4. Three convolutions read 2 or 3 channels, which make no group of 4."""
    model = build_flow_model("raft_large")
    with pytest.raises(nofm.LayerError) as error:
        nofm.sparsify_(copy.deepcopy(model), "2:4", preset="all")
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == NO_GROUPS
    by_skip = nofm.sparsify_(copy.deepcopy(model), "2:4", preset="all", skip=NO_GROUPS)
    summary = nofm.sparsify_(model, "2:4", preset="paper")
    assert [row.name for row in summary.sparse] == [row.name for row in by_skip.sparse]
    assert [row.name for row in summary.dense] == NO_GROUPS
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    assert sorted(row.name for row in summary.rows) == sorted(convolutions)
    cost = nofm.cost(model, [(1, 3, 128, 128)] * 2)
    assert (f"{cost.params / 1e6:.1f}", f"{cost.params_sparse / 1e6:.2f}") == ("5.3", "2.65")


def refined_update_block(method: nofm.Method) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What AdamW took as gradient, and how the weights moved, in a step through 12 uses of raft_large's own update block."""
    torch.manual_seed(0)
    block = raft_large().update_block.double()
    nofm.sparsify_(block, "2:4", preset="all", skip=["motion_encoder.convflow1.0"])
    before = {name: p.detach().clone() for name, p in block.named_parameters()}
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3, weight_decay=1e-4)
    nofm.attach(method, block, optimizer)
    hidden, context, correlations, flow = (torch.randn(1, c, 3, 4, dtype=torch.float64) for c in (128, 128, 324, 2))
    loss = torch.zeros((), dtype=torch.float64)
    for _ in range(12):
        hidden, delta = block(torch.tanh(hidden), context, correlations, flow)
        flow = flow.detach() + delta
        loss = loss + flow.abs().mean()
    loss.backward()
    optimizer.step()
    taken = {name: optimizer.state[p]["exp_avg"] / (1 - 0.9) for name, p in block.named_parameters()}
    return taken, {name: (before[name] - p.detach()) / 1e-3 for name, p in block.named_parameters()}


@pytest.fixture(scope="module")
def by_ste() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return refined_update_block(nofm.STE())


@pytest.mark.parametrize(("placement", "times"), [("gradient", 1), ("decoupled", 1), ("backward", 12)])
def test_the_term_is_added_once_though_the_update_block_is_used_12_times(by_ste, placement, times):
    """`backward` is the code released with the paper, and adds it at every use."""
    torch.manual_seed(0)
    weights = {f"{name}": p for name, p in raft_large().update_block.double().named_parameters()}
    straight, refined = by_ste, refined_update_block(nofm.SRSTE(DECAY, placement=placement))
    place = 1 if placement == "decoupled" else 0
    sparse = 0
    for name, weight in weights.items():
        term = refined[place][name] - straight[place][name]
        if weight.dim() < 4 or weight.shape[1] % 4:
            assert not term.any(), name
            continue
        sparse += 1
        pruned = ~nofm.mask(weight.detach(), "2:4")
        assert not term[~pruned].any(), f"{name}: the term reached a kept weight"
        expected = times * DECAY * weight.detach()[pruned]
        assert torch.allclose(term[pruned], expected, rtol=1e-6, atol=1e-13 if place == 0 else 1e-12), name
    assert sparse == 12


def test_refinements_keep_to_channels_last():
    """Where weights are, convolutions would otherwise copy their inputs: over a thousand copies in a step of twelve refinements."""
    torch.manual_seed(0)
    model = build_flow_model("raft_tiny").eval()
    frames = torch.rand(2, 1, 3, 128, 144)
    with torch.no_grad():
        expected = model(*frames, num_flow_updates=2)[-1]
    layouts: dict[str, bool] = {}

    def look(name: str) -> None:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            layouts[name] = args[0].is_contiguous(memory_format=torch.channels_last)

        model.update_block.get_submodule(name).register_forward_pre_hook(hook)

    for name, module in model.update_block.named_modules():
        if isinstance(module, nn.Conv2d):
            look(name)
    model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        found = model(*(frame.contiguous(memory_format=torch.channels_last) for frame in frames), num_flow_updates=2)[-1]
    assert len(layouts) > 5
    assert all(layouts.values()), layouts
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
