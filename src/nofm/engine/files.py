"""The few calls that a save and a load make to the file system, one method each.

They stand in one place so that tests can record them, let any one of them fail, or stop the process at it, and so that a reader
can check them by eye: files are created afresh and never overwritten, links are not followed, and nothing but a plain file is read.
POSIX only: the rename of a directory, fsync of a directory and record locks are what the protocol stands on.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import stat
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["Disk", "HeldError", "hold", "make_folder", "remove", "sha256_of", "write_file"]

# Locks that this process holds: (device, inode) -> open file, one for all stores of a folder. Record locks, because those of flock
# would live on in forked data loaders when this process is killed. They belong to the process: a fork inherits the files but not the
# locks, and they are lost when any file on the inode is closed here.
_LOCKS: dict[tuple[int, int], int] = {}
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # what a file system without locks answers


class HeldError(Exception):
    """Another process holds the lock; the text says which."""


class Disk:
    """The real file system."""

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """A new file, open for writing. One that exists is an error: nothing is ever written over."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, file: int, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:  # one call writes 2 GiB at most
            rest = rest[os.write(file, rest) :]

    def sync(self, file: int) -> None:
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def sync_dir(self, path: Path) -> None:
        """Make the names in a folder last. Some network file systems have no such call and say so with EINVAL."""
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(file)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def names(self, path: Path) -> list[str]:
        """What a folder holds, in a fixed order."""
        return sorted(os.listdir(path))

    def is_dir(self, path: Path) -> bool:
        """Whether there is a real folder at `path`; a link to one is none."""
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except FileNotFoundError:
            return False

    def read(self, path: Path, limit: int) -> bytearray:
        """All of a plain file of at most `limit` bytes. A pipe or device is not waited for, a link not followed."""
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(file, "rb", buffering=0) as reader:
            facts = os.fstat(file)
            if not stat.S_ISREG(facts.st_mode):
                raise OSError(errno.EINVAL, "not a plain file", str(path))
            if facts.st_size > limit:
                raise OSError(errno.EFBIG, f"{facts.st_size:,} bytes where at most {limit:,} belong", str(path))
            data = bytearray(facts.st_size)
            rest = memoryview(data)
            while rest:
                count = reader.readinto(rest)
                if not count:
                    raise OSError(errno.EIO, "became shorter while it was read", str(path))
                rest = rest[count:]
            return data

    def free(self, path: Path) -> int:
        """The bytes that may still be written where `path` is."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize

    def lock(self, path: Path) -> None:
        """Hold `path` until this process ends, however it ends; `HeldError` if another one does."""
        file = _LOCKS.pop(_key(os.stat(path)), None) if path.exists() else None
        if file is None:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held or not: whoever opened and closed the file here has freed it
            # Only for people: the kernel knows who holds it, so what a dead process left here does not matter.
            holder = f"pid {os.getpid()} on {socket.gethostname()}".encode()
            if os.pread(file, 200, 0) != holder:
                os.ftruncate(file, 0)
                os.pwrite(file, holder, 0)
        except OSError as error:
            other = os.pread(file, 200, 0).decode(errors="replace") or "another process"
            os.close(file)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise HeldError(other) from None
            raise
        _LOCKS[_key(os.fstat(file))] = file

    def unlock(self, path: Path, *, remove: bool = False) -> None:
        """Let others have `path`; nothing if this process does not hold it. `remove`: or rather let nobody have it any more."""
        file = _LOCKS.pop(_key(os.stat(path)), None) if path.exists() else None
        if file is not None:
            if remove:
                path.unlink()  # still held: what another process has locked by now is not this one
            os.close(file)


def _key(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


def hold(disk: Disk, path: Path) -> None:
    """`Disk.lock`, where the file system has locks; else a warning, since a run is worth more than its lock."""
    try:
        disk.lock(path)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(f"{path.parent}: no locks on this file system; see to it that only one run writes here", stacklevel=3)


def sha256_of(path: Path) -> str:
    """Of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(disk: Disk, path: Path, chunks: Iterable[bytes | bytearray]) -> tuple[int, str]:
    """Write a new file that lasts; its size and SHA-256. Its name lasts when its folder is synced."""
    size, digest = 0, hashlib.sha256()
    try:
        file = disk.create(path)
        try:
            for chunk in chunks:
                disk.write(file, chunk)
                digest.update(chunk)
                size += len(chunk)
            disk.sync(file)
        finally:
            disk.close(file)
    except OSError as error:
        error.filename = error.filename or str(path)  # calls on an open file do not know its name
        raise
    return size, digest.hexdigest()


def make_folder(disk: Disk, path: Path) -> None:
    """Make a folder that lasts, and those above it, where they do not exist."""
    try:
        disk.mkdir(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_folder(disk, path.parent)
        with suppress(FileExistsError):  # another process was quicker
            disk.mkdir(path)
    disk.sync_dir(path.parent)


def remove(disk: Disk, path: Path) -> None:
    """Delete a file, a link, or a folder with all it holds."""
    if disk.is_dir(path):
        for name in disk.names(path):
            remove(disk, path / name)
        disk.rmdir(path)
    else:
        disk.unlink(path)
