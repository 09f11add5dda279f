"""What can go wrong, by name.

Everything a user can cause is a `NofmError`, which is a `ValueError`: one `except` catches the family, and each message names
the layer, key or file and says what to do about it. Broken invariants of our own are `assert`s, not members of this family.
"""

from __future__ import annotations

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
    "what_swings",
]


class NofmError(ValueError):
    """The root of every error that nofm raises on purpose."""


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


def what_swings(decay: float, lr: float) -> str:
    """What is wrong where SR-STE's lambda is too large for the learning rate; "" where it is not.

    A step takes lr * lambda times its value from a pruned weight, W <- (1 - lr * lambda) * W: from 1 on it comes out on the other side of
    zero, nearer to it below 2, farther away above. (Momentum moves that 2, by Nesterov's way down, to 1.36 at 0.9.)
    """
    return "pruned weights swing instead of shrinking, and from twice that on (without momentum) they grow" if decay * lr >= 1 else ""
