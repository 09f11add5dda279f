"""Ctrl-C in commands that train nothing: one line, exit code 130, and every file as it was or whole."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nofm.cli.main import main

SHORT = ["--engine.steps", "12", "--engine.log_every", "4", "--engine.threads", "1", "--schedule.warmup", "3", "--model.width", "16"]
SAID = "nofm: interrupted\n"
SAID_OF_FILES = "nofm: interrupted; no file is half-written, give the same command again\n"


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("interrupted") / "study"
    assert main(["study", "fig3", "--on", "digits", "--rows", "STE*", "--out", str(out), *SHORT]) == 0
    return out


@pytest.fixture(scope="module")
def run(study) -> Path:
    return study / "runs" / "ste-1of16" / "seed-0"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def code(*args: str) -> int | str:
    """The command's exit code. An interruption that gets through would end all tests, not one."""
    try:
        return main(args)
    except KeyboardInterrupt:
        return "a traceback"


def interrupt(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "at", "said"),
    [
        ("recipes", "nofm.recipes.listed", SAID),
        ("report {run}", "nofm.report.html.load", SAID_OF_FILES),
        ("check {run}", "nofm.verify", SAID),
        ("analyse {run}", "nofm.masks.differing", SAID),
        ("cost cnn --input 1 8 8", "nofm.cost", SAID),
        ("evaluate {run} --name again", "nofm.engine.evaluate.planned", SAID_OF_FILES),
        ("study fig3 --out {study} --table", "nofm.report.study.write_study", SAID_OF_FILES),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else None,
)
def test_a_command_is_interrupted(command, at, said, study, run, monkeypatch, capsys):
    before = contents(study)
    with monkeypatch.context() as patched:
        patched.setattr(at, interrupt)
        assert code(*command.format(run=run, study=study).split()) == 130
        assert capsys.readouterr().err == said
        assert code(*command.format(run=run, study=study).split(), "--debug") == "a traceback"
    assert contents(study) == before


def test_a_report_is_interrupted_between_its_files(run, tmp_path, monkeypatch, capsys):
    page = tmp_path / "report.html"
    assert main(["report", str(run), "--out", str(page)]) == 0
    whole = contents(tmp_path)
    for path in whole:
        path.write_text("of before")
    replace, replaced = Path.replace, []

    def only_the_first(self: Path, target: Path) -> Path:
        replaced.append(target)
        return replace(self, target) if len(replaced) == 1 else interrupt()

    monkeypatch.setattr(Path, "replace", only_the_first)
    assert code("report", str(run), "--out", str(page)) == 130
    assert capsys.readouterr().err == SAID_OF_FILES
    assert contents(tmp_path) == {path: whole[path] if path == page else b"of before" for path in whole}


def test_a_figure_is_interrupted(study, monkeypatch, capsys):
    """After the first bytes of the picture have gone out."""
    monkeypatch.setattr("PIL.ImageFile._save", interrupt)
    before = contents(study)
    assert before[study / "fig3" / "figure.png"].endswith(b"IEND\xaeB`\x82")
    assert code("study", "fig3", "--out", str(study), "--table") == 130
    assert capsys.readouterr().err == SAID_OF_FILES
    assert contents(study) == before


def test_ctrl_c_while_tables_are_looked_for(study, monkeypatch, capsys):
    """Where a run is trained a signal is only noted at this place, for the loop to see; --table has no loop."""

    def signalled(*args: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("nofm.cli.study.check_runs", signalled)
    assert code("study", "fig3", "--out", str(study), "--table") == 130
    assert capsys.readouterr().err == SAID_OF_FILES


# ---- a process of its own, and a signal from outside ----


def waiting(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A report of `folder` that has begun to read a file which never ends; and the end of that which holds it open."""
    (folder / "evaluations").mkdir()
    os.mkfifo(folder / "evaluations" / "endless.json")
    process = subprocess.Popen([sys.executable, "-m", "nofm", "report", str(folder)], stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        try:
            return process, os.open(folder / "evaluations" / "endless.json", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # which says that nobody has opened it yet
                raise
            time.sleep(0.02)
    raise AssertionError(f"the report has read no evaluation: {process.communicate()[1]}")


def test_a_real_ctrl_c(run, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("run.json", "events.jsonl"):
        (tmp_path / "run" / name).write_bytes((run / name).read_bytes())
    process, held = waiting(tmp_path / "run")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    os.close(held)
    assert (process.returncode, said) == (130, SAID_OF_FILES)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["evaluations", "events.jsonl", "run.json"]


def test_ctrl_c_ends_the_reader_of_a_pipe_too():
    """What is printed by then has nowhere to go, and nothing is said of that."""
    script = """
import sys
from nofm.cli.main import main

def interrupted(*args):
    print("half of the list")
    raise KeyboardInterrupt

import nofm.recipes
nofm.recipes.listed = interrupted
sys.exit(main(["recipes"]))
"""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True, env=env)
    os.close(writer)
    assert (result.returncode, result.stderr) == (130, SAID)
