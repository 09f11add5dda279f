"""Every CUDA graph that was captured is watched for NaN, not the last one alone: `pytest -m gpu tests/gpu/test_finite_graphs.py`."""

from __future__ import annotations

import pytest
import torch

from nofm.errors import NonFiniteWeightError
from nofm.methods.finite import FiniteWatch

pytestmark = pytest.mark.gpu

NAMES = ("a", "b", "c")


def captured(watch: FiniteWatch, named: list[tuple[str, torch.Tensor]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        watch.look(0, named)
    return graph


@pytest.mark.parametrize("warmed_up", [True, False], ids=["after eager steps", "at once"])
@pytest.mark.parametrize("broken", range(len(NAMES)))
def test_a_graph_that_is_replayed_again_is_watched(broken, warmed_up):
    weights = {name: torch.randn(64, 48, device="cuda", dtype=torch.bfloat16 if name == "b" else torch.float32) for name in NAMES}
    watch = FiniteWatch()
    for number in range(3 * warmed_up):
        watch.look(number, list(weights.items()))
    graphs = [captured(watch, [item]) for item in weights.items()]
    for number, graph in enumerate([*graphs, *reversed(graphs)], start=1):
        graph.replay()
        watch.replayed(number)
    torch.cuda.synchronize()
    watch.replayed(8)  # all is well

    weights[NAMES[broken]][3, 5] = torch.nan
    graphs[broken].replay()
    torch.cuda.synchronize()

    def looks() -> None:
        for _ in range(2):  # the number arrives after the first look, at the latest
            watch.replayed(9)
            torch.cuda.synchronize()

    with pytest.raises(NonFiniteWeightError, match=rf"{NAMES[broken]}\[3, 5\] is nan after step 9"):
        looks()
