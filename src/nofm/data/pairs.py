"""Sentence pairs as batches of so many tokens, from memory of the device.

All token ids lie in one flat tensor for each language, and a batch is one indexing operation into each. Sentences of about the same
length go together, padded to a multiple of 8, in *buckets*: all batches of a bucket have one shape, so that a whole epoch has few. Which
sentences a step has is a pure function of (seed, step), see `PairOrder`.

Training batches are {"source": (B, W), "target": (B, W)}; those to be measured have widths of their own and also "reference" (the
texts' bytes, zeros after their ends) and "index". Shapes in names: B sentences, W tokens, N sentences in all.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from .errors import DataError
from .loader import Batch
from .order import Share, mix
from .subwords import SPECIALS, Subwords
from .text import Corpus, Text

__all__ = ["Bucket", "PairLoader", "PairOrder", "PairTests", "Ragged", "make_buckets"]

_PAD, _EOS = SPECIALS.index("<pad>"), SPECIALS.index("</s>")
_ROUND = 8


def _rounded(length: int) -> int:
    return -(-length // _ROUND) * _ROUND


class Ragged:
    """Rows of different lengths, one behind another."""

    def __init__(self, rows: Iterable[Sequence[int]]) -> None:
        flat, lengths = array("i"), array("q")  # grown row by row: lists of all of WMT's numbers would not fit into memory
        for row in rows:
            flat.extend(row)
            lengths.append(len(row))
        flat.append(_PAD)  # what is read after the end
        self.length_N = torch.frombuffer(lengths, dtype=torch.int64).clone()
        self.start_N = self.length_N.cumsum(0) - self.length_N
        self.flat = torch.frombuffer(flat, dtype=torch.int32).clone()

    def to(self, device: torch.device) -> Ragged:
        """Itself, on `device`."""
        self.length_N, self.start_N, self.flat = (t.to(device) for t in (self.length_N, self.start_N, self.flat))
        return self

    def padded(self, index_B: Tensor, position_W: Tensor) -> Tensor:
        """Rows as a rectangle (B, W). `position_W` is 0 .. W - 1, on the device."""
        place_BW = (self.start_N[index_B, None] + position_W).clamp(max=len(self.flat) - 1)
        values_BW = self.flat[place_BW].long()  # short rows run on into the next
        return values_BW.masked_fill(position_W >= self.length_N[index_B, None], _PAD)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sentences that are padded to one width, in `batches` batches of `rows`. The last places may stay empty."""

    width: int
    rows: int
    batches: int
    member: Tensor


def make_buckets(length_N: Tensor, tokens: int, parts: int = 1) -> list[Bucket]:
    """Sentences by length, in batches of at most `tokens` tokens with padding, that can be cut into `parts` equal parts.

    A width with too few sentences for one batch is filled up with the next shorter ones: a batch of three long sentences would move the
    weights as far as one of three hundred.
    """
    width_N = -(-length_N // _ROUND) * _ROUND
    order_N = torch.argsort(width_N, descending=True, stable=True)
    widths = width_N[order_N].tolist()
    found: list[tuple[int, int, int]] = []  # width, first and last of order_N
    first = 0
    while first < len(widths):
        width = widths[first]
        room = tokens // width // parts * parts
        if room == 0:
            raise DataError(
                f"engine.batch_size = {tokens}: a step of so many tokens cannot hold {parts} sentence(s) of {width}, one for each "
                "process and micro-batch; give more tokens, or a smaller data.max_length"
            )
        same = next((i for i in range(first, len(widths)) if widths[i] != width), len(widths))
        last = min(max(same, first + room), len(widths))
        found.append((width, first, last))
        first = last
    if len(found) > 1 and found[-1][2] - found[-1][1] < tokens // found[-1][0]:  # the shortest are too few for a batch of their own
        (_, _, last), (width, first, _) = found.pop(), found.pop()
        found.append((width, first, last))
    return [_bucket(width, order_N[first:last], tokens // width // parts * parts, parts) for width, first, last in found]


def _bucket(width: int, member: Tensor, room: int, parts: int) -> Bucket:
    batches = -(-len(member) // room)
    rows = -(-len(member) // (batches * parts)) * parts  # as even as can be
    return Bucket(width, rows, batches, member)


@dataclass(slots=True)
class PairOrder:
    """Which sentences make up which step. Every epoch mixes each bucket's sentences anew, and the order of all batches.

    Number `size` stands for no sentence, where a bucket does not fill its batches.
    """

    size: int
    seed: int
    buckets: list[Bucket]
    _epoch: int = -1
    _index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    _steps: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def steps_per_epoch(self) -> int:
        return sum(bucket.batches for bucket in self.buckets)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that `step`, from 0, belongs to."""
        return step // self.steps_per_epoch

    def indices(self, step: int) -> tuple[Tensor, int]:
        """The sentences of `step`, from 0, and the width they are padded to."""
        index, steps = self.epoch_indices(self.epoch(step))
        start, end, width = steps[step % self.steps_per_epoch]
        return index[start:end], width

    def epoch_indices(self, epoch: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
        """All sentences of an epoch, and for each of its steps the place of the first, the place after the last, and the width."""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mix(self.seed, epoch))
            index, steps, place = [], [], 0
            for bucket in self.buckets:
                mixed = bucket.member[torch.randperm(len(bucket.member), generator=generator)]
                empty = bucket.rows * bucket.batches - len(mixed)
                index.append(torch.cat((mixed, torch.full((empty,), self.size))))
                for _ in range(bucket.batches):
                    steps.append((place, place + bucket.rows, bucket.width))
                    place += bucket.rows
            self._steps = [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]
            self._epoch, self._index = epoch, torch.cat(index)
        return self._index, self._steps


class PairTests:
    """Sentences to be measured, in the vocabulary of `subwords`. `test_tokens`: source tokens of a batch, of one process."""

    skipped = 0

    def __init__(self, test: Text, subwords: Subwords, share: Share, device: torch.device, test_tokens: int = 8192) -> None:
        self.share, self.device, self.subwords = share, device, subwords
        self._test, self._test_tokens = test, test_tokens
        self._test_source, self._test_target = (Ragged(_encoded(subwords, side)) for side in (test.source, test.target))

    def test(self) -> Iterator[Batch]:
        """This process's part of the sentences to be measured, once, the longest first."""
        source, target = self._test_source, self._test_target
        mine = torch.argsort(source.length_N, descending=True, stable=True)[self.share.rank :: self.share.world]
        while len(mine):
            width = _rounded(int(source.length_N[mine[0]]))
            index_B, mine = mine.tensor_split([max(1, self._test_tokens // width)])
            target_width = _rounded(int(target.length_N[index_B].max()))
            batch = {
                "source": source.padded(index_B, torch.arange(width)),
                "target": target.padded(index_B, torch.arange(target_width)),
                "reference": _as_bytes([self._test.target[i] for i in index_B.tolist()]),
                "index": index_B,
            }
            yield {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def close(self) -> None:
        """Nothing is open."""


class PairLoader(PairTests):
    """A corpus on the device, in the vocabulary of `subwords`.

    tokens       source tokens of a training step, and target tokens, padding included, over all processes and micro-batches.
    max_length   training pairs with a longer side (in tokens, with the end of sentence) are left out; `skipped` counts them and those with
                 an empty side, and a warning says so. What is measured is measured whole.
    test_tokens  source tokens of a batch that is measured, of one process.
    """

    def __init__(
        self,
        corpus: Corpus,
        subwords: Subwords,
        tokens: int,
        seed: int,
        share: Share | None = None,
        device: torch.device | None = None,
        max_length: int = 128,
        test_tokens: int = 8192,
    ) -> None:
        super().__init__(corpus.test, subwords, share or Share(), device or torch.device("cpu"), test_tokens)
        train = corpus.train
        # One more row stands for no sentence: a source to look at, and no target to learn from.
        self._source = Ragged(chain(_encoded(subwords, train.source), [[_EOS]]))
        self._target = Ragged(chain(_encoded(subwords, train.target), [[]]))
        longest_N = torch.maximum(self._source.length_N, self._target.length_N)[:-1]
        blank_N = torch.tensor([not (s and t) for s, t in zip(train.source, train.target, strict=True)])
        kept = self._without_skipped(train, longest_N, blank_N, max_length)
        buckets = make_buckets(longest_N[kept], tokens, self.share.world * self.share.accumulate)
        self.order = PairOrder(len(longest_N), seed, [replace(b, member=kept[b.member]) for b in buckets])
        for side in (self._source, self._target):
            side.to(self.device)
        self._positions = {b.width: torch.arange(b.width, device=self.device) for b in self.order.buckets}

    @property
    def tokens_of_step(self) -> float:
        """Of one language, padding included, on average: what is asked for is the most that a step may have."""
        buckets = self.order.buckets
        return sum(b.rows * b.width * b.batches for b in buckets) / self.order.steps_per_epoch

    def _without_skipped(self, train: Text, longest_N: Tensor, blank_N: Tensor, max_length: int) -> Tensor:
        """The numbers of the pairs to train on; says which are not."""
        too_long_N = (longest_N > max_length) & ~blank_N
        kept = (~too_long_N & ~blank_N).nonzero()[:, 0]
        self.skipped = len(longest_N) - len(kept)
        said = (
            f"{' and '.join(train.names)}: {self.skipped:,} of {len(longest_N):,} pairs are left out, {int(too_long_N.sum()):,} of them "
            f"longer than data.max_length = {max_length} tokens (the longest has {int(longest_N.max())}), {int(blank_N.sum()):,} with an "
            "empty side"
        )
        if len(kept) == 0:
            raise DataError(f"{said}: nothing is left to train on")
        if self.skipped:
            warnings.warn(said, stacklevel=3)
        return kept

    def keys(self, start: int) -> Iterator[Batch]:
        """What this process's micro-batches hold, from step `start` (from 0) on: "pair" numbers, and "position" 0 .. width - 1."""
        step, uploaded = start, -1
        while True:
            epoch, number = divmod(step, self.order.steps_per_epoch)
            index, steps = self.order.epoch_indices(epoch)
            if epoch != uploaded:  # a whole epoch at once: the host then only cuts pieces off
                on_device, uploaded = index.to(self.device), epoch
            first, last, width = steps[number]
            for part in self.share.micro_batches(on_device[first:last]):
                yield {"pair": part, "position": self._positions[width]}
            step += 1

    def make(self, key: Batch) -> Batch:
        """The micro-batch of a key."""
        index_B, position_W = key["pair"], key["position"]
        return {"source": self._source.padded(index_B, position_W), "target": self._target.padded(index_B, position_W)}


def _encoded(subwords: Subwords, texts: list[str]) -> Iterator[list[int]]:
    for start in range(0, len(texts), 65_536):  # in parts, for the memory that they need on the way
        for row in subwords.encode(texts[start : start + 65_536]):
            yield [*row, _EOS]


def _as_bytes(texts: list[str]) -> Tensor:
    rows = [text.encode() for text in texts]
    width = max(map(len, rows))
    return torch.tensor([list(row.ljust(width, b"\0")) for row in rows], dtype=torch.uint8)
