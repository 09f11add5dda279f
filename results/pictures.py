"""What the networks of a study do, for a page: their samples side by side, as pictures and as a table of sentences.

    python results/pictures.py results/multi30k-small/translation "dense=RUN" "SR-STE 2:4=RUN" [--count 6]

RUN is a run's folder, with its samples/ and evaluations/. Written are samples.md (translations), sample-N.png and
EVALUATION-sample-N.png (flow, boxes and masks): the first `count` of each kind, not chosen, and made smaller where they are wider than a
page shows. The HTML report of a run shows them all, as large as they are.
"""

from __future__ import annotations

import argparse
import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image

from nofm.report.compare import Group
from nofm.report.read import load
from nofm.report.samples import shown

_WIDEST = 2400  # pixels


def written(into: Path, runs: dict[str, Path], count: int) -> list[Path]:
    """The files that show what `runs`, by label, do."""
    sections = shown([Group(label, {}, (load(folder),)) for label, folder in runs.items()])
    into.mkdir(parents=True, exist_ok=True)
    files = []
    for section in sections:
        of = section["title"].partition(": ")[2]
        before = f"{of}-" if of else ""
        if section["translations"]:
            files.append(into / f"{before}samples.md")
            files[-1].write_text(_table(section, count))
        for number, picture in enumerate(section["pictures"][:count], start=1):
            files.append(into / f"{before}sample-{number}.png")
            files[-1].write_bytes(_for_a_page(base64.b64decode(picture["png"])))
    return files


def _for_a_page(png: bytes) -> bytes:
    picture = Image.open(io.BytesIO(png))
    if picture.width <= _WIDEST:
        return png
    size = (_WIDEST, round(picture.height * _WIDEST / picture.width))
    smaller = io.BytesIO()
    picture.convert("RGB").resize(size, Image.Resampling.LANCZOS).quantize(256).save(smaller, "PNG", optimize=True)
    return smaller.getvalue()


def _table(section: dict[str, Any], count: int) -> str:
    rows = [section["header"], ["---"] * len(section["header"]), *section["translations"][:count]]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([section["words"], "", *lines, ""])


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path)
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN")
    parser.add_argument("--count", type=int, default=6)
    args = parser.parse_args()
    pairs = [text.partition("=") for text in args.runs]
    if bad := [text for text, (_, sign, _) in zip(args.runs, pairs, strict=True) if not sign]:
        parser.error(f"{bad[0]}: LABEL=RUN is expected, such as dense=runs/dense/seed-0")
    for file in written(args.into, {label: Path(run) for label, _, run in pairs}, args.count):
        print(file)


if __name__ == "__main__":
    _main()
