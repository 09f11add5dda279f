"""Parallel text: read from real layouts, cut into pieces and put together again, in batches that are a function of seed and step."""

from __future__ import annotations

import gzip
import warnings
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nofm.data.errors import DataError
from nofm.data.order import Share
from nofm.data.pairs import PairLoader, PairOrder, Ragged, make_buckets
from nofm.data.subwords import SPECIALS, Subwords, cached_subwords
from nofm.data.text import Corpus, Text, read_corpus, read_split
from nofm.tasks.transformer import BOS, EOS, PAD
from nofm.tasks.translation import read_bytes

ENGLISH = ["a dog runs", "two dogs sit", "the “house” is red", "a man walks his dog in the green park", "yes"]
GERMAN = ["ein Hund läuft", "zwei Hunde sitzen", "das Haus ist rot", "ein Mann führt seinen Hund im grünen Park aus", "ja"]


def write(root: Path, split: str, source: str | bytes, target: str | bytes, zipped: bool = False) -> None:
    for language, text in (("en", source), ("de", target)):
        raw = text if isinstance(text, bytes) else text.encode()
        (root / (f"{split}.{language}" + (".gz" if zipped else ""))).write_bytes(gzip.compress(raw) if zipped else raw)


# ---- files ----


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
def test_a_split_is_read_line_by_line(zipped, tmp_path):
    write(tmp_path, "train", "\ufeffone\u2028 piece\n two\x85words \r\n\nfour", "eins\nzwei\n\nvier\n", zipped)
    text = read_split(tmp_path, "train", "en", "de")
    assert text.source == ["one\u2028 piece", "two\x85words", "", "four"], "lines end at newlines only"
    assert text.target == ["eins", "zwei", "", "vier"]


def test_corpora_know_their_splits(tmp_path):
    for split in ("train", "test", "test_2016_flickr", "newstest2014"):
        write(tmp_path, split, f"{split}\n", f"{split}, deutsch\n")
    assert read_corpus("parallel", tmp_path).test.source == ["test"]
    assert read_corpus("multi30k", tmp_path).test.source == ["test_2016_flickr"]
    assert read_corpus("parallel", tmp_path, "de", "en", test="newstest2014").test.source == ["newstest2014, deutsch"]


BAD_FILES = {
    "line counts": ({"train.en": b"a\nb\nc\n", "train.de": b"a\nb\n"}, r"train\.en has 3 lines and .*train\.de has 2"),
    "empty": ({"train.en": b"", "train.de": b"a\n"}, r"train\.en: is empty"),
    "only blank lines": ({"train.en": b"a\n\n", "train.de": b"\n \n"}, r"train\.de: is empty"),
    "missing": ({"train.en": b"a\n"}, r"there is no train\.de or train\.de\.gz; there is: train\.en$"),
    "two of it": ({"train.en": b"a\n", "train.en.gz": b"", "train.de": b"a"}, r"holds both train\.en and train\.en\.gz"),
    "not UTF-8": ({"train.en": b"a\nb\n", "train.de": b"gut\nsch\xf6n\n"}, r"train\.de, line 2: is not UTF-8"),
    "no gzip": ({"train.en.gz": b"a\n", "train.de": b"a\n"}, r"train\.en\.gz: cannot be read"),
    "cut short": ({"train.en.gz": gzip.compress(b"a\n" * 99)[:-9], "train.de": b"a\n"}, r"train\.en\.gz: cannot be read"),
    "blank test line": (
        {"train.en": b"a\n", "train.de": b"a\n", "test.en": b"a\nb\n", "test.de": b"a\n\n"},
        r"test\.de, line 2 is empty",
    ),
}


@pytest.mark.parametrize(("files", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_named(files, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_corpus("parallel", tmp_path)


def test_unknown_corpora_and_folders_are_named(tmp_path):
    with pytest.raises(DataError, match=r"data.name = wmt: there is no such corpus; there are parallel, multi30k"):
        read_corpus("wmt", tmp_path)
    with pytest.raises(DataError, match=r"nowhere: there is no train.en or train.en.gz; there is: no such folder"):
        read_corpus("parallel", tmp_path / "nowhere")


# ---- subwords ----


@pytest.fixture(scope="module")
def subwords() -> Subwords:
    return Subwords.learn([*ENGLISH, *GERMAN] * 3, 300)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(texts=st.lists(st.text(st.characters(codec="utf-8")).map(str.strip), min_size=1, max_size=5))
def test_any_text_comes_back(texts, subwords):
    ids = subwords.encode(texts)
    assert subwords.decode(ids) == texts
    assert subwords.decode([[BOS, *row, EOS, PAD, PAD] for row in ids]) == texts
    assert all(EOS < i < subwords.size for row in ids for i in row)


def test_special_tokens_are_the_models_and_texts_cannot_forge_them(subwords):
    assert (SPECIALS.index("<pad>"), SPECIALS.index("<s>"), SPECIALS.index("</s>")) == (PAD, BOS, EOS)
    text = "say <s> and </s> and <pad>"
    assert subwords.decode(subwords.encode([text])) == [text]
    assert min(subwords.encode([text])[0]) > EOS


def test_a_word_is_one_token_wherever_it_stands(subwords):
    (first, middle) = subwords.encode(["dog", "a dog"])
    assert first == middle[-1:]


def test_what_is_not_in_it_is_left_out(subwords):
    assert subwords.rows % 8 == 0
    assert 0 <= subwords.rows - subwords.size < 8
    assert subwords.decode([[*subwords.encode(["ja"])[0], subwords.size, 10**6]]) == ["ja"]


def test_the_same_text_makes_the_same_vocabulary_and_is_learned_once(tmp_path, monkeypatch):
    first = cached_subwords(ENGLISH, 280, tmp_path)
    (path,) = tmp_path.glob("bpe-280-*.json")
    again = Subwords.learn(ENGLISH, 280)
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    monkeypatch.setattr(Subwords, "learn", None)  # from here on it cannot be learned, only found
    found = cached_subwords(ENGLISH, 280, tmp_path)
    assert found.encode([*ENGLISH, "<s>"]) == first.encode([*ENGLISH, "<s>"])
    for other in ((ENGLISH[:-1], 280), (ENGLISH, 281)):
        with pytest.raises(TypeError):
            cached_subwords(*other, tmp_path)


def test_a_bad_vocabulary_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"data.vocabulary = 100: must be at least 259"):
        Subwords.learn(ENGLISH, 100)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad.json: is no vocabulary"):
        Subwords.load(tmp_path / "bad.json")
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "foreign.json"))
    with pytest.raises(DataError, match=r"foreign.json: a vocabulary must begin with <pad>, <s>, </s>"):
        Subwords.load(tmp_path / "foreign.json")


# ---- batches ----


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=400),
    tokens=st.integers(256, 2000),
    parts=st.sampled_from([1, 2, 4]),
)
def test_buckets_hold_every_sentence_once_within_the_tokens(lengths, tokens, parts):
    buckets = make_buckets(torch.tensor(lengths), tokens, parts)
    members = torch.cat([b.member for b in buckets]).tolist()
    assert sorted(members) == list(range(len(lengths)))
    assert len({b.width for b in buckets}) == len(buckets), "one shape for each width"
    for b in buckets:
        assert b.width % 8 == 0
        assert max(lengths[i] for i in b.member.tolist()) <= b.width
        assert b.rows % parts == 0
        assert b.rows * b.width <= tokens
        assert 0 <= b.rows * b.batches - len(b.member) < b.batches * parts, "no more empty places than even parts need"
    room = [tokens // b.width // parts * parts for b in buckets]
    full = [len(b.member) >= r for b, r in zip(buckets, room, strict=True)]
    assert all(full) or len(buckets) == 1, "no bucket that a batch would not fill"


def test_a_batch_too_small_for_a_sentence_is_refused():
    with pytest.raises(DataError, match=r"engine.batch_size = 100: .* cannot hold 4 sentence\(s\) of 32"):
        make_buckets(torch.tensor([30, 4]), 100, parts=4)


def order(seed: int = 3) -> PairOrder:
    lengths = torch.randint(1, 40, (150,), generator=torch.Generator().manual_seed(0))
    return PairOrder(150, seed, make_buckets(lengths, 320))


def test_an_epoch_has_every_sentence_once_and_the_next_is_another():
    o = order()
    epochs = [[o.indices(e * o.steps_per_epoch + s)[0].tolist() for s in range(o.steps_per_epoch)] for e in range(2)]
    for steps in epochs:
        assert sorted(i for step in steps for i in step if i < 150) == list(range(150))
    assert epochs[0] != epochs[1]
    assert sorted(map(sorted, epochs[0])) != sorted(map(sorted, epochs[1])), "other batches, not only another order"
    widths = [o.indices(s)[1] for s in range(o.steps_per_epoch)]
    assert widths not in (sorted(widths), sorted(widths, reverse=True)), "long and short ones are mixed"


def test_the_sentences_of_a_step_do_not_depend_on_the_steps_before():
    straight, jumping = order(), order()
    expected = [straight.indices(step) for step in range(3 * straight.steps_per_epoch)]
    for step in (40, 2, 33, 17, 1, 0):
        index, width = jumping.indices(step)
        assert torch.equal(index, expected[step][0])
        assert width == expected[step][1]
    assert any(not torch.equal(order(4).indices(s)[0], expected[s][0]) for s in range(5))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(rows=st.lists(st.lists(st.integers(1, 99), max_size=9), min_size=1, max_size=8), data=st.data())
def test_ragged_rows_are_padded(rows, data):
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1))
    width = data.draw(st.integers(0, 40))
    padded = Ragged(rows).padded(torch.tensor(index), torch.arange(width))
    assert padded.tolist() == [(rows[i] + [PAD] * width)[:width] for i in index]


def corpus(*, long: int = 0, blank: int = 0) -> Corpus:
    words = ENGLISH[3].split()
    source = ["dog " * 99] * long + [""] * blank + [" ".join(words[: 1 + i % 9]) + f" {i}" for i in range(60)]
    target = ["Hund"] * long + ["?"] * blank + [f"{i} " + " ".join(GERMAN[3].split()[: 1 + i % 7]) for i in range(60)]
    return Corpus(Text(source, target, ("train.en", "train.de")), Text(ENGLISH, GERMAN, ("test.en", "test.de")))


def texts(subwords: Subwords, batch: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    return list(zip(*(subwords.decode(batch[side].tolist()) for side in ("source", "target")), strict=True))


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_processes_and_micro_batches_see_every_pair_once(world, accumulate, subwords):
    loaders = [PairLoader(corpus(), subwords, 512, seed=1, share=Share(rank, world, accumulate)) for rank in range(world)]
    steps = loaders[0].order.steps_per_epoch
    seen = []
    for loader in loaders:
        for key in islice(loader.keys(0), steps * accumulate):
            batch = loader.make(key)
            assert batch["source"].shape == batch["target"].shape
            assert batch["source"].numel() * world * accumulate <= 512
            assert batch["source"].shape[1] % 8 == 0
            assert all(EOS in row for row in batch["source"].tolist()), "even where there is no sentence, there is one to attend to"
            seen += [pair for pair in texts(subwords, batch) if pair != ("", "")]
    c = corpus().train
    assert sorted(seen) == sorted(zip(c.source, c.target, strict=True))


def test_a_loader_that_starts_late_goes_on_as_if_it_had_not(subwords):
    loaders = [PairLoader(corpus(), subwords, 512, seed=1, share=Share(0, 1, 2)) for _ in range(2)]
    expected = [loaders[0].make(key) for key in islice(loaders[0].keys(0), 60)]
    start = loaders[0].order.steps_per_epoch + 1
    for late, straight in zip(loaders[1].keys(start), expected[2 * start :], strict=False):
        batch = loaders[1].make(late)
        assert all(torch.equal(batch[name], straight[name]) for name in ("source", "target"))


def test_what_is_left_out_is_counted_and_said(subwords):
    with pytest.warns(UserWarning, match=r"train.en and train.de: 5 of 65 pairs are left out, 2 of them longer than .* 64 .*, 3 with"):
        loader = PairLoader(corpus(long=2, blank=3), subwords, 512, seed=1, max_length=64)
    assert loader.skipped == 5
    left = [pair for key in islice(loader.keys(0), loader.order.steps_per_epoch) for pair in texts(subwords, loader.make(key))]
    assert {pair for pair in left if pair != ("", "")} == set(zip(corpus().train.source, corpus().train.target, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PairLoader(corpus(), subwords, 512, seed=1).skipped == 0
    with pytest.raises(DataError, match=r"60 of 60 pairs .* 2 tokens .*: nothing is left to train on"):
        PairLoader(corpus(), subwords, 512, seed=1, max_length=2)


def test_all_test_sentences_are_measured_once_however_long(subwords):
    long = Text([*ENGLISH, "dog " * 299 + "dog"], [*GERMAN, "Hund"], ("test.en", "test.de"))
    c = Corpus(corpus().train, long)
    seen = []
    for rank in range(2):
        for batch in PairLoader(c, subwords, 512, seed=1, share=Share(rank, 2), test_tokens=64).test():
            assert batch["source"].shape[0] == 1 or batch["source"].numel() <= 64
            decoded = texts(subwords, batch)
            seen += list(zip(batch["index"].tolist(), *zip(*decoded, strict=True), read_bytes(batch["reference"]), strict=True))
    assert sorted(seen) == [(i, s, t, t) for i, (s, t) in enumerate(zip(long.source, long.target, strict=True))]
