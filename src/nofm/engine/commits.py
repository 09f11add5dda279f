"""Which code made a run: the commit of nofm's own sources, and that of the folder that the user works in.

The two are different questions. A user who works in a repository of their own wants its commit beside their numbers, but it says nothing
of nofm; and an installed nofm has no commit at all, only its version, even where the environment that it is installed in lies inside a
repository. So sources count as a checkout only if git tracks them.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

__all__ = ["PACKAGE", "source_commit", "workdir_commit"]

PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def source_commit(package: Path = PACKAGE) -> str | None:
    """The commit that the package is checked out at, with a + if its repository has changes; None where it is installed.

    Asked once: what this process has loaded does not change with the checkout.
    """
    tracked = _git(package, "ls-files", "--error-unmatch", "version.py") is not None
    return _described(package) if tracked else None


def workdir_commit(package: Path = PACKAGE) -> str | None:
    """The commit of the working folder, where that is a repository and not the one that the package is checked out from."""
    folder = Path()  # not `cwd()`, which raises where somebody has removed it
    here = _git(folder, "rev-parse", "--show-toplevel")
    if here is None or (source_commit(package) is not None and here == _git(package, "rev-parse", "--show-toplevel")):
        return None
    return _described(folder)


def _described(folder: Path) -> str | None:
    return _git(folder, "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *words: str) -> str | None:
    """What git says of a folder; None where it has nothing to say: no repository, no commit yet, no git."""
    # Inside a hook of git's, variables name a repository, and would name it for every folder.
    env = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
    try:
        git = ["git", "-C", str(folder), *words]
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=5, env=env).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
