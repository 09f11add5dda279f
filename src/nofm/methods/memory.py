"""What a method knows from one step to the next beside masks. Methods are frozen values, so it lies here, and checkpoints hold it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import OptimizerError
from ..site import Site
from .inside import groups_of, optimizers_in

__all__ = ["Memory"]


class Memory:
    """Two kinds of things, and a checkpoint holds all of both.

    tensors  by name, for the method to read, write and replace. `Method.start` makes them, by any names: "decay" for one of the method,
             f"{site.key}:mask" for one of each weight. A state brings its own, by these names, on the devices where `start` made them.
    learned  parameters of the method's own, which the optimizer trains beside the weights they belong to; `learn` makes them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.learned: dict[str, nn.Parameter] = {}
        self.optimizers = optimizers

    def learn(self, site: Site, value: Tensor) -> nn.Parameter:
        """A new parameter that starts as `value` and trains with the learning rate and weight decay of the site's weight."""
        name, parameter = f"{site.key}:{len(self.learned)}", nn.Parameter(value)
        for group in _groups(self.optimizers):
            if any(param is site.weight for param in group["params"]):
                group["params"].append(parameter)  # no group of its own, which a scheduler made before would not know
        self.learned[name] = parameter
        return parameter

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.learned

    def forget(self) -> None:
        """Take the learned parameters out of the optimizers again."""
        for group in _groups(self.optimizers):
            group["params"][:] = [param for param in group["params"] if not any(param is mine for mine in self.learned.values())]
        for optimizer in self.optimizers:
            for inside in optimizers_in(optimizer):
                for parameter in self.learned.values():
                    inside.state.pop(parameter, None)
        self.learned = {}

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": dict(self.tensors), "learned": {name: p.detach() for name, p in self.learned.items()}}

    def check(self, state: dict[str, Any]) -> None:
        """Raise where `load_state_dict` could not put `state` in its places."""
        if unlike := sorted(set(state["learned"]) ^ set(self.learned)):
            raise OptimizerError(f"this state and the attached method do not learn the same parameters: {unlike[0]} is in one only")
        for name, tensor in (*state["tensors"].items(), *state["learned"].items()):
            mine = self.learned.get(name, self.tensors.get(name))
            if mine is not None and mine.shape != tensor.shape:
                raise OptimizerError(f"{name} has shape {tuple(tensor.shape)} in this state, {tuple(mine.shape)} in the attached method")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check(state)
        before, self.tensors = self.tensors, {}
        for name, tensor in state["tensors"].items():
            mine = before.get(name)
            self.tensors[name] = tensor if mine is None else tensor.to(mine.device, copy=True)
        for name, tensor in state["learned"].items():
            self.learned[name].data.copy_(tensor)


def _groups(optimizers: Sequence[Optimizer]) -> Iterator[dict[str, Any]]:
    return (group for optimizer in optimizers for group in groups_of(optimizer))
