"""What a configuration must fulfil beyond the types of its values. Needs no torch, touches no data and no GPU.

Each check yields (key, problem); all complaints are raised together, one line each. What only the built network can tell (a rule
that matches no layer, a pattern that does not divide) is checked later, on a network without memory, by `engine.build.preflight`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import PatternError
from ..patterns import Pattern
from .config import ConfigError, RunConfig
from .resolve import Origins, explain, near

__all__ = ["METHOD_OPTIONS", "MODEL_PREFIXES", "OWN_MODELS", "check"]

Problems: TypeAlias = Iterator[tuple[str, str]]

# The options of each method of nofm.METHODS, which cannot be asked before torch is loaded. A test holds the two together.
METHOD_OPTIONS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "ste": (),
    "srste": ("decay", "refine", "placement"),
    "asp": ("prune_at",),
}
OWN_MODELS = ("cnn", "cifar/resnet20", "cifar/resnet32", "cifar/resnet18")
MODEL_PREFIXES = ("torchvision/", "timm/")


def check(config: RunConfig, origins: Origins | None = None) -> None:
    """Raise `ConfigError` with every problem of `config`."""
    found = [problem for room in (_top, _task, _model, _data, _sparsity, _optim, _schedule, _engine) for problem in room(config)]
    if found:
        raise ConfigError("\n".join(explain(origins or {}, key, _value(config, key), problem) for key, problem in found))


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _number(
    key: str, value: float | None, low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = True
) -> Problems:
    """One number in its range."""
    if value is None:
        return
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if not (above and below):  # a NaN is neither
        left = f"{low:g} < " if open_low else f"{low:g} <= "
        right = "" if high == math.inf else f" < {high:g}" if open_high else f" <= {high:g}"
        name = key.rpartition(".")[2]
        allowed = f"{left}{name}{right}" if right else f"{name} {'>' if open_low else '>='} {low:g}, and finite"
        yield key, f"must be {allowed}"


def _top(c: RunConfig) -> Problems:
    yield from _number("seed", c.seed, 0, 2**32)
    kind, _, index = c.device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())) or c.device.endswith(":"):
        yield "device", f"must be auto, cpu, cuda or cuda:N{near(kind, ('auto', 'cpu', 'cuda'))}"
    if c.out is not None:
        if not c.out.strip():
            yield "out", "must be a folder"
        elif Path(c.out).exists() and not Path(c.out).is_dir():
            yield "out", "is a file; give a folder"
        else:
            home = next(p for p in (Path(c.out), *Path(c.out).absolute().parents) if p.exists())
            if not home.is_dir() or not os.access(home, os.W_OK):
                yield "out", f"cannot be written: {home} is not a folder that can be written to"


def _task(c: RunConfig) -> Problems:
    yield from _number("task.label_smoothing", c.task.label_smoothing, 0, 1)


def _model(c: RunConfig) -> Problems:
    m = c.model
    own = m.name in OWN_MODELS
    if not own and not (m.name.startswith(MODEL_PREFIXES) and m.name.partition("/")[2]):
        yield "model.name", f"must be {', '.join(OWN_MODELS)}, torchvision/NAME or timm/NAME{near(m.name, OWN_MODELS)}"
    yield from _number("model.width", m.width, 1)
    yield from _number("model.dropout", m.dropout, 0, 1)
    if m.norm == "group" and m.width is not None and m.width % 4:
        yield "model.width", "must be divisible by 4 with model.norm group, which has groups of channels"
    if not own:
        for name in ("width", "dropout", "norm"):
            if getattr(m, name) is not None:
                yield f"model.{name}", f"has no effect on {m.name}; it belongs to {', '.join(OWN_MODELS)}"
    elif m.pretrained:
        yield "model.pretrained", f"has no effect on {m.name}, which has no published weights; it belongs to torchvision/ and timm/ models"


def _data(c: RunConfig) -> Problems:
    d = c.data
    if d.name == "digits" and d.root is not None:
        yield "data.root", "has no effect on digits, which come with scikit-learn"
    if d.name != "digits":
        if d.root is None:
            yield "data.root", f"{d.name} needs the folder of its files: --data.root PATH"
        elif not Path(d.root).is_dir():
            parent = Path(d.root).parent
            siblings = [str(p) for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
            yield "data.root", f"no such folder{near(d.root, siblings)}"
    if d.name == "folder":
        if d.loader == "resident":
            yield "data.loader", "must be workers for a folder of images, which does not fit on a device"
        if d.crop:
            yield "data.crop", "has no effect on a folder of images, which is cut at random anyway; allowed: 0"
        if d.root is not None and Path(d.root).is_dir():
            for part in ("train", "val"):
                folder = Path(d.root, part)
                if not folder.is_dir() or not any(p.is_dir() for p in folder.iterdir()):
                    yield "data.root", f"needs {part}/CLASS/ folders with images in it, as ImageNet is laid out"
    else:
        if d.size is not None:
            yield "data.size", f"has no effect on {d.name}, whose images have one size"
        if d.corrupt == "skip":
            yield "data.corrupt", f"has no effect on {d.name}: only a folder of images can skip one; allowed: error"
    yield from _number("data.size", d.size, 8)
    yield from _number("data.crop", d.crop, 0, 16, open_high=False)


def _sparsity(c: RunConfig) -> Problems:
    s = c.sparsity
    if s.pattern is None and not s.rules:
        yield "sparsity.pattern", 'must be N:M such as "2:4", or give sparsity.rules; a dense baseline is sparsity.method.kind dense'
    if s.pattern is not None and s.rules:
        yield "sparsity.rules", "are given beside sparsity.pattern; set sparsity.pattern to none, or add a rule *=N:M and drop the pattern"
    if s.pattern is not None:
        try:
            Pattern(s.pattern)
        except PatternError as error:
            yield "sparsity.pattern", str(error)
    for rule in s.rules:
        glob, equals, pattern = rule.rpartition("=")
        if not (glob and equals):
            yield "sparsity.rules", f"{rule!r} is no rule: GLOB=N:M or GLOB=dense"
        elif pattern != "dense":
            try:
                Pattern(pattern)
            except PatternError as error:
                yield "sparsity.rules", f"{rule!r}: {error}{near(pattern, ['dense'])}"
    globs = [rule.rpartition("=")[0] for rule in s.rules]
    for glob in {g for g in globs if globs.count(g) > 1}:
        yield "sparsity.rules", f"{glob!r} stands there twice; the second would have no effect"
    for glob in s.skip:
        if not glob.strip():
            yield "sparsity.skip", "holds an empty name"
    yield from _method(c)


def _method(c: RunConfig) -> Problems:
    m = c.sparsity.method
    if m.kind not in METHOD_OPTIONS:
        yield "sparsity.method.kind", f"must be one of {', '.join(METHOD_OPTIONS)}{near(m.kind, METHOD_OPTIONS)}"
        return
    for name in dict.fromkeys(option for options in METHOD_OPTIONS.values() for option in options):
        if getattr(m, name) is not None and name not in METHOD_OPTIONS[m.kind]:
            owner = next(kind for kind, options in METHOD_OPTIONS.items() if name in options)
            mine = ", ".join(METHOD_OPTIONS[m.kind]) or "no options"
            yield f"sparsity.method.{name}", f"has no effect on {m.kind}, which has {mine}; it belongs to {owner}"
    if m.decay is not None and not math.isfinite(m.decay):
        yield "sparsity.method.decay", "must be finite; the paper uses 2e-4"
    elif m.decay is not None and c.optim.lr * m.decay >= 1:
        yield "sparsity.method.decay", f"must be below 1 / optim.lr = {1 / c.optim.lr:g}, or pruned weights swing instead of shrinking"
    yield from _number("sparsity.method.prune_at", m.prune_at, 0)
    if m.prune_at is not None and c.engine.steps is not None and m.prune_at > c.engine.steps:
        yield "sparsity.method.prune_at", f"comes after the last step, {c.engine.steps}: nothing would be pruned"


def _optim(c: RunConfig) -> Problems:
    o = c.optim
    yield from _number("optim.lr", o.lr, 0, open_low=True)
    yield from _number("optim.weight_decay", o.weight_decay, 0)
    yield from _number("optim.momentum", o.momentum, 0, 1)
    yield from _number("optim.eps", o.eps, 0, open_low=True)
    if o.betas is not None and not all(0 <= b < 1 for b in o.betas):
        yield "optim.betas", "must both be 0 <= beta < 1"
    if o.kind == "sgd":
        for name in ("betas", "eps"):
            if getattr(o, name) is not None:
                yield f"optim.{name}", "has no effect on sgd; it belongs to adam, adamw"
    else:
        if o.momentum is not None:
            yield "optim.momentum", f"has no effect on {o.kind}, which has betas; it belongs to sgd"
        if o.nesterov:
            yield "optim.nesterov", f"has no effect on {o.kind}; it belongs to sgd"
    if o.nesterov and o.momentum == 0:
        yield "optim.nesterov", "needs optim.momentum above 0"


def _schedule(c: RunConfig) -> Problems:
    s, length = c.schedule, c.engine.epochs if c.engine.epochs is not None else c.engine.steps
    unit = "epochs" if c.engine.epochs is not None else "steps"
    yield from _number("schedule.warmup", s.warmup, 0)
    yield from _number("schedule.final", s.final, 0)
    yield from _number("schedule.gamma", s.gamma, 0, 1, open_low=True)
    if length is not None and s.warmup >= length > 0:
        yield "schedule.warmup", f"must end before the run does, after {length:g} {unit}"
    if s.kind != "cosine" and s.final:
        yield "schedule.final", f"has no effect on {s.kind}; it belongs to cosine"
    elif s.final > c.optim.lr:
        yield "schedule.final", f"must not be above optim.lr = {c.optim.lr:g}"
    if s.kind == "step":
        if not s.milestones:
            yield "schedule.milestones", f"must say after how many {unit} the learning rate drops"
        if list(s.milestones) != sorted(set(s.milestones)):
            yield "schedule.milestones", "must grow from one to the next"
        for milestone in s.milestones:
            if length is not None and not s.warmup < milestone < length:
                yield (
                    "schedule.milestones",
                    f"{milestone:g} is not inside the run, from the end of warm-up {s.warmup:g} to {length:g} {unit}",
                )
    else:
        for name, value in (("milestones", s.milestones), ("gamma", s.gamma)):
            if value not in ((), None):
                yield f"schedule.{name}", f"has no effect on {s.kind}; it belongs to step"


def _engine(c: RunConfig) -> Problems:
    e = c.engine
    if (e.epochs is None) == (e.steps is None):
        yield "engine.epochs", "give either engine.epochs or engine.steps: " + ("both are set" if e.steps is not None else "neither is set")
    yield from _number("engine.epochs", e.epochs, 0, open_low=True)
    for name in ("steps", "batch_size", "accumulate", "keep", "log_every", "threads"):
        yield from _number(f"engine.{name}", getattr(e, name), 1)
    yield from _number("engine.workers", e.workers, 0, 1024)
    yield from _number("engine.histogram_every", e.histogram_every, 0)
    yield from _number("engine.clip", e.clip, 0, open_low=True)
    yield from _number("engine.ema", e.ema, 0, 1, open_low=True)
    for name in ("eval_every", "checkpoint_every"):
        yield from _number(f"engine.{name}", getattr(e, name), 0, open_low=True)
        value = getattr(e, name)
        if e.steps is not None and value is not None and value != int(value if math.isfinite(value) else 0):
            yield f"engine.{name}", "must be whole where the run is measured in steps"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if e.accumulate >= 1 and e.batch_size >= 1 and e.batch_size % (e.accumulate * world):
        yield (
            "engine.batch_size",
            f"must be divisible by engine.accumulate {e.accumulate} x processes {world}: it is the batch of all of them",
        )
    if e.precision == "fp16" and c.device == "cpu":
        yield "engine.precision", "fp16 needs a CUDA device; allowed on the CPU: fp32, bf16"
    if e.workers and c.data.loader == "resident":
        yield "engine.workers", "has no effect with data.loader resident, which reads nothing; set data.loader workers"
    if e.histogram_every and "tensorboard" not in e.track:
        yield "engine.histogram_every", "has no effect without tensorboard in engine.track"
    if len(set(e.track)) < len(e.track):
        yield "engine.track", "names a tracker twice"
    if e.parallel == "fsdp" and e.ema is not None:
        yield "engine.ema", "is not kept for fsdp shards; use engine.parallel ddp, or no engine.ema"
    if e.parallel == "fsdp" and world == 1:
        yield "engine.parallel", "fsdp needs several processes: start with torchrun --nproc-per-node N -m nofm train ..."
