"""Beyond the paper: how good 1:16 and 1:4 get with all that nofm offers, against plain SR-STE in the same epochs.

One change a row, then the changes that should add up. Mixed rows keep no more weights than the pattern does, over all sparse layers.
Plain rows are also the allocations' baseline: uniform. Sensitivity looks at a batch before training, so it needs data that is resident.
"""

from __future__ import annotations

import dataclasses

from ...engine.config import RunConfig
from ..study import Claim, Row, Study, nm, only_for, share

__all__ = ["study"]

_BUDGETS = {"1:16": 1 / 16, "1:4": 1 / 4}
_EMA = 0.998  # remembers 500 steps, a twelfth of 60 epochs of CIFAR-10 in batches of 512


def _probe(base: RunConfig) -> float:
    """A tenth of the run, and no fewer than the eight steps that a search must have."""
    return share(base, 0.1) if base.engine.epochs is not None else max(8, share(base, 0.1))


def _averaged(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, ema=_EMA))


def _warmed(config: RunConfig) -> RunConfig:
    """Warm-up over a fifth of the run."""
    return dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, warmup=share(config, 0.2)))


def _lightly(config: RunConfig) -> RunConfig:
    """A fifth of the weight decay."""
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, weight_decay=config.optim.weight_decay / 5))


def _started_dense(config: RunConfig, part: float = 0.2) -> RunConfig:
    """The first fifth dense."""
    method = dataclasses.replace(config.sparsity.method, begin_at=share(config, part))
    return dataclasses.replace(config, sparsity=dataclasses.replace(config.sparsity, method=method))


def _mixed(config: RunConfig, pattern: str, by: str) -> RunConfig:
    sparsity = dataclasses.replace(config.sparsity, pattern=None, budget=_BUDGETS[pattern], allocation=by)  # type: ignore[arg-type]
    return dataclasses.replace(config, sparsity=sparsity)


def study(base: RunConfig) -> Study:
    """Lambda by flip rate, mixed N:M, longer warm-up, dense start, weight averaging, and combinations, at 1:16 and 1:4."""
    only_for("classification", base)
    rows, claims = [], []
    for pattern in _BUDGETS:
        plain = nm(base, pattern)
        automatic = nm(base, pattern, decay="auto", probe=_probe(base))
        erk = _mixed(plain, pattern, "erk")
        changed = {
            "lambda by flip rate": automatic,
            "warm-up over a fifth": _warmed(plain),
            "dense for a fifth": _started_dense(plain),
            "dense for half": _started_dense(plain, 0.5),
            "light decay": _lightly(plain),
            "averaged": _averaged(plain),
            "mixed by ERK": erk,
            "mixed by magnitude": _mixed(plain, pattern, "magnitude"),
            **({"mixed by sensitivity": _mixed(plain, pattern, "sensitivity")} if base.data.loader == "resident" else {}),
            "mixed by ERK, dense for a fifth": _started_dense(erk),
            "mixed by ERK, light decay": _lightly(erk),
            "mixed by ERK, dense for half": _started_dense(erk, 0.5),
            "mixed by ERK, lambda by flip rate": _mixed(automatic, pattern, "erk"),
            "mixed by ERK, dense for a fifth, averaged": _averaged(_started_dense(erk)),
        }
        name = f"SR-STE {pattern}"
        rows.append(Row(name, plain))
        for change, config in changed.items():
            rows.append(Row(f"{pattern}, {change}", config))
            claims.append(Claim(f"at {pattern}, {change} is better than plain SR-STE", f"{pattern}, {change}", name))
    notes = (
        "Rows with an average are measured by it; `runs.csv` has the last weights' numbers too.",
        "Mixed rows keep at most as many weights as the pattern, over all sparse layers; their multiply-adds differ.",
    )
    return Study("Beyond plain SR-STE", tuple(rows), tuple(claims), notes)
