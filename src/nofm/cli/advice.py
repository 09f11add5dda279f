"""What to say at a terminal of weights that have no zeros to leave out: the command that goes on from there. Needs no torch.

The library's own words name its functions, which who gives commands does not call.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from .folders import started_with

__all__ = ["nothing_to_export", "nothing_to_pack", "trained_dense"]


def nothing_to_export(weights: Path) -> str:
    """Of a file of weights, which may be that of a run."""
    run = weights.parent
    if trained_dense(run):
        recipe, config = started_with(run)
        train = f"nofm train {recipe or 'RECIPE'} --sparsity.pattern {config.sparsity.pattern or '2:4'}"
        return f"{run}: was trained dense, so there are no zeros to leave out, and {weights} is the file to use. With zeros: {train}"
    return (
        f"{weights}: no weight has zeros worth leaving out; nofm check {shlex.quote(str(weights))} tells how many each has. "
        "What is saved of a model in training is its dense weights: nofm.fold_ it before"
    )


def nothing_to_pack(model: str, sizes: Sequence[int]) -> str:
    """Of a network by its name, or of a run, and the sizes of its images."""
    run = Path(model)
    if not run.is_dir():
        again = f"nofm bench {model} --pattern 1:16 --input {' '.join(map(str, sizes))}"
        return f"{model}: no layer has so many zeros at this --pattern that leaving them out could pay (40 %); one with more: {again}"
    if not trained_dense(run):
        return f"{run}: no layer has so many zeros that leaving them out could pay (40 %); nofm check {shlex.quote(model)} tells how many"
    _, config = started_with(run)
    again = f"nofm bench {config.model.name} --pattern {config.sparsity.pattern or '1:16'} --input {' '.join(map(str, sizes))}"
    return f"{run}: was trained dense, so there are no zeros to leave out. What zeros would bring to its network: {again}"


def trained_dense(run: Path) -> bool:
    """Whether there is a run in the folder, and it is the dense one that others are compared with."""
    return (run / "run.json").is_file() and started_with(run)[1].sparsity.method.kind == "dense"
