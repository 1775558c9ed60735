"""PipeMare (arXiv 1910.05124): learn slower where it is late, and correct backwards, not forwards.

No weights are kept. The backward reads the newest weights moved back along their averaged drift,
which stands for what the forward read; the learning rate of a stage that is ``d = N - 1 - k``
updates behind begins at ``lr / d`` and grows to ``lr``. The formulas are as recalled by others: the
constants below could not be checked against the paper.
"""

from __future__ import annotations

from functools import partial

from ...protocol.schedule import Op
from ..drift import Drift
from ..reading import NEWEST, Reading, ahead
from .base import Method, Place

__all__ = ["ANNEALING_UPDATES", "PipeMare"]

ANNEALING_UPDATES = 1000
"""K: until so many updates were done, early stages learn slower than the others."""

_DECAY_PER_DELAY = 0.135
"""D: what is left of an update in the average once the delay of the stage has passed."""


class PipeMare(Method):
    """Forward reads the newest weights, backward what the forward is estimated to have read."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.predicts = place.delay > 0
        if self.predicts:
            self.predictor = partial(Drift, decay=_DECAY_PER_DELAY ** (1 / place.delay))

    def backward(self, op: Op, version: int) -> Reading:
        """Look back over the updates since the forward."""
        del version
        delay = min(op.batch, self.place.delay)
        return ahead(-delay) if delay else NEWEST

    def lr_factor(self, update: int) -> float:
        """Return ``1 / d ** p``, where p falls from 1 to 0."""
        share = max(0.0, 1 - update / ANNEALING_UPDATES)
        return max(1, self.place.delay) ** -share
