"""Loading runs no code that a file brings: no pickle, no eval, nothing that unpacks archives, anywhere in the package.

Two ways: the interpreter's own audit hook watches a real load, in a process of its own since a hook cannot be taken out again; and
the source of all of nofm is read for calls that could do it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import k7_jobs
import pytest
from k7_states import QuickDisk, state_of

import nofm
from nofm.engine.checkpoint import Store

MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {
    "torch.load",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "torch.distributed.checkpoint.load",
    "yaml.load",
    "yaml.unsafe_load",
    "numpy.load",
    "pandas.read_pickle",
    "eval",
    "exec",
    "builtins.eval",
    "builtins.exec",
}
METHODS = {"extractall", "unpack_archive", "hub_load"}


def unsafe(source: str) -> Iterator[str]:
    """What in a source file could run code from a file: "line: what"."""
    tree = ast.parse(source)
    means: dict[str, str] = {}  # names in this file -> what they were imported as
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            means.update({(a.asname or a.name).split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names})
            modules = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            means.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
            modules = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
        else:
            continue
        yield from (f"{node.lineno}: import {name}" for name in modules if MODULES & set(name.split(".")))
    # numpy reads plain arrays where it is told to refuse pickles, in so many words.
    plain = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and "allow_pickle=False" in ast.unparse(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            name = ".".join([means.get(first, first), *rest])
            if name == "numpy.load" and id(node) in plain:
                continue
            if name in CALLS or (isinstance(node, ast.Attribute) and node.attr in METHODS):
                yield f"{node.lineno}: {name}"


def test_the_source_holds_nothing_that_runs_code_from_files():
    package = Path(nofm.__file__).parent
    files = sorted(package.rglob("*.py"))
    assert package / "engine" / "checkpoint.py" in files
    found = [f"{file.relative_to(package)}:{what}" for file in files for what in unsafe(file.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(f)",
        "import torch as t\nt.load(f)",
        "from torch import load\nload(f)",
        "from torch import load as get\nget(f)",
        "import torch\nread = torch.load",
        "import pickle",
        "from pickle import loads",
        "from torch.serialization import pickle",
        "import numpy as np\nnp.load(f)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import numpy as np\nnp.load(f, allow_pickle=flag)",
        "import torch\ntorch.load(f, allow_pickle=False)",
        "import yaml\nyaml.load(f)",
        "eval(text)",
        "exec(text)",
        "import builtins\nbuiltins.eval(text)",
        "import tarfile\ntarfile.open(f).extractall()",
        "import shutil\nshutil.unpack_archive(f)",
    ],
)
def test_what_would_run_code_is_found(source: str):
    assert list(unsafe(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import torch\ntorch.load_state_dict",
        "import json\njson.load(f)",
        "store.load()",
        "import numpy as np\nnp.load(f, allow_pickle=False)",
    ],
)
def test_what_only_looks_like_it_is_not(source: str):
    assert list(unsafe(source)) == []


def test_the_interpreter_sees_no_pickle_and_no_code_in_a_load(tmp_path: Path):
    Store(tmp_path, disk=QuickDisk()).save(3, state_of(3))
    result = k7_jobs.result_of("loads_under_audit", tmp_path)
    assert result["step"] == 3
    assert result["load"] == []
    assert any(event.startswith("pickle.find_class") for event in result["pickle"]), "the hook sees one when there is one"
