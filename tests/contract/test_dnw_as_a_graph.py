"""DNW against Algorithm 1 of its paper (Wortsman, Farhadi & Rastegari 2019), written as the paper has it: a graph of nodes and edges.

`methods.dnw` says that in a network of layers the algorithm is the straight-through gradient of the k largest weights, and there are no
graphs in nofm. Here there is nothing else: nodes that have neighbours, edges that have a weight each, numbers of Python's own. Edges are
chosen, inputs I_v and outputs Z_v are computed node by node, and every edge learns, whether it was chosen or not.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TypeAlias

import pytest
import torch
from torch import nn

import nofm

WIDTHS = (5, 8, 6, 4)  # 40, 48 and 24 edges: a quarter of each is whole
SPARSITY, RATE, STEPS, BATCH = 0.75, 0.3, 20, 7

Node: TypeAlias = tuple[int, int]  # layer, and place in it
Edge: TypeAlias = tuple[Node, Node]
Image: TypeAlias = list[float]


class Graph:
    """Nodes V, the first of which are inputs and the last outputs, and all edges that there may be, each with a weight w_uv."""

    def __init__(self, weights: dict[Edge, float], compete: list[list[Edge]], keep: list[int]) -> None:
        self.weights, self.compete, self.keep = weights, compete, keep
        self.nodes = sorted({node for edge in weights for node in edge})
        self.chosen: set[Edge] = set()

    def choose(self) -> set[Edge]:
        """E: of the edges that compete with each other, the k with the largest |w_uv|."""
        chosen: set[Edge] = set()
        for edges, k in zip(self.compete, self.keep, strict=True):
            chosen |= set(sorted(edges, key=lambda edge: -abs(self.weights[edge]))[:k])
        return chosen

    def train(self, batch: list[tuple[Image, Image]], rate: float) -> float:
        """One iteration: mean squared error, and w_uv <- w_uv + <Z_u, -rate * dL/dI_v> for all edges."""
        self.chosen = self.choose()
        updates, total = dict.fromkeys(self.weights, 0.0), 0.0
        for image, wanted in batch:
            into, out = self.forward(image)
            last = [node for node in self.nodes if node[0] == len(WIDTHS) - 1]
            errors = {v: into[v] - wanted[v[1]] for v in last}
            total += sum(error**2 for error in errors.values()) / (len(batch) * len(last))
            slopes = self.backward({v: 2 * error / (len(batch) * len(last)) for v, error in errors.items()}, into)
            for u, v in self.weights:
                updates[u, v] += out[u] * -rate * slopes[v]
        for edge, update in updates.items():
            self.weights[edge] += update
        return total

    def forward(self, image: Image) -> tuple[dict[Node, float], dict[Node, float]]:
        """I_v = sum of w_uv * Z_u over edges in E, and Z_v = f(I_v), f being what lies between layers: ReLU."""
        into: dict[Node, float] = {}
        out: dict[Node, float] = {}
        for v in self.nodes:  # layer by layer
            if v[0] == 0:
                out[v] = image[v[1]]
                continue
            into[v] = sum(self.weights[edge] * out[edge[0]] for edge in sorted(self.chosen) if edge[1] == v)
            out[v] = max(into[v], 0.0)
        return into, out

    def backward(self, slopes: dict[Node, float], into: dict[Node, float]) -> dict[Node, float]:
        """dL/dI_v, through edges in E only: a hallucinated one is reached by the gradient, and hands nothing on."""
        slopes = dict(slopes)
        for u in reversed(self.nodes):
            if u in into and u not in slopes:
                slope = sum(self.weights[edge] * slopes[edge[1]] for edge in sorted(self.chosen) if edge[0] == u)
                slopes[u] = slope if into[u] > 0 else 0.0
        return slopes


def network(chance: random.Random) -> nn.Sequential:
    parts: list[nn.Module] = []
    for i, o in pairwise(WIDTHS):
        layer = nn.Linear(i, o, bias=False, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[chance.uniform(-0.6, 0.6) for _ in range(i)] for _ in range(o)], dtype=torch.float64))
        parts += [layer, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def edges_of(model: nn.Module) -> list[tuple[list[Edge], torch.Tensor]]:
    """The edges of each layer, and their weights in the same order."""
    found = []
    for depth, layer in enumerate(module for module in model.modules() if isinstance(module, nn.Linear)):
        o, i = layer.weight.shape
        found.append(([((depth, u), (depth + 1, v)) for v in range(o) for u in range(i)], layer.weight.detach().flatten()))
    return found


def weights_of(model: nn.Module) -> dict[Edge, float]:
    return {edge: w for edges, weights in edges_of(model) for edge, w in zip(edges, weights.tolist(), strict=True)}


def kept_by(model: nn.Module) -> set[Edge]:
    masks = [site.mask().flatten().tolist() for site in nofm.sites(model)]
    layers = [edges for edges, _ in edges_of(model)]
    return {edge for edges, mask in zip(layers, masks, strict=True) for edge, kept in zip(edges, mask, strict=True) if kept}


@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_twenty_steps(allocation):
    chance = random.Random(1)
    model = network(chance)
    layers = [edges for edges, _ in edges_of(model)]
    compete = layers if allocation == "uniform" else [[edge for edges in layers for edge in edges]]
    graph = Graph(weights_of(model), compete, [len(edges) // 4 for edges in compete])

    nofm.sparsify_(model, "1:1", preset="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    nofm.attach(nofm.DNW(SPARSITY, allocation), model, optimizer)

    been: list[set[Edge]] = []
    hallucinated = 0
    for number in range(STEPS):
        images = [[chance.gauss(0, 1) for _ in range(WIDTHS[0])] for _ in range(BATCH)]
        batch = [(image, [chance.gauss(0, 1) for _ in range(WIDTHS[-1])]) for image in images]
        x, y = (torch.tensor([pair[i] for pair in batch], dtype=torch.float64) for i in (0, 1))
        optimizer.zero_grad()
        assert kept_by(model) == graph.choose(), f"before step {number + 1}"
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()

        before = dict(graph.weights)
        assert loss.item() == pytest.approx(graph.train(batch, RATE), rel=1e-12)
        assert weights_of(model) == pytest.approx(graph.weights, rel=1e-11, abs=1e-13), f"after step {number + 1}"
        been.append(graph.chosen)
        hallucinated += sum(graph.weights[edge] != before[edge] for edge in graph.weights if edge not in graph.chosen)

    # All of this says something only if edges outside of E learned, and if some of them came in and others left.
    assert hallucinated > STEPS * len(graph.weights) / 4
    assert len(set().union(*been) - been[0]) > 2
    assert any(edge in been[0] & been[-1] and any(edge not in chosen for chosen in been) for edge in graph.weights), "one came back"
    if allocation == "global":
        assert len({sum(edge in graph.chosen for edge in edges) / len(edges) for edges in layers}) > 1, "layers differ in their share"
