"""Every link of a page to another file of the project, and to a heading there, leads somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return _CODE.sub("", page.read_text())


def anchor(heading: str) -> str:
    """As GitHub makes them: small letters, no punctuation, a hyphen for each space."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, heading = link.partition("#")
        there = page.parent / path if path else page
        if re.match(r"[a-z]+:", link):
            continue
        if not there.exists() or (heading and heading not in map(anchor, re.findall(r"^#+ (.*)$", prose(there), re.MULTILINE))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    assert dead_links(ROOT / page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One heading: `it`\n[a](#one-heading-it) [b](#other) [c](gone.md) [d](https://example.org)\n```\n[e](code.md)\n```\n")
    assert dead_links(page) == ["#other", "gone.md"]
