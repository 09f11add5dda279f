"""Processes that make runs side by side make the folders above them at the same moment; and a folder on a disk that is full."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from nofm.engine.files import Disk, make_folder
from nofm.engine.folder import RunFolder


class Crowded(Disk):
    """Everything that is made here somebody else has made just before, but for the first look."""

    looked = False

    def mkdir(self, path: Path) -> None:
        if self.looked:
            path.mkdir(parents=True, exist_ok=True)
        self.looked = True
        super().mkdir(path)


def test_a_folder_that_another_process_makes_meanwhile(tmp_path):
    make_folder(Crowded(), tmp_path / "runs" / "dense" / "seed-0")
    assert (tmp_path / "runs" / "dense" / "seed-0").is_dir()


def test_a_full_disk_is_said_at_the_event_that_does_not_fit(tmp_path):
    """Half a line that nobody has complained about would be glued to the next event, and the file could not be read again."""
    folder = RunFolder(tmp_path / "run", resume=False)
    folder.event("train", 1, loss=0.5)
    limits, held = resource.getrlimit(resource.RLIMIT_FSIZE), (tmp_path / "run" / "events.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (held + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.event("train", 2, loss=0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        folder.close()
    again = RunFolder(tmp_path / "run", resume=True)
    again.event("train", 3, loss=0.5)
    again.close()
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]
