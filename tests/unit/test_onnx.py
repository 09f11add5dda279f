"""ONNX files: folded networks keep their zeros on the way, where hardware looks for them, and verify sees it, or what went wrong."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
import torchvision
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import nofm
from nofm.cli.main import main
from nofm.masks import mask

PAGE = Path(__file__).parents[2] / "docs" / "inference.md"


# ---- what torch's exporter makes of folded networks ----


class Attention(nn.Module):
    """Queries of the second and third come from elsewhere, so the exporter splits their projections, into two parts and into three."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.two, self.three = (nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x, x, x, need_weights=False)[0]
        memory = x.tanh()
        return self.three(self.two(x, memory, memory, need_weights=False)[0], x, memory, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(64, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0]


def convolutions() -> nn.Module:
    normed = nn.Sequential(nn.Conv2d(16, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=2))
    return nn.Sequential(*normed, nn.ConvTranspose2d(32, 16, 2), nn.BatchNorm2d(16), nn.Flatten(2), nn.Conv1d(16, 16, 3))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16, bias=False))


def rows() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16, bias=False))


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=48, num_heads=2, num_classes=16)


# The weights in the file by the names of their layers (val_7 is a name that the exporter makes up), and the axis that is summed along.
KINDS = {
    "convolutions": (convolutions, (1, 16, 8, 8), {"0.weight": 1, "3.weight": 1, "4.weight": 0, "7.weight": 1}),
    "linear": (linear, (5, 32), {"0.weight": 1, "3.weight": 1}),
    "linear on 3-D": (rows, (2, 5, 32), {"0.val": 0, "2.val": 0}),
    "attention": (
        Attention,
        (2, 5, 16),
        {
            **{"own.val": 0, **{f"two.in_proj_weight:{i}": 0 for i in range(2)}, **{f"three.in_proj_weight:{i}": 0 for i in range(3)}},
            **{f"{name}.out_proj.weight": 1 for name in ("own", "two", "three")},
        },
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        (2, 5, 16),
        {"self_attn.val": 0, "self_attn.out_proj.weight": 1, "linear1.val": 0, "linear2.val": 0},
    ),
    "vit": (
        vit,
        (1, 3, 32, 32),
        {f"blocks.0.{name}.val": 0 for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")},
    ),
    "lstm, gru": (Recurrent, (2, 5, 16), {"lstm.val": 2, "lstm.val+": 2, "gru.val": 2, "gru.val+": 2}),
}


def folded(model: nn.Module, pattern: str, **options) -> nn.Module:
    """With zeros in N:M places, and with batch norms that change every weight that they are merged into."""
    model.eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(norm.weight), nn.init.normal_(norm.running_mean), nn.init.uniform_(norm.running_var, 0.5, 2.0)
    nofm.sparsify_(model, pattern, **options)
    return nofm.fold_(model)


def written(model: nn.Module, x: Tensor, path: Path, **options) -> Path:
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False, **options)
    return path


def assert_same_outputs(path: Path, model: nn.Module, x: Tensor) -> None:
    session = onnxruntime.InferenceSession(path)
    (given,) = session.get_inputs()
    with torch.inference_mode():
        torch.testing.assert_close(torch.from_numpy(session.run(None, {given.name: x.numpy()})[0]), model(x), rtol=0, atol=1e-4)


def assert_n_of_m(array: np.ndarray, n: int, m: int, axis: int) -> None:
    """Counted by hand, not by nofm: no M neighbours along `axis` hold more than N, and some hold N."""
    kept = (np.moveaxis(array, axis, -1) != 0).reshape(-1, m).sum(-1)
    assert kept.max() == n


def plain(names: list[str]) -> list[str]:
    """Without the numbers that the exporter counts by; a second of one layer has a plus."""
    found: list[str] = []
    for name in names:
        short = re.sub(r"val_\d+$", "val", name)
        found.append(f"{short}+" if short in found else short)
    return found


@pytest.mark.parametrize("pattern", ["2:4", "1:16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folded_network_keeps_its_zeros_along_the_axis_that_is_summed(kind, pattern, tmp_path):
    torch.manual_seed(0)
    make, shape, axes = KINDS[kind]
    model, x = folded(make(), pattern, preset="default" if kind == "vit" else "all"), torch.randn(shape)
    path = written(model, x, tmp_path / "model.onnx")
    assert_same_outputs(path, model, x)
    sparse = [w for w in nofm.verify(path).weights if w.pattern is not None]
    assert dict(zip(plain([w.name for w in sparse]), [w.axis for w in sparse], strict=True)) == axes
    assert all(w.ok and str(w.pattern) == pattern for w in sparse)

    stored = {proto.name: numpy_helper.to_array(proto) for proto in onnx.load(path).graph.initializer}
    counted = [(stored[name], w.axis) for w in sparse for name in (w.name, w.name.rpartition(".")[2]) if name in stored]
    for array, axis in counted:
        assert_n_of_m(array, *map(int, pattern.split(":")), axis)
    assert len(counted) == len([name for name in axes if ":" not in name])


@pytest.mark.parametrize("pattern", ["2:4", "1:16"])
def test_resnet18(pattern, tmp_path):
    torch.manual_seed(0)
    model, x = folded(torchvision.models.resnet18(), pattern), torch.randn(1, 3, 64, 64)
    path = written(model, x, tmp_path / "model.onnx")
    found = nofm.verify(path, {"conv1": None, "fc": None, "*": pattern})
    assert found.ok
    expected = {key: tuple(w.shape) for key, w in model.named_parameters() if w.dim() > 1}
    assert {w.name: w.shape for w in found.weights} == expected, "names and shapes are the network's own"
    assert sum(w.ok for w in found.weights) == 19
    assert {w.axis for w in found.weights if w.ok} == {1}
    assert_same_outputs(path, model, x)


def test_without_the_exporters_own_passes_weights_are_followed_or_told(tmp_path):
    torch.manual_seed(0)
    rowwise = written(folded(rows(), "2:4", preset="all"), torch.randn(2, 5, 32), tmp_path / "rows.onnx", optimize=False)
    assert {w.name: (str(w.pattern), w.axis) for w in nofm.verify(rowwise).weights} == {"0.weight": ("2:4", 0), "2.weight": ("2:4", 0)}
    lstm = written(folded(nn.LSTM(16, 16), "2:4", preset="all"), torch.randn(5, 2, 16), tmp_path / "lstm.onnx", optimize=False)
    found = nofm.verify(lstm, "2:4")
    assert not found.ok
    assert {w.note for w in found.weights} == {"not looked at: Slice computes it at run time"}


@pytest.mark.parametrize("grad", [True, False])  # without gradients, the exporter's second way would take the layer
def test_a_network_that_is_not_folded_is_refused(grad, tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()
    nofm.sparsify_(model, "2:4", preset="all")
    with pytest.raises(Exception, match=r"SparseLinear: .* export nofm\.fold_\(copy\.deepcopy\(model\)\)"), torch.set_grad_enabled(grad):
        written(model, torch.randn(2, 16), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
    written(nofm.fold_(copy.deepcopy(model)), torch.randn(2, 16), tmp_path / "model.onnx")
    assert torch.compile(model, fullgraph=True, backend="eager")(torch.ones(2, 16)).shape == (2, 16), "others trace it as before"


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_packed_network_is_refused(dynamo, tmp_path):
    model, x = folded(nn.Sequential(nn.Linear(64, 64)), "1:16", preset="all"), torch.randn(2, 64)
    nofm.pack_(model, x, only_faster=False)
    with pytest.raises(Exception, match=r"0: is packed, .* nofm\.unpack_\(model\) first"):
        torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=dynamo, verbose=False)
    nofm.unpack_(model)
    assert nofm.verify(written(model, x, tmp_path / "model.onnx"), "1:16").ok


# ---- files ----


def by_hand(node: onnx.NodeProto, tensors: dict[str, np.ndarray], path: Path, *first: onnx.NodeProto) -> Path:
    """A file of one node that multiplies, and of those before it."""
    values = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    model = helper.make_model(helper.make_graph([*first, node], "g", [x], [y], values))
    path.write_bytes(model.SerializeToString())
    return path


def two_of_four(shape: tuple[int, ...], axis: int) -> np.ndarray:
    weight = torch.rand(shape) + 0.1
    return weight.where(mask(weight, "2:4", axis), 0).numpy()


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "shape", "axis"),
    [
        ("Conv", "xw", {}, (32, 32, 3, 3), 1),
        ("ConvTranspose", "xw", {}, (32, 32, 3, 3), 0),
        ("Gemm", "xw", {"transB": 1}, (32, 32), 1),
        ("Gemm", "xw", {}, (32, 32), 0),
        ("Gemm", "wx", {}, (32, 32), 1),
        ("Gemm", "wx", {"transA": 1}, (32, 32), 0),
        ("MatMul", "xw", {}, (32, 32), 0),
        ("MatMul", "wx", {}, (32, 32), 1),
        ("MatMul", "xw", {}, (4, 32, 32), 1),
        ("LSTM", "xwr", {}, (1, 32, 32), 2),
        ("GRU", "xrw", {}, (1, 24, 32), 2),
    ],
)
def test_the_axis_is_that_of_the_node(op, inputs, attributes, shape, axis, tmp_path):
    torch.manual_seed(0)
    node = helper.make_node(op, list(inputs), ["y"], **attributes)
    other = np.ones((8, 8), np.float32)
    path = by_hand(node, {"w": two_of_four(shape, axis), "r": other}, tmp_path / "a.onnx")
    report = nofm.verify(path)["w"]
    assert (str(report.pattern), report.axis, report.ok) == ("2:4", axis, True)
    wrong = 1 if axis != 1 else 2 if len(shape) == 3 else 0
    path = by_hand(node, {"w": two_of_four(shape, wrong), "r": other}, tmp_path / "b.onnx")
    assert nofm.verify(path, "2:4")["w"].violations > 0
    assert nofm.verify(path)["w"].unstructured, "zeros along another axis are of no use to the node"


def test_weights_are_followed_through_what_only_moves_them_and_named_by_their_nodes(tmp_path):
    made = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(two_of_four((8, 8), 1)))
    moved = helper.make_node("Transpose", ["c"], ["t"])
    node = helper.make_node("MatMul", ["x", "t"], ["y"], name="/head/MatMul")
    (report,) = nofm.verify(by_hand(node, {}, tmp_path / "a.onnx", made, moved), "2:4").weights
    assert (report.name, report.axis, report.ok) == ("/head/MatMul.c", 0, True)
    hidden = helper.make_node("Mul", ["c", "c"], ["t"])
    (report,) = nofm.verify(by_hand(node, {}, tmp_path / "b.onnx", made, hidden)).weights
    assert (report.name, report.note, report.ok) == ("/head/MatMul.t", "not looked at: Mul computes it at run time", False)
    activations = [helper.make_node("Add", ["x", "c"], ["a"]), helper.make_node("Transpose", ["a"], ["t"])]
    assert nofm.verify(by_hand(node, {}, tmp_path / "c.onnx", made, *activations)).weights == ()


def test_bfloat16_whose_zeros_have_either_sign(tmp_path):
    model = folded(rows(), "2:4", preset="all").bfloat16()
    with torch.no_grad():
        model[0].weight.neg_()
    found = nofm.verify(written(model, torch.randn(2, 3, 32).bfloat16(), tmp_path / "model.onnx"), "2:4")
    assert found.ok
    assert len(found.weights) == 2


def test_what_was_tampered_with_is_named(tmp_path, capsys):
    path = written(folded(rows(), "2:4", preset="all"), torch.randn(2, 5, 32), tmp_path / "model.onnx", external_data=False)
    assert main(["check", str(path)]) == 0
    assert "2 of 2 weights are N:M" in capsys.readouterr().out
    model = onnx.load(path)
    (tampered,) = [proto for proto in model.graph.initializer if list(proto.dims) == [64, 16]]
    values = numpy_helper.to_array(tampered).copy()
    values[4:8, 3] = 1.0
    tampered.CopyFrom(numpy_helper.from_array(values, tampered.name))
    path.write_bytes(model.SerializeToString())
    assert main(["check", str(path), "--pattern", "2:4"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"2.{tampered.name} ")]
    assert line.split()[1:] == ["64x16", "2:4", "0", "256", "1", "49.8%"]
    assert main(["check", str(path), "--pattern", "2:4", "--skip", "2"]) == 0


def test_weights_in_a_file_of_their_own(tmp_path):
    path = written(folded(linear(), "2:4", preset="all"), torch.randn(5, 32), tmp_path / "model.onnx", external_data=True)
    data = tmp_path / "model.onnx.data"
    assert data.stat().st_size > path.stat().st_size
    assert nofm.verify(path, "2:4").ok
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(nofm.NofmError, match=rf"{path}, 0\.weight of node_\w+: not a readable ONNX file"):
        nofm.verify(path)
    data.unlink()
    with pytest.raises(nofm.NofmError, match=rf"{path}, 0\.weight of node_\w+: not a readable ONNX file \(.*model\.onnx\.data"):
        nofm.verify(path)


def test_a_cut_file_is_an_error_that_names_it(tmp_path):
    whole = by_hand(helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": two_of_four((8, 8), 0)}, tmp_path / "model.onnx").read_bytes()
    cut = tmp_path / "cut.onnx"
    for size in range(0, len(whole), 3):
        cut.write_bytes(whole[:size])
        with pytest.raises(nofm.NofmError, match=rf"{cut}.*: not a readable ONNX file"):
            nofm.verify(cut)
    with pytest.raises(nofm.NofmError, match=r"gone\.onnx: no such file"):
        nofm.verify(tmp_path / "gone.onnx")


def test_without_the_package_it_says_what_to_install(tmp_path):
    path = by_hand(helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": two_of_four((8, 8), 0)}, tmp_path / "model.onnx")
    code = f"import sys; sys.modules['onnx'] = None; import nofm; nofm.verify({str(path)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.splitlines()[-1].endswith("the package onnx is needed, which is not installed: pip install onnx")


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "onnx" in block]
    exec(compile(code, "docs/inference.md", "exec", dont_inherit=True), {})
    assert "19 of 21 weights are N:M" in capsys.readouterr().out
