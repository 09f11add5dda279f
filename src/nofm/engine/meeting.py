"""Where the processes of a run find each other, also after torchrun has started them again.

torchrun serves one key-value store for all its restarts, and what earlier processes have written there stays. gloo and NCCL publish
their addresses under fixed keys, so a restarted process may read the address of one that is gone, and cannot connect. Its own restart
count does not help: it differs between machines. So the processes first agree on a name that none of their predecessors can have
had, and keep all their keys under it.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed

__all__ = ["agreed_name", "meeting_place"]

_PATIENCE = timedelta(minutes=30)  # as long as torch waits for processes that are slow to start
_AGAIN = 0.02  # seconds between two looks into the store
_RECOUNT = 0.25  # seconds until the first process counts again who is there


def meeting_place() -> tuple[Any, int, int]:
    """A store for these processes alone, and this one's rank and the number of all."""
    c10d: Any = distributed  # which has these two names, but does not list them
    store, rank, size = next(c10d.rendezvous("env://", timeout=_PATIENCE))
    return c10d.PrefixStore(agreed_name(store, rank, size), store), rank, size


def agreed_name(store: Any, rank: int, size: int, patience: timedelta = _PATIENCE) -> str:
    """One new name for all processes, whatever earlier ones have left in `store`.

    Each puts a random word in its place. The first process reads the words of all and writes them as a roll; the others sign the roll
    if it has their own word in it, which no old roll can. Words of processes that are gone are replaced sooner or later, and then
    there is a new roll. Once all have signed the same one, it holds.
    """
    word, deadline = secrets.token_hex(8), time.monotonic() + patience.total_seconds()
    store.set(f"nofm/{rank}", word)
    if rank == 0:
        return _call_the_roll(store, size, deadline)
    signed: str | None = None

    def holds() -> bool:
        nonlocal signed
        roll = store.get("nofm/roll").decode()
        if roll.split()[rank : rank + 1] == [word]:
            signed = _short(roll)
            store.set(f"nofm/{signed}/{rank}", "")
        return signed is not None and store.check([f"nofm/{signed}/holds"])

    if not _until(holds, deadline):
        raise TimeoutError(f"process {rank} of {size} has waited {patience} for the first process to count it in; is it on the network?")
    assert signed is not None
    return signed


def _call_the_roll(store: Any, size: int, deadline: float) -> str:
    while time.monotonic() < deadline:
        roll = " ".join(store.get(f"nofm/{rank}").decode() for rank in range(size))
        name = _short(roll)
        store.set("nofm/roll", roll)
        signatures = [f"nofm/{name}/{rank}" for rank in range(1, size)]
        if _until(functools.partial(store.check, signatures), time.monotonic() + _RECOUNT):
            store.set(f"nofm/{name}/holds", "")
            return name
    missing = [rank for rank in range(1, size) if not store.check([f"nofm/{name}/{rank}"])]
    raise TimeoutError(f"processes {missing} of {size} have not come; are they started, and on the same network?")


def _short(roll: str) -> str:
    return hashlib.blake2b(roll.encode(), digest_size=16).hexdigest()


def _until(done: Callable[[], bool], deadline: float) -> bool:
    """Whether `done` came true before the deadline."""
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_AGAIN)
    return True
