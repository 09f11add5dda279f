"""Power loss: whenever it strikes, the store holds the old or the new checkpoint, complete.

kill -9 cannot show this, because the kernel still writes what a dead process has left. So the calls of real saves are recorded, a
model of a disk (k7_power) says what may be left of every prefix of them, and each such state is put into a real folder and loaded.
Four things are asked of it: the state of the old or the new save to the last bit; after a save has returned, of the new one; that
`latest` never names anything incomplete, so that a load never has to skip; and that the next save works. The same check is then
shown to fail when any one sync is left out of the protocol, or two of its parts change places.
"""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from k7_power import Call, Interrupted, Machine, Recorder, Tree, lay_out
from k7_states import QuickDisk, assert_same, state_of

from nofm.engine.checkpoint import CheckpointError, Store

# Steps as a run may save them: the first, the second, with one to delete, the same again, and after going back to an earlier one.
STEPS = [1, 2, 3, 3, 2, 4]
# This save does not get to its rename.
INTERRUPTED = 4


@dataclass
class Save:
    """Calls number `start` to `end` are those of the save of `state`; it has not returned if it was `cut`."""

    start: int
    end: int
    state: dict[str, Any]
    cut: bool


@dataclass
class History:
    calls: list[Call]
    saves: list[Save]

    def allowed(self, count: int) -> list[dict[str, Any] | None]:
        """What may be found after the first `count` calls; None stands for no checkpoint."""
        done = [save.state for save in self.saves if save.end <= count and not save.cut]
        going = [save.state for save in self.saves if save.start < count < save.end and not save.cut]
        return [done[-1] if done else None, *going]

    def without(self, i: int) -> History:
        return History(
            self.calls[:i] + self.calls[i + 1 :], [Save(s.start - (s.start > i), s.end - (s.end > i), s.state, s.cut) for s in self.saves]
        )


def history(root: Path, keep: int) -> History:
    """Save for real, and write down how."""
    disk = Recorder(root)
    store = Store(root / "checkpoints", keep, disk=disk)
    saves: list[Save] = []
    for take, step in enumerate(STEPS):
        start, state = len(disk.calls), state_of(step, take)
        disk.stop = start + 6 if take == INTERRUPTED else None
        try:
            store.save(step, state)
        except Interrupted:
            assert take == INTERRUPTED
        saves.append(Save(start, len(disk.calls), state, disk.stop is not None))
    return History(disk.calls, saves)


class Checker:
    """Loads states of the disk, each different one once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found, self.crashes = folder, {}, 0

    def load(self, tree: Tree) -> Any:
        """The state found; None if there is none; a text if anything else came of it."""
        if tree not in self.found:
            shutil.rmtree(self.folder, ignore_errors=True)
            lay_out(tree, self.folder)
            store = Store(self.folder / "checkpoints", disk=QuickDisk())
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a load that has to skip something warns
                try:
                    state = store.load()
                except (CheckpointError, UserWarning) as error:
                    state = None if str(error).endswith("there is no checkpoint") and store.latest() is None else str(error)
            self.found[tree] = state, (self.folder / "checkpoints" / "latest").exists()
        return self.found[tree]

    def trouble(self, history: History, first: int = 0) -> str | None:
        """What is wrong with some crash after call number `first` or later; None if all is well."""
        machine = Machine()
        for count in range(len(history.calls) + 1):
            if count:
                machine.run(history.calls[count - 1])
            if count < first:
                continue
            allowed = history.allowed(count)
            for tree in machine.crashes():
                self.crashes += 1
                found, points = self.load(tree)
                after = f"after call {count}, {history.calls[count - 1] if count else 'none'}"
                if isinstance(found, str):
                    return f"{after}: {found}"
                if not any(_same(found, state) for state in allowed):
                    return f"{after}: found {found and (found['step'], found['take'])}"
                if allowed[0] is not None and not points:
                    return f"{after}: `latest` is gone"
        return None


def _same(found: dict[str, Any] | None, wanted: dict[str, Any] | None) -> bool:
    if found is None or wanted is None:
        return found is wanted
    try:
        assert_same(found, wanted)
    except AssertionError:
        return False
    return True


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Checker:
    return Checker(tmp_path_factory.mktemp("checker") / "disk")


@pytest.fixture(scope="module", params=[1, 2], ids=["keep=1", "keep=2"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> History:
    return history(tmp_path_factory.mktemp("recorded"), request.param)


def test_every_crash_leaves_the_old_or_the_new_checkpoint(recorded: History, checker: Checker):
    crashes, states = checker.crashes, len(checker.found)
    assert checker.trouble(recorded) is None
    crashes, states = checker.crashes - crashes, len(checker.found) - states
    print(f"{len(recorded.calls)} calls, {crashes} crashes, {states} new states of the disk")
    assert len(recorded.calls) > 100
    assert crashes > 1000
    assert len(checker.found) > 300


def test_the_next_save_works_after_any_crash_and_leaves_nothing_behind(recorded: History, tmp_path: Path):
    machine, trees = Machine(), {}
    for call in recorded.calls:
        machine.run(call)
        trees.update(dict.fromkeys(machine.crashes()))
    for i, tree in enumerate(list(trees)[::4]):
        lay_out(tree, tmp_path / str(i))
        folder = tmp_path / str(i) / "checkpoints"
        store = Store(folder, 1, disk=QuickDisk())
        store.save(9, state_of(9))
        assert_same(store.load(), state_of(9))
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "latest", "step-00000009"]
        store.close()


def test_every_sync_is_needed(recorded: History, checker: Checker):
    syncs = [i for i, call in enumerate(recorded.calls) if call[0].startswith("sync")]
    names = {call[1][-1:] for call in recorded.calls if call[0] == "sync"}
    assert names == {("manifest.json",), ("state.json",), ("tensors.safetensors",), (".tmp-latest",)}
    completed = sum(not save.cut for save in recorded.saves)
    cut = [i for i in syncs for save in recorded.saves if save.cut and save.start <= i < save.end]  # its files never get a name
    assert len(syncs) - len(cut) == 1 + 7 * completed, (
        "one for the folder itself; then three files, their folder, twice the parent, `latest`"
    )
    idle = [recorded.calls[i] for i in syncs if i not in cut and checker.trouble(recorded.without(i), first=i) is None]
    assert idle == []


def test_the_parts_of_a_save_cannot_change_places(tmp_path: Path, checker: Checker):
    recorded = history(tmp_path, keep=1)
    calls, (first, second) = recorded.calls, recorded.saves[:2]
    to_target, to_latest = (i for i in range(second.start, second.end) if calls[i][0] == "rename")
    latest, deletion = slice(to_target + 2, to_latest + 2), slice(to_latest + 2, second.end)
    assert [call[0] for call in calls[latest]] == ["create", "write", "sync", "rename", "sync_dir"]
    assert [call[0] for call in calls[deletion]] == ["unlink", "unlink", "unlink", "rmdir"]
    wrong = {
        "latest before the rename": moved(calls, latest, to_target),
        "deletion before latest": moved(calls, deletion, latest.start),
        "deletion before latest is synced": moved(calls, deletion, latest.stop - 1),
        "first save: manifest after the rename": with_late_manifest(calls, first),
    }
    assert checker.trouble(recorded) is None
    for name, sequence in wrong.items():
        assert len(sequence) == len(calls)
        assert checker.trouble(History(sequence, recorded.saves)) is not None, name


def moved(calls: list[Call], part: slice, to: int) -> list[Call]:
    assert to < part.start
    return calls[:to] + calls[part] + calls[to : part.start] + calls[part.stop :]


def with_late_manifest(calls: list[Call], save: Save) -> list[Call]:
    """The folder gets its final name first, then its manifest."""
    rename = next(i for i in range(save.start, save.end) if calls[i][0] == "rename")
    (*above, temporary), (*_, target) = calls[rename][1:]
    manifest = calls.index(("create", (*above, temporary, "manifest.json")))
    late = [(name, tuple(target if part == temporary else part for part in path), *rest) for name, path, *rest in calls[manifest:rename]]
    return [*calls[:manifest], calls[rename], *late, *calls[rename + 1 :]]
