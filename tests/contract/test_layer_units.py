"""Modules that read the weights of their children without calling them: attention, Transformer layers in eval, and models' own.

Their children's masked weights must be in place while the parent computes. Compared, bit for bit, with plain modules whose weights
were masked by the test itself; for the fused paths of eval the operator that ran is looked at as well.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from layer_oracle import Operators, assert_computes_like, assert_same, assert_weights_are_the_parameters, masked_twin
from torch import Tensor, nn
from torch.nn import functional as F

import nofm
from nofm.layers import SparseModule
from nofm.readers import children_read

_X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
_PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


def _axes(model: nn.Module) -> dict[str, int]:
    """Every matrix of a Transformer: all its weights of two dimensions."""
    return {name: 1 for name, parameter in model.named_parameters() if parameter.dim() == 2}


def _pair(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The sparse model, and the plain one that it should compute like."""
    twin = masked_twin(model, _axes(model))
    nofm.sparsify_(model, "2:4", preset="all", **options)
    assert {site.key for site in nofm.sites(model)} == set(_axes(twin))
    return model, twin


# ---- MultiheadAttention ----

_ATTENTION = {
    "same": {},
    "batch_first": {"batch_first": True},
    "kdim-vdim": {"kdim": 8, "vdim": 12},
    "kdim-vdim-batch_first": {"kdim": 8, "vdim": 12, "batch_first": True, "bias": False},
    "bias_kv": {"add_bias_kv": True, "add_zero_attn": True},
}


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no_weights"])
@pytest.mark.parametrize("options", _ATTENTION.values(), ids=_ATTENTION)
def test_attention_in_training(options: dict[str, Any], need_weights: bool) -> None:
    torch.manual_seed(0)
    sparse, twin = _pair(nn.MultiheadAttention(16, 2, **options))
    key, value = _X[..., : options.get("kdim", 16)], _X[..., : options.get("vdim", 16)]
    assert_computes_like(sparse, twin, lambda attention: attention(_X, key, value, need_weights=need_weights))
    assert_weights_are_the_parameters(sparse)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("batch_first", [True, False], ids=["fused", "not_fused"])
def test_attention_in_eval(batch_first: bool, mode: type[AbstractContextManager[None]]) -> None:
    torch.manual_seed(0)
    sparse, twin = _pair(nn.MultiheadAttention(16, 2, batch_first=batch_first).eval())
    with mode():
        assert_same(sparse(_X, _X, _X, need_weights=False), twin(_X, _X, _X, need_weights=False))
        with Operators() as ran:
            sparse(_X, _X, _X, need_weights=False)
    assert ("_native_multi_head_attention" in ran.names) == batch_first


@pytest.mark.parametrize(("rules", "sparse"), [({"in_proj_weight": "2:4"}, ["in_proj_weight"]), ({"out_proj": "2:4"}, ["out_proj.weight"])])
def test_half_of_an_attention_can_be_sparse(rules: dict[str, str], sparse: list[str]) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2)
    twin = masked_twin(attention, dict.fromkeys(sparse, 1))
    nofm.sparsify_(attention, rules)
    assert_computes_like(attention, twin, lambda model: model(_X, _X, _X))


# ---- Transformer layers ----


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


_TRANSFORMERS = {
    "encoder-layer": (_layer, lambda model: model(_X, src_key_padding_mask=_PADDING)),
    "encoder": (lambda: nn.TransformerEncoder(_layer(), 2, enable_nested_tensor=False), lambda model: model(_X)),
    "decoder-layer": (lambda: nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0), lambda model: model(_X, _X.flip(0))),
    "transformer": (lambda: nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True), lambda model: model(_X, _X.flip(0))),
}


@pytest.mark.parametrize(("make", "call"), _TRANSFORMERS.values(), ids=_TRANSFORMERS)
def test_transformers_in_training(make: Any, call: Any) -> None:
    torch.manual_seed(0)
    sparse, twin = _pair(make())
    assert_computes_like(sparse, twin, call)
    assert_weights_are_the_parameters(sparse)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(("make", "call"), _TRANSFORMERS.values(), ids=_TRANSFORMERS)
def test_transformers_in_eval_take_the_fused_path_with_masked_weights(make: Any, call: Any, mode: Any) -> None:
    torch.manual_seed(0)
    sparse, twin = _pair(make().eval())
    has_fused_layer = any(isinstance(module, nn.TransformerEncoderLayer) for module in sparse.modules())
    folded = nofm.fold_(copy.deepcopy(sparse)).requires_grad_(False)
    twin.requires_grad_(False)  # torch.matmul takes another kernel for a weight that requires a gradient, even where none is made
    with mode():
        expected, fused = call(twin), call(sparse)
        assert_same(fused, expected)
        assert_same(call(folded), expected)
        with Operators() as ran:  # which takes other kernels than a run that nobody looks at, so the numbers are compared above
            call(sparse)
        assert ("_transformer_encoder_layer_fwd" in ran.names) == has_fused_layer
    # The path that is not fused computes the same numbers by other kernels: close, and equal to its own twin.
    slow = call(sparse)
    assert_same(slow, call(twin.requires_grad_()))
    real = ~_PADDING if call is _TRANSFORMERS["encoder-layer"][1] else torch.ones(2, 5, dtype=torch.bool)
    torch.testing.assert_close(fused[real], slow.detach()[real], rtol=1e-4, atol=1e-5)
    assert_weights_are_the_parameters(sparse)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_an_encoder() -> None:
    torch.manual_seed(0)
    sparse, twin = _pair(nn.TransformerEncoder(_layer(), 2).eval())
    with torch.no_grad():
        assert_same(sparse(_X, src_key_padding_mask=_PADDING), twin(_X, src_key_padding_mask=_PADDING))


@pytest.mark.parametrize(
    "call",
    [
        lambda layer: layer.linear1(_X),
        lambda layer: layer._ff_block(_X),
        lambda layer: layer._sa_block(_X, None, None),
        lambda layer: layer.self_attn(_X, _X, _X),
        lambda layer: layer.self_attn.out_proj(_X),
    ],
    ids=["linear1", "_ff_block", "_sa_block", "self_attn", "out_proj"],
)
def test_parts_of_a_layer_that_are_called_from_outside(call: Any) -> None:
    torch.manual_seed(0)
    sparse, twin = _pair(_layer())
    sparse(_X)  # a call of the whole must not leave the parts believing that they are inside one
    assert_computes_like(sparse, twin, call)


# ---- readers in general ----


class Reads(nn.Module):
    """Hands a child's weight to a function, by way of a method, and never calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.told = nn.Linear(16, 16), nn.Linear(16, 16)
        nn.init.ones_(self.told.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._project(self.told(x.to(self.told.weight.dtype)))

    def _project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.qkv.weight.t().t())

    def reset(self) -> None:
        nn.init.zeros_(self.told.weight)


class ReadsMore(Reads):
    """Inherits a forward that reads."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class OtherName(nn.Module):
    """Calls itself something else."""

    def __init__(me) -> None:
        super().__init__()
        me.qkv, me.told = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(me, x: Tensor) -> Tensor:
        return F.linear(me.told(x), me.qkv.weight)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.norm = nn.LayerNorm(16)


class InALoop(Layers):
    """Reads weights of children that its source does not spell out."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.linear(x, layer.weight, layer.bias).tanh()
        return x


class ByIndex(Layers):
    """By a way that is no chain of names."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layers[1].weight.t() + getattr(self.layers, "0").weight)


class Calls(Layers):
    """Asks for facts of weights and for biases, and calls the layers. ("layer.weight" here is no read.)"""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:  # layer.weight
            x = layer(x.to(layer.weight.dtype)) + layer.bias + len(layer.weight.shape)
        return x


_WITHOUT_SOURCE: dict[str, Any] = {"nn": nn, "F": F}
exec(  # as if typed at a prompt
    "class Typed(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__(); self.qkv = nn.Linear(16, 16)\n"
    "    def forward(self, x):\n"
    "        return F.linear(x, self.qkv.weight)\n",
    _WITHOUT_SOURCE,
)


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (Reads, ["qkv"]),
        (ReadsMore, ["qkv"]),
        (_WITHOUT_SOURCE["Typed"], ["qkv"]),
        (InALoop, ["layers.0", "layers.1"]),
        (ByIndex, ["layers.0", "layers.1"]),
        (OtherName, ["qkv"]),
        (Calls, []),
        (lambda: nn.Sequential(nn.Linear(4, 4)), []),
    ],
    ids=["reader", "subclass", "no-source", "loop", "index", "other-name", "calls", "not-a-reader"],
)
def test_which_children_a_forward_reads(make: Any, read: list[str]) -> None:
    assert children_read(make()) == read


@pytest.mark.parametrize(
    "make",
    [Reads, ReadsMore, _WITHOUT_SOURCE["Typed"], InALoop, ByIndex, OtherName, Calls],
    ids=["reader", "subclass", "no-source", "loop", "index", "other-name", "calls"],
)
def test_a_module_that_reads_its_childs_weight_reads_the_masked_one(make: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.ReLU())
    sparse, twin = _pair(model)
    assert_computes_like(sparse, twin, lambda m: m(_X))
    assert_weights_are_the_parameters(sparse)
    nofm.densify_(sparse)
    assert not any(isinstance(module, SparseModule) for module in sparse.modules())


def test_a_reader_of_a_reader_and_a_layer_that_calls_itself() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Reads()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + F.linear(x, self.inner.qkv.weight)

    class Again(nn.Linear):
        def forward(self, x: Tensor, times: int = 3) -> Tensor:
            return self(F.linear(x, self.weight).tanh(), times - 1) if times else x

    torch.manual_seed(0)
    sparse, twin = _pair(nn.Sequential(Outer(), Again(16, 16)))
    assert_computes_like(sparse, twin, lambda m: m(_X))
    assert_weights_are_the_parameters(sparse)
