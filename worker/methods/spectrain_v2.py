"""SpecTrain's second version: one prediction for both passes, kept from one to the other.

As its authors document it: the forward looks ``N - 1 - k`` updates ahead, to the weights that its
own update will find, and the backward reads the same ones. Their code moves the weights
themselves instead, and never back; that is not repeated here.
"""

from __future__ import annotations

from ...protocol.schedule import Op
from ...protocol.staleness import behind
from ..reading import NEWEST, Ahead, Kept, Reading
from .base import Method, Place

__all__ = ["SpecTrainV2"]


class SpecTrainV2(Method):
    """Forward reads weights predicted for its own update, backward the same ones again."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.predicts = self.keeps = place.delay > 0

    def forward(self, op: Op, version: int) -> Reading:
        """Look ahead over the updates of earlier batches, and keep what is seen."""
        if not self.keeps:
            return NEWEST
        return Ahead(behind(op, version), keep=(op.batch, op.micro))

    def backward(self, op: Op, version: int) -> Reading:
        """Read what the forward read."""
        del version
        return Kept((op.batch, op.micro)) if self.keeps else NEWEST
