"""What the checkpoint tests share: states that differ from step to step, a comparison to the last bit, and disks that can be watched.

A disk here is the real one with something before or after each call. fsync is left out where no power fails: nobody can see it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nofm.engine.files import Disk

WRITING = ("mkdir", "create", "write", "sync", "close", "sync_dir", "rename", "unlink", "rmdir")
CALLS = (*WRITING, "names", "is_dir", "read", "lock")


def state_of(step: int, take: int = 0) -> dict[str, Any]:
    """A small state with every kind of leaf, another one for every step and take."""
    random = torch.Generator().manual_seed(1000 * step + take)
    return {
        "model": {"w_OI": torch.randn(3, 4, generator=random), "half": torch.randn(5, generator=random).bfloat16()},
        "optimizer": [{"momentum": torch.randn(4, generator=random), "lr": 0.1 / (step + 1), "betas": (0.9, 0.999)}],
        "random": torch.randint(256, (9,), generator=random).to(torch.uint8),
        "step": step,
        "take": take,
        "best": float("inf"),
        "note": None,
    }


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def assert_same(found: Any, wanted: Any, where: str = "state") -> None:
    """Equal in structure, types and order of keys; floats and tensors to the last bit, so that NaNs and signs of zero count."""
    if isinstance(wanted, Tensor):
        assert type(found) is Tensor, f"{where} is {type(found)}"
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), where
        assert bits(found) == bits(wanted), where
        return
    assert type(found) is type(wanted), f"{where} is {type(found)}, not {type(wanted)}"
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            assert_same(found[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert_same(a, b, f"{where}/{i}")
    elif isinstance(wanted, float):
        assert struct.pack("d", found) == struct.pack("d", wanted), where
    else:
        assert found == wanted, where


class QuickDisk(Disk):
    """Without fsync."""

    def sync(self, file: int) -> None:
        pass

    def sync_dir(self, path: Path) -> None:
        pass


class WatchedDisk(QuickDisk):
    """Every call goes through `around(number, name, call, args)`, numbered from 0."""

    def __init__(self) -> None:
        self.count = 0

    def around(self, number: int, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return call(*args)


def _watched(name: str) -> Callable[..., Any]:
    def watched(self: WatchedDisk, *args: Any) -> Any:
        number, self.count = self.count, self.count + 1
        return self.around(number, name, getattr(super(WatchedDisk, self), name), args)

    return watched


for _name in CALLS:
    setattr(WatchedDisk, _name, _watched(_name))


def reseal(checkpoint: Path) -> None:
    """Make the manifest agree with the files again, as somebody who means harm would."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest, indent=1))
