"""XPipe (arXiv 1911.04610): the first micro-batch of a mini-batch predicts for all of them.

With T micro-batches to an update, a forward looks ``round((N + T - k/2 - 2) / T)`` updates ahead
and a backward ``round((T + k//2 - 1) / T)``, halves rounded up. Forwards after the first read what
that one read; backwards of a mini-batch have no update among them and need no copy.
"""

from __future__ import annotations

import math
from fractions import Fraction

from ...protocol.schedule import Op
from ...protocol.staleness import behind, later_backwards
from ..reading import Ahead, Kept, Reading, ahead
from .base import Method, Place

__all__ = ["XPipe"]


class XPipe(Method):
    """Forwards read one prediction per mini-batch, backwards another."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.predicts = place.stages > 1
        self.keeps = place.stages > 1 and place.microbatches > 1
        k, parts = place.stage, place.microbatches
        self._later = later_backwards(k, place.horizon) // parts
        if not self.predicts:
            self._forward = self._backward = 0
        else:
            self._forward = _round(Fraction(2 * (place.stages + parts - 2) - k, 2 * parts))
            self._backward = _round(Fraction(parts + k // 2 - 1, parts))

    def forward(self, op: Op, version: int) -> Reading:
        """Look ahead in the first micro-batch, read the same again in the others."""
        key = (op.batch, 0)
        if op.micro > 0 and self.keeps:
            return Kept(key)
        updates = self._forward
        if self.place.horizon == "exact":
            updates = behind(op, version) + self._later
        return Ahead(updates, keep=key) if self.keeps else ahead(updates)

    def backward(self, op: Op, version: int) -> Reading:
        """Look ahead from the newest weights."""
        del op, version
        return ahead(self._later if self.place.horizon == "exact" else self._backward)


def _round(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))
