"""What an optimizer remembers, wherever that is: of a parameter in its state, of all together in its groups, and of either in another
optimizer that it wraps.

timm's Lookahead and others like it have a state of their own that is empty, or holds a part only, and leave the rest to the optimizer that
they were given. Lamb, Adan and Lookahead count their steps in `param_groups`, beside the learning rate, which is the loop's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "ABSENT",
    "clear_",
    "groups_of",
    "number_tensor",
    "numbers_in_groups",
    "optimizers_in",
    "put_back",
    "rememberers",
    "states_of",
]

_NONE = torch.empty(0)  # None, among tensors
ABSENT = torch.empty(0, 0)  # no entry at all

# What torch's optimizers remember that starts as zeros.
_MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta", "sum")
_FROM_ZERO = ("step", *_MOMENTS, "row_var", "col_var", "variance")


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """`optimizer`, and those that it wraps: which it holds, and which move parameters of its own."""
    found = [optimizer]
    for outer in found:  # grows while it is walked
        held = [each for value in vars(outer).values() for each in (value if isinstance(value, list | tuple) else (value,))]
        for each in held:
            if isinstance(each, Optimizer) and not any(each is known for known in found) and _share_parameters(each, outer):
                found.append(each)
    return found


def _share_parameters(one: Optimizer, other: Optimizer) -> bool:
    moved, also = ({id(param) for group in each.param_groups for param in group["params"]} for each in (one, other))
    return not moved.isdisjoint(also)


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Its groups and those of the optimizers that it wraps, each once: wrappers mostly hand out the very groups of what is inside."""
    return list({id(group): group for each in optimizers_in(optimizer) for group in each.param_groups}.values())


def rememberers(optimizer: Optimizer) -> list[Optimizer]:
    """Those of `optimizers_in` that have a state; of two that share one, the inner."""
    return list({id(each.state): each for each in optimizers_in(optimizer)}.values())


def states_of(optimizer: Optimizer, param: Tensor) -> list[tuple[Optimizer, dict[Any, Any]]]:
    """What each of its `rememberers` remembers of `param`."""
    return [(each, each.state.get(param, {})) for each in rememberers(optimizer)]


def clear_(state: dict[str, object], optimizer: Optimizer) -> None:
    """Make the optimizer forget a parameter: zeros, which is how most of torch's start, in the places where a CUDA graph looks for them.

    Not all do: NAdam multiplies what starts as 1, Rprop's step sizes start as its learning rate, SGD dampens all gradients but the first,
    and an optimizer from elsewhere may count its steps in a number of Python's, or start from ones. Such a state is emptied, and the
    optimizer makes it anew in its next step.
    """
    is_known = any(cls.__module__.startswith("torch.optim.") for cls in type(optimizer).__mro__ if cls is not Optimizer)
    is_known = is_known and not any(group.get("dampening") for group in optimizer.param_groups)
    if is_known and all(value is None or (name in _FROM_ZERO and isinstance(value, Tensor)) for name, value in state.items()):
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
    else:
        state.clear()


def _as_tensor(value: Any) -> Tensor | None:
    """A copy of a number, None, a tensor or a list of numbers, as saved states hold it; None where `value` is something else."""
    if value is None:
        return _NONE
    if isinstance(value, Tensor):
        return value.detach().clone()
    numbers = value if isinstance(value, list | tuple) else (value,)
    return number_tensor(value) if all(isinstance(number, int | float) for number in numbers) else None


def number_tensor(value: Any) -> Tensor:
    """A number, or a list of them, without rounding: torch would make fp32 of floats."""
    has_floats = any(isinstance(number, float) for number in (value if isinstance(value, list | tuple) else (value,)))
    return torch.tensor(value, dtype=torch.float64 if has_floats else None)


def numbers_in_groups(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """All that `_as_tensor` knows in the groups of the optimizers, by place and name: "0.1:step" of the second group of the first."""
    found: dict[str, Tensor] = {}
    for place, group in _places(optimizers):
        values = {f"{place}:{what}": _as_tensor(value) for what, value in group.items() if what != "params"}
        found |= {name: value for name, value in values.items() if value is not None}
    return found


def put_back(optimizers: Sequence[Optimizer], then: Mapping[str, Tensor]) -> None:
    """Give entries of the groups values that `numbers_in_groups` has found; take those that are `ABSENT` out."""
    for place, group in _places(optimizers):
        for name, value in then.items():
            if name.startswith(f"{place}:"):
                _put(group, name.removeprefix(f"{place}:"), value)


def _put(group: dict[str, Any], what: str, value: Tensor) -> None:
    now = group.get(what)
    if value.shape == ABSENT.shape:
        group.pop(what, None)
    elif value.shape == _NONE.shape:
        group[what] = None
    elif isinstance(now, Tensor):
        now.detach().copy_(value)  # in its place: an optimizer or a CUDA graph may hold it
    elif isinstance(now, list | tuple):
        group[what] = type(now)(value.tolist())
    else:
        group[what] = value.item() if now is None else type(now)(value.item())


def _places(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"{i}.{j}", group) for i, optimizer in enumerate(optimizers) for j, group in enumerate(groups_of(optimizer)))
