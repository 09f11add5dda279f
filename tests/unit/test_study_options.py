"""Sparsity options of `nofm study`: those by which no row would be trained are refused, and nothing else is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nofm.cli.main import main
from nofm.cli.options import parse
from nofm.cli.without_effect import check_sparsity
from nofm.engine.config import ConfigError
from nofm.recipes import find
from nofm.recipes.studies import find_studies

NOTHING = "would be trained by it, since rows set how they are sparse themselves; leave it out"
COUNTING = "sparsity.pattern, sparsity.preset, sparsity.skip, sparsity.axis, sparsity.method.decay, sparsity.method.placement"

REFUSED = [
    ("table2", "--sparsity.method.refine sign", "--sparsity.method.refine sign"),
    ("table2", "--sparsity.method.probe 50", "--sparsity.method.probe 50.0"),
    ("table2", "--sparsity.method.begin-at 5", "--sparsity.method.begin_at 5.0"),
    ("table2", "--sparsity.budget 0.25 --sparsity.pattern none", "--sparsity.budget 0.25"),
    ("table2", "--sparsity.pattern none", "--sparsity.pattern none"),  # rows without one would have 2:4
    ("beyond fig4", "--sparsity.pattern none", "--sparsity.pattern none"),  # as mixed rows have of their own, and fig4 would have 2:4
    ("table2", "--sparsity.method.kind ste", "--sparsity.method.kind ste"),  # a row has it anyway, and SR-STE's lambda would be another
    ("appendix", "--sparsity.method.refine sign", "--sparsity.method.refine sign"),
    ("table1", "--sparsity.rules *=2:4", '--sparsity.rules ["*=2:4"]'),
    ("table3", "--sparsity.method.drop 0.9", "--sparsity.method.drop 0.9"),
    ("table3", "--sparsity.method.drop 2", "--sparsity.method.drop 2.0"),
    ("table3", "--sparsity.method.seed 0", "--sparsity.method.seed 0"),  # that of seed 0, and of no other
    ("fig3 fig4", "--sparsity.method.decay 1e-3", "--sparsity.method.decay 0.001"),
]


@pytest.mark.parametrize(("studies", "options", "said"), REFUSED, ids=lambda value: value)
def test_an_option_that_is_that_of_no_row_is_refused(studies, options, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["study", *studies.split(), "--on", "digits", "--out", "x", *options.split()]) == 2
    *complaints, counting = capsys.readouterr().err.strip().removeprefix("nofm: ").splitlines()
    assert f"{said}: no row of {', '.join(studies.split())} {NOTHING}" in complaints
    assert len(complaints) == options.count("--")
    assert counting.startswith("sparsity options that count there: sparsity.pattern, sparsity.preset, sparsity.skip, ")
    assert not any(tmp_path.iterdir())


def refusal(studies: str, options: list[str], recipe: str = "digits") -> str:
    """What is said to it, or nothing."""
    names, own = studies.split(), find(recipe)
    base, _, origins = parse(recipe, own, options)
    try:
        check_sparsity(list(find_studies(names, base)), base, own, origins)
    except ConfigError as error:
        return str(error)
    return ""


ACCEPTED = [
    ("table2", "--sparsity.pattern 2:8"),
    ("table2", "--sparsity.method.decay 1e-3"),
    ("table2", "--sparsity.method.decay none"),  # the library's own
    ("table2", "--sparsity.method.placement decoupled"),
    ("table2", "--sparsity.axis flat --sparsity.preset paper --sparsity.skip conv1 conv2"),
    ("table2", "--sparsity.method.kind srste --sparsity.pattern 1:16 --sparsity.budget none"),  # as the recipe has it
    ("table2", "--sparsity.method.refine weight"),  # as SR-STE has it where nothing is said
    ("table3", "--sparsity.method.drop 0.3"),  # as RigL has it
    ("fig4 appendix", "--sparsity.method.decay 1e-3"),  # which only one of them takes
    ("all", "--sparsity.method.decay 1e-3"),
    ("table2", "--sparsity.method.decay auto --sparsity.method.probe 50 --sparsity.method.target 1e-3"),
    ("fig3", "--optim.lr 0.05 --engine.steps 12"),
]


@pytest.mark.parametrize(("studies", "options"), ACCEPTED, ids=lambda value: value)
def test_an_option_that_counts_or_changes_nothing_is_accepted(studies, options):
    assert refusal(studies, options.split()) == ""


def test_a_search_goes_by_what_was_typed():
    """A short run is told to give `probe`, so it must be possible to."""
    base, *_ = parse("digits", find("digits"), ["--sparsity.method.decay", "auto", "--sparsity.method.probe", "50"])
    methods = {row.label: row.config.sparsity.method for row in find_studies(["table2"], base)["table2"].rows}
    assert (methods["SR-STE 2:4"].decay, methods["SR-STE 2:4"].probe) == ("auto", 50)
    assert methods["STE 2:4"].probe is None


def test_what_counts_is_told():
    assert refusal("table1", ["--sparsity.method.refine", "sign"]).splitlines()[-1] == f"sparsity options that count there: {COUNTING}"
    assert "decay" not in refusal("fig3", ["--sparsity.method.refine", "sign"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[sparsity.method]\nrefine = "sign"\n', "mine.toml:2 sparsity.method.refine = sign: no row of table2"),
        ('sparsity = {method = {refine = "sign"}}\n', "sparsity.method.refine = sign: no row of table2"),
        ('[sparsity]\npattern = "2:8"\n[sparsity.method]\nkind = "srste"\ndecay = 1e-3\n', ""),
    ],
    ids=["a table", "in one line", "what counts"],
)
def test_a_file_is_looked_at_as_options_are(text, said, tmp_path: Path):
    (tmp_path / "mine.toml").write_text(text)
    found = refusal("table2", ["--config", str(tmp_path / "mine.toml")])
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_what_a_recipe_says_is_nobodys_option():
    """A recipe of another kind would not have its own words held against the user."""
    own = find("digits")
    other = dataclasses.replace(own, sparsity=dataclasses.replace(own.sparsity, rules=("*=2:4",)))
    check_sparsity(["table2"], other, own, {})
