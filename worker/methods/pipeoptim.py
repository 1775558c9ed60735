"""PipeOptim (arXiv 2312.00839): the forward predicts the weights that its backward will find.

It looks ``N - 1 - k`` updates ahead, and the backward reads the newest weights; so no copy has to
be kept. The velocity is that of the optimizer: SGD with momentum, Adam, AdamW.
"""

from __future__ import annotations

from ...protocol.schedule import Op
from ...protocol.staleness import behind
from ..reading import Reading, ahead
from .base import Method, Place

__all__ = ["PipeOptim"]


class PipeOptim(Method):
    """Forward reads weights predicted for its own backward, which reads the newest."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.predicts = place.delay > 0

    def forward(self, op: Op, version: int) -> Reading:
        """Look ahead over the updates of earlier batches."""
        return ahead(behind(op, version))
