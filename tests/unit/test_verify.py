"""verify on models, state dicts and files: what is N:M, what is not quite, and what was never pruned."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import nofm


def folded(pattern: str = "2:4", **options) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.ConvTranspose2d(16, 8, 2), nn.Linear(32, 32), nn.Linear(32, 10))
    nofm.sparsify_(model, pattern, **options)
    nofm.fold_(model)
    return model


@pytest.mark.parametrize("pattern", ["1:2", "2:4", "1:4", "3:4", "4:8", "2:8", "1:16"])
def test_finds_the_pattern_and_axis_of_a_folded_model(pattern):
    report = nofm.verify(folded(pattern))
    assert [str(report[name].pattern) for name in ("1.weight", "2.weight", "3.weight")] == [pattern] * 3
    assert [report[name].axis for name in ("1.weight", "2.weight", "3.weight")] == [1, 0, 1]
    assert [w.name for w in report.weights if w.all_ones] == ["0.weight", "4.weight"]
    assert report.ok
    assert "3 of 5 weights are N:M" in str(report)


def test_a_sparsified_model_is_checked_by_what_its_layers_compute_with():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    nofm.sparsify_(model, {"0": "1:4", "1": "2:8"})
    report = nofm.verify(model)
    assert report.ok
    assert {w.name: (str(w.pattern), w.groups, w.zeros) for w in report.weights if w.pattern} == {
        "0.weight": ("1:4", 64, 0.75),
        "1.weight": ("2:8", 32, 0.75),
    }
    assert "fold_ writes it in" in report["0.weight"].note
    assert (model[0].weight != 0).all(), "verify must not change weights"


def test_a_dense_method_is_told_apart():
    layer = nn.Linear(8, 8)
    nofm.sparsify_(layer, "2:4")
    nofm.attach(nofm.Dense(), layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    report = nofm.verify(layer)
    assert not report.ok
    assert report["weight"].all_ones
    assert report["weight"].violations == 16
    assert report["weight"].note == "nothing is pruned"


def test_counts_violating_groups():
    state = folded("2:4").state_dict()
    state["3.weight"][0, :4] = 1.0
    state["3.weight"][5, 8:12] = 1.0
    report = nofm.verify(state, "2:4")
    assert not report.ok
    assert report["3.weight"].violations == 2
    assert report["3.weight"].groups == 32 * 32 // 4
    assert report["1.weight"].violations == 0


def test_a_stricter_pattern_is_not_had():
    report = nofm.verify(folded("2:4"), "1:4")
    assert report["1.weight"].violations == report["1.weight"].groups
    assert nofm.verify(folded("1:4"), "2:4")["1.weight"].ok, "1:4 is 2:4 as well"


def test_a_dense_weight_whose_rows_are_too_short_to_break_the_pattern_has_it_not():
    report = nofm.verify({"stem": torch.randn(16, 1, 3, 3), "thin": torch.randn(16, 2)}, "1:16")
    assert not report.ok
    assert not report["stem"].ok
    assert not report["thin"].ok
    assert "0 of 2 weights are N:M" in str(report)


def test_flat_groups_are_found():
    report = nofm.verify(folded("1:4", axis="flat"), "1:4")
    assert (report["1.weight"].axis, report["1.weight"].violations) == ("flat", 0)


def test_groups_on_the_wrong_axis_are_named():
    weight = torch.randn(16, 16)
    wrong = torch.where(nofm.mask(weight, "2:4", axis=0), weight, 0.0)
    assert nofm.verify({"w": wrong}, "2:4")["w"].axis == 0
    layer = nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight.copy_(wrong)
    report = nofm.verify(layer, "2:4")["weight"]
    assert report.violations > 0, "of a linear layer the input axis is known: groups along the outputs do not count"


def test_zeros_without_a_pattern():
    weight = torch.randn(4, 6)
    weight[0, 0] = 0.0
    weight[1] = torch.randn(6)
    report = nofm.verify({"w": weight[:, :5]})["w"]
    assert report.pattern is None
    assert report.note == "unstructured, 5.0% zeros"


def test_a_few_zeros_are_not_taken_for_pruning():
    weight = torch.ones(64, 64)
    weight[0, :4] = 0
    report = nofm.verify({"w": weight})["w"]
    assert (report.note, report.unstructured) == ("nothing is pruned; 4 zeros", False)
    weight[0, 4] = 0
    assert nofm.verify({"w": weight})["w"].unstructured, "from a thousandth on somebody may have meant it"


def test_safetensors_files(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(folded("1:4").state_dict(), path)
    report = nofm.verify(path, None)
    assert report.ok
    assert str(report["3.weight"].pattern) == "1:4"
    assert nofm.verify(str(path))["3.weight"] == report["3.weight"]


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04.", b"\xff" * 16, b"PK\x03\x04" + b"\0" * 60], ids=["empty", "pickle", "bomb-header", "zip"]
)
def test_refuses_what_is_no_safetensors_file(tmp_path, content):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(nofm.NofmError, match=r"model\.pt: not a readable safetensors file"):
        nofm.verify(path)


def test_names_a_missing_file(tmp_path):
    with pytest.raises(nofm.NofmError, match=r"nothing\.safetensors: no such file"):
        nofm.verify(tmp_path / "nothing.safetensors")


def test_a_state_dict_may_hold_what_is_no_tensor():
    report = nofm.verify({"a.weight": torch.eye(4), "a._extra_state": {"scale": 2.0}, "b._extra_state": None})
    assert [w.name for w in report.weights] == ["a.weight"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"epoch": 3, "model": {"a.weight": torch.eye(4)}}, "'model' is a dict of its own"),
        ({"a.weight": torch.empty(4, 4, device="meta")}, "a.weight: is on the meta device"),
        (nn.Linear(4, 4, device="meta"), "weight: is on the meta device"),
    ],
    ids=["checkpoint", "meta tensor", "meta model"],
)
def test_refuses_what_has_no_weights_to_look_at(given, complaint):
    with pytest.raises(nofm.NofmError, match=complaint):
        nofm.verify(given)


def test_a_weight_that_is_not_there_is_a_key_error():
    with pytest.raises(KeyError, match="fc is not among the 1 weights"):
        nofm.verify({"a.weight": torch.eye(4), "a.bias": torch.zeros(4)})["fc"]


def mixed() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10))
    nofm.sparsify_(model, {"0": "1:4", "1": "2:8", "2": None, "3": "2:4"})
    nofm.fold_(model)
    return model


RULES = {"0": "1:4", "1.weight": "2:8", "2": None, "*": "2:4"}


def test_rules_say_what_each_layer_is_checked_against(tmp_path):
    model = mixed()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for subject in (model, model.state_dict(), tmp_path / "model.safetensors"):
        report = nofm.verify(subject, RULES)
        assert report.ok
        assert [str(report[f"{i}.weight"].pattern) for i in range(4)] == ["1:4", "2:8", "None", "2:4"]
        assert report["2.weight"].note == "not checked: rule '2' keeps it dense"
    wrong = nofm.verify(model, {**RULES, "1.weight": "1:8"})
    assert not wrong.ok
    assert [w.name for w in wrong.weights if w.pattern and not w.ok] == ["1.weight"]
    assert not nofm.verify(model, {"2": "2:4"}).ok
    assert nofm.verify(model, {"0": "1:4"})["1.weight"].note == "not checked: no rule matches it"


def test_a_rule_that_matches_no_weight_is_an_error():
    model = nn.ModuleDict({"stem": nn.Linear(8, 8), "head": nn.Linear(8, 8)})
    with pytest.raises(nofm.NofmError, match=r"rule 'stm' matches no weight; did you mean 'stem'\?"):
        nofm.verify(model, {"stm": "2:4"})
    with pytest.raises(nofm.NofmError, match=r"rule 'zzz' matches no weight; weights are stem\.weight, head\.weight"):
        nofm.verify(model, {"zzz": "2:4"})


# ---- zeros without structure ----


def trained(method: nofm.Method) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32 * 4, 64), nn.Linear(64, 10))
    nofm.sparsify_(model, {"0": "1:1", "2": "1:1"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = nofm.attach(method, model, optimizer)
    for _ in range(4):
        model(torch.randn(4, 16, 4, 4)).square().sum().backward()
        optimizer.step()
    handle.detach()
    return model


@pytest.mark.parametrize(
    "method", [nofm.RigL(sparsity=0.9, end_at=4, every=2), nofm.GMP(sparsity=0.9, end_at=3, every=1)], ids=["RigL", "GMP"]
)
def test_an_unstructured_network_has_no_pattern(method, tmp_path):
    model = trained(method)
    seen = nofm.verify(model)
    nofm.fold_(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for report in (seen, nofm.verify(model), nofm.verify(model.state_dict()), nofm.verify(tmp_path / "model.safetensors")):
        assert not report.ok
        assert [(w.name, w.pattern, w.violations) for w in report.weights if w.unstructured] == [
            ("0.weight", None, 0),
            ("2.weight", None, 0),
        ]
        assert report["2.weight"].note.startswith(f"unstructured, {report['2.weight'].zeros:.1%} zeros")
        assert str(report).splitlines()[-1] == "0 of 3 weights are N:M, 2 are unstructured, 90.0% zeros"


def test_a_total_of_both_kinds():
    state = folded("1:4").state_dict()
    state["4.weight"][:, 0] = torch.arange(10.0)  # one zero of 320
    lines = str(nofm.verify(state)).splitlines()
    assert lines[-1] == "3 of 5 weights are N:M, 1 is unstructured, 0.3% zeros"


@pytest.mark.parametrize("zeros", [0.3, 0.5, 0.8, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("shape", [(64, 64), (16, 16, 3, 3), (256, 32), (32, 512)], ids=str)
def test_zeros_at_random_are_no_pattern(shape, zeros):
    torch.manual_seed(1)
    report = nofm.verify({"w": torch.randn(shape) * (torch.rand(shape) >= zeros)})["w"]
    assert report.unstructured
    assert report.pattern is None


def sparse(pattern: str) -> torch.Tensor:
    torch.manual_seed(0)
    weight = torch.randn(32, 32, 3, 3)
    return torch.where(nofm.mask(weight, pattern), weight, 0.0)


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "1:16"])
def test_a_pattern_is_found_though_outputs_have_died_and_some_kept_weights_are_zero(pattern):
    weight = sparse(pattern)
    weight[:28] = 0.0
    weight[torch.rand(weight.shape) < 0.05] = 0.0
    assert str(nofm.verify({"w": weight})["w"].pattern) == pattern
    turned = nofm.verify({"w": weight.transpose(0, 1)})["w"]
    assert (str(turned.pattern), turned.axis) == (pattern, 0)


def test_a_pattern_that_is_asked_for_is_checked_as_it_is():
    weight = sparse("1:16")
    weight[torch.rand(weight.shape) < 0.8] = 0.0
    assert nofm.verify({"w": weight})["w"].unstructured
    assert nofm.verify({"w": weight}, "1:16").ok
    assert nofm.verify({"w": weight}, {"w": "1:1"})["w"].unstructured, '"1:1" says which layers, not where'
    assert nofm.verify({"w": torch.zeros(4, 16)})["w"].note == "unstructured, 100.0% zeros"


@pytest.mark.parametrize(("broken", "found"), [(0, "2:4"), (1, "2:4"), (10, "2:4"), (30, None)])
def test_a_few_groups_that_break_a_pattern_are_its_violations(broken, found):
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    weight = torch.where(nofm.mask(weight, "2:4"), weight, 0.0)
    weight.view(-1, 4)[:broken] = 1.0  # of 1,024 groups
    report = nofm.verify({"w": weight})
    assert (str(report["w"].pattern) if report["w"].pattern else None) == found
    assert report["w"].violations == (broken if found else 0)
    assert report.ok == (broken == 0)
    assert report["w"].unstructured == (found is None)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8, 0.9, 0.95, 0.99])
def test_zeros_by_chance_are_no_pattern_with_violations(share):
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    weight[torch.rand(256, 256) < share] = 0.0
    assert nofm.verify({"w": weight})["w"].unstructured


HALF = torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(8, 2)  # 2:4, and no stricter pattern


def test_notes_stand_beside_their_weights_where_a_terminal_has_room():
    state = {"a": HALF, "b": torch.ones(8, 8)}
    assert str(nofm.verify(state)).splitlines() == [
        "weight  shape  N:M  axis  groups  violations  zeros",
        "a       8x8    2:4  1     16      0           50.0%",
        "b       8x8    -    -     0       0           0.0%   nothing is pruned",
        "1 of 2 weights are N:M",
    ]


def test_and_below_where_it_has_not():
    state = {f"encoder.layer.{i}.dense.weight": HALF for i in range(2)}
    state |= {f"encoder.layer.{i}.head.weight": torch.ones(8, 8) for i in range(4)}
    scattered = torch.ones(64, 64)
    scattered[torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.7] = 0.0
    share = f"{(scattered == 0).float().mean():.1%}"
    report = nofm.verify(state | {"decoder.layer.0.output.dense.weight": scattered})
    assert report["decoder.layer.0.output.dense.weight"].note == f"unstructured, {share} zeros"
    assert str(report).splitlines() == [
        "weight                               shape  N:M  axis  groups  violations  zeros",
        "encoder.layer.0.dense.weight         8x8    2:4  1     16      0           50.0%",
        "encoder.layer.1.dense.weight         8x8    2:4  1     16      0           50.0%",
        "encoder.layer.0.head.weight          8x8    -    -     0       0           0.0%",
        "encoder.layer.1.head.weight          8x8    -    -     0       0           0.0%",
        "encoder.layer.2.head.weight          8x8    -    -     0       0           0.0%",
        "encoder.layer.3.head.weight          8x8    -    -     0       0           0.0%",
        f"decoder.layer.0.output.dense.weight  64x64  -    -     0       0           {share}",
        "nothing is pruned: encoder.layer.0.head.weight, encoder.layer.1.head.weight,",
        "  encoder.layer.2.head.weight, encoder.layer.3.head.weight",
        "unstructured: decoder.layer.0.output.dense.weight",
        f"2 of 7 weights are N:M, 1 is unstructured, {share} zeros",
    ]


def test_names_that_leave_no_room_have_a_line_of_their_own():
    model = nn.Transformer(64, 4, 1, 1, 64)
    nofm.sparsify_(model, "2:4")
    lines = str(nofm.verify(model)).splitlines()
    assert lines[:4] == [
        "weight",
        "  shape   N:M  axis  groups  violations  zeros",
        "encoder.layers.0.self_attn.in_proj_weight",
        "  192x64  2:4  1     3,072   0           50.0%",
    ]
    assert lines[-2:] == ["as its layer sees it; fold_ writes it in: all of them", "10 of 10 weights are N:M"]
    assert max(map(len, lines)) <= 80
