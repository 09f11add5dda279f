"""Weights from a file that are to become a network's: read, and compared with those that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from ..errors import NofmError

__all__ = ["listed", "misfits", "read_weights"]


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. A packed one is not for tasks, which know nothing of sparsity."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if "nofm.packed" in (file.metadata() or {}):
                raise NofmError(f"{path}: is packed; nofm export {path} --form plain writes the file with its zeros")
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        hint = "; a state dict is written as such by safetensors.torch.save_file" * (path.suffix in (".pt", ".pth", ".bin", ".ckpt"))
        raise NofmError(f"{path}: cannot be read as safetensors ({error}){hint}") from None


def misfits(
    wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], may_differ: Callable[[str], bool] = lambda key: False
) -> dict[str, list[str]]:
    """In what `given` is not `wanted`, by kind; empty where it fits. Keys that `may_differ` may be in one of the two alone."""
    found = {
        "missing": [key for key in wanted if key not in given and not may_differ(key)],
        "unexpected": [key for key in given if key not in wanted and not may_differ(key)],
        "of another shape": [
            f"{key} {tuple(given[key].shape)} for {tuple(wanted[key].shape)}"
            for key in wanted
            if key in given and given[key].shape != wanted[key].shape
        ],
    }
    return {kind: keys for kind, keys in found.items() if keys}


def listed(found: Mapping[str, list[str]]) -> str:
    """`misfits` in words, the first three of each kind."""
    more = {kind: f" and {len(keys) - 3} more" * (len(keys) > 3) for kind, keys in found.items()}
    return "; ".join(f"{kind}: {', '.join(keys[:3])}{more[kind]}" for kind, keys in found.items())
