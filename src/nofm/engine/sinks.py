"""Trackers that events are passed on to. Each is imported when it is asked for, and told apart from the rest of the engine by `log`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from ..layers import sites
from .config import ConfigError
from .folder import Sink

__all__ = ["SINKS", "make_sink", "scalars"]


def scalars(event: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of an event, by the names that trackers show."""
    if event["event"] == "train":
        yield from ((f"train/{name}", event[name]) for name in ("loss", "lr", "images_per_second", "epoch"))
    elif event["event"] == "eval":
        group = "eval_ema" if event["ema"] else "eval"
        yield from ((f"{group}/{name}", value) for name, value in event["metrics"].items())
    elif event["event"] == "sad":
        yield "sad/total", sum(event["changed"].values())
        yield from ((f"sad/{layer}", count) for layer, count in event["changed"].items())


class TensorBoard:
    """Scalars of every event, and histograms of the sparse weights every so many steps."""

    def __init__(self, folder: Path, config: dict[str, Any], model: nn.Module) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))
        self._model, self._every, self._next = model, config["engine"]["histogram_every"], 0

    def log(self, event: dict[str, Any]) -> None:
        for name, value in scalars(event):
            self._writer.add_scalar(name, value, event["step"])
        if self._every and event["event"] == "train" and event["step"] >= self._next:
            self._next = event["step"] + self._every
            for site in sites(self._model):
                self._writer.add_histogram(f"weights/{site.name}", site.weight.detach().float().cpu(), event["step"])

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases; offline or online as its own settings say."""

    def __init__(self, folder: Path, config: dict[str, Any], model: nn.Module) -> None:
        import wandb

        self._run: Any = wandb.init(project="nofm", name=folder.name, dir=str(folder), config=config, resume="allow")

    def log(self, event: dict[str, Any]) -> None:
        self._run.log(dict(scalars(event)), step=event["step"])

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow; its server and experiment are set by its own environment variables."""

    def __init__(self, folder: Path, config: dict[str, Any], model: nn.Module) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_dict(config, "config.json")

    def log(self, event: dict[str, Any]) -> None:
        # MLflow allows fewer characters in a name than layers have.
        self._mlflow.log_metrics({name.replace(":", "_"): value for name, value in scalars(event)}, step=event["step"])

    def close(self) -> None:
        self._mlflow.end_run()


SINKS: dict[str, Callable[[Path, dict[str, Any], nn.Module], Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def make_sink(name: str, folder: Path, config: dict[str, Any], model: nn.Module) -> Sink:
    """A sink by name, or an error that says what to install."""
    try:
        return SINKS[name](folder, config, model)
    except ImportError as error:
        raise ConfigError(f"engine.track = {name}: cannot be imported ({error}); install it with pip install {name}") from None
