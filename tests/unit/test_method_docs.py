"""What `help(nofm.RigL)` says: where a method comes from, and its rule as a formula. Methods are found, not listed, so that a new one is
asked, too."""

from __future__ import annotations

import inspect
import re
from typing import get_args

import pytest

import nofm
from nofm import ste

METHODS = sorted(
    (thing for name in nofm.__all__ if isinstance(thing := getattr(nofm, name), type) and issubclass(thing, nofm.Method)),
    key=lambda cls: cls.__name__,
)
METHODS.remove(nofm.Method)

# The paper's line, up to its full stop: who, when, where it can be read, and where in it the rule stands.
PAPER = re.compile(r"^Paper: (?P<all>.*?)\.?\n\n", re.DOTALL | re.MULTILINE)
YEAR = re.compile(r"\b(?:19|20)\d\d\b")
READ_AT = re.compile(r"arXiv:\d{4}\.\d{5}|arXiv:\d{4}\.\d{4}\b")
PLACE = re.compile(r"\b(Algorithm|Eq\.|section|Table) \d")
RULE = re.compile(r"^ {4,}\S.*<- \S", re.MULTILINE)  # indented, as formulas are: a sentence with an arrow in it is none


def own_text(cls: type) -> str:
    """The docstring of the class itself, without its indentation: a subclass inherits the text of another paper."""
    return inspect.cleandoc(vars(cls).get("__doc__") or "")


def paper(cls: type) -> str:
    found = PAPER.search(own_text(cls))
    assert found is not None, f"{cls.__name__} does not say `Paper: ...` in its docstring"
    return " ".join(found["all"].split())


def test_all_methods_are_looked_at():
    assert {row.method for row in nofm.METHODS.values()} == set(METHODS)


@pytest.mark.parametrize("cls", METHODS)
def test_its_paper_is_named(cls):
    said = paper(cls)
    assert YEAR.search(READ_AT.sub("", said)), f"{said!r} has no year"
    assert READ_AT.search(said), f"{said!r} does not say where it can be read"
    assert PLACE.search(said), f"{said!r} does not say where in the paper"


@pytest.mark.parametrize("cls", METHODS)
def test_its_rule_is_a_formula(cls):
    assert RULE.search(own_text(cls)), f"{cls.__name__} has no line such as `W <- W - lr * g(W)`"


@pytest.mark.parametrize("name", nofm.METHODS)
def test_the_registry_names_the_same_papers(name):
    row = nofm.METHODS[name]
    named = READ_AT.findall(row.paper) + YEAR.findall(READ_AT.sub("", row.paper)) + re.findall(r"Algorithm \d", row.paper)
    assert named or name == "dense"
    for part in named:
        assert part in paper(row.method), f"{part} of {row.paper!r}"


def test_each_form_of_sr_ste_has_its_equation():
    forms = dict(re.findall(r'refine="(\w+)" +(Eq\. \d)', own_text(nofm.SRSTE)))
    assert forms == dict(zip(get_args(ste.Refinement), ("Eq. 4", "Eq. 5", "Eq. 6"), strict=True))


def test_the_search_for_lambda_has_its_paper_and_rule():
    [said] = re.findall(r'^decay="auto".*?\n\n(?= {4}\S.*<-)', own_text(nofm.SRSTE), re.DOTALL | re.MULTILINE)
    assert YEAR.search(READ_AT.sub("", said)) is not None
    assert READ_AT.search(said) is not None
    assert "log lambda <- log lambda" in own_text(nofm.SRSTE)
