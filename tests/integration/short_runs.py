"""A short run that has everything a long one has, and a process that starts it again and again, killed or signalled at will.

The process imports torch once and forks for each run, so that fifty kills take minutes and not an hour. It never computes anything
itself, so its children start as cleanly as a new process would.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nofm.engine.config import (
    DataConfig,
    EngineConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    SparsityConfig,
)

# Dropout, augmentation, two loader processes, a moving average, momentum; lines of the log, evaluations and checkpoints at
# different steps, so that each must carry something over from one to the next.
CONFIG = RunConfig(
    model=ModelConfig(name="cnn", width=16, dropout=0.2),
    data=DataConfig(name="digits", crop=1, flip=True, loader="workers"),
    sparsity=SparsityConfig(pattern="2:4", method=MethodConfig(kind="srste", decay=5e-3)),
    optim=OptimConfig(lr=0.05, weight_decay=5e-4),
    schedule=ScheduleConfig(kind="cosine", warmup=10),
    engine=EngineConfig(
        steps=60, batch_size=32, accumulate=2, ema=0.9, clip=5.0, log_every=7, eval_every=25, checkpoint_every=5, workers=2, threads=1
    ),
    seed=3,
    device="cpu",
)

_UNSTEADY = {"time", "images_per_second", "seconds", "path"}


def events(out: Path) -> list[dict[str, Any]]:
    """What happened, as a reader sees it: a resumed run takes back what it repeats."""
    kept: list[dict[str, Any]] = []
    for line in (out / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            back_to = event["resumed_from"]
            kept = [] if back_to is None else [e for e in kept if e["step"] <= back_to]
        elif event["event"] not in ("checkpoint", "error"):
            kept.append({k: v for k, v in event.items() if k not in _UNSTEADY})
    # An event of the step that a checkpoint is of may come a second time, the same.
    return list({json.dumps(event, sort_keys=True): event for event in kept}.values())


def digests(out: Path) -> dict[str, str]:
    """One hash for each thing that a run ends with."""
    from nofm.engine.checkpoint import Store
    from nofm.engine.states import pack

    state = Store(out / "checkpoints").load()
    found = {f"state {name}": _hash(part) for name, part in _packed(state, pack) if name != "clock"}
    found |= {f.name: _hash(f.read_bytes()) for f in sorted(out.glob("*.safetensors"))}
    found |= {f"masks {f.name}": _hash(_masks(f)) for f in sorted((out / "masks").glob("*.safetensors"))}
    return found | {"events": _hash(json.dumps(sorted(json.dumps(e, sort_keys=True) for e in events(out))).encode())}


def _packed(state: dict[str, Any], pack: Any):
    for name, part in state.items():
        packed = pack({"part": part})
        yield name, packed.json + b"".join(bytes(chunk) for chunk in packed.chunks())


def _masks(path: Path) -> bytes:
    """What a file of masks says. Its bytes may differ: safetensors writes metadata in any order."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118 - not a dict
        return json.dumps([tensors, file.metadata()], sort_keys=True).encode()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Launcher:
    """The process that forks runs."""

    process: subprocess.Popen

    @classmethod
    def start(cls) -> Launcher:
        command = [sys.executable, __file__]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def begin(self, out: Path, **request: Any) -> int:
        """Start a run; its process id, which is also that of its process group."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"out": str(out), **request}) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> int:
        """Wait for the run; its exit code, or minus the signal that killed it."""
        assert self.process.stdout
        return int(self.process.stdout.readline())

    def run(self, out: Path, **request: Any) -> int:
        self.begin(out, **request)
        return self.end()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def clear_group(group: int) -> bool:
    """Kill what is left of a process group; whether there was something."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


# ---- in the process that forks ----


def _serve() -> None:
    import nofm.engine.train  # imported now, inherited by every run
    import nofm.tasks.classification  # noqa: F401
    from nofm.data import workers  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(request)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _child(request: dict[str, Any]) -> None:
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = _train(request)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _train(request: dict[str, Any]) -> int:
    from nofm.engine.signals import Stopped
    from nofm.engine.train import train

    disk = _CountingDisk(request.get("at_call"), request.get("signal", signal.SIGKILL))
    if (phase := request.get("terminate_in")) is not None:
        _terminate_in(phase, disk)
    try:
        train(CONFIG, Path(request["out"]), resume=request.get("resume", False), disk=disk)
    except Stopped as stopped:
        return stopped.exit_code
    if "count_in" in request:
        Path(request["count_in"]).write_text(str(disk.calls))
    return 0


def _CountingDisk(at: int | None, number: int) -> Any:
    from nofm.engine.files import Disk

    class Counting(Disk):
        """Sends this process a signal before the `at`-th change that it makes to the file system."""

        calls = 0

        def _count(self) -> None:
            self.calls += 1
            if self.calls == at:
                os.kill(os.getpid(), number)

    def counted(name: str) -> Any:
        real = getattr(Disk, name)

        def call(self: Any, *args: Any) -> Any:
            self._count()
            return real(self, *args)

        return call

    for name in ("create", "write", "sync", "sync_dir", "rename", "unlink", "rmdir"):
        setattr(Counting, name, counted(name))
    return Counting()


def _terminate_in(phase: str, disk: Any) -> None:
    """Send SIGTERM to the whole group, loader processes included, in a certain phase of the run."""
    from nofm.engine import loop
    from nofm.tasks import models
    from nofm.tasks.classification import Classification

    def before(owner: Any, name: str, when: int) -> None:
        real, calls = getattr(owner, name), [0]

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == when:
                os.killpg(0, signal.SIGTERM)
            return real(*args, **kwargs)

        setattr(owner, name, wrapper)

    places = {
        "setup": (models, "build_model", 2),
        "training": (loop.Trainer, "_train_step", 13),
        "evaluation": (Classification, "measure", 3),
        "saving": (type(disk), "rename", 12),
        "logging": (loop.Trainer, "_log", 3),
    }
    before(*places[phase])


if __name__ == "__main__":
    _serve()
