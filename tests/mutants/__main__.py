"""Breaks the library on purpose, one line at a time, and sees that a test notices: `make mutants`.

Each `*.toml` beside this file lists mutants: a contract, a file under src/nofm, a text that occurs in it once, what to put in its
place, and the tests that must fail then. A mutant that survives is a contract without a test, and the command fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def load() -> list[dict]:
    return [mutant for file in sorted(HERE.glob("*.toml")) for mutant in tomllib.loads(file.read_text())["mutant"]]


def survives(mutant: dict) -> str | None:
    """None if the tests fail as they should, else what happened."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        target = source / "nofm" / mutant["file"]
        text = target.read_text()
        if text.count(mutant["find"]) != 1:
            return f"its text occurs {text.count(mutant['find'])} times, not once"
        target.write_text(text.replace(mutant["find"], mutant["replace"]))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant["tests"]]
        env = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if result.returncode == 1:  # tests ran and failed
            return None
        return "the tests pass" if result.returncode == 0 else f"pytest could not run:\n{result.stdout[-2000:]}{result.stderr[-2000:]}"


def main() -> int:
    wanted = sys.argv[1:]
    mutants = [m for m in load() if not wanted or any(word in f"{m['contract']} {m['name']}" for word in wanted)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = 0
        for mutant, trouble in zip(mutants, pool.map(survives, mutants), strict=True):
            failures += trouble is not None
            print(
                f"{'SURVIVES' if trouble else 'caught  '}  {mutant['contract']:4} {mutant['name']}" + (f": {trouble}" if trouble else ""),
                flush=True,
            )
    print(f"{len(mutants) - failures} of {len(mutants)} mutants caught")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
