"""The package as a newcomer meets it: what importing it costs, the README's code, the names it exports."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from torch import nn

import nofm

ROOT = Path(__file__).parents[2]


def modules_after(code: str) -> set[str]:
    """The top-level packages in sys.modules after running `code` in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split())


def test_importing_nofm_brings_nothing_beyond_torch_and_safetensors():
    brought = modules_after("import nofm") - modules_after("import torch, safetensors.torch") - set(sys.stdlib_module_names)
    assert brought == {"nofm"}


def test_the_readme_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks, "the README shows how to use nofm"
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert "weights are N:M" in capsys.readouterr().out


def test_the_readme_hooks_a_newcomer_in_its_first_lines():
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:20])
    for needed in ("N:M", "SR-STE", "nofm.sparsify_", "nofm.attach", "|"):
        assert needed in first


OF_TORCH = {"onnxscript"}  # which torch imports, for torch.onnx.export
MODULES = {"scikit-learn": "sklearn", "faster-coco-eval": "faster_coco_eval"}  # where a package is imported by another name


def test_every_package_that_an_extra_brings_is_used():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: wanted for name, wanted in project["optional-dependencies"].items() if name != "dev"}
    wanted = {re.split(r"[\[>]", line)[0]: extra for extra, lines in extras.items() for line in lines} | {"torch": "", "safetensors": ""}
    assert {"tyro", "timm", "sacrebleu", "matplotlib", "tensorboard"} <= set(wanted)
    code = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    # Imported, also from within torch (torch.utils.tensorboard), or looked for by its name before it is.
    unused = [
        name
        for name in set(wanted) - OF_TORCH
        if not re.search(rf"(import|from) ([\w.]+\.)?{(m := MODULES.get(name, name))}\b|\"{m}\"", code)
    ]
    assert unused == []


def test_every_exported_name_exists_and_is_documented():
    for name in nofm.__all__:
        exported = getattr(nofm, name)
        assert name == "__version__" or name == "METHODS" or exported.__doc__, name


@pytest.mark.parametrize("name", ["sparsify", "fold", "densify"])
def test_a_verb_without_its_underscore_is_told_its_name(name):
    """No room has the name of a verb: it would be found instead, and a module cannot be called."""
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean nofm.{name}_, which works in place"):
        getattr(nofm, name)(nn.Linear(8, 8))
    with pytest.raises(AttributeError, match=r"no attribute 'no_such_name'$"):
        _ = nofm.no_such_name


def test_doctests_of_the_public_functions():
    for name in ("nofm.patterns", "nofm.masks", "nofm.analysis.cost"):
        result = doctest.testmod(importlib.import_module(name))
        assert result.attempted > 0
        assert result.failed == 0
