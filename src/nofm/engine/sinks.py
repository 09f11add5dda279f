"""Trackers that events are passed on to. Each is imported when it is asked for, and told apart from the rest of the engine by `log`.

A resumed run goes on in the tracker's own record of it: the folder keeps the name of that in `wandb-run` and `mlflow-run`.
"""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .config import ConfigError
from .folder import Sink

__all__ = ["SINKS", "Guarded", "make_sink", "scalars"]


def scalars(event: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of an event, by the names that trackers show."""
    if event["event"] == "train":
        yield from ((f"train/{name}", event[name]) for name in ("loss", "lr", "images_per_second", "epoch"))
    elif event["event"] == "eval":
        group = "eval_ema" if event["ema"] else "eval"
        yield from ((f"{group}/{name}", value) for name, value in event["metrics"].items())
    elif event["event"] == "found":
        yield from ((f"found/{name}", value) for name, value in event["values"].items())
    elif event["event"] == "sad":
        yield "sad/total", sum(event["changed"].values())
        yield from ((f"sad/{layer}", count) for layer, count in event["changed"].items())


class TensorBoard:
    """Scalars of every event, and histograms of the weights that it is shown."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, event: dict[str, Any]) -> None:
        for name, value in scalars(event):
            self._writer.add_scalar(name, value, event["step"])
        if event["event"] == "weight":
            self._writer.add_histogram(f"weights/{event['layer']}", event["weight"].float().cpu(), event["step"])

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases; offline or online as its own settings say."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        import wandb

        remembered = folder / "wandb-run"
        name = _remembered(remembered) or uuid.uuid4().hex[:8]
        self._run: Any = wandb.init(project="nofm", name=folder.name, dir=str(folder), config=config, id=name, resume="allow")
        remembered.write_text(name)
        # Steps as a metric of ours: its own may not go back, as they do in a run that is resumed from its last checkpoint.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, event: dict[str, Any]) -> None:
        if numbers := dict(scalars(event)):
            self._run.log({**numbers, "step": event["step"]})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow; its server and experiment are set by its own environment variables."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        remembered = folder / "mlflow-run"
        run: Any = mlflow.start_run(run_id=_remembered(remembered), run_name=folder.name)
        remembered.write_text(run.info.run_id)
        self._status = "KILLED"  # unless an event says otherwise
        # MLflow keeps the first value of a parameter for good; config.json has the newest.
        new = {key: value for key, value in _flat(config) if key not in run.data.params}
        mlflow.log_params(new)
        mlflow.log_dict(config, "config.json")

    def log(self, event: dict[str, Any]) -> None:
        # MLflow allows fewer characters in a name than layers have.
        if numbers := {re.sub(r"[^\w./ -]", "_", name): value for name, value in scalars(event)}:
            self._mlflow.log_metrics(numbers, step=event["step"])
        self._status = {"end": "FINISHED", "error": "FAILED"}.get(event["event"], self._status)

    def close(self) -> None:
        self._mlflow.end_run(self._status)


def _remembered(file: Path) -> str | None:
    """The name under which a tracker knows this run, if an earlier part of it was told to it."""
    return file.read_text().strip() or None if file.exists() else None


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


class Guarded:
    """A tracker that cannot end the run: where it fails, it is left out from then on, and a warning says so."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name, self._sink = name, sink
        self._works = True

    def log(self, event: dict[str, Any]) -> None:
        self._try(lambda: self._sink.log(event))

    def close(self) -> None:
        self._try(self._sink.close)

    def _try(self, call: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            call()
        except Exception as error:  # whatever a server or a full disk on the other side makes of it
            self._works = False
            warnings.warn(f"engine.track = {self._name}: {error}; it is told no more of this run, events.jsonl has it all", stacklevel=2)


SINKS: dict[str, Callable[[Path, dict[str, Any]], Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def make_sink(name: str, folder: Path, config: dict[str, Any]) -> Sink:
    """A sink by name, or an error that says what to install or to set up."""
    try:
        return Guarded(name, SINKS[name](folder, config))
    except ImportError as error:
        raise ConfigError(f"engine.track = {name}: cannot be imported ({error}); install it with pip install {name}") from None
    except Exception as error:  # not logged in, no such server, ...: each tracker has its own words for it
        raise ConfigError(f"engine.track = {name}: does not start: {error}") from error
