"""Which commit a run is said to be made by: nofm's own, whatever folder the command is given in, and the user's beside it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from nofm.engine.commits import PACKAGE, source_commit, workdir_commit


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True).stdout.strip()


def repository(folder: Path, file: str) -> str:
    """A repository with one file in it; returns its commit."""
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text("first")
    git(folder, "init", "-q")
    git(folder, "add", file)
    git(folder, "commit", "-qm", folder.name)
    return git(folder, "rev-parse", "HEAD")


def installed(folder: Path) -> Path:
    """The package as pip leaves it somewhere."""
    package = folder / "site-packages" / "nofm"
    package.mkdir(parents=True)
    shutil.copy(PACKAGE / "version.py", package)
    return package


@pytest.fixture(autouse=True)
def fresh():
    source_commit.cache_clear()
    yield
    source_commit.cache_clear()


def test_a_checkout_has_its_own_commit_and_the_users_stands_beside_it(tmp_path, monkeypatch):
    ours, theirs = repository(tmp_path / "nofm", "src/nofm/version.py"), repository(tmp_path / "theirs", "train.sh")
    package = tmp_path / "nofm" / "src" / "nofm"
    monkeypatch.chdir(tmp_path / "theirs")
    assert (source_commit(package), workdir_commit(package)) == (ours, theirs)
    (tmp_path / "theirs" / "train.sh").write_text("second")
    assert (source_commit(package), workdir_commit(package)) == (ours, f"{theirs}+")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "theirs" / ".git"))  # as in a hook of theirs
    source_commit.cache_clear()
    assert source_commit(package) == ours
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.chdir(tmp_path / "nofm" / "src")
    assert (source_commit(package), workdir_commit(package)) == (ours, None), "the same repository is not told twice"
    (package / "version.py").write_text("second")
    assert source_commit(package) == ours, "of the code that was loaded"
    source_commit.cache_clear()
    assert source_commit(package) == f"{ours}+"


def test_an_installed_version_has_no_commit_even_inside_a_repository(tmp_path, monkeypatch):
    theirs = repository(tmp_path / "theirs", "train.sh")
    package = installed(tmp_path / "theirs" / ".venv")
    monkeypatch.chdir(tmp_path / "theirs")
    assert (source_commit(package), workdir_commit(package)) == (None, theirs)


def test_no_repository_and_no_git(tmp_path, monkeypatch):
    package = installed(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert (source_commit(package), workdir_commit(package)) == (None, None)
    monkeypatch.setenv("PATH", "")
    assert (source_commit(), workdir_commit()) == (None, None)


def test_a_working_folder_that_is_gone_has_none(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert workdir_commit(installed(tmp_path)) is None
