"""`nofm check FILE --pattern N:M`: dense layers are listed and let off, but a file in which nobody has written zeros does not pass."""

from __future__ import annotations

import re
import shlex

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import nofm
from nofm.cli.main import main


class Transformer(nn.Module):
    """What a ViT has beside its layers: a token and a table of positions, which are no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 32))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 32))
        self.patches = nn.Conv2d(3, 32, 4)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.attention = nn.MultiheadAttention(32, 4)
        self.head = nn.Linear(32, 10)


def sparse(pattern: str = "2:4") -> Transformer:
    torch.manual_seed(0)
    model = Transformer()
    nofm.sparsify_(model, pattern)
    return model


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes a state dict to a file in the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(state: dict[str, torch.Tensor]) -> str:
        save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "my model.safetensors")
        return "my model.safetensors"

    return write


def check(path: str, *options: str) -> int:
    return main(["check", path, "--pattern", "2:4", *options])


def test_a_network_with_the_usual_dense_layers_passes(file, capsys):
    path = file(nofm.fold_(sparse()).state_dict())
    assert check(path) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "not checked: by its name no layer's weight: cls_token, pos_embed",
        "dense: head.weight, patches.weight",
        "4 of 8 weights are N:M",
        "2 are dense, with 18.1% of all weights here; with --all they have to be 2:4, too",
    ]


def test_all_demands_every_layer_and_its_hint_can_be_copied(file, capsys):
    path = file(nofm.fold_(sparse()).state_dict())
    assert check(path, "--all") == 1
    *_, said, hint = capsys.readouterr().out.splitlines()
    assert said == "2 layers are not 2:4. If they are not meant to be:"
    assert hint.strip() == "nofm check 'my model.safetensors' --pattern 2:4 --all --skip head.weight patches.weight"
    assert main(shlex.split(hint)[1:]) == 0


def test_a_layer_that_has_zeros_and_breaks_the_pattern_fails(file, capsys):
    state = nofm.fold_(sparse()).state_dict()
    state["first.weight"][0, :4] = 1.0
    state["attention.in_proj_weight"][:2] = 1.0
    path = file(state)
    assert check(path) == 1
    hint = capsys.readouterr().out.splitlines()[-1]
    assert hint.strip().endswith("--pattern 2:4 --skip attention.in_proj_weight first.weight")
    assert main(shlex.split(hint)[1:]) == 0


def test_what_was_skipped_stays_in_the_hint(file, capsys):
    state = nofm.fold_(sparse()).state_dict()
    state["first.weight"][0, :4] = 1.0
    assert check(file(state), "--all", "--skip", "head") == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith(" --skip head first.weight patches.weight")


@pytest.mark.parametrize("more", [[], ["--all"], ["--skip", "head"]], ids=str)
def test_a_model_that_nobody_has_folded_does_not_pass(more, file, capsys):
    assert check(file(sparse().state_dict()), *more) == 1
    assert "no layer is 2:4. What is saved of a model in training is its dense weights: nofm.fold_ it before" in words(capsys)


def words(capsys) -> str:
    return re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.parametrize("zero", ["throughout", "an output of a depthwise convolution", "a row of an embedding"])
def test_nor_does_one_with_zeros_that_are_not_of_the_pattern(zero, file, capsys):
    """They fulfil 2:4 or come near it, and nobody has pruned them."""
    state = sparse().state_dict()
    if zero == "throughout":  # a classifier as some networks begin
        state["head.weight"].zero_()
    elif zero == "an output of a depthwise convolution":
        state["depthwise.weight"] = torch.randn(64, 1, 3, 3)
        state["depthwise.weight"][5] = 0.0
    else:
        state["embedding.weight"] = torch.randn(2000, 8)
        state["embedding.weight"][0] = 0.0
    assert check(file(state)) == 1
    assert "no layer is 2:4" in words(capsys)


def test_a_padding_row_does_not_make_an_embedding_sparse(file):
    state = nofm.fold_(sparse()).state_dict()
    state["embedding.weight"] = torch.randn(2000, 8)
    state["embedding.weight"][0] = 0.0
    assert check(file(state)) == 0


def test_another_pattern_than_the_file_has_is_told_where_to_look(file, capsys):
    assert main(["check", file(nofm.fold_(sparse()).state_dict()), "--pattern", "1:16"]) == 1
    assert "no layer is 1:16; nofm check 'my model.safetensors' tells which pattern each has" in words(capsys)


@pytest.mark.parametrize("option", ["--all", "--skip"])
def test_what_is_about_a_pattern_needs_one(option, file, capsys):
    assert main(["check", file(sparse().state_dict()), option, *["head"] * (option == "--skip")]) == 2
    assert capsys.readouterr().err.startswith(f"nofm: {option}: is about --pattern, which is not given")


# ---- what is no weight, in the library ----


def test_tokens_and_positions_are_listed_and_held_to_nothing(file):
    model = nofm.fold_(sparse())
    for subject in (model, model.state_dict(), file(model.state_dict())):
        report = nofm.verify(subject, {"patches": None, "head": None, "*": "2:4"})
        assert report.ok
        assert {w.name for w in report.weights if w.pattern is None} == {"cls_token", "pos_embed", "patches.weight", "head.weight"}
        assert report["cls_token"].note == "not checked: by its name no layer's weight"
        assert nofm.verify(subject, "2:4")["pos_embed"].violations == 0
        assert nofm.verify(subject, {"pos_embed": "2:4"})["pos_embed"].violations > 0, "a rule that names it means it"


def test_what_has_zeros_is_held_to_the_pattern_whatever_it_is_called():
    table = torch.randn(16, 32)
    table[:, :16] = 0.0
    assert nofm.verify({"table": table}, "2:4")["table"].violations == 64


def test_a_registered_layer_says_itself_what_its_weights_are():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(8, 8))

    nofm.register_layer(Own, kernel=1)
    assert nofm.verify(Own(), "2:4")["kernel"].violations > 0
