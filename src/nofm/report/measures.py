"""What a study of each task is judged by: the headline metric, its direction, and how it is written."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MEASURES", "Measure"]


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric of a task. Tables show `factor` times it, with so many digits."""

    name: str  # as the task calls it
    words: str  # as a table does
    unit: str  # of a difference, as shown
    level: float  # two rows are level within this, as shown
    higher: bool = True  # is better
    factor: float = 1.0
    digits: int = 2
    beside: tuple[tuple[str, str], ...] = ()  # other metrics that a table shows, alike, with their words

    def better(self, difference: float) -> float:
        """A difference as shown, above zero where the first is better."""
        return self.factor * (difference if self.higher else -difference)


MEASURES: dict[str, Measure] = {
    "classification": Measure("accuracy", "accuracy %", "points", level=0.5),
    "translation": Measure("bleu", "BLEU", "BLEU", level=0.5),
    "flow": Measure("epe", "EPE, px (lower is better)", "px", level=0.05, higher=False, digits=3),
    "detection": Measure("map", "box mAP %", "points", level=1.0, factor=100.0),
    "segmentation": Measure("mask_map", "mask mAP %", "points", level=1.0, factor=100.0, beside=(("map", "box mAP %"),)),
}
