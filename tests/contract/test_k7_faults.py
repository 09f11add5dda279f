"""Saves that fail: full and broken disks, kill -9. What was saved before stays whole.

Errors are injected at every call a save makes, reads included, once with the disk healthy again right after and once with all later
calls failing too. Where the kernel can be made to fail for real (a file size limit, a device that is always full), it is.
"""

from __future__ import annotations

import errno
import os
import re
import warnings
from pathlib import Path
from typing import Any

import k7_jobs
import pytest
import torch
from k7_states import CALLS, QuickDisk, WatchedDisk, assert_same, state_of

from nofm.engine.checkpoint import CheckpointError, Store
from nofm.engine.files import Disk

ERRORS = ["ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES"]


class FailingDisk(WatchedDisk):
    """Call `number` fails with `error`, and so do all later ones if `lasting`. A write fails half way."""

    def __init__(self, number: int, error: int, lasting: bool) -> None:
        super().__init__()
        self.number, self.error, self.lasting = number, error, lasting
        self.failed = ""

    def around(self, number: int, name: str, call: Any, args: tuple[Any, ...]) -> Any:
        if number < self.number or (number > self.number and not self.lasting):
            return call(*args)
        if name == "write":
            call(args[0], args[1][: len(args[1]) // 2])
        if name == "close":
            call(*args)
        self.failed = self.failed or name
        raise OSError(self.error, os.strerror(self.error))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def after_two_saves(folder: Path) -> None:
    store = Store(folder, disk=QuickDisk())
    store.save(1, state_of(1))
    store.save(2, state_of(2))


def calls_of_third_save(folder: Path) -> list[str]:
    calls: list[str] = []

    class Counting(WatchedDisk):
        def around(self, number: int, name: str, call: Any, args: tuple[Any, ...]) -> Any:
            calls.append(name)
            return call(*args)

    after_two_saves(folder)
    Store(folder, disk=Counting()).save(3, state_of(3))
    return calls


@pytest.mark.filterwarnings("ignore:.*cannot be deleted")
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_at_any_call_leaves_the_previous_checkpoint(name: str, lasting: bool, tmp_path: Path):
    error, calls = getattr(errno, name), calls_of_third_save(tmp_path / "whole")
    assert set(calls) == set(CALLS) - {"read"}
    last_needed = max(i for i, call in enumerate(calls) if call == "sync_dir")  # `latest` is safe after it; what follows is deletion
    for number in range(len(calls)):
        folder = tmp_path / str(number)
        after_two_saves(folder)
        disk = FailingDisk(number, error, lasting)
        store = Store(folder, disk=disk)
        where = f"{calls[number]}, call {number}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                store.save(3, state_of(3))
                message = ""
            except CheckpointError as failure:
                message = str(failure)
        assert disk.failed == calls[number], where
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = Store(folder).load()
        if not message:  # the save itself was not touched: something old could not be deleted, and that is said
            assert number > last_needed, where
            assert_same(found, state_of(3))
            assert any(str(folder) in str(warning.message) for warning in caught), where
        else:
            assert number <= last_needed, where
            assert_same(found, state_of(found["step"]))
            assert found["step"] in (2, 3), where
            assert str(folder / "step-00000003") in message, where
            assert os.strerror(error) in message, where
            assert_room_is_named(message, name)
            assert_same(Store(folder).load(step=2), state_of(2))
        Store(folder, disk=QuickDisk()).save(4, state_of(4))
        assert_same(Store(folder).load(), state_of(4))
        assert not [left for left in names_in(folder) if left.startswith(".tmp-")], where
        Store(folder).close()


def assert_room_is_named(message: str, error: str) -> None:
    room = re.search(r"([\d,]+) bytes are needed, ([\d,]+) are free", message)
    assert bool(room) == (error in ("ENOSPC", "EDQUOT")), message
    if room:
        assert 400 < int(room[1].replace(",", "")) < 4000
        assert int(room[2].replace(",", "")) > 0


def test_the_file_that_was_being_written_is_named(tmp_path: Path):
    whole = calls_of_third_save(tmp_path / "whole")
    folder = tmp_path / "failing"
    after_two_saves(folder)
    second_file = [i for i, call in enumerate(whole) if call == "create"][1] + 1
    assert whole[second_file] == "write"
    with pytest.raises(CheckpointError, match=r"at .*/\.tmp-step-00000003/state\.json"):
        Store(folder, disk=FailingDisk(second_file, errno.EIO, lasting=False)).save(3, state_of(3))


def test_nothing_but_what_cannot_be_deleted_is_left_of_a_failed_save(tmp_path: Path):
    class StickyDisk(QuickDisk):
        def write(self, file: int, data: bytes | bytearray) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def rmdir(self, path: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = Store(tmp_path, disk=StickyDisk())
    for _ in range(3):  # every time its own leftover is in the way of the next
        with pytest.warns(UserWarning, match="cannot be deleted"), pytest.raises(CheckpointError, match="No space left"):
            store.save(1, state_of(1))
    assert [list(path.iterdir()) for path in tmp_path.iterdir() if path.is_dir()] == [[]] * 3
    Store(tmp_path, disk=QuickDisk()).save(1, state_of(1))
    assert names_in(tmp_path) == [".lock", "latest", "step-00000001"]


def test_a_real_limit_of_the_kernel_on_the_size_of_a_file(tmp_path: Path):
    result = k7_jobs.result_of("hits_a_limit", tmp_path)
    assert re.search(r"File too large at .*tensors\.safetensors; 4,000,\d{3} bytes are needed, [\d,]+ are free", result["message"])
    assert result["left"] == [".lock", "latest", "step-00000001"]
    assert_same(Store(tmp_path).load(), state_of(3))


def test_a_real_device_that_is_full(tmp_path: Path):
    class FullDisk(Disk):
        def create(self, path: Path) -> int:
            super().close(super().create(path))
            return os.open("/dev/full", os.O_WRONLY)

    store = Store(tmp_path)
    store.save(1, state_of(1))
    with pytest.raises(CheckpointError, match=r"No space left on device at .*; [\d,]+ bytes are needed, [\d,]+ are free"):
        Store(tmp_path, disk=FullDisk()).save(2, state_of(2))
    assert names_in(tmp_path) == [".lock", "latest", "step-00000001"]
    assert_same(store.load(), state_of(1))


def test_kill_9_before_and_after_every_call_of_a_save(tmp_path: Path):
    result = k7_jobs.result_of("killed_at_each_call", tmp_path)
    assert result["calls"] == len(calls_of_third_save(tmp_path / "whole"))
    assert len(result["killed"]) == 2 * result["calls"]
    found = []
    for folder in map(Path, result["killed"]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state = Store(folder).load()
        assert_same(state, state_of(state["step"]))
        found.append(state["step"])
        Store(folder, disk=QuickDisk()).save(4, state_of(4))  # the lock of the dead process is no obstacle
        assert_same(Store(folder).load(), state_of(4))
        assert not [name for name in names_in(folder) if name.startswith(".tmp-")]
    assert found == sorted(found), "old first, then new, with one point between them"
    assert set(found) == {2, 3}


def test_kill_9_at_random_moments_of_a_process_that_saves_without_pause(tmp_path: Path):
    ends = k7_jobs.result_of("killed_at_random", tmp_path, 10)
    assert len(ends) == 10
    for folder, seen in ends:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state = Store(folder).load()
        assert_same(state, state_of(state["step"]))
        assert state["step"] in (seen, seen + 1), "all that was said to be saved is there"
    steps = [seen for _, seen in ends]
    assert steps == sorted(set(steps)), "each child went on from where the one before was killed"


def test_a_folder_that_cannot_be_synced_is_no_error_and_other_errors_are():
    # Files of /proc are the ones at hand that say EINVAL, as some network file systems do for folders.
    Disk().sync_dir(Path("/proc"))
    with pytest.raises(NotADirectoryError):
        Disk().sync_dir(Path("/proc/version"))


def test_a_save_changes_neither_tensors_nor_random_numbers(tmp_path: Path):
    state = state_of(1)
    before, versions = torch.get_rng_state(), [t._version for t in state["model"].values()]
    Store(tmp_path, disk=QuickDisk()).save(1, state)
    assert_same(state, state_of(1))
    assert [t._version for t in state["model"].values()] == versions
    assert torch.equal(torch.get_rng_state(), before)
