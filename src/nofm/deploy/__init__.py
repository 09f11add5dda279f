"""What becomes of a network when it is trained: its weights as others load them, files without zeros, layers that compute without them."""

from .bench import Bench, bench
from .files import PackedFile, load_packed, repack, save_packed
from .folded import folded_weights
from .layers import PackedLayer
from .packing import PackedRow, Packing, pack_, unpack_

__all__ = [
    "Bench",
    "PackedFile",
    "PackedLayer",
    "PackedRow",
    "Packing",
    "bench",
    "folded_weights",
    "load_packed",
    "pack_",
    "repack",
    "save_packed",
    "unpack_",
]
