"""Files that others may have been reading, or that nothing else could make again: replaced whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .errors import ReportError

__all__ = ["write_whole"]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file; where that fails or is interrupted, the old one stays."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        raise ReportError(path, f"cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # a folder that nothing can be written into, nothing can be taken out of
            unfinished.unlink(missing_ok=True)
