"""What a staleness method is. It chooses weights; it never sees tensors of batches or streams."""

from __future__ import annotations

from typing import Protocol

from ...protocol.schedule import Op
from ..weights import Weights

__all__ = ["Method"]


class Method(Protocol):
    """Decides which weights the layers read in a forward and in a backward."""

    @property
    def name(self) -> str:
        """A key of ``METHODS``."""
        ...

    @property
    def predicts(self) -> bool:
        """Whether it asks for predicted weights, which not every optimizer allows."""
        ...

    def prepare(self, weights: Weights, op: Op, stage: int) -> None:
        """Make the live weights those that ``op`` should read; the caller restores them after it.

        Args:
            weights: the stage's, with live weights equal to clean ones.
            op: a forward or a backward that is about to run.
            stage: k, from 0 at the input side.
        """
        ...
