"""What a staleness method is. It chooses weights; it never sees tensors, streams or the op list."""

from __future__ import annotations

from dataclasses import dataclass

from ...protocol.methods import Horizon
from ...protocol.schedule import Op
from ..predictor import PredictorBuilder
from ..reading import NEWEST, Reading

__all__ = ["Method", "Place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in which pipeline a method works.

    Attributes:
        stage: k, from 0 at the input side.
        stages: N.
        microbatches: of a full mini-batch, one update for all of them.
        horizon: what a slot of the pipeline is taken to last.
    """

    stage: int
    stages: int
    microbatches: int = 1
    horizon: Horizon = "paper"

    @property
    def delay(self) -> int:
        """Micro-batches that go forward here before the first one is back: N - 1 - k."""
        return self.stages - 1 - self.stage


class Method:
    """Says what the layers of one stage read in each pass; by itself, the newest weights.

    A subclass overrides what it does otherwise. Its answers follow from the arguments alone: a
    stage that is restarted asks again, and has to hear the same.

    Attributes:
        predicts: whether it ever asks for ``Ahead`` of the newest weights.
        keeps: whether it ever keeps weights under a key.
        older: how far back from the newest it asks for a ``Version``.
        predictor: looks ahead for it; None: the one that the run's settings name.
    """

    predicts: bool = False
    keeps: bool = False
    older: int = 0
    predictor: PredictorBuilder | None = None

    def __init__(self, place: Place) -> None:
        self.place = place

    def forward(self, op: Op, version: int) -> Reading:
        """Return what a forward reads.

        Args:
            op: that is about to run.
            version: updates that the stage's weights have seen. What is kept may not depend on it.
        """
        del op, version
        return NEWEST

    def backward(self, op: Op, version: int) -> Reading:
        """Return what a backward reads; arguments as for ``forward``."""
        del op, version
        return NEWEST

    def lr_factor(self, update: int) -> float:
        """Return what the learning rate of an update, counted from 0, is multiplied by."""
        del update
        return 1.0
