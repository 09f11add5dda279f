"""Writes all that follows from the runs.csv files here: tables, verdicts, and the marked regions of the pages that show them.

    python results/build.py            # after new runs have come in by `nofm study ... --table --into results/BASE`
    python results/build.py --check    # changes nothing; exit code 1 names what is out of date (a test does the same)
    python results/build.py --pictures # draws figure.png, kept.png, lambda.png, layers.png and shapes.png of all studies anew, without
                                       # training; needs matplotlib. No test compares them: another version of it draws other bytes

A region is what stands between two comments, and prose around it is left alone:

    <!-- generated: WHAT BASE/STUDY [head=TEXT] [ROW-GLOB ...] -->   WHAT: table, brief (fewer columns), claims, conditions, or a picture:
    <!-- end -->                                                     figure, kept, lambda, layers, shapes

    <!-- generated: overview FILE.toml -->   what became of the paper's claims: each difference and its interval
    <!-- end -->

    <!-- generated: verdicts FILE.toml -->   the same in a line a claim and a column a network, without numbers
    <!-- end -->

    <!-- generated: across head=TEXT BASE/STUDY=NAME ... row=LABEL ... -->   a line for each study, a column for each row
    <!-- end -->

    <!-- generated: beside BASE/STUDY=NAME ... take=COLUMN[=HEAD] ... row=LABEL ... [against=LABEL] -->   a line for each row, and for each
    <!-- end -->                         study the columns of its table that are taken; against: how much that row is above the line's.
                                          row=SHOWN=LABEL|LABEL where a row has another name in each study (an empty one: it has none)
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from nofm.report.errors import ReportError
from nofm.report.measures import MEASURES
from nofm.report.study import Facts, Rows, read_facts, read_rows
from nofm.report.study_tables import NOT_YET, claims_markdown, columns, conditions, judgements, score_text, table_markdown, texts

ROOT = Path(__file__).parent.parent
_REGION = re.compile(r"(<!-- generated: (?P<what>[^\n]*?) -->\n)(?P<body>.*?)(?P<end><!-- end -->)", re.DOTALL)


def built(root: Path = ROOT) -> dict[Path, str]:
    """Every file that this script owns, or owns a region of, as it should be."""
    found: dict[Path, str] = {}
    for file in sorted((root / "results").glob("*/*/study.json")):
        facts = read_facts(file)
        for name, text in texts(facts, read_rows(file.with_name("runs.csv"), facts)).items():
            found[file.with_name(name)] = text
    for page in (root / "README.md", *sorted((root / "results").glob("*.md")), *sorted((root / "results").glob("*/README.md"))):
        found[page] = _filled(root, page)
    return found


def _filled(root: Path, page: Path) -> str:
    text = page.read_text()
    opened, complete = text.count("<!-- generated:"), len(_REGION.findall(text))
    if opened != complete or opened != text.count("<!-- end -->"):
        raise ReportError(page, f"{opened} regions begin, {text.count('<!-- end -->')} end, {complete} are complete")
    return _REGION.sub(lambda m: f"{m[1]}{_region(root, page, m['what'])}\n{m['end']}", text)


def _study(root: Path, name: str) -> tuple[Facts, Rows]:
    folder = root / "results" / name
    facts = read_facts(folder / "study.json")
    return facts, read_rows(folder / "runs.csv", facts)


class Fate(NamedTuple):
    """What became of a claim in one place."""

    on: str  # a network on CIFAR-10, or another task
    of: str  # a pattern, a rival
    difference: str
    interval: str
    verdict: str


def _fates(root: Path, file: Path) -> dict[str, list[Fate]]:
    """By the claims of the paper, in its words.

    The file has a `[[claim]]` for each: `paper`, its words, and `measured`, a list of [on what, of what, BASE/STUDY, the study's claim]; of
    one about two things that go together the study has two claims.
    """
    claims = tomllib.loads(file.read_text())["claim"]
    studies = {study: _study(root, study) for claim in claims for _, _, study, *_ in claim["measured"]}
    judged = {study: judgements(*found) for study, found in studies.items()}
    found: dict[str, list[Fate]] = {}
    for claim in claims:
        for on, of, study, *said in claim["measured"]:
            if unknown := [text for text in said if text not in {each["text"] for each in studies[study][0]["claims"]}]:
                raise ReportError(file, f"results/{study} has no claim {unknown[0]!r}")
            fates = [judged[study].get(text, ("", "", NOT_YET)) for text in said]
            differences, intervals, verdicts = zip(*fates, strict=True)
            found.setdefault(claim["paper"], []).append(Fate(on, of, ", ".join(differences), ", ".join(intervals), _together(verdicts)))
    return found


def _together(verdicts: Sequence[str]) -> str:
    """One verdict is as it is. Two of the same rows: what is told of both goes the same way, the claim's or the other, or it does not."""
    if len(verdicts) == 1:
        return verdicts[0]
    told = {"holds", "fails"}.issuperset(verdicts)
    return NOT_YET if NOT_YET in verdicts else "open" if not told else "holds" if len(set(verdicts)) == 1 else "fails"


def _overview(root: Path, file: Path) -> str:
    """A row for each place where a claim of the paper was measured."""
    lines = ["| the paper says | measured on | difference of means | 95 % interval | here |", "| --- | --- | --- | --- | --- |"]
    for claim, fates in _fates(root, file).items():
        for i, fate in enumerate(fates):
            place = f"{fate.on}, {fate.of}" if fate.of else fate.on
            lines.append(f"| {claim * (not i)} | {place} | {fate.difference} | {fate.interval} | {fate.verdict} |")
    return "\n".join(lines)


_NETWORKS = ("ResNet-20", "ResNet-18")


def _verdicts(root: Path, file: Path) -> str:
    """A row for each claim of the paper, and in it the verdicts on each network and on the other tasks."""
    lines = [f"| the paper says | {' | '.join(_NETWORKS)} | other tasks |", "| --- | --- | --- | --- |"]
    for claim, fates in _fates(root, file).items():
        by_network = [[(fate.of, fate.verdict) for fate in fates if fate.on == network] for network in _NETWORKS]
        elsewhere = [(fate.on, fate.verdict) for fate in fates if fate.on not in _NETWORKS]
        lines.append(f"| {claim} | {' | '.join(map(_told, [*by_network, elsewhere]))} |")
    return "\n".join(lines)


def _told(verdicts: Sequence[tuple[str, str]]) -> str:
    """ "**holds**: 1:16, 1:4; open: 2:8", what is settled first."""
    by_word: dict[str, list[str]] = {}
    for of, verdict in sorted(verdicts, key=lambda one: one[1] not in ("holds", "fails")):  # stable: else in the file's order
        if verdict != NOT_YET:
            by_word.setdefault(verdict, []).append(of)
    words = {word: f"**{word}**" if word in ("holds", "fails") else word for word in by_word}
    return "; ".join(f"{words[word]}: {', '.join(found)}" if any(found) else words[word] for word, found in by_word.items())


def _across(root: Path, page: Path, words: Sequence[str]) -> str:
    """The scores of the same rows in several studies."""
    given = [tuple(word.split("=", 1)) for word in words]
    labels = [value for key, value in given if key == "row"]
    lines = ["| " + " | ".join([dict(given).get("head", ""), *labels]) + " |", "|" + " --- |" * (len(labels) + 1)]
    for study, name in ((key, value) for key, value in given if key not in ("row", "head")):
        facts, rows = _study(root, study)
        measure = MEASURES[facts["task"]]
        if missing := [label for label in labels if not rows.get(label)]:
            raise ReportError(page, f"generated: across: results/{study} has no runs of {', '.join(missing)}")
        lines.append("| " + " | ".join([f"{name}: {measure.words}", *(score_text(rows[label], measure) for label in labels)]) + " |")
    return "\n".join(lines)


def _beside(root: Path, page: Path, words: Sequence[str]) -> str:
    """The same rows in several studies, side by side; a column whose cells are the same in all of them stands once."""
    given = [tuple(word.split("=", 1)) for word in words]
    studies = [(value, _study(root, key)) for key, value in given if "/" in key]
    takes = [tuple(value.partition("=")[::2]) for key, value in given if key == "take"]
    against = dict(given).get("against")
    lines = [row.partition("=")[::2] for row in (value for key, value in given if key == "row")]
    names = [shown for shown, _ in lines]
    taken: dict[str, list[list[str]]] = {}  # by the head of a column: its cells in each study
    for i, (study, (facts, rows)) in enumerate(studies):
        labels = [own.split("|")[i] if own else shown for shown, own in lines]
        if missing := [label for label in labels if label and not rows.get(label)]:
            raise ReportError(page, f"generated: beside: {study} has no runs of {', '.join(missing)}")
        found = columns(facts, rows)
        for column, head in takes:
            if column not in found:
                raise ReportError(page, f"generated: beside: {study} has no column {column!r}, but {', '.join(filter(None, found))}")
            cells = dict(zip(found[""], found[column], strict=True)) | {"": ""}
            taken.setdefault(head or column, []).append([cells[label] for label in labels])
        if against:
            taken.setdefault(f"{against} minus it", []).append([_lead(facts, rows, against, label) for label in labels])
    common = {head: cells[0] for head, cells in taken.items() if all(its == cells[0] for its in cells)}
    apart = [head for head in taken if head not in common]
    first = [head for head in common if not apart or list(taken).index(head) < list(taken).index(apart[0])]
    table = {"": names} | {head: common[head] for head in first}
    table |= {f"{study}: {head}": taken[head][i] for i, (study, _) in enumerate(studies) for head in apart}
    table |= common
    cells_of_lines = [list(table), ["---"] * len(table), *map(list, zip(*table.values(), strict=True))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in cells_of_lines)


def _lead(facts: Facts, rows: Rows, first: str, second: str) -> str:
    """By how much the first row's score is above the second's, and the interval, where the study claims that it is."""
    texts = [claim["text"] for claim in facts["claims"] if (claim["first"], claim["second"], claim["metric"]) == (first, second, "score")]
    judged = judgements(facts, rows)
    return next((f"{mean.split()[0]} ({interval})" for text in texts if text in judged for mean, interval, _ in [judged[text]]), "")


def _region(root: Path, page: Path, request: str) -> str:
    what, _, rest = request.partition(" ")
    if what == "overview":
        return _overview(root, root / "results" / rest)
    if what == "verdicts":
        return _verdicts(root, root / "results" / rest)
    if what == "across":
        return _across(root, page, shlex.split(rest))
    if what == "beside":
        return _beside(root, page, shlex.split(rest))
    study, *words = shlex.split(rest) or [""]
    globs = [word for word in words if not word.startswith("head=")]
    head = next((word.removeprefix("head=") for word in words if word.startswith("head=")), "")
    folder = root / "results" / study
    if not (folder / "study.json").is_file():
        raise ReportError(page, f"generated: {request}: results/{study} has no study.json; a region is WHAT BASE/STUDY [ROW-GLOB ...]")

    def wanted(label: str) -> bool:
        return not globs or any(fnmatchcase(label, glob) for glob in globs)

    facts, rows = _study(root, study)
    if what in ("table", "brief"):
        return table_markdown(facts, rows, wanted, brief=what == "brief").replace("|  |", f"| {head} |", 1)
    if what == "claims":
        return claims_markdown(facts, rows, wanted)
    if what == "conditions":
        return conditions({label: found for label, found in rows.items() if wanted(label)})
    if what == "figure":
        return f"![{facts['title']}: score, mask movement and every run]({_place(folder / 'figure.png', page)})"
    if what == "kept":
        return f"![{facts['title']}: score by the share of weights that is kept]({_place(folder / 'kept.png', page)})"
    if what == "lambda":
        return f"![{facts['title']}: score by lambda]({_place(folder / 'lambda.png', page)})"
    if what == "layers":
        return f"![{facts['title']}: masks that are not as at the start, by layer]({_place(folder / 'layers.png', page)})"
    if what == "shapes":
        return f"![{facts['title']}: some kernels, and how many there are by layer]({_place(folder / 'shapes.png', page)})"
    raise ReportError(
        page,
        f"generated: {request}: {what!r} is none of overview, verdicts, across, beside, table, brief, claims, conditions, "
        "figure, kept, lambda, layers, shapes",
    )


def _place(picture: Path, page: Path) -> str:
    return Path(os.path.relpath(picture, page.parent)).as_posix()


def drawn(root: Path = ROOT) -> list[Path]:
    """Draw the pictures of all studies from their runs.csv and curves.csv; returns which."""
    from nofm.report.study_pictures import draw_again

    return [picture for file in sorted((root / "results").glob("*/*/study.json")) for picture in draw_again(file.parent)]


def main() -> int:
    """Write what is out of date, or with --check only name it; with --pictures draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 names what is out of date")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures of all studies anew, and nothing else")
    args = parser.parse_args()
    if args.pictures:
        for picture in drawn():
            print(f"{picture.relative_to(ROOT)}: drawn")
        return 0
    only_check = args.check
    stale = {path: text for path, text in built().items() if not path.is_file() or path.read_text() != text}
    for path, text in stale.items():
        if not only_check:
            path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {'out of date' if only_check else 'written'}")
    return 1 if stale and only_check else 0


if __name__ == "__main__":
    sys.exit(main())
