"""Where optical-flow data sets keep their files: FlyingChairs, Sintel, KITTI 2015, Middlebury. Lists of pairs; nothing is opened here.

chairs      data/00001_img1.ppm, _img2.ppm, _flow.flo, and FlyingChairs_train_val.txt with a 1 (training) or 2 (validation) for each
sintel      training/{clean,final}/SCENE/frame_0001.png, training/flow/SCENE/frame_0001.flo
kitti       training/image_2/000000_10.png and _11.png, training/flow_occ/000000_10.png
middlebury  NAME/frame10.png, frame11.png, flow10.flo, or other-data/NAME/ with the flow in other-gt-flow/NAME/

Only FlyingChairs says which pairs are for validation. Of the others every fifth scene is, whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from .errors import DataError

__all__ = ["LAYOUTS", "Pair", "Part", "find_pairs"]

Part: TypeAlias = Literal["train", "val", "all"]


@dataclass(frozen=True, slots=True)
class Pair:
    """The files of one example."""

    frame1: Path
    frame2: Path
    flow: Path


def find_pairs(name: str, root: str | Path, part: Part = "all") -> list[Pair]:
    """The pairs of a part of a data set, in the order of their names. Files that should be there and are not: an error names one."""
    if name not in LAYOUTS:
        raise DataError(f"{name!r} is no layout of optical-flow data; there are {', '.join(LAYOUTS)}")
    if not Path(root).is_dir():
        raise DataError(f"{root}: no such folder; it should hold the files of {name}")
    pairs = LAYOUTS[name](Path(root), part)
    for pair in pairs:
        for path in (pair.frame1, pair.frame2, pair.flow):
            if not path.is_file():
                raise DataError(f"{path}: is missing; {pair.frame1.name} needs it")
    if not pairs:
        raise DataError(f"{root}: has no pair for the {part} part of {name}")
    return pairs


def chairs(root: Path, part: Part) -> list[Pair]:
    """FlyingChairs, split as its own file says."""
    root = _home(root, "data", "FlyingChairs", "FlyingChairs_release")
    flows = sorted((root / "data").glob("*_flow.flo"))
    pairs = [Pair(p.with_name(f"{p.name[:-9]}_img1.ppm"), p.with_name(f"{p.name[:-9]}_img2.ppm"), p) for p in flows]
    if part == "all":
        return pairs
    names = "FlyingChairs_train_val.txt"
    listed = next((p for p in (root / names, root / "data" / names, root.parent / names) if p.is_file()), None)
    if listed is None:
        raise DataError(f"{root / names}: is missing; it says which pairs are for training (1) and which for validation (2)")
    marks = listed.read_text().split()
    if len(marks) != len(pairs):
        raise DataError(f"{listed}: has {len(marks)} marks for {len(pairs)} pairs in {root / 'data'}")
    for line, mark in enumerate(marks, start=1):
        if mark not in ("1", "2"):
            raise DataError(f"{listed}, line {line}: {mark!r} is neither 1 (training) nor 2 (validation)")
    return [pair for pair, mark in zip(pairs, marks, strict=True) if (mark == "1") == (part == "train")]


def sintel(root: Path, part: Part) -> list[Pair]:
    """MPI Sintel's training half, in both renderings."""
    training = _home(root, "training", "Sintel", "MPI-Sintel-complete") / "training"
    flows = sorted((training / "flow").glob("*/frame_*.flo"))
    kept = _of_part([flow.parent.name for flow in flows], part)
    return [
        Pair(training / name / flow.parent.name / f"{flow.stem}.png", training / name / flow.parent.name / f"{_next(flow)}.png", flow)
        for name in ("clean", "final")
        for flow in flows
        if flow.parent.name in kept
    ]


def _next(flow: Path) -> str:
    head, _, number = flow.stem.rpartition("_")
    if not number.isdecimal():
        raise DataError(f"{flow}: is not called frame_NUMBER.flo, so the frame after it cannot be named")
    return f"{head}_{int(number) + 1:0{len(number)}d}"


def kitti(root: Path, part: Part) -> list[Pair]:
    """KITTI 2015's training half, with flow also where it is occluded; known at some pixels only."""
    training = _home(root, "training", "KittiFlow", "KITTI", "data_scene_flow") / "training"
    flows = sorted((training / "flow_occ").glob("*_10.png"))
    kept = _of_part([flow.stem for flow in flows], part)
    images = training / "image_2"
    return [Pair(images / flow.name, images / f"{flow.stem[:-3]}_11.png", flow) for flow in flows if flow.stem in kept]


def middlebury(root: Path, part: Part) -> list[Pair]:
    """Middlebury's scenes with public flow."""
    data, truth = (root / "other-data", root / "other-gt-flow") if (root / "other-gt-flow").is_dir() else (root, root)
    flows = sorted(truth.glob("*/flow10.flo"))
    kept = _of_part([flow.parent.name for flow in flows], part)
    return [Pair(data / name / "frame10.png", data / name / "frame11.png", flow) for flow in flows if (name := flow.parent.name) in kept]


def _home(root: Path, inside: str, *names: str) -> Path:
    """ROOT, or the folder in it that the data set's archive or torchvision would make."""
    for home in (root, *(root / name for name in names)):
        if (home / inside).is_dir():
            return home
    raise DataError(f"{root / inside}: no such folder")


def _of_part(scenes: list[str], part: Part) -> set[str]:
    ordered = sorted(set(scenes))
    held_out = set(ordered[4::5])
    return {"all": set(ordered), "val": held_out, "train": set(ordered) - held_out}[part]


LAYOUTS: dict[str, Callable[[Path, Part], list[Pair]]] = {
    "chairs": chairs,
    "sintel": sintel,
    "kitti": kitti,
    "middlebury": middlebury,
}
