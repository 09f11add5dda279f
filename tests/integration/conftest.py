"""Tiny finished runs of every task, shared by all that look at finished runs: each is made once, when the first test asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nofm.cli.main import main


class Finished(dict[str, Path]):
    """Run folders by the names of `task_runs.RUNS`, made by the command line. Whoever writes into one takes a copy."""

    def __init__(self, data: dict[str, Path], root: Path) -> None:
        self._data, self._root = data, root

    def __missing__(self, name: str) -> Path:
        from task_runs import arguments  # here, since not every environment has what all tasks need

        threads = torch.get_num_threads()
        assert main(["train", *arguments(name, self._data[name]), "--out", str(self._root / name)]) == 0
        torch.set_num_threads(threads)
        self[name] = self._root / name
        return self[name]


@pytest.fixture(scope="session")
def task_data(tmp_path_factory) -> dict[str, Path]:
    from task_runs import write_all

    return write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def finished(task_data, tmp_path_factory) -> dict[str, Path]:
    return Finished(task_data, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def all_finished(finished) -> dict[str, Path]:
    from task_runs import RUNS

    return {name: finished[name] for name in RUNS}
