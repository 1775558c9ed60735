"""What a loop has taken from its streams, and what it would need again. Takes nothing itself."""

from __future__ import annotations

from dataclasses import dataclass

from ..protocol.schedule import Kind, Op, Work
from .boundary import Parcel
from .snapshot import Position

__all__ = ["Fed", "Intake"]


@dataclass(frozen=True, slots=True)
class Fed:
    """What stays known of a forward's parcel until its backward."""

    samples: int
    batch_samples: int
    number: int


class Intake:
    """Parcels of one stage, from the first or from a snapshot on.

    Attributes:
        needed_activation: see ``Position``; right after an update.
        needed_gradient: likewise.
    """

    def __init__(self) -> None:
        self.needed_activation = 0
        self.needed_gradient = 0
        self._in_flight: dict[tuple[int, int], Fed] = {}
        # Per kind, the first batch and micro-batch whose parcel is still to be taken.
        self._due: dict[Kind, tuple[int, int]] = dict.fromkeys(Kind, (0, 0))

    @property
    def batches(self) -> set[int]:
        """Batches that micro-batches in flight belong to."""
        return {batch for batch, _ in self._in_flight}

    def wants(self, op: Op) -> bool:
        """Tell whether the parcel for ``op`` is still to be taken; from any thread."""
        return (op.batch, op.micro) >= self._due[op.kind]

    def took(self, parcel: Parcel) -> None:
        """Take note of a parcel; those of one kind come in the order of their ops."""
        op = parcel.op
        self._due[op.kind] = (op.batch, op.micro + 1)
        if op.kind is Kind.FORWARD:
            fed = Fed(parcel.samples, parcel.batch_samples, parcel.number)
            self._in_flight[op.batch, op.micro] = fed
        elif op.kind is Kind.BACKWARD:
            self.needed_gradient = parcel.number + 1

    def finish(self, op: Op) -> Fed:
        """Return what is known of the micro-batch whose backward is ``op``, and forget it."""
        fed = self._in_flight.pop((op.batch, op.micro))
        self.needed_activation = fed.number + 1
        return fed

    def resume(self, position: Position, work: Work) -> None:
        """Begin where a snapshot was taken."""
        self.needed_activation = position.needed_activation
        self.needed_gradient = position.needed_gradient
        self._due[Kind.FORWARD] = self._due[Kind.BACKWARD] = (position.update, 0)
        # Earlier evaluation rounds came before this update; one that follows it is still to come.
        self._due[Kind.EVALUATE] = (work.epoch_of(position.update - 1), 0)
