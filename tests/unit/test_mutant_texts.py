"""Mutants break contracts on purpose (`make mutants`). One whose text is gone from the source would break nothing, unnoticed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src" / "nofm"
FILES = sorted((TESTS / "mutants").glob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_mutant_changes_one_place_and_names_tests_that_are_there(file):
    for mutant in tomllib.loads(file.read_text())["mutant"]:
        source = (SOURCE / mutant["file"]).read_text()
        assert source.count(mutant["find"]) == 1, mutant["name"]
        if mutant["file"].endswith(".py"):  # what cannot be read would be caught by every test
            compile(source.replace(mutant["find"], mutant["replace"]), mutant["name"], "exec")
        assert mutant["find"] != mutant["replace"], mutant["name"]
        for test in mutant["tests"]:
            path, *names = test.partition("[")[0].split("::")
            text = (TESTS.parent / path).read_text()
            assert not names or f"def {names[-1]}(" in text, (mutant["name"], test)
