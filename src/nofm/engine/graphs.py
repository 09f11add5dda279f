"""Whole steps as CUDA graphs: a small network then trains as fast as the GPU can, not as fast as the host can call it.

A piece of work runs as usual the first times (libraries choose their algorithms, the optimizer makes its state), is then captured,
and from then on replayed on new inputs. A replay reads and writes the same memory, so what changes between steps must lie there:
inputs are copied into place, and so is the learning rate, which the optimizer's fused kernels read from the device while captured.
What the host decides (schedules, logs, checkpoints, steps that change how layers see their weights) stays outside; see
`Method.phase`. All steps, captured or not, run on one stream of the run's own, so that several runs that take turns in one process
keep the GPU busy together (`train_together`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..data.loader import Batch

__all__ = ["Graphs"]

Outputs: TypeAlias = dict[str, Tensor]
_WARM_UPS = 3


class _Piece:
    """One kind of work for inputs of one shape."""

    def __init__(self) -> None:
        self.runs = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Batch] = []
        self.outputs: Outputs = {}


class Graphs:
    """Runs work, and remembers it as graphs."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._lr = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self._pieces: dict[Hashable, _Piece] = {}
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._chance: torch.Generator | None = None
        self.replayed = False  # whether the last work was replayed, so that no Python of it ran

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The context in which everything of this run happens: its own stream and its own chance, as if it were alone."""
        generator = torch.cuda.default_generators[self._device.index or 0]
        if self._chance is None:
            self._stream.wait_stream(torch.cuda.current_stream())
            self._chance = generator.clone_state()
        before = generator.graphsafe_get_state()
        generator.graphsafe_set_state(self._chance)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            generator.graphsafe_set_state(before)

    def run(self, kind: Hashable, work: Callable[[list[Batch]], Outputs], inputs: Sequence[Batch]) -> Outputs:
        """`work(inputs)`. The same `kind` must mean the same work on the device; `work` must not read a value of a tensor."""
        shapes = tuple((name, value.shape, value.dtype) for batch in inputs for name, value in batch.items())
        piece = self._pieces.setdefault((kind, shapes), _Piece())
        piece.runs += 1
        self.replayed = piece.graph is not None
        if piece.runs <= _WARM_UPS:
            return work(list(inputs))
        if piece.graph is None:
            piece.inputs = [{name: value.clone() for name, value in batch.items()} for batch in inputs]
            self._capture(piece, work)
        assert piece.graph is not None
        for place, batch in zip(piece.inputs, inputs, strict=True):
            for name, value in batch.items():
                place[name].copy_(value, non_blocking=True)
        for lr, group in zip(self._lr, self._optimizer.param_groups, strict=True):
            lr.fill_(group["lr"])
        piece.graph.replay()
        return {name: value.clone() for name, value in piece.outputs.items()}  # the next replay writes over them

    def _capture(self, piece: _Piece, work: Callable[[list[Batch]], Outputs]) -> None:
        piece.graph = torch.cuda.CUDAGraph()
        # Errors of this thread only: a loader's thread that pins memory meanwhile does no harm.
        with self._lr_on_device(), torch.cuda.graph(piece.graph, stream=self._stream, capture_error_mode="thread_local"):
            piece.outputs = work(piece.inputs)

    @contextmanager
    def _lr_on_device(self) -> Iterator[None]:
        groups = self._optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group, place in zip(groups, self._lr, strict=True):
            group["lr"] = place
        try:
            yield
        finally:
            for group, lr in zip(groups, before, strict=True):
                group["lr"] = lr
