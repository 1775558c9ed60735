"""SpecTrain (arXiv 1809.02839): forward and backward both read predicted weights.

Both passes of a batch, on every stage, aim at one moment: the end of its backward on stage 0. In
steady state the forward looks ``N - 1 - k + k // 2`` updates ahead, the backward ``k // 2``.
"""

from __future__ import annotations

from ...protocol.schedule import Op
from ...protocol.staleness import horizon
from ..weights import Weights

__all__ = ["SpecTrain"]


class SpecTrain:
    """Forward and backward read ``W - s * lr * v``, each with its own s."""

    name = "spectrain"
    predicts = True

    def prepare(self, weights: Weights, op: Op, stage: int) -> None:
        """Predict the live weights as far ahead as ``op`` needs."""
        weights.predict(horizon(op, weights.version, stage))
