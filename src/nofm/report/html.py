"""`write_report`: one page that needs nothing but a browser, and the same numbers as CSV and JSON beside it.

The page is made from `page.html` and `page.css` in this folder. It holds no script, loads nothing, and is the same bytes for the
same run folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..version import __version__
from . import curves, details, samples, sections
from .compare import Group, group_runs
from .errors import ReportError
from .files import write_whole
from .kernels import LayerShapes, last_masks, read_shapes
from .notices import notices, short_names
from .numbers import curves_csv, document, runs_csv, to_json
from .picture import drawn
from .read import Run, load
from .units import unit_of

__all__ = ["files_of", "write_report"]

_HERE = Path(__file__).parent


def write_report(runs: Sequence[Path | str], out: Path | str, *, picture: bool = False) -> Path:
    """Report on the run folders `runs` in `out` (a file, or a folder for report.html), and return the path of the page.

    Beside NAME.html: NAME.csv (one row a run), NAME-curves.csv (one row a point) and NAME.json (everything); with `picture` also NAME.png.
    """
    folders = [Path(run) for run in runs]
    if not folders:
        raise ReportError(Path(out), "a report needs at least one run folder")
    if twice := [f for i, f in enumerate(folders) if f.resolve() in [g.resolve() for g in folders[:i]]]:
        raise ReportError(twice[0], "this run is given twice; it would count as two seeds")
    page = Path(out)
    if page.suffix.lower() not in (".html", ".htm"):
        page = page / "report.html"
    names, groups = short_names(folders), group_runs([load(folder) for folder in folders])
    shapes = {group.label: found for group in groups if (found := _shapes(group.runs[0]))}
    data = document(groups, names, shapes)
    contents = [text.encode() for text in (_page(groups, names, shapes, page.stem), runs_csv(data), curves_csv(data), to_json(data))]
    if picture:
        contents.append(drawn(groups))
    page.parent.mkdir(parents=True, exist_ok=True)
    for path, content in zip(files_of(page, picture=picture), contents, strict=True):
        write_whole(path, content)
    return page


def files_of(page: Path, *, picture: bool = False) -> list[Path]:
    """All files of a report, the page first."""
    return [page, *(page.with_name(page.stem + end) for end in (".csv", "-curves.csv", ".json", *((".png",) if picture else ())))]


def _shapes(run: Run) -> list[LayerShapes]:
    path = last_masks(run)
    transposed = frozenset(layer.name for layer in run.layers if layer.kind.startswith("ConvTranspose"))
    return [] if path is None else read_shapes(path, transposed)


def _page(groups: Sequence[Group], names: Mapping[Path, str], shapes: Mapping[str, list[LayerShapes]], stem: str) -> str:
    import jinja2

    loader = jinja2.FileSystemLoader(_HERE)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    runs = [run for group in groups for run in group.runs]
    metrics = curves.metric_names(runs)
    units = {metric: unit_of(metric) for metric in metrics}
    return environment.get_template("page.html").render(
        head=sections.head(groups, metrics, units),
        notices=notices(groups, names),
        comparison=sections.comparison(groups, metrics, units),
        learning=sections.learning(groups, metrics, units),
        samples=samples.shown(groups),
        movement=sections.movement(groups),
        kernels=details.kernels(shapes, groups),
        layer_tables=details.layer_tables(groups),
        settings=details.settings(groups),
        conditions=details.conditions(groups, names),
        several_seeds=any(len(group.runs) > 1 for group in groups),
        stem=stem,
        version=__version__,
        css=(_HERE / "page.css").read_text(encoding="utf-8"),
    )
