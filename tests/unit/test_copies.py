"""A copy of a model has no method. Whoever trains one is told so once; whoever evaluates it, averages it or gives it a method is not."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nofm
from nofm import following
from nofm.analysis.sad import sad_of_forwards

SAID = (
    "this SGD moves 0.weight of a copy of a model that {0} was attached to. A copy has no method, so none takes part in these steps: "
    "attach {0}(...) to the copy and to this optimizer; load_state_dict of the new handle, with the state of the old one, takes over masks "
    "and steps"
)
SRSTE = nofm.SRSTE(0.5)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    nofm.sparsify_(model, "2:4", preset="all")
    return model


def optimizer_of(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def attached(method: nofm.Method = SRSTE) -> tuple[nn.Module, SGD, nofm.Handle]:
    """A model after two steps with a method."""
    model = network()
    optimizer = optimizer_of(model)
    handle = nofm.attach(method, model, optimizer)
    assert steps(model, optimizer, 2) == []
    return model, optimizer, handle


def steps(model: nn.Module, optimizer: Any, times: int = 3) -> list[str]:
    """Take steps, and return what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 128).reshape(8, 16).to(next(model.parameters()).dtype)).square().mean().backward()
            optimizer.step()
    assert {warning.filename for warning in caught} <= {__file__}, "it points at who has taken the step"
    return [str(warning.message) for warning in caught]


def through_a_file(*what: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def new_optimizer(model: nn.Module, optimizer: SGD) -> tuple[nn.Module, SGD]:
    trained = copy.deepcopy(model)
    return trained, optimizer_of(trained)


def scheduled(model: nn.Module, optimizer: SGD) -> tuple[nn.Module, SGD]:
    """A scheduler puts a function of its own around `step`."""
    trained, new = new_optimizer(model, optimizer)
    torch.optim.lr_scheduler.ConstantLR(new)
    return trained, new


def copy_of_a_copy(model: nn.Module, optimizer: SGD) -> tuple[nn.Module, SGD]:
    return new_optimizer(through_a_file(copy.deepcopy(model))[0], optimizer)


COPIES: dict[str, Callable[[nn.Module, SGD], Any]] = {
    "both": lambda model, optimizer: copy.deepcopy((model, optimizer)),
    "new optimizer": new_optimizer,
    "scheduler": scheduled,
    "a file": through_a_file,
    "copy of a copy": copy_of_a_copy,
    "as spawn sends it": lambda model, optimizer: pickle.loads(bytes(ForkingPickler.dumps((model, optimizer)))),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_who_trains_a_copy_is_told_once(copied: Callable[..., Any]) -> None:
    model, optimizer, handle = attached()
    trained, new = copied(model, optimizer)
    assert steps(trained, new) == [SAID.format("SRSTE")]
    assert steps(trained, optimizer_of(trained)) == [], "told is told"
    assert steps(model, optimizer) == []
    assert handle.step == 5


def test_a_pruning_that_would_never_come_is_told() -> None:
    model, optimizer, _handle = attached(nofm.ASP(prune_at=3))
    trained, new = copy.deepcopy((model, optimizer))
    assert steps(trained, new) == [SAID.format("ASP")]
    assert [site.keeps_more for site in nofm.sites(trained)] == [True, True]


def test_what_it_says_to_do_is_enough() -> None:
    """A copy with a method, and the state of the old handle, trains as the original does."""
    model, optimizer, handle = attached(nofm.ASP(prune_at=3))
    trained, new = copy.deepcopy((model, optimizer))
    second = nofm.attach(nofm.ASP(prune_at=3), trained, new)
    second.load_state_dict(handle.state_dict())
    assert steps(model, optimizer) == steps(trained, new) == []
    assert all(map(torch.equal, model.state_dict().values(), trained.state_dict().values()))
    assert [site.keeps_more for site in nofm.sites(trained)] == [False, False]
    second.detach()
    assert steps(trained, optimizer_of(trained)) == []


def test_layers_that_do_not_move_are_not_named() -> None:
    model, _optimizer, _handle = attached()
    trained = copy.deepcopy(model)
    trained[0].requires_grad_(False)
    new = optimizer_of(trained)
    assert steps(trained, new) == [SAID.format("SRSTE").replace("0.weight", "2.weight")]
    trained[0].requires_grad_(True)
    assert steps(trained, new) == [], "said of the whole copy"


def test_a_copy_that_the_methods_own_optimizer_moves() -> None:
    model, optimizer, _handle = attached()
    trained = copy.deepcopy(model)
    optimizer.add_param_group({"params": list(trained.parameters())})
    assert steps(nn.Sequential(model, trained), optimizer) == [SAID.format("SRSTE")]


def test_where_warnings_are_errors_it_is_said_once_too() -> None:
    model, optimizer, _handle = attached()
    trained, new = copy.deepcopy((model, optimizer))
    trained(torch.ones(8, 16)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="A copy has no method"):
            new.step()
    assert steps(trained, new) == []


# ---- a handle ----


NOT_COPIED = (
    r"a handle hangs on an optimizer and is neither copied nor pickled; save handle\.state_dict\(\), and give it to load_state_dict"
)


@pytest.mark.parametrize("how", [copy.copy, pickle.dumps, through_a_file], ids=["copy", "pickle", "torch.save"])
def test_a_handle_is_not_copied(how: Callable[..., Any]) -> None:
    _model, _optimizer, handle = attached()
    with pytest.raises(nofm.OptimizerError, match=NOT_COPIED):
        how(handle)
    with pytest.raises(TypeError):  # which those expect who ask whether something can be pickled
        how(handle)


def test_a_model_that_keeps_its_handle_is_copied_without_it() -> None:
    """As a LightningModule keeps it, of which an average is made."""
    model, optimizer, handle = attached()
    model.handle = handle
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    assert steps(model, optimizer) == []
    average.update_parameters(model)
    again = copy.deepcopy(average).module
    assert repr(again.handle) == "no handle: this is a copy, which has no method"
    for use in (lambda: again.handle.step, lambda: again.handle.state_dict(), lambda: again.handle.detach()):
        with pytest.raises(nofm.OptimizerError, match=NOT_COPIED):
            use()
    assert not hasattr(again.handle, "state_dict"), "as code wants it that looks through attributes"


def test_a_handle_that_is_copied_with_others_is_none_in_any_order() -> None:
    model, _optimizer, handle = attached()
    for copied in (copy.deepcopy((model, handle))[1], copy.deepcopy((handle, model))[0], copy.deepcopy({"h": handle})["h"]):
        assert repr(copied) == "no handle: this is a copy, which has no method"


# ---- no false alarm ----


def test_copies_that_are_looked_at_or_averaged() -> None:
    model, optimizer, _handle = attached(nofm.ASP(prune_at=3))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    best = copy.deepcopy(model)
    for _ in range(3):
        assert steps(model, optimizer, 1) == []
        nofm.follow_(average, model)
        average.update_parameters(model)
        best = copy.deepcopy(model).eval()
        best(torch.ones(2, 16))
        best.load_state_dict(model.state_dict())
    other = nn.Linear(4, 4)
    assert steps(nn.Sequential(nn.Linear(16, 4), other), SGD(other.parameters(), lr=0.1)) == []
    together = optimizer_of(nn.ModuleList([average, other]))  # a teacher that is handed over with the rest and has no gradients
    assert steps(nn.Sequential(nn.Linear(16, 4), other), together) == []


def detached(model: nn.Module, optimizer: SGD, handle: nofm.Handle) -> nn.Module:
    handle.detach()
    return copy.deepcopy(model)


def folded(model: nn.Module, *_: Any) -> nn.Module:
    return nofm.fold_(copy.deepcopy(model))


def folded_from_a_file(model: nn.Module, *_: Any) -> nn.Module:
    return copy.deepcopy(nofm.fold_(through_a_file(model)[0]))


def a_state(model: nn.Module, *_: Any) -> nn.Module:
    file, other = io.BytesIO(), network()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@pytest.mark.parametrize("made", [detached, folded, folded_from_a_file, a_state])
def test_copies_that_no_method_is_missing_from(made: Callable[..., nn.Module]) -> None:
    trained = made(*attached())
    assert steps(trained, optimizer_of(trained)) == []


NOTHING_IN_STEPS = [nofm.STE(), nofm.Dense(), nofm.SRSTE(0.0), nofm.SRSTE(0.5, placement="backward")]


@pytest.mark.parametrize("method", NOTHING_IN_STEPS, ids=repr)
def test_copies_of_what_a_method_does_nothing_to_in_steps(method: nofm.Method) -> None:
    model, optimizer, _handle = attached(method)
    assert steps(*copy.deepcopy((model, optimizer))) == []
    assert steps(*new_optimizer(model, optimizer)) == []


@pytest.mark.parametrize("method", NOTHING_IN_STEPS, ids=repr)
def test_another_optimizer_where_a_method_does_nothing_in_steps(method: nofm.Method) -> None:
    model, _optimizer, _handle = attached(method)
    assert steps(model, optimizer_of(model)) == []


@pytest.mark.parametrize("method", [nofm.SRSTE(0.0, begin_at=9), nofm.SRSTE(0.5, placement="backward", begin_at=9)], ids=repr)
def test_copies_of_a_dense_start_that_nobody_would_end(method: nofm.Method) -> None:
    model, optimizer, _handle = attached(method)
    assert steps(*copy.deepcopy((model, optimizer))) == [SAID.format("SRSTE")]


@pytest.mark.parametrize("plain", [nofm.fold_, nofm.densify_])
def test_a_copy_that_is_made_plain_and_sparse_again_is_a_network_of_its_own(plain: Callable[[nn.Module], nn.Module]) -> None:
    model, _optimizer, handle = attached()
    trained = copy.deepcopy(model)
    nofm.sparsify_(plain(trained), "2:4", preset="all")
    assert steps(trained, optimizer_of(trained)) == []
    handle.detach()
    nofm.sparsify_(plain(model), "2:4", preset="all")
    assert steps(model, optimizer_of(model)) == [], "and so is the original"


def test_an_original_that_is_sparse_again_where_the_old_optimizer_is_gone() -> None:
    model, optimizer, _handle = attached()
    del optimizer, _handle
    gc.collect()
    nofm.sparsify_(nofm.fold_(model), "2:4", preset="all")
    assert steps(model, optimizer_of(model)) == []


def test_an_optimizer_that_is_given_the_weights_of_a_copy_in_a_group_that_it_has() -> None:
    model, optimizer, _handle = attached()
    trained = copy.deepcopy(model)
    assert steps(model, optimizer) == []
    model.zero_grad()  # else the next step says that the model is in no optimizer any more
    optimizer.param_groups[0]["params"] = list(trained.parameters())
    assert steps(trained, optimizer) == [SAID.format("SRSTE")]


def test_a_copy_of_the_second_layer_of_a_tied_weight() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    nofm.sparsify_(model, "2:4", preset="all")
    _handle = nofm.attach(SRSTE, model, optimizer_of(model))
    trained = copy.deepcopy(model[2])
    assert steps(trained, optimizer_of(trained)) == [SAID.format("SRSTE")]


def test_a_copy_that_is_given_a_method_which_does_nothing_in_steps() -> None:
    model, optimizer, _handle = attached()
    trained, new = copy.deepcopy((model, optimizer))
    nofm.attach(nofm.STE(), trained, new)
    assert steps(trained, new) == []


def test_a_copy_that_is_made_before_attach() -> None:
    model = network()
    trained, optimizer = copy.deepcopy(model), optimizer_of(model)
    nofm.attach(SRSTE, model, optimizer)
    assert steps(trained, optimizer_of(trained)) == []


@dataclasses.dataclass
class State:
    model: nn.Module
    epoch: int = 0


def test_what_holds_the_very_same_layers_is_no_copy() -> None:
    model, optimizer, _handle = attached()
    assert steps(dataclasses.replace(State(model), epoch=1).model, optimizer) == []
    assert steps(copy.copy(model), optimizer) == []
    shares = nn.Sequential(copy.copy(model[0]), model[1], copy.copy(model[2]))  # modules of their own, and the parameters of the model
    assert shares[0].weight is model[0].weight
    assert steps(shares, optimizer) == []


def test_what_holds_the_very_same_weights_is_no_copy_after_detach_either() -> None:
    model, optimizer, handle = attached()
    shares = copy.copy(model[2])
    handle.detach()
    assert steps(model, optimizer) == []
    assert shares.weight is model[2].weight


# ---- threads ----


def test_a_model_may_be_copied_in_one_thread_and_trained_in_another() -> None:
    """What is known of copies grows while a step goes through it."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(200)])
    nofm.sparsify_(model, "2:4", preset="all")
    optimizer = optimizer_of(model)
    _handle = nofm.attach(SRSTE, model, optimizer)
    model(torch.ones(1, 4)).sum().backward()
    kept: list[nn.Module] = []
    is_over = threading.Event()

    def copies() -> None:
        while not is_over.is_set():
            kept[:] = [*kept[-3:], copy.deepcopy(model)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    other = threading.Thread(target=copies)
    other.start()
    try:
        for _ in range(100):
            optimizer.step()
    finally:
        is_over.set()
        other.join()
        sys.setswitchinterval(interval)
    assert kept


def test_networks_of_fig_3_are_trained_without_the_models_method() -> None:
    model, _optimizer, _handle = attached()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sad_of_forwards(model, optimizer_of, lambda net, x: net(x).square().mean(), [torch.randn(4, 16)] * 2, at=(1, 2))


# ---- what a mark must leave alone ----


@pytest.fixture
def swaps() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_keys_attributes_and_conversion_are_as_without(swaps: None) -> None:
    model, _optimizer, _handle = attached()
    attributes = [set(vars(module)) for module in network().modules()]
    trained = copy.deepcopy(model)
    assert list(trained.state_dict()) == list(network().state_dict())
    assert [set(vars(module)) for module in trained.modules()] == [set(vars(module)) for module in model.modules()] == attributes
    trained.double()
    assert steps(trained, optimizer_of(trained)) == [SAID.format("SRSTE")]


def test_a_copy_compiles_as_a_whole_graph() -> None:
    model, _optimizer, _handle = attached()
    trained = copy.deepcopy(model)
    compiled = torch.compile(trained, fullgraph=True, backend="eager")
    assert steps(compiled, optimizer_of(trained)) == [SAID.format("SRSTE")]


def test_no_copy_is_kept_alive() -> None:
    gc.collect()
    before = len(following._copies)
    model, optimizer, _handle = attached()
    trained, new = copy.deepcopy((model, optimizer))
    other = copy.deepcopy(model)
    assert len(following._copies) == before + 4
    steps(trained, new)
    del trained, new, other
    gc.collect()
    assert len(following._copies) == before
