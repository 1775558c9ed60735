"""Asynchronous training without any remedy: every op reads the newest weights there are.

A batch meets older weights in its forward than in its backward, and older ones the earlier the
stage. This is what the other methods are compared with.
"""

from __future__ import annotations

from ...protocol.schedule import Op

__all__ = ["Vanilla"]


class Vanilla:
    """Forward and backward read the newest weights."""

    predicts = False

    def __init__(self, stage: int, stages: int) -> None:
        del stage, stages

    def horizon(self, op: Op, version: int) -> int:
        """Look ahead not at all."""
        del op, version
        return 0
