"""What the report computes, against numbers worked out by hand: curves, groups, means and spreads, and how they are written.

Run folders here are a few lines each, so that a reader can check them with a pencil; test_report.py uses trained ones.
"""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from nofm.report import curves, numbers, write_report
from nofm.report.compare import Band, Stat, band, differing, flatten, group_runs, stat, thin
from nofm.report.details import conditions
from nofm.report.notices import notices, short_names
from nofm.report.read import Run, load
from nofm.report.sections import focus
from nofm.report.units import big, duration, plus_minus, rate, unit_of

LAYERS = [
    {"name": "a", "kind": "Conv2d", "shape": [4, 4, 1, 1], "pattern": "2:4", "groups": 4, "kept": 8, "note": ""},
    {"name": "b", "kind": "Linear", "shape": [2, 8], "pattern": "2:4", "groups": 4, "kept": 8, "note": ""},
    {"name": "c", "kind": "Linear", "shape": [2, 8], "pattern": "", "groups": 0, "kept": 16, "note": "classifier"},
]
EVENTS = [
    {"event": "start", "step": 0, "resumed_from": None},
    {"event": "train", "step": 10, "loss": 2.0, "lr": 0.1, "images_per_second": 100.0},
    {"event": "sad", "step": 10, "since": 0, "changed": {"a": 8, "b": 4}, "weights": 32},
    {"event": "eval", "step": 10, "metrics": {"loss": 1.5, "accuracy": 60.0}, "ema": False},
    {"event": "train", "step": 20, "loss": 1.0, "lr": 0.1, "images_per_second": 300.0},
    {"event": "sad", "step": 20, "since": 10, "changed": {"a": 2, "b": 2}, "weights": 32},
    {"event": "eval", "step": 20, "metrics": {"loss": 1.0, "accuracy": 80.0}, "ema": False},
    {"event": "eval", "step": 20, "metrics": {"loss": 1.1, "accuracy": 79.0}, "ema": True},
    {"event": "end", "step": 20, "metrics": {"accuracy": 79.0}, "seconds": 5.0},
]


def write_run(folder: Path, events: list[dict] = EVENTS, seed: int = 0, config: dict | None = None, **changes: object) -> Path:
    folder.mkdir(parents=True)
    info = {
        "format": 1,
        "recipe": "tiny",
        "config": {"seed": seed, "out": str(folder), **(config or {})},
        "command": ["nofm", "train", "tiny", "--seed", str(seed)],
        "seed": seed,
        "versions": {"nofm": "1", "torch": "2", "python": "3"},
        "commit": None,
        "hardware": {"device": "cpu", "name": "a cpu", "cpus": 2, "world_size": 1},
        "started": "2026-01-01T00:00:00",
        "layers": LAYERS,
        "cost": None,
    }
    (folder / "run.json").write_text(json.dumps(info | changes))
    (folder / "events.jsonl").write_text("".join(json.dumps({"time": 0.0, **event}) + "\n" for event in events))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return load(write_run(tmp_path / "run"))


def test_curves_by_pencil(run):
    assert curves.train(run) == {10: 2.0, 20: 1.0}
    assert curves.evals(run, "accuracy") == {10: 60.0, 20: 80.0}
    assert curves.evals(run, "accuracy", ema=True) == {20: 79.0}
    assert curves.evals(run, "no such metric") == {}
    assert curves.sad(run) == {10: 12, 20: 16}
    assert curves.sad_by_layer(run) == {"a": 10, "b": 6}
    assert curves.flip_rate(run) == {10: 12 / 32 / 10, 20: 4 / 32 / 10}
    assert curves.flip_rate_by_layer(run) == {"a": {10: 0.05, 20: 2 / 16 / 10}, "b": {10: 4 / 16 / 10, 20: 2 / 16 / 10}}


def test_final_and_best_by_pencil(run, tmp_path):
    assert curves.metric_names([run]) == ["accuracy", "loss"], "the loss comes last, whatever comes first in the file"
    assert curves.final(run, "accuracy") == 79.0, "what the end says"
    assert curves.final(run, "loss") == 1.1, "the last of the moving average, as the end does not say"
    assert curves.best(run, "accuracy") == 80.0
    assert curves.best(run, "loss") == 1.0
    unfinished = load(write_run(tmp_path / "unfinished", EVENTS[:7]))
    assert curves.final(unfinished, "accuracy") == 80.0
    assert curves.final(unfinished, "top5") is None
    assert curves.best(unfinished, "top5") is None


def test_totals_by_pencil(run, tmp_path):
    assert numbers.total_sad(run) == 16
    assert numbers.mean_flip_rate(run) == pytest.approx((12 / 32 + 4 / 32) / 20)
    assert numbers.speed(run) == 200.0
    assert numbers.cost_of(run) == {"weights": 48, "weights_kept": 32, "sparse_weights": 32, "sparse_weights_kept": 16}
    dense = {"sparsity": {"method": {"kind": "dense"}}}
    whole = load(write_run(tmp_path / "dense", config=dense, cost={"macs": 100, "macs_sparse": 50.0}))
    all_of_them = {"weights": 48, "weights_kept": 48, "sparse_weights": 32, "sparse_weights_kept": 32}
    assert numbers.cost_of(whole) == {**all_of_them, "macs": 100, "macs_kept": 100}
    anywhere = [{**layer, "pattern": "1:1", "kept": 16} if layer["pattern"] else layer for layer in LAYERS]
    ended = [*EVENTS[:-1], {**EVENTS[-1], "kept": 4}]
    rigl = load(write_run(tmp_path / "rigl", ended, layers=anywhere, cost={"macs": 100, "macs_sparse": 100}))
    assert numbers.cost_of(rigl) == {"weights": 48, "weights_kept": 20, "sparse_weights": 32, "sparse_weights_kept": 4}
    counted = [{**layer, "macs": macs} for layer, macs in zip(anywhere, (60, 30, 10), strict=True)]
    told = [*EVENTS[:-1], {**EVENTS[-1], "kept": 12, "kept_in": {"a": 4, "b": 8}}]
    rigl = load(write_run(tmp_path / "rigl by layer", told, layers=counted, cost={"macs": 100, "macs_sparse": 100}))
    kept = {"weights": 48, "weights_kept": 28, "sparse_weights": 32, "sparse_weights_kept": 12}
    assert numbers.cost_of(rigl) == {**kept, "macs": 100, "macs_kept": 60 * 4 / 16 + 30 * 8 / 16 + 10}
    assert [layer.kept for layer in rigl.layers] == [4, 8, 16]
    spared = [*LAYERS[:2], {**LAYERS[2], "note": "rule 'c' keeps it dense"}]
    by_budget = load(write_run(tmp_path / "budget", layers=spared, config={"sparsity": {"budget": 2 / 3}}))
    assert numbers.cost_of(by_budget) == {"weights": 48, "weights_kept": 32, "sparse_weights": 48, "sparse_weights_kept": 32}
    by_rule = load(write_run(tmp_path / "rule", layers=spared))
    assert numbers.cost_of(by_rule)["sparse_weights"] == 32, "who leaves a layer dense by a rule has spent nothing on it"
    tied = [*LAYERS, {**LAYERS[2], "name": "d", "note": "tied to c"}]
    assert numbers.cost_of(load(write_run(tmp_path / "tied", layers=tied)))["weights"] == 48
    still = load(write_run(tmp_path / "still", EVENTS[:2]))
    assert numbers.total_sad(still) is None
    assert numbers.mean_flip_rate(still) is None


def test_a_step_that_was_logged_twice_counts_once(tmp_path):
    again = {**EVENTS[2], "changed": {"a": 1, "b": 0}}
    twice = load(write_run(tmp_path / "run", [*EVENTS[:4], again, *EVENTS[4:]]))
    assert curves.sad(twice) == {10: 1, 20: 5}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([3.0], Stat(3.0, None, 1)),
        ([1.0, 2.0, 4.0], Stat(7 / 3, math.sqrt(7 / 3), 3)),  # deviations -4/3, -1/3, 5/3: squares add up to 42/9, over n - 1 = 2
        ([5.0, 5.0], Stat(5.0, 0.0, 2)),
    ],
    ids=["none", "one", "three", "equal"],
)
def test_mean_and_sample_standard_deviation(values, expected):
    found = stat(values)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.mean, found.n) == (pytest.approx(expected.mean, rel=1e-15), expected.n)
        assert found.spread == (None if expected.spread is None else pytest.approx(expected.spread, rel=1e-12))


def test_a_value_that_is_not_finite_makes_no_spread():
    found = stat([1.0, math.nan])
    assert found is not None
    assert math.isnan(found.mean)
    assert found.spread is None


def test_bands_are_made_at_the_steps_that_all_curves_have():
    found = band([{1: 1.0, 2: 2.0, 3: 9.0}, {2: 4.0, 3: 9.0, 4: 0.0}])
    assert found.steps == (2, 3)
    assert [s.mean for s in found.stats] == [3.0, 9.0]
    assert [s.spread for s in found.stats] == pytest.approx([math.sqrt(2), 0.0])
    assert band([]) == Band((), ())


def test_thin_takes_means_of_neighbours_and_keeps_short_curves():
    assert thin({1: 1.0, 2: 3.0, 3: 5.0, 4: 7.0, 5: 10.0}, 3) == {2: 2.0, 4: 6.0, 5: 10.0}
    assert thin({1: 1.0, 2: 3.0}, 2) == {1: 1.0, 2: 3.0}
    assert thin({}, 2) == {}


def test_runs_that_differ_in_the_seed_alone_are_one_group(tmp_path):
    configs = {"srste": {"kind": "srste", "decay": 2e-4}, "ste": {"kind": "ste"}}
    runs = [
        load(write_run(tmp_path / f"{name}{seed}", seed=seed, config={"sparsity": {"method": method}}))
        for seed in (1, 0)
        for name, method in configs.items()
    ]
    groups = group_runs(runs)
    assert [group.label for group in groups] == ["srste", "ste"], "the word that differs is enough, decay is not needed"
    assert [[run.seed for run in group.runs] for group in groups] == [[0, 1], [0, 1]]
    assert differing([group.settings for group in groups]) == ["sparsity.method.kind", "sparsity.method.decay"]


def test_a_key_that_an_earlier_version_did_not_know_parts_no_group(tmp_path):
    older, newer = ({"schedule": schedule} for schedule in ({"warmup": 5.0}, {"warmup": 5.0, "restart_warmup": False}))
    runs = [load(write_run(tmp_path / str(seed), seed=seed, config=config)) for seed, config in enumerate((older, newer))]
    assert [[run.seed for run in group.runs] for group in group_runs(runs)] == [[0, 1]]
    asked = load(write_run(tmp_path / "asked", config={"schedule": {"warmup": 5.0, "restart_warmup": True}}))
    assert len(group_runs([*runs, asked])) == 2, "what is not as usual was asked for"
    configs = ({"sparsity": {"method": {"begin_at": 9.0, **option}}} for option in ({}, {"ramp_at": None}, {"ramp_at": 0.0}))
    starts = [load(write_run(tmp_path / f"start{i}", seed=i, config=config)) for i, config in enumerate(configs)]
    groups = {group.label: [run.seed for run in group.runs] for group in group_runs(starts)}
    assert groups == {"default": [0, 1], "ramp_at=0": [2]}, "from the first step on is not off, and none is"


def test_labels_have_what_it_takes_to_tell_groups_apart(tmp_path):
    methods = [{"kind": "srste", "decay": 1}, {"kind": "srste", "decay": 2}, {"kind": "ste", "decay": None}]
    runs = [load(write_run(tmp_path / str(i), config={"method": m, "lr": 0.1})) for i, m in enumerate(methods)]
    assert [group.label for group in group_runs(runs)] == ["srste decay=1", "srste decay=2", "ste"]
    assert [group.label for group in group_runs(runs[:1])] == ["tiny"], "one group is called by its recipe"
    odd = [load(write_run(tmp_path / f"odd{i}", config=c)) for i, c in enumerate([{"x": None}, {"x": {}}, {}])]
    assert len({group.label for group in group_runs(odd)}) == len(group_runs(odd))


def test_all_commands_of_a_changed_run_are_shown(tmp_path):
    """Those of two runs that one command began, each once and in order."""
    first, second = ["nofm", "train", "tiny", "--seeds", "2", "--out", "a b"], ["nofm", "resume", "a b/seed-0", "--allow_change"]
    runs = [
        write_run(tmp_path / "0", seed=0, command=second, earlier=[{"command": first, "until": 1200}]),
        write_run(tmp_path / "1", seed=1, command=first),
    ]
    groups = group_runs(list(map(load, runs)))
    shown = [" ".join(words) for words in conditions(groups, short_names(runs))["commands"]]
    assert shown == ["nofm train tiny --seeds 2 --out 'a b'", "nofm resume 'a b/seed-0' --allow_change # from step 1,200 on"]
    page = write_report(runs, tmp_path / "page.html")
    rows = list(csv.DictReader(page.with_suffix(".csv").open()))
    assert rows[0]["command"] == "nofm train tiny --seeds 2 --out a b; nofm resume a b/seed-0 --allow_change"
    assert json.loads(page.with_suffix(".json").read_text())["runs"][0]["earlier"] == [{"command": first, "until": 1200}]


def trained(kind: str, pattern: str = "1:16", lr: float = 0.1, warmup: float = 3.0, **engine: float | None) -> dict:
    sparsity = {"pattern": pattern, "method": {"kind": kind}}
    return {"sparsity": sparsity, "optim": {"lr": lr}, "schedule": {"warmup": warmup}, "engine": engine}


def starting(begin_at: float, ramp_at: float | None = None) -> dict:
    config = trained("srste")
    return config | {"sparsity": {**config["sparsity"], "method": {"kind": "srste", "begin_at": begin_at, "ramp_at": ramp_at}}}


NAMED = {
    "the rate beside the method": ([trained("srste"), trained("ste", lr=0.05)], ["srste lr=0.1", "ste lr=0.05"]),
    "the length beside the method": (
        [trained("srste", warmup=1.0, steps=100), trained("ste", warmup=2.0, steps=200)],
        ["srste steps=100", "ste steps=200"],  # and not the warm-up, which is not needed
    ),
    "each length in its unit": ([trained("ste", steps=100), trained("ste", epochs=2.0)], ["steps=100", "epochs=2"]),
    "the pattern beside the method": ([trained("srste", "2:4"), trained("ste", "1:4")], ["srste 2:4", "ste 1:4"]),
    "no pattern of a dense network": ([trained("srste", "2:4"), trained("dense", "1:4")], ["srste", "dense"]),
    "patterns of the others": (
        [trained("srste", "2:4"), trained("ste", "1:4"), trained("dense", "1:4")],
        ["srste 2:4", "ste 1:4", "dense"],
    ),
    "what all share is not named": ([trained("srste", lr=0.2, steps=9), trained("dense", lr=0.2, steps=9)], ["srste", "dense"]),
    "a start beside the method": ([starting(200.0), trained("ste")], ["srste begin_at=200", "ste"]),
    "both ends of a start": (
        [starting(200.0, 0.0), starting(200.0), trained("ste")],
        ["srste begin_at=200 ramp_at=0", "srste begin_at=200", "ste"],
    ),
    "numbers as they are written": ([trained("ste", warmup=3.0), trained("ste", warmup=0.25)], ["warmup=3", "warmup=0.25"]),
}


@pytest.mark.parametrize(("configs", "labels"), NAMED.values(), ids=NAMED)
def test_labels_name_what_a_reader_would_take_for_equal(configs, labels, tmp_path):
    runs = [load(write_run(tmp_path / str(i), config=config)) for i, config in enumerate(configs)]
    assert [group.label for group in group_runs(runs)] == labels


def test_flatten():
    assert flatten({"a": {"b": {"c": 1}, "d": [1, 2]}, "e": {}}) == {"a.b.c": 1, "a.d": [1, 2], "e": {}}


def test_a_run_that_broke_off_does_not_count_in_a_mean(tmp_path):
    broken = write_run(tmp_path / "one", [*EVENTS[:4], {"event": "error", "step": 11, "message": "loss is nan"}], seed=1)
    folders = [write_run(tmp_path / "zero"), broken]
    (group,) = groups = group_runs([load(folder) for folder in folders])
    found = group.stat(lambda run: curves.final(run, "accuracy"))
    assert found == Stat(79.0, None, 1)
    said = notices(groups, short_names(folders))
    assert any("one failed at step 11: loss is nan" in sentence and "leave it out" in sentence for sentence in said)
    assert any("logged at different steps" in sentence for sentence in said)


def test_what_a_reader_must_know_is_said(tmp_path):
    other = {"versions": {"nofm": "1", "torch": "9", "python": "3"}, "hardware": {"device": "cuda", "name": "a gpu", "world_size": 8}}
    folders = [write_run(tmp_path / "one"), write_run(tmp_path / "two", **other)]
    said = " ".join(notices(group_runs([load(f) for f in folders]), short_names(folders)))
    for words in ("more than one run of seed 0", "version of torch: 2, 9", "hardware: a cpu, a gpu", "number of processes: 1, 8"):
        assert words in said
    assert notices(group_runs([load(folders[0])]), short_names(folders)) == []


def test_short_names_tell_folders_apart(tmp_path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    assert list(short_names(folders).values()) == ["a/run", "b/run"]
    assert list(short_names([tmp_path / "x", tmp_path / "y"]).values()) == ["x", "y"]


def a_band(values: list[float], spread: float | None = None) -> Band:
    return Band(tuple(range(10, 10 * len(values) + 1, 10)), tuple(Stat(v, spread, 1) for v in values))


@pytest.mark.parametrize(
    ("values", "higher", "expected"),
    [
        ([10, 50, 90, 92, 94, 95, 96, 97, 98, 100], True, (90 - 1.5, 100 + 0.6)),
        ([90, 91, 92, 92, 94, 95, 96, 97, 98, 100], True, None),  # nothing to leave out
        ([50, 9, 9, 9, 9, 9, 9, 9, 9, 9], False, None),  # flat: no axis to give it
        ([90, 40, 3, 2.5, 2, 2, 2, 2, 2, 2], False, (2 - 0.06, 3 + 0.15)),
    ],
    ids=["steep-start", "slow-start", "flat", "lower-is-better"],
)
def test_the_axis_looks_at_what_comes_after_the_steep_start(values, higher, expected):
    assert focus([a_band(values)], higher) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (big(7376), "7,376"),
        (big(64800), "64.8 k"),
        (big(25_557_032), "25.6 M"),
        (big(4_089_184_256), "4.09 G"),
        (big(9_999), "9,999"),
        (big(999_499), "999 k"),
        (big(999_500), "1 M"),
        (big(-999_999_999), "-1 G"),
        (big(1_234e12), "1,234 T"),
        (big(None), "—"),
        (rate(0.003), "0.30"),
        (rate(0.25), "25"),
        (rate(3.78e-7), "3.8e-5"),
        (rate(0.0), "0.0"),
        (duration(1.25), "1.2 s"),
        (duration(600), "10 min"),
        (duration(7260 * 3), "6 h 3 min"),
        (plus_minus(Stat(98.7037, 0.1604, 3), str), "98.70 ± 0.16"),
        (plus_minus(Stat(0.05242, 0.00709, 3), str), "0.0524 ± 0.0071"),
        (plus_minus(Stat(45.3, 12.3, 3), str), "45 ± 12"),
        (plus_minus(Stat(98.5, 1e-14, 3), str), "98.5 ± 0"),
        (plus_minus(Stat(98.5, None, 1), str), "98.5"),
        (unit_of("accuracy_top5").axis, "accuracy top5 (%)"),
        (unit_of("loss").axis, "loss (unitless)"),
        (unit_of("accuracy").number(math.nan), "—"),
    ],
    ids=str,
)
def test_how_numbers_are_written(written, expected):
    assert written == expected


@pytest.mark.parametrize(
    ("metric", "higher"),
    [("accuracy", True), ("accuracy_top5", True), ("bleu", True), ("loss", False), ("val_loss", False), ("epe", False)],
)
def test_which_way_is_better(metric, higher):
    assert curves.higher_is_better(metric) == higher
