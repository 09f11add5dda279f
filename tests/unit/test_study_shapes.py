"""A study about kernel shapes: what it counts of its runs' last masks, shapes.csv when runs are gone, and the picture."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex
from test_kernel_shapes import write_masks
from test_pictures_fit import assert_readable
from test_report_numbers import EVENTS, write_run
from test_studies import FACTS

import nofm
from nofm.analysis import shapes
from nofm.masks import Grouping
from nofm.report import ReportError, kernels, study_shapes
from nofm.report.study import write_study
from nofm.report.study_pictures import draw_again
from nofm.report.study_shapes import known_shapes


@pytest.fixture(scope="module")
def masks() -> dict[str, torch.Tensor]:
    """Of two convolutions and what no kernel shape is of, by 2:8."""
    torch.manual_seed(0)
    sizes = {"z": (8, 16, 3, 3), "a": (16, 8, 3, 3), "pointwise": (8, 8, 1, 1), "linear": (8, 8)}
    masks = {name: nofm.mask(torch.randn(size), "2:8") for name, size in sizes.items()}
    masks["z"][0, :8] = False
    masks["z"][0, [0, 5]] = True  # two full kernels, which 1:4 could have as well: each is alone among its four
    return masks


@pytest.fixture
def folder(tmp_path, masks) -> Path:
    """A study of two rows: a by 2:8 with seeds 0 and 1, b by 1:4 with seed 0."""
    folder = tmp_path / "tables" / "x"
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps({**FACTS, "shapes_beyond": "1:4"}))
    torch.manual_seed(1)
    finer = {name: nofm.mask(torch.randn(mask.shape), "1:4") for name, mask in masks.items()}
    for label, seed, found in (("a", 0, masks), ("a", 1, {**masks, "z": ~masks["z"]}), ("b", 0, finer)):
        ended = [{**event, "epoch": event["step"] / 10} for event in EVENTS[:-1]] + [{**EVENTS[-1], "metrics": {"map": 0.5}}]
        run = write_run(tmp_path / "runs" / label / f"seed-{seed}", ended, seed=seed)
        (run / "masks").mkdir()
        write_masks(run / "masks" / "step-00000001.safetensors", found, patterns=dict.fromkeys(found, "2:8" if label == "a" else "1:4"))
    return folder


@pytest.mark.parametrize("finer", ["1:4", "1:2", "2:8", "1:8"])
def test_the_report_finds_what_a_finer_pattern_could_not_have_as_the_analysis_does(finer):
    torch.manual_seed(0)
    mask = torch.rand(8, 16, 3, 3) < 0.2
    mask[0], mask[1, 3] = False, True
    found = torch.from_numpy(kernels.crowded(mask.numpy(), *map(int, finer.split(":"))))
    beyond = shapes.beyond(mask, finer)
    assert found.flatten(2).any(-1).equal(beyond)
    assert beyond.any()
    assert not beyond.all()
    grouping = Grouping(nofm.Pattern(finer), axis=1)
    too_many = grouping.split(mask).sum(-1, keepdim=True) > grouping.pattern.n
    assert found.equal(mask & grouping.join(too_many.expand(*too_many.shape[:-1], grouping.pattern.m), mask.shape))


def test_what_is_counted_of_a_run(folder, masks):
    write_study(folder, folder.parent.parent / "runs")
    found = known_shapes(folder / "shapes.csv")
    assert list(found) == [("1", 0), ("1", 1), ("2", 0)]
    assert [layer.layer for layer in found["1", 0]] == ["z", "a"], "convolutions larger than 1x1, in the order of the network"
    for layer in found["1", 0]:
        mask = masks[layer.layer]
        crowded = shapes.beyond(mask, "1:4")
        every = shapes.shapes_of(mask)
        assert (layer.pattern, layer.kernels, layer.shapes) == ("2:8", mask.shape[0] * mask.shape[1], every.distinct)
        assert (layer.empty, layer.beyond) == (every.by_size[0], int(crowded.sum()))
        sizes = [int(mask[o, i].sum()) for _, i, o in layer.fullest]
        assert sizes == sorted((int(size) for size in mask.sum((2, 3))[crowded]), reverse=True)[:6], "the fullest first"
        for rows, i, o in layer.fullest:
            cells = [
                [".+#"[1 + (mask[o, i // 4 * 4 : i // 4 * 4 + 4, y, x].sum() > 1)] if mask[o, i, y, x] else "." for x in range(3)]
                for y in range(3)
            ]
            assert rows == "/".join(map("".join, cells))
    for layer in found["2", 0]:
        assert layer.beyond == 0
        assert "+" in layer.fullest[0][0], "of all kernels, where there are none to choose"
        assert "#" not in layer.fullest[0][0]


def test_they_are_known_when_the_runs_are_gone(folder, masks):
    runs = folder.parent.parent / "runs"
    assert {"shapes.csv", "shapes.png"} <= {path.name for path in write_study(folder, runs)}
    before = (folder / "shapes.csv").read_bytes()
    shutil.rmtree(runs / "a")
    (folder / "shapes.png").unlink()
    (runs / "b" / "seed-0" / "masks" / "step-00000001.safetensors").unlink()  # a run may stay without them
    assert folder / "shapes.png" in write_study(folder, runs)
    assert (folder / "shapes.csv").read_bytes() == before
    (folder / "shapes.png").unlink()
    assert folder / "shapes.png" in draw_again(folder)
    assert (folder / "shapes.png").is_file()


def test_a_run_made_anew_replaces_what_was_known(folder, masks):
    runs = folder.parent.parent / "runs"
    write_study(folder, runs)
    write_masks(runs / "a" / "seed-0" / "masks" / "step-00000001.safetensors", {"z": masks["z"]})
    write_study(folder, runs)
    assert [layer.layer for layer in known_shapes(folder / "shapes.csv")["1", 0]] == ["z"]


def test_other_studies_have_none_of_it(folder):
    write_study(folder, folder.parent.parent / "runs")
    (folder / "study.json").write_text(json.dumps(FACTS))
    (folder / "shapes.csv").unlink()
    written = {path.name for path in write_study(folder, folder.parent.parent / "runs")}
    assert not {"shapes.csv", "shapes.png"} & written
    assert not (folder / "shapes.csv").exists()


def test_of_runs_without_masks_there_is_no_picture(folder):
    runs = folder.parent.parent / "runs"
    for masks in runs.glob("*/*/masks"):
        shutil.rmtree(masks)
    assert folder / "shapes.png" not in write_study(folder, runs)
    assert known_shapes(folder / "shapes.csv") == {}


def test_the_picture_shows_kernels_and_counts_by_layer(folder):
    write_study(folder, folder.parent.parent / "runs")
    found = known_shapes(folder / "shapes.csv")
    rows = {"SR-STE 1:4": found["2", 0], "SR-STE 2:8": found["1", 0]}
    figure = study_shapes.figure_of("X", "1:4", rows, dict.fromkeys(rows, "srste"))
    *drawn, different, share = figure.axes
    picked = max(found["1", 0], key=lambda layer: layer.beyond)
    assert f"the fullest kernels of SR-STE 2:8, {picked.layer} (input, output channel)" in figure.get_suptitle()
    assert "red: more than 1:4 keeps of 4 neighbours" in figure.get_suptitle()
    colours = {to_hex(colour): cell for cell, colour in study_shapes._COLOURS.items()}
    for axes, (kept, i, o) in zip(drawn, picked.fullest, strict=True):
        cells = {(int(p.get_x()), int(p.get_y())): colours[to_hex(p.get_facecolor())] for p in axes.patches}
        assert "/".join("".join(cells[x, y] for x in range(3)) for y in range(3)) == kept
        assert axes.get_title() == f"({i}, {o})"
    assert [bar.get_height() for bar in different.patches] == [layer.shapes for row in rows.values() for layer in row]
    expected = [0, 0, *(100 * layer.beyond / layer.kernels for layer in found["1", 0])]
    assert [bar.get_height() for bar in share.patches] == pytest.approx(expected)
    assert_readable(figure)
    alone = study_shapes.figure_of("X", "1:4", {"SR-STE 1:4": found["2", 0]}, {"SR-STE 1:4": "srste"})
    assert "red" not in alone.get_suptitle(), "1:4 itself has no such kernel"


@pytest.mark.parametrize(
    ("column", "value"), [("seed", "x"), ("kernels", "many"), ("fullest", "#./.#:2"), ("fullest", "#./.#:a:b"), ("config", None)]
)
def test_a_line_that_is_none_is_named(folder, column, value):
    write_study(folder, folder.parent.parent / "runs")
    path = folder / "shapes.csv"
    lines = list(csv.DictReader(path.open()))
    names = [name for name in lines[0] if not (name == column and value is None)]
    lines[1][column] = value
    with path.open("w") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(lines)
    with pytest.raises(ReportError, match=r"shapes\.csv, line [23]: is not as `nofm study` writes it"):
        known_shapes(path)
