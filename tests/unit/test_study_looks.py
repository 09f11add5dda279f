"""A method looks the same in all pictures of all studies, and like no other."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb

from nofm import METHODS
from nofm.report import study_figure, study_kept, study_lambda, study_layers
from nofm.report.measures import MEASURES
from nofm.report.study import Measured
from nofm.report.study_curves import Curves
from nofm.report.study_looks import LOOKS, OTHER, Look, look_of, looks_of

MEASURE = MEASURES["classification"]
RUN = Measured("", 0, "1", "accuracy", 90.0, 1.0, 0.5, 100, None, 60.0, None, None, "2", "a gpu")
# Linear RGB as people see it who lack the cones for green, or for red (Machado, Oliveira and Fernandes 2009).
EYES = {
    "all cones": np.eye(3),
    "no green": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "no red": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
}
LEAST = {"all cones": 30, "no green": 17, "no red": 17}


def seen(colour: str, eyes: str = "all cones") -> np.ndarray:
    """A colour as eyes tell it from others: in CIE L*a*b*, where a distance of two can be seen side by side."""
    parts = np.array(to_rgb(colour))
    linear = EYES[eyes] @ np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(np.array([[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]]) @ linear.clip(0, 1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_method_has_a_look_of_its_own():
    assert set(LOOKS) == set(METHODS)
    assert len({look.colour for look in LOOKS.values()}) == len({look.marker for look in LOOKS.values()}) == len(METHODS)
    assert {(look.line, look.fill) for look in LOOKS.values()} == {("-", "full")}


@pytest.mark.parametrize("eyes", EYES)
def test_colours_can_be_told_apart(eyes):
    colours = {name: seen(look.colour, eyes) for name, look in LOOKS.items()} | {"white": seen("white", eyes)}
    for one, other in itertools.combinations(colours, 2):
        assert np.linalg.norm(colours[one] - colours[other]) > LEAST[eyes], (one, other)


def test_a_method_of_ones_own_has_a_look_that_follows_from_its_name():
    assert look_of("mine") == Look(OTHER, "s")  # the same on every machine, today and tomorrow
    assert look_of("another") != look_of("mine")
    assert len(set(looks_of({name: name for name in ("mine", "yours", "another")}).values())) == 3


def test_rows_of_one_method_have_its_marker_and_up_to_twelve_of_them_differ():
    looks = looks_of({f"SR-STE {number}": "srste" for number in range(12)} | {"STE": "ste"})
    assert looks["SR-STE 0"] == LOOKS["srste"]
    assert looks["STE"] == LOOKS["ste"]
    assert len(set(looks.values())) == 13
    assert {look.marker for row, look in looks.items() if row != "STE"} == {LOOKS["srste"].marker}
    assert {look.colour for row, look in looks.items() if row != "STE"} == {LOOKS["srste"].colour, "#84a7e5", "#113472"}
    assert [looks[f"SR-STE {number}"].colour for number in range(4)] == [LOOKS["srste"].colour] * 4


def drawn(methods: dict[str, str]) -> dict[str, set[str]]:
    """By picture, the colours of rows of these methods."""
    runs = {label: [replace(RUN, kept=0.5)] for label in methods}
    curves = {label: [Curves({1: 80.0, 2: 90.0}, {1: 0.1, 2: 0.2}, {}, 1.0, {1: 0.1, 2: 0.2}, {1: 0.1, 2: 0.2})] for label in methods}
    lines = study_figure.figure_of("A study", MEASURE, {label: (curves[label], runs[label]) for label in methods}, (), methods)
    layers = study_layers.figure_of("A study", curves, methods)
    return {
        "figure": {line.get_color() for line in lines.axes[1].lines},
        "layers": {to_hex(bar.get_facecolor()) for bar in layers.axes[0].patches},
    }


ROWS = {"SR-STE 2:4": "srste", "STE 2:4": "ste", "GMP 80 %": "gmp", "dense": "dense", "RigL 80 %": "rigl", "ASP 2:4": "asp"}


@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("first", range(6))
def test_a_colour_hangs_on_the_method_and_not_on_its_place(first, count):
    names = [*ROWS, *ROWS][first : first + count]
    for picture, colours in drawn({name: ROWS[name] for name in names}).items():
        assert colours == {LOOKS[ROWS[name]].colour for name in names}, picture


def looks_in(axes: Any) -> dict[str, tuple[str, str]]:
    return {container.get_label(): (container[0].get_color(), container[0].get_marker()) for container in axes.containers}


def test_all_pictures_of_methods_agree():
    """figure.png of few rows and of many, kept.png, lambda.png and layers.png, of studies with other rows before and after."""
    rivals = [method for method in LOOKS if method != "dense"]
    rows = {f"row of {method} {percent} %": method for percent in (80, 95) for method in reversed(rivals)}
    runs = {label: [replace(RUN, kept=0.2 if "80" in label else 0.05)] for label in rows}
    ends = study_figure.figure_of("A study", MEASURE, {label: ([], own) for label, own in runs.items()}, (), rows).axes[0]
    dots = [line for line in ends.lines if line.get_marker() != "|"]
    labels = [text.get_text() for text in ends.get_yticklabels()]
    assert {rows[label]: (dot.get_color(), dot.get_marker()) for label, dot in zip(labels, dots, strict=True)} == {
        method: (LOOKS[method].colour, LOOKS[method].marker) for method in rivals
    }
    kept = looks_in(study_kept.figure_of("A study", MEASURE, runs, rows).axes[0])
    assert kept == {f"row of {method}": (LOOKS[method].colour, LOOKS[method].marker) for method in rivals}
    lambdas = {f"lambda {decay:g}": [RUN] for decay in (0, 1e-4, 1e-3)}
    marks = study_lambda.figure_of("A study", MEASURE, lambdas).axes[0].lines
    assert {(line.get_color(), line.get_marker()) for line in marks if line.get_linestyle() == "None"} >= {
        (LOOKS[method].colour, LOOKS[method].marker) for method in ("ste", "srste")
    }
    small = drawn({"STE 2:4": "ste", "dense": "dense"})
    assert small["figure"] == small["layers"] == {LOOKS["ste"].colour, LOOKS["dense"].colour}
