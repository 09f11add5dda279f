"""A method is what happens at two moments of a step: before the optimizer moves the weights, and after.

Here is what a method is and what it is shown. What it may touch in a step is an `OwnedWeight`: a sparse weight, its gradient and its
learning rate. Methods themselves are frozen values without state; the number of the step lives in the `Handle` that `attach` returns,
masks in the layers, and all else in a `Memory`. docs/methods.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from .. import shards, ste
from ..kernels import ops
from ..kernels.multi import Fleet
from ..kernels.steps import Term
from ..plain import plain_number
from ..site import Site
from .memory import Memory

__all__ = ["Memory", "Method", "OwnedWeight", "Step"]


@dataclass(frozen=True)
class Method:
    """The base of all methods: the identity. Subclasses say how layers see their weights and what a step does to them.

    A subclass is a @dataclass(frozen=True) with its options as fields: by these a state knows what it was made with. Numbers, strings,
    booleans, None and tuples of these are saved, other values are not. In `start` and both moments of a step no gradients are recorded.
    """

    unstructured: ClassVar[bool] = False  # whether it prunes anywhere in a layer; its layers are then sparsified as "1:1"
    is_dense: ClassVar[bool] = False  # whether layers compute with all their weights throughout
    has_thresholds: ClassVar[bool] = False  # whether it goes on with the thresholds that `STR` has learned

    def __post_init__(self, *_: Any) -> None:
        """Options that are numbers of numpy's become Python's own. A subclass that checks its options calls this first."""
        for option in fields(self):
            if not option.init:  # which a subclass computes, later than this
                continue
            value = getattr(self, option.name)
            if (plain := plain_number(value)) is not value:
                object.__setattr__(self, option.name, plain)

    def begin(self, site: Site) -> None:
        """Called for each sparse weight when the method is attached: say by `site.look_through(lens)` or `site.freeze(mask)` how the layer
        sees it. Lenses are in `nofm.ste`; see `nofm.site.Site` for all that a site offers."""
        site.look_through(ste.straight_through)

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        """Called once when the method is attached, for methods that must see all sparse weights together or remember something: what
        `memory` needs is put there now."""
        for site in sites:
            self.begin(site)

    def go_on(self, sites: Sequence[Site], number: int) -> None:
        """Called when a state after `number` steps has been loaded, for methods whose layers look at weights differently by then."""

    def remembers(self) -> tuple[str, ...]:
        """What must be in the memory of a state that it goes on from: names in `memory.tensors` (or `memory.learned`), which `start` has
        put there. A state without them is refused; all else in the memory is saved and loaded without being named here."""
        return ()

    def begun_with(self) -> tuple[str, ...]:
        """The options, by the names of their fields, that masks and memory of a state were made by. A state in which one of them has
        another value is refused; where another option has, the attached one holds, with a warning. ("seed",) is a tuple of one. What is
        named must be saved, so that `attach` refuses one whose value is not."""
        return ()

    def meant(self, option: str, value: Any) -> Any:
        """What a value of an option stands for, where that is another one: None, for a default. Two that mean the same are no change."""
        return value

    def takes_back(self, options: Mapping[str, Any], sites: Sequence[Site], number: int) -> str:
        """What going on from a state after `number` steps, which was saved under other `options` (by name), would undo or spoil in these
        sites: a clause without a full stop, "" where nothing. A state is refused then. For methods with a clock that options set."""
        return ""

    def phase(self, number: int) -> str | None:
        """What kind of step `number` (from 1) is. Steps of one phase do the same work on the device, so that one captured in a
        CUDA graph can be replayed for the others. None: a step unlike others, which the host must run itself."""
        return "train"

    def counts_steps(self) -> bool:
        """Whether what a step does depends on those before it, so that a loop that is resumed must restore the handle, too. Methods
        that prune anywhere do so by the clock, but for those that look at weights alone."""
        return self.unstructured

    def found(self, number: int, memory: Memory) -> dict[str, float]:
        """What the method has settled by itself after step `number`, by name: options that were left to it."""
        return {}

    def is_late(self, sites: Sequence[Site], memory: Memory, number: int) -> bool:
        """Whether a step up to `number` was to prune these sites and has not: a state was loaded that comes from options by which its time
        had not come. Asked then only, so that it may wait for a GPU. The next step is told (`Step.is_late`) to make up for it, and is run
        by the host whatever its `phase`."""
        return False

    def unfinished(self, sites: Sequence[Site], memory: Memory, number: int) -> str:
        """What it has yet to do to these sites after step `number` before a network is what it was asked for; "" where nothing is left.

        What is kept decides, and the clock says when: masks may be older than the method, and options may have changed. A clause without a
        full stop that names the step and the option, "it prunes at step 9 (prune_at)": it is put into "ASP has taken 5 steps, and it prunes
        at step 9 (prune_at). It is folded before that: ..."
        """
        return ""

    def too_strong(self, lr: float, is_plain: bool, number: int) -> str:
        """Why the method itself makes weights grow in step `number`, and what to do, as a sentence without a full stop; "" where it does
        not. `is_plain`: whether the optimizer moves weights by `lr` times their gradients however large these are, as SGD does and Adam
        does not."""
        return ""

    def acts_in_steps(self) -> bool:
        """Whether it does anything at the two moments. What it does by lenses alone, layers go on doing in other optimizers' steps too, and
        in copies."""
        return type(self).before_step is not Method.before_step or type(self).after_step is not Method.after_step

    def fusible(self) -> bool:
        """Whether what a step does is a `term`, which an optimizer's own pass over the weights can hold."""
        return False

    def term(self, step: Step) -> Term | None:
        """What this step adds to pruned weights, if it is no more than that. `before_step` is then not shown the weights that get it."""
        return None

    def before_step(self, step: Step) -> None:
        """Gradients are complete (summed over micro-batches and processes); the optimizer has not moved yet. Change `owned.grad` here."""

    def after_step(self, step: Step) -> None:
        """The optimizer has moved the weights. Change `owned.weight` or masks here."""


@dataclass(frozen=True, slots=True)
class OwnedWeight:
    """A sparse weight in a step of the optimizer. Tensors are as they are now, and this process's part of the whole.

    `weight` and `grad` are its values, to be changed in place (`mul_`, `add_`), `mask()` is True where weights are kept. Where weights are
    spread over processes (FSDP2) these are parts; masks that are frozen and scores they are made of are whole, see `nofm.shards`.
    """

    site: Site  # the layer's side of it: its pattern, lens and stored mask
    param: nn.Parameter  # the very parameter that the optimizer moves (`site.param` is a name, `site.weight` may be a gathered copy)
    lr: float | Tensor  # of its group in the optimizer, in this step
    descends: bool  # False under maximize=True, where the optimizer adds the gradient

    @property
    def weight(self) -> Tensor:
        weight = self.param.detach()
        return weight if type(weight) is Tensor else shards.local(weight)

    @property
    def grad(self) -> Tensor:
        grad = self.param.grad
        assert grad is not None, f"{self.site.key} has no gradient in this step"
        return grad if type(grad) is Tensor else shards.local(grad)

    def mask(self) -> Tensor:
        # Not the site's own mask: FSDP2 may show the layer a gathered copy at this moment, and a layer that is being narrowed has more
        # weights than its pattern keeps.
        stored = self.site.stored_mask
        return ops.mask(self.weight, self.site.seen_grouping) if stored is None else shards.part_of(stored, self.param)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one optimizer, the same object at both moments. `number` counts from 1, without steps that a scaler skipped.

    What is to be done to every sparse weight goes over (*step.weights, *step.resting).
    """

    number: int
    weights: Sequence[OwnedWeight]  # those with a gradient, which the optimizer moves
    resting: Sequence[OwnedWeight]  # those without, which it leaves alone
    grad_scale: Tensor | None = None  # gradients are this many times too large: the optimizer divides inside its own step
    carried: dict[str, Tensor] = field(default_factory=dict)  # what a method keeps from the first moment for the second, by key
    memory: Memory = field(default_factory=lambda: Memory(()))  # what it keeps from step to step
    fleet: Fleet = field(default_factory=Fleet)  # launches over many weights, kept from step to step
    is_late: bool = False  # whether an earlier step was to prune and has not, see `Method.is_late`
