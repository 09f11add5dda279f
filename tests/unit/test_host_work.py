"""What the host does in a step, counted and not timed: compiled layers add no Python to a call, and tables of addresses are sent once."""

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import nofm
from nofm.kernels import multi
from nofm.masks import Grouping
from nofm.patterns import Pattern

PLAIN = Grouping(Pattern("2:4"))


class Stack(nn.Module):
    """A module of one's own, whose hooks run outside of what is compiled."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _calls(layers: list[nn.Module], x: torch.Tensor) -> Counter[str]:
    """The functions that a call of the compiled model runs, but for those of the graph itself."""
    model, calls = Stack(layers), Counter[str]()
    nofm.sparsify_(model, "2:4", preset="all")
    with torch.no_grad():
        expected = model(x)
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            answer = graph(*inputs)
            return lambda *_: answer

        compiled = torch.compile(model, backend=backend)
        assert torch.equal(compiled(x), expected)
        sys.setprofile(lambda frame, event, what: calls.update([f"{frame.f_code.co_name} {event} {getattr(what, '__name__', '')}"]))
        try:
            compiled(x)
        finally:
            sys.setprofile(None)
    assert len(graphs) == 1
    return calls


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: nn.Linear(8, 8), (2, 8)), (lambda: nn.Conv1d(8, 8, 1), (2, 8, 4)), (lambda: nn.Conv2d(8, 8, 3, padding=1), (2, 8, 4, 4))],
    ids=["linear", "conv1d", "conv2d"],
)
def test_a_compiled_layer_runs_no_python_of_its_own(make: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    few, many = (_calls([make() for _ in range(n)], torch.randn(shape)) for n in (2, 7))
    assert many == few


class OwnConv(nn.Conv2d):
    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return nn.functional.conv2d(input, self.weight * 2, bias, padding=self.padding)


def _patched() -> nn.Module:
    conv = nn.Conv2d(8, 8, 3, padding=1)
    vars(conv)["_conv_forward"] = lambda input, weight, bias: nn.functional.conv2d(input, conv.weight * 2, bias, padding=conv.padding)
    return conv


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("make", [lambda: OwnConv(8, 8, 3, padding=1), _patched], ids=["subclass", "instance"])
def test_a_convolution_that_reads_its_weight_itself_reads_the_masked_one(make: Any, how: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(make()), torch.randn(2, 8, 4, 4)
    weight, bias = model[0].weight.detach(), model[0].bias.detach()
    nofm.sparsify_(model, "2:4", preset="all")
    masked = torch.where(nofm.mask(weight, "2:4"), weight, 0.0)
    run = torch.compile(model, backend="eager") if how == "compiled" else model
    torch.testing.assert_close(run(x), nn.functional.conv2d(x, masked * 2, bias, padding=1))


class LowRank(nn.Linear):
    """Multiplies by a weight that is none of its parameters; it is their factor that is sparse."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        del self.weight
        self.left, self.right = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    @property
    def weight(self) -> torch.Tensor:
        return self.left @ self.right


nofm.register_layer(LowRank, left=1)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_linear_layer_whose_weight_is_made_of_a_sparse_one(how: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(LowRank()), torch.randn(2, 8)
    left, right, bias = (parameter.detach() for parameter in (model[0].left, model[0].right, model[0].bias))
    nofm.sparsify_(model, "2:4", preset="all")
    run = torch.compile(model, backend="eager") if how == "compiled" else model
    torch.testing.assert_close(run(x), nn.functional.linear(x, torch.where(nofm.mask(left, "2:4"), left, 0.0) @ right, bias))


def _twice(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(input, 2 * layer.weight)


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_is_put_into_the_class_is_the_one_that_runs(when: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fresh(nn.Linear):
        """A class of its own, so that no sparse class is known for it before."""

    torch.manual_seed(0)
    model, x = nn.Sequential(Fresh(8, 8)), torch.randn(2, 8)
    weight = model[0].weight.detach()
    for moment in ("before", "after"):
        if moment == when:
            monkeypatch.setattr(nn.Linear, "forward", _twice)
        if moment == "before":
            nofm.sparsify_(model, "2:4", preset="all")
    run = torch.compile(model, backend="eager") if how == "compiled" else model
    torch.testing.assert_close(run(x), nn.functional.linear(x, 2 * torch.where(nofm.mask(weight, "2:4"), weight, 0.0)))


@pytest.fixture
def sent_tables(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tables that have gone to the device so far: those of addresses, not the lists of blocks."""
    tables: list[torch.Tensor] = []
    send = multi.sent

    def spy(on_host: torch.Tensor, device: torch.device) -> torch.Tensor:
        if on_host.dtype == torch.int64:
            tables.append(on_host)
        return send(on_host, device)

    monkeypatch.setattr(multi, "sent", spy)
    return tables


def _grads_column(launches: list[Any]) -> list[int]:
    return [row[4] for launch in launches for row in launch.table.tolist()]


def test_tables_are_sent_once_where_gradients_take_turns_in_memory(sent_tables: list[torch.Tensor]) -> None:
    weights, layout, fleet = [torch.randn(8, 8) for _ in range(3)], object(), multi.Fleet()
    turns = [[torch.zeros(8, 8) for _ in weights] for _ in range(3)]
    for _ in range(4):
        for grads in turns:
            launches = fleet._ready([PLAIN] * 3, [weights, grads], "refine", layout)
            assert _grads_column(launches) == [grad.data_ptr() for grad in grads]
    assert len(sent_tables) == 3


def test_a_new_layout_forgets_all_tables(sent_tables: list[torch.Tensor]) -> None:
    weights, fleet = [torch.randn(8, 8)], multi.Fleet()
    grads = [torch.zeros(8, 8)]
    for layout in (object(), object()):
        fleet._ready([PLAIN], [weights, grads], "refine", layout)
    moved = [torch.randn(8, 8)]
    assert fleet._ready([PLAIN], [moved, grads], "refine", object())[0].table[0, 3] == moved[0].data_ptr()
    assert len(sent_tables) == 3


def test_addresses_that_never_come_again_do_not_pile_up() -> None:
    weights, layout, fleet = [torch.randn(8, 8)], object(), multi.Fleet()
    grads = [[torch.zeros(8, 8)] for _ in range(3 * multi._TABLES)]
    for each in grads:
        launches = fleet._ready([PLAIN], [weights, each], "refine", layout)
        assert _grads_column(launches) == [each[0].data_ptr()]
    assert len(fleet._ready_made) <= multi._TABLES


def test_a_gradient_that_is_not_aligned_gets_a_kernel_without_vectors() -> None:
    weights, layout, fleet = [torch.randn(8, 8)], object(), multi.Fleet()
    aligned, not_aligned = torch.zeros(8, 8), torch.zeros(65)[1:].view(8, 8)
    vectors = [fleet._ready([PLAIN], [weights, [g]], "refine", layout)[0].constants["VECTOR"] for g in (aligned, not_aligned, aligned)]
    assert vectors == [True, False, True]


def test_a_parameter_that_leaves_its_group_in_place_is_noticed_at_the_next_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nofm.sparsify_(model, "2:4", preset="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nofm.attach(nofm.SRSTE(), model, optimizer)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    params = optimizer.param_groups[0]["params"]
    params[:] = [*params[1:], nn.Parameter(torch.zeros(1))]  # as many as before
    with pytest.raises(nofm.OptimizerError, match=r"0\.weight trains but is not in the optimizer"):
        optimizer.step()
