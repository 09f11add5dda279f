"""A disk that loses power: what may be left of a sequence of calls when the machine stops after any one of them.

The model is the weakest that POSIX allows. Bytes written to a file last once the file is synced; before that, a crash leaves the
file as it was last synced, cut short, full of zeros, or whole. A change of a folder (a new name, a rename, a deletion) lasts once that
folder is synced; before that, each change may have reached the disk or not, independently of all others and of their order. A rename
within a folder is one change. Real file systems promise more, but different ones promise different things.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from k7_states import WRITING, WatchedDisk

Call: TypeAlias = tuple[Any, ...]  # name, path relative to the root, and bytes or second path
Tree: TypeAlias = "bytes | tuple[tuple[str, Tree], ...]"

MOST_COMBINATIONS = 1024  # beyond this, the family described at `combinations`


class Interrupted(BaseException):
    """The process is gone: nobody gets to clean up."""


class Recorder(WatchedDisk):
    """Writes down the calls that change something, as they succeed. Stops the process after `stop` of them, if given."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.calls, self.open = root, [], {}
        self.stop: int | None = None

    def around(self, number: int, name: str, call: Any, args: tuple[Any, ...]) -> Any:
        result = call(*args)
        if name in WRITING:
            self.note(name, args, result)
            if self.stop is not None and len(self.calls) >= self.stop:
                raise Interrupted
        return result

    def note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "close":
            return
        if name == "create":
            self.open[result] = args[0]
        first = self.open[args[0]] if name in ("write", "sync") else args[0]
        rest = [bytes(arg) if isinstance(arg, bytes | bytearray) else arg.relative_to(self.root).parts for arg in args[1:]]
        self.calls.append((name, first.relative_to(self.root).parts, *rest))


@dataclass(eq=False)
class File:
    data: bytes = b""
    synced: bytes = b""

    def versions(self) -> list[bytes]:
        """What a crash may leave, the whole file first."""
        zeros = bytes(len(self.data))
        return list(dict.fromkeys([self.data, self.synced, self.data[: len(self.data) // 2], zeros]))


@dataclass(eq=False)
class Folder:
    now: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def change(self, names: dict[str, File | Folder | None]) -> None:
        self.changes.append(names)
        self.now = _changed(self.now, names)


def _changed(entries: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    return {name: node for name, node in {**entries, **names}.items() if node is not None}


class Machine:
    """Calls happen; then the power fails."""

    def __init__(self) -> None:
        self.root = Folder()
        self.nodes: list[File | Folder] = [self.root]

    def find(self, path: tuple[str, ...]) -> Any:
        node: Any = self.root
        for name in path:
            node = node.now[name]
        return node

    def run(self, call: Call) -> None:
        name, path, *rest = call
        parent = self.find(path[:-1])
        match name:
            case "mkdir" | "create":
                node = Folder() if name == "mkdir" else File()
                self.nodes.append(node)
                parent.change({path[-1]: node})
            case "write":
                self.find(path).data += rest[0]
            case "sync":
                self.find(path).synced = self.find(path).data
            case "sync_dir":
                folder = self.find(path)
                folder.synced, folder.changes = folder.now, []
            case "rename":
                assert rest[0][:-1] == path[:-1], "a rename between folders is two changes"
                parent.change({path[-1]: None, rest[0][-1]: self.find(path)})
            case "unlink" | "rmdir":
                parent.change({path[-1]: None})

    def crashes(self) -> Iterator[Tree]:
        """Every different state of the disk after a crash now, or a family of them if there are too many."""
        doubts: list[tuple[Any, list[Any]]] = []
        for node in self.nodes:
            if isinstance(node, Folder):
                doubts += [((node, i), [True, False]) for i in range(len(node.changes))]
            elif node.data != node.synced:
                doubts.append((node, node.versions()))
        seen = set()
        for choice in combinations([options for _, options in doubts]):
            tree = _tree(self.root, dict(zip([doubt for doubt, _ in doubts], choice, strict=True)))
            if tree not in seen:
                seen.add(tree)
                yield tree


def combinations(options: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """All of them if they are not too many. Else: all kept, all lost, each one lost alone, each one kept alone, each two lost."""
    total = 1
    for choices in options:
        total *= len(choices)
    if total <= MOST_COMBINATIONS:
        yield from itertools.product(*options)
        return
    kept = [choices[0] for choices in options]
    for i, j in itertools.combinations_with_replacement(range(len(options)), 2):
        for a, b in itertools.product(options[i], options[j]):
            yield tuple(a if k == i else b if k == j else kept[k] for k in range(len(options)))
    for version in (1, 2, 3):
        lost = [choices[min(version, len(choices) - 1)] for choices in options]
        yield tuple(lost)
        for i in range(len(options)):
            yield tuple(kept[k] if k == i else lost[k] for k in range(len(options)))


def _tree(node: File | Folder, choice: dict[Any, Any]) -> Tree:
    if isinstance(node, File):
        return choice.get(node, node.data)
    entries = node.synced
    for i, names in enumerate(node.changes):
        if choice[node, i]:
            entries = _changed(entries, names)
    return tuple(sorted((name, _tree(child, choice)) for name, child in entries.items()))


def lay_out(tree: Tree, path: Path) -> None:
    """Put a state of the disk into the real one."""
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir()
    for name, child in tree:
        lay_out(child, path / name)
