"""Numbers of other libraries as Python's own: numpy's, which come out of a sweep or a table and are a number in all but type.

What is not Python's own is refused by `torch.load`, by JSON and by every `isinstance(value, int)`.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any

__all__ = ["plain_number"]


def plain_number(value: Any) -> Any:
    """`value` as an int, a float or a bool where it is a number or a truth value of numpy's, else as it is.

    A whole number stays one, and 3.0 is none. No library is imported for that: they say of their types what kind of number they are.
    """
    kind = type(value)
    if kind in (int, float, bool, str, type(None)):
        return value
    if isinstance(value, numbers.Integral):
        return value if isinstance(value, int) else operator.index(value)  # an IntEnum is an int, and prints its name
    if isinstance(value, numbers.Real):
        return float(value)
    return bool(value) if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_") else value
