"""C sources, compiled once with the machine's own compiler and called through ctypes.

No build step and no dependency: `cc` is asked for when a kernel is first wanted, and the result is kept in the user's cache folder under
the hash of its source, compiler and flags. Where there is no compiler the plain torch path serves, and whoever asks is told why.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["compiled"]

# A product and its sum are rounded once where the machine can, as torch does it: a step by these kernels has the bits of one without.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-strict-aliasing", "-fPIC")


def compiled(source: Path, flags: Sequence[str] = ()) -> tuple[Any, str | None]:
    """The library made of `source`, and None; or None, and why there is none."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return None, "no C compiler was found"
    flags = (*_FLAGS, *flags)
    identity = [source.read_bytes(), compiler.encode(), " ".join(flags).encode(), platform.processor().encode(), platform.node().encode()]
    cached = _cache_folder() / f"{source.stem}-{hashlib.sha256(b'|'.join(identity)).hexdigest()[:16]}.so"
    try:
        if not cached.exists():
            _compile(compiler, flags, source, cached)
        return ctypes.CDLL(str(cached)), None
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        return None, f"compiling {source.name} with {compiler} failed: {detail!s:.300}"


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nofm"


def _compile(compiler: str, flags: Sequence[str], source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        parts, built = Path(folder) / "parts.o", Path(folder) / target.name
        # Linked by itself, without the flags: what -fopenmp asks for must be torch's own library, whose threads are there already.
        for step in ([*flags, "-c", str(source), "-o", str(parts)], ["-shared", str(parts), "-o", str(built)]):
            subprocess.run([compiler, *step], check=True, capture_output=True, text=True, timeout=120)
        built.replace(target)  # another process may be doing the same: the last one wins, and both are whole
