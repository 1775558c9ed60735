"""SpecTrain (arXiv 1809.02839): forward and backward both read predicted weights.

Both passes of a batch, on every stage, aim at one moment: the end of its backward on stage 0. In
steady state the forward looks ``N - 1 - k + k // 2`` updates ahead, the backward ``k // 2``.
"""

from __future__ import annotations

from ...protocol.schedule import Op
from ...protocol.staleness import behind, later_backwards
from ..reading import Reading, ahead
from .base import Method, Place

__all__ = ["SpecTrain"]


class SpecTrain(Method):
    """Forward and backward read weights predicted for one moment, each with its own s."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._later = later_backwards(place.stage, place.horizon)
        self.predicts = place.delay + self._later > 0

    def forward(self, op: Op, version: int) -> Reading:
        """Look ahead over the updates of earlier batches, and of later ones until that moment."""
        later_updates = (op.micro + self._later) // self.place.microbatches
        return ahead(behind(op, version) + later_updates)

    def backward(self, op: Op, version: int) -> Reading:
        """Do the same; of earlier batches there are none left."""
        return self.forward(op, version)
