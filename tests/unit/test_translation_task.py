"""The translation task: its loss by hand, BLEU as sacreBLEU gives it for everything at once, the learning rate by the paper's formula."""

from __future__ import annotations

import copy
import math
from functools import partial
from itertools import chain

import pytest
import sacrebleu
import torch
from torch import Tensor

from nofm.errors import NofmError
from nofm.tasks.transformer import BOS, EOS, PAD, Size, Transformer
from nofm.tasks.translation import Sample, Translation, inverse_sqrt, read_bytes

WORDS = ["", "", "", "a", "the", "dog", "dogs", "Hund,", "läuft", "schnell", "."]


def spell(rows) -> list[str]:
    """Token ids to text, as a vocabulary of whole words would."""
    return [" ".join(WORDS[i] for i in row if i > EOS) for row in rows]


def task(**options) -> Translation:
    torch.manual_seed(0)
    model = Transformer(len(WORDS), Size(layers=1, width=16, hidden=32, heads=2, dropout=0.0)).double().eval()
    with torch.no_grad():
        model.embedding.weight.mul_(2)  # opinions
    return Translation(model, spell, **options)


def batch(*lengths: int, references: list[str] | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    rows = torch.full((len(lengths), 8), PAD)
    for row, length in zip(rows, lengths, strict=True):
        row[: length - 1] = torch.randint(EOS + 1, len(WORDS), (length - 1,), generator=generator)
        row[length - 1] = EOS
    texts = [text.encode() for text in references or spell(rows.tolist())]
    widest = max(map(len, texts))
    reference = torch.tensor([list(text.ljust(widest, b"\0")) for text in texts], dtype=torch.uint8)
    return {"source": rows, "target": rows.roll(1, 0), "reference": reference, "index": torch.arange(len(lengths))}


# ---- loss ----


def test_the_loss_is_smoothed_and_a_mean_over_tokens():
    t, b = task(label_smoothing=0.2), batch(3, 7, 5)
    total, tokens = 0.0, 0
    for source, target in zip(b["source"], b["target"], strict=True):
        words = [i for i in target.tolist() if i != PAD]
        log_prob = t.model(source[None], torch.tensor([[BOS, *words[:-1]]]))[0].log_softmax(1)
        for place, word in enumerate(words):
            total -= 0.8 * log_prob[place, word].item() + 0.2 * log_prob[place].mean().item()
            tokens += 1
    out = t(b)
    assert int(out["tokens"]) == tokens == 15
    assert out["loss"].item() == pytest.approx(total / tokens, rel=1e-6)  # the loss is computed in fp32


def test_padding_and_empty_rows_change_nothing():
    t, b = task(), batch(3, 7, 5)
    loss = t(b)["loss"]
    empty = torch.full((2, 12), PAD)
    empty[:, 0] = EOS
    wide = {name: torch.nn.functional.pad(b[name], (0, 4), value=PAD) for name in ("source", "target")}
    wide = {"source": torch.cat((wide["source"], empty)), "target": torch.cat((wide["target"], torch.full_like(empty, PAD)))}
    torch.testing.assert_close(t(wide)["loss"], loss, rtol=1e-6, atol=0)
    nothing = t({"source": empty, "target": torch.full_like(empty, PAD)})["loss"]
    nothing.backward()
    assert nothing.item() == 0.0
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in t.parameters())


# ---- BLEU ----


def add(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: first[name] + second[name] for name in first}


@torch.no_grad()
def test_bleu_of_batches_is_sacrebleus_of_the_whole():
    t = task(beams=2)
    sizes = [(3, 7, 5), (8, 8), (6, 4, 4, 7)]
    drafts = [batch(*lengths) for lengths in sizes]
    # References that share much, but not all, with what the network says: a word dropped here, one changed there.
    hypotheses = [t.translate(b["source"]) for b in drafts]
    references = [[(h.split(" ", 1)[-1] if i % 2 else h) + " schnell ." for i, h in enumerate(batch)] for batch in hypotheses]
    batches = [batch(*lengths, references=texts) for lengths, texts in zip(sizes, references, strict=True)]
    sums = [t.measure(b) for b in batches]
    metrics = t.metrics({name: float(value) for name, value in add(add(sums[0], sums[1]), sums[2]).items()})
    expected = sacrebleu.corpus_bleu(list(chain(*hypotheses)), [list(chain(*references))])
    assert 10 < expected.score < 90, "neither nothing nor everything is right"
    assert metrics["bleu"] == expected.score
    assert metrics["length_ratio"] == expected.sys_len / expected.ref_len
    assert metrics["bleu"] != pytest.approx(sum(t.metrics({k: float(v) for k, v in s.items()})["bleu"] for s in sums) / 3, abs=0.1)


@torch.no_grad()
def test_perplexity_is_of_the_references_without_smoothing():
    t, b = task(label_smoothing=0.3), batch(4, 6)
    metrics = t.metrics({name: float(value) for name, value in t.measure(b).items()})
    assert metrics["perplexity"] == pytest.approx(math.exp(float(task(label_smoothing=0.0)(b)["loss"])), rel=1e-6)


def test_nothing_right_and_nothing_said_have_bleu_0():
    zero = dict.fromkeys([f"{kind}{n}" for kind in ("correct", "ngrams") for n in (1, 2, 3, 4)], 0.0)
    metrics = task().metrics({**zero, "words": 0.0, "reference_words": 9.0, "nll": 1e5, "tokens": 9.0})
    assert metrics == {"bleu": 0.0, "perplexity": math.inf, "length_ratio": 0.0}


def test_the_signature_names_case_tokenisation_and_version():
    assert task().signature == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"


@torch.no_grad()
def test_samples_are_what_was_measured_since_the_reset():
    t = task(beams=1)
    t.measure(batch(3, 7, 5, 4, 4, 6))
    assert len(t.samples(count=9)) == 6
    t.reset()
    assert t.samples() == []
    b = batch(3, 7, 5, 8)
    b["index"] = torch.tensor([30, 10, 20, 40])
    t.measure(b)
    sources, hypotheses = spell(b["source"].tolist()), t.translate(b["source"])
    assert t.samples(count=2) == [Sample(sources[i], sources[i], hypotheses[i]) for i in (1, 0)], "by number: 10 and 30 of 10 20 30 40"


def test_bytes_are_read_back():
    texts = ["größer", "", "a\0b"]
    rows = torch.zeros((3, 12), dtype=torch.uint8)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text.encode())] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    assert read_bytes(rows) == texts


@torch.no_grad()
def test_a_translation_is_no_longer_than_allowed():
    for a, b in ((0.0, 1), (0.5, 2)):
        t = task(longest=(a, b), beams=3)
        words = [len(text.split()) for text in t.translate(batch(8, 4)["source"])]
        assert all(count < limit for count, limit in zip(words, (8 * a + b, 4 * a + b), strict=True))


def test_a_task_can_be_copied():
    """As an average of weights does."""
    t = task()
    twin = copy.deepcopy(t)
    b = batch(3, 5)
    assert torch.equal(twin(b)["loss"], t(b)["loss"])
    assert twin.model.output.weight is twin.model.embedding.weight is not t.model.embedding.weight


def test_the_loss_compiles_as_one_graph():
    t, b = task(), batch(3, 5)
    compiled = torch.compile(t, backend="eager", fullgraph=True)
    assert torch.equal(compiled(b)["loss"], t(b)["loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"label_smoothing": 1.0}, "task.label_smoothing = 1.0"), ({"beams": 0}, "task.beams = 0: must be at least 1, which is greedy")],
    ids=["smoothing", "beams"],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(NofmError, match=message):
        task(**options)


# ---- learning rate ----


def test_the_learning_rate_is_the_papers():
    width, warmup = 512, 4000
    for number in (1, 10, 3999, 4000, 4001, 100_000):
        paper = width**-0.5 * min(number**-0.5, number * warmup**-1.5)
        assert (width * warmup) ** -0.5 * inverse_sqrt(number - 1, warmup) == pytest.approx(paper, rel=1e-12)


def test_the_learning_rate_through_torch():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=8e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(inverse_sqrt, warmup=4))
    seen = []
    for _ in range(16):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen[:5] == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 8e-3 * math.sqrt(4 / 5)])
    assert seen[15] == pytest.approx(4e-3)
    assert [inverse_sqrt(step, 0) for step in (0, 3)] == [1.0, 0.5]
