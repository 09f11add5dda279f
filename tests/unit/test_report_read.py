"""Reading run folders: what a crash, a resume, a bad copy or another version leaves behind is understood or named by file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_report_numbers import EVENTS, LAYERS, write_run

import nofm
from nofm.report import ReportError, curves, write_report
from nofm.report.kernels import last_masks
from nofm.report.read import load


def trained(step: int, loss: float) -> dict:
    return {"event": "train", "step": step, "loss": loss}


def started(step: int, resumed_from: int | None) -> dict:
    return {"event": "start", "step": step, "resumed_from": resumed_from}


@pytest.mark.parametrize(
    ("events", "expected", "resumes"),
    [
        ([started(0, None), trained(1, 1.0), trained(2, 2.0)], {1: 1.0, 2: 2.0}, 0),
        ([started(0, None), trained(1, 1.0), trained(2, 2.0), started(1, 1), trained(2, 2.5)], {1: 1.0, 2: 2.5}, 1),
        # The step that was resumed from stays, and so does what no second leg did again: there is none of it left.
        ([started(0, None), trained(1, 1.0), trained(2, 2.0), trained(3, 3.0), started(2, 2)], {1: 1.0, 2: 2.0}, 1),
        ([started(0, None), trained(1, 1.0), started(0, 0), trained(1, 5.0), started(1, 1), trained(2, 6.0)], {1: 5.0, 2: 6.0}, 2),
        ([started(0, None), trained(1, 1.0), trained(2, 2.0), started(0, None), trained(1, 7.0)], {1: 7.0}, 0),
    ],
    ids=["once", "resumed", "resumed-and-stopped", "twice", "from-scratch"],
)
def test_a_resumed_run_counts_every_step_once(tmp_path, events, expected, resumes):
    run = load(write_run(tmp_path / "run", events))
    assert curves.train(run) == expected
    assert run.resumes == resumes


@pytest.mark.parametrize(
    ("events", "status"),
    [
        (EVENTS, "finished"),
        (EVENTS[:-1], "unfinished"),
        ([*EVENTS[:-1], {"event": "error", "step": 20, "message": "boom"}], "failed"),
        ([*EVENTS[:-1], {"event": "error", "step": 20, "message": "boom"}, started(20, 20)], "unfinished"),
        ([*EVENTS, started(10, 10)], "unfinished"),  # its end lies after the step it was resumed from
        ([*EVENTS[:4], {"event": "checkpoint", "step": 10, "path": "x"}, {"event": "of a later version", "step": 11}], "unfinished"),
    ],
    ids=["end", "no-end", "error", "error-then-resumed", "end-then-resumed", "other-events"],
)
def test_status(tmp_path, events, status):
    assert load(write_run(tmp_path / "run", events)).status == status


def test_a_last_line_cut_short_is_left_out_and_said(tmp_path):
    folder = write_run(tmp_path / "run")
    whole = (folder / "events.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    before = b"".join(lines[:-1])
    for length in range(1, len(lines[-1]) - 1):
        (folder / "events.jsonl").write_bytes(before + lines[-1][:length])
        run = load(folder)
        assert run.status == "unfinished"
        assert run.notices == ("line 9 of events.jsonl is cut short, as after a crash; it is left out",)
    (folder / "events.jsonl").write_bytes(whole.rstrip(b"\n"))
    assert load(folder).status == "finished", "a line that is whole counts, with or without its end"
    assert load(folder).notices == ()
    (folder / "events.jsonl").write_bytes(before + b"\0" * 8)  # what some file systems leave after a power cut
    assert len(load(folder).notices) == 1
    assert "cut short" in write_report([folder], tmp_path / "out").read_text()


def edit(**changes: object) -> Callable[[Path], object]:
    return lambda f: (f / "run.json").write_text(json.dumps(json.loads((f / "run.json").read_text()) | changes))


def without(key: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        info = json.loads((folder / "run.json").read_text())
        del info[key]
        (folder / "run.json").write_text(json.dumps(info))

    return change


def line(number: int, text: str | bytes) -> Callable[[Path], object]:
    """Put `text` in the place of a line of events.jsonl."""

    def change(folder: Path) -> None:
        lines = (folder / "events.jsonl").read_bytes().split(b"\n")
        lines[number - 1] = text if isinstance(text, bytes) else text.encode()
        (folder / "events.jsonl").write_bytes(b"\n".join(lines))

    return change


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no-run-json": (lambda f: (f / "run.json").unlink(), r"run\.json: no such file.*copy is incomplete"),
    "run-json-broken": (lambda f: (f / "run.json").write_text('{"format": 1,\n oops}'), r"run\.json, line 2: not valid JSON.*column 2"),
    "run-json-a-list": (lambda f: (f / "run.json").write_text("[]"), r"run\.json: an object is expected, got list"),
    "newer-format": (edit(format=2), r"run\.json: format 2 is not known, only 1; read it with the nofm that wrote it"),
    "no-format": (without("format"), r"run\.json: format None is not known"),
    "no-layers": (without("layers"), r'run\.json: "layers" is missing'),
    "seed-a-text": (edit(seed="0"), r"run\.json: \"seed\" is '0', int is expected"),
    "seed-true": (edit(seed=True), r'run\.json: "seed" is True, int is expected'),
    "earlier-a-text": (edit(earlier=["nofm"]), r'run\.json: "earlier\[0\]\.command" is missing'),
    "earlier-without-its-step": (edit(earlier=[{"command": [], "until": None}]), r'"earlier\[0\]\.until" is None, int is expected'),
    "layer-a-text": (edit(layers=["conv"]), r"run\.json: layers\[0\] is str, an object is expected"),
    "layer-without-shape": (edit(layers=[{"name": "a", "kind": "b"}]), r'run\.json: "layers\[0\]\.shape" is missing'),
    "layer-odd-shape": (edit(layers=[LAYERS[0] | {"shape": [4, "x"]}]), r"layers\[0\]\.shape is \[4, 'x'\], whole numbers"),
    "layer-note-a-number": (edit(layers=[LAYERS[0] | {"note": 7}]), r'"layers\[0\]\.note" is 7, str or null is expected'),
    "layer-groups-a-text": (edit(layers=[LAYERS[0] | {"groups": "x"}]), r"\"layers\[0\]\.groups\" is 'x', int or null is expected"),
    "cost-a-list": (edit(cost={"macs": [], "macs_sparse": 1.0}), r'run\.json: "cost\.macs" is \[\], int or float is expected'),
    "kept-nothing": (
        line(9, '{"event": "end", "step": 20, "metrics": {}, "seconds": 1.0, "kept": null}'),
        r'line 9: "kept" is None, int is expected',
    ),
    "kept-in-a-text": (
        line(9, '{"event": "end", "step": 20, "metrics": {}, "seconds": 1.0, "kept": 4, "kept_in": {"a": "4"}}'),
        r"line 9: \"kept_in\.a\" is '4', int is expected",
    ),
    "no-events-file": (lambda f: (f / "events.jsonl").unlink(), r"events\.jsonl: no such file; the run has not begun"),
    "empty": (lambda f: (f / "events.jsonl").write_text(""), r"events\.jsonl: no events"),
    "only-half-a-line": (lambda f: (f / "events.jsonl").write_text('{"event"'), r"events\.jsonl: no events"),
    "only-a-start": (lambda f: (f / "events.jsonl").write_text(json.dumps(EVENTS[0])), r"no train, eval or sad event yet"),
    "broken-middle": (line(3, '{"event": "sad", "st'), r"events\.jsonl, line 3: not valid JSON: Unterminated string.*column 18"),
    "two-events-in-a-line": (
        line(3, '{"event": "a", "step": 1}{"event": "b", "step": 1}'),
        r"events\.jsonl, line 3: not valid JSON: Extra data",
    ),
    "empty-middle": (line(4, ""), r"events\.jsonl, line 4: not valid JSON"),
    "not-utf-8": (line(2, b'{"event": "\xff"}'), r"events\.jsonl, line 2: not UTF-8"),
    "a-number": (line(2, "7"), r"events\.jsonl, line 2: an object is expected, got int"),
    "no-step": (line(2, '{"event": "train"}'), r'events\.jsonl, line 2: "step" is missing'),
    "loss-a-text": (line(2, '{"event": "train", "step": 1, "loss": "x"}'), r"line 2: \"loss\" is 'x', int or float or null is expected"),
    "start-without-from": (line(1, '{"event": "start", "step": 0}'), r'line 1: "resumed_from" is missing'),
    "sad-backwards": (line(3, json.dumps(EVENTS[2] | {"since": 10})), r"line 3: sad from step 10 to 10 of 32 weights"),
    "sad-of-nothing": (line(3, json.dumps(EVENTS[2] | {"weights": 0})), r"line 3: sad from step 0 to 10 of 0 weights"),
    "sad-of-unknown-layer": (line(3, json.dumps(EVENTS[2] | {"changed": {"z": 1}})), r"line 3: sad of layer 'z', which run\.json does not"),
    "sad-from-start-of-unknown-layer": (
        line(3, '{"event": "sad_from_start", "step": 1, "changed": {"z": 1}, "weights": 32}'),
        r"line 3: sad of layer 'z', which run\.json does not",
    ),
    "sad-from-start-of-nothing": (
        line(3, '{"event": "sad_from_start", "step": 1, "changed": {}, "weights": 0}'),
        r"line 3: sad from step 0 to 1 of 0 weights",
    ),
    "found-a-word": (line(3, '{"event": "found", "step": 9, "values": {"decay": "x"}}'), r"line 3: \"values\.decay\" is 'x', int or float"),
    "sad-of-words": (line(3, json.dumps(EVENTS[2] | {"changed": {"a": "x"}})), r"line 3: sad of layer 'a' is 'x', a count is expected"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_named_by_file_and_line(tmp_path, spoil, message):
    folder = write_run(tmp_path / "run")
    load(folder)
    spoil(folder)
    with pytest.raises(ReportError, match=message) as caught:
        write_report([folder], tmp_path / "out")
    assert isinstance(caught.value, nofm.NofmError)
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "out").exists(), "a report that cannot be made leaves nothing behind"


def test_folders_that_make_no_report(tmp_path):
    folder = write_run(tmp_path / "run")
    with pytest.raises(ReportError, match="nowhere: no such folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "out")
    with pytest.raises(ReportError, match="at least one run"):
        write_report([], tmp_path / "out")
    with pytest.raises(ReportError, match="run: this run is given twice"):
        write_report([folder, tmp_path / "." / "run"], tmp_path / "out")


def test_masks_from_beyond_the_last_event_are_those_of_a_leg_that_was_taken_back(tmp_path):
    run = load(write_run(tmp_path / "run"))
    assert last_masks(run) is None
    (run.folder / "masks").mkdir()
    for name in ("step-00000010", "step-00000020", "step-00000030", "step-final"):
        (run.folder / "masks" / f"{name}.safetensors").touch()
    found = last_masks(run)
    assert found is not None
    assert found.name == "step-00000020.safetensors"
