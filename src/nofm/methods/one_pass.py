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
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..errors import OptimizerError
from ..kernels.multi import at
from ..kernels.select import forced_path, why_not_one_pass
from ..kernels.steps import Numbers, Rule, Squad, Term
from ..masks import Grouping
from ..site import Site
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


_Weight: TypeAlias = tuple[Site, nn.Parameter, dict[str, Any]]  # with the optimizer's group that it is in


@dataclass(slots=True, eq=False)
class _Part:
    """Weights that go together, by place in the plan, and what of them is the same in every step of the plan."""

    rule: Rule
    device: torch.device
    places: list[int]
    named: list[tuple[str, Tensor]]
    groupings: list[Grouping]
    tensors: _Tensors | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Tensors:
    """The weights and states of a part, in columns, and Adam's counts of steps."""

    columns: list[list[Tensor]]
    counts: list[Tensor | None]


@dataclass(slots=True)
class _Plan:
    key: list[Any]
    parts: list[_Part]
    rest: list[int]
    ids: frozenset[int]  # of the weights in `parts`


_NO_PLAN = _Plan([], [], [], frozenset())


class OnePass:
    """Takes sparse weights out of an optimizer's hands and moves them, with the term, in the middle of its step."""

    def __init__(self, optimizer: Optimizer, watch: FiniteWatch) -> None:
        self.unserved: dict[str, str] = {}  # the weights that the optimizer moved itself in the last step, and why
        self.rest: list[int] = []  # their places
        self.moved: list[tuple[str, Tensor]] = []  # those that were moved here, by key
        self._optimizer = cast(Any, optimizer)  # torch types neither its state nor its groups
        self._watch = watch
        self._theirs = self._optimizer._init_group
        vars(optimizer)["_init_group"] = self._init_group
        self._plan = _NO_PLAN
        self._squads: dict[tuple[Rule, torch.device], Squad] = {}
        self._term = Term(0.0, "weight", False)
        self._weights: Sequence[_Weight] = ()
        self._grads: list[Tensor | None] = []
        self._ids: frozenset[int] = frozenset()  # of the weights that are to be moved in this step
        self._begun: dict[int, nn.Parameter] = {}  # whose momentum begins in this step

    def remove(self) -> None:
        """Give the weights back to the optimizer."""
        vars(self._optimizer).pop("_init_group", None)

    # ---- before the step ----

    def keep_back(self, weights: Sequence[_Weight], term: Term | None, compiled: bool = False) -> list[int]:
        """Keep those of `weights` that a kernel can move with `term`; returns the places of the others.

        None are kept back from a step that is `compiled`: that asks `_init_group` while it is traced, and never again.
        """
        self._ids, self._begun, self.moved, self.rest = frozenset(), {}, [], list(range(len(weights)))
        if compiled and term is not None:
            self._plan = _NO_PLAN
            self._tell({site.key: "optimizer.step is compiled" for site, _, _ in weights}, len(weights))
        if compiled or term is None:
            return self.rest
        self._term, self._weights, self._grads = term, weights, [param.grad for _, param, _ in weights]
        kinds = {id(group): _kind(group) for group in self._optimizer.param_groups}
        key: list[Any] = [forced_path()]
        for (site, param, group), grad in zip(weights, self._grads, strict=True):
            key.append((kinds[id(group)], site.seen_grouping, *self._look(param, grad)))
        if key != self._plan.key:
            self._plan = self._make_plan(key, weights)
        self._ids = self._plan.ids
        self.rest = self._plan.rest
        return self.rest

    def _look(self, param: nn.Parameter, grad: Any) -> tuple[Any, ...]:
        """What a plan depends on: how weight and gradient look and where they lie, and which tensors the states are."""
        state = self._optimizer.state.get(param)
        held = () if state is None else tuple((id(t), t.data_ptr()) for t in state.values() if type(t) is Tensor)
        at = param.data_ptr() if type(param) is nn.Parameter else id(param)
        return grad.dtype, grad.stride(), type(grad), at, param.dtype, param.shape, param.stride(), held

    def _make_plan(self, key: list[Any], weights: Sequence[_Weight]) -> _Plan:
        together: dict[tuple[Rule, torch.device], _Part] = {}
        rest, unserved = [], {}
        for i, (site, param, group) in enumerate(weights):
            rule = self._rule(group)
            if (reason := self._why_not(site, param, group, rule)) is None:
                part = together.setdefault((rule, param.device), _Part(rule, param.device, [], [], []))
                part.places.append(i)
                part.named.append((site.key, param))
                part.groupings.append(site.seen_grouping)
            else:
                rest.append(i)
                unserved[site.key] = reason
        self._tell(unserved, len(weights))
        ids = frozenset(id(param) for part in together.values() for _, param in part.named)
        return _Plan(key, list(together.values()), rest, ids)

    def _tell(self, unserved: dict[str, str], weights: int) -> None:
        """Note which weights are not served, and warn of it once."""
        before, self.unserved = self.unserved, unserved
        if unserved and not before:
            name, reason = next(iter(unserved.items()))
            warnings.warn(
                f"fused=True does not serve {len(unserved)} of {weights} sparse weights, which take two passes: {name}: {reason}",
                stacklevel=2,
            )

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
        return why_not_one_pass(param, site.seen_grouping, [param.grad, *held])

    # ---- in the step ----

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        """Torch's own, without the weights that are kept back; moves those when the last group is asked for."""
        if not self._ids:
            return self._theirs(group, *lists)
        answer = self._theirs({**group, "params": [p for p in group["params"] if id(p) not in self._ids]}, *lists)
        if group is self._optimizer.param_groups[-1]:
            self._ids = frozenset()
            for part in self._plan.parts:
                self._move(part)
        return answer

    def _move(self, part: _Part) -> None:
        weights = [self._weights[i] for i in part.places]
        grads = [self._grad(i, *self._weights[i]) for i in part.places]
        tensors = part.tensors or self._tensors(part, weights)
        scale, found_inf = (_as_fp32(getattr(self._optimizer, name, None), part.device) for name in ("grad_scale", "found_inf"))
        lr_of = {id(group): _there(group["lr"], part.device) for group in self._optimizer.param_groups}
        lrs = [lr_of[id(group)] for _, _, group in weights]
        squad = self._squads.setdefault((part.rule, part.device), Squad())
        with at(part.device):
            settings = squad.settings(part.rule, self._numbers(part, weights), lrs, tensors.counts, found_inf, part.device)
            columns: list[Sequence[Tensor]] = [tensors.columns[0], grads, *tensors.columns[1:]]
            word = self._watch.word(part.device)
            squad.step(part.rule, self._term, columns, part.groupings, settings, scale, found_inf, word, layout=tensors)
        self.moved = [*self.moved, *part.named] if self.moved else part.named

    def _grad(self, place: int, site: Site, param: nn.Parameter, _: Any) -> Tensor:
        """The gradient as it is now: others may have changed it since the plan was made, though not how it lies in memory."""
        grad = param.grad
        if grad is None or (grad is not self._grads[place] and (grad.dtype, grad.stride(), type(grad)) != self._plan.key[1 + place][2:5]):
            raise OptimizerError(
                f"the gradient of {site.key} was replaced between the hooks before the step and the step, by one of another type or "
                "layout; change it in place, or attach without fused=True"
            )
        return grad

    def _tensors(self, part: _Part, weights: Sequence[_Weight]) -> _Tensors:
        """The weights and states of a part. Kept where all states were there before the step: the plan's key then knows them."""
        begins = False
        states: list[dict[str, Any]] = []
        for _, param, group in weights:
            state = self._optimizer.state[param] if part.rule.states else {}
            if part.rule.adam and not state:
                begins = True
                self._theirs({**group, "params": [param]}, *([] for _ in range(6)))  # torch begins it
            elif part.rule.momentum and state.get("momentum_buffer") is None:
                begins = True
                state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                self._begun[id(param)] = param
            states.append(state)
        columns: list[list[Tensor]] = [[param for _, param, _ in weights]]
        columns += [[state[name] for state in states] for name in part.rule.states]
        counts = [_there(state["step"], part.device) if part.rule.adam else None for state in states]
        tensors = _Tensors(columns, counts)
        if not begins:
            part.tensors = tensors
        return tensors

    def _numbers(self, part: _Part, weights: Sequence[_Weight]) -> list[Numbers]:
        """As `kernels.steps` wants them; 0 for what only the device knows."""
        made: dict[Any, Numbers] = {}
        numbers = []
        for _, param, group in weights:
            count = 0.0
            if part.rule.adam and (step := self._optimizer.state[param]["step"]).device != part.device:
                step += 1
                count = float(step)
            begins = id(param) in self._begun
            if (what := (id(group), begins, count)) not in made:
                made[what] = self._numbers_of(part, group, begins, count)
            numbers.append(made[what])
        return numbers

    def _numbers_of(self, part: _Part, group: dict[str, Any], begins: bool, count: float) -> Numbers:
        lr, decay, sign = group["lr"], group["weight_decay"], -1.0 if group["maximize"] else 1.0
        lr = 0.0 if isinstance(lr, Tensor) and lr.device == part.device else _in_fp32(float(lr))
        if not part.rule.adam:
            share = 1.0 if begins else 1.0 - group["dampening"]
            return lr, decay, 0.0, self._term.decay, sign, group["momentum"], share, 0.0, 0.0
        into, off = (0.0, decay) if group["decoupled_weight_decay"] else (decay, 0.0)
        return (lr, into, off, self._term.decay, sign, *group["betas"], group["eps"], count)

    # ---- after the step ----

    def check_moved(self) -> None:
        """Raise where the step has not come by for the weights that were kept back: they are not moved, or without their term."""
        if self._ids:
            left, *others = [site.key for site, param, _ in self._weights if id(param) in self._ids]
            self._ids = frozenset()
            raise OptimizerError(
                f"optimizer.step() has passed by {left} and {len(others)} more, which fused=True keeps for a kernel in its middle: the "
                "step was compiled or replaced after attach; leave it as it is, or attach without fused=True"
            )

    def skipped(self) -> None:
        """A scaler has found infinite gradients: no weight has moved, and no momentum has begun."""
        for param in self._begun.values():
            del self._optimizer.state[param]["momentum_buffer"]


def _kind(group: dict[str, Any]) -> tuple[bool, ...]:
    """What of a group decides whether and how its weights can be served."""
    return tuple(bool(group.get(name)) for name in ("momentum", "nesterov", "amsgrad", "differentiable"))


def _there(number: float | Tensor, device: torch.device) -> Tensor | None:
    """`number` if it is a tensor on the weights' device, where alone it can be read without waiting."""
    return number.to(torch.float32) if isinstance(number, Tensor) and number.device == device else None


def _in_fp32(number: float) -> float:
    """Rounded as a tensor on the device would be, so that a captured step gives the bits of one that is not."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _as_fp32(number: Tensor | None, device: torch.device) -> Tensor | None:
    return None if number is None else number.to(device, torch.float32)
