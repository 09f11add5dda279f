"""All that a run needs to go on as if it had never stopped, as one nested dict for `checkpoint.Store`, and back.

Tensors are saved whole: spread ones (FSDP2) are gathered, and each process takes its part again when it loads. Every component
that is saved is needed: a test drops them one by one and sees the resumed run differ. A missing one is an error.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .. import shards
from ..errors import OptimizerError
from . import chance
from .checkpoint import CheckpointError

if TYPE_CHECKING:
    from .loop import Trainer

__all__ = ["capture", "restore"]


def capture(t: Trainer) -> dict[str, Any]:
    """The state of a run between two steps. All processes must call it; the first one's is the one to save."""
    own = {"chance": chance.capture(t.world.device), "meter": t.meter.state_dict()}
    return {
        "progress": {"step": t.step, "evaluated": t.evaluated, "metrics": dict(t.metrics)},
        "sampler": {"position": t.position},
        "clock": {"seconds": t.seconds},
        "model": _model_state(t.task.model),
        "optimizer": _optimizer_state(t.optimizer, _trained(t)),
        "schedule": _plain(t.schedule.state_dict()),
        "scaler": t.precision.scaler.state_dict(),
        "average": None if t.average is None else _model_state(t.average.model),
        "method": t.handle.state_dict(),
        "sad": t.movement.state_dict(),
        "processes": {str(rank): state for rank, state in enumerate(t.world.gathered(own))},
    }


def restore(t: Trainer, state: dict[str, Any], *, allow_change: bool = False) -> None:
    """Put `state` in its places. The network has been built as for a new run.

    `allow_change`: the configuration may be another, and then its learning rates and options of the optimizer hold, not the saved ones.
    """
    count = len(state["processes"])
    if count != t.world.size and not allow_change:
        raise CheckpointError(
            f"this checkpoint is of {count} processes and cannot be resumed exactly by {t.world.size}: each has generators of its own; "
            f"start {count}, or go on with new generators by --allow_change"
        )
    if (state["average"] is None) != (t.average is None):
        raise CheckpointError("engine.ema: the checkpoint and the configuration do not agree whether there is a moving average")
    t.step, t.evaluated, t.metrics = state["progress"]["step"], state["progress"]["evaluated"], dict(state["progress"]["metrics"])
    t.position = state["sampler"]["position"]
    t.seconds_before = state.get("clock", {"seconds": 0.0})["seconds"]  # old checkpoints have none, and a run is worth more than its time
    _load_model(t.task.model, state["model"])
    _load_optimizer(t.optimizer, _trained(t), state["optimizer"], own_options=allow_change)
    if allow_change:
        _catch_up(t.schedule, min(t.step, t.lengths.total))
    else:
        t.schedule.load_state_dict(state["schedule"])
    t.precision.scaler.load_state_dict(state["scaler"])
    _load_method(t, state["method"], allow_change)
    if t.average is not None:
        _load_model(t.average.model, state["average"])
        t.average.follow(t.task)
    t.movement.load_state_dict(state["sad"])
    if count == t.world.size:
        own = state["processes"][str(t.world.rank)]
        t.meter.load_state_dict(own["meter"])
        chance.restore(own["chance"], t.world.device)
    else:
        # What belongs to single processes cannot be dealt out anew: the log's mean starts afresh, and so does chance.
        t.processes_before = count
        chance.seed_all(t.loader.order.seed, t.world.rank, t.step, 2)


def _load_method(t: Trainer, state: dict[str, Any], allow_change: bool) -> None:
    """What a handle says to those who write a loop is said here to those who type a command."""
    try:
        with warnings.catch_warnings():
            if allow_change:  # changed options hold, and were typed to
                warnings.filterwarnings("ignore", "this state is of ")
            t.handle.load_state_dict(state)
    except OptimizerError as error:
        why = str(error).partition(";")[0]
        raise CheckpointError(f"{why}; give the options that the run was started with, or begin anew in another --out") from error


def _catch_up(schedule: LRScheduler, steps: int) -> None:
    """Take a new schedule to where it would be after `steps`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the optimizer's steps, which an earlier process has taken
        for _ in range(steps):
            schedule.step()


def _plain(value: Any) -> Any:
    """A scheduler's state without the objects that some schedulers leave in it, and without milestones, a Counter by step: they
    follow from the configuration, and would come back as texts, which no step is equal to."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if not callable(v) and not isinstance(v, Counter)}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    shards.reshard_(model)
    return {name: shards.whole(tensor.detach()) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def _load_model(model: nn.Module, saved: dict[str, Tensor]) -> None:
    shards.reshard_(model)
    ours = model.state_dict()
    if other := sorted(set(ours) ^ set(saved)):
        raise CheckpointError(f"the checkpoint is of another network: {other[0]} and {len(other) - 1} more are in only one of them")
    for name, tensor in ours.items():
        if tensor.shape != saved[name].shape:
            raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, in the checkpoint {tuple(saved[name].shape)}")
        shards.local(tensor).copy_(shards.part_of(saved[name].to(tensor.device), tensor))


def _trained(t: Trainer) -> dict[str, nn.Parameter]:
    """All that the optimizer may own, by name: the network's parameters and those that the method learns."""
    return {**dict(t.task.model.named_parameters()), **{f"method:{name}": p for name, p in t.handle.memory.learned.items()}}


def _optimizer_state(optimizer: Optimizer, params: dict[str, nn.Parameter]) -> dict[str, Any]:
    names = {id(p): name for name, p in params.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    members = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    state = {names[id(p)]: {k: _whole(v) for k, v in held.items()} for p, held in optimizer.state.items()}
    return {"groups": groups, "members": members, "state": state}


def _whole(value: Any) -> Any:
    return shards.whole(value.detach()) if isinstance(value, Tensor) else value


def _load_optimizer(optimizer: Optimizer, params: dict[str, nn.Parameter], saved: dict[str, Any], own_options: bool) -> None:
    mine = [[name for name, p in params.items() if any(p is q for q in group["params"])] for group in optimizer.param_groups]
    if mine != [list(names) for names in saved["members"]]:
        raise CheckpointError("the optimizer of the checkpoint has other parameters than this network's")
    numbers = {name: i for i, name in enumerate(name for names in mine for name in names)}
    state = {
        numbers[name]: {k: _spread_like(v, params[name]) for k, v in held.items()}
        for name, held in saved["state"].items()
        if name in numbers
    }
    first = 0
    groups = []
    for group, names in zip(optimizer.param_groups if own_options else saved["groups"], mine, strict=True):
        groups.append({**group, "params": list(range(first, first + len(names)))})
        first += len(names)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _spread_like(value: Any, param: Tensor) -> Any:
    if isinstance(value, Tensor) and value.shape == param.shape and value.dim():
        if type(param) is nn.Parameter:  # laid out as the weight is: fused optimizers want both alike (channels_last)
            return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)
        return shards.spread(value.to(param.device), param)
    return value
