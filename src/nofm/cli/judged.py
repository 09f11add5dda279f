"""What `nofm check --pattern` makes of the weights of a file, and what it says.

A file does not tell which layers were meant to be sparse, and by custom the first convolution and the classifier stay dense. So layers
without zeros are listed as dense, and those that have zeros are held to the pattern; a file in which no layer keeps to it fails, since
that is what a network is like whose zeros nobody has written in. `--all` holds every layer to it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..analysis import Verification, WeightReport
from ..columns import wrapped

__all__ = ["Judgement", "judged"]


@dataclass(frozen=True)
class Judgement:
    """The table as it is to be shown, the lines below it, and whether the file passes."""

    found: Verification
    lines: Sequence[str]
    ok: bool


def judged(found: Verification, file: Path, pattern: str, skip: Sequence[str], *, every: bool) -> Judgement:
    """Of weights that were all checked against `pattern`, but for those that `skip` names. `every`: none may be dense."""
    dense = [w for w in found.weights if w.pattern is not None and not w.ok and w.is_dense]
    broken = [w for w in found.weights if w.pattern is not None and not w.ok and not w.is_dense]
    if not any(w.is_pruned for w in found.weights):
        return Judgement(found, wrapped(_none(file, pattern, only_dense=not broken)), ok=False)
    failed = [*broken, *(dense if every else [])]
    lines = wrapped(_let_off(dense, found, pattern)) if dense and not every else []
    if failed:
        command = ["nofm", "check", str(file), "--pattern", pattern, *["--all"] * every, "--skip", *skip, *(w.name for w in failed)]
        are, they = ("layer is", "it is") if len(failed) == 1 else ("layers are", "they are")
        # The command is one line however long it is: what a terminal breaks, it gives whole to who copies it.
        lines += [f"{len(failed)} {are} not {pattern}. If {they} not meant to be:", f"  {shlex.join(command)}"]
    return Judgement(found if every else _without_pattern(found, dense), lines, ok=not failed)


def _without_pattern(found: Verification, dense: Sequence[WeightReport]) -> Verification:
    free = {w.name: replace(w, pattern=None, axis=None, groups=0, violations=0, note="dense") for w in dense}
    return Verification(tuple(free.get(w.name, w) for w in found.weights))


def _none(file: Path, pattern: str, *, only_dense: bool) -> str:
    if only_dense:
        return f"{file}: no layer is {pattern}. What is saved of a model in training is its dense weights: nofm.fold_ it before"
    return f"{file}: no layer is {pattern}; nofm check {shlex.quote(str(file))} tells which pattern each has"


def _let_off(dense: Sequence[WeightReport], found: Verification, pattern: str) -> str:
    share = sum(math.prod(w.shape) for w in dense) / sum(math.prod(w.shape) for w in found.weights)
    are, they = ("is", "it has") if len(dense) == 1 else ("are", "they have")
    return f"{len(dense)} {are} dense, with {share:.1%} of all weights here; with --all {they} to be {pattern}, too"
