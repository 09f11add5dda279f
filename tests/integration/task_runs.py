"""A tiny run of every task, on generated data in the real formats: what `nofm train` is told, in seconds on a CPU."""

from __future__ import annotations

import os
import random
import shutil
import socket
import sys
import traceback
from pathlib import Path

from test_flow import write_sources

from nofm.cli.options import parse
from nofm.data.stamp_sets import write_folder, write_pack
from nofm.data.stamp_sources import find_sources
from nofm.data.stamps import Motions, make_pairs
from nofm.engine.config import RunConfig
from nofm.engine.train import train
from nofm.recipes import find

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import coco_scenes

WORDS = {"a": "ein", "the": "der", "small": "kleine", "dog": "Hund", "sees": "sieht", "green": "grüne", "tree": "Baum", "old": "alte"}
ENGINE = {"device": "cpu", "seed": 1, "engine.threads": 1, "engine.precision": "fp32", "engine.log_every": 2, "engine.eval_every": 4}
TRANSFORMER = {"model.layers": 1, "model.dropout": 0.1, "data.vocabulary": 280, "schedule.warmup": 2, "task.beams": 2, "engine.ema": 0.5}
RAFT = {"model.name": "raft_tiny", "data.crop_size": "128 128", "schedule.warmup": 2, "task.updates": 2, "task.test_updates": 2}
DETECTOR = {
    "data.size": 64, "data.max_size": 96, "engine.epochs": None, "engine.steps": 4, "engine.eval_every": 2, "engine.batch_size": 2,
    "schedule.warmup": 1, "schedule.milestones": 3,
}  # fmt: skip

# By name: the recipe, and what is changed in it.
RUNS = {
    "detection": ("bccd/fasterrcnn", {**ENGINE, **DETECTOR, "model.name": "fasterrcnn_tiny", "engine.ema": 0.5}),
    "segmentation": ("nuclei/maskrcnn", {**ENGINE, **DETECTOR, "model.name": "maskrcnn_tiny"}),
    "translation": ("multi30k/small", {**ENGINE, **TRANSFORMER, "engine.steps": 8, "engine.batch_size": 256, "engine.accumulate": 2}),
    "flow": ("flow/stamps", {**ENGINE, **RAFT, "engine.steps": 6, "engine.batch_size": 2, "engine.ema": 0.5}),
    "flow from files": ("flow/chairs", {**ENGINE, **RAFT, "engine.steps": 6, "engine.batch_size": 2, "engine.workers": 0}),
}


def write_corpus(root: Path, sentences: int = 24) -> Path:
    """Sentences of 3 to 12 words in Multi30k's layout."""
    root.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    english = [" ".join(chance.choices(list(WORDS), k=chance.randint(3, 12))) for _ in range(sentences + 6)]
    german = [", ".join(WORDS[word] for word in reversed(text.split())) + "." for text in english]
    for language, lines in (("en", english), ("de", german)):
        for split, chosen in (("train", lines[:sentences]), ("test_2016_flickr", lines[sentences:])):
            (root / f"{split}.{language}").write_text("".join(f"{line}\n" for line in chosen))
    return root


def write_flow(root: Path) -> Path:
    """Three pairs to learn from and two to be measured on, as FlyingChairs in ROOT/chairs and as packs in ROOT."""
    write_sources(root / "sources")
    motions = Motions(stamps=(1, 2), drift=2, stamp_drift=3, turn=0.01, zoom=0.01)
    made = list(make_pairs(find_sources(root / "sources", "train"), 5, 128, 136, seed=2, motions=motions))
    write_folder(root / "chairs", made[:3], made[3:])
    write_pack(root / "train.npz", made[:3])
    write_pack(root / "val.npz", made[3:])
    shutil.rmtree(root / "sources")
    return root


def write_objects(root: Path) -> Path:
    """Three images to learn from and two to be measured on, with boxes and masks in COCO's format."""
    for seed, (split, count) in enumerate((("train", 3), ("val", 2))):
        coco_scenes.write_scenes(root, split, count, objects=2, seed=seed)
    return root


def write_all(root: Path) -> dict[str, Path]:
    """The data of every run, by its name."""
    flow, objects = write_flow(root / "flow"), write_objects(root / "objects")
    text = write_corpus(root / "text")
    return {"detection": objects, "segmentation": objects, "translation": text, "flow": flow, "flow from files": flow / "chairs"}


def arguments(name: str, data: Path, **changes: object) -> list[str]:
    """RECIPE --option value ...; changes as engine_steps=3."""
    recipe, options = RUNS[name]
    options = {"data.root": data, **options, **{key.replace("_", ".", 1): value for key, value in changes.items()}}
    return [recipe, *(word for key, value in options.items() for word in (f"--{key}", *str(value).split()))]


def config_of(name: str, data: Path, **changes: object) -> RunConfig:
    recipe, *options = arguments(name, data, **changes)
    return parse(recipe, find(recipe), options)[0]


def train_in_two_processes(config: RunConfig, out: Path) -> None:
    """As torchrun would, but forked from this process, which has imported everything."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in (0, 1):
        if (pid := os.fork()) == 0:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}
            os.environ |= {name: str(value) for name, value in place.items()}
            code = 1
            try:
                train(config, out)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        started.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started] == [0, 0]
