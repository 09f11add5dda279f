"""Files that mean harm, and files that were harmed: refused with a `CheckpointError`, or skipped for an older checkpoint, and said so.

Each case of the corpus (k7_corpus) damages a good checkpoint in one way. It is loaded alone, where it must be refused, and beside an
older checkpoint, which must be given instead with a warning that names the damaged one. Nothing here waits on a clock; a hang ends
in the timeout.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from k7_corpus import CASES
from k7_states import QuickDisk, assert_same, reseal, state_of

from nofm.engine.checkpoint import CheckpointError, Store

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    for step in (1, 2):
        Store(folder, disk=QuickDisk()).save(step, state_of(step))
    return folder


def copied(good: Path, to: Path, *, alone: bool) -> Path:
    shutil.copytree(good, to)
    if alone:
        shutil.rmtree(to / "step-00000001")
    return to


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_checkpoint_is_refused_alone_and_skipped_beside_an_older_one(name: str, good: Path, tmp_path: Path):
    alone, beside = copied(good, tmp_path / "alone", alone=True), copied(good, tmp_path / "beside", alone=False)
    for folder in (alone, beside):
        CASES[name](folder / "step-00000002")
    for ask in (Store(alone).load, Store(alone).latest, lambda: Store(alone).load(step=2), lambda: Store(beside).load(step=2)):
        with pytest.raises(CheckpointError, match=r"no checkpoint( of step 2)? can be read: .*/step-00000002: "):
            ask()
    with pytest.warns(UserWarning, match=re.escape(str(beside / "step-00000002")) + ": .*; skipped") as caught:
        assert_same(Store(beside).load(), state_of(1))
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="skipped"):
        assert Store(beside).latest() == 1
    Store(beside, disk=QuickDisk()).save(3, state_of(3))  # and is no obstacle
    assert_same(Store(beside).load(), state_of(3))
    Store(beside).close()


def test_the_corpus_is_large():
    assert len(CASES) >= 100


POINTERS: dict[str, Callable[[Path], Any]] = {
    "outside": lambda path: path.write_text("../step-00000001\n"),
    "absolute": lambda path: path.write_text("/etc\n"),
    "missing": lambda path: path.write_text("step-00000007\n"),
    "empty": lambda path: path.write_text(""),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "short binary": lambda path: path.write_bytes(b"\xff\0\n"),
    "a megabyte": lambda path: path.write_text("step-00000001\n" * 70_000),
    "no end of line": lambda path: path.write_text("step-00000001"),
    "two lines": lambda path: path.write_text("step-00000001\nstep-00000002\n"),
    "another spelling": lambda path: path.write_text("step-1\n"),
    "too many zeros": lambda path: path.write_text("step-000000001\n"),
    "other digits": lambda path: path.write_text("step-0000000\u0661\n"),
    "take nought": lambda path: path.write_text("step-00000001.0\n"),
    "NUL": lambda path: path.write_text("step-00000001\0\n"),
    "the folder itself": lambda path: path.write_text(".\n"),
    "a link": lambda path: path.symlink_to("step-00000001"),
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
}


@pytest.mark.parametrize("name", POINTERS)
def test_a_bad_pointer_is_named_and_the_newest_checkpoint_is_given(name: str, good: Path, tmp_path: Path):
    folder = copied(good, tmp_path / "run", alone=False)
    (folder / "latest").unlink()
    POINTERS[name](folder / "latest")
    about = folder / ("step-00000007" if name == "missing" else "latest")
    with pytest.warns(UserWarning, match=re.escape(str(about))) as caught:
        assert_same(Store(folder).load(), state_of(2))
    assert len(caught) == 1
    shutil.rmtree(folder / "step-00000001")
    shutil.rmtree(folder / "step-00000002")
    with pytest.raises(CheckpointError, match="no checkpoint can be read"):
        Store(folder).latest()


def test_every_truncation_of_every_file_is_noticed(good: Path, tmp_path: Path):
    folder = copied(good, tmp_path / "run", alone=False)
    truncations = 0
    for name in ("latest", "step-00000002/manifest.json", "step-00000002/state.json", "step-00000002/tensors.safetensors"):
        path = folder / name
        whole, sealed = path.read_bytes(), (folder / "step-00000002" / "manifest.json").read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            wanted = 2 if name == "latest" else 1
            for resealed in (False, True) if name.endswith(("state.json", "tensors.safetensors")) else (False,):
                if resealed:
                    reseal(folder / "step-00000002")
                with pytest.warns(UserWarning, match="latest|step-00000002") as caught:
                    assert_same(Store(folder).load(), state_of(wanted))
                assert len(caught) == 1
                truncations += 1
            (folder / "step-00000002" / "manifest.json").write_bytes(sealed)
        path.write_bytes(whole)
    assert truncations > 1500
    assert_same(Store(folder).load(), state_of(2))


@pytest.mark.parametrize("resealed", [False, True], ids=["as found", "resealed"])
def test_random_changes_give_an_error_or_a_state_and_without_the_right_hash_the_same_state(resealed: bool, good: Path, tmp_path: Path):
    folder = copied(good, tmp_path / "run", alone=True)
    checkpoint, dice = folder / "step-00000002", random.Random(0)
    whole = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    pieces = [
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"0",
        b"9" * 20,
        b"-",
        b"null",
        b"/tensor",
        b"/tuple",
        b"\0",
        b"\xff",
        b"1e5",
        b"true",
    ]
    refused = accepted = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1500):
            name = dice.choice(sorted(whole) if not resealed else ["state.json", "tensors.safetensors"])
            data = bytearray(whole[name])
            for _ in range(dice.randint(1, 3)):
                at = dice.randrange(len(data))
                data[at : at + dice.randint(0, 3)] = dice.choice([*pieces, bytes([dice.randrange(256)])])
            (checkpoint / name).write_bytes(data)
            if resealed:
                reseal(checkpoint)
            try:
                state = Store(folder).load()
                accepted += 1
                assert isinstance(state, dict)
                if not resealed:
                    assert_same(state, state_of(2))
            except CheckpointError:
                refused += 1
            for other, content in whole.items():
                (checkpoint / other).write_bytes(content)
    assert refused > 700
    assert accepted > 10, "changes of versions, or of the values of tensors with the hash made right, are no errors"


def test_a_pickle_written_by_torch_is_not_opened(good: Path, tmp_path: Path):
    folder = copied(good, tmp_path / "run", alone=True)
    canary = tmp_path / "canary"

    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(canary),)

    torch.save({"a": Harm()}, folder / "step-00000002" / "tensors.safetensors")
    reseal(folder / "step-00000002")
    with pytest.raises(CheckpointError, match="tensor file"):
        Store(folder).load()
    assert not canary.exists()
    (folder / "step-00000002" / "tensors.safetensors").rename(tmp_path / "pickle")
    torch.load(tmp_path / "pickle", weights_only=False)
    assert canary.exists(), "the pickle would have worked"
