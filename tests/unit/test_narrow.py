"""A network whose narrow stage takes parts of the batch side by side is the same network: outputs, gradients, statistics, training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import nofm
from nofm.engine.config import ConfigError, ModelConfig, RunConfig
from nofm.engine.resolve import digest, to_dict
from nofm.engine.validate import check
from nofm.tasks.models import CifarResNet
from nofm.tasks.narrow import NarrowConv2d, one_by_one, side_by_side


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_there_and_back(parts):
    x = numbers((8, 3, 5, 7), 0)
    beside = side_by_side(x, parts)
    assert beside.shape == (8 // parts, 3, 5, 7 * parts)
    assert beside.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(one_by_one(beside, parts), x)


def test_pixels_of_a_few_images_lie_in_turn():
    """By hand: four images of one channel, 1 x 2 pixels, in two parts."""
    images = torch.tensor([[10, 11], [20, 21], [30, 31], [40, 41]]).view(4, 1, 1, 2)
    assert side_by_side(images, 2).view(2, 4).tolist() == [[10, 30, 11, 31], [20, 40, 21, 41]]


@pytest.mark.parametrize(("parts", "stride"), [(2, 1), (4, 1), (4, 2)])
def test_a_convolution_is_the_plain_one(parts, stride):
    plain = nn.Conv2d(6, 10, 3, stride, padding=1, bias=False).double()
    narrow = NarrowConv2d(6, 10, 3, stride, padding=1, bias=False).double()
    narrow.load_state_dict(plain.state_dict())
    x = numbers((8, 6, 5, 7), 0).requires_grad_()
    expected, found = plain(x), one_by_one(narrow(side_by_side(x, parts), parts), parts)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(y.square().sum(), (x, conv.weight)) for y, conv in ((expected, plain), (found, narrow))]
    torch.testing.assert_close(grads[1], grads[0])


def test_nothing_is_copied_between_convolutions():
    """What a convolution is given and gives are views of channels_last memory."""
    conv = NarrowConv2d(4, 4, 3, padding=1, bias=False)
    x = side_by_side(torch.randn(8, 4, 6, 6), 4)
    assert x.permute(0, 2, 3, 1).reshape(2, 6, 6, 16).data_ptr() == x.data_ptr()
    assert conv(x.to(memory_format=torch.channels_last), 4).is_contiguous(memory_format=torch.channels_last)


def pair(pattern: str | None) -> tuple[nn.Module, nn.Module]:
    """A plain ResNet-8 and one of the same weights in four parts."""
    torch.manual_seed(0)
    plain = CifarResNet(1, 10, 3).double()
    torch.manual_seed(0)
    parts = CifarResNet(1, 10, 3, batch_parts=4).double()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), parts.parameters(), strict=True))  # the same chance, too
    for model in (plain, parts):
        if pattern is not None:
            nofm.sparsify_(model, pattern)
    return plain, parts


@pytest.mark.parametrize("pattern", [None, "1:16"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_network_is_the_same(pattern, layout):
    plain, parts = pair(pattern)
    x, label = numbers((8, 3, 16, 16), 1).to(memory_format=layout), torch.arange(8)
    for model in (plain, parts):
        nn.functional.cross_entropy(model(x), label).backward()
    for (name, a), b in zip(plain.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(dict(parts.named_buffers()), dict(plain.named_buffers()))  # running means and variances
    torch.testing.assert_close(parts.eval()(x), plain.eval()(x))
    assert plain.state_dict().keys() == parts.state_dict().keys()


def test_training_by_a_method_is_the_same():
    plain, parts = pair("2:4")
    for model in (plain, parts):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        nofm.attach(nofm.SRSTE(decay=2e-3), model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(numbers((8, 3, 16, 16), step)), torch.arange(8)).backward()
            optimizer.step()
    torch.testing.assert_close(parts.state_dict(), plain.state_dict())


def test_a_batch_that_does_not_divide_is_taken_as_it_is():
    plain, parts = pair(None)
    x = numbers((6, 3, 16, 16), 1)
    assert torch.equal(parts(x), plain(x))


def test_it_can_be_copied_and_compiled():
    _, parts = pair("1:16")
    x = numbers((8, 3, 16, 16), 1)
    expected = parts(x)
    torch.testing.assert_close(copy.deepcopy(parts)(x), expected)
    torch.testing.assert_close(torch.compile(parts, fullgraph=True, backend="eager")(x), expected)


def config(**model: object) -> RunConfig:
    return RunConfig(model=ModelConfig(**model))


def test_it_does_not_make_another_configuration():
    assert digest(to_dict(config(name="cifar/resnet20"))) == digest(to_dict(config(name="cifar/resnet20", batch_parts=4)))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"name": "cnn", "batch_parts": 4}, "has no effect on cnn; it belongs to cifar/resnet20, cifar/resnet32"),
        ({"name": "cifar/resnet20", "batch_parts": 4, "norm": "group"}, "would mix images under model.norm group"),
        ({"name": "cifar/resnet20", "batch_parts": 0}, "model.batch_parts"),
    ],
    ids=["another network", "group norm", "no parts"],
)
def test_where_it_cannot_be_is_said(model, said):
    with pytest.raises(ConfigError, match=said):
        check(config(**model))
