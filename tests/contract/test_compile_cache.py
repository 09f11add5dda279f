"""A compiled sparse model is found again in torch's caches by the next process, forward and backward, as a dense one is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import nofm


def test_the_compiler_sees_nothing_that_keeps_a_model_out_of_its_cache() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
    nofm.sparsify_(model, "2:4", preset="all")
    counter, x = CompileCounterWithBackend("aot_eager"), torch.randn(4, 16)
    torch.compile(model, backend=counter, fullgraph=True)(x).sum().backward()
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert not [target for target in targets if "autograd_function" in target]
    compiled = [layer.weight.grad for layer in (model[0], model[2])]
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.equal(a, layer.weight.grad) for a, layer in zip(compiled, (model[0], model[2]), strict=True))


@pytest.mark.parametrize("around", [False, True], ids=["model", "module that holds it"])
def test_a_second_model_of_the_kind_is_not_compiled_again(around) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for seed in range(2):
        torch.manual_seed(seed)
        model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(4, 16)
        nofm.sparsify_(model, "2:4", preset="all")
        compiled = torch.compile(nn.Sequential(model) if around else model, backend=counter, fullgraph=True)(x)
        assert counter.frame_count == 1
        assert torch.equal(compiled, model(x))


_TRAIN_ONE_STEP = """
import json, torch, nofm
from torch import nn
from torch._dynamo.utils import counters
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
nofm.sparsify_(model, "2:4", preset="all")
torch.compile(model)(torch.randn(4, 16)).sum().backward()
print(json.dumps({**counters["inductor"], **counters["aot_autograd"]}))
"""


@pytest.mark.slow
def test_the_second_process_compiles_nothing(tmp_path) -> None:
    environment, counts = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, []
    for _ in range(2):
        result = subprocess.run([sys.executable, "-c", _TRAIN_ONE_STEP], env=environment, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stderr[-3000:]
        counts.append(json.loads(result.stdout.splitlines()[-1]))
    assert "autograd_cache_hit" not in counts[0]
    assert counts[1]["autograd_cache_hit"] == 1
    assert counts[1]["fxgraph_cache_hit"] == 2
    assert "fxgraph_cache_miss" not in counts[1]
