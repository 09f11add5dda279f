"""What the pages show can be typed: the guide's code and the command line's first run are run, other commands read as nofm reads them."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import nofm
from nofm.cli.main import main
from nofm.cli.options import parse
from nofm.cli.study import _wishes
from nofm.cli.without_effect import check_sparsity
from nofm.errors import NofmError
from nofm.recipes import RECIPES, find
from nofm.recipes.studies import find_studies

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


def blocks(page: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)  # all, so that an end is no start
    return [block for written_in, block in fenced if written_in == language]


def commands(page: str) -> list[list[str]]:
    """Every `nofm COMMAND ...` of a page, in prose, in a table or in a block."""
    prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks(page, "") for line in block.splitlines() if line.startswith("nofm ")]
    lines += re.findall(r"`(nofm [a-z][^`\n]*)`", prose)
    return [[word for word in shlex.split(line, comments=True)[1:] if word != "..."] for line in lines]


def misread(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with a command, or nothing: its recipe, studies and options are looked up, nothing is trained."""
    name, *rest = words
    try:
        if name == "train" and rest and rest[0] in RECIPES:
            parse(rest[0], find(rest[0]), rest[1:])
        elif name == "study" and "--on" in rest:
            count = next(i for i, word in enumerate(rest) if word.startswith("-"))
            wishes, options = _wishes(rest[count:])
            base, _, typed = parse(wishes.on, find(wishes.on), options)
            check_sparsity(list(find_studies(rest[:count], base)), base, find(wishes.on), typed)
        elif main([name, "--help"]) != 0:
            return f"no command {name}"
    except NofmError as error:
        return str(error)
    told = capsys.readouterr().out
    return " ".join(word for word in rest if word.startswith("--") and told and word not in told)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one_that_nofm_knows(page, capsys):
    for words in commands(page):
        assert misread(words, capsys) == "", shlex.join(words)


def test_commands_are_found_where_pages_have_them():
    found = [shlex.join(words) for words in commands("docs/command-line.md")]
    assert {"train digits --out runs/srste --seeds 2", "check FILE --pattern 2:4", "resume DIR"} <= set(found)  # of a block, a table, prose


@pytest.mark.parametrize(
    "line", ["tain digits", "train digits --optim.rate 1", "study table9 --on digits", "study table1 --on digit", "check FILE --everything"]
)
def test_a_command_that_nofm_does_not_know_is_noticed(line, capsys):
    assert misread(line.split(), capsys) != ""


def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    guide = "\n".join(blocks("docs/guide.md", "python"))
    exec(compile(guide, "docs/guide.md", "exec", dont_inherit=True), {})
    assert "weights are N:M" in capsys.readouterr().out


def test_the_first_run_of_the_command_line_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [first_run, *_] = blocks("docs/command-line.md", "")
    for line in first_run.splitlines():
        assert main(shlex.split(line)[1:]) == 0, line
    assert (tmp_path / "runs/report.html").exists()
    assert (tmp_path / "runs/srste/seed-0/model.packed.safetensors").exists()


def test_the_page_on_how_it_is_built_names_every_file_of_the_core_and_every_room():
    page, source = (ROOT / "docs/design.md").read_text(), ROOT / "src/nofm"
    files = {path.name for room in (source, source / "methods") for path in room.glob("*.py") if not path.name.startswith("__")}
    rooms = {f"{path.name}/" for path in source.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {name for name in (files | rooms) - {"_names.py", "version.py"} if name not in page} == set()
    named = set(re.findall(r"([a-z_]+\.(?:py|c))\b", page))
    assert {name for name in named if not list(source.rglob(name))} == set()


def test_the_reference_has_every_public_name_as_the_code_describes_it():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    listed = [name for names in reference.GROUPS.values() for name in names]
    assert sorted([*listed, *reference.ELSEWHERE]) == sorted(nofm.__all__)
    assert reference.page() == (ROOT / "docs/reference.md").read_text(), "python docs/reference.py writes it"
