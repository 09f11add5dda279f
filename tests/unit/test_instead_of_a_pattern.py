"""Rules or a budget that are given stand instead of the recipe's pattern, and this is said. Nothing is trained here.

Beside a pattern that is given, too, they are an error: tests/integration/test_bad_configs.py.
"""

from __future__ import annotations

import json

import pytest

import nofm.engine.train
from nofm.cli.main import main
from nofm.cli.options import parse
from nofm.engine.resolve import to_dict
from nofm.recipes import find

RULES = ["--sparsity.rules", "conv3=1:4", "*=2:4"]


@pytest.fixture
def trained(monkeypatch):
    """The configurations that would be trained."""
    configs = []
    monkeypatch.setattr(nofm.engine.train, "train", lambda config, *args, **kwargs: configs.append(config))
    return configs


@pytest.mark.parametrize(
    ("options", "rules", "budget", "said"),
    [
        (RULES, ("conv3=1:4", "*=2:4"), None, "sparsity.rules instead of the recipe's sparsity.pattern 1:16\n"),
        (RULES[:2], ("conv3=1:4",), None, "sparsity.pattern 1:16; layers that no rule matches stay dense\n"),
        (["--sparsity.budget", "0.25"], (), 0.25, "sparsity.budget instead of the recipe's sparsity.pattern 1:16\n"),
        ([*RULES, "--sparsity.pattern", "none"], ("conv3=1:4", "*=2:4"), None, ""),
    ],
    ids=["rules", "rules for some layers", "budget", "a pattern that is unset by hand"],
)
def test_what_is_given_stands_instead_of_the_recipes_pattern(options, rules, budget, said, tmp_path, trained, capsys):
    assert main(["train", "digits", "--out", str(tmp_path), *options]) == 0
    (config,) = trained
    assert (config.sparsity.pattern, config.sparsity.rules, config.sparsity.budget) == (None, rules, budget)
    shown = capsys.readouterr().out
    assert shown.endswith(said) if said else shown == ""


def test_of_a_file_too(tmp_path, trained, capsys):
    (tmp_path / "run.toml").write_text('[sparsity]\nrules = ["*=2:4"]\n')
    assert main(["train", "digits", "--config", str(tmp_path / "run.toml"), "--out", str(tmp_path)]) == 0
    assert (trained[0].sparsity.pattern, trained[0].sparsity.rules) == (None, ("*=2:4",))
    assert "instead of the recipe's sparsity.pattern 1:16" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--sparsity.rules"], ["--sparsity.budget", "none"], ["--sparsity.skip", "conv3"]], ids=" ".join)
def test_the_recipes_pattern_stays_where_nothing_stands_instead(options, tmp_path, trained, capsys):
    assert main(["train", "digits", "--out", str(tmp_path), *options]) == 0
    assert trained[0].sparsity.pattern == "1:16"
    assert capsys.readouterr().out == ""


def test_rows_of_a_study_keep_the_pattern_of_their_base():
    """They have patterns of their own, which no rules of a command stand instead of: the same command makes the runs that it made."""
    base, *_ = parse("digits", find("digits"), RULES)
    assert base.sparsity.pattern == "1:16"


def test_a_run_that_is_gone_on_with_has_what_it_was_started_with(tmp_path, trained, capsys):
    config, *_ = parse("digits", find("digits"), [*RULES, "--sparsity.pattern", "none"])
    (tmp_path / "run.json").write_text(json.dumps({"config": to_dict(config), "command": [], "recipe": "digits"}))
    assert main(["resume", str(tmp_path)]) == 0
    assert trained[0].sparsity == config.sparsity
    assert capsys.readouterr().out == ""
