"""Asynchronous training without any remedy: every op reads the newest weights there are.

A batch meets older weights in its forward than in its backward, and older ones the earlier the
stage. This is what the other methods are compared with.
"""

from __future__ import annotations

from ...protocol.schedule import Op
from ..weights import Weights

__all__ = ["Vanilla"]


class Vanilla:
    """Forward and backward read clean weights."""

    name = "vanilla"
    predicts = False

    def prepare(self, weights: Weights, op: Op, stage: int) -> None:
        """Leave the live weights as they are."""
