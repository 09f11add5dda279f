"""Table 3: N:M by SR-STE against unstructured sparsifiers at 80 % and 95 %, and those of the paper's related work."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ...engine.config import RunConfig
from ..study import Claim, Row, Study, dense, lasting, nm, share, unstructured

__all__ = ["study"]

_IMAGES = {"digits": 1_437, "fashion": 60_000, "cifar10": 50_000, "folder": 1_281_167}  # that one trains on; a folder is ImageNet's
_STR = {80: -3.5, 95: -2.8}  # where s would end if the loss did not push back: thresholds of 0.03 and 0.06
_ROUNDS = 4  # of the lottery ticket, which trains that many times and once more

# Name, kind, and the paper's ImageNet top-1 at 80 % and 95 %.
_RIVALS: tuple[tuple[str, str, str, str], ...] = (
    ("DSR", "dsr", "71.6", ""),
    ("RigL (ERK)", "rigl", "", ""),
    ("RigL (uniform)", "rigl", "74.6", "67.5"),
    ("GMP", "gmp", "75.6", "70.6"),
    ("STE, unstructured", "ste_unstructured", "76.2", "68.4"),
    ("SET", "set", "", ""),
    ("SNFS", "snfs", "", ""),
    ("DNW", "dnw", "", ""),
    ("Deep Rewiring", "deepr", "", ""),
    ("SNIP", "snip", "", ""),
)


def _options(name: str, base: RunConfig) -> dict[str, Any]:
    """What a rival needs to know of the length of the run: masks settle after three quarters of it, as RigL's paper has it."""
    options: dict[str, Any] = {}
    if name in ("GMP",):
        options = {"begin_at": share(base, 0.1), "end_at": share(base, 0.75)}
    elif name.startswith("RigL"):
        options = {"end_at": share(base, 0.75), "allocation": "erk" if "ERK" in name else "uniform"}
    elif name in ("DSR", "SET", "SNFS"):
        options = {"end_at": share(base, 0.75)}
    return options


def _lottery(base: RunConfig, sparsity: float) -> RunConfig:
    """`_ROUNDS` trainings of the base's length, each followed by pruning and going back to an early epoch, and one more."""
    length = round(share(base, 1))
    schedule = dataclasses.replace(base.schedule, restarts=tuple(length * (i + 1) for i in range(_ROUNDS)))
    longer = dataclasses.replace(lasting(base, length * (_ROUNDS + 1)), schedule=schedule)
    return unstructured(longer, "lottery", sparsity, rounds=_ROUNDS, every=length, rewind_to=share(base, 0.02))


def _str(base: RunConfig, final: float) -> RunConfig:
    """STR has no target: weight decay draws s from far below zero to about `final`, and sparsity is what comes of it."""
    o, e = base.optim, base.engine
    steps = e.steps or _IMAGES[base.data.name] // e.batch_size * (e.epochs or 1)
    decays = steps * o.lr / 2 * o.weight_decay / (1 - (0.9 if o.momentum is None else o.momentum))  # a cosine's mean is half its top
    return nm(base, "1:1", "str", initial=final * math.exp(min(decays, 10.0)))


def study(base: RunConfig) -> Study:
    """Every rival at 80 % and 95 % beside SR-STE at 2:8 and 1:16."""
    rows = [Row("dense", dense(base), "77.3"), Row("SR-STE 2:8", nm(base, "2:8"), "76.2"), Row("SR-STE 1:16", nm(base, "1:16"), "71.5")]
    claims = []
    for percent in (80, 95):
        for name, kind, *paper in _RIVALS:
            label = f"{name} {percent} %"
            config = unstructured(base, kind, percent / 100, **_options(name, base))
            rows.append(Row(label, config, paper[percent == 95]))
            if percent == 95:
                claims.append(Claim(f"SR-STE 1:16 is above {name} at 95 %", "SR-STE 1:16", label))
        rows.append(Row(f"STR, for {percent} %", _str(base, _STR[percent]), {80: "76.1", 95: "70.2"}[percent]))
        rows.append(Row(f"lottery ticket {percent} %", _lottery(base, percent / 100)))
    notes = (
        "2:8 keeps 25 % and 1:16 keeps 6.25 % of a sparse layer, so the N:M rows keep more than 80 % and 95 % sparsity do.",
        "STR's sparsity is an outcome and not a choice; the column of weights kept says what it was.",
        f"A lottery ticket trains {_ROUNDS + 1} times as long as the others.",
    )
    return Study("Unstructured rivals (Table 3)", tuple(rows), tuple(claims), notes)
