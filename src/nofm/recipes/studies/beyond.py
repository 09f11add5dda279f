"""Beyond the paper: how good 1:16 and 1:4 get with what nofm offers, against plain SR-STE in the same epochs.

One change a row, then the changes that should add up. Mixed rows keep no more weights than the pattern does, over all sparse layers.
Plain rows are also the allocations' baseline: uniform.

Which rows: three convolutions on CIFAR-10 at 1:16 (1,500 steps, batch 32, CPU, mean of two seeds half a point apart) had 44.5 % plain,
43.7 with lambda by flip rate, 45.2 with less weight decay, 44.6, 45.6 and 46.7 dense for a fifth, a half and three quarters, 47.4 dense for
half with less weight decay; 43.7 with 2:32, and 36 by an average over 500 steps, whose masks move. Allocation by magnitude is that of ERK
but for two layers of ResNet-20.
"""

from __future__ import annotations

import dataclasses

from ...engine.config import RunConfig
from ..study import Claim, Row, Study, nm, only_for, share

__all__ = ["study"]

_BUDGETS = {"1:16": 1 / 16, "1:4": 1 / 4}


def _probe(base: RunConfig) -> float:
    """A tenth of the run, and no fewer than the eight steps that a search must have."""
    return share(base, 0.1) if base.engine.epochs is not None else max(8, share(base, 0.1))


def _lightly(config: RunConfig) -> RunConfig:
    """A fifth of the weight decay: a network with so few weights fits its data badly rather than too well."""
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, weight_decay=config.optim.weight_decay / 5))


def _started_dense(config: RunConfig) -> RunConfig:
    """The first half dense."""
    method = dataclasses.replace(config.sparsity.method, begin_at=share(config, 0.5))
    return dataclasses.replace(config, sparsity=dataclasses.replace(config.sparsity, method=method))


def _mixed(config: RunConfig, pattern: str) -> RunConfig:
    sparsity = dataclasses.replace(config.sparsity, pattern=None, budget=_BUDGETS[pattern], allocation="erk")
    return dataclasses.replace(config, sparsity=sparsity)


def study(base: RunConfig) -> Study:
    """Lambda by flip rate, mixed N:M, dense start, less weight decay, and combinations, at 1:16 and 1:4."""
    only_for("classification", base)
    rows, claims = [], []
    for pattern in _BUDGETS:
        plain = nm(base, pattern)
        mixed = _mixed(plain, pattern)
        changed = {
            "lambda by flip rate": nm(base, pattern, decay="auto", probe=_probe(base)),
            "less weight decay": _lightly(plain),
            "dense for half": _started_dense(plain),
            "mixed by ERK": mixed,
            "mixed by ERK, dense for half": _started_dense(mixed),
            "mixed by ERK, dense for half, less weight decay": _lightly(_started_dense(mixed)),
        }
        name = f"SR-STE {pattern}"
        rows.append(Row(name, plain))
        for change, config in changed.items():
            rows.append(Row(f"{pattern}, {change}", config))
            claims.append(Claim(f"at {pattern}, {change} is better than plain SR-STE", f"{pattern}, {change}", name))
    notes = ("Mixed rows keep at most as many weights as the pattern, over all sparse layers; their multiply-adds differ.",)
    return Study("Beyond plain SR-STE", tuple(rows), tuple(claims), notes)
