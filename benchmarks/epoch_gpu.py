"""An epoch of CIFAR-10 through the engine, as `nofm train` runs it: with whole-step CUDA graphs and without, one run or several.

    python benchmarks/epoch_gpu.py [--models cifar/resnet20] [--batches 128 512] [--lanes 1 4 8] [--compile off on] [--parts 1 4]
        [--root CIFAR] [--json FILE]

Each case trains a few epochs in folders of its own. The figure is the time between the lines of the log in the second half of the run
(start-up and capture left out), for 50,000 images without evaluation; of several runs that take turns, each one's share. --parts is
`model.batch_parts`. Without --root the images are random bytes, which take as long.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nofm.engine.config import MethodConfig, RunConfig
from nofm.engine.train import Job, train_together
from nofm.recipes import find


def random_images(folder: Path) -> None:
    """As many random bytes as CIFAR-10 has, in its binary layout."""
    generator = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        records = generator.integers(0, 256, (10_000, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())


class Clock:
    """Notes when each line of the log was written."""

    def __init__(self) -> None:
        self.times: list[tuple[int, float]] = []

    def log(self, event: dict[str, Any]) -> None:
        if event["event"] == "train":
            self.times.append((event["step"], time.perf_counter()))

    def close(self) -> None:
        pass

    def steps_a_second(self) -> float:
        """Over the second half of the run."""
        late = [time for time in self.times if time[0] > self.times[-1][0] / 2]
        return (late[-1][0] - late[0][0]) / (late[-1][1] - late[0][1])


def configuration(case: dict[str, Any], root: str, epochs: int) -> RunConfig:
    recipe = find("cifar10/resnet20")
    method = recipe.sparsity.method if case["method"] == "srste" else MethodConfig(kind=case["method"])
    engine = {
        "epochs": epochs,
        "batch_size": case["batch"],
        "graph": case["graph"],
        "precision": case["precision"],
        "compile": case["compile"] == "on",
    }
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, name=case["model"], batch_parts=case["parts"] if case["parts"] > 1 else None),
        data=dataclasses.replace(recipe.data, root=root),
        sparsity=dataclasses.replace(recipe.sparsity, method=method),
        schedule=dataclasses.replace(recipe.schedule, warmup=1),
        engine=dataclasses.replace(recipe.engine, **engine, log_every=25, eval_every=epochs, checkpoint_every=epochs),
        device="cuda",
    )


def epoch_seconds(case: dict[str, Any], root: str, epochs: int) -> float:
    config, lanes = configuration(case, root, epochs), case["lanes"]
    clocks = [Clock() for _ in range(lanes)]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [Job(dataclasses.replace(config, seed=i), Path(folder) / str(i), sinks=[clock]) for i, clock in enumerate(clocks)]
        for result in train_together(jobs, lanes=lanes):
            if not isinstance(result, dict):
                raise result
    return 50_000 // case["batch"] / sum(clock.steps_a_second() for clock in clocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["cifar/resnet20"])
    parser.add_argument("--precisions", nargs="+", default=["bf16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--graphs", nargs="+", default=["on"])
    parser.add_argument("--methods", nargs="+", default=["dense", "srste"])
    parser.add_argument("--lanes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--compile", nargs="+", default=["off"])
    parser.add_argument("--parts", nargs="+", type=int, default=[1])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--root")
    parser.add_argument("--json")
    args = parser.parse_args()
    names = ("model", "precision", "batch", "graph", "method", "lanes", "compile", "parts")
    values = product(args.models, args.precisions, args.batches, args.graphs, args.methods, args.lanes, args.compile, args.parts)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if args.root is None:
            random_images(Path(folder))
        for case in (dict(zip(names, each, strict=True)) for each in values):
            rows.append({**case, "seconds": epoch_seconds(case, args.root or folder, args.epochs)})
            print(*(f"{name} {value}" for name, value in rows[-1].items()), sep=", ", flush=True)
    if args.json:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__), "rows": rows}
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
