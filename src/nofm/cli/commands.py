"""The commands beside `nofm train`. Their signatures and docstrings are the help text; each imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..engine.config import ConfigError
from ..engine.resolve import near, near_path
from ..errors import NofmError, NoZerosError
from .advice import nothing_to_export, nothing_to_pack, trained_dense
from .folders import check_run, layers_of, runs_in
from .pages import fitted

if TYPE_CHECKING:
    from ..analysis import Verification

__all__ = ["analyse", "bench", "check", "completion", "cost", "export", "recipes", "report"]

_SIZES = "(default: 3 224 224; 3 32 32 for cifar/...; 1 8 8 for cnn)"


def recipes(glob: Positional[Annotated[str, arg(metavar="[GLOB]", help_behavior_hint="")]] = "*") -> int:
    """List the recipes, with a line about each.

    Args:
        glob: Only those whose names match, such as "cifar10/*", or contain it, such as "resnet".
    """
    from ..recipes import RECIPES, describe, listed

    found = listed(glob) or listed(f"*{glob}*")
    if not found:
        raise ConfigError(f"{glob!r} matches no recipe; there are {', '.join(RECIPES)}{near(glob, RECIPES)}")
    lines = "\n".join(f"  {name:{max(map(len, found))}}  {describe(name)}" for name in found)
    print(fitted(lines) if sys.stdout.isatty() else lines)  # a line each for other programs
    return 0


def report(
    runs: Positional[Annotated[tuple[Path, ...], arg(metavar="RUN [RUN ...]", help_behavior_hint="(one or more)")]],
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
    picture: bool = False,
) -> int:
    """Compare runs: a table here, and one self-contained HTML page with everything. Runs that differ in the seed alone are one row.

    Args:
        runs: Run folders, as `nofm train --out` leaves them, or folders of runs: of `--seeds`, of a study.
        out: The page, a name in .html, or a folder for it; CSV and JSON go beside it. Where nothing is said, the folder of all runs.
        picture: Draw the curves as FILE.png too, for a README or a slide.
    """
    if not runs:
        raise ConfigError("report: give at least one run folder: nofm report RUN [RUN ...]")
    if out is not None and out.suffix in _NO_PAGES and not out.is_dir():
        raise ConfigError(f"--out {out}: the page is HTML, so a name that ends in .html, or a folder; --picture draws a PNG beside it")
    runs = tuple(run for run in runs if not run.is_file()) or runs  # DIR/* finds the report of before, too
    runs = tuple(inner for run in runs for inner in runs_in(run))
    for run in runs:
        check_run(run)
    from ..report import files_of, table, write_report

    page = write_report(runs, out or _common_folder(runs) / "report.html", picture=picture)
    print(table(runs), end="\n\n")
    for file in files_of(page, picture=picture):
        print(file)
    return 0


_NO_PAGES = (".csv", ".gif", ".jpg", ".json", ".md", ".pdf", ".png", ".svg", ".txt")  # as a folder, none of them would be meant


def _common_folder(runs: Sequence[Path]) -> Path:
    """The run folder, or the innermost folder that all of several lie in; where the working folder is inside that, the working folder:
    what runs from here and there have in common is the root, or a folder where nobody looks."""
    if len(runs) == 1:
        return runs[0]
    common = Path(os.path.commonpath([run.absolute() for run in runs]))
    if Path.cwd().is_relative_to(common):
        return Path()
    return common.relative_to(Path.cwd()) if common.is_relative_to(Path.cwd()) else common


def check(
    file: Positional[Annotated[Path, arg(metavar="FILE")]],
    pattern: Annotated[str | None, arg(metavar="N:M", help_behavior_hint="")] = None,
    skip: Annotated[tuple[str, ...], arg(metavar="GLOB [GLOB ...]", help_behavior_hint="")] = (),
    all: bool = False,
) -> int:
    """Is a safetensors or ONNX file really N:M? Exit code 1 if not.

    Args:
        file: The file, .safetensors or .onnx, or a run folder for the weights that the run has ended with.
        pattern: Check all weights that have zeros against this N:M, not each for its own; of a run, the layers that it made sparse.
        skip: Weights or layers that need not have the --pattern: "fc" "*.downsample.*".
        all: Every layer must have the --pattern; without this, some may be dense.
    """
    for name, given in (("--skip", skip), ("--all", all)):
        if given and pattern is None:
            raise ConfigError(f"{name}: is about --pattern, which is not given; without it each weight's own pattern is found")
    weights = _weights_of(file)
    from .. import verify

    found = verify(weights, {**dict.fromkeys(skip), "*": pattern} if skip else pattern)
    of_run = weights != file
    if pattern is not None and of_run and not all:
        found = _without_dense_layers(found, file)
    unpruned = of_run and trained_dense(file)
    if pattern is not None and (all or not of_run) and not unpruned:
        from .judged import judged

        judgement = judged(found, file, pattern, skip, every=all)
        print("\n".join([str(judgement.found), *judgement.lines]))
        return 0 if judgement.ok else 1
    print(found)
    if unpruned:
        print(f"{file}: was trained dense, so nothing is pruned in it")
    return 0 if found.ok else 1


def _without_dense_layers(found: Verification, run: Path) -> Verification:
    """As found, but for the layers that the run left dense, which have no pattern to break."""
    from ..analysis import Verification

    notes = {}
    for name, sparse, why in layers_of(run):
        key = next((w.name for w in found.weights if w.name in (name, f"{name}.weight")), None)
        if key is None and sparse:
            raise ConfigError(f"{run}: run.json lists {name} as sparse, and model.safetensors has no such weight; is it of another run?")
        if key is not None:
            notes[key] = None if sparse else f"not checked: stayed dense in this run{why and f', {why}'}"
    unlisted = "not checked: run.json does not list it"
    dense = {w.name: note for w in found.weights if (note := notes.get(w.name, unlisted)) is not None}
    free: dict[str, Any] = {"pattern": None, "axis": None, "groups": 0, "violations": 0}
    return Verification(tuple(replace(w, **free, note=dense[w.name]) if w.name in dense else w for w in found.weights))


def _weights_of(path: Path) -> Path:
    """The file to check, which of a run folder is its result. Training goes on from dense weights, so a checkpoint's are never N:M."""
    run = next((folder for folder in (path, *path.absolute().parents) if (folder / "run.json").is_file()), None)
    result = (run or path) / "model.safetensors"
    if run is not None and (run / "checkpoints").absolute() in (path.absolute(), *path.absolute().parents):
        where = f"check {result}" if result.is_file() else f"{result} will hold them at the end of the run"
        raise ConfigError(f"{path}: a training checkpoint holds dense weights, masked only when they are used; for N:M weights {where}")
    if path == run and not result.is_file():
        raise ConfigError(f"{path}: this run has not ended, so its N:M weights are not written yet; go on with it by nofm resume {path}")
    if path.is_dir() and path != run:
        inside = next((run.parent for run in sorted(path.glob("*/run.json"))), None)
        such_as = f", such as {inside}" if inside else ""
        raise ConfigError(f"{path}: is a folder, and not of a run; give a safetensors file or a run folder{such_as}")
    if not path.exists():
        siblings = path.parent.iterdir() if path.parent.is_dir() else ()
        raise ConfigError(f"{path}: no such file; give a file of weights or a run folder{near_path(path, siblings)}")
    return result if path == run else path


def export(
    file: Positional[Annotated[Path, arg(metavar="FILE")]],
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
    form: Literal["packed", "plain"] = "packed",
) -> int:
    """Write the weights of a run or a safetensors file without their zeros, or with them again.

    Args:
        file: A run folder, for the weights that the run has ended with, or a safetensors file.
        out: The new file; where nothing is said, model.packed.safetensors beside model.safetensors, or model.plain.safetensors.
        form: packed leaves zeros out, and `nofm.load_packed` reads it; plain has them, and everything reads it.
    """
    weights = _weights_of(file)
    if weights.suffix.lower() == ".onnx":
        raise ConfigError(f"{weights}: ONNX files are only looked at, by nofm check; export takes a safetensors file or a run folder")
    stem = weights.name.removesuffix(".safetensors").removesuffix(".packed").removesuffix(".plain")
    target = out or weights.with_name(f"{stem}.{form}.safetensors")
    if target.absolute() == weights.absolute():
        raise ConfigError(f"--out {target}: is the file that is read; give another name")
    if target.is_file() and target.suffix != ".safetensors":
        raise ConfigError(f"--out {target}: exists, and its name is not that of a safetensors file; give another one")
    from ..deploy import repack

    try:
        print(repack(weights, target, form))
    except NoZerosError:
        raise ConfigError(nothing_to_export(weights)) from None
    return 0


def analyse(
    run: Positional[Annotated[Path, arg(metavar="RUN")]],
    steps: Annotated[tuple[int, ...], arg(metavar="A B", help_behavior_hint="")] = (),
) -> int:
    """SAD between two steps of a run whose masks were saved, layer by layer: how many weights changed between kept and pruned.

    Args:
        run: A run folder.
        steps: The two steps; the first and the last that were saved where nothing is said.
    """
    check_run(run)
    from .moved import moved

    print(moved(run, steps))
    return 0


def cost(
    model: Positional[Annotated[str, arg(metavar="MODEL")]],
    pattern: Annotated[str | None, arg(metavar="N:M", help_behavior_hint="")] = None,
    preset: Literal["default", "paper", "asp", "all"] = "default",
    input: Annotated[tuple[int, ...] | None, arg(metavar="C H W", help_behavior_hint=_SIZES)] = None,
) -> int:
    """Parameters and multiply-adds of a model for one image, dense and sparse.

    Args:
        model: torchvision/NAME, timm/NAME, or one of nofm's own (cnn, cifar/resnet20, ...).
        pattern: Of the sparse layers; where nothing is said, only the dense numbers.
        preset: What stays dense: first convolution and classifier (default), classifier (paper), as in NVIDIA's ASP (asp), none (all).
        input: Channels, height and width of an image.
    """
    import torch

    from .. import cost as count
    from .. import sparsify_
    from .networks import named, usual_sizes

    sizes = input or usual_sizes(model)
    with torch.device("meta"):
        network = named(model, sizes)
        if pattern is not None:
            sparsify_(network, pattern, preset=preset)
        try:
            found = count(network, (1, *sizes))
        except NofmError as error:
            why = error.__cause__ or error
            raise ConfigError(
                f"--input {' '.join(map(str, sizes))}: {model} cannot compute it: {why}; give channels, height, width"
            ) from None
    print(f"{model}, one image of {' x '.join(map(str, sizes))}\n{found}")
    if pattern is None:
        print(f"dense throughout; sparse: nofm cost {model} --pattern 2:4")
    return 0


def bench(
    model: Positional[Annotated[str, arg(metavar="MODEL|RUN")]],
    pattern: Annotated[str | None, arg(metavar="N:M", help_behavior_hint="")] = None,
    preset: Literal["default", "paper", "asp", "all"] = "default",
    input: Annotated[tuple[int, ...] | None, arg(metavar="C H W", help_behavior_hint=_SIZES)] = None,
    batch: int = 1,
    threads: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None,
    compile: bool = False,
) -> int:
    """How fast a network is on this CPU, in fp32, dense and without its zeros (nofm.pack_): layer by layer, and as a whole.

    Args:
        model: torchvision/NAME, timm/NAME or one of nofm's own (cnn, ...), with weights from chance; or a finished run of a classifier.
        pattern: Of the sparse layers; a run has its own.
        preset: What stays dense: first convolution and classifier (default), classifier (paper), as in NVIDIA's ASP (asp), none (all).
        input: Channels, height and width of an image; a run has its own.
        batch: Images of a forward.
        threads: Of torch; as many as it takes by itself where nothing is said.
        compile: Measure both networks compiled by torch, too, which takes a minute.
    """
    if batch < 1 or (threads is not None and threads < 1):
        raise ConfigError("--batch and --threads: must be above 0")
    is_run = Path(model).is_dir()
    if is_run and (pattern is not None or preset != "default"):
        raise ConfigError(f"--pattern and --preset: {model} is a run, whose weights have their zeros; leave them out")
    from .networks import check_name, folded, of_run, usual_sizes

    if not is_run:
        check_name(model, ", nor is there a run folder of that name")
        if pattern is None:
            raise ConfigError(f"--pattern is missing: nofm bench {model} --pattern 1:16")
    import torch

    from ..deploy import bench as measured

    if threads is not None:
        torch.set_num_threads(threads)
    network, sizes = of_run(Path(model), input) if is_run else folded(model, str(pattern), preset, input or usual_sizes(model))
    try:
        print(measured(network, torch.randn(batch, *sizes), compiled=compile))
    except NoZerosError:
        raise ConfigError(nothing_to_pack(model, sizes)) from None
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    return 0


def completion(shell: Positional[Literal["bash", "zsh", "tcsh"]] = "bash") -> int:
    """Print a completion script for `nofm train digits`-style commands: eval "$(nofm completion bash)".

    Args:
        shell: Which shell.
    """
    from .completion import script

    print(script(shell))
    return 0
