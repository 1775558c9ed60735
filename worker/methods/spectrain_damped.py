"""SpecTrain with smaller steps where delays are longer. Our own, from no paper.

The learning rates that a delayed stage can bear shrink with its delay, and prediction widens them
by a factor only. Stage k, ``d = N - 1 - k`` updates behind, learns at ``lr / (1 + d)`` throughout.
"""

from __future__ import annotations

from .spectrain import SpecTrain

__all__ = ["SpecTrainDamped"]


class SpecTrainDamped(SpecTrain):
    """Forward and backward read what they read in SpecTrain; updates are smaller."""

    def lr_factor(self, update: int) -> float:
        """Return ``1 / (1 + d)``, whatever the update."""
        del update
        return 1 / (1 + self.place.delay)
