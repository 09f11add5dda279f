"""The corpus of hostile checkpoints: `CASES`, what each is called and how it is made from a good one.

Unless a case is about the manifest, the manifest is made to agree again ("resealed"): a wrong hash would hide what is behind it.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k7_states import reseal

MILLION = 10**6
Damage = Callable[[Path], None]
CASES: dict[str, Damage] = {}


def case(name: str, damage: Damage) -> None:
    assert name not in CASES
    CASES[name] = damage


# The tensor file.


def tensor_file(change: Callable[[bytes, bytes], bytes]) -> Damage:
    """Put another file in its place, made from the JSON of its header and its data."""

    def damage(checkpoint: Path) -> None:
        path = checkpoint / "tensors.safetensors"
        data = path.read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        path.write_bytes(change(data[8:end], data[end:]))
        reseal(checkpoint)

    return damage


def with_length(text: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Change the entries of its header."""

    def changed(text: bytes, data: bytes) -> bytes:
        entries = json.loads(text)
        entries = change(entries) or entries
        return with_length(json.dumps(entries, separators=(",", ":")).encode().ljust(len(text)), data)

    return tensor_file(changed)


def entry(**fields: Any) -> Damage:
    return header(lambda entries: entries["model/w_OI"].update(fields))


def renamed(name: str) -> Damage:
    return header(lambda entries: {name if key == "model/w_OI" else key: value for key, value in entries.items()})


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
case("header of 2^63 bytes", tensor_file(lambda text, data: with_length(text, data, 2**63)))
case("header of 2^64-1 bytes", tensor_file(lambda text, data: with_length(text, data, 2**64 - 1)))
case("header larger than the file", tensor_file(lambda text, data: with_length(text, data, len(text) + len(data) + 1)))
case("header that claims 100 MB", tensor_file(lambda text, data: with_length(text, data, 100_000_000)))
case("header of no bytes", tensor_file(lambda text, data: with_length(b"", data)))
case("no tensor file to speak of", tensor_file(lambda text, data: b""))
case("tensor file of 7 bytes", tensor_file(lambda text, data: b"\0" * 7))
case("header without data", tensor_file(lambda text, data: with_length(text, b"")))
case("data one byte longer", tensor_file(lambda text, data: with_length(text, data + b"\0")))
case("header that is not JSON", tensor_file(lambda text, data: with_length(b"x" * len(text), data)))
case("header nested 2,000 levels", tensor_file(lambda text, data: with_length(b'{"a":' * 2000 + b"1" + b"}" * 2000, data)))
case("header with other spaces", tensor_file(lambda text, data: with_length(text.replace(b",", b", ", 1), data)))
case("header with a key twice", tensor_file(lambda text, data: with_length(b"{" + text.strip()[1:-1] + b"," + text.strip()[1:], data)))
case(
    "header with a million names",
    tensor_file(lambda text, data: with_length(b"{" + b",".join(b'"%d":{}' % i for i in range(MILLION)) + b"}", data)),
)
case("a pickle", tensor_file(lambda text, data: b"cos\nsystem\n(S'touch canary'\ntR."))
case("a zip file", tensor_file(lambda text, data: b"PK\x03\x04" + data))
case("tensors that overlap", header(lambda entries: entries["optimizer/0/momentum"].update(data_offsets=[0, 16])))
case("a hole between tensors", entry(data_offsets=[1000, 1048]))
case("offsets in the wrong order", entry(data_offsets=[48, 0]))
case("another dtype of the same size", entry(dtype="I32"))
case("a dtype that does not exist", entry(dtype="F31"))
case("another shape of the same size", entry(shape=[4, 3]))
case("a negative shape", entry(shape=[-3, -4]))
case("a shape that overflows", entry(shape=[2**40, 2**40, 3]))
case("a tensor called ../../x", renamed("../../x"))
case("a tensor called /etc/passwd", renamed("/etc/passwd"))
case("NUL in a name", renamed("model/w_OI\0"))
case("another unicode form of a name", renamed("model/w\uff3fOI"))
case("a lone surrogate in a name", renamed("model/w_OI\ud800"))
case("a tensor too many", header(lambda entries: {**entries, "canary": EMPTY}))
case("a tensor too few", header(lambda entries: {key: value for key, value in entries.items() if key != "random"}))
case("metadata", header(lambda entries: {"__metadata__": {"a": "b"}, **entries}))


# The rest of the state.


def state_text(text: str | bytes) -> Damage:
    def damage(checkpoint: Path) -> None:
        (checkpoint / "state.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        reseal(checkpoint)

    return damage


def leaf(text: str) -> Damage:
    """One more leaf in the state, with a tensor file that fits as well as it can."""

    def damage(checkpoint: Path) -> None:
        old = (checkpoint / "state.json").read_text()
        (checkpoint / "state.json").write_text(f'{old[:-1]},"x":{text}}}')
        reseal(checkpoint)

    return damage


case("state that is not JSON", state_text("step: 1"))
case("state that is empty", state_text(""))
case("state that is no dict", state_text("[1, 2]"))
case("state that is one tensor", state_text('{"/tensor":["F32",[2]]}'))
case("state that is one tuple", state_text('{"/tuple":[]}'))
case("state that is not UTF-8", state_text(b'{"a":"\xff\xfe"}'))
case("state in UTF-16", state_text('{"a":1}'.encode("utf-16")))
case("state of brackets", state_text("[" * MILLION))
case("a key twice", leaf('{"a":1,"a":2}'))
case("state with more after it", state_text('{"a":1} {"b":2}'))
case("2,000 levels", leaf("[" * 2000 + "]" * 2000))
case("101 levels", leaf("[" * 101 + "]" * 101))
case("NaN", leaf("NaN"))
case("1e999", leaf("1e999"))
case("a number of 5,000 digits", leaf("9" * 5000))
case("a key with a slash", leaf('{"a/b":1}'))
case("an unknown mark", leaf('{"/object":"os.system"}'))
case("a mark beside a key", leaf('{"/tuple":[],"a":1}'))
case("a tuple that is none", leaf('{"/tuple":5}'))
case("a float that is none", leaf('{"/float":"zz"}'))
case("a float of spaces", leaf('{"/float":"7ff8 0000 0000 00"}'))
case("an int that is none", leaf('{"/int":"__import__"}'))
case("a tensor that the file lacks", leaf('{"/tensor":["F32",[2]]}'))
case("an empty tensor that the file lacks", leaf('{"/tensor":["F32",[0]]}'))
case("an unknown dtype", leaf('{"/tensor":["object",[2]]}'))
case("a dtype that is none", leaf('{"/tensor":[["F32"],[2]]}'))
case("a shape below zero", leaf('{"/tensor":["F32",[-1]]}'))
case("a shape of fractions", leaf('{"/tensor":["F32",[1.0]]}'))
case("a shape of booleans", leaf('{"/tensor":["BOOL",[true]]}'))
case("a shape beyond all memory", leaf('{"/tensor":["F32",[4611686018427387904,4611686018427387904]]}'))
case("a shape of a million dimensions", leaf('{"/tensor":["F32",[' + ",".join(["9"] * MILLION) + "]]}"))
case("a million keys", leaf("{" + ",".join(f'"{i}":0' for i in range(MILLION)) + "}"))
case("50,000 tensors", leaf("[" + ",".join(['{"/tensor":["F32",[0]]}'] * 50_000) + "]"))
case("a million tensors", leaf("[" + ",".join(['{"/tensor":["F32",[0]]}'] * MILLION) + "]"))


def whole_state(state: str, *tensors: tuple[str, str, list[int]]) -> Damage:
    """A state and the very header it calls for, so that only what torch makes of it is left to object."""

    def damage(checkpoint: Path) -> None:
        entries = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, dtype, shape in tensors}
        text = json.dumps(entries, separators=(",", ":")).encode()
        (checkpoint / "tensors.safetensors").write_bytes(with_length(text + b" " * (-len(text) % 8), b""))
        (checkpoint / "state.json").write_text(state)
        reseal(checkpoint)

    return damage


HUGE = [0, 2**62, 2**62]
case("an empty tensor too large to count", whole_state(f'{{"a":{{"/tensor":["F32",{HUGE}]}}}}', ("a", "F32", HUGE)))
case("complex numbers of three parts", whole_state('{"a":{"/complex":["F32",[0,3]]}}', ("a", "F32", [0, 3])))
case("complex numbers of integers", whole_state('{"a":{"/complex":["I32",[0,2]]}}', ("a", "I32", [0, 2])))


# The manifest.


def manifest(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(checkpoint: Path) -> None:
        path = checkpoint / "manifest.json"
        content = json.loads(path.read_text())
        replaced = change(content)
        path.write_text(json.dumps(content if replaced is None else replaced))

    return damage


def manifest_text(text: str | bytes) -> Damage:
    return lambda checkpoint: (checkpoint / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode()) and None


def of_state(**fields: Any) -> Damage:
    return manifest(lambda content: content["files"]["state.json"].update(fields))


def sparse(checkpoint: Path, size: int) -> None:
    with open(checkpoint / "tensors.safetensors", "r+b") as file:
        file.truncate(size)
    manifest(lambda content: content["files"]["tensors.safetensors"].update(size=size))(checkpoint)


case("a wrong hash", of_state(sha256="0" * 64))
case(
    "a hash in capitals",
    manifest(lambda c: c["files"]["state.json"].update(sha256=c["files"]["state.json"]["sha256"].upper().replace("0", "O"))),
)
case("a hash that is a number", of_state(sha256=0))
case("a size too small", manifest(lambda c: c["files"]["state.json"].update(size=c["files"]["state.json"]["size"] - 1)))
case("a size too large", manifest(lambda c: c["files"]["state.json"].update(size=c["files"]["state.json"]["size"] + 1)))
case("a size below zero", of_state(size=-1))
case("a size of 300 digits", of_state(size=10**300))
case("a tensor file of 4 TB that is one hole", lambda checkpoint: sparse(checkpoint, 4 << 40))
case("a size in words", of_state(size="many"))
case("a third fact about a file", of_state(mode="rwx"))
case("a file that is a list", manifest(lambda c: c["files"].update({"state.json": [1, 2]})))
case("files that are a list", manifest(lambda c: c.update(files=["state.json", "tensors.safetensors"])))
case("a file too few", manifest(lambda c: c["files"].pop("state.json") and None))
case("a file too many", manifest(lambda c: c["files"].update({"canary": {"size": 0, "sha256": "0" * 64}})))
case("a file above the folder", manifest(lambda c: c["files"].update({"../../x": c["files"].pop("state.json")})))
case("a file with an absolute path", manifest(lambda c: c["files"].update({"/etc/passwd": c["files"].pop("state.json")})))
case("manifest that is not JSON", manifest_text("format: 1"))
case("manifest that is empty", manifest_text(""))
case("manifest that is binary", manifest_text(bytes(range(256))))
case("manifest that is no dict", manifest(lambda c: [c]))
case("manifest nested 2,000 levels", manifest_text('{"format":' * 2000 + "1" + "}" * 2000))
case("manifest with a million keys", manifest(lambda c: {**c, **{str(i): i for i in range(MILLION)}}))
case("manifest with a key twice", lambda p: manifest_text('{"format":1,' + (p / "manifest.json").read_text()[1:])(p))
case("manifest with a key too many", manifest(lambda c: c.update(canary=1)))
case("manifest with a key too few", manifest(lambda c: c.pop("versions") and None))
case("format 2", manifest(lambda c: c.update(format=2)))
case("format in words", manifest(lambda c: c.update(format="1")))
case("format true", manifest(lambda c: c.update(format=True)))
case("no format", manifest(lambda c: c.pop("format") and None))
case("another step", manifest(lambda c: c.update(step=3)))
case("a step that is a float", manifest(lambda c: c.update(step=2.0)))


# The folder.


def swap(name: str, put: Callable[[Path], Any]) -> Damage:
    """Another thing in the place of a file, which is still there under another name outside."""

    def damage(checkpoint: Path) -> None:
        (checkpoint / name).rename(checkpoint.parent / f"aside-{name}")
        put(checkpoint / name)

    return damage


def aside(path: Path) -> None:
    path.symlink_to(path.parent.parent / f"aside-{path.name}")


def folder_elsewhere(checkpoint: Path) -> None:
    checkpoint.rename(checkpoint.parent / "elsewhere")
    checkpoint.symlink_to("elsewhere")


def file_in_place(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.write_text("not a folder")


for file in ("manifest.json", "state.json", "tensors.safetensors"):
    case(f"no {file}", lambda checkpoint, file=file: (checkpoint / file).unlink())
    case(f"{file} is a link", swap(file, aside))
    case(f"{file} is a pipe", swap(file, os.mkfifo))
    case(f"{file} is a folder", swap(file, os.mkdir))
    case(f"{file} is a device", swap(file, lambda path: path.symlink_to("/dev/zero")))
case("a file more in the folder", lambda checkpoint: (checkpoint / "canary.py").write_text("") and None)
case("an empty folder", lambda checkpoint: [path.unlink() for path in checkpoint.iterdir()] and None)
case("the folder is a link", folder_elsewhere)
case("the folder is a file", file_in_place)
