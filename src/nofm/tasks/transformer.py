"""The Transformer of Vaswani et al. 2017 for translation, with the parts that torch has and a decoder that remembers.

One embedding serves both languages and, transposed, the softmax. Every projection is an `nn.Linear` of its own, so that whoever
looks for layers by name finds `encoder.0.attention.query`. Training and decoding take the same path: a decoder layer writes the keys
and values of what it is given into its cache and attends to all that is there; training gives it the whole target at once,
a search one token at a time.

Shapes in names: B sentences, S source tokens, T target tokens, D width, H heads, E width of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import NofmError

__all__ = ["BOS", "EOS", "PAD", "SIZES", "Decoding", "Size", "Transformer", "build_transformer"]

PAD, BOS, EOS = 0, 1, 2  # the first tokens of every vocabulary
KeysValues: TypeAlias = tuple[Tensor, Tensor]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Size:
    """Layers of the encoder and of the decoder, widths, heads; where norms stand; how many positions are known."""

    layers: int
    width: int
    hidden: int
    heads: int
    dropout: float
    norm: Literal["post", "pre"] = "post"
    positions: int = 1024

    def __post_init__(self) -> None:
        for name in ("layers", "width", "hidden", "heads", "positions"):
            if getattr(self, name) < 1:
                raise NofmError(f"a Transformer's {name} must be at least 1, got {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise NofmError(f"a Transformer's width must divide into {self.heads} heads of even width, got {self.width}")
        if not 0 <= self.dropout < 1:
            raise NofmError(f"a Transformer's dropout must be 0 <= dropout < 1, got {self.dropout}")
        if self.norm not in ("post", "pre"):
            raise NofmError(f"a Transformer's norm must be 'post' or 'pre', got {self.norm!r}")


SIZES = {
    "transformer/base": Size(layers=6, width=512, hidden=2048, heads=8, dropout=0.1),
    "transformer/small": Size(layers=3, width=256, hidden=1024, heads=4, dropout=0.3),
}


def build_transformer(name: str, vocabulary: int, **options: Any) -> Transformer:
    """A Transformer by name, for a vocabulary of so many tokens; `options` replace fields of its `Size`, None leaves one as it is."""
    if name not in SIZES:
        raise NofmError(f"model.name = {name}: there is no such Transformer; there are {', '.join(SIZES)}")
    return Transformer(vocabulary, replace(SIZES[name], **{key: value for key, value in options.items() if value is not None}))


class Attention(nn.Module):
    """Scaled dot-product attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def keys_values(self, x_BSD: Tensor) -> KeysValues:
        """What can be attended to in `x`, to be kept for as long as it is attended to."""
        return self._by_head(self.key(x_BSD)), self._by_head(self.value(x_BSD))

    def forward(self, x_BTD: Tensor, seen: KeysValues, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        query_BHTE = self._by_head(self.query(x_BTD))
        y_BHTE = F.scaled_dot_product_attention(query_BHTE, *seen, attn_mask=mask, is_causal=causal)
        result: Tensor = self.output(y_BHTE.transpose(1, 2).flatten(2))
        return result

    def _by_head(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(2, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers on every position."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(F.relu(self.inner(x)))
        return result


class Residual(nn.Module):
    """x + dropout(part(x)), with the norm after the sum as in the paper, or before the part."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm, self.dropout, self.pre = nn.LayerNorm(size.width), nn.Dropout(size.dropout), size.norm == "pre"

    def forward(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre:
            return x + self.dropout(part(self.norm(x)))
        result: Tensor = self.norm(x + self.dropout(part(x)))
        return result


class EncoderLayer(nn.Module):
    """Attention to the whole source, then a feed-forward part."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention, self.feed = Attention(size.width, size.heads), FeedForward(size.width, size.hidden)
        self.residual = nn.ModuleList(Residual(size) for _ in range(2))

    def forward(self, x_BSD: Tensor, mask_B11S: Tensor) -> Tensor:
        attend, feed = self.residual
        x_BSD = attend(x_BSD, lambda x: self.attention(x, self.attention.keys_values(x), mask_B11S))
        result: Tensor = feed(x_BSD, self.feed)
        return result


@dataclass(slots=True)
class LayerCache:
    """What a decoder layer attends to: the source, fixed, and the target so far, which grows."""

    source: KeysValues
    target: KeysValues | None = None

    def grow(self, new: KeysValues) -> KeysValues:
        """Put `new` behind what is there; all of it."""
        old = self.target
        self.target = new if old is None else (torch.cat((old[0], new[0]), 2), torch.cat((old[1], new[1]), 2))
        return self.target


class DecoderLayer(nn.Module):
    """Attention to the target so far, attention to the source, then a feed-forward part."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.self_attention, self.cross_attention = Attention(size.width, size.heads), Attention(size.width, size.heads)
        self.feed = FeedForward(size.width, size.hidden)
        self.residual = nn.ModuleList(Residual(size) for _ in range(3))

    def forward(self, x_BTD: Tensor, cache: LayerCache, mask_B11S: Tensor) -> Tensor:
        look_back, look_over, feed = self.residual
        causal = x_BTD.shape[1] > 1  # a token on its own may see all that came before it
        own = self.self_attention
        x_BTD = look_back(x_BTD, lambda x: own(x, cache.grow(own.keys_values(x)), causal=causal))
        x_BTD = look_over(x_BTD, lambda x: self.cross_attention(x, cache.source, mask_B11S))
        result: Tensor = feed(x_BTD, self.feed)
        return result


class Transformer(nn.Module):
    """Encoder and decoder. `model(source, target)` are the logits of what follows each target token; see `forward` for searching."""

    def __init__(self, vocabulary: int, size: Size) -> None:
        super().__init__()
        if vocabulary <= EOS + 1:
            raise NofmError(f"a vocabulary of {vocabulary} tokens has room for the three special ones only")
        self.size = size
        self.embedding = nn.Embedding(vocabulary, size.width, padding_idx=PAD)
        self.dropout = nn.Dropout(size.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(size) for _ in range(size.layers))
        self.decoder = nn.ModuleList(DecoderLayer(size) for _ in range(size.layers))
        # Pre-norm blocks leave their sum as it is, so that it wants one more norm at the end.
        self.encoder_norm, self.decoder_norm = (nn.LayerNorm(size.width) if size.norm == "pre" else nn.Identity() for _ in range(2))
        self.output = nn.Linear(size.width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight  # one matrix: embeddings of both languages, and softmax
        self.register_buffer("position_PD", _sinusoids(size.positions, size.width), persistent=False)
        self.position_PD: Tensor
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.output:
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.embedding.weight, std=self.size.width**-0.5)
        with torch.no_grad():
            self.embedding.weight[PAD].zero_()

    @overload
    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor: ...

    @overload
    def forward(self, source_BS: Tensor, *, search: Callable[[Decoding], Found], copies: int = 1) -> Found: ...

    def forward(self, source_BS: Tensor, target_BT: Tensor | None = None, *, search: Any = None, copies: int = 1) -> Any:
        """Logits (B, T, V) of the token after each of `target_BT`; or what `search` finds with a `Decoding` of `copies` rows a sentence.

        A search is run here, inside the forward, so that hooks that get weights ready for one forward do it once for the whole
        search and not for every token.
        """
        if search is not None:
            return search(Decoding(self, source_BS, copies))
        assert target_BT is not None
        return Decoding(self, source_BS)(target_BT)

    def encode(self, source_BS: Tensor, mask_B11S: Tensor) -> Tensor:
        """The source as the decoder sees it, (B, S, D)."""
        x_BSD = self.embed(source_BS, 0)
        for layer in self.encoder:
            x_BSD = layer(x_BSD, mask_B11S)
        result: Tensor = self.encoder_norm(x_BSD)
        return result

    def embed(self, token_BT: Tensor, start: int) -> Tensor:
        """Tokens that stand at position `start` and after it."""
        end = start + token_BT.shape[1]
        if end > self.size.positions:
            raise NofmError(f"a sentence of {end} tokens: this Transformer knows {self.size.positions} positions; build it with more")
        x_BTD = self.embedding(token_BT) * math.sqrt(self.size.width) + self.position_PD[start:end]
        result: Tensor = self.dropout(x_BTD)
        return result


class Decoding:
    """A target being written, for each source sentence `copies` times: call it with the next tokens, get the logits after each."""

    def __init__(self, model: Transformer, source_BS: Tensor, copies: int = 1) -> None:
        self.model, self.length = model, 0
        mask_B11S = (source_BS != PAD)[:, None, None]
        memory_BSD = model.encode(source_BS, mask_B11S)

        def several(x: Tensor) -> Tensor:
            return x.repeat_interleave(copies, 0) if copies > 1 else x

        self.mask_B11S = several(mask_B11S)
        self.caches: list[LayerCache] = []
        for layer in model.decoder:
            assert isinstance(layer, DecoderLayer)
            keys, values = layer.cross_attention.keys_values(memory_BSD)
            self.caches.append(LayerCache((several(keys), several(values))))

    def __call__(self, token_BT: Tensor) -> Tensor:
        assert self.length == 0 or token_BT.shape[1] == 1, "after the first call, one token at a time"
        x_BTD = self.model.embed(token_BT, self.length)
        self.length += token_BT.shape[1]
        for layer, cache in zip(self.model.decoder, self.caches, strict=True):
            x_BTD = layer(x_BTD, cache, self.mask_B11S)
        result: Tensor = self.model.output(self.model.decoder_norm(x_BTD))
        return result

    def reorder(self, row_B: Tensor) -> None:
        """Go on with these rows. Rows may only change places among the copies of one source, which stays where it is."""
        for cache in self.caches:
            if cache.target is not None:
                cache.target = cache.target[0].index_select(0, row_B), cache.target[1].index_select(0, row_B)


def _sinusoids(positions: int, width: int) -> Tensor:
    """Section 3.5 of the paper: sines in even places, cosines in odd ones, of wavelengths from 2 pi to 10,000 * 2 pi."""
    position_P1 = torch.arange(positions, dtype=torch.float64)[:, None]
    angle = position_P1 * torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))
    return torch.stack((angle.sin(), angle.cos()), 2).flatten(1).float()
