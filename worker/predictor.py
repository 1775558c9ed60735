"""What a way to look ahead is: it makes live weights out of clean ones and of what it knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from .segment import Segment

__all__ = ["Predictor", "PredictorBuilder"]


class Predictor(Protocol):
    """Tells where the weights of some segments will be. It never changes clean weights.

    Attributes:
        copies: memory of its own, in copies of all weights; not what the optimizer has anyway.
    """

    copies: int

    def extrapolate(self, segment: Segment, updates: int, lrs: Sequence[float]) -> None:
        """Make live values those expected after some more updates.

        Before the first update nothing is known, and live values become the clean ones.

        Args:
            segment: one of those it was built with.
            updates: how many, not 0; below 0: where the weights were, if it can tell.
            lrs: learning rates of these updates, one each; none where ``updates`` is below 0.
        """
        ...

    def before_step(self) -> None:
        """Look at the clean weights before an update."""
        ...

    def after_step(self) -> None:
        """Look at the clean weights after an update."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return what a restart needs besides weights and optimizer: the real tensors, by name."""
        ...

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``state`` returned once; other names in it are passed over."""
        ...


PredictorBuilder: TypeAlias = Callable[[Optimizer, Sequence[Segment]], Predictor]
"""Raises ``JobError`` if the optimizer cannot be predicted this way."""
