"""`nofm study`: trains all rows and seeds, goes on after an interruption, skips what is finished, writes the table and the figure."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import nofm
from nofm.cli.main import main
from nofm.engine import machine
from nofm.engine import train as engine_train
from nofm.version import __version__

SHORT = ("--engine.steps", "12", "--schedule.warmup", "2", "--engine.eval_every", "6", "--engine.log_every", "3")


def study(names: str, out: Path, *more: str) -> int:
    return main(["study", *names.split(), "--on", "digits", "--out", str(out), *SHORT, *more])


def table(folder: Path) -> dict[str, dict[str, str]]:
    return {row["row"]: row for row in csv.DictReader((folder / "table.csv").open())}


def lines(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "runs.csv").open()))


def test_a_study_from_start_to_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "source_commit", lambda: None)  # as where nofm is installed
    monkeypatch.setattr(machine, "workdir_commit", lambda: "fedcba98+")
    assert study("fig3", tmp_path, "--seeds", "2") == 0
    rows = table(tmp_path / "fig3")
    assert list(rows) == ["dense", "STE 1:16"]
    for row in rows.values():
        assert row["n"] == "2"
        assert row["metric"] == "accuracy"
        assert float(row["score_sd"]) >= 0
    runs = lines(tmp_path / "fig3")
    accuracies = [float(run["score"]) for run in runs if run["label"] == "dense"]
    assert float(rows["dense"]["score"]) == pytest.approx(sum(accuracies) / 2)
    final = json.loads((tmp_path / "runs" / "dense-1of16" / "seed-1" / "events.jsonl").read_text().splitlines()[-1])
    assert accuracies[1] == final["metrics"]["accuracy"] == float(runs[1]["metric:accuracy"])
    assert float(runs[1]["metric:loss"]) == final["metrics"]["loss"]
    assert (runs[1]["commit"], runs[1]["workdir_commit"]) == (f"nofm {__version__}", "fedcba98+")
    assert (float(rows["dense"]["kept"]), float(rows["STE 1:16"]["kept"])) == (1, 1 / 16)
    # 6,912 weights in sparse layers, each used in 3 x 3 or 4 x 4 places; the first convolution and the classifier are dense.
    assert float(rows["dense"]["macs"]) > 4 * float(rows["STE 1:16"]["macs"]) > 0
    assert float(rows["dense"]["params"]) - float(rows["STE 1:16"]["params"]) == 6912 * 15 / 16
    claims = list(csv.DictReader((tmp_path / "fig3" / "claims.csv").open()))
    assert claims[0]["verdict"] in ("holds", "fails", "open")
    assert (tmp_path / "fig3" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "| dense |" in capsys.readouterr().out


def test_two_processes_make_the_runs_that_one_makes(tmp_path, capfd):
    assert study("fig3", tmp_path / "one") == 0
    assert study("fig3", tmp_path / "two", "--processes", "2") == 0
    one, two = ({name: row["score"] for name, row in table(tmp_path / part / "fig3").items()} for part in ("one", "two"))
    assert one == two
    assert "[2/2] STE 1:16, seed 0: accuracy" in capfd.readouterr().out.rpartition("2 to go")[2], "each says when it ends"
    before = (tmp_path / "two" / "runs" / "dense-1of16" / "seed-0" / "run.json").stat().st_mtime_ns
    assert main(["study", "fig3", "--out", str(tmp_path / "two"), "--processes", "2"]) == 0
    assert (tmp_path / "two" / "runs" / "dense-1of16" / "seed-0" / "run.json").stat().st_mtime_ns == before


@pytest.fixture
def made(monkeypatch) -> list[Path]:
    """The folders of the runs that are trained, as training begins."""
    real, found = engine_train._training, []
    monkeypatch.setattr(engine_train, "_training", lambda job, stop: found.append(job.out) or real(job, stop))
    return found


def test_it_goes_on_where_it_was_interrupted_and_skips_what_is_finished(tmp_path, made, monkeypatch, capsys):
    real = engine_train._training

    def dying(job, stop):
        if len(made) == 2:
            raise KeyboardInterrupt
        return real(job, stop)

    with monkeypatch.context() as patch:
        patch.setattr(engine_train, "_training", dying)
        assert study("fig3", tmp_path, "--seeds", "2") == 130
    made.clear()
    assert study("fig3", tmp_path, "--seeds", "2") == 0
    assert "2 runs are finished, 2 to go" in capsys.readouterr().out
    assert len(made) == 2
    made.clear()
    assert study("fig3", tmp_path, "--seeds", "2") == 0
    assert not made
    assert {row["n"] for row in table(tmp_path / "fig3").values()} == {"2"}


@pytest.mark.parametrize("order", ["seed", "row"])
def test_studies_share_runs_of_one_configuration(order, tmp_path, made):
    """STE stands in both; in the order of the studies, seed by seed or row by row."""
    assert study("fig3 appendix", tmp_path, "--seeds", "2", "--rows", "*[Ed]*", "--without", "[Ed]*[!d]", "--order", order) == 0
    pairs = [("ste-1of16", 0), ("srste-1of16-decay0.005-decoupled", 0), ("ste-1of16", 1), ("srste-1of16-decay0.005-decoupled", 1)]
    pairs = pairs if order == "seed" else sorted(pairs, key=lambda pair: pair[0], reverse=True)
    assert [(run.parent.name, int(run.name[-1])) for run in made] == pairs
    ste = [run["score"] for run in lines(tmp_path / "fig3") if run["label"] == "STE 1:16"]
    assert ste == [run["score"] for run in lines(tmp_path / "appendix") if run["label"] == "STE"]
    assert len(ste) == 2


def test_only_some_rows_and_only_the_table(tmp_path):
    assert study("fig4", tmp_path, "--rows", "lambda 0") == 0
    assert list(table(tmp_path / "fig4")) == ["lambda 0"]
    (tmp_path / "fig4" / "table.csv").unlink()
    assert study("fig4", tmp_path, "--table") == 0
    assert list(table(tmp_path / "fig4")) == ["lambda 0"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fig5"], "'fig5' is no study; there are table1, "),
        (["fig3", "--out", "x"], "study: --on is missing"),
        (
            ["fig3", "--out", "x", "--table"],
            "--out x: no such folder, and --table writes the tables of runs that are there; to train them, nofm",
        ),
        (["fig3", "--on", "digits", "--out=x", "--table"], "to train them, nofm study fig3 --on digits --out x"),
        (["fig3", "--on", "digits", "--out", ".", "--table"], "--out .: has no runs (runs/NAME/seed-N), and --table writes"),
        (["fig3", "--on", "digit", "--out", "x"], "'digit' is no recipe"),
        (["fig3", "--on", "flow/chairs", "--out", "x"], "task.kind = flow: this study is of classification"),
        (["--on", "digits", "--out", "x"], "study: say which; there are table1, "),
        (["fig3", "--on", "digits", "--out", "x", "--limit", "soon"], "--limit soon: must be minutes, a number above 0"),
        (["fig3", "--on", "digits", "--out", "x", "--order", "rows"], "--order rows: must be seed or row"),
        (["fig3", "--on", "digits"], "study: say where its runs go: --out DIR"),
        (["fig3", "--on", "digits", "--out", "x", "--lanes", "0"], "--lanes 0: must be a whole number above 0"),
        (["fig3", "--on", "digits", "--out", "x", "--processes", "two"], "--processes two: must be a whole number above 0"),
        (["fig3", "--on", "digits", "--out", "x", "--rows", "SRSTE*"], "--rows SRSTE*: 'SRSTE*' matches none of 'dense', 'STE 1:16'"),
        (["fig3", "--on", "digits", "--out", "x", "--rows", "dense|2e-4"], "--rows dense|2e-4: '2e-4' matches none of 'dense', 'STE 1:16'"),
        (["fig3", "--on", "digits", "--out", "x", "--without", "RigL"], "--without RigL: 'RigL' matches none of 'dense', 'STE 1:16'"),
        (["fig3", "--on", "digits", "--out", "x", "--without", "*"], "--rows * --without *: leaves no row"),
        (["fig3", "--on", "digits", "--out", "x", "--engine.epoch", "3"], "--engine.epoch: no such option"),
        (
            ["fig4", "--on", "digits", "--out", "x", "--optim.lr", "200"],
            "nofm: 'lambda 0.0064', '2:4, lambda 0.0064': sparsity.method.decay = 0.0064: must be below 1 / optim.lr = 0.005",
        ),
        (["fig4", "--on", "digits", "--out", "x", "--optim.lr", "-1"], "nofm: optim.lr = -1.0: must be lr > 0"),  # of all rows
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_commands_say_what_is_wrong(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["study", *args]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.fixture
def imagenet(tmp_path) -> list[str]:
    """Options for a few noisy images, laid out as ImageNet is, and a few steps of them."""
    noise = np.random.default_rng(0)
    for part, count in (("train", 4), ("val", 2)):
        for name in ("n01440764", "n01443537"):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(noise.integers(0, 255, (40, 48, 3), dtype=np.uint8)).save(folder / f"{i}.JPEG")
    options = f"--data.root {tmp_path}/images --data.size 32 --engine.epochs 2 --engine.batch_size 4 --engine.workers 0 --schedule.warmup 1"
    options += " --engine.log_every 1 --device cpu --engine.precision fp32 --engine.threads 1 --engine.checkpoint_every 2"
    return options.split()


def test_a_regnet_on_images_as_imagenet_lays_them_out(tmp_path, imagenet):
    command = ["study", "regnet", "--on", "imagenet/regnetx_002", "--out", str(tmp_path / "s"), "--rows", "RegNetX002*", *imagenet]
    assert main(command) == 0
    assert list(table(tmp_path / "s" / "regnet")) == ["RegNetX002 dense", "RegNetX002 SR-STE 2:4", "RegNetX002 STE 2:4"]


def test_mixed_patterns_by_sensitivity_on_images_as_imagenet_lays_them_out(tmp_path, imagenet):
    """Whose recipes all read images in loader processes."""
    rows = [f"{pattern}, mixed by {way}" for pattern in ("1:16", "1:4") for way in ("magnitude", "sensitivity")]
    command = ["study", "beyond", "--on", "imagenet/resnet18", "--out", str(tmp_path / "s"), "--rows", "|".join(rows), *imagenet]
    assert main(command) == 0
    found = table(tmp_path / "s" / "beyond")
    assert list(found) == rows
    first = 9_408 / 11_166_912  # of the weights are the first convolution's, which no pattern divides
    for row, share in zip(rows, (1 / 16, 1 / 16, 1 / 4, 1 / 4), strict=True):
        assert 0.95 * share < float(found[row]["kept"]) - first <= share, row
    assert len({found[row]["macs"] for row in rows}) == 4, "each allocation is another one"


@pytest.fixture
def cifar(tmp_path) -> list[str]:
    """Records as CIFAR-10's binary files have them, and two steps in which to look at them."""
    noise, root = np.random.default_rng(0), tmp_path / "cifar"
    root.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        records = noise.integers(0, 256, (12, 3073), dtype=np.uint8)  # a byte for the class, then the image
        records[:, 0] %= 10
        (root / f"{name}.bin").write_bytes(records.tobytes())
    options = f"--data.root {root} --engine.epochs none --engine.steps 2 --engine.batch_size 8 --engine.log_every 1 --engine.eval_every 2"
    return f"{options} --schedule.warmup 1 --engine.checkpoint_every 2 --engine.threads 1 --device cpu".split()


def test_a_regnet_on_images_as_cifar_10_lays_them_out(tmp_path, cifar):
    command = ["study", "regnet", "--on", "cifar10/resnet18", "--out", str(tmp_path / "s"), "--rows", "RegNetX002 SR-STE 2:4", *cifar]
    assert main(command) == 0
    (run,) = tmp_path.glob("s/runs/*/seed-0")
    assert json.loads((run / "run.json").read_text())["config"]["model"]["name"] == "cifar/regnetx_002"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "train"] == [1, 2]
    row = table(tmp_path / "s" / "regnet")["RegNetX002 SR-STE 2:4"]
    # Ten classes instead of a thousand, and half of all convolutions but the first, of three channels, is kept.
    assert float(row["params"]) == 2_684_792 - 990 * 369 - (2_294_944 - 32 * 3 * 9) / 2
    report = nofm.verify(run / "model.safetensors")
    assert sum(str(weight.pattern) == "2:4" for weight in report.weights) == 43, "13 blocks of three, four short cuts"


def test_resnet32_trains_by_its_recipe(tmp_path, cifar):
    assert main(["train", "cifar10/resnet32", "--out", str(tmp_path / "run"), *cifar]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["cost"]["params"] == 464_154


def test_a_row_of_table_1_on_images_as_imagenet_lays_them_out(tmp_path, imagenet, capsys):
    command = ["study", "table1", "--on", "imagenet/resnet18", "--out", str(tmp_path / "s"), "--rows", "SR-STE 2:4", *imagenet]
    assert main(command) == 0
    assert list(rows := table(tmp_path / "s" / "table1")) == ["SR-STE 2:4"]
    # All convolutions but the first are sparse, and there are two classes instead of a thousand.
    convolutions, plain = 11_157_504, 11_689_512 - 998 * 513
    assert float(rows["SR-STE 2:4"]["params"]) == plain - convolutions / 2
    assert (float(rows["SR-STE 2:4"]["kept"]), rows["SR-STE 2:4"]["paper"]) == (0.5, "71.2")
    assert "in the paper (ResNet-18, ImageNet)" in capsys.readouterr().out
    report = nofm.verify(tmp_path / "s" / "runs" / "srste-2of4-decay0.0002" / "seed-0" / "model.safetensors")
    assert sum(str(weight.pattern) == "2:4" for weight in report.weights) == 19, "as many convolutions are N:M in its file"


def test_finished_runs_of_other_options_are_not_mixed_in(tmp_path, capsys):
    assert study("fig3", tmp_path / "s") == 0
    for only in ((), ("--table",)):
        assert study("fig3", tmp_path / "s", "--optim.lr", "0.05", *only) == 2
        message = capsys.readouterr().err
        assert "dense-1of16/seed-0 was made with optim.lr = 0.1, and now it is 0.05. Give the old options" in message
        assert "another --out" in message


def test_a_report_of_a_folder_of_runs(tmp_path, capsys):
    assert study("fig3", tmp_path / "s") == 0
    assert main(["report", str(tmp_path / "s")]) == 0
    assert "ste" in capsys.readouterr().out


def test_a_report_counts_what_was_kept_in_the_end(tmp_path, capsys):
    options = [
        "--sparsity.method.kind",
        "gmp",
        "--sparsity.pattern",
        "1:1",
        "--sparsity.method.end_at",
        "8",
        "--sparsity.method.every",
        "4",
    ]
    assert main(["train", "digits", "--out", str(tmp_path / "run"), *SHORT, *options]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run")]) == 0
    # 90 % of 6,912 weights are pruned; 144 of the first convolution and 320 of the classifier stay.
    assert f"{100 * (691 + 144 + 320) / (6912 + 144 + 320):.1f} %" in capsys.readouterr().out
