"""`nofm study`: trains all rows and seeds, goes on after an interruption, skips what is finished, writes the table and the figure."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nofm.cli.main import main
from nofm.engine import train as engine_train

SHORT = ("--engine.steps", "12", "--schedule.warmup", "2", "--engine.eval_every", "6", "--engine.log_every", "3")


def study(name: str, out: Path, *more: str) -> int:
    return main(["study", name, "--on", "digits", "--out", str(out), *SHORT, *more])


def table(out: Path) -> dict[str, dict[str, str]]:
    return {row["row"]: row for row in csv.DictReader((out / "table.csv").open())}


def test_a_study_from_start_to_table(tmp_path, capsys):
    assert study("fig3", tmp_path / "s", "--seeds", "2") == 0
    rows = table(tmp_path / "s")
    assert list(rows) == ["dense", "STE 1:16"]
    for row in rows.values():
        assert row["n"] == "2"
        assert float(row["accuracy_sd"]) >= 0
    runs = list(csv.DictReader((tmp_path / "s" / "runs.csv").open()))
    accuracies = [float(run["accuracy"]) for run in runs if run["label"] == "dense"]
    assert float(rows["dense"]["accuracy"]) == pytest.approx(sum(accuracies) / 2)
    final = json.loads((tmp_path / "s" / "dense" / "seed-1" / "events.jsonl").read_text().splitlines()[-1])
    assert accuracies[1] == final["metrics"]["accuracy"]
    assert float(rows["dense"]["kept"]) == 1
    assert float(rows["STE 1:16"]["kept"]) == 1 / 16
    claims = list(csv.DictReader((tmp_path / "s" / "claims.csv").open()))
    assert claims[0]["verdict"] in ("holds", "fails", "open")
    assert (tmp_path / "s" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "| dense |" in capsys.readouterr().out


def test_it_goes_on_where_it_was_interrupted_and_skips_what_is_finished(tmp_path, monkeypatch, capsys):
    real, made = engine_train._training, []

    def dying(job, stop):
        made.append(job.out)
        if len(made) == 3:
            raise KeyboardInterrupt
        return real(job, stop)

    monkeypatch.setattr(engine_train, "_training", dying)
    with pytest.raises(KeyboardInterrupt):
        study("fig3", tmp_path / "s", "--seeds", "2")
    assert len(made) == 3
    monkeypatch.setattr(engine_train, "_training", lambda job, stop: made.append(job.out) or real(job, stop))
    made.clear()
    assert study("fig3", tmp_path / "s", "--seeds", "2") == 0
    assert "2 runs are finished, 2 to go" in capsys.readouterr().out
    assert len(made) == 2
    made.clear()
    assert study("fig3", tmp_path / "s", "--seeds", "2") == 0
    assert not made
    assert {row["n"] for row in table(tmp_path / "s").values()} == {"2"}


def test_only_some_rows_and_only_the_table(tmp_path):
    assert study("fig4", tmp_path / "s", "--rows", "lambda 0") == 0
    assert list(table(tmp_path / "s")) == ["lambda 0"]
    (tmp_path / "s" / "table.csv").unlink()
    assert study("fig4", tmp_path / "s", "--table") == 0
    assert list(table(tmp_path / "s")) == ["lambda 0"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fig5"], "'fig5' is no study; there are table1, "),
        (["fig3", "--out", "x"], "study: --on is missing"),
        (["fig3", "--on", "digit", "--out", "x"], "'digit' is no recipe"),
        (["fig3", "--on", "flow/chairs", "--out", "x"], "--on flow/chairs: its task is flow, and studies compare accuracies"),
        (["fig3", "--on", "digits"], "study: say where its runs go: --out DIR"),
        (["fig3", "--on", "digits", "--out", "x", "--lanes", "0"], "--lanes 0: must be a whole number above 0"),
        (["fig3", "--on", "digits", "--out", "x", "--rows", "SRSTE*"], "--rows SRSTE*: matches none of dense, STE 1:16"),
        (["fig3", "--on", "digits", "--out", "x", "--engine.epoch", "3"], "--engine.epoch: no such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_commands_say_what_is_wrong(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["study", *args]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_regnet_on_images_as_imagenet_lays_them_out(tmp_path):
    noise = np.random.default_rng(0)
    for part, count in (("train", 4), ("val", 2)):
        for name in ("n01440764", "n01443537"):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(noise.integers(0, 255, (40, 48, 3), dtype=np.uint8)).save(folder / f"{i}.JPEG")
    options = ["--data.root", str(tmp_path / "images"), "--data.size", "32", "--engine.epochs", "2", "--engine.batch_size", "4"]
    options += [
        "--engine.workers",
        "0",
        "--schedule.warmup",
        "1",
        "--engine.log_every",
        "1",
        "--device",
        "cpu",
        "--engine.precision",
        "fp32",
    ]
    options += ["--engine.threads", "1", "--engine.checkpoint_every", "2"]
    command = ["study", "regnet", "--on", "imagenet/regnetx_002", "--out", str(tmp_path / "s"), "--rows", "RegNetX002*", *options]
    assert main(command) == 0
    assert list(table(tmp_path / "s")) == ["RegNetX002 dense", "RegNetX002 SR-STE 2:4", "RegNetX002 STE 2:4"]


def test_finished_runs_of_other_options_are_not_mixed_in(tmp_path, capsys):
    assert study("fig3", tmp_path / "s") == 0
    assert main(["study", "fig3", "--on", "digits", "--out", str(tmp_path / "s"), *SHORT, "--sparsity.pattern", "2:4"]) == 2
    message = capsys.readouterr().err
    assert "is finished, with sparsity.pattern = 1:16, and now it is 2:4" in message
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
