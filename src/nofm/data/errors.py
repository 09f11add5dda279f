"""What can be wrong with data."""

from __future__ import annotations

from ..errors import NofmError

__all__ = ["DataError"]


class DataError(NofmError):
    """Files that are missing, cut short or not what they should be. The message names the file."""
