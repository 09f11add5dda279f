"""Translation: label-smoothed cross-entropy; BLEU of beam-searched translations by sacreBLEU, perplexity of the references.

BLEU is not a mean over sentences, but the counts that it is made of (n-grams, n-grams found in the reference, lengths) are sums,
and so can be added up over batches and processes. `metrics` hands them to sacreBLEU's own formula: the result is that of one
`corpus_bleu` over everything. Text is compared as a reader sees it, after the tokens have been put together again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import NofmError
from .base import Task
from .beam import beam_search
from .transformer import BOS, PAD, Transformer

__all__ = ["Sample", "Translation", "inverse_sqrt", "read_bytes"]

Detokenise: TypeAlias = Callable[[Sequence[Sequence[int]]], list[str]]

_ORDERS = (1, 2, 3, 4)


class Sample(NamedTuple):
    """A sentence, what a person made of it, and what the model makes of it."""

    source: str
    reference: str
    hypothesis: str


def inverse_sqrt(step: int, warmup: int) -> float:
    """The share of the largest learning rate at `step`, from 0: up linearly in `warmup` steps, then down with their inverse root.

    `LambdaLR(optimizer, partial(inverse_sqrt, warmup=4000))`. The paper's own rate is the same with a peak of (width * warmup) ** -0.5.
    """
    number = step + 1
    return min(number / warmup, math.sqrt(warmup / number)) if warmup > 0 else 1 / math.sqrt(number)


class Translation(Task):
    """{"source": (B, S), "target": (B, T)} token ids, each ended by EOS and padded, -> smoothed cross-entropy, a mean over tokens.

    To be measured, a batch also has "reference": the references' UTF-8 bytes (B, L), zeros after their end, and "index": (B,) the
    sentences' numbers. Metrics: bleu, perplexity (without smoothing), length_ratio (hypotheses' words to references').
    """

    headline = "bleu"
    model: Transformer
    measure_on_host = True  # a search ends when all sentences have, and BLEU is counted in words

    def __init__(
        self,
        model: Transformer,
        detokenise: Detokenise,
        *,
        label_smoothing: float = 0.1,
        beams: int = 5,
        alpha: float = 0.6,
        longest: tuple[float, int] = (1.5, 10),
    ) -> None:
        """`longest` (a, b): a translation has at most a * source tokens + b tokens."""
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise NofmError(f"task.label_smoothing = {label_smoothing}: must be 0 <= label_smoothing < 1")
        if beams < 1:
            raise NofmError(f"task.beams = {beams}: must be at least 1, which is greedy")
        self.model, self.detokenise, self.label_smoothing = model, detokenise, label_smoothing
        self.beams, self.alpha, self.longest = beams, alpha, longest
        self._bleu = _sacrebleu()
        self._seen: dict[int, Sample] = {}

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The loss, and over how many tokens it is a mean."""
        total, tokens = self._cross_entropy(batch, self.label_smoothing)
        return {"loss": total / tokens.clamp(min=1), "tokens": tokens}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["target"] != PAD).sum()

    def _cross_entropy(self, batch: dict[str, Tensor], smoothing: float) -> tuple[Tensor, Tensor]:
        target_BT = batch["target"]
        before_BT = F.pad(target_BT[:, :-1], (1, 0), value=BOS)
        logits_BTV = self.model(batch["source"], before_BT)
        total = F.cross_entropy(
            logits_BTV.flatten(0, 1).float(), target_BT.flatten(), ignore_index=PAD, label_smoothing=smoothing, reduction="sum"
        )
        return total, (target_BT != PAD).sum()

    # ---- translating ----

    def translate(self, source_BS: Tensor) -> list[str]:
        """The sources in the other language."""
        a, b = self.longest
        positions = self.model.size.positions
        limit_B = ((source_BS != PAD).sum(1) * a + b).long().clamp(max=positions)
        search = partial(beam_search, limit_B=limit_B, beams=self.beams, alpha=self.alpha)
        found = self.model(source_BS, search=search, copies=self.beams)
        return self.detokenise(found.token_BL.tolist())

    # ---- measuring ----

    def reset(self) -> None:
        """Forget the translations of the last evaluation."""
        self._seen.clear()

    def measure(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        nll, tokens = self._cross_entropy(batch, 0.0)
        hypotheses, references = self.translate(batch["source"]), read_bytes(batch["reference"])
        for row in zip(batch["index"].tolist(), self.detokenise(batch["source"].tolist()), references, hypotheses, strict=True):
            self._seen[row[0]] = Sample(*row[1:])
        score = self._bleu.corpus_score(hypotheses, [references])
        counts = {"words": score.sys_len, "reference_words": score.ref_len}
        counts |= {f"correct{n}": score.counts[n - 1] for n in _ORDERS} | {f"ngrams{n}": score.totals[n - 1] for n in _ORDERS}
        on_device = {name: torch.tensor(count, dtype=torch.float64, device=nll.device) for name, count in counts.items()}
        return on_device | {"nll": nll.double(), "tokens": tokens.double()}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        score = self._bleu.compute_bleu(
            correct=[round(sums[f"correct{n}"]) for n in _ORDERS],
            total=[round(sums[f"ngrams{n}"]) for n in _ORDERS],
            sys_len=round(sums["words"]),
            ref_len=round(sums["reference_words"]),
            smooth_method=self._bleu.smooth_method,
        )
        nll = sums["nll"] / max(sums["tokens"], 1)
        perplexity = math.exp(nll) if nll < 700 else math.inf
        return {"bleu": score.score, "perplexity": perplexity, "length_ratio": sums["words"] / max(sums["reference_words"], 1)}

    @property
    def signature(self) -> str:
        """How sacreBLEU counts, to be given beside every BLEU."""
        self._bleu.corpus_score([""], [[""]])  # it learns the number of references from a call
        return str(self._bleu.get_signature())

    def versions(self) -> dict[str, str]:
        return {"sacreBLEU": self.signature}

    def samples(self, count: int = 8) -> list[Sample]:
        """`count` of the sentences measured since `reset`, evenly spread over them by number."""
        known = sorted(self._seen)
        chosen = [known[i * len(known) // count] for i in range(count)] if len(known) > count else known
        return [self._seen[index] for index in chosen]

    def sample_files(self) -> dict[str, bytes]:
        lines = [json.dumps(sample._asdict(), ensure_ascii=False) for sample in self.samples()]
        return {"translations.jsonl": "".join(f"{line}\n" for line in lines).encode()} if lines else {}


def read_bytes(text_BL: Tensor) -> list[str]:
    """The texts of rows of UTF-8 bytes, without the zeros after their ends."""
    return [bytes(row).rstrip(b"\0").decode() for row in text_BL.tolist()]


def _sacrebleu() -> Any:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise NofmError(
            "translation is measured by sacreBLEU, which is not installed: pip install 'nofm[text]' (in a clone '.[text]')"
        ) from None
    return BLEU()  # case and punctuation count, mteval-v13a tokenisation, exponential smoothing: the defaults that papers report
