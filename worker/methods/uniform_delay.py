"""Methods under which all stages, in both passes, read weights of one and the same version.

It has to be old enough to be there wherever and whenever it is read, so every gradient is delayed
by the same number of updates.
"""

from __future__ import annotations

from ...protocol.schedule import Op
from ..reading import NEWEST, Reading, Version
from .base import Method, Place

__all__ = ["DoubleBuffered", "VerticalSync"]


class _UniformDelay(Method):
    def __init__(self, place: Place, delay: int) -> None:
        super().__init__(place)
        self.older = delay

    def forward(self, op: Op, version: int) -> Reading:
        """Read the version that the first stage has when the mini-batch enters."""
        del version
        return Version(max(0, op.batch - self.older)) if self.older else NEWEST

    def backward(self, op: Op, version: int) -> Reading:
        """Read the same version."""
        return self.forward(op, version)


class VerticalSync(_UniformDelay):
    """PipeDream's vertical sync (arXiv 1806.03377): the version that the first stage began with."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, place.stages - 1)


class DoubleBuffered(_UniformDelay):
    """PipeDream-2BW (arXiv 2006.09503): the version before the newest.

    With N - 1 or more micro-batches to an update the first stage has it when a mini-batch enters.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place, min(1, place.stages - 1))
