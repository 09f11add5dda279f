"""`Store` in use: names, `latest`, going back, saving again, deleting what is old, and what its errors say.

How it bears crashes, faults and hostile files is in tests/contract/test_k7_*.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import nofm
from nofm.engine.checkpoint import CheckpointError, Store
from nofm.engine.files import Disk


@pytest.fixture(autouse=True)
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def saved(folder: Path, *steps: int, keep: int = 2) -> Store:
    store = Store(folder, keep)
    for step in steps:
        store.save(step, {"step": step})
    return store


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_an_empty_store(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "not there"):
        store = Store(folder)
        assert store.latest() is None
        assert store.newest() is None
        with pytest.raises(CheckpointError, match=f"^{re.escape(str(folder))}: there is no checkpoint$"):
            store.load()
        with pytest.raises(CheckpointError, match="no checkpoint of step 3 can be read: it holds none"):
            store.load(step=3)
    assert list(tmp_path.iterdir()) == [], "reading makes nothing"


def test_save_and_load(tmp_path: Path):
    store = Store(tmp_path / "run" / "checkpoints")
    path = store.save(400, {"w": torch.ones(2), "lr": 0.1})
    assert path == tmp_path / "run" / "checkpoints" / "step-00000400"
    assert store.latest() == 400
    assert (path.parent / "latest").read_text() == "step-00000400\n"
    state = store.load()
    assert list(state) == ["w", "lr"]
    assert torch.equal(state["w"], torch.ones(2))
    assert state["lr"] == 0.1
    assert Store(str(path.parent)).load(step=400)["lr"] == 0.1


def test_the_manifest(tmp_path: Path):
    path = Store(tmp_path).save(7, {"w": torch.ones(2), "lr": 0.1})
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest.pop("versions").keys() == {"nofm", "torch", "python"}
    files = {name: (path / name).read_bytes() for name in ("tensors.safetensors", "state.json")}
    entries = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    assert manifest == {"format": 1, "step": 7, "files": entries}
    assert json.loads(files["state.json"]) == {"w": {"/tensor": ["F32", [2]]}, "lr": 0.1}


def test_the_tensor_file_is_aligned(tmp_path: Path):
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.float64), "c": torch.ones(5, dtype=torch.float16)}
    data = (Store(tmp_path).save(1, tensors) / "tensors.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    assert end % 8 == 0
    offsets = {name: entry["data_offsets"] for name, entry in json.loads(data[8:end]).items()}
    assert offsets == {"b": [0, 8], "c": [8, 18], "a": [18, 21]}


def test_a_folder_given_relative_to_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert Store("checkpoints").save(1, {"a": 1}) == Path("checkpoints/step-00000001")
    assert Store(tmp_path / "checkpoints").load() == {"a": 1}


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_last_ones_are_kept(keep: int, tmp_path: Path):
    store = Store(tmp_path, keep)
    for count in range(1, 9):
        store.save(10 * count, {"step": 10 * count})
        kept = [10 * i for i in range(max(1, count - keep + 1), count + 1)]
        assert names(tmp_path) == [f"step-{step:08d}" for step in kept]
        assert [store.load(step) for step in kept] == [{"step": step} for step in kept]
        assert store.latest() == 10 * count


@pytest.mark.parametrize("keep", [0, -1, 1.0, "2", None, True])
def test_keeping_none_is_refused(keep: object, tmp_path: Path):
    with pytest.raises(CheckpointError, match=re.escape(f"keep={keep!r}: the number of checkpoints to keep is a whole number, at least 1")):
        Store(tmp_path, keep)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True, 10**18])
def test_a_step_is_a_count(step: object, tmp_path: Path):
    with pytest.raises(CheckpointError, match=re.escape(f"step {step!r}: a step is a whole number, at least 0")):
        Store(tmp_path / "store").save(step, {})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_step_nought_and_large_steps(tmp_path: Path):
    store = saved(tmp_path, 0, 99_999_999, 100_000_000, 10**18 - 1, keep=9)
    assert names(tmp_path) == ["step-00000000", "step-100000000", "step-99999999", "step-999999999999999999"]
    assert store.latest() == 10**18 - 1
    assert store.load(step=0) == {"step": 0}
    assert store.load(step=99_999_999) == {"step": 99_999_999}
    shutil.rmtree(tmp_path / "step-999999999999999999")
    (tmp_path / "latest").unlink()
    assert store.latest() == 100_000_000, "by number, not by name"


def test_saving_a_step_again_replaces_it_without_a_moment_between(tmp_path: Path):
    store = saved(tmp_path, 3, 4)
    assert store.save(4, {"again": 1}) == tmp_path / "step-00000004.1"
    assert names(tmp_path) == ["step-00000003", "step-00000004.1"]
    assert store.load() == store.load(step=4) == {"again": 1}
    assert store.save(4, {"again": 2}) == tmp_path / "step-00000004.2"
    assert store.load() == {"again": 2}
    store.save(5, {"step": 5})
    assert names(tmp_path) == ["step-00000004.2", "step-00000005"]


def test_after_going_back_the_steps_of_before_are_the_oldest(tmp_path: Path):
    store = saved(tmp_path, 100, 200, 300, keep=3)
    store.load(step=100)
    store.save(150, {"step": 150})
    assert names(tmp_path) == ["step-00000100", "step-00000150", "step-00000300"]
    assert store.latest() == 150
    store.save(180, {"step": 180})
    assert names(tmp_path) == ["step-00000100", "step-00000150", "step-00000180"]
    assert store.latest() == 180


def test_after_going_back_the_next_best_is_the_one_before_not_the_highest(tmp_path: Path):
    store = saved(tmp_path, 100, 300, 150, keep=3)
    shutil.rmtree(tmp_path / "step-00000150")
    with pytest.warns(UserWarning, match=r"step-00000150: no such folder; skipped"):
        assert store.load() == {"step": 100}


def test_without_latest_the_highest_step_is_given(tmp_path: Path):
    store = saved(tmp_path, 100, 300, 150, keep=3)
    (tmp_path / "latest").unlink()
    assert store.latest() == 300
    assert store.load() == {"step": 300}


def test_a_step_that_is_not_there(tmp_path: Path):
    store = saved(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 can be read: it holds step-00000001, step-00000002$"):
        store.load(step=7)


def test_what_else_is_in_the_folder_is_left_alone(tmp_path: Path):
    strangers = ["step-1", "step-00000001-copy", "step-00000002.0", "notes.txt", "step-xxxxxxxx", "tmp-step"]
    for name in strangers:
        (tmp_path / name).mkdir()
    store = saved(tmp_path, 5, 6, 7, keep=1)
    assert store.load() == {"step": 7}
    assert all((tmp_path / name).exists() for name in strangers)


def test_what_an_interrupted_save_left_is_ignored_and_then_deleted(tmp_path: Path):
    store = saved(tmp_path, 1)
    (tmp_path / ".tmp-step-00000002" / "deeper").mkdir(parents=True)
    (tmp_path / ".tmp-step-00000002" / "state.json").write_text("{")
    (tmp_path / ".tmp-step-00000002" / "deeper" / "link").symlink_to(tmp_path / "step-00000001")
    (tmp_path / ".tmp-latest").write_text("step-0000")
    assert store.load() == {"step": 1}
    store.save(2, {"step": 2})
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step-00000001", "step-00000002"]
    assert store.load(step=1) == {"step": 1}, "a link in what was deleted was not followed"


def test_old_ones_that_cannot_be_deleted_are_named_and_the_save_holds(tmp_path: Path):
    class Sticky(Disk):
        def unlink(self, path: Path) -> None:
            raise PermissionError(13, "Permission denied", str(path))

    store = Store(tmp_path, keep=1, disk=Sticky())
    store.save(1, {"step": 1})
    with pytest.warns(UserWarning, match=r"step-00000001: cannot be deleted \(Permission denied\)"):
        store.save(2, {"step": 2})
    assert store.load() == {"step": 2}


def test_a_file_where_the_folder_should_be(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for ask in (Store(tmp_path / "file").load, Store(tmp_path / "file").latest):
        with pytest.raises(CheckpointError, match=r"/file: cannot be read: Not a directory"):
            ask()
    with pytest.raises(CheckpointError, match=r"/file/step-00000001: not saved: Not a directory"):
        Store(tmp_path / "file").save(1, {})


def test_the_error_belongs_to_the_family():
    assert issubclass(CheckpointError, nofm.errors.NofmError)
    assert issubclass(CheckpointError, ValueError)


def test_a_copy_of_the_folder_is_a_store(tmp_path: Path):
    saved(tmp_path / "here", 1, 2)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    there = Store(tmp_path / "there")
    assert there.load() == {"step": 2}
    there.save(3, {"step": 3})
    assert Store(tmp_path / "here").latest() == 2
