"""Several processes at one store: one writer at a time, any number of readers, who never see a writer at work.

The lock is one that the kernel gives up when its process ends, however it ends: so the tests kill real processes and fork real ones,
and look from outside with nothing of nofm loaded.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import k7_jobs
import pytest
from k7_states import QuickDisk, WatchedDisk, assert_same, state_of

from nofm.engine.checkpoint import CheckpointError, Store
from nofm.engine.files import Disk
from nofm.engine.folder import RunFolder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_reader_never_sees_a_writer_at_work(tmp_path: Path):
    writer = k7_jobs.start("writes", tmp_path / "run", 10**9)
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        store, seen = Store(tmp_path / "run"), [0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            while len(set(seen)) < 50 or len(seen) < 1000:
                state = store.load()
                assert_same(state, state_of(state["step"]))
                seen.append(state["step"])
    finally:
        writer.kill()
        writer.communicate()
    assert seen == sorted(seen)


class TakingTurns(WatchedDisk):
    """At call `number` of the reader, a writer saves twice: what the reader had in hand is deleted."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__()
        self.folder, self.number = folder, number

    def around(self, number: int, name: str, call: Any, args: tuple[Any, ...]) -> Any:
        if number == self.number:
            for step in (2, 3):
                Store(self.folder, 1, disk=QuickDisk()).save(step, state_of(step))
        return call(*args)


def test_a_writer_at_every_moment_of_a_load(tmp_path: Path):
    found, number = [], 0
    while True:  # until the writer's turn would come after the load
        folder = tmp_path / str(number)
        Store(folder, 1, disk=QuickDisk()).save(1, state_of(1))
        disk = TakingTurns(folder, number)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state = Store(folder, disk=disk).load()
        assert_same(state, state_of(state["step"]))
        found.append(state["step"])
        if disk.count <= number:
            break
        number += 1
    assert number >= 6
    assert found == [3] * number + [1]


def test_a_second_writer_is_refused_until_the_first_is_dead(tmp_path: Path):
    writer = k7_jobs.start("writes", tmp_path, 5)
    try:
        assert writer.stdout is not None
        pid = int(writer.stdout.readline())
        assert writer.stdout.readline() == "done\n"
        before = names_in(tmp_path)
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(tmp_path))}: pid {pid} on {socket.gethostname()} saves here"):
            Store(tmp_path).save(9, state_of(9))
        assert names_in(tmp_path) == before
        assert_same(Store(tmp_path).load(), state_of(5))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        Store(tmp_path).save(9, state_of(9))
    finally:
        writer.kill()
        writer.communicate()
    assert (tmp_path / ".lock").read_text() == f"pid {os.getpid()} on {socket.gethostname()}"
    assert_same(Store(tmp_path).load(), state_of(9))


def test_a_child_of_a_fork_does_not_own_what_its_parent_owns(tmp_path: Path):
    store = Store(tmp_path, disk=QuickDisk())
    store.save(1, {"step": 1})
    child = os.fork()
    if child == 0:
        try:
            Disk().lock(tmp_path / ".lock")
        except BaseException as error:
            os._exit(7 if f"pid {os.getppid()} " in str(error) else 8)
        os._exit(9)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    store.save(2, {"step": 2})


# Nothing of nofm: says whether the lock is free, and with a second word keeps it until its input ends.
FROM_OUTSIDE = """
import fcntl, os, sys
f = open(sys.argv[1], 'r+')
try: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB); print('free', flush=True)
except OSError: print('held', flush=True)
if sys.argv[2:]:
    f.truncate(0); f.write('pid 1234567 on elsewhere'); f.flush(); print('kept', flush=True); sys.stdin.read()
"""


def from_outside(folder: Path) -> str:
    return subprocess.check_output([sys.executable, "-c", FROM_OUTSIDE, str(folder / ".lock")], text=True).strip()


def test_stores_of_one_process_share_the_folder_and_closing_gives_it_up(tmp_path: Path):
    first, second = Store(tmp_path, disk=QuickDisk()), Store(tmp_path, disk=QuickDisk())
    first.save(1, {"step": 1})
    second.save(2, {"step": 2})
    first.load()
    assert from_outside(tmp_path) == "held"
    second.close()
    assert from_outside(tmp_path) == "free"
    first.save(3, {"step": 3})
    assert from_outside(tmp_path) == "held"
    first.close()
    first.close()
    Store(tmp_path / "never used").close()


def test_a_lock_that_this_process_lost_by_opening_the_file_is_taken_again_or_missed(tmp_path: Path):
    store = Store(tmp_path, disk=QuickDisk())
    store.save(1, {"step": 1})
    (tmp_path / ".lock").read_text()  # closing any file on the inode frees the lock: such is POSIX
    assert from_outside(tmp_path) == "free"
    store.save(2, {"step": 2})
    assert from_outside(tmp_path) == "held"
    (tmp_path / ".lock").read_text()
    command = [sys.executable, "-c", FROM_OUTSIDE, str(tmp_path / ".lock"), "keep"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert [other.stdout.readline(), other.stdout.readline()] == ["free\n", "kept\n"]
        with pytest.raises(CheckpointError, match="pid 1234567 on elsewhere saves here"):
            store.save(3, {"step": 3})
        other.communicate()
    store.save(3, {"step": 3})
    assert (tmp_path / ".lock").read_text() == f"pid {os.getpid()} on {socket.gethostname()}"


@pytest.mark.parametrize("name", ["ENOLCK", "ENOSYS", "ENOTSUP"])
def test_a_file_system_without_locks_is_used_with_a_warning(name: str, tmp_path: Path):
    class Lockless(QuickDisk):
        def lock(self, path: Path) -> None:
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))

    with pytest.warns(UserWarning, match=rf"{re.escape(str(tmp_path / 'checkpoints'))}: no locks on this file system"):
        RunFolder(tmp_path, resume=False, disk=Lockless()).close()
    with pytest.warns(UserWarning, match=rf"{re.escape(str(tmp_path / 'checkpoints'))}: no locks on this file system"):
        Store(tmp_path / "checkpoints", disk=Lockless()).save(1, state_of(1))
    assert_same(Store(tmp_path / "checkpoints").load(), state_of(1))
