"""Parallel text: line i of one file is the translation of line i of the other. Files are UTF-8, plain or gzipped, named SPLIT.LANGUAGE.

WMT's layout is train.en and train.de, valid.*, test.* or any other names of splits; Multi30k's is train, val and test_2016_flickr.
A line ends at a newline and nowhere else: Unicode has other separators, and WMT's files hold some inside of sentences.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from .errors import DataError

__all__ = ["CORPORA", "Corpus", "Text", "find_split", "read_corpus", "read_lines", "read_split", "read_test"]


@dataclass(frozen=True, slots=True)
class Text:
    """Sentences in two languages. `names` say where they are from, for messages."""

    source: list[str]
    target: list[str]
    names: tuple[str, str]

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise DataError(
                f"{self.names[0]} has {len(self.source):,} lines and {self.names[1]} has {len(self.target):,}; "
                "line by line, one must be the translation of the other"
            )
        if not self.source:
            raise DataError(f"{self.names[0]} and {self.names[1]} are empty")

    def check_no_blanks(self) -> Text:
        """Itself; an error where a line is blank. Sentences to be measured are all measured, none passed by."""
        for lines, name in zip((self.source, self.target), self.names, strict=True):
            if "" in lines:
                raise DataError(f"{name}, line {lines.index('') + 1:,} is empty; remove the line from both files")
        return self


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sentences to learn from, and sentences to be measured on."""

    train: Text
    test: Text


# Name: the splits to train on and to be measured on where nothing else is said.
CORPORA = {"parallel": ("train", "test"), "multi30k": ("train", "test_2016_flickr"), "libreoffice": ("train", "test")}


def read_corpus(name: str, root: str | Path, source: str = "en", target: str = "de", test: str | None = None) -> Corpus:
    """A corpus by name: `parallel` and `multi30k` are files in `root`, `libreoffice` the help pages of its unpacked packages."""
    if name not in CORPORA:
        raise DataError(f"data.name = {name}: there is no such corpus; there are {', '.join(CORPORA)}")
    learn, measure = CORPORA[name][0], test or CORPORA[name][1]
    if name == "libreoffice":
        from .libreoffice import read_help

        splits = read_help(root, source, target)
        if measure not in splits:
            raise DataError(f"data.test = {measure}: LibreOffice's help is split into {', '.join(splits)}")
        return Corpus(splits[learn], splits[measure])
    return Corpus(read_split(root, learn, source, target), read_test(name, root, source, target, test))


def read_test(name: str, root: str | Path, source: str = "en", target: str = "de", test: str | None = None) -> Text:
    """The sentences that a corpus is measured on, alone."""
    if name == "libreoffice":  # whose splits are made of all its pages
        return read_corpus(name, root, source, target, test).test
    return read_split(root, test or CORPORA[name][1], source, target).check_no_blanks()


def read_split(root: str | Path, split: str, source: str, target: str) -> Text:
    """The two files of a split, e.g. train.en and train.de.gz."""
    paths = find_split(root, split, source, target)
    sides = [read_lines(path) for path in paths]
    for path, lines in zip(paths, sides, strict=True):
        if not any(lines):
            raise DataError(f"{path}: is empty")
    return Text(sides[0], sides[1], (str(paths[0]), str(paths[1])))


def find_split(root: str | Path, split: str, source: str, target: str) -> list[Path]:
    """Where the two files of a split are."""
    return [_find(Path(root), f"{split}.{language}") for language in (source, target)]


def _find(root: Path, name: str) -> Path:
    found = [path for path in (root / name, root / f"{name}.gz") if path.is_file()]
    if len(found) == 2:
        raise DataError(f"{root}: holds both {name} and {name}.gz; keep one of them")
    if not found:
        there = ", ".join(sorted(path.name for path in root.iterdir() if path.is_file())[:12]) if root.is_dir() else "no such folder"
        raise DataError(f"{root}: there is no {name} or {name}.gz; there is: {there or 'nothing'}")
    return found[0]


def read_lines(path: Path) -> list[str]:
    """The lines of a file, without white space around them."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    lines = raw.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n") if raw else []
    try:
        return [line.decode().strip() for line in lines]
    except UnicodeDecodeError:
        number = next(i for i, line in enumerate(lines, start=1) if not _is_utf8(line))
        raise DataError(f"{path}, line {number:,}: is not UTF-8; convert the file, e.g. with iconv -f LATIN1 -t UTF-8") from None


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
