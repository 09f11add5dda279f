"""K4 under the transforms of PyTorch: compiled, exported, functional, vectorised or checkpointed, a sparse model computes with the
mask of the weights it is given, and a change of weights needs no new compilation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_oracle import assert_computes_like, assert_same, assert_weights_are_the_parameters, keep, masked_twin
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils.checkpoint import checkpoint

import nofm
from nofm.layers import SparseModule

_X = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(1))


class Small(nn.Module):
    """A convolution, a grouped one, a transposed one and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3)
        self.grouped = nn.Conv2d(8, 8, 1, groups=2)
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.grouped(self.conv(x)).tanh()).mean((2, 3)))


_AXES = {"conv.weight": 1, "grouped.weight": 1, "up.weight": 0, "head.weight": 1}


def _plain(seed: int) -> Small:
    torch.manual_seed(seed)
    return Small()


def _sparse(seed: int) -> Small:
    model = _plain(seed)
    nofm.sparsify_(model, "2:4", preset="all")
    return model


def _twin(seed: int) -> nn.Module:
    return masked_twin(_plain(seed), _AXES)


# ---- torch.compile ----


@pytest.fixture(autouse=True)
def _no_compiled_code_from_other_tests() -> None:
    torch._dynamo.reset()


def test_compiled_forward_and_backward_follow_the_weights_without_recompiling() -> None:
    model, backend = _sparse(0), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for seed in (0, 1, 2):
        model.load_state_dict(_plain(seed).state_dict())
        assert_computes_like(model, _twin(seed), lambda m: (compiled if m is model else m)(_X))
    assert backend.frame_count == 1
    assert_weights_are_the_parameters(model)


def test_compiled_masks_are_bit_for_bit_those_of_eager() -> None:
    model = nn.Linear(64, 64)
    with torch.no_grad():
        model.weight.copy_(torch.randint(-3, 4, (64, 64)))  # ties everywhere
    nofm.sparsify_(model, "2:4")
    expected = model.weight.detach().where(keep(model.weight, 2, 4, 1), 0.0)
    compiled = torch.compile(model, fullgraph=True, backend="inductor")
    with torch.no_grad():
        model.bias.zero_()
        assert_same(compiled(torch.eye(64)), expected.T)
        model.weight.copy_(model.weight.flip(1))  # the mask is not just the flipped mask, for the first of equals is kept
        expected = model.weight.where(keep(model.weight, 2, 4, 1), 0.0)
        assert_same(compiled(torch.eye(64)), expected.T)


def test_a_compiled_transformer_layer() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    twin = masked_twin(model, {name: 1 for name, p in model.named_parameters() if p.dim() == 2})
    nofm.sparsify_(model, "2:4", preset="all")
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = torch.randn(2, 3, 16)
    assert_computes_like(model, twin, lambda m: (compiled if m is model else m)(x))
    assert backend.frame_count == 1


class Breaks(nn.Linear):
    """Has a graph break in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_graph_break_inside_a_unit() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    model.linear2 = Breaks(16, 16)
    twin = masked_twin(model, {name: 1 for name, p in model.named_parameters() if p.dim() == 2})
    nofm.sparsify_(model, "2:4", preset="all")
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(2, 3, 16)
    for _ in range(2):
        assert_computes_like(model, twin, lambda m: (compiled if m is model else m)(x))
        assert_weights_are_the_parameters(model)


def test_sparsify_fold_and_sites_reach_inside_a_compiled_model() -> None:
    model = _plain(0)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same(compiled(_X), _plain(0)(_X))
    summary = nofm.sparsify_(compiled, {"conv": "2:4", "grouped": "2:4", "up": "2:4", "head": "2:4"})
    assert [row.name for row in summary.sparse] == ["conv", "grouped", "up", "head"]
    assert isinstance(model.conv, SparseModule)
    assert_same(compiled(_X), _twin(0)(_X))  # compiled again, for the model is another
    nofm.fold_(compiled)
    assert type(model.conv) is nn.Conv2d
    assert_same(compiled(_X), _twin(0)(_X))


def test_a_model_wrapped_in_data_parallel_has_its_own_names() -> None:
    wrapped = nn.DataParallel(_plain(0))
    summary = nofm.sparsify_(wrapped, "2:4")
    assert {row.name for row in summary.rows} == {"conv", "grouped", "up", "head"}
    assert nofm.summary(wrapped) == summary
    assert isinstance(nofm.densify_(wrapped), Small)


def test_exported() -> None:
    model = _sparse(0)
    exported = torch.export.export(model, (_X,))
    assert set(exported.state_dict) == set(_plain(0).state_dict())
    module = exported.module()
    assert_same(module(_X), _twin(0)(_X))
    module.load_state_dict(_plain(1).state_dict())  # the mask is part of the program, not of the moment of the export
    assert_same(module(_X), _twin(1)(_X))
    assert_weights_are_the_parameters(model)


# ---- torch.func ----


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:FutureWarning")
@pytest.mark.parametrize("part", ["", "head"], ids=["model", "layer"])
def test_a_trace_that_would_be_dense_is_refused(part: str) -> None:
    model = _plain(0)
    nofm.sparsify_(model, "2:4", preset="all")
    x = torch.randn(2, 8) if part else _X
    expected = model.get_submodule(part)(x)
    with pytest.raises(nofm.LayerError, match=r"torch\.jit\.trace.* trace nofm\.fold_\(copy\.deepcopy\(model\)\)"):
        torch.jit.trace(model.get_submodule(part), x)
    folded = copy.deepcopy(model)
    nofm.fold_(folded)
    assert_same(torch.jit.trace(folded.get_submodule(part), x)(x), expected)
    assert_same(model.get_submodule(part)(x), expected)


def test_functional_call_masks_the_weights_it_is_given() -> None:
    model, weights = _sparse(0), dict(_plain(1).named_parameters())
    assert_same(functional_call(model, weights, (_X,)), _twin(1)(_X))
    assert_same(model(_X), _twin(0)(_X))


def test_functional_call_of_a_recurrent_layer() -> None:
    torch.manual_seed(0)
    plain, given = nn.LSTM(8, 8), nn.LSTM(8, 8)
    sparse = copy.deepcopy(plain)
    nofm.sparsify_(sparse, "2:4")
    axes = {"weight_ih_l0": 1, "weight_hh_l0": 1}
    x = _X[0, :, 0].T.contiguous()
    assert_same(functional_call(sparse, dict(given.named_parameters()), (x,)), masked_twin(given, axes)(x))
    assert_same(sparse(x), masked_twin(plain, axes)(x))


def test_grad_is_straight_through() -> None:
    model, twin = _sparse(0), _twin(0)

    def loss(of: nn.Module, weights: dict[str, Tensor]) -> Tensor:
        return functional_call(of, weights, (_X,)).square().sum()

    got = grad(lambda weights: loss(model, weights))({name: p.detach() for name, p in model.named_parameters()})
    expected = grad(lambda weights: loss(twin, weights))({name: p.detach() for name, p in twin.named_parameters()})
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name


@pytest.mark.parametrize("options", [{}, {"pad": True}], ids=["whole-groups", "padded"])
def test_vmap_over_stacked_models(options: dict[str, Any]) -> None:
    size = 10 if options else 8
    members, twins = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        members.append(nn.Sequential(nn.Linear(size, 8), nn.Tanh(), nn.Linear(8, 4)))
        twins.append(masked_twin(members[-1], {"0.weight": 1, "2.weight": 1}))
        nofm.sparsify_(members[-1], "2:4", preset="all", **options)
    weights, buffers = stack_module_state(members)
    base = copy.deepcopy(members[0]).to("meta")
    x = torch.randn(5, size)

    def loss(member: dict[str, Tensor], its_buffers: dict[str, Tensor]) -> Tensor:
        return functional_call(base, (member, its_buffers), (x,)).square().sum()

    outputs = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(weights, buffers)
    torch.testing.assert_close(outputs, torch.stack([twin(x) for twin in twins]), rtol=1e-6, atol=1e-6)
    gradients = vmap(grad(loss))({name: p.detach() for name, p in weights.items()}, buffers)
    for i, twin in enumerate(twins):
        twin(x).square().sum().backward()
        torch.testing.assert_close(gradients["0.weight"][i], twin[0].weight.grad, rtol=1e-5, atol=1e-6)


# Transforms over something else than the weights, which then are ordinary tensors, but what is made from them is not.
_AROUND: dict[str, Any] = {
    "grad of inputs": lambda m: grad(lambda x: m(x).square().sum())(_X),
    "grad of a bias": lambda m: grad(lambda bias: functional_call(m, {"conv.bias": bias}, (_X,)).square().sum())(m.conv.bias.detach()),
    "jacrev": lambda m: jacrev(m)(_X[:1]),
    "jvp": lambda m: jvp(m, (_X,), (_X,))[1],
    "jacfwd": lambda m: jacfwd(lambda bias: functional_call(m, {"head.bias": bias}, (_X,)))(m.head.bias.detach()),
    "hessian": lambda m: hessian(lambda bias: functional_call(m, {"head.bias": bias}, (_X,)).square().sum())(m.head.bias.detach()),
    "vmap": lambda m: vmap(lambda x: m(x[None])[0])(_X),
    "vmap of a layer": lambda m: vmap(m.head)(_X[:, :, 0, 0]),
    "grad of a layer": lambda m: grad(lambda x: m.head(x).square().sum())(_X[:, :, 0, 0]),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning", "ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("transform", _AROUND.values(), ids=_AROUND)
def test_transforms_over_other_things_than_weights(transform: Any) -> None:
    model = _sparse(0)
    torch.testing.assert_close(transform(model), transform(nofm.fold_(_sparse(0))), rtol=1e-5, atol=1e-6)
    assert_weights_are_the_parameters(model)


@pytest.mark.parametrize("part", ["", "head"], ids=["model", "layer"])
@pytest.mark.parametrize("way", ["torch.func", "dual numbers"])
def test_forward_mode_is_the_transpose_of_backward(part: str, way: str) -> None:
    """The derivative of a straight-through weight is the identity in both."""
    module = _sparse(0).get_submodule(part)
    x = torch.randn(2, 8) if part else _X
    weights = {name: p.detach() for name, p in module.named_parameters()}
    tangents = {name: torch.randn_like(p) for name, p in weights.items()}

    def call(given: dict[str, Tensor]) -> Tensor:
        return functional_call(module, given, (x,))

    if way == "torch.func":
        out, tangent = jvp(call, (weights,), (tangents,))
    else:
        with forward_ad.dual_level():
            out, tangent = forward_ad.unpack_dual(call({name: forward_ad.make_dual(weights[name], tangents[name]) for name in weights}))
    cotangent = torch.randn_like(out)
    (gradients,) = vjp(call, weights)[1](cotangent)
    backward = sum((gradients[name] * tangents[name]).sum() for name in weights)
    torch.testing.assert_close((tangent * cotangent).sum(), backward, rtol=1e-4, atol=1e-5)


# ---- gradient checkpointing ----


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not-reentrant", "reentrant"])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    x = _X.clone().requires_grad_()
    assert_computes_like(_sparse(0), _twin(0), lambda m: checkpoint(m, x, use_reentrant=use_reentrant))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not-reentrant", "reentrant"])
def test_checkpointing_a_part_of_a_unit(use_reentrant: bool) -> None:
    """The part is computed a second time in backward, outside of the forward that had its weights in place."""

    class Checkpointed(nn.TransformerEncoderLayer):
        def _ff_block(self, x: Tensor) -> Tensor:
            return checkpoint(super()._ff_block, x, use_reentrant=use_reentrant)

    torch.manual_seed(0)
    model = Checkpointed(16, 2, 16, dropout=0.0, batch_first=True)
    twin = masked_twin(model, {name: 1 for name, p in model.named_parameters() if p.dim() == 2})
    nofm.sparsify_(model, "2:4", preset="all")
    x = torch.randn(2, 3, 16, requires_grad=True)
    assert_computes_like(model, twin, lambda m: m(x))
