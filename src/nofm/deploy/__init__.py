"""What becomes of a network when it is trained: its weights as others load them, and files without zeros."""

from .files import PackedFile, load_packed, repack, save_packed
from .folded import folded_weights

__all__ = ["PackedFile", "folded_weights", "load_packed", "repack", "save_packed"]
