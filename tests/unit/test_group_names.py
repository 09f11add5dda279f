"""What a comparison calls its rows: names must say what was trained."""

from __future__ import annotations

from typing import Any

import pytest

from nofm.report.compare import _labels


def run(kind: str = "srste", pattern: str | None = "1:16", **more: Any) -> dict[str, Any]:
    return {"recipe": "digits", "sparsity.pattern": pattern, "sparsity.method.kind": kind, **more}


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ([run()], ["digits"]),
        ([run("dense"), run("ste"), run()], ["dense", "ste", "srste"]),
        ([run("dense"), run("rigl", "1:1")], ["dense", "rigl"]),
        ([run("dense"), run("srste", "2:4"), run("srste", "1:4")], ["dense", "srste 2:4", "srste 1:4"]),
        ([run(pattern="2:4"), run(pattern="1:4")], ["2:4", "1:4"]),
        ([run(pattern=None, **{"sparsity.budget": 0.2}), run(**{"sparsity.budget": None})], ["budget=0.2", "1:16"]),
    ],
    ids=["alone", "methods", "dense has no pattern", "method and pattern", "patterns", "budget"],
)
def test_names_say_what_differs(settings, names):
    assert _labels(settings) == names
