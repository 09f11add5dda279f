"""Words in pieces: byte-level BPE, one vocabulary for both languages, through the `tokenizers` package.

Its alphabet are the 256 bytes, so there is no text that it does not know, and what it takes apart it puts together again exactly.
A word has the space before it as its first letter, also at the start of a sentence, so that a word is one token wherever it stands.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .errors import DataError

__all__ = ["SPECIALS", "Subwords", "cached_subwords"]

SPECIALS = ("<pad>", "<s>", "</s>")  # in this order: 0, 1, 2
_SMALLEST = 256 + len(SPECIALS)


class Subwords:
    """A vocabulary: text to token ids and back."""

    def __init__(self, tokenizer: Any) -> None:
        if [tokenizer.token_to_id(token) for token in SPECIALS] != list(range(len(SPECIALS))):
            raise DataError(f"a vocabulary must begin with {', '.join(SPECIALS)}")
        tokenizer.encode_special_tokens = True  # "<s>" in a text is three characters, not a command
        self._tokenizer = tokenizer

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> Subwords:
        """The `size` pieces (or as many as there are) that shorten `texts` most."""
        if size < _SMALLEST:
            raise DataError(
                f"data.vocabulary = {size}: must be at least {_SMALLEST}, which is all bytes and {len(SPECIALS)} special tokens"
            )
        parts = _tokenizers()
        tokenizer = parts.Tokenizer(parts.models.BPE())
        tokenizer.pre_tokenizer = parts.pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = parts.decoders.ByteLevel()
        alphabet = sorted(parts.pre_tokenizers.ByteLevel.alphabet())
        trainer = parts.trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> Subwords:
        """A vocabulary that `save` has written."""
        try:
            return cls(_tokenizers().Tokenizer.from_file(str(path)))
        except DataError as error:
            raise DataError(f"{path}: {error}") from None
        except Exception as error:  # its own errors are of this class itself
            raise DataError(f"{path}: is no vocabulary that the tokenizers package can read ({error})") from None

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._tokenizer.save(str(half))
        half.replace(path)

    def to_json(self) -> str:
        """What `save` writes."""
        text: str = self._tokenizer.to_str()
        return text

    @property
    def size(self) -> int:
        """Tokens in it."""
        count: int = self._tokenizer.get_vocab_size()
        return count

    @property
    def rows(self) -> int:
        """Rows that an embedding should have: the size rounded up to a multiple of 8, which matrix units like better."""
        return -(-self.size // 8) * 8

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids, without an end of sentence."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The texts; special tokens are left out, and so are numbers that are no token."""
        texts: list[str] = self._tokenizer.decode_batch([list(row) for row in ids], skip_special_tokens=True)
        return [text.removeprefix(" ") for text in texts]


def cached_subwords(texts: Sequence[str], size: int, folder: Path | None) -> Subwords:
    """The vocabulary of `texts`, from `folder` if it has been learned before; the file's name tells text and size apart."""
    if folder is None:
        return Subwords.learn(texts, size)
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text.encode() + b"\n")
    path = folder / f"bpe-{size}-{digest.hexdigest()}.json"
    if path.is_file():
        return Subwords.load(path)
    learned = Subwords.learn(texts, size)
    learned.save(path)
    return learned


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            "text is cut into pieces by the package tokenizers, which is not installed: pip install 'nofm[text]' (in a clone '.[text]')"
        ) from None
    return tokenizers
