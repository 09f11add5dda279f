"""Processes that make runs side by side make the folders above them at the same moment."""

from __future__ import annotations

from pathlib import Path

from nofm.engine.files import Disk, make_folder


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
