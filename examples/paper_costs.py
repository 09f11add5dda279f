"""The paper's Params and Flops columns beside ours: `python examples/paper_costs.py`.

Its Params column follows no single rule: the dense row and ResNet-50 x1.25 count all parameters, the sparse rows leave the
normalisation layers out. Both are printed; each figure of the paper is one of them. Its sparse Flops do not follow from its dense ones and
the density, and are not matched here: ours are dense multiply-adds times density for every layer that is sparse, with the first
convolution (3 input channels do not make groups of 4) and the classifier dense.
"""

from __future__ import annotations

import torchvision
from rich.console import Console
from rich.table import Table
from torch import nn

import nofm
from nofm.tasks.models import build_model


def wide_resnet50() -> nn.Module:
    return build_model("resnet50x1.25", 1000, 3)


IMAGE, PAIR = (1, 3, 224, 224), [(1, 3, 368, 496), (1, 3, 368, 496)]
ROWS = [  # name, model, pattern, input, the paper's Params (M), the paper's Flops (G)
    ("ResNet-50", torchvision.models.resnet50, None, IMAGE, "25.6", "4.09"),
    ("ResNet-50", torchvision.models.resnet50, "2:4", IMAGE, "13.8", "2.15"),
    ("ResNet-50", torchvision.models.resnet50, "4:8", IMAGE, "13.8", "2.15"),
    ("ResNet-50", torchvision.models.resnet50, "1:4", IMAGE, "7.93", "1.17"),
    ("ResNet-50", torchvision.models.resnet50, "2:8", IMAGE, "7.93", "1.17"),
    ("ResNet-50", torchvision.models.resnet50, "1:16", IMAGE, "3.52", "0.44"),
    ("ResNet-50 x1.25", wide_resnet50, "2:8", IMAGE, "11.8", "1.79"),
    ("RAFT", torchvision.models.optical_flow.raft_large, None, PAIR, "5.3", "134"),
    ("RAFT", torchvision.models.optical_flow.raft_large, "2:4", PAIR, "2.65", "67"),
]


def main() -> None:
    table = Table(title="parameters (M) and multiply-adds (G): ours, and the paper's")
    for column in ("model", "pattern", "all params", "without norms", "paper", "multiply-adds", "paper"):
        table.add_column(column, justify="left" if column in ("model", "pattern") else "right")
    for name, build, pattern, shape, params, flops in ROWS:
        model = build()
        if pattern is not None:
            nofm.sparsify_(model, pattern, preset="paper")
        cost = nofm.cost(model, shape)
        counted = [f"{count / 1e6:.2f}" for count in (cost.params_sparse, cost.weights_sparse)]
        table.add_row(name, pattern or "dense", *counted, params, f"{cost.macs_sparse / 1e9:.2f}", flops)
    Console().print(table)


if __name__ == "__main__":
    main()
