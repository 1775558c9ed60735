"""Synchronous training: the reference. The flushed schedule keeps weights from going stale.

Like vanilla it reads the newest weights. As every batch is updated before the next one enters,
these are the same in all its forwards and backwards.
"""

from __future__ import annotations

from ...protocol.schedule import Op
from ..weights import Weights

__all__ = ["Sync"]


class Sync:
    """Forward and backward read clean weights; nothing is in flight across an update."""

    name = "sync"
    predicts = False

    def prepare(self, weights: Weights, op: Op, stage: int) -> None:
        """Leave the live weights as they are."""
