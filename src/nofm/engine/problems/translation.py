"""Sentences and their translations: a Transformer on parallel text, Multi30k or LibreOffice's help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.errors import DataError
from ...data.libreoffice import SPLITS, find_help
from ...data.text import CORPORA, find_split
from ..complaints import Complaints, folder, number
from ..config import ConfigError, RunConfig
from ..resolve import near
from .base import Problem

if TYPE_CHECKING:
    from torch import nn

    from ...analysis import Cost
    from ...data.loader import Loader, Tests
    from ...tasks.base import Task
    from ...tasks.transformer import Transformer
    from ..world import World

__all__ = ["TRANSFORMERS", "Translation"]

TRANSFORMERS = ("transformer/base", "transformer/small")
_VOCABULARY, _VOCABULARY_FILE = 8000, "vocabulary.json"
_COST_LENGTH = 155  # tokens of the sentences that costs are counted for: with so many the paper's 10.2 G come out


class Translation(Problem):
    """Tokens are what a step is measured in, so that it has few long sentences or many short ones."""

    fields = (
        "task.label_smoothing",
        "task.beams",
        "task.alpha",
        "model.layers",
        "model.dropout",
        "model.norm",
        "data.source",
        "data.target",
        "data.test",
        "data.vocabulary",
        "data.max_length",
        "data.cache",
    )
    test_fields = ("data.name", "data.root", "data.test", "task.beams", "task.alpha")
    data = tuple(CORPORA)
    packages, extra = ("tokenizers", "sacrebleu"), "text"
    unit, items = "tokens", "pairs"
    not_sharded = "is not for translation, whose embeddings and softmax are one matrix"

    # ---- settings ----

    def check(self, c: RunConfig) -> Complaints:
        t, m, d = c.task, c.model, c.data
        yield from number("task.label_smoothing", t.label_smoothing, 0, 1)
        yield from _check_search(c)
        if m.name not in TRANSFORMERS:
            yield "model.name", f"must be {' or '.join(TRANSFORMERS)} for translation{near(m.name, TRANSFORMERS)}"
        yield from number("model.layers", m.layers, 1)
        yield from number("model.dropout", m.dropout, 0, 1)
        if m.norm not in ("post", "pre", None):
            yield "model.norm", "must be post or pre for translation"
        yield from number("data.vocabulary", d.vocabulary, 259)
        yield from number("data.max_length", d.max_length, 2, 1024, open_high=False)
        if d.cache is not None and Path(d.cache).exists() and not Path(d.cache).is_dir():
            yield "data.cache", "is a file; give a folder"
        if c.engine.channels_last:
            yield "engine.channels_last", "has no effect on translation, which has no images"
        yield from self._check_files(c)

    def _check_files(self, c: RunConfig, splits: tuple[str, ...] = ("train", "test")) -> Complaints:
        d = c.data
        source, target = _languages(c)
        for key, language in (("data.source", source), ("data.target", target)):
            if not language.strip() or "/" in language:
                yield key, "must be a language as files end, such as en"
        if source == target:
            yield "data.target", f"must differ from data.source, which is {source}"
        missing = list(folder(c))
        yield from missing
        if missing or d.root is None:
            return
        learn, measure = CORPORA[d.name][0], d.test or CORPORA[d.name][1]
        if d.name == "libreoffice":
            if measure not in SPLITS:
                yield "data.test", f"must be one of {', '.join(SPLITS)}, as LibreOffice's help is split{near(measure, SPLITS)}"
            yield from _complaint("data.root", lambda: find_help(d.root or "", source, target))
        else:
            looked_for = {"train": ("data.root", learn), "test": ("data.root" if d.test is None else "data.test", measure)}
            for key, split in (looked_for[which] for which in splits):
                yield from _complaint(key, lambda split=split: find_split(d.root or "", split, source, target))

    # ---- network ----

    def draft(self, c: RunConfig) -> nn.Module:
        return _model(c, -(-_or(c.data.vocabulary, _VOCABULARY) // 8) * 8)

    def task(self, c: RunConfig, loader: Any, *, blank: bool = False) -> Task:
        from ...tasks.translation import Translation as TranslationTask

        t, words = c.task, loader.subwords
        beams, alpha = _or(t.beams, 5), _or(t.alpha, 0.6)
        return TranslationTask(_model(c, words.rows), words.decode, label_smoothing=t.label_smoothing, beams=beams, alpha=alpha)

    def cost(self, c: RunConfig, task: Task) -> Cost | None:
        import torch

        from ...analysis import cost

        sentence = torch.zeros((1, _COST_LENGTH), dtype=torch.int64)
        return cost(task.model, [sentence, sentence])

    # ---- data ----

    def loader(self, c: RunConfig, world: World) -> Loader:
        from ...data.order import Share
        from ...data.pairs import PairLoader
        from ...data.subwords import cached_subwords
        from ...data.text import read_corpus

        d, e = c.data, c.engine
        corpus = read_corpus(d.name, d.root or "", *_languages(c), d.test)
        texts = [*corpus.train.source, *corpus.train.target]
        words = cached_subwords(texts, _or(d.vocabulary, _VOCABULARY), None if d.cache is None else Path(d.cache))
        share = Share(world.rank, world.size, e.accumulate)
        return PairLoader(corpus, words, e.batch_size, c.seed, share, world.device, max_length=_or(d.max_length, 128))

    def step_size(self, c: RunConfig, loader: Any) -> float:
        return float(loader.tokens_of_step)

    def companions(self, loader: Any) -> dict[str, bytes]:
        return {_VOCABULARY_FILE: loader.subwords.to_json().encode()}

    # ---- measuring a finished network ----

    def check_tests(self, c: RunConfig) -> Complaints:
        yield from _check_search(c)
        yield from self._check_files(c, ("test",))

    def tests(self, own: RunConfig, c: RunConfig, world: World, run: Path) -> Tests:
        from ...data.order import Share
        from ...data.pairs import PairTests
        from ...data.subwords import Subwords
        from ...data.text import read_test

        if not (run / _VOCABULARY_FILE).is_file():
            raise ConfigError(
                f"{run / _VOCABULARY_FILE}: is missing, without which the weights mean nothing; copy it from where the run was made"
            )
        text = read_test(c.data.name, c.data.root or "", *_languages(c), c.data.test)
        return PairTests(text, Subwords.load(run / _VOCABULARY_FILE), Share(), world.device)


def _check_search(c: RunConfig) -> Complaints:
    yield from number("task.beams", c.task.beams, 1, 64, open_high=False)
    yield from number("task.alpha", c.task.alpha, 0)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _languages(c: RunConfig) -> tuple[str, str]:
    return _or(c.data.source, "en"), _or(c.data.target, "de")


def _complaint(key: str, find: Any) -> Complaints:
    """What `find` has to say about files that are missing."""
    try:
        find()
    except DataError as error:
        yield key, str(error)


def _model(c: RunConfig, vocabulary: int) -> Transformer:
    from ...tasks.transformer import build_transformer

    m = c.model
    return build_transformer(m.name, vocabulary, layers=m.layers, dropout=m.dropout, norm=m.norm)
