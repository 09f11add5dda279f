"""How often the masks of each layer of a study's runs changed, one column a seed.

    python results/changes_by_layer.py results/cifar10-resnet20/table3 runs/resnet20 --rows "STE, unstructured 95 %" "STE 1:16" \
        "SR-STE 1:16" --after 1200 > results/cifar10-resnet20/table3/changes-by-layer.csv

The first folder has the study's study.json, the second its runs, runs/NAME/seed-N. Summed are the `sad` events after step --after: a layer
that has come to rest shows a small number. A table of a study has one number a run, so this is for a closer look.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from nofm.report.curves import sad_by_layer
from nofm.report.read import load
from nofm.report.study import finished


def lines(study: Path, out: Path, labels: Iterable[str], after: int) -> Iterator[list[str]]:
    """The lines of the file, the header first. Raises `SystemExit` for a row that the study does not have or that has no runs."""
    rows = {row["label"]: row["runs"] for row in json.loads((study / "study.json").read_text())["rows"]}
    found = {}
    for label in labels:
        if label not in rows:
            raise SystemExit(f"{study / 'study.json'} has no row {label!r}; it has {', '.join(rows)}")
        folders = [folder for folder in sorted((out / "runs" / rows[label]).glob("seed-*")) if finished(folder)]
        found[label] = {run.seed: sad_by_layer(run, after) for run in map(load, folders)}
        if not found[label]:
            raise SystemExit(f"{out / 'runs' / rows[label]}: has no finished run of {label!r}")
    seeds = sorted({seed for runs in found.values() for seed in runs})
    yield ["row", "layer", *(f"seed_{seed}" for seed in seeds)]
    for label, runs in found.items():
        for layer in next(iter(runs.values())):
            yield [label, layer, *(str(runs[seed][layer]) if seed in runs else "" for seed in seeds)]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", nargs="+", required=True)
    parser.add_argument("--after", type=int, default=0)
    args = parser.parse_args()
    csv.writer(sys.stdout, lineterminator="\n").writerows(lines(args.study, args.out, args.rows, args.after))


if __name__ == "__main__":
    _main()
