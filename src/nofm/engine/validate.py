"""What a configuration must fulfil beyond the types of its values. Needs no torch, touches no data and no GPU.

Each check yields (key, problem); all complaints are raised together, one line each. What only the built network can tell (a rule
that matches no layer, a pattern that does not divide) is checked later, on a network without memory, by `engine.build.preflight`.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from ..errors import PatternError, swings
from ..patterns import Pattern
from .complaints import Complaints, number, starting_weights, value_of
from .config import ConfigError, RunConfig
from .counting import METHOD_LENGTHS
from .problems import PROBLEMS
from .resolve import Origins, explain, near

__all__ = ["METHOD_OPTIONS", "UNSTRUCTURED", "check"]

# The options of each method of nofm.METHODS, which cannot be asked before torch is loaded. A test holds the two together.
METHOD_OPTIONS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "ste": (),
    "srste": ("decay", "refine", "placement", "target", "probe", "begin_at", "ramp_at"),
    "asp": ("prune_at",),
    "set": ("sparsity", "allocation", "seed", "every", "end_at", "drop"),
    "rigl": ("sparsity", "allocation", "seed", "every", "end_at", "drop"),
    "snfs": ("sparsity", "allocation", "seed", "every", "end_at", "drop", "smoothing"),
    "dsr": ("sparsity", "allocation", "seed", "every", "end_at", "drop", "threshold", "tolerance"),
    "deepr": ("sparsity", "allocation", "seed", "l1", "temperature"),
    "gmp": ("sparsity", "begin_at", "end_at", "every", "allocation"),
    "str": ("initial", "decay"),
    "ste_unstructured": ("sparsity", "allocation"),
    "dnw": ("sparsity", "allocation"),
    "snip": ("sparsity", "batches"),
    "lottery": ("sparsity", "rounds", "every", "rewind_to", "allocation"),
}
# Those that prune anywhere in a layer.
UNSTRUCTURED = ("set", "rigl", "snfs", "dsr", "deepr", "gmp", "str", "ste_unstructured", "dnw", "snip", "lottery")
OPTIMIZER_OPTIONS: dict[str, tuple[str, ...]] = {"sgd": ("momentum", "nesterov"), "adam": ("betas", "eps"), "adamw": ("betas", "eps")}
SCHEDULE_OPTIONS: dict[str, tuple[str, ...]] = {
    "cosine": ("final",),
    "step": ("milestones", "gamma"),
    "onecycle": ("shape",),
    "constant": (),
    "inverse_sqrt": (),
}


def check(config: RunConfig, origins: Origins | None = None) -> None:
    """Raise `ConfigError` with every problem of `config`."""
    rooms = (_top, _problem, _sparsity, _optim, _schedule, _engine)
    # Where a run has two lengths, whatever else could be said of its other lengths would lead astray.
    found = list(_two_lengths(config)) or [problem for room in rooms for problem in room(config)]
    if found:
        said = [(key, problem + _to_do_without(config, key, problem, origins)) for key, problem in found]
        raise ConfigError("\n".join(explain(origins or {}, key, value_of(config, key), problem) for key, problem in said))


def _to_do_without(config: RunConfig, key: str, problem: str, origins: Origins | None) -> str:
    """What to give where an option has no effect that nobody has given: it is the recipe's, for the network or the data that it has."""
    usual = value_of(RunConfig(), key)
    if origins is None or key in origins or not re.search("ha(s|ve) no effect", problem) or value_of(config, key) == usual:
        return ""
    shown = (
        str(usual).lower()
        if usual is None or isinstance(usual, bool)
        else " ".join(map(str, usual if isinstance(usual, tuple) else [usual]))
    )
    return f"; the recipe sets it, so give --{key} {shown}".rstrip()


def _top(c: RunConfig) -> Complaints:
    yield from number("seed", c.seed, 0, 2**32)
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


def _problem(c: RunConfig) -> Complaints:
    """What its task says, and settings that only other tasks have."""
    usual, kind = RunConfig(), c.task.kind
    for key in dict.fromkeys(key for problem in PROBLEMS.values() for key in problem.fields):
        if value_of(c, key) != value_of(usual, key) and key not in PROBLEMS[kind].fields:
            owners = [other for other, problem in PROBLEMS.items() if key in problem.fields]
            yield key, f"has no effect on {kind}; it belongs to {', '.join(owners)}"
    if c.data.name not in PROBLEMS[kind].data:
        owners = [other for other, problem in PROBLEMS.items() if c.data.name in problem.data]
        yield "data.name", f"must be {', '.join(PROBLEMS[kind].data)} for {kind}; it belongs to {', '.join(owners)}"
    else:
        yield from PROBLEMS[kind].check(c)
        yield from starting_weights(c)


def _sparsity(c: RunConfig) -> Complaints:
    s = c.sparsity
    yield from _budget(c)
    if s.pattern is None and not s.rules and s.budget is None:
        yield "sparsity.pattern", 'must be N:M such as "2:4", or give sparsity.rules; a dense baseline is sparsity.method.kind dense'
    if s.pattern is not None and s.rules:
        yield "sparsity.rules", "are given beside sparsity.pattern; leave that out, and add a rule *=N:M if other layers are to have it"
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


def _budget(c: RunConfig) -> Complaints:
    """Patterns that differ by layer, under one budget."""
    s = c.sparsity
    if s.budget is None:
        for name in ("allocation", "candidates"):
            if getattr(s, name):
                yield f"sparsity.{name}", "has no effect without sparsity.budget"
        return
    yield from number("sparsity.budget", s.budget, 0, 1, open_low=True, open_high=False)
    if s.pattern is not None or s.rules:
        yield "sparsity.budget", "is given beside sparsity.pattern or sparsity.rules; leave these out"
    for candidate in s.candidates:
        if candidate != "dense":
            try:
                Pattern(candidate)
            except PatternError as error:
                yield "sparsity.candidates", f"{candidate!r}: {error}{near(candidate, ['dense'])}"


def _method(c: RunConfig) -> Complaints:
    m = c.sparsity.method
    if m.kind not in METHOD_OPTIONS:
        yield "sparsity.method.kind", f"must be one of {', '.join(METHOD_OPTIONS)}{near(m.kind, METHOD_OPTIONS)}"
        return
    for name in dict.fromkeys(option for options in METHOD_OPTIONS.values() for option in options):
        if getattr(m, name) is not None and name not in METHOD_OPTIONS[m.kind]:
            yield f"sparsity.method.{name}", _without_effect(m.kind, name, METHOD_OPTIONS)
    if m.kind in UNSTRUCTURED:
        if c.sparsity.budget is not None:
            yield "sparsity.budget", f"has no effect on {m.kind}, which has sparsity.method.sparsity"
        for key, patterns in (("pattern", [c.sparsity.pattern]), ("rules", [rule.rpartition("=")[2] for rule in c.sparsity.rules])):
            if any(pattern not in ("1:1", "dense", None) for pattern in patterns):
                yield f"sparsity.{key}", f"must be 1:1 for {m.kind}, which prunes anywhere in a layer: it only says which layers"
    yield from _pruning(c)
    yield from _in_vain(c)
    decay = None if m.decay == "auto" else m.decay
    if decay is not None and not math.isfinite(decay):
        yield "sparsity.method.decay", "must be finite, or auto; the paper uses 2e-4"
    elif decay is not None and m.kind == "srste" and (swinging := _swings(c, decay)):
        yield "sparsity.method.decay", f"must be below 1 / optim.lr = {1 / c.optim.lr:g}, or {swinging}"
    yield from number("sparsity.method.prune_at", m.prune_at, 0)
    length, unit = _length(c)
    if m.prune_at is not None and length is not None and m.prune_at > length:
        yield "sparsity.method.prune_at", f"comes after the end of the run, {length:g} {unit}: nothing would be pruned"
    for name in ("sparsity", "drop", "smoothing", "tolerance"):
        yield from number(f"sparsity.method.{name}", getattr(m, name), 0, 1, open_low=True)
    for name in ("every", "end_at"):
        yield from number(f"sparsity.method.{name}", getattr(m, name), 0, open_low=True)
    if unit == "steps":
        for name in METHOD_LENGTHS:
            if _is_broken(getattr(m, name)):
                yield f"sparsity.method.{name}", "must be a whole number: this run counts in steps"
    for name in ("l1", "temperature", "seed"):
        yield from number(f"sparsity.method.{name}", getattr(m, name), 0)
    yield from number("sparsity.method.threshold", m.threshold, 0, open_low=True)


def _swings(c: RunConfig, decay: float) -> str:
    m = c.sparsity.method
    return swings(decay, c.optim.lr, m.refine or "weight", m.placement or "gradient", is_plain=c.optim.kind == "sgd")


def _pruning(c: RunConfig) -> Complaints:
    """What belongs to methods that prune by rank, and to the search for a decay."""
    m = c.sparsity.method
    length, unit = _length(c)
    least = {"begin_at": 0, "ramp_at": 0, "rewind_to": 0, "batches": 1, "rounds": 1, "probe": 8 if unit == "steps" else 0}
    for name, low in least.items():
        yield from number(f"sparsity.method.{name}", getattr(m, name), low)
    yield from number("sparsity.method.target", m.target, 0, 1, open_low=True)
    if m.initial is not None and not math.isfinite(m.initial):
        yield "sparsity.method.initial", "must be finite; the paper of STR starts at -3200"
    if m.kind == "str" and m.decay == "auto":
        yield "sparsity.method.decay", "must be a number for str; auto belongs to srste"
    for name in ("target", "probe"):
        if m.kind == "srste" and getattr(m, name) is not None and m.decay != "auto":
            yield f"sparsity.method.{name}", "has no effect without sparsity.method.decay auto"
    if m.decay == "auto" and m.placement == "backward":
        yield "sparsity.method.placement", "must be gradient or decoupled with decay auto, which backward does not know"
    if m.allocation == "global" and m.kind in ("set", "rigl", "snfs", "dsr", "deepr"):
        yield "sparsity.method.allocation", f"must be uniform or erk for {m.kind}, which has a budget for each layer"
    # Those of the papers are for runs of theirs; one that a run never comes to would leave it dense, or never settled, without a word.
    must = (("gmp", "end_at", "sparsity is reached"), ("rigl", "end_at", "rewiring ends"), ("lottery", "every", "the first training ends"))
    for kind, name, what in must:
        if m.kind == kind and getattr(m, name) is None:
            usual = "" if length is None or kind == "lottery" else f", such as {0.75 * length:g}"
            yield f"sparsity.method.{name}", f"must say when {what}, in {unit}{usual}"
    if m.kind == "asp" and not m.prune_at and not (c.model.weights or c.model.pretrained or c.model.backbone):
        usual = "" if length is None else f", such as {length // 2 or 1 if unit == 'steps' else length / 2:g}"
        why = "it would prune by random weights, since this run begins with these"
        yield "sparsity.method.prune_at", f"must say when the mask is made, in {unit}{usual}: at 0 {why}"
    probed = None if m.probe is None else (m.begin_at or 0) + m.probe
    name, last = {"gmp": ("end_at", m.end_at), "lottery": ("every", m.every), "srste": ("probe", probed)}.get(m.kind, ("", None))
    if last is not None and length is not None and last > length:
        begun = f", begun at {m.begin_at:g}," if name == "probe" and m.begin_at else ""
        yield f"sparsity.method.{name}", f"comes{begun} after the end of the run, {length:g} {unit}"
    if m.kind == "srste" and m.begin_at and length is not None and m.begin_at >= length:
        yield "sparsity.method.begin_at", f"must be before the end of the run, {length:g} {unit}: it would never come to its pattern"
    if m.kind == "srste" and m.ramp_at is not None and m.ramp_at >= (m.begin_at or 0):
        said = f"must be below begin_at, {m.begin_at}" if m.begin_at else "needs a later begin_at"
        yield "sparsity.method.ramp_at", f"{said}, where the pattern is reached"
    if m.kind == "srste" and m.ramp_at is not None and m.placement == "backward":
        yield "sparsity.method.ramp_at", "is not in the released code, which placement backward repeats; use placement gradient"
    if m.kind == "gmp" and m.end_at is not None and (m.begin_at or 0) > m.end_at:
        yield "sparsity.method.begin_at", f"must not be above end_at, {m.end_at}"
    if m.kind == "lottery" and m.every is not None and m.every > (m.rewind_to or 0):
        pruned = m.every + ((m.rounds or 7) - 1) * (m.every - (m.rewind_to or 0))
        if length is not None and m.every <= length < pruned:
            yield "sparsity.method.rounds", f"the last pruning would be at {pruned:g}, after the end of the run, {length:g} {unit}"
    if m.kind == "lottery" and m.every is not None and (m.rewind_to or 0) >= m.every:
        yield "sparsity.method.rewind_to", f"must be below every, {m.every}: the first training ends there"


def _in_vain(c: RunConfig) -> Complaints:
    """Defaults of the papers are for runs of theirs; a run that ends before they begin would be another method without a word."""
    m, steps = c.sparsity.method, c.engine.steps
    if steps is not None and m.kind in ("set", "rigl", "snfs", "dsr") and (m.every or 100) >= steps:
        yield "sparsity.method.every", f"is {m.every or 100:g} steps, and the run has {steps}: nothing would be rewired; give a smaller one"
    if steps is not None and m.kind == "srste" and m.decay == "auto" and m.probe is None and steps - (m.begin_at or 0) <= 1000:
        yield "sparsity.method.probe", f"is 1000 steps where nothing is said, and the run has {steps}; give about a tenth of it"


def _length(c: RunConfig) -> tuple[float | None, str]:
    """How long the run is, and in what."""
    return (c.engine.epochs, "epochs") if c.engine.epochs is not None else (c.engine.steps, "steps")


def _is_broken(length: float | None) -> bool:
    """Whether a length in steps is not whole; of one that is not finite, its range says so."""
    return length is not None and math.isfinite(length) and length % 1 != 0


def _without_effect(kind: str, name: str, owned: dict[str, tuple[str, ...]]) -> str:
    owners = ", ".join(other for other, options in owned.items() if name in options)
    mine = ", ".join(owned[kind]) or "no options of its own"
    return f"has no effect on {kind}, which has {mine}; it belongs to {owners}"


def _optim(c: RunConfig) -> Complaints:
    o = c.optim
    yield from number("optim.lr", o.lr, 0, open_low=True)
    yield from number("optim.weight_decay", o.weight_decay, 0)
    yield from number("optim.momentum", o.momentum, 0, 1)
    yield from number("optim.eps", o.eps, 0, open_low=True)
    if o.betas is not None and not all(0 <= b < 1 for b in o.betas):
        yield "optim.betas", "must both be 0 <= beta < 1"
    for name in dict.fromkeys(option for options in OPTIMIZER_OPTIONS.values() for option in options):
        value = getattr(o, name)
        if value is not None and value is not False and name not in OPTIMIZER_OPTIONS[o.kind]:
            yield f"optim.{name}", _without_effect(o.kind, name, OPTIMIZER_OPTIONS)
    if o.nesterov and o.momentum == 0:
        yield "optim.nesterov", "needs optim.momentum above 0"
    if o.fused and (c.sparsity.method.kind != "srste" or c.sparsity.method.placement == "backward"):
        yield "optim.fused", "has no effect without srste's term at the step: sparsity.method.kind srste, placement gradient or decoupled"
    if o.fused and c.engine.parallel == "fsdp":
        yield "optim.fused", "has no effect on weights that are spread over processes; leave it out, or set engine.parallel to ddp"


def _schedule(c: RunConfig) -> Complaints:
    s, (length, unit) = c.schedule, _length(c)
    yield from number("schedule.warmup", s.warmup, 0)
    yield from number("schedule.final", s.final, 0)
    yield from number("schedule.gamma", s.gamma, 0, 1, open_low=True)
    if length is not None and s.warmup >= length > 0:
        yield "schedule.warmup", f"must end before the run does, after {length:g} {unit}; a shorter run needs a shorter --schedule.warmup"
    if s.kind == "inverse_sqrt" and s.warmup < (1 if unit == "steps" else 1e-9):
        yield "schedule.warmup", f"must be above 0 {unit} with inverse_sqrt, whose rate falls from the end of the warm-up on"
    if s.kind == "cosine" and s.final > c.optim.lr:
        yield "schedule.final", f"must not be above optim.lr = {c.optim.lr:g}"
    for name in dict.fromkeys(option for options in SCHEDULE_OPTIONS.values() for option in options):
        if getattr(s, name) not in ((), None, 0.0) and name not in SCHEDULE_OPTIONS[s.kind]:
            yield f"schedule.{name}", _without_effect(s.kind, name, SCHEDULE_OPTIONS)
    if s.kind not in ("cosine", "onecycle") and s.restarts:
        yield "schedule.restarts", f"have no effect on {s.kind}; they belong to cosine and onecycle"
    if list(s.restarts) != sorted(set(s.restarts)):
        yield "schedule.restarts", "must grow from one to the next"
    if s.restart_warmup and not s.restarts:
        yield "schedule.restart_warmup", "has no effect without schedule.restarts"
    for restart in s.restarts:
        if length is not None and not s.warmup < restart < length:
            shorter = "; a shorter run needs a shorter --schedule.warmup" if s.warmup >= restart else ""
            inside = f"from the end of warm-up {s.warmup:g} to {length:g} {unit}"
            yield "schedule.restarts", f"{restart:g} is not inside the run, {inside}{shorter}"
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


def _two_lengths(c: RunConfig) -> Complaints:
    if c.engine.epochs is not None and c.engine.steps is not None:
        both = f"both are set, and engine.steps is {c.engine.steps}; leave one of them out"
        yield "engine.epochs", f"give either engine.epochs or engine.steps: {both}"


def _engine(c: RunConfig) -> Complaints:
    e = c.engine
    if e.epochs is None and e.steps is None:
        yield "engine.epochs", "give either engine.epochs or engine.steps: neither is set"
    yield from number("engine.epochs", e.epochs, 0, open_low=True)
    for name in ("steps", "batch_size", "accumulate", "keep", "log_every", "threads"):
        yield from number(f"engine.{name}", getattr(e, name), 1)
    yield from number("engine.workers", e.workers, 0, 1024)
    yield from number("engine.histogram_every", e.histogram_every, 0)
    yield from number("engine.clip", e.clip, 0, open_low=True)
    yield from number("engine.ema", e.ema, 0, 1, open_low=True)
    for name in ("eval_every", "checkpoint_every"):
        yield from number(f"engine.{name}", getattr(e, name), 0, open_low=True)
        if e.steps is not None and _is_broken(getattr(e, name)):
            yield f"engine.{name}", "must be whole where the run is measured in steps"
    if e.precision == "fp16" and c.device == "cpu":
        yield "engine.precision", "fp16 needs a CUDA device; allowed on the CPU: fp32, bf16"
    if e.workers and c.data.loader == "resident":
        yield "engine.workers", "has no effect with data.loader resident, which reads nothing; set data.loader workers"
    if e.histogram_every and "tensorboard" not in e.track:
        yield "engine.histogram_every", "has no effect without tensorboard in engine.track"
    if len(set(e.track)) < len(e.track):
        yield "engine.track", "names a tracker twice"
    if e.parallel == "fsdp" and (why := PROBLEMS[c.task.kind].not_sharded) is not None:
        yield "engine.parallel", f"{why}; use ddp"
    elif e.parallel == "fsdp" and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield "engine.parallel", "fsdp needs several processes: start with torchrun --nproc-per-node N -m nofm train ..."
