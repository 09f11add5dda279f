"""Writes all that follows from the runs.csv files here: tables, verdicts, and the marked regions of the project's two pages.

    python results/build.py            # after new runs have come in by `nofm study ... --table --into results/BASE`
    python results/build.py --check    # changes nothing; exit code 1 names what is out of date (a test does the same)
    python results/build.py --pictures # draws figure.png, kept.png, lambda.png and layers.png of all studies anew, without training; needs
                                       # matplotlib. No test compares them: another version of it draws other bytes

A region is what stands between two comments, and prose around it is left alone:

    <!-- generated: WHAT BASE/STUDY [head=TEXT] [ROW-GLOB ...] -->   WHAT: table, brief (fewer columns), claims, conditions, or a picture:
    <!-- end -->                                                     figure, kept, lambda, layers

    <!-- generated: overview FILE.toml -->   what became of the paper's claims: which of them were measured where
    <!-- end -->

    <!-- generated: verdicts FILE.toml -->   the same in a line a claim: in how many places it holds, and where
    <!-- end -->

    <!-- generated: across head=TEXT BASE/STUDY=NAME ... row=LABEL ... -->   a line for each study, a column for each row
    <!-- end -->
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from nofm.report.errors import ReportError
from nofm.report.measures import MEASURES
from nofm.report.study import Facts, Rows, read_facts, read_rows
from nofm.report.study_tables import NOT_YET, claims_markdown, conditions, judgements, score_text, table_markdown, texts

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "results/README.md")
_REGION = re.compile(r"(<!-- generated: (?P<what>[^\n]*?) -->\n)(?P<body>.*?)(?P<end><!-- end -->)", re.DOTALL)


def built(root: Path = ROOT) -> dict[Path, str]:
    """Every file that this script owns, or owns a region of, as it should be."""
    found: dict[Path, str] = {}
    for file in sorted((root / "results").glob("*/*/study.json")):
        facts = read_facts(file)
        for name, text in texts(facts, read_rows(file.with_name("runs.csv"), facts)).items():
            found[file.with_name(name)] = text
    for name in PAGES:
        found[root / name] = _filled(root, root / name)
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


def _fates(root: Path, file: Path) -> dict[str, list[tuple[str, ...]]]:
    """By the claims of the paper, in its words: on what each was measured, the difference, its interval and the verdict.

    The file has a `[[claim]]` for each: `paper`, its words, and `measured`, a list of [on what, BASE/STUDY, the study's claim].
    """
    claims = tomllib.loads(file.read_text())["claim"]
    studies = {study: _study(root, study) for claim in claims for _, study, _ in claim["measured"]}
    judged = {study: judgements(*found) for study, found in studies.items()}
    found: dict[str, list[tuple[str, ...]]] = {}
    for claim in claims:
        for on, study, text in claim["measured"]:
            if text not in {each["text"] for each in studies[study][0]["claims"]}:
                raise ReportError(file, f"results/{study} has no claim {text!r}")
            found.setdefault(claim["paper"], []).append((on, *judged[study].get(text, ("", "", NOT_YET))))
    return found


def _overview(root: Path, file: Path) -> str:
    """A row for each place where a claim of the paper was measured."""
    lines = ["| the paper says | measured on | difference of means | 95 % interval | here |", "| --- | --- | --- | --- | --- |"]
    for claim, places in _fates(root, file).items():
        lines += [f"| {claim * (not i)} | {' | '.join(place)} |" for i, place in enumerate(places)]
    return "\n".join(lines)


def _verdicts(root: Path, file: Path) -> str:
    """A row for each claim of the paper: where it holds, where it fails and where it is open. Where that is in many places, how many."""
    lines = ["| the paper says | holds | fails | open |", "| --- | --- | --- | --- |"]
    for claim, places in _fates(root, file).items():
        by_verdict = ([on for on, _, _, verdict in places if verdict.startswith(wanted)] for wanted in ("holds", "fails", "open"))
        cells = (f"in {len(found)} places" if len(found) > 7 else "; ".join(found) for found in by_verdict)
        lines.append(f"| {claim} | {' | '.join(cells)} |")
    return "\n".join(lines)


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


def _region(root: Path, page: Path, request: str) -> str:
    what, _, rest = request.partition(" ")
    if what == "overview":
        return _overview(root, root / "results" / rest)
    if what == "verdicts":
        return _verdicts(root, root / "results" / rest)
    if what == "across":
        return _across(root, page, shlex.split(rest))
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
    raise ReportError(
        page,
        f"generated: {request}: {what!r} is none of overview, verdicts, across, table, brief, claims, conditions, "
        "figure, kept, lambda, layers",
    )


def _place(picture: Path, page: Path) -> str:
    return picture.relative_to(page.parent).as_posix()


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
