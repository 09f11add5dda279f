"""The generators of chance that a training step may draw from: Python's, numpy's, torch's and this process's GPU's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ..data.order import mix

__all__ = ["capture", "restore", "seed_all"]


def seed_all(*numbers: int) -> None:
    """Seed every generator."""
    seed = mix(*numbers)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture(device: torch.device) -> dict[str, Any]:
    """The state of every generator, as plain values and tensors."""
    version, numbers, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "numpy": {
            "generator": numpy_state["bit_generator"],
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Put every generator back."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    np.random.set_state(
        {
            "bit_generator": numpy_state["generator"],
            "state": {"key": numpy_state["key"].numpy().astype(np.uint32), "pos": numpy_state["pos"]},
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        }
    )
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
