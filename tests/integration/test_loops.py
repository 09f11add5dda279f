"""Other people's loops: Lightning, Accelerate and the Trainer of transformers train exactly what a plain loop does.

All of them accumulate two micro-batches in a step, so that a term that is added in every backward, or by a wrapper that is asked and never
called, ends elsewhere: with this lambda STE's weights are a tenth away.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, SequentialSampler

import nofm

METHOD = nofm.SRSTE(decay=0.5)
BATCH, MICRO_BATCHES, STEPS = 8, 2, 6
_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(BATCH * MICRO_BATCHES * STEPS, 32, generator=_GENERATOR)
Y = torch.randint(4, (len(X),), generator=_GENERATOR)


class Images(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": X[i], "labels": Y[i]}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.net(x), labels)}


def sparse() -> Classifier:
    model = Classifier()
    nofm.sparsify_(model, "2:4", preset="all")
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Images(), batch_size=BATCH)


def plain(method: nofm.Method) -> Classifier:
    model = sparse()
    optimizer = sgd(model)
    nofm.attach(method, model, optimizer)
    for number, batch in enumerate(loader(), 1):
        (model(**batch)["loss"] / MICRO_BATCHES).backward()
        if number % MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def accelerate(after: bool) -> Classifier:
    """With `after`, attached to what `prepare` makes of the optimizer."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, cpu=True)
    model = sparse()
    optimizer = sgd(model)
    if not after:
        nofm.attach(METHOD, model, optimizer)
    prepared, wrapper, batches = accelerator.prepare(model, optimizer, loader())
    if after:
        nofm.attach(METHOD, prepared, wrapper)
    for batch in batches:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch)["loss"])
            wrapper.step()
            wrapper.zero_grad()
    return model


def lightning(by_hand: bool) -> Classifier:
    """With `by_hand`, Lightning's manual optimization, attached to what `self.optimizers()` gives."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.automatic_optimization = sparse(), not by_hand

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = sgd(self.model)
            if not by_hand:
                nofm.attach(METHOD, self, optimizer)
            return optimizer

        def on_train_start(self) -> None:
            if by_hand:
                nofm.attach(METHOD, self, self.optimizers())

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            if by_hand:
                optimizer: Any = self.optimizers()
                self.manual_backward(loss / MICRO_BATCHES)
                if (number + 1) % MICRO_BATCHES == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module, quiet = Module(), dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that data are loaded by one process
        accumulated = 1 if by_hand else MICRO_BATCHES
        L.Trainer(max_epochs=1, accumulate_grad_batches=accumulated, accelerator="cpu", **quiet).fit(module, loader())
    return module.model


def transformers(callback: bool, folder: Path) -> Classifier:
    """With `callback`, attached when training begins, to the optimizer that the trainer shows."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Attach(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any) -> None:
            nofm.attach(METHOD, model, optimizer)

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
            return SequentialSampler(Images())

    model = sparse()
    optimizer = sgd(model)
    if not callback:
        nofm.attach(METHOD, model, optimizer)
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH, gradient_accumulation_steps=MICRO_BATCHES, num_train_epochs=1, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no", max_grad_norm=0, lr_scheduler_type="constant", disable_tqdm=True,
    )  # fmt: skip
    InOrder(model, arguments, train_dataset=Images(), optimizers=(optimizer, None), callbacks=[Attach()] if callback else []).train()
    return model


LOOPS: dict[str, Callable[[Path], Classifier]] = {
    "accelerate, attached before prepare": lambda _: accelerate(after=False),
    "accelerate, attached to what prepare gives": lambda _: accelerate(after=True),
    "lightning": lambda _: lightning(by_hand=False),
    "lightning, optimized by hand": lambda _: lightning(by_hand=True),
    "transformers, with its own optimizer": lambda folder: transformers(callback=False, folder=folder),
    "transformers, by a callback": lambda folder: transformers(callback=True, folder=folder),
}


def code_of_the_page(section: str) -> str:
    page = (Path(__file__).parents[2] / "docs" / "loops.md").read_text()
    return page.partition(f"## {section}\n")[2].partition("```python\n")[2].partition("```")[0]


def test_the_code_of_the_page_averages_and_folds():
    given: dict[str, Any] = {"model": Classifier(), "loader": loader()}
    exec(compile(code_of_the_page("An average of the weights"), "page", "exec"), given)
    assert nofm.verify(given["average"].module, {"net.0": "2:4"})["net.0.weight"].ok
    assert not list(nofm.sites(given["average"]))


@pytest.mark.parametrize("section", ["Accelerate", "Lightning", "The Trainer of transformers"])
def test_the_code_of_the_page_trains_and_folds(section, tmp_path, monkeypatch):
    code = code_of_the_page(section)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    given: dict[str, Any] = {"model": Classifier(), "loader": loader(), "dataset": Images()}
    before, model = weights(given["model"]), given["model"]
    exec(compile(code, section, "exec"), given)
    assert not torch.equal(weights(model), before)
    assert nofm.verify(model, {"net.0": "2:4"})["net.0.weight"].ok
    assert not list(nofm.sites(model))


def test_lightning_takes_the_state_of_a_method_along(tmp_path):
    """As the page says it: the class, without the lines that train."""
    import lightning as L

    given: dict[str, Any] = {}
    exec(code_of_the_page("Lightning").partition("trainer = ")[0].replace("SRSTE(decay=2e-4)", "ASP(prune_at=2)"), given)

    def fitted(epochs: int, load: Path | None = None) -> tuple[Any, Any]:
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        module, trainer = given["Module"](Classifier()), L.Trainer(max_epochs=epochs, accelerator="cpu", **quiet)
        trainer.fit(module, loader(), ckpt_path=load)
        return module, trainer

    through, _ = fitted(2)
    once, stopped = fitted(1)
    stopped.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fitted(2, load=tmp_path / "half.ckpt")
    assert resumed.handle.step == through.handle.step == 2 * len(X) // BATCH
    torch.testing.assert_close(weights(resumed), weights(through), rtol=0, atol=0)
    L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False).fit(once, loader())  # once more, from there


def test_the_trainer_takes_the_state_of_a_method_along(tmp_path):
    import transformers

    given: dict[str, Any] = {}
    code = code_of_the_page("The Trainer of transformers").partition("nofm.sparsify_(")[0]
    exec(code.replace('SRSTE(decay=10.0, placement="decoupled")', "ASP(prune_at=2)"), given)

    def trained(folder: Path, resume: str | None = None) -> Classifier:
        model = sparse()
        arguments = transformers.TrainingArguments(
            str(folder),
            per_device_train_batch_size=BATCH,
            num_train_epochs=2,
            use_cpu=True,
            report_to=[],
            save_strategy="epoch",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=Images(), callbacks=[given["Sparse"]()])
        trainer.train(resume_from_checkpoint=resume)
        return model

    through = trained(tmp_path)
    resumed = trained(tmp_path, str(tmp_path / f"checkpoint-{len(X) // BATCH}"))
    torch.testing.assert_close(weights(resumed), weights(through), rtol=0, atol=0)


def test_accelerate_takes_the_state_of_a_method_along(tmp_path):
    from accelerate import Accelerator

    def run(steps: int, load: Path | None = None) -> tuple[nofm.Handle, Any]:
        accelerator = Accelerator(cpu=True)
        model = sparse()
        optimizer = sgd(model)
        handle = nofm.attach(nofm.ASP(prune_at=2), model, optimizer)
        accelerator.register_for_checkpointing(handle)
        prepared, wrapper = accelerator.prepare(model, optimizer)
        if load is not None:
            accelerator.load_state(str(load))
        for batch in list(loader())[:steps]:
            accelerator.backward(prepared(**batch)["loss"])
            wrapper.step()
            wrapper.zero_grad()
        return handle, accelerator

    handle, accelerator = run(3)
    accelerator.save_state(str(tmp_path / "state"))
    resumed, _ = run(0, load=tmp_path / "state")
    assert resumed.step == handle.step == 3
    assert all(torch.equal(a.mask(), b.mask()) for a, b in zip(resumed._sites, handle._sites, strict=True))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def expected() -> Tensor:
    found = weights(plain(METHOD))
    assert (found - weights(plain(nofm.STE()))).abs().max() > 0.1, "lambda must be felt"
    return found


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_framework_trains_what_a_plain_loop_does(loop, expected, tmp_path):
    torch.testing.assert_close(weights(loop(tmp_path)), expected, rtol=0, atol=1e-6)
