"""LibreOffice's help as parallel text, from the unpacked packages libreoffice-help-en-us, libreoffice-help-de and so on.

The same page has the same path under every language (usr/share/libreoffice/help/LANGUAGE/text), and the same paragraph the same id
(par_id..., hd_id...): a pair is what (page, id) holds in two languages. Paragraphs that are alike in both (code, untranslated names) teach
nothing and are left out. Many paragraphs stand on several pages; each pair is taken once, and pages are split into train, valid
and test by a hash of their path, so that an update of the package moves few of them. No source of valid or test is in train.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import TypeAlias

from .errors import DataError
from .text import Text

__all__ = ["SPLITS", "find_help", "paragraphs", "read_help"]

Pair: TypeAlias = tuple[str, str]

_LANGUAGES = {"en": "en-US"}  # where the folder is not called as the language
_HELD_OUT = {0: "valid", 1: "test"}  # of 25 parts
SPLITS = ("train", "valid", "test")
_NOT_PROSE = {"code", "codeintable", "smathcode", "bascode"}
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


def read_help(root: str | Path, source: str = "en", target: str = "de") -> dict[str, Text]:
    """The splits train, valid and test. `root` is where the packages were unpacked, or a folder on the way to the languages."""
    folders = find_help(root, source, target)
    pages = sorted(path.relative_to(folders[0]) for path in folders[0].rglob("*.html"))
    both = [page for page in pages if (folders[1] / page).is_file()]
    if not both:
        raise DataError(f"{folders[0]} and {folders[1]} have no page in common")
    splits: dict[str, dict[Pair, None]] = {split: {} for split in SPLITS}  # dicts keep an order, sets do not
    for page in both:
        ours, theirs = (paragraphs(folder / page) for folder in folders)
        pairs = [(text, theirs[name]) for name, text in ours.items() if name in theirs and text != theirs[name]]
        splits[_split(page.as_posix())].update(dict.fromkeys(pairs))
    held_out = {text for split in ("valid", "test") for text, _ in splits[split]}
    splits["train"] = {pair: None for pair in splits["train"] if pair[0] not in held_out}
    names = str(folders[0]), str(folders[1])
    for split, pairs_of in splits.items():
        if not pairs_of:
            raise DataError(f"{names[0]} and {names[1]}: no paragraphs of {len(both):,} pages are for {split}; is this all of the help?")
    return {split: Text([s for s, _ in found], [t for _, t in found], names) for split, found in splits.items()}


def find_help(root: str | Path, source: str, target: str) -> list[Path]:
    """The folders of the two languages' pages."""
    return [_folder(Path(root), _LANGUAGES.get(language, language)) for language in (source, target)]


def _folder(root: Path, language: str) -> Path:
    ways = ("usr/share/libreoffice/help", "share/libreoffice/help", "libreoffice/help", "help", ".")
    folder = next((root / way / language / "text" for way in ways if (root / way / language / "text").is_dir()), None)
    if folder is None:
        package = f"libreoffice-help-{language.lower()}"
        raise DataError(f"{root}: there is no usr/share/libreoffice/help/{language}/text; unpack {package} there (dpkg -x FILE.deb {root})")
    return folder


def _split(page: str) -> str:
    part = int.from_bytes(hashlib.blake2b(page.encode(), digest_size=4).digest(), "little") % 25
    return _HELD_OUT.get(part, "train")


def paragraphs(path: Path) -> dict[str, str]:
    """The prose of a page, paragraph by paragraph, by id."""
    parser = _Paragraphs()
    try:
        parser.feed(path.read_bytes().decode())
        parser.close()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    return parser.found


@dataclass(slots=True)
class _Element:
    tag: str
    id: str
    kinds: set[str]
    text: list[str] = field(default_factory=list)
    variants: list[tuple[str, str]] = field(default_factory=list)


class _Paragraphs(HTMLParser):
    """Collects the text of elements whose id begins with par_id or hd_id."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: dict[str, str] = {}
        self._open: list[_Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "p":
            self.handle_endtag("p")  # a paragraph ends where the next begins
        if tag not in _VOID:
            given = {name: value or "" for name, value in attrs}
            self._open.append(_Element(tag, given.get("id", ""), set(given.get("class", "").split())))
        elif self._open:
            self._open[-1].text.append(" ")

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1].text.append(data)

    def handle_endtag(self, tag: str) -> None:
        if not any(element.tag == tag for element in self._open):
            return
        while self._open:  # HTML lets some end tags be left out
            element = self._open.pop()
            self._closed(element)
            if element.tag == tag:
                return

    def _closed(self, element: _Element) -> None:
        if "switchinline" in element.kinds and element.variants:
            # One sentence with several endings, for systems or programs: the common one, or else the first.
            chosen = next((text for name, text in element.variants if name.startswith("default")), element.variants[0][1])
            element.text.append(chosen)
        raw = "".join(element.text)
        text = " ".join(raw.split())
        if element.id.startswith(("par_id", "hd_id")):
            if text and not element.kinds & _NOT_PROSE:
                self.found.setdefault(element.id, text)
        elif self._open and element.tag not in ("script", "style"):
            parent = self._open[-1]
            if "switchinline" in parent.kinds:
                parent.variants.append((element.id, raw))
            else:
                parent.text.append(raw)
