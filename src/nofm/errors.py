"""What can go wrong, by name.

Everything a user can cause is a `NofmError`, which is a `ValueError`: one `except` catches the family, and each message names
the layer, key or file and says what to do about it. Broken invariants of our own are `assert`s, not members of this family.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "LayerError",
    "MaskDivergenceError",
    "NoZerosError",
    "NofmError",
    "NonFiniteWeightError",
    "NotCopiedError",
    "OptimizerError",
    "PackedError",
    "PatternError",
    "swings",
]


class NofmError(ValueError):
    """The root of every error that nofm raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would give the message to `__init__`, which makes one of other arguments; and an error that a process cannot send back
        # leaves whoever waits for it waiting.
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(kind: type[NofmError], args: tuple[Any, ...], attributes: dict[str, Any]) -> NofmError:
    error = kind.__new__(kind, *args)  # which keeps `args`
    error.__dict__.update(attributes)
    return error


class PatternError(NofmError):
    """A text or value that is no N:M pattern, or a tensor that a pattern cannot be laid on."""


class LayerError(NofmError):
    """A layer that cannot be made sparse as asked, a rule that matches nothing, a verb called on the wrong model."""


class NoZerosError(LayerError):
    """Weights without zeros worth leaving out. By itself, since a command has other advice for it than a library."""


class OptimizerError(NofmError):
    """A method and an optimizer that do not fit: weights it does not own, a step it cannot take part in."""


class NotCopiedError(OptimizerError, TypeError):
    """A handle that is copied, or used in a copy. As a TypeError, which Python raises of what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(
            "a handle hangs on an optimizer and is neither copied nor pickled; save handle.state_dict(), and give it to load_state_dict of "
            "the handle that attach returns for the copy"
        )


class PackedError(NofmError):
    """A packed file that is damaged, or not from nofm."""


class NonFiniteWeightError(NofmError):
    """NaN or Inf in a weight, whose mask would mean nothing. Carries `parameter`, `index` and `step`."""

    def __init__(self, parameter: str, index: tuple[int, ...], value: float, step: int | None = None, why: str = "") -> None:
        self.parameter, self.index, self.value, self.step = parameter, index, value, step
        when = "" if step is None else f" after step {step}"
        advice = why or "Lower the learning rate, clip gradients, or load a checkpoint from before it"
        super().__init__(f"{parameter}{list(index)} is {value}{when}; an N:M mask needs finite weights. {advice}")


class MaskDivergenceError(NofmError):
    """Ranks that should hold the same mask do not. Carries `layers` and `ranks`."""

    def __init__(self, layers: list[str], ranks: list[int]) -> None:
        self.layers, self.ranks = layers, ranks
        super().__init__(
            f"masks differ between ranks: {', '.join(layers)} on rank(s) {', '.join(map(str, ranks))} are not those of rank 0. "
            "Weights have drifted apart: check that every rank loads the same checkpoint and takes the same steps"
        )


def swings(decay: float, lr: float, refine: str, placement: str, is_plain: bool) -> str:
    """What comes of SR-STE's lambda where it is too large for the learning rate; "" where it is not.

    A step takes lr * lambda times its value from a pruned weight, W <- (1 - lr * lambda) * W: from 1 on it comes out on the other side of
    zero, nearer to it below 2, farther away above. (Momentum moves that 2, by Nesterov's way down, to 1.36 at 0.9.) That is so where the
    term grows with the weight, as Eq. 5 and 6 do not, and is not divided by its own size, as Adam does (not `is_plain`).
    """
    shrinks = refine == "weight" and (is_plain or placement == "decoupled")
    is_too_much = shrinks and decay * lr >= 1
    return "pruned weights swing instead of shrinking, and from twice that on (without momentum) they grow" if is_too_much else ""
