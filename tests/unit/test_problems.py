"""What the engine knows of each task: that a problem's table of settings is what it reads, and its names those of the tasks and data."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
import task_runs

from nofm.engine.build import uses_graphs
from nofm.engine.config import ConfigError, DataConfig, EngineConfig, ModelConfig, RunConfig, TaskConfig
from nofm.engine.problems import PROBLEMS, SHARED
from nofm.engine.problems.detection import MODELS
from nofm.engine.problems.flow import RAFTS
from nofm.engine.problems.translation import TRANSFORMERS
from nofm.engine.resolve import keys
from nofm.engine.validate import check
from nofm.engine.world import World


class Watched:
    """A configuration that remembers which of its values were asked for."""

    def __init__(self, config: object, read: set[str], prefix: str = "") -> None:
        self._config, self._read, self._prefix = config, read, prefix

    def __getattr__(self, name: str) -> object:
        value, key = getattr(self._config, name), self._prefix + name
        if dataclasses.is_dataclass(value):
            return Watched(value, self._read, f"{key}.")
        self._read.add(key)
        return value


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    for part in ("train", "val"):
        for label in ("cats", "dogs"):
            (root / "folder" / part / label).mkdir(parents=True)
            Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(root / "folder" / part / label / "one.png")
    return {**task_runs.write_all(root), "folder": root / "folder"}


def images(roots: dict[str, Path]) -> list[RunConfig]:
    engine = EngineConfig(steps=1, batch_size=2)
    digits = RunConfig(engine=engine)
    by_workers = dataclasses.replace(digits, data=DataConfig(loader="workers"))
    folder = DataConfig(name="folder", root=str(roots["folder"]), loader="workers", size=32)
    return [digits, by_workers, RunConfig(engine=engine, model=ModelConfig(name="cifar/resnet20"), data=folder)]


CONFIGS = {
    "classification": images,
    "detection": lambda roots: [task_runs.config_of("detection", roots["detection"])],
    "segmentation": lambda roots: [task_runs.config_of("segmentation", roots["segmentation"])],
    "translation": lambda roots: [task_runs.config_of("translation", roots["translation"])],
    "flow": lambda roots: [task_runs.config_of(name, roots[name]) for name in ("flow", "flow from files")],
}


@pytest.mark.parametrize("kind", PROBLEMS)
def test_a_problem_reads_the_settings_that_it_has_and_no_other(kind, roots):
    problem, read = PROBLEMS[kind], set[str]()
    for config in CONFIGS[kind](roots):
        check(config)
        watched = typing.cast(RunConfig, Watched(config, read))
        with torch.device("meta"):
            problem.draft(watched)
        loader = problem.loader(watched, World(torch.device("cpu")))
        problem.cost(watched, problem.task(watched, loader))
        loader.close()
    own = {key for key in read if key.partition(".")[0] in ("task", "model", "data")}
    assert own - set(SHARED) == set(problem.fields)


def test_every_setting_of_task_model_and_data_belongs_to_a_problem():
    owned = {*SHARED, *(key for problem in PROBLEMS.values() for key in problem.fields)}
    assert owned == {key for key in keys() if key.partition(".")[0] in ("task", "model", "data")}


def test_problems_and_their_data_are_the_words_of_the_configuration():
    kinds = typing.get_args(typing.get_type_hints(TaskConfig)["kind"])
    names = typing.get_args(typing.get_type_hints(DataConfig)["name"])
    assert kinds == tuple(PROBLEMS)
    assert names == tuple(dict.fromkeys(name for problem in PROBLEMS.values() for name in problem.data))


def test_networks_are_those_of_the_tasks():
    from nofm.tasks.detectors import DETECTORS
    from nofm.tasks.flow import FLOW_MODELS
    from nofm.tasks.transformer import SIZES

    assert tuple(SIZES) == TRANSFORMERS
    assert FLOW_MODELS == RAFTS
    assert sorted(name for names in MODELS.values() for name in names) == sorted(DETECTORS)


def test_problems_need_no_torch():
    code = "import sys, nofm.engine.problems; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_steps_that_look_at_the_host_are_never_captured(roots):
    cuda = World(torch.device("cuda"))
    assert uses_graphs(task_runs.config_of("translation", roots["translation"]), cuda)
    assert uses_graphs(task_runs.config_of("flow", roots["flow"]), cuda)
    assert not uses_graphs(task_runs.config_of("flow from files", roots["flow from files"]), cuda), "pairs from files come from the host"
    assert not uses_graphs(task_runs.config_of("detection", roots["detection"]), cuda)
    with pytest.raises(ConfigError, match=r"engine.graph = on: cannot hold a detector"):
        uses_graphs(task_runs.config_of("detection", roots["detection"], engine_graph="on"), cuda)
