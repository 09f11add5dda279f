"""A Transformer learns eight sentences by heart, from files in the real layout, dense and 2:4: BLEU above 90."""

from __future__ import annotations

import gzip
import random
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import sacrebleu
import torch

import nofm
from nofm.data.order import Share
from nofm.data.pairs import PairLoader
from nofm.data.subwords import cached_subwords
from nofm.data.text import Corpus, read_corpus
from nofm.tasks.transformer import Size, Transformer
from nofm.tasks.translation import Translation, inverse_sqrt

WORDS = {"a": "ein", "the": "der", "small": "kleine", "dog": "Hund", "sees": "sieht", "green": "grüne", "tree": "Baum", "old": "alte"}


def write_corpus(root: Path) -> None:
    """Generated sentences in Multi30k's layout; the test has the eight of the training, and four that are new."""
    chance = random.Random(0)
    english = [" ".join(chance.choices(list(WORDS), k=chance.randint(4, 8))) for _ in range(12)]
    german = [", ".join(WORDS[word] for word in reversed(text.split())) + "." for text in english]
    for language, lines in (("en", english), ("de", german)):
        for split, chosen in (("train", lines[:8]), ("test_2016_flickr", lines)):
            (root / f"{split}.{language}.gz").write_bytes(gzip.compress("".join(f"{line}\n" for line in chosen).encode()))


METHODS = {"dense": (nofm.Dense, {}), "SR-STE": (nofm.SRSTE, {"decay": 2e-4})}


@pytest.mark.parametrize(("method", "options"), METHODS.values(), ids=METHODS)
def test_eight_sentences_are_learned_by_heart(method, options, tmp_path):
    write_corpus(tmp_path)
    corpus = read_corpus("multi30k", tmp_path)
    subwords = cached_subwords([*corpus.train.source, *corpus.train.target], 300, tmp_path / "cache")
    loader = PairLoader(corpus, subwords, tokens=512, seed=0)
    torch.manual_seed(0)
    task = Translation(Transformer(subwords.rows, Size(layers=1, width=32, hidden=128, heads=2, dropout=0.0)), subwords.decode, beams=3)
    optimizer = torch.optim.Adam(task.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(inverse_sqrt, warmup=20))
    nofm.sparsify_(task.model, "2:4")
    nofm.attach(method(**options), task.model, optimizer)
    for key in islice(loader.keys(0), 140):
        loss = task(loader.make(key))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    task.eval()
    metrics, _ = measured(task, loader)
    learned = PairLoader(Corpus(corpus.train, corpus.train), subwords, tokens=512, seed=0)
    assert measured(task, learned)[0]["bleu"] > 90
    assert 10 < metrics["bleu"] < 100, "of the new ones it knows less"
    check_two_processes(task, corpus, subwords, metrics)
    if method is not nofm.Dense:
        nofm.fold_(task.model)
        assert measured(task, loader)[0]["bleu"] == metrics["bleu"], "folding must not change the network"
        assert all(nofm.mask(layer.weight, "2:4").logical_or(layer.weight == 0).all() for layer in linear_layers(task))


def linear_layers(task: Translation) -> list[torch.nn.Linear]:
    return [m for name, m in task.model.named_modules() if isinstance(m, torch.nn.Linear) and name != "output"]


@torch.no_grad()
def measured(task: Translation, *loaders: PairLoader) -> tuple[dict[str, float], list]:
    """The metrics of all loaders' sentences together, and the translations."""
    task.reset()
    sums: dict[str, float] = {}
    for loader in loaders:
        for batch in loader.test():
            for name, value in task.measure(batch).items():
                sums[name] = sums.get(name, 0.0) + float(value)
    return task.metrics(sums), task.samples(10**6)


def check_two_processes(task: Translation, corpus: Corpus, subwords, metrics: dict[str, float]) -> None:
    """Two processes' sums, over small batches, make the BLEU that sacreBLEU gives for all sentences in one."""
    halves = [PairLoader(corpus, subwords, 512, seed=0, share=Share(rank, 2), test_tokens=48) for rank in range(2)]
    together, samples = measured(task, *halves)
    hypotheses, references = [s.hypothesis for s in samples], [s.reference for s in samples]
    assert references == corpus.test.target
    assert together["bleu"] == metrics["bleu"] == sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert together["perplexity"] == pytest.approx(metrics["perplexity"], rel=1e-5)
