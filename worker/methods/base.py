"""What a staleness method is. It chooses weights; it never sees tensors of batches or streams."""

from __future__ import annotations

from typing import Protocol

from ...protocol.schedule import Op

__all__ = ["Method"]


class Method(Protocol):
    """Decides which weights the layers of one stage read in a forward and in a backward.

    Args:
        stage: k, from 0 at the input side.
        stages: N.
    """

    def __init__(self, stage: int, stages: int) -> None: ...

    @property
    def predicts(self) -> bool:
        """Whether it ever asks for predicted weights, which not every optimizer allows."""
        ...

    def horizon(self, op: Op, version: int) -> int:
        """Return how many updates ahead of the newest weights ``op`` should read; 0: these.

        Args:
            op: a forward or a backward that is about to run.
            version: updates that the stage's weights have seen.
        """
        ...
