"""The k largest magnitudes of many tensors, and random numbers by a hash: for methods that choose weights anew in every step.

By Triton where `serves` (`draws_on`) says so, and by plain torch operations elsewhere; both give the same bits. `select`, whose matter is
groups, has no say in it, but what it is told to force holds here too.

By Triton nothing waits for the device or depends on values, so a CUDA graph can hold it. Many tensors cost no more launches than one (see
`triton_selection`): zeros, four digits, ties, masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .. import masks
from .multi import at, hold, sent
from .select import forced_path, has_triton, interpreting, is_traced

__all__ = ["drawn", "draws_on", "largest", "serves"]

_BLOCK = 2048
_WARPS = 8
_DRAWN_BLOCK = 1024
_LARGEST = 2**31 - 2**24  # places of a block that reaches over the end must not overflow
_TABLES = 64  # that are kept

_ready: dict[tuple[Any, ...], Tensor] = {}


def serves(scores: Sequence[Tensor]) -> bool:
    """Whether Triton chooses among these: fp32 with values to look at, all on one device, where Triton runs."""
    if not scores:
        return False
    device = scores[0].device
    alike = all(x.dtype == torch.float32 and x.device == device and x.numel() < _LARGEST and not is_traced(x) for x in scores)
    return alike and _runs_on(device)


def draws_on(number: Tensor, size: int) -> bool:
    """Whether `drawn` takes this number of a step, for so many weights."""
    return number.dtype == torch.int64 and size < _LARGEST and not is_traced(number) and _runs_on(number.device)


def _runs_on(device: torch.device) -> bool:
    """Whether Triton runs there and is not kept from it. Its interpreter, which is slow, serves only who asks for it."""
    forced = forced_path()
    wanted = forced in (None, "triton") if device.type == "cuda" else forced == "triton" and interpreting() and device.type == "cpu"
    return wanted and has_triton()


def largest(scores: Sequence[Tensor], counts: Sequence[int | Tensor], among: Sequence[Tensor] | None = None) -> list[Tensor]:
    """For each tensor, True at so many scores of largest magnitude, the lower (logical) index first among equals.

    counts  so many for each; whole numbers on the device where it knows them. All, where there are fewer.
    among   masks outside of which nothing is chosen.
    """
    if serves(scores):
        return _by_triton(scores, counts, among)
    inside: Sequence[Tensor | None] = among or [None] * len(scores)
    some = [min(max(int(count), 0), score.numel()) for score, count in zip(scores, counts, strict=True)]
    return [masks.largest(score, count, mask) for score, count, mask in zip(scores, some, inside, strict=True)]


def _by_triton(scores: Sequence[Tensor], counts: Sequence[int | Tensor], among: Sequence[Tensor] | None) -> list[Tensor]:
    from .triton_selection import PASSES, WORK, digit_kernel, kept_kernel, ties_kernel

    flat = [score.detach().contiguous() for score in scores]
    inside = [] if among is None else [mask.contiguous() for mask in among]
    outs = [torch.empty(score.shape, dtype=torch.bool, device=score.device) for score in scores]
    if not any(score.numel() for score in scores):
        return outs
    on_device = [count for count in counts if isinstance(count, Tensor)]
    assert len(on_device) in (0, len(counts)), "the device knows all counts or none"
    known = [0 if on_device else int(count) for count in counts]
    addresses = [[x.data_ptr() for x in column] for column in (flat, inside or flat, outs)]
    sizes = [x.numel() for x in flat]
    table, program_segment = _tables(addresses, sizes, known, flat[0].device)
    work = torch.zeros(len(flat) * WORK, dtype=torch.int32, device=flat[0].device)
    fixed = {
        "AMONG": among is not None,
        "WIDE": not any(number % 16 for column in (*addresses, sizes) for number in column),
        "B": _BLOCK,
        "num_warps": _WARPS,
    }
    grid = (program_segment.numel(),)
    numbers = torch.stack(on_device) if on_device else table
    with at(flat[0].device):
        for number in range(PASSES):
            digit_kernel[grid](table, program_segment, work, numbers, PASS=number, DEVICE_COUNTS=bool(on_device), **fixed)
        ties_kernel[grid](table, program_segment, work, **fixed)
        kept_kernel[grid](table, program_segment, work, **fixed)
    return outs


def _tables(addresses: list[list[int]], sizes: list[int], counts: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """A row for each tensor, and the tensor that each program works on. See `triton_selection`."""
    from .triton_selection import MOST_PROGRAMS

    blocks = [max(1, -(-size // (_BLOCK * MOST_PROGRAMS))) for size in sizes]
    programs = [-(-size // (_BLOCK * each)) for size, each in zip(sizes, blocks, strict=True)]
    first = [*accumulate(programs, initial=0)][:-1]
    rows = list(zip(*addresses, sizes, blocks, first, counts, strict=True))

    def members() -> Tensor:
        return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(programs)).to(torch.int32)

    return _kept(tuple(rows), lambda: torch.tensor(rows, dtype=torch.int64), device), _kept(tuple(programs), members, device)


def _kept(key: tuple[Any, ...], make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """What `make` gives, on the device; sent once for as long as the same key comes again, as it does where weights stay where they are.

    For each stream its own: another one would not wait for it to arrive, nor keep its memory from being used again.
    """
    here = (key, device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    found = _ready.get(here)
    if found is None:
        found = sent(make(), device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return found  # nobody else may read it: a graph sends it at every replay, and not before
        if len(_ready) >= _TABLES:  # addresses that do not come again
            _ready.clear()
        _ready[here] = found
    hold(found)
    return found


def drawn(key: int, number: Tensor, quantiles: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """The normal and the uniform numbers of `methods/draws.py`, of step `number` for the layer and seed with this key."""
    from .triton_draws import draw_kernel

    normal, uniform = (torch.empty(shape, dtype=torch.float32, device=number.device) for _ in range(2))
    if size := shape.numel():
        with at(number.device):
            draw_kernel[(-(-size // _DRAWN_BLOCK),)](number, quantiles, normal, uniform, key, size, B=_DRAWN_BLOCK)
    return normal, uniform
