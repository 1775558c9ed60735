"""SpecTrain (arXiv 1809.02839): forward and backward both read predicted weights.

Both passes of a batch, on every stage, aim at one moment: the end of its backward on stage 0. In
steady state the forward looks ``N - 1 - k + k // 2`` updates ahead, the backward ``k // 2``.
"""

from __future__ import annotations

from ...protocol.schedule import Op
from ...protocol.staleness import horizon

__all__ = ["SpecTrain"]


class SpecTrain:
    """Forward and backward read ``W - s * lr * v``, each with its own s."""

    def __init__(self, stage: int, stages: int) -> None:
        self._stage = stage
        self.predicts = stages - 1 - stage + stage // 2 > 0

    def horizon(self, op: Op, version: int) -> int:
        """Look ahead as far as ``op`` needs."""
        return horizon(op, version, self._stage)
