"""PipeDream's weight stashing (arXiv 1806.03377): a backward reads what its forward read.

The gradient is a true one, of weights that are ``N - 1 - k`` updates old when it is applied.
"""

from __future__ import annotations

from ...protocol.schedule import Op
from ..reading import NEWEST, Ahead, Kept, Reading
from .base import Method, Place

__all__ = ["Stash"]


class Stash(Method):
    """Forward reads the newest weights, backward the same ones again."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.keeps = place.delay > 0  # on the last stage the newest are still the same

    def forward(self, op: Op, version: int) -> Reading:
        """Read the newest weights and keep them."""
        del version
        return Ahead(0, keep=(op.batch, op.micro)) if self.keeps else NEWEST

    def backward(self, op: Op, version: int) -> Reading:
        """Read what the forward read."""
        del version
        return Kept((op.batch, op.micro)) if self.keeps else NEWEST
