"""The ends of streams that one stage holds, as its loop sees them. No threads, no sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..protocol.schedule import Op
from .boundary import Outbox, Parcel

__all__ = ["Source", "Streams"]


class Source(Protocol):
    """Where a loop takes parcels from: any ``Inbox``, and one whose waiting can be cut short."""

    def take(self, op: Op) -> Parcel | None:
        """Return the parcel for ``op``, waiting for it; None if it will never come.

        None is allowed only for a forward that ``Loop.stop_before`` has cut off.
        """
        ...

    def ready(self, op: Op) -> bool:
        """Tell whether ``take(op)`` would return at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """The ends of streams that one stage holds; None where it has no such neighbour.

    Attributes:
        inputs: the feed's inputs on stage 0, activations from upstream elsewhere.
        targets: the feed's targets; on the last stage.
        activations: to the next stage; on all but the last.
        gradients_in: from the next stage; on all but the last.
        gradients_out: to the previous stage; on all but the first.
    """

    inputs: Source
    targets: Source | None = None
    activations: Outbox | None = None
    gradients_in: Source | None = None
    gradients_out: Outbox | None = None
