"""Beam search, batched: for every source sentence the best of the translations that `beams` parallel attempts come to.

A beam holds hypotheses, finished and unfinished. In each step an unfinished one is continued by every token and a finished one stays
as it is; of all these the best `beams` go on, compared by log-probability / ((5 + tokens) / 6) ** alpha (Wu et al. 2016, Eq. 14),
where tokens counts the end of sentence too. The search ends when all hypotheses of all sentences are finished. One beam is greedy
decoding. At a sentence's limit the only token left is the end, so that every hypothesis has one.

Shapes in names: B sentences, K beams, V vocabulary, L tokens of the longest hypothesis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import NofmError
from .transformer import BOS, EOS, PAD

__all__ = ["Hypotheses", "beam_search"]


class Writer(Protocol):
    """A model that writes B * K targets, token by token."""

    def __call__(self, token_BT: Tensor) -> Tensor:
        """Logits (B * K, 1, V) of what follows."""
        ...

    def reorder(self, row_B: Tensor) -> None:
        """Go on with these of its rows."""
        ...


@dataclass(frozen=True, slots=True)
class Hypotheses:
    """The best of each sentence: tokens to the end of sentence, padded; log-probability; log-probability with length penalty."""

    token_BL: Tensor
    log_prob_B: Tensor
    score_B: Tensor


@torch.no_grad()
def beam_search(writer: Writer, limit_B: Tensor, beams: int, alpha: float = 0.6) -> Hypotheses:
    """The best hypothesis of each sentence, of at most `limit_B` tokens with the end of sentence (at least 1)."""
    if beams < 1:
        raise NofmError(f"beams = {beams}: a search needs at least one")
    batch, device = len(limit_B), limit_B.device
    longest = int(limit_B.max())
    row_B1 = torch.arange(batch, device=device)[:, None] * beams
    token_BKL = torch.full((batch, beams, longest), PAD, device=device)
    log_prob_BK = torch.full((batch, beams), -torch.inf, device=device)
    log_prob_BK[:, 0] = 0.0  # all beams start out the same: only one of them counts
    finished_BK = torch.zeros((batch, beams), dtype=torch.bool, device=device)
    length_BK = torch.zeros((batch, beams), dtype=torch.int64, device=device)
    last_BK = torch.full((batch, beams), BOS, device=device)
    for step in range(1, longest + 1):
        logits_BKV = writer(last_BK.view(-1, 1)).view(batch, beams, -1)
        total_BKV = log_prob_BK[..., None] + _continuations(logits_BKV, finished_BK, limit_B == step)
        length_BK = length_BK.masked_fill(~finished_BK, step)
        score_BKV = total_BKV / _penalty(length_BK, alpha)[..., None]
        place_BK = score_BKV.flatten(1).topk(beams, dim=1).indices
        parent_BK, last_BK = place_BK // logits_BKV.shape[2], place_BK % logits_BKV.shape[2]
        log_prob_BK = total_BKV.flatten(1).gather(1, place_BK)
        length_BK, finished_BK = length_BK.gather(1, parent_BK), finished_BK.gather(1, parent_BK)
        finished_BK = finished_BK | (last_BK == EOS) | (log_prob_BK == -torch.inf)  # of an empty beam nothing can come
        token_BKL = token_BKL.gather(1, parent_BK[..., None].expand_as(token_BKL))
        token_BKL[:, :, step - 1] = last_BK
        if finished_BK.all():
            break
        writer.reorder((row_B1 + parent_BK).flatten())
    score_BK = log_prob_BK / _penalty(length_BK, alpha)
    best_B1 = score_BK.argmax(1, keepdim=True)
    token_BL = token_BKL.gather(1, best_B1[..., None].expand(-1, -1, longest))[:, 0]
    return Hypotheses(token_BL[:, :step], log_prob_BK.gather(1, best_B1)[:, 0], score_BK.gather(1, best_B1)[:, 0])


def _continuations(logits_BKV: Tensor, finished_BK: Tensor, at_limit_B: Tensor) -> Tensor:
    """Log-probability of each next token. After the end comes only padding, at no cost; at the limit only the end."""
    log_prob_BKV = logits_BKV.float().log_softmax(2)
    token_V = torch.arange(log_prob_BKV.shape[2], device=log_prob_BKV.device)
    never_BKV = (token_V < EOS) | (at_limit_B[:, None, None] & (token_V != EOS)) | finished_BK[..., None]
    return log_prob_BKV.masked_fill(never_BKV, -torch.inf).masked_fill(finished_BK[..., None] & (token_V == PAD), 0.0)


def _penalty(length: Tensor, alpha: float) -> Tensor:
    return ((5 + length) / 6) ** alpha
