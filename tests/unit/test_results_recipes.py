"""The commands on the pages of results/ are those of the committed runs: resolved without training, they come to the very configurations
(digests) whose numbers are in the tables. A recipe, a study or a default that is changed later would make other runs by the same words."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nofm.cli.campaign import facts_of, planned
from nofm.cli.options import parse
from nofm.cli.study import _wishes
from nofm.cli.without_effect import check_sparsity
from nofm.engine.resolve import digest, to_dict
from nofm.recipes import find
from nofm.recipes.studies import find_studies

RESULTS = Path(__file__).parents[2] / "results"


@dataclass(frozen=True)
class Told:
    """A command on a page: how it begins there; or a change to one that the page tells in words, and these words."""

    page: str
    begins: str
    said: str = ""
    instead: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> str:
        [line] = [line for line in printed(self.page) if line.startswith(self.begins)]
        return line

    def words(self) -> tuple[str, ...]:
        """What follows `nofm study`."""
        words = shlex.split(self.line(), comments=True)[2:]
        for key, value in self.instead.items():
            words[words.index(key) + 1] = value
        return tuple(words)


def told(page: str, *beginnings: str) -> tuple[Told, ...]:
    return tuple(Told(page, f"nofm study {beginning}") for beginning in beginnings)


_18, _20 = "cifar10-resnet18", "cifar10-resnet20"
_RIVALS_OF_18 = "nofm study table3 --on"

# Each folder of results, and the commands that made its runs; those that it shares with a folder beside it are by the commands of that.
# The study is in the folder's name.
FOLDERS: dict[str, tuple[Told, ...]] = {
    "bccd-fasterrcnn/detection": told("bccd-fasterrcnn", "detection"),
    "cifar10-resnet18/appendix": told(_18, "appendix fig4"),
    "cifar10-resnet18/fig4": told(_18, "table1 table2 fig4", "appendix fig4"),
    "cifar10-resnet18/table1": told(_18, "table1 table2 fig4"),
    "cifar10-resnet18/table2": told(_18, "table1 table2 fig4"),
    "cifar10-resnet18/table3": (
        *told(_18, "table3 --on"),
        Told(_18, _RIVALS_OF_18, '(Seed 3: `--seeds 4 --rows "SR-STE 1:16"`', {"--seeds": "4", "--rows": "SR-STE 1:16"}),
        Told(
            _18,
            _RIVALS_OF_18,
            '`--seeds 1 --rows "STR, exponent 0.3|STR, exponent 4|STR, exponent ?0"`',
            {"--seeds": "1", "--rows": "STR, exponent 0.3|STR, exponent 4|STR, exponent ?0"},
        ),
    ),
    "cifar10-resnet18-rate-0.1/table1": told(_18, "table1 --on"),
    "cifar10-resnet20/appendix": told(_20, "table3 fig4 appendix"),
    "cifar10-resnet20/beyond": told(_20, "table2 table3 fig4 beyond"),
    "cifar10-resnet20/fig3": told(_20, "table1 --on"),
    "cifar10-resnet20/fig4": told(_20, "table3 fig4 appendix", "table2 table3 fig4 beyond"),
    "cifar10-resnet20/table1": told(_20, "table1 --on"),
    "cifar10-resnet20/table2": told(_20, "table2 --on", "table2 table3 fig4 beyond"),
    "cifar10-resnet20/table3": told(_20, "table3 --on", "table3 fig4 appendix", "table2 table3 fig4 beyond"),
    "cifar10-resnet20-10-steps-rate-0.004/fig3": (Told(_20, "nofm study fig3 --on", "At 0.004, about what", {"--optim.lr": "0.004"}),),
    "cifar10-resnet20-10-steps-rate-0.04/fig3": told(_20, "fig3 --on"),
    "cifar10-resnet20-5-epochs/kernels": told(_20, "kernels --on"),
    "flow-stamps/flow": told("flow-stamps", "flow"),
    "multi30k-small/translation": told("multi30k-small", "translation"),
    "nuclei-maskrcnn/segmentation": told("nuclei-maskrcnn", "segmentation"),
}

# Of the overview, which leaves evaluations to the pages: its beginnings, and the folders that they are about.
OVERVIEW = {"nofm study table1 --on cifar10/resnet20": _20, "nofm study table1 --on cifar10/resnet18": _18}


@cache
def printed(page: str) -> tuple[str, ...]:
    """The commands that train, as a page prints them, each on one line."""
    blocks = re.findall(r"^```\n(.*?)^```", (RESULTS / page / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = (line for block in blocks for line in block.replace("\\\n", " ").splitlines())
    return tuple(line for line in lines if line.startswith("nofm study") and " --on " in line)


Facts = dict[str, Any]


def facts_by(words: tuple[str, ...], study: str) -> Facts:
    """What a study is by the options of a command, which may be another's, as study.json has it."""
    _, wishes, base, _ = resolved(words)
    facts: Facts = json.loads(json.dumps(facts_of(study, find_studies([study], base)[study], base, wishes.on)))
    return facts


@cache
def trained(words: tuple[str, ...]) -> set[tuple[str, int]]:
    """Which runs it makes, by configuration and seed."""
    names, wishes, base, seeds = resolved(words)
    rows = planned(find_studies(names, base), base, wishes.rows, wishes.without).values()
    return {(digest(to_dict(row.config)), seed) for row in rows for seed in range(base.seed, base.seed + seeds)}


@cache
def resolved(words: tuple[str, ...]) -> tuple[tuple[str, ...], Any, Any, int]:
    """Studies, wishes, base and number of seeds: what `nofm study` makes of a command before it looks at folders."""
    count = next(i for i, word in enumerate(words) if word.startswith("-"))
    wishes, rest = _wishes(list(words[count:]))
    base, options, _ = parse(wishes.on, find(wishes.on), rest)
    return words[:count], wishes, dataclasses.replace(base, out=None), options.seeds


def committed(folder: str) -> Facts:
    facts: Facts = json.loads((RESULTS / folder / "study.json").read_text())
    return facts


def lines(folder: str) -> list[dict[str, str]]:
    with (RESULTS / folder / "runs.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_folder_has_its_command_and_every_command_its_folder():
    assert set(FOLDERS) == {
        file.parent.relative_to(RESULTS).as_posix() for name in ("runs.csv", "study.json") for file in RESULTS.rglob(name)
    }
    known = {(each.page, each.line()) for made_by in FOLDERS.values() for each in made_by}
    assert known == {(page.parent.name, line) for page in RESULTS.glob("*/README.md") for line in printed(page.parent.name)}


def test_what_is_told_in_words_is_on_its_page():
    for each in (each for made_by in FOLDERS.values() for each in made_by):
        assert bool(each.said) == bool(each.instead)
        assert each.said in (RESULTS / each.page / "README.md").read_text()


@pytest.mark.parametrize("folder", FOLDERS)
def test_commands_come_to_the_committed_configurations(folder):
    """And to what else stands there of the study: claims, notes, and what the paper has for each row."""
    for each in FOLDERS[folder]:
        made = facts_by(each.words(), folder.partition("/")[2])
        assert made["rows"] == committed(folder)["rows"], each
        assert made == committed(folder), each


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_committed_run_is_one_that_a_command_makes(folder):
    configs = {row["label"]: row["config"] for row in committed(folder)["rows"]}
    beside = [made_by for other, made_by in FOLDERS.items() if other.partition("/")[0] == folder.partition("/")[0]]
    made = set().union(*(trained(each.words()) for made_by in beside for each in made_by))
    for line in lines(folder):
        assert line["config"] == configs[line["label"]]
        assert (line["config"], int(line["seed"])) in made, f"no command makes {line['label']}, seed {line['seed']}"


@pytest.mark.parametrize("page", sorted({each.page for made_by in FOLDERS.values() for each in made_by}))
def test_no_command_has_a_sparsity_option_that_does_nothing(page):
    for line in printed(page):
        words = tuple(shlex.split(line, comments=True)[2:])
        names, wishes, base, _ = resolved(words)
        _, rest = _wishes(list(words[len(names) :]))
        check_sparsity(names, base, find(wishes.on), parse(wishes.on, find(wishes.on), rest)[2])


def test_the_overview_counts_the_rows_that_were_not_run():
    said = re.search(
        r"of the (\d+) rows of `beyond` more than one seed of (\d+), and (\d+) not at all", (RESULTS / "README.md").read_text()
    )
    assert said is not None
    runs = Counter(line["label"] for line in lines("cifar10-resnet20/beyond"))
    rows = [runs[row["label"]] for row in committed("cifar10-resnet20/beyond")["rows"]]
    assert tuple(map(int, said.groups())) == (len(rows), rows.count(1), rows.count(0))


@pytest.mark.parametrize("begins", OVERVIEW)
def test_the_overview_has_the_same_commands(begins):
    [line] = re.findall(rf"`({re.escape(begins)} [^`]*)`", (RESULTS / "README.md").read_text())
    words = tuple(shlex.split(line)[2:])
    for folder in (folder for folder in FOLDERS if folder.startswith(f"{OVERVIEW[begins]}/")):
        assert facts_by(words, folder.partition("/")[2])["rows"] == committed(folder)["rows"], folder
