"""Smaller steps where delays are longer, on top of other methods. Our own, from no paper.

The learning rates that a delayed stage can bear shrink with its delay, and prediction widens them
by a factor only. Stage k, ``d = N - 1 - k`` updates behind, learns at ``lr / (1 + d)`` throughout.
"""

from __future__ import annotations

from .base import Method
from .spectrain import SpecTrain
from .spectrain_v2 import SpecTrainV2
from .stash import Stash

__all__ = ["SpecTrainDamped", "SpecTrainV2Damped", "StashDamped"]


class _Damped(Method):
    def lr_factor(self, update: int) -> float:
        """Return ``1 / (1 + d)``, whatever the update."""
        del update
        return 1 / (1 + self.place.delay)


class SpecTrainDamped(_Damped, SpecTrain):
    """Forward and backward read what they read in SpecTrain; updates are smaller."""


class SpecTrainV2Damped(_Damped, SpecTrainV2):
    """Forward and backward read what they read in SpecTrain's second version; updates are smaller.

    Its gradients are true ones, of the weights that they are applied to as far as those can be
    foreseen, and what cannot be foreseen is kept small.
    """


class StashDamped(_Damped, Stash):
    """What the smaller steps do alone, without prediction."""
