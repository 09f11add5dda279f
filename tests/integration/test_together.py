"""Several runs in one process: each ends as if it had been alone, an error of one is its own, and a signal stops all of them safely."""

from __future__ import annotations

import functools
import itertools
import signal

import pytest
import torch
from short_runs import digests
from small_runs import SMALL, changed
from torch._dynamo.utils import counters

from nofm.engine import compiling
from nofm.engine.config import ConfigError, MethodConfig, RunConfig
from nofm.engine.signals import Stopped, StopRequest
from nofm.engine.train import Job, train, train_taken, train_together
from nofm.errors import NofmError

DROPOUT = changed(SMALL, model={"dropout": 0.2})


def test_runs_made_together_end_as_runs_made_alone(tmp_path):
    configs = [changed(DROPOUT, seed=seed) for seed in (1, 2, 3)]
    alone = [train(config, tmp_path / f"alone-{i}") for i, config in enumerate(configs)]
    together = train_together([Job(config, tmp_path / f"together-{i}") for i, config in enumerate(configs)])
    assert together == alone
    assert len({str(metrics) for metrics in together}) == 3
    for i in range(3):
        assert digests(tmp_path / f"together-{i}") == digests(tmp_path / f"alone-{i}")


def test_the_next_run_is_asked_for_when_a_lane_is_free(tmp_path):
    """Another process may take it meanwhile."""
    jobs = [Job(changed(SMALL, seed=seed), tmp_path / str(seed)) for seed in range(3)]

    def numbers():
        yield 2
        assert (tmp_path / "2" / "model.safetensors").exists()
        yield 0

    assert list(train_taken(jobs, numbers(), lanes=1, stop=StopRequest())) == [2, 0]
    assert not (tmp_path / "1").exists()


def test_an_error_of_one_run_does_not_end_the_others(tmp_path):
    diverging = changed(SMALL, optim={"lr": 1e30}, sparsity={"method": MethodConfig(kind="ste")})
    good, bad, also_good = train_together([Job(c, tmp_path / str(i)) for i, c in enumerate((SMALL, diverging, SMALL))])
    assert isinstance(bad, NofmError)
    assert good == also_good
    assert isinstance(good, dict)


def test_a_signal_leaves_a_checkpoint_and_the_rest_can_go_on(tmp_path):
    class AfterAWhile(StopRequest):
        looked = 0

        @property
        def number(self) -> int:
            self.looked += 1
            return signal.SIGTERM if self.looked > 20 else 0

        @number.setter
        def number(self, value: int) -> None: ...

    jobs = [Job(changed(DROPOUT, seed=seed), tmp_path / str(seed), resume=True) for seed in (1, 2)]
    with pytest.raises(Stopped):
        train_together(jobs, stop=AfterAWhile())
    resumed = train_together(jobs)
    for seed, metrics in zip((1, 2), resumed, strict=True):
        assert metrics == train(changed(DROPOUT, seed=seed), tmp_path / f"alone-{seed}")
        alone, stopped = digests(tmp_path / f"alone-{seed}"), digests(tmp_path / str(seed))
        assert {name: stopped[name] for name in alone} == alone  # beside it, the masks of the step at which it was stopped


def test_settings_of_the_process_must_agree(tmp_path):
    torch.use_deterministic_algorithms(False)  # whatever a test before has left in this process
    other = changed(SMALL, engine={"deterministic": True})
    with pytest.raises(ConfigError, match="same device"):
        train_together([Job(SMALL, tmp_path / "a"), Job(other, tmp_path / "b")])
    assert not torch.are_deterministic_algorithms_enabled()
    assert not (tmp_path / "a").exists()


# ---- compiled ----


@pytest.fixture
def compiled_briefly(monkeypatch):
    """Compiled as far as kinds of networks are told apart, within torch's own limit at the start."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(compiling, "_runs", itertools.count(1))
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=8):
        yield
    torch._dynamo.reset()


def kinds(number: int) -> list[RunConfig]:
    """So many runs that no two can share their code."""
    one = changed(SMALL, engine={"steps": 1, "compile": True}, schedule={"warmup": 0}, sparsity={"method": MethodConfig(kind="dense")})
    return [changed(one, model={"width": 4 * (1 + i)}) for i in range(number)]


def test_more_kinds_of_networks_than_torch_compiles_in_one_process(compiled_briefly, tmp_path, recwarn):
    """After eight of them it would go on uncompiled."""
    train_together([Job(config, tmp_path / str(i)) for i, config in enumerate(kinds(10))])
    assert counters["stats"]["unique_graphs"] == 10
    assert not [warning for warning in recwarn if "engine.compile" in str(warning.message)]


def test_networks_that_go_on_uncompiled_are_told_of(compiled_briefly, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_OF_ONE_RUN", 0)
    jobs = [Job(config, tmp_path / str(i)) for i, config in enumerate(kinds(3))]
    with torch._dynamo.config.patch(recompile_limit=1), pytest.warns(UserWarning, match="engine.compile: .* uncompiled from now on"):
        train_together(jobs)
    assert counters["stats"]["unique_graphs"] == 1
