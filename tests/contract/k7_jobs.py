"""What other processes do in the checkpoint tests: `python k7_jobs.py JOB FOLDER ...`, one function each, which prints what it finds."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from k7_states import QuickDisk, WatchedDisk, state_of

from nofm.engine.checkpoint import CheckpointError, Store


def start(job: str, folder: Path, *args: object) -> subprocess.Popen[str]:
    """Begin a job from a test."""
    command = [sys.executable, __file__, job, str(folder), *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def result_of(job: str, folder: Path, *args: object) -> Any:
    """Do a job to its end; what it printed."""
    process = start(job, folder, *args)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return json.loads(out)


class DeadlyDisk(WatchedDisk):
    """Ends the process, as kill -9 does, before or after call `number`."""

    def __init__(self, number: int, after: bool) -> None:
        super().__init__()
        self.number, self.after = number, after

    def around(self, number: int, name: str, call: Any, args: tuple[Any, ...]) -> Any:
        if number == self.number and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return call(*args)
        finally:
            if number == self.number:
                os.kill(os.getpid(), signal.SIGKILL)


def killed_at_each_call(folder: Path) -> None:
    """The third save of a store, killed at every call it makes; each in a folder of its own. Prints these, and the number of calls."""
    calls, killed, number = None, [], 0
    while calls is None or number < calls:
        for after in (False, True):
            own = folder / f"{number}-{'after' if after else 'before'}"
            for step in (1, 2):
                Store(own, disk=QuickDisk()).save(step, state_of(step))
            Store(own).close()
            child = os.fork()
            if child == 0:
                disk = DeadlyDisk(number, after)
                Store(own, disk=disk).save(3, state_of(3))
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                killed.append(str(own))
            else:
                calls = number
                break
        number += 1
    print(json.dumps({"calls": calls, "killed": killed}))


def killed_at_random(folder: Path, kills: str) -> None:
    """A child that goes on from what it finds and saves without pause, killed again and again. Prints a copy of each end and the last step
    that the child had seen saved."""
    ends, dice = [], random.Random(0)
    for i in range(int(kills)):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            store = Store(folder / "run")
            first = (store.latest() or 0) + 1
            for step in range(first, first + 100_000):
                store.save(step, state_of(step))
                os.write(writer, f"{step}\n".encode())
        os.close(writer)
        seen = os.read(reader, 1000)  # it is at work
        time.sleep(dice.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reader, 100_000):
            seen += more
        os.close(reader)
        shutil.copytree(folder / "run", folder / f"end-{i}")
        ends.append([str(folder / f"end-{i}"), int(seen.split()[-1])])
    print(json.dumps(ends))


def writes(folder: Path, saves: str) -> None:
    """Saves without pause, one checkpoint kept, then waits to be ended."""
    store = Store(folder, keep=1, disk=QuickDisk())
    for step in range(1, int(saves) + 1):
        store.save(step, state_of(step))
        if step == 1:
            print(os.getpid(), flush=True)
    print("done", flush=True)
    sys.stdin.read()


def hits_a_limit(folder: Path) -> None:
    """The kernel refuses to let a file grow beyond 100 kB. Prints the error, then saves something small."""
    store = Store(folder)
    store.save(1, state_of(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        store.save(2, {"big": torch.zeros(1_000_000)})
    except CheckpointError as error:
        message = str(error)
    left = sorted(os.listdir(folder))
    store.save(3, state_of(3))
    print(json.dumps({"message": message, "left": left}))


def loads_under_audit(folder: Path) -> None:
    """Loads while a hook of the interpreter writes down whatever would run code or leave the process. Prints what it saw, then, to show
    that it sees, what it saw of a pickle."""
    import pickle
    from collections import OrderedDict

    payload = pickle.dumps(OrderedDict(a=1))
    seen: list[str] = []
    watched = (
        "pickle.",
        "marshal.",
        "exec",
        "compile",
        "import",
        "subprocess.",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "socket.",
        "ctypes.",
    )
    on = True
    sys.addaudithook(lambda event, args: seen.append(f"{event} {args[:1]}") if on and event.startswith(watched) else None)
    state = Store(folder).load()
    during_load = list(seen)
    pickle.loads(payload)
    on = False
    print(json.dumps({"step": state["step"], "load": during_load, "pickle": seen[len(during_load) :]}))


if __name__ == "__main__":
    torch.set_num_threads(1)  # a child of a fork has no other threads to wait for
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
