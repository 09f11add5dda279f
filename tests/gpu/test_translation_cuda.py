"""Translation on a GPU: the same translations as on the CPU, and a step in which the host waits for nothing."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch

import nofm
from nofm.data.pairs import PairLoader
from nofm.data.subwords import Subwords
from nofm.data.text import Corpus, Text
from nofm.tasks.transformer import Size, Transformer
from nofm.tasks.translation import Translation

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    chance = random.Random(0)
    source = [" ".join(chance.choices(["a", "small", "dog", "sees", "the", "tree"], k=chance.randint(2, 20))) for _ in range(400)]
    text = Text(source, [" ".join(reversed(s.split())) for s in source], ("en", "de"))
    return Corpus(text, Text(source[:50], text.target[:50], ("en", "de")))


@pytest.fixture(scope="module")
def subwords(corpus) -> Subwords:
    return Subwords.learn([*corpus.train.source, *corpus.train.target], 300)


def make_task(subwords: Subwords) -> Translation:
    torch.manual_seed(0)
    model = Transformer(subwords.rows, Size(layers=2, width=64, hidden=128, heads=4, dropout=0.1))
    with torch.no_grad():
        model.embedding.weight.mul_(3)  # opinions, so that rounding decides nothing
    nofm.sparsify_(model, "2:4")
    return Translation(model, subwords.decode, beams=4)


@torch.no_grad()
def test_translations_are_those_of_the_cpu(corpus, subwords):
    task = make_task(subwords).eval()
    batches = [list(PairLoader(corpus, subwords, 1024, 0, device=device).test()) for device in (torch.device("cpu"), CUDA)]
    on_cpu = [task.translate(batch["source"]) for batch in batches[0]]
    task.to(CUDA)
    torch.backends.cuda.matmul.allow_tf32 = False
    on_gpu = [task.translate(batch["source"]) for batch in batches[1]]
    same = [a == b for cpu, gpu in zip(on_cpu, on_gpu, strict=True) for a, b in zip(cpu, gpu, strict=True)]
    assert sum(same) >= 0.98 * len(same)  # a tie may fall the other way


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_the_host_waits_for_nothing_in_a_step(corpus, subwords, precision):
    task = make_task(subwords).to(CUDA)
    loader = PairLoader(corpus, subwords, 1024, 0, device=CUDA)
    optimizer = torch.optim.Adam(task.parameters(), lr=1e-3, fused=True)

    def step(key) -> None:
        with torch.autocast("cuda", precision, enabled=precision is not torch.float32):
            loss = task(loader.make(key))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    per_epoch = loader.order.steps_per_epoch
    keys = list(islice(loader.keys(0), per_epoch))
    for key in keys:  # every shape once: libraries and plans
        step(key)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for key in keys:
            step(key)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len({(key["pair"].shape, key["position"].shape) for key in keys}) == len(loader.order.buckets), "one shape for each bucket"
