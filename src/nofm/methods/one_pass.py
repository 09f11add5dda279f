"""SR-STE inside the optimizer's own pass over the weights: what `attach(..., fused=True)` does.

The optimizer stays the user's: a torch.optim.SGD, Adam or AdamW with its own state, so that checkpoints, schedules and gradient scalers
know nothing of this. In its `step` torch asks `_init_group` for the parameters of each group that have a gradient. Here the sparse
weights that a kernel can serve are left out of the answer, and moved by one launch over all groups when the last group is asked for:
after everything that may still change gradients (hooks before the step, closures), before anything that looks at new weights
(hooks after it). Torch moves the others.

Tried on paper and left: setting `.grad` to None around the step, which needs nothing private of torch, but hooks of others (clipping,
logging) would not find the gradients, and say nothing; optimizers of our own, which whoever builds the optimizer (a trainer, a config)
would have to know.

The term never reaches `.grad`, which holds after the step what backward left there.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..errors import OptimizerError
from ..kernels.select import forced_path, why_not_one_pass
from ..kernels.steps import Numbers, Rule, Squad, Term
from ..layers import Site
from .finite import FiniteWatch

__all__ = ["OnePass", "check_optimizer"]


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise if the steps of `optimizer` cannot hold a term."""
    name = type(optimizer).__name__
    if type(optimizer) not in (SGD, Adam, AdamW):
        raise OptimizerError(f"fused=True knows the steps of torch.optim.SGD, Adam and AdamW, not of {name}; attach without it")
    if not hasattr(optimizer, "_init_group"):
        raise OptimizerError(f"fused=True does not know {name} as torch {torch.__version__} has it; attach without it")
    if "_init_group" in vars(optimizer):
        raise OptimizerError(f"this {name} has a fused method attached already (to another model?); attach without fused=True")


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Weights that go together, by place, in a plan."""

    rule: Rule
    device: torch.device
    places: list[int]


@dataclass(slots=True)
class _Plan:
    key: list[Any]
    parts: list[_Part]
    rest: list[int]


class OnePass:
    """Takes sparse weights out of an optimizer's hands and moves them, with the term, in the middle of its step."""

    def __init__(self, optimizer: Optimizer, watch: FiniteWatch) -> None:
        self.unserved: dict[str, str] = {}  # the weights that the optimizer moved itself in the last step, and why
        self.moved: list[tuple[str, Tensor]] = []  # those that were moved here, by key
        self._optimizer = cast(Any, optimizer)  # torch types neither its state nor its groups
        self._watch = watch
        self._theirs = self._optimizer._init_group
        vars(optimizer)["_init_group"] = self._init_group
        self._plan = _Plan([], [], [])
        self._squads: dict[tuple[Rule, torch.device], Squad] = {}
        self._term = Term(0.0, "weight", False)
        self._kept: list[tuple[Site, nn.Parameter, dict[str, Any]]] = []  # what is to be moved in this step
        self._ids: set[int] = set()
        self._begun: dict[int, nn.Parameter] = {}  # whose momentum begins in this step

    def remove(self) -> None:
        """Give the weights back to the optimizer."""
        vars(self._optimizer).pop("_init_group", None)

    # ---- before the step ----

    def keep_back(self, weights: Sequence[tuple[Site, nn.Parameter, dict[str, Any]]], term: Term | None) -> list[int]:
        """Keep those of `weights` (with their parameter groups) that a kernel can move with `term`; returns the places of the others."""
        self._kept, self._ids, self._begun, self.moved = [], set(), {}, []
        if term is None:
            return list(range(len(weights)))
        key = [forced_path(), *(self._look(*weight) for weight in weights)]
        if key != self._plan.key:
            self._plan = self._make_plan(key, weights)
        self._term, self._kept = term, list(weights)
        self._ids = {id(weights[i][1]) for part in self._plan.parts for i in part.places}
        return self._plan.rest

    def _look(self, site: Site, param: nn.Parameter, group: dict[str, Any]) -> tuple[Any, ...]:
        """What a plan depends on: how weight, gradient and states look, where they lie, and the kind of step."""
        grad, state = param.grad, self._optimizer.state.get(param, {})
        assert grad is not None
        held = [state[name] for name in ("momentum_buffer", "exp_avg", "exp_avg_sq") if isinstance(state.get(name), Tensor)]
        lie = tuple((t.data_ptr(), t.dtype, t.stride()) for t in held) if type(param) is nn.Parameter else ()
        options = tuple(bool(group.get(name)) for name in ("momentum", "nesterov", "amsgrad", "differentiable"))
        at = param.data_ptr() if type(param) is nn.Parameter else 0
        return id(param), at, param.dtype, param.shape, param.stride(), grad.dtype, grad.stride(), type(grad), lie, options, site.grouping

    def _make_plan(self, key: list[Any], weights: Sequence[tuple[Site, nn.Parameter, dict[str, Any]]]) -> _Plan:
        together: dict[tuple[Rule, torch.device], list[int]] = {}
        rest, before, self.unserved = [], self.unserved, {}
        for i, (site, param, group) in enumerate(weights):
            rule = self._rule(group)
            if (reason := self._why_not(site, param, group, rule)) is None:
                together.setdefault((rule, param.device), []).append(i)
            else:
                rest.append(i)
                self.unserved[site.key] = reason
        if self.unserved and not before:
            key_of, reason = next(iter(self.unserved.items()))
            warnings.warn(
                f"fused=True does not serve {len(rest)} of {len(weights)} sparse weights, which take two passes: {key_of}: {reason}",
                stacklevel=2,
            )
        return _Plan(key, [_Part(*what, places) for what, places in together.items()], rest)

    def _rule(self, group: dict[str, Any]) -> Rule:
        if isinstance(self._optimizer, Adam):
            return Rule(adam=True)
        return Rule(adam=False, momentum=group["momentum"] != 0, nesterov=bool(group["nesterov"]))

    def _why_not(self, site: Site, param: nn.Parameter, group: dict[str, Any], rule: Rule) -> str | None:
        if group.get("amsgrad") or group.get("differentiable"):
            return "amsgrad and differentiable steps are torch's own"
        if any(isinstance(number, Tensor) for number in (group["weight_decay"], *group.get("betas", ()))):
            return "weight decay or betas are tensors"
        if type(param) is not nn.Parameter:
            return "it is spread over processes"
        state = self._optimizer.state.get(param, {})
        if rule.adam and state and state["step"].dtype != torch.float32:
            return "Adam counts its steps in another type than fp32"
        held = [state[name] for name in rule.states if state.get(name) is not None]
        assert param.grad is not None
        return why_not_one_pass(param, site.grouping, [param.grad, *held])

    # ---- in the step ----

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        """Torch's own, without the weights that are kept back; moves those when the last group is asked for."""
        if not self._ids:
            return self._theirs(group, *lists)
        answer = self._theirs({**group, "params": [p for p in group["params"] if id(p) not in self._ids]}, *lists)
        if group is self._optimizer.param_groups[-1]:
            self._ids = set()
            for part in self._plan.parts:
                self._move(part)
        return answer

    def _move(self, part: _Part) -> None:
        kept = [self._kept[i] for i in part.places]
        grads = [_grad_as_planned(site, param, self._plan.key[1 + i]) for i, (site, param, _) in zip(part.places, kept, strict=True)]
        states = [self._state(param, group, part.rule) for _, param, group in kept]
        columns: list[Sequence[Tensor]] = [[param for _, param, _ in kept], grads]
        columns += [[state[name] for state in states] for name in part.rule.states]
        lrs = [_there(group["lr"], part.device) for _, _, group in kept]
        counts = [_there(state["step"], part.device) if part.rule.adam else None for state in states]
        numbers = [self._numbers(part, *weight[1:], state) for weight, state in zip(kept, states, strict=True)]
        scale, found_inf = (_as_fp32(getattr(self._optimizer, name, None), part.device) for name in ("grad_scale", "found_inf"))
        squad = self._squads.setdefault((part.rule, part.device), Squad())
        with torch.cuda.device(part.device) if part.device.type == "cuda" else nullcontext():  # which Triton launches on
            settings = squad.settings(part.rule, numbers, lrs, counts, found_inf, part.device)
            groupings, word = [site.grouping for site, _, _ in kept], self._watch.word(part.device)
            squad.step(part.rule, self._term, columns, groupings, settings, scale, found_inf, word, layout=part)
        self.moved += [(site.key, param) for site, param, _ in kept]

    def _state(self, param: nn.Parameter, group: dict[str, Any], rule: Rule) -> dict[str, Any]:
        """The optimizer's state of a weight, begun as torch begins it."""
        if not rule.states:
            return {}
        state: dict[str, Any] = self._optimizer.state[param]
        if rule.adam and not state:
            self._theirs({**group, "params": [param]}, *([] for _ in range(6)))
        elif rule.momentum and state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            self._begun[id(param)] = param
        return state

    def _numbers(self, part: _Part, param: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> Numbers:
        """As `kernels.steps` wants them; 0 for what only the device knows."""
        lr, decay, sign = group["lr"], group["weight_decay"], -1.0 if group["maximize"] else 1.0
        lr = 0.0 if isinstance(lr, Tensor) and lr.device == part.device else _in_fp32(float(lr))
        if not part.rule.adam:
            share = 1.0 if id(param) in self._begun else 1.0 - group["dampening"]
            return lr, decay, 0.0, self._term.decay, sign, group["momentum"], share, 0.0, 0.0
        into, off = (0.0, decay) if group["decoupled_weight_decay"] else (decay, 0.0)
        count = 0.0
        if state["step"].device != part.device:
            state["step"] += 1
            count = float(state["step"])
        return (lr, into, off, self._term.decay, sign, *group["betas"], group["eps"], count)

    # ---- after the step ----

    def skipped(self) -> None:
        """A scaler has found infinite gradients: no weight has moved, and no momentum has begun."""
        for param in self._begun.values():
            del self._optimizer.state[param]["momentum_buffer"]


def _grad_as_planned(site: Site, param: nn.Parameter, look: tuple[Any, ...]) -> Tensor:
    """The gradient as it is now: others may have changed it since the plan was made, though not how it lies in memory."""
    grad = param.grad
    if grad is None or (grad.dtype, grad.stride(), type(grad)) != look[5:8]:
        raise OptimizerError(
            f"the gradient of {site.key} was replaced between the hooks before the step and the step, by one of another type or layout; "
            "change it in place, or attach without fused=True"
        )
    return grad


def _there(number: float | Tensor, device: torch.device) -> Tensor | None:
    """`number` if it is a tensor on the weights' device, where alone it can be read without waiting."""
    return number.to(torch.float32) if isinstance(number, Tensor) and number.device == device else None


def _in_fp32(number: float) -> float:
    """Rounded as a tensor on the device would be, so that a captured step gives the bits of one that is not."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _as_fp32(number: Tensor | None, device: torch.device) -> Tensor | None:
    return None if number is None else number.to(device, torch.float32)
