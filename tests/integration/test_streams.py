"""What becomes of a command whose output nobody takes: the reader has gone, the disk behind it is full, or there never was one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nofm.cli.main import main

TRAIN = ["train", "digits", "--engine.steps", "40", "--schedule.warmup", "5", "--engine.log_every", "1", "--out"]


def nofm(*args: str, redirected: str) -> subprocess.CompletedProcess[str]:
    """Run a command under a shell that does `redirected` with it; the exit code is the command's own, not that of who reads it."""
    command = f'set -o pipefail; "$0" -m nofm "$@" {redirected}'
    return subprocess.run(["bash", "-c", command, sys.executable, *args], capture_output=True, text=True)


@pytest.mark.parametrize(
    "redirected",
    [
        pytest.param("| head -n 1", id="reader gone"),
        pytest.param(">/dev/full", id="disk full", marks=pytest.mark.slow),
        pytest.param(">&-", id="closed", marks=pytest.mark.slow),
    ],
)
def test_a_run_does_not_end_with_its_output(redirected: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = nofm(*TRAIN, str(out), redirected=redirected)
    assert result.returncode == 0, result.stderr
    assert (out / "model.safetensors").is_file(), "exit code 0 of a run that is not finished"
    said = "nofm: stdout: No space left on device; nothing more is shown, and the run goes on\n"
    assert result.stderr == (said if "full" in redirected else "")


@pytest.mark.parametrize("args", [["recipes"], ["--help"]], ids=" ".join)
@pytest.mark.parametrize(
    ("redirected", "code", "message"),
    [("| head -c 1", 0, ""), (">&-", 0, ""), (">/dev/full", 2, "nofm: No space left on device\n")],
    ids=["reader gone", "closed", "disk full"],
)
def test_a_command_that_only_prints_ends_without_a_traceback(args: list[str], redirected: str, code: int, message: str) -> None:
    result = nofm(*args, redirected=redirected)
    assert (result.returncode, result.stderr) == (code, message)


def test_what_a_file_system_refuses_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(tmp_path / ("a" * (os.pathconf(tmp_path, "PC_NAME_MAX") + 1)))
    assert main(["check", name]) == 2
    assert capsys.readouterr().err == f"nofm: {name}/run.json: File name too long\n"
