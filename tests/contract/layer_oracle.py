"""What a sparse layer should compute, found without the library: masks by sorting each group, and plain layers that hold the result.

A sparse layer is right if it does, bit for bit, what the plain layer does whose weights were masked by hand, and if its dense
weight gets the gradient that the masked weight of that plain layer gets (Eq. 3 of the paper: straight through).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nofm.layers import SparseModule

torch.set_num_threads(1)  # the tensors of these tests are tiny, and threads that wait for each other cost seconds


def keep(weight: Tensor, n: int, m: int, axis: int) -> Tensor:
    """True at the n largest of every m consecutive weights along `axis`, the first of equals first; a last group may be short."""
    rows = weight.detach().abs().transpose(axis, -1)
    kept = torch.zeros(rows.shape, dtype=torch.bool, device=weight.device)
    for start in range(0, rows.shape[-1], m):
        group = rows[..., start : start + m]
        kept[..., start : start + m].scatter_(-1, group.argsort(dim=-1, descending=True, stable=True)[..., :n], True)
    return kept.transpose(axis, -1)


def masked_twin(model: nn.Module, axes: Mapping[str, int], n: int = 2, m: int = 4) -> nn.Module:
    """A plain copy of `model` with zeros written into the parameters named in `axes`, along the axis given there."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, axis in axes.items():
            weight = twin.get_parameter(name)
            weight.masked_fill_(~keep(weight, n, m, axis), 0.0)
    return twin


def plain_axes(model: nn.Module) -> dict[str, int]:
    """Every weight of a plain model of Linear and Conv layers that a 2:4 pattern divides, depthwise ones left out."""
    axes = {}
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.weight.shape[1] % 4 == 0:
            axes[f"{prefix}.weight"] = 1
    return axes


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors of a nested output, in order."""
    if isinstance(output, Tensor):
        return [output]
    if output is None:
        return []
    if isinstance(output, Mapping):
        output = list(output.values())
    return [tensor for part in output for tensor in tensors_in(part)]


def backward(output: Any) -> None:
    """A backward pass with a different cotangent for every element."""
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    generator = torch.Generator().manual_seed(7)
    torch.autograd.backward(tensors, [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in tensors])


def assert_same(got: Any, expected: Any) -> None:
    """Equal tensors, bit for bit."""
    got, expected = tensors_in(got), tensors_in(expected)
    assert len(got) == len(expected) > 0
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), f"largest difference {(mine - theirs).abs().max()}"


def assert_computes_like(sparse: nn.Module, twin: nn.Module, call: Callable[[nn.Module], Any]) -> None:
    """Same output, and the gradient of each parameter is the gradient of the twin's."""
    for model in (sparse, twin):
        model.zero_grad()
    got, expected = call(sparse), call(twin)
    assert_same(got, expected)
    backward(got)
    backward(expected)
    grads = {name: p.grad for name, p in sparse.named_parameters()}
    assert any(grad is not None for grad in grads.values())
    for name, theirs in twin.named_parameters():
        assert (grads[name] is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert torch.equal(grads[name], theirs.grad), name


def assert_weights_are_the_parameters(model: nn.Module) -> None:
    """Outside of forward nothing hides a stored weight, and no layer believes itself in forward."""
    for name, module in model.named_modules():
        if isinstance(module, SparseModule):
            assert set(vars(module)) & (set(module._nofm) | {"_nofm_hidden", "_nofm_thread", "_nofm_made"}) == set(), name
        if isinstance(module, nn.RNNBase):
            assert all(flat is getattr(module, p) for flat, p in zip(module._flat_weights, module._flat_weights_names, strict=True))


class Operators(TorchDispatchMode):
    """Notes the names of the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))
