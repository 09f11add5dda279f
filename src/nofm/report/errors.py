"""The report's own error: a run folder that cannot be read, with the file and the line in its message."""

from __future__ import annotations

from pathlib import Path

from ..errors import NofmError

__all__ = ["ReportError"]


class ReportError(NofmError):
    """Something in a run folder is missing or wrong. Carries `path` and, where a line is to blame, `line`."""

    def __init__(self, path: Path, problem: str, line: int | None = None) -> None:
        self.path, self.line = path, line
        super().__init__(f"{path}{'' if line is None else f', line {line}'}: {problem}")
