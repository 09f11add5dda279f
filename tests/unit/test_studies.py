"""Studies as values: their rows can be run and differ in nothing but their subject; and what is made of finished runs, by hand."""

from __future__ import annotations

import csv
import dataclasses
import json
import resource
from pathlib import Path

import pytest
from scipy import stats

import nofm
from nofm.cli.campaign import facts_of, note, planned
from nofm.engine.config import ConfigError, EngineConfig, MethodConfig, RunConfig
from nofm.engine.resolve import differences, digest, to_dict
from nofm.engine.validate import check
from nofm.recipes import find
from nofm.recipes.studies import STUDIES, find_studies
from nofm.recipes.studies import table3 as table3_module
from nofm.recipes.study import run_name
from nofm.report import study_tables
from nofm.report.claims import Interval, difference, quantile, verdict
from nofm.report.errors import ReportError
from nofm.report.measures import MEASURES
from nofm.report.study import Measured, method_of, read_rows, runs_csv, watched_alone, write_study
from nofm.report.study_tables import claims_markdown, conditions, table_markdown, texts

BASES = ("cifar10/resnet20", "cifar10/resnet18", "imagenet/resnet18", "imagenet/resnet50", "digits")


@pytest.fixture
def images(tmp_path: Path) -> str:
    """Folders as ImageNet has them: all that `check` looks at."""
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
    return str(tmp_path)


def base(name: str, root: str):
    config = find(name)
    return config if config.data.name == "digits" else dataclasses.replace(config, data=dataclasses.replace(config.data, root=root))


REFUSED = {("regnet", "digits")}  # RegNets need larger images


@pytest.mark.parametrize(("study", "what"), [("table2", "ASP"), ("table3", "a lottery ticket")])
def test_rows_that_train_twice_say_which_schedule_they_need(study, what):
    with pytest.raises(ConfigError, match=f"schedule.kind = constant: {what} begins .* add --schedule.kind cosine"):
        STUDIES[study](edited(find("digits"), schedule_kind="constant"))


TASKS = ("detection", "segmentation", "flow", "translation")  # theirs are in tests/integration/test_study_tasks.py
MADE = [(study, name) for study in STUDIES if study not in TASKS for name in BASES if (study, name) not in REFUSED]


@pytest.mark.parametrize(("study", "name"), MADE)
def test_every_row_of_every_study_can_be_run(study, name, images):
    config = base(name, images)
    made = STUDIES[study](config)
    assert len(made.rows) > 1
    assert len({digest(to_dict(row.config)) for row in made.rows}) == len(made.rows), "no two rows are one configuration"
    for row in made.rows:
        check(row.config)
        # What a table compares is the method, the pattern, the network, and for methods that train twice the length.
        allowed: tuple[str, ...] = ("sparsity.", "model.name", "engine.epochs", "engine.steps", "schedule.restart")
        if study == "beyond":
            allowed = ("sparsity.", "optim.weight_decay", "schedule.warmup")
        for key, _, _ in differences(to_dict(config), to_dict(row.config)):
            assert key.startswith(allowed), (row.label, key)


PATTERNS_OF_50 = {
    "dense": "77.3", "SR-STE 2:4": "77.0", "STE 2:4": "76.4", "SR-STE 4:8": "77.4", "SR-STE 1:4": "75.3", "SR-STE 2:8": "76.2",
    "SR-STE 1:16": "71.5",
}  # fmt: skip
METHODS_OF_50 = {"dense": "77.3", "ASP, 1.67x epochs": "76.8", "STE 2:4": "76.4", "SR-STE 2:4": "77.0"}
LAMBDAS_OF_18 = {"lambda 0": "69.9", "lambda 0.0002": "71.2", "lambda -2e-05": "68.5"}
FORMS_OF_18 = {"STE": "69.9", "Eq. 4: weight": "71.2", "Eq. 5: sign": "about 70.8", "Eq. 6: gradient": "69.4"}
IN_PAPER = [  # its Tables 1 to 3, section 3.3, the last sentences of its appendix, and its tables of detection and segmentation
    ("table1", "imagenet/resnet50", "ResNet-50, ImageNet", {**PATTERNS_OF_50, "SR-STE 2:8, x1.25 as wide": "77.5"}),
    ("table1", "imagenet/resnet50x1.25", "ResNet-50 x1.25, ImageNet", {"SR-STE 2:8": "77.5"}),
    ("table1", "imagenet/resnet18", "ResNet-18, ImageNet", {"SR-STE 2:4": "71.2", "STE 2:4": "69.9"}),
    ("table1", "cifar10/resnet18", "ResNet-50, ImageNet", PATTERNS_OF_50),
    ("table2", "imagenet/resnet50", "ResNet-50, ImageNet", METHODS_OF_50),
    ("table2", "imagenet/resnet18", "ResNet-18, ImageNet", {"ASP, 1.67x epochs": "70.7", "STE 2:4": "69.9", "SR-STE 2:4": "71.2"}),
    ("table2", "cifar10/resnet20", "ResNet-50, ImageNet", METHODS_OF_50),
    ("fig4", "imagenet/resnet50", "ResNet-50, ImageNet, 2:4", {"dense": "77.3", "lambda 0": "76.4", "lambda 0.0002": "77.0"}),
    ("fig4", "imagenet/resnet18", "ResNet-18, ImageNet, 2:4", LAMBDAS_OF_18),
    ("fig4", "digits", "ResNet-18, ImageNet, 2:4", LAMBDAS_OF_18),
    ("appendix", "imagenet/resnet50", "ResNet-50, ImageNet, 2:4", {"STE": "76.4", "Eq. 4: weight": "77.0"}),
    ("appendix", "imagenet/resnet18", "ResNet-18, ImageNet, 2:4", FORMS_OF_18),
    ("appendix", "cifar10/resnet20", "ResNet-18, ImageNet, 2:4", FORMS_OF_18),
    ("detection", "coco/fasterrcnn", "Faster R-CNN R50-FPN, COCO, 1x", {"dense": "37.4", "SR-STE 2:4": "38.2", "SR-STE 2:8": "37.2"}),
    ("detection", "coco/fasterrcnn_2x", "Faster R-CNN R50-FPN, COCO, 2x", {"dense": "38.4", "SR-STE 2:4": "39.2", "SR-STE 2:8": "38.9"}),
    ("segmentation", "coco/maskrcnn", "Mask R-CNN R50-FPN, COCO, 1x", {"dense": "34.7", "SR-STE 2:4": "35.3", "SR-STE 2:8": "33.9"}),
    ("segmentation", "coco/maskrcnn_2x", "Mask R-CNN R50-FPN, COCO, 2x", {"dense": "35.4", "SR-STE 2:4": "35.9", "SR-STE 2:8": "35.4"}),
    ("segmentation", "nuclei/maskrcnn", "Mask R-CNN R50-FPN, COCO, 1x", {"dense": "34.7", "SR-STE 2:4": "35.3", "SR-STE 2:8": "33.9"}),
    ("flow", "flow/stamps", "RAFT, FlyingChairs", {"dense": "0.86", "SR-STE 2:4": "0.88"}),
    ("translation", "multi30k/small", "Transformer base, WMT14", {"dense": "27.31", "SR-STE 2:4": "27.23"}),
]


@pytest.mark.parametrize(("study", "name", "network", "numbers"), IN_PAPER, ids=lambda value: value if isinstance(value, str) else "")
def test_the_papers_numbers_are_of_the_network_that_is_trained_or_of_the_one_that_is_named(study, name, network, numbers, tmp_path):
    config = find(name)
    made = STUDIES[study](config)
    assert {row.label: row.paper for row in made.rows if row.paper} == numbers
    note(tmp_path, facts_of(study, made, config, name))
    facts = json.loads((tmp_path / "study.json").read_text())
    runs = {row["label"]: [line(row["label"], row["config"], 0, 0.5)] for row in facts["rows"]}
    assert table_markdown(facts, runs).splitlines()[0].endswith(f"| in the paper ({network}) |")


@pytest.mark.parametrize("study", ["table3", "regnet"])
def test_the_papers_rivals_and_regnets_are_of_imagenet(study):
    networks = {"table3": "ResNet-50, ImageNet", "regnet": "each row's network, ImageNet"}
    assert {STUDIES[study](find(f"imagenet/{name}")).paper_of for name in ("resnet18", "resnet50")} == {networks[study]}


def test_how_far_allocations_are_from_erk():
    """What the docstring of `beyond` says of the starting weights of ResNet-20."""
    import torch

    from nofm.tasks.models import build_model

    def patterns_beside_erk(budget: float) -> set[int]:
        found = set()
        for seed in range(4):
            torch.manual_seed(seed)
            model = build_model("cifar/resnet20", 10, 3)
            erk, other = (nofm.allocate_patterns(model, budget, by=by) for by in ("erk", "magnitude"))
            assert len(erk) == 18
            found.add(sum(erk[name] != other[name] for name in erk))
        return found

    assert (patterns_beside_erk(1 / 16), patterns_beside_erk(1 / 4)) == ({2}, {5, 9})


def table3(images: str, name: str = "cifar10/resnet20") -> dict[str, RunConfig]:
    config = base(name, images)
    return {row.label: row.config for row in STUDIES["table3"](config).rows}


@pytest.mark.parametrize("name", ["cifar10/resnet20", "cifar10/resnet18", "digits"])
def test_rivals_prune_the_layers_that_are_n_of_m(name, images):
    """So that a share of all sparse weights is a share of the same weights, and 93.75 % keeps what 1:16 does."""
    import torch

    from nofm import sites
    from nofm.engine.build import make_method, sparsified_
    from nofm.engine.problems import problem_of
    from nofm.methods.budget import allocate

    configs = table3(images, name)
    layers, equal = set(), 0
    for label, config in configs.items():
        with torch.device("meta"):
            model = problem_of(config).draft(config)
            sparsified_(model, config)
        layers.add(tuple(site.key for site in sites(model)))
        if "93.75" in label:
            method, shapes = make_method(config), [site.weight.shape for site in sites(model)]
            assert sum(allocate(shapes, method.sparsity, method.allocation)) * 16 == sum(shape.numel() for shape in shapes)
            equal += 1
    assert len(layers) == 1
    assert equal == 3
    assert "dnw" not in {config.sparsity.method.kind for config in configs.values()}, "which is ste_unstructured, number for number"


@pytest.mark.parametrize("count", [512, 1024])
def test_an_epoch_of_a_folder_is_as_long_as_its_images(count, images):
    """STR's decay is for the steps that a run has; where nobody can count them, it is ImageNet's, and the table says so."""
    config = dataclasses.replace(base("imagenet/resnet18", images), engine=EngineConfig(epochs=2, batch_size=256))
    study = STUDIES["table3"](config)
    assert any("taken for ImageNet's 1,281,167" in text for text in study.notes), "a folder without images"
    elsewhere = {row.label: row.config for row in study.rows}
    for i in range(count):
        (Path(images) / "train" / "cat" / f"{i}.JPEG").touch()
    table3_module._counted.cache_clear()
    study = STUDIES["table3"](config)
    assert not any("1,281,167" in text for text in study.notes)
    own, label = {row.label: row.config for row in study.rows}, "STR, exponent 9"
    assert own[label].sparsity.method.decay + 5e-5 == pytest.approx(9 / (count // 256 * 2 * 0.1 / 2 / 0.1), rel=1e-2)
    assert elsewhere[label].sparsity.method.decay + 5e-5 == pytest.approx(9 / (5004 * 2 * 0.1 / 2 / 0.1), rel=1e-2)
    by_steps = STUDIES["table3"](dataclasses.replace(config, engine=EngineConfig(steps=1000, batch_size=64)))
    assert {row.label: row.config for row in by_steps.rows}["SET 80 %"].sparsity.method.every == count // 64


def rates_and_method(config, steps_per_epoch):
    """The learning rate of every step of a run, and its method."""
    import torch

    from nofm.engine.build import make_method, make_optimizer
    from nofm.engine.schedule import Lengths, make_schedule

    lengths = Lengths(config, steps_per_epoch)
    method, optimizer = make_method(config, lengths), make_optimizer(config, [torch.zeros(1, requires_grad=True)])
    schedule, rates = make_schedule(config, optimizer, lengths), []
    for _ in range(lengths.total):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates, method


@pytest.mark.parametrize("name", ["cifar10/resnet20", "digits"])
def test_a_ticket_trains_on_by_the_rest_of_the_schedule(name, images):
    """Every training after the first has the learning rates of the first from the moment that it has gone back to."""
    rates, method = rates_and_method(table3(images, name)["lottery ticket 95 %"], 3)
    ends = [number for number in range(1, len(rates) + 1) if method._round(number)]
    assert len(ends) == method.rounds
    for begin, end in zip(ends, [*ends[1:], len(rates)], strict=True):
        assert rates[begin:end] == pytest.approx(rates[method.rewind_to : method.every], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("pattern", ["2:8", "1:16"])
@pytest.mark.parametrize("name", ["cifar10/resnet20", "digits"])
def test_n_of_m_as_long_as_a_ticket_differs_from_the_usual_row_by_its_length_alone(name, pattern, images):
    rows = table3(images, name)
    ticket, usual, longer = rows["lottery ticket 95 %"].engine, rows[f"SR-STE {pattern}"], rows[f"SR-STE {pattern}, as long as a ticket"]
    assert (longer.engine.epochs, longer.engine.steps) == (ticket.epochs, ticket.steps)
    assert (longer.engine.epochs or longer.engine.steps) > 4 * (usual.engine.epochs or usual.engine.steps)
    assert dataclasses.replace(longer, engine=usual.engine) == usual
    assert dataclasses.replace(longer.engine, epochs=usual.engine.epochs, steps=usual.engine.steps) == usual.engine


@pytest.mark.parametrize("row", ["ASP, same epochs", "ASP, 1.67x epochs"])
@pytest.mark.parametrize("name", ["cifar10/resnet20", "digits"])
def test_asp_trains_twice_by_the_whole_schedule(name, row, images):
    """The warm-up comes again too: at the full rate at once a pruned network loses what it has learned."""
    rates, method = rates_and_method({r.label: r.config for r in STUDIES["table2"](base(name, images)).rows}[row], 3)
    first, second = rates[: method.prune_at], rates[method.prune_at :]
    assert second[: len(first)] == pytest.approx(first, rel=1e-6, abs=1e-9)
    assert second[0] < max(second) / 2


def test_lambda_is_swept_at_2_of_4_beside_another_pattern(images):
    def patterns(name: str) -> list[str | None]:
        return [row.config.sparsity.pattern for row in STUDIES["fig4"](base(name, images)).rows]

    assert patterns("cifar10/resnet20").count("2:4") == 4
    assert set(patterns("cifar10/resnet18")) == {"2:4"}
    assert len(patterns("cifar10/resnet20")) == len(patterns("cifar10/resnet18")) + 4


def test_regnets_need_larger_images_than_digits():
    with pytest.raises(ValueError, match="RegNets halve an image three times at least"):
        STUDIES["regnet"](find("digits"))


def test_regnets_are_made_for_the_size_of_images(images):
    def networks(name: str) -> list[str]:
        return list(dict.fromkeys(row.config.model.name for row in STUDIES["regnet"](base(name, images)).rows))

    sizes = ("002", "004", "006", "008", "016", "032")
    assert networks("imagenet/resnet50") == [f"timm/regnetx_{size}" for size in sizes]
    assert networks("cifar10/resnet18") == [f"cifar/regnetx_{size}" for size in sizes]


def test_welch_by_hand():
    # Means 3 and 1, variances 1 and 4 over three values: standard error sqrt(5/3), 25/9 / ((1/9 + 16/9) / 2) = 2.94 degrees of freedom.
    found = difference([2.0, 3.0, 4.0], [-1.0, 1.0, 3.0])
    assert found is not None
    assert found.mean == pytest.approx(2.0)
    assert found.high - found.mean == pytest.approx(stats.t.ppf(0.975, 25 / 8.5) * (5 / 3) ** 0.5, rel=1e-5)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    assert difference([1.0], [1.0, 2.0]) is None


@pytest.mark.parametrize("freedom", [1.0, 1.01, 1.5, 2.0, 2.94, 4.0, 7.3, 20.0, 400.0])
def test_quantiles_of_students_t(freedom):
    assert quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-3 if freedom < 2 else 1e-6)


@pytest.mark.parametrize(
    ("task", "interval", "expected"),
    [
        ("classification", (-0.9, -0.1), "open, but worse"),
        ("classification", (0.1, 0.9), "open, but better"),
        ("classification", (-0.9, 0.1), "open"),
        ("classification", (-0.4, -0.1), "holds"),
        ("flow", (-0.3, -0.1), "open, but better"),
        ("flow", (0.02, 0.1), "open, but worse"),
    ],
)
def test_rows_that_are_not_level_and_not_apart_are_told_which_way(task, interval, expected):
    low, high = interval
    facts = {**FACTS, "task": task, "claims": [{**FACTS["claims"][0], "level": True}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_tables, "difference", lambda first, second: Interval((low + high) / 2, low, high))
        assert study_tables.judgements(facts, ROWS)["a is better"][2] == expected


@pytest.mark.parametrize(
    ("task", "metric", "level", "interval", "expected"),
    [
        ("classification", "score", False, Interval(1.0, 0.1, 1.9), "holds"),
        ("classification", "score", False, Interval(1.0, -0.1, 2.1), "open"),
        ("classification", "score", False, Interval(-1.0, -1.9, -0.1), "fails"),
        ("classification", "sad", False, Interval(-1.0, -1.9, -0.1), "holds"),
        ("classification", "sad", False, Interval(1.0, 0.1, 1.9), "fails"),
        ("classification", "train_loss", False, Interval(-0.02, -0.03, -0.01), "holds"),
        ("classification", "score", True, Interval(0.1, -0.2, 0.4), "holds"),
        ("classification", "score", True, Interval(0.1, -0.2, 0.6), "open"),
        ("classification", "score", True, Interval(-1.0, -1.2, -0.8), "fails"),
        ("classification", "score", False, None, ""),
        # An end-point error is better when lower.
        ("flow", "score", False, Interval(-0.1, -0.15, -0.05), "holds"),
        ("flow", "score", False, Interval(0.1, 0.05, 0.15), "fails"),
        ("flow", "score", True, Interval(0.2, 0.1, 0.3), "fails"),
        ("flow", "score", True, Interval(-0.2, -0.3, -0.1), "open"),
        ("flow", "score", True, Interval(0.01, -0.02, 0.04), "holds"),
        # A mAP lies between 0 and 1 and is shown in percent, where a point counts as level.
        ("detection", "score", True, Interval(0.0, -0.009, 0.009), "holds"),
        ("detection", "score", True, Interval(0.0, -0.02, 0.02), "open"),
    ],
)
def test_verdicts(task, metric, level, interval, expected):
    assert verdict({"metric": metric, "level": level}, interval, MEASURES[task]) == expected


def test_measures_are_the_headlines_of_the_tasks():
    from nofm.tasks.classification import Classification
    from nofm.tasks.detection import Detection, Segmentation
    from nofm.tasks.flow import OpticalFlow
    from nofm.tasks.translation import Translation

    tasks = {"classification": Classification, "detection": Detection, "segmentation": Segmentation}
    tasks |= {"flow": OpticalFlow, "translation": Translation}
    assert {kind: measure.name for kind, measure in MEASURES.items()} == {kind: task.headline for kind, task in tasks.items()}


def test_lengths_in_epochs_are_not_taken_for_steps_before_data_is_opened(images):
    """A probe of six epochs is long enough, though six steps would not be."""
    from nofm.engine.build import make_method

    config = edited(base("cifar10/resnet20", images), engine_epochs=60.0)
    row = next(row for row in STUDIES["beyond"](config).rows if "flip rate" in row.label)
    assert row.config.sparsity.method.probe == 6
    assert make_method(row.config).probe == 6000


# ---- which runs ----


def test_rows_of_several_studies_that_are_one_configuration_are_one_run(images):
    config = base("cifar10/resnet20", images)
    studies = find_studies(["all"], config)
    assert list(studies) == ["table1", "table2", "fig3", "fig4", "appendix", "kernels", "table3", "beyond", "regnet"]
    rows = planned(studies, config)  # raises where one name would have two configurations
    assert len(rows) == len({digest(to_dict(row.config)) for row in rows.values()})
    assert len(rows) <= sum(len(study.rows) for study in studies.values()) - 15
    assert not [name for name in rows if ":" in name or "/" in name or " " in name]
    assert list(rows)[:2] == ["dense-1of16", "srste-2of4-decay0.0016"]
    assert {"ste-1of16", "asp-2of4-prune-at50-restarts50-restart-warmup", "srste-budget0.0625-erk-decay0.0016-begin-at50"} <= set(rows)


def test_rows_can_be_chosen_and_left_out(images):
    config = base("cifar10/resnet20", images)
    studies = find_studies(["table3"], config)
    rows = planned(studies, config)
    left_out = set(rows) - set(planned(studies, config, without="*ticket*"))
    assert left_out == {name for name, row in rows.items() if row.config.engine != config.engine}  # those that are longer than the base
    assert len(left_out) == 4
    assert list(planned(studies, config, "dense|SR-STE 1:1?")) == ["dense-1of16", "srste-1of16-decay0.0016"]
    with pytest.raises(ConfigError, match=r"--rows SR: 'SR' matches none of 'dense', 'SR-STE 2:8'"):
        planned(studies, config, "SR", "dense")


def test_a_study_is_of_its_task():
    with pytest.raises(ConfigError, match=r"task\.kind = flow: this study is of classification"):
        find_studies(["table1"], find("flow/stamps"))
    assert list(find_studies(["all"], find("flow/stamps"))) == ["flow"]


def edited(config: RunConfig, **changes) -> RunConfig:
    for key, value in changes.items():
        group, _, name = key.partition("_")
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **{name: value})})
    return config


def test_a_digest_tells_configurations_apart_and_nothing_else():
    config = find("cifar10/resnet20")
    known = digest(to_dict(config))
    elsewhere = edited(
        config, data_root="/elsewhere", engine_keep=7, engine_checkpoint_every=3.0, engine_eval_every=5.0, engine_epochs=100.0
    )
    assert digest(to_dict(edited(elsewhere, engine_compile=True, engine_graph="off"))) == known, "the same training, by other code"
    assert digest(to_dict(dataclasses.replace(elsewhere, seed=3, out="x", device="cpu"))) == known
    older = to_dict(config)
    del older["sparsity"]["budget"], older["engine"]["keep"]  # written before these options were there
    assert digest(older) == known
    for changed in (edited(config, optim_lr=0.3), edited(config, engine_log_every=7), edited(config, engine_epochs=99)):
        assert digest(to_dict(changed)) != known


def test_run_names_say_what_differs_from_the_base():
    config = find("cifar10/resnet20")
    assert run_name(edited(config, schedule_warmup=20.0), config) == "srste-1of16-decay0.0016-warmup20"
    assert run_name(edited(config, model_name="cifar/resnet32"), config) == "srste-1of16-decay0.0016-cifar-resnet32"
    assert run_name(edited(config, data_flip=False), config) == "srste-1of16-decay0.0016-no-flip"


@pytest.mark.parametrize("method", nofm.METHODS)
@pytest.mark.parametrize(
    "shape", [{"sparsity_pattern": "1:1"}, {"sparsity_pattern": None, "sparsity_budget": 0.25}], ids=["pattern", "budget"]
)
def test_the_name_of_runs_tells_their_method(method, shape):
    config = find("cifar10/resnet20")
    assert method_of(run_name(edited(config, sparsity_method=MethodConfig(kind=method), **shape), config)) == method


# ---- lines of runs.csv ----

FACTS = {
    "format": 2, "name": "x", "title": "X", "task": "detection", "notes": [],
    "rows": [{"label": "a", "paper": "", "runs": "a", "config": "1"}, {"label": "b", "paper": "37", "runs": "b", "config": "2"}],
    "claims": [{"text": "a is better", "first": "a", "second": "b", "metric": "score", "level": False}],
}  # fmt: skip


def line(label: str, config: str, seed: int, score: float, **changes) -> Measured:
    numbers = {"sad": 1.5, "kept": 0.5, "params": 1000, "macs": 2e6, "epochs": 3.0, "seconds": 4.0}
    about = {"commit": "abc", "torch": "2", "hardware": "H"}
    run = Measured(label=label, seed=seed, config=config, metric="map", score=score, metrics={"map": score}, **numbers, **about)
    return dataclasses.replace(run, **changes)


ROWS = {
    "a": [line("a", "1", 0, 0.41), line("a", "1", 1, 0.43)],
    "b": [line("b", "2", seed, score, macs=None) for seed, score in enumerate((0.31, 0.3))],
}


def test_lines_come_back_as_they_were(tmp_path):
    (tmp_path / "runs.csv").write_text(runs_csv(ROWS))
    assert read_rows(tmp_path / "runs.csv", FACTS) == ROWS
    told = {"a": [line("a", "1", 0, 0.41, workdir_commit="def+", train_loss=0.25)], "b": []}
    (tmp_path / "runs.csv").write_text(runs_csv(told))
    assert read_rows(tmp_path / "runs.csv", FACTS) == told


SAD = "SAD: how many times a weight of a sparse layer changed between kept and pruned in the whole run, on average."


def test_what_a_search_has_found_is_in_the_lines_and_the_table(tmp_path):
    lambdas = ({"decay": 0.0012}, {"decay": 0.0014})
    rows = {**ROWS, "b": [dataclasses.replace(run, found=found) for run, found in zip(ROWS["b"], lambdas, strict=True)]}
    (tmp_path / "runs.csv").write_text(runs_csv(rows))
    assert (tmp_path / "runs.csv").read_text().splitlines()[0].endswith(",train_loss,found:decay,metric:map")
    assert read_rows(tmp_path / "runs.csv", FACTS) == rows
    cells = [[cell.strip() for cell in row.split("|")] for row in table_markdown(FACTS, rows).splitlines() if row.startswith("|")]
    column = cells[0].index("decay found")
    assert [row[column] for row in cells[2:]] == ["", "0.0013 ± 0.0001"]
    table = list(csv.DictReader(texts(FACTS, rows)["table.csv"].splitlines()))
    assert [row["found:decay"] for row in table] == ["", "0.0013"]
    assert float(table[1]["found:decay_sd"]) == pytest.approx(0.0002 / 2**0.5)
    for nothing in (table_markdown(FACTS, ROWS), table_markdown(FACTS, rows, brief=True), runs_csv(ROWS), texts(FACTS, ROWS)["table.csv"]):
        assert "found" not in nothing


def test_rows_that_are_one_training_are_said_to_be():
    """On digits an allocation by ERK gives both layers the pattern of the plain row: no second finding, though it has a row of its own."""
    twins = {"a": ROWS["a"], "b": [line("b", "2", seed, score) for seed, score in ((0, 0.41), (1, 0.43), (2, 0.5))]}
    said = 'Equal in all numbers of all seeds, so one training under two names: "b" is "a".'
    assert table_markdown(FACTS, twins).splitlines()[-2:] == ["", said], "where only one of them has a seed, that does not count"
    mixed = {**FACTS, "rows": [FACTS["rows"][0], {**FACTS["rows"][1], "pattern": None}]}
    assert table_markdown(mixed, twins).splitlines()[-1] == f"{said} A budget that gives every layer the same pattern mixes nothing."
    assert said in texts(FACTS, twins)["table.md"]
    assert said not in table_markdown(FACTS, twins, brief=True)
    others = (ROWS["b"], [*twins["b"][:1], line("b", "2", 1, 0.42)], [line("b", "2", 0, 0.41, sad=1.6)], [line("b", "2", 7, 0.41)], [])
    for other in others:
        assert "Equal" not in table_markdown(FACTS, {**twins, "b": other})


def test_a_table_says_which_masks_a_dense_row_was_watched_by():
    rows = [{**FACTS["rows"][0], "watched": "1:16"}, FACTS["rows"][1]]
    facts = {**FACTS, "sad_every": 97, "rows": rows}
    about = f"{SAD[:-1]}, counted every 97 steps."
    assert table_markdown(facts, ROWS).splitlines()[-1] == f"{about} For a: of the 1:16 masks that pruning would give."
    assert table_markdown(facts, ROWS, lambda label: label == "b").splitlines()[-1] == about, "only rows that are shown"
    assert table_markdown(facts, ROWS, brief=True).splitlines()[2:] == [
        "| a | 42.00 ± 1.41 | 50.0 % | 1.50 ± 0.00 (of 1:16 masks) | 2 |",
        "| b | 30.50 ± 0.71 | 50.0 % | 1.50 ± 0.00 | 2 |",
    ]


def test_multiply_adds_are_those_of_the_runs_that_tell_them():
    told = {**ROWS, "b": [*ROWS["b"], line("b", "2", 2, 0.3, macs=3e6), line("b", "2", 3, 0.3, macs=4e6)]}
    numbers = {row["row"]: row["macs"] for row in csv.DictReader(texts(FACTS, told)["table.csv"].splitlines())}
    assert numbers == {"a": "2000000.0", "b": "3500000.0"}
    assert "| 3.5 M |" in table_markdown(FACTS, told)


def test_the_training_loss_is_that_of_the_runs_that_tell_it():
    told = {**ROWS, "b": [line("b", "2", 0, 0.3), line("b", "2", 1, 0.3, train_loss=0.25), line("b", "2", 2, 0.3, train_loss=0.75)]}
    numbers = {
        row["row"]: (row["train_loss"], row["train_loss_sd"][:6]) for row in csv.DictReader(texts(FACTS, told)["table.csv"].splitlines())
    }
    assert numbers == {"a": ("", ""), "b": ("0.5", "0.3535")}
    assert "| 0.500 ± 0.354 |" in table_markdown(FACTS, told)
    assert "training loss" not in table_markdown(FACTS, ROWS), "a column that says nothing"
    fits = {**FACTS, "claims": [{**FACTS["claims"][0], "text": "a fits better", "metric": "train_loss"}]}
    assert "| a fits better |  |  | not measured yet |" in claims_markdown(fits, told), "none of the runs of a tells it"
    told["a"] = [line("a", "1", seed, 0.4, train_loss=0.5) for seed in range(2)]
    told["b"] = [line("b", "2", seed, 0.4, train_loss=loss) for seed, loss in enumerate((0.51, 0.51, 0.51))]
    assert "| a fits better | -0.010 (loss) | -0.010 to -0.010 | holds |" in claims_markdown(fits, told)
    assert "training loss" not in table_markdown(FACTS, told, brief=True)


@pytest.mark.parametrize(("pattern", "alone"), [("2:4", True), ("1:16", False)])
def test_the_sad_of_a_dense_row_stands_beside_masks_of_its_pattern_only(pattern, alone):
    rows = [{**FACTS["rows"][0], "watched": "1:16"}, {**FACTS["rows"][1], "pattern": pattern}]
    facts = {**FACTS, "rows": rows}
    assert watched_alone(rows) == ({"a"} if alone else set())
    of_masks = "of the 1:16 masks that pruning would give"
    told = f"not shown, since it is {of_masks}, and no other row has 1:16" if alone else of_masks
    assert table_markdown(facts, ROWS).splitlines()[-1] == f"{SAD} For a: {told}."
    cell = "" if alone else "1.50 ± 0.00 (of 1:16 masks)"
    assert table_markdown(facts, ROWS, brief=True).splitlines()[2] == f"| a | 42.00 ± 1.41 | 50.0 % | {cell} | 2 |"
    numbers = {row["row"]: row["sad"] for row in csv.DictReader(texts(facts, ROWS)["table.csv"].splitlines())}
    assert numbers == {"a": "" if alone else "1.5", "b": "1.5"}
    assert table_markdown(facts, {**ROWS, "b": []}, brief=True).count("1.50 ± 0.00 (of 1:16 masks)") == 1, "nothing to mistake it for"


@pytest.mark.parametrize(
    ("study", "recipe", "changes", "said"),
    [
        ("table1", "digits", {}, "digits"),
        ("table1", "cifar10/resnet20", {"model": "cifar/resnet32"}, "cifar10/resnet20, cifar/resnet32"),
        ("table1", "cifar10/resnet20", {"model": "cnn", "data": "folder"}, "cifar10/resnet20, cnn, folder"),
        ("regnet", "imagenet/resnet50", {}, ""),
    ],
    ids=["a recipe", "another network", "and other data", "several networks"],
)
def test_what_is_written_down_of_a_study_says_what_it_is_on(study, recipe, changes, said, tmp_path):
    config = find(recipe)
    config = dataclasses.replace(
        config, **{group: dataclasses.replace(getattr(config, group), name=name) for group, name in changes.items()}
    )
    note(tmp_path, facts_of(study, STUDIES[study](config), config, recipe))
    assert json.loads((tmp_path / "study.json").read_text())["on"] == said


@pytest.mark.parametrize(
    ("rates", "kinds", "said"),
    [((0.04,), ("constant",), "0.04, constant"), ((0.1, 0.2), ("cosine",), ""), ((0.1,), ("cosine", "step"), "")],
    ids=["one of all rows", "several rates", "several schedules"],
)
def test_what_is_written_down_of_a_study_says_its_learning_rate(rates, kinds, said, tmp_path):
    config = find("digits")
    made = STUDIES["table1"](config)
    rows = [
        dataclasses.replace(
            row,
            config=dataclasses.replace(
                row.config,
                optim=dataclasses.replace(row.config.optim, lr=rates[number % len(rates)]),
                schedule=dataclasses.replace(row.config.schedule, kind=kinds[number % len(kinds)]),
            ),
        )
        for number, row in enumerate(made.rows)
    ]
    note(tmp_path, facts_of("table1", dataclasses.replace(made, rows=tuple(rows)), config, "digits"))
    assert json.loads((tmp_path / "study.json").read_text())["rate"] == said


def test_what_is_written_down_of_a_study_names_the_masks_of_dense_rows(tmp_path):
    config = find("digits")  # whose pattern is 1:16
    note(tmp_path, facts_of("table1", STUDIES["table1"](config), config, "digits"))
    facts = json.loads((tmp_path / "study.json").read_text())
    assert {row["label"]: row["watched"] for row in facts["rows"] if "watched" in row} == {"dense": "1:16"}
    assert [row["pattern"] for row in facts["rows"][1:]] == [p for p in ("2:4", "4:8", "1:4", "2:8", "1:16") for _ in range(2)]
    assert facts["sad_every"] == config.engine.log_every


def test_tables_by_hand():
    assert table_markdown(FACTS, ROWS).splitlines() == [
        "|  | box mAP % | weights kept in sparse layers | parameters kept | multiply-adds kept | mask changes per weight (SAD) | seeds "
        "| in the paper, on its own network and data |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| a | 42.00 ± 1.41 | 50.0 % | 1,000 | 2 M | 1.50 ± 0.00 | 2 |  |",
        "| b | 30.50 ± 0.71 | 50.0 % | 1,000 |  | 1.50 ± 0.00 | 2 | 37 |",
        "",
        SAD,
    ]
    # Variances 2 and 0.5 of two values each: standard error sqrt(1.25), 1.25^2 / (1 + 1/16) = 1.47 degrees of freedom.
    half = stats.t.ppf(0.975, 25 / 17) * 1.25**0.5
    words = "holds: all of the interval is on the side that the claim says; fails: on the other; open: neither."
    cells = f"| a is better | +11.50 points | {11.5 - half:+.2f} to {11.5 + half:+.2f} | holds |"
    assert claims_markdown(FACTS, ROWS).splitlines()[2:] == [cells, "", words]
    level = {**FACTS, "claims": [{**FACTS["claims"][0], "level": True}]}
    alone = {label: runs[:1] for label, runs in ROWS.items()}
    assert claims_markdown(FACTS, alone) == "No claim can be judged yet: that takes two seeds or more of each of its rows (--seeds)."
    assert claims_markdown(level, ROWS).splitlines()[-1] == (
        f"{words} Level: all of it within ± 1; open, but worse: not all of it, and zero is not in it."
    )
    assert table_markdown(FACTS, ROWS, lambda label: label == "b", brief=True).splitlines()[2:] == [
        "| b | 30.50 ± 0.71 | 50.0 % | 1.50 ± 0.00 | 2 |"
    ]
    assert texts(FACTS, ROWS)["table.csv"].splitlines()[2].startswith("b,2,map,0.305,0.00707")


def test_conditions_tell_commits_from_installed_versions():
    sources = ["0123456789abcdef+", "nofm 0.1.0", None]
    runs = [line("a", "1", seed, 0.4, commit=source, workdir_commit="fedcba9876543210") for seed, source in enumerate(sources)]
    said = "H; torch 2; nofm 0.1.0; commit 0123456789ab+; started in a repository at fedcba987654; seeds 0, 1, 2. "
    assert conditions({"a": runs}).startswith(said)
    assert conditions({"a": [runs[1]]}).startswith("H; torch 2; nofm 0.1.0; started")
    assert conditions(ROWS).startswith("H; torch 2; commit abc; seeds 0, 1. ")


def test_masks_have_their_boxes_beside_them():
    runs = [line("a", "1", 0, 0.5, metric="ema_mask_map", metrics={"ema_mask_map": 0.5, "ema_map": 0.6, "map": 0.1})]
    shown = table_markdown({**FACTS, "task": "segmentation"}, {"a": runs, "b": []}).splitlines()
    assert shown[0].startswith("|  | mask mAP % | box mAP % | weights")
    assert shown[2].startswith("| a | 50.00 | 60.00 | 50.0 % |")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a": [line("a", "3", 0, 0.5)]}, r"runs\.csv, line 2: 'a' was made by configuration 3, and is 1 now"),
        ({"c": [line("c", "1", 0, 0.5)]}, r"runs\.csv, line 2: x has no row 'c' any more"),
    ],
    ids=["another configuration", "another row"],
)
def test_lines_of_another_study_are_refused(rows, message, tmp_path):
    (tmp_path / "runs.csv").write_text(runs_csv(rows))
    with pytest.raises(ReportError, match=message):
        read_rows(tmp_path / "runs.csv", FACTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [("label,seed\na,0\n", "line 2: has no 'config'"), (runs_csv(ROWS).replace("0.41", "x", 1), "line 2: a number is expected")],
)
def test_files_that_are_no_runs_are_refused(text, message, tmp_path):
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(ReportError, match=message):
        read_rows(tmp_path / "runs.csv", FACTS)


def test_lines_of_a_neighbour_are_taken_by_their_configuration(tmp_path):
    """Two studies share a row under two labels; only one of them has the line."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "study.json").write_text("{}")
    (tmp_path / "one" / "runs.csv").write_text(runs_csv({"other name": [line("other name", "2", 5, 0.25)]}))
    (tmp_path / "two" / "study.json").write_text(json.dumps(FACTS))
    write_study(tmp_path / "two", tmp_path / "runs")
    assert read_rows(tmp_path / "two" / "runs.csv", FACTS) == {"a": [], "b": [line("b", "2", 5, 0.25)]}


def test_a_full_disk_leaves_the_lines_of_before(tmp_path):
    """They may be all that is left of runs whose folders are elsewhere."""
    study, before = tmp_path / "one", runs_csv(ROWS)
    study.mkdir()
    (study / "study.json").write_text(json.dumps(FACTS))
    (study / "runs.csv").write_text(before)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(ReportError, match=r"one/runs\.csv: cannot be written: File too large"):
            write_study(study, tmp_path / "runs")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (study / "runs.csv").read_text() == before
    assert sorted(path.name for path in study.iterdir()) == ["runs.csv", "study.json"]


def test_a_study_without_finished_runs_says_so(tmp_path):
    with pytest.raises(ReportError, match=r"study\.json.*nofm study"):
        write_study(tmp_path, tmp_path / "runs")
    (tmp_path / "study.json").write_text(json.dumps(FACTS))
    with pytest.raises(ReportError, match="no run of this study is finished yet"):
        write_study(tmp_path, tmp_path / "runs")
