"""A whole training step, sparse against dense, on the GPU: how much SR-STE costs, with and without SAD in every step.

    python benchmarks/steps_gpu.py --case resnet50-256 --mode eager --patterns 2:4 2:8 1:16 [--fused] [--sad] [--graph] [--json FILE]

bf16 autocast, fused SGD with momentum (AdamW for the Transformer), channels_last for convolutions. Dense and sparse models take turns
in blocks of steps in the same process; the figure is the median over blocks of sparse time / dense time - 1. Also peak memory, as bytes
more than dense for each sparse weight, and the host's own time for a step. With --fused each pattern trains a second time with the term
inside the optimizer's own pass over the weights, `attach(..., fused=True)`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import nofm


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x_BTC)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BTC = x_BTC + self.proj(attended)
        return x_BTC + self.down(F.gelu(self.up(self.norm2(x_BTC))))


class Transformer(nn.Module):
    """Twelve blocks of width 768 over tokens: the size of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, 768)
        self.body = nn.Sequential(*[Block(768, 12) for _ in range(12)])
        self.head = nn.Linear(768, 8192)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens))).flatten(0, 1)


def cifar_resnet18() -> nn.Module:
    model = torchvision.models.resnet18(num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return model


def images(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, 3, size, size, device="cuda").to(memory_format=torch.channels_last)
    return x, torch.randint(classes, (batch,), device="cuda")


def tokens() -> tuple[Tensor, Tensor]:
    x = torch.randint(8192, (16, 512), device="cuda")
    return x, torch.randint(8192, (16 * 512,), device="cuda")


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "resnet50-64": (torchvision.models.resnet50, lambda: images(64, 224, 1000)),
    "resnet50-256": (torchvision.models.resnet50, lambda: images(256, 224, 1000)),
    "resnet18-cifar-512": (cifar_resnet18, lambda: images(512, 32, 10)),
    "transformer": (Transformer, tokens),
}


class Trainer:
    """A model with all it needs to take steps."""

    def __init__(
        self, case: str, pattern: str | None, compiled: bool, record: bool, data: tuple[Tensor, Tensor], fused: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.model = CASES[case][0]().cuda()
        if "resnet" in case:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.sad = None
        parameters = self.model.parameters()
        self.optimizer = (
            torch.optim.AdamW(parameters, lr=1e-4, fused=True, capturable=True)
            if case == "transformer"
            else torch.optim.SGD(parameters, 0.01, 0.9, fused=True)
        )
        self.sparse_weights = 0
        if pattern is not None:
            self.sparse_weights = sum(row.weights for row in nofm.sparsify_(self.model, pattern).sparse)
            nofm.attach(nofm.SRSTE(decay=2e-4), self.model, self.optimizer, fused=fused)
            self.sad = nofm.SAD(self.model, keep=1) if record else None
        self.run = torch.compile(self.model) if compiled else self.model
        self.data, self.step_number = data, 0
        self.once: Callable[[], None] = self.step

    def capture(self, pool: Any = None) -> None:
        """From now on a step is the replay of a CUDA graph, so that the host has no part in its time."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(5):
                self.step()
        with torch.cuda.graph(graph, pool=pool):
            self.step()
        self.once = graph.replay

    def step(self) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.run(self.data[0]), self.data[1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step_number += 1
        if self.sad is not None:
            self.sad.record(self.step_number)

    def block(self, steps: int) -> tuple[float, float]:
        """Seconds a step until the GPU is done, and until the host is."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.once()
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps, host / steps

    def peak(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--mode", choices=("eager", "compiled"), required=True)
    parser.add_argument("--patterns", nargs="+", default=["2:4", "2:8", "1:16"])
    parser.add_argument("--sad", action="store_true")
    parser.add_argument("--fused", action="store_true", help="also with the term inside the optimizer's own pass")
    parser.add_argument("--graph", action="store_true", help="replay whole steps as CUDA graphs: what the GPU alone takes")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    if args.sad and args.graph:
        parser.error("--sad keeps its books on the host, which a graph leaves out")
    data, compiled = CASES[args.case][1](), args.mode == "compiled"
    trainers = {"dense": Trainer(args.case, None, compiled, False, data)}
    for pattern in args.patterns:
        trainers[pattern] = Trainer(args.case, pattern, compiled, False, data)
        if args.fused:
            trainers[f"{pattern} fused"] = Trainer(args.case, pattern, compiled, False, data, fused=True)
    if args.sad:
        trainers[f"{args.patterns[0]} + SAD"] = Trainer(args.case, args.patterns[0], compiled, True, data)
    pool = torch.cuda.graph_pool_handle() if args.graph else None  # shared, since they take turns
    for trainer in trainers.values():
        trainer.block(5)
        if args.graph:
            trainer.capture(pool)
            trainer.block(2)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
    for _ in range(args.blocks):
        for name, trainer in trainers.items():
            times[name].append(trainer.block(args.steps))
    dense = [seconds for seconds, _ in times["dense"]]
    peak = trainers["dense"].peak()
    rows = []
    for name, trainer in trainers.items():
        ratios = [seconds / base for (seconds, _), base in zip(times[name], dense, strict=True)]
        row = {
            "case": args.case,
            "mode": args.mode + " graph" * args.graph,
            "what": name,
            "ms": 1e3 * statistics.median(s for s, _ in times[name]),
        }
        row |= {"more_percent": 100 * (statistics.median(ratios) - 1), "spread_percent": 100 * statistics.stdev(ratios)}
        row |= {"host_ms": 1e3 * statistics.median(h for _, h in times[name])}
        row |= {"more_bytes_a_sparse_weight": (trainer.peak() - peak) / trainer.sparse_weights if trainer.sparse_weights else 0.0}
        rows.append(row)
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "nofm": nofm.__version__, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
