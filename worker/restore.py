"""Brings a freshly built stage back to where a snapshot of it was taken.

Three steps, each at its time: ``load_snapshot`` before anything is built on it, ``resume_streams``
before links are, and ``Rebuild`` as soon as parcels come. The loop drives the last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..protocol.errors import SnapshotError
from .reading import Key
from .snapshot import InFlight, Origin, Position, Snapshot, read_snapshot
from .stage import Stage
from .weights import Weights

__all__ = ["Rebuild", "Resumable", "load_snapshot", "resume_streams"]


@runtime_checkable
class Resumable(Protocol):
    """An end of a stream between stages; the feed's need no numbers."""

    def resume_at(self, number: int) -> None:
        """Send, or ask for, parcels from ``number`` on; before the first link is built."""
        ...


def load_snapshot(paths: Sequence[Path], digest: str, origin: Origin) -> Snapshot:
    """Return the snapshot from the first of ``paths`` where it lies whole.

    Raises:
        SnapshotError: it is nowhere; the text says for each path why not.
    """
    failures: list[str] = []
    for path in paths:
        try:
            return read_snapshot(path, digest, origin)
        except SnapshotError as error:  # noqa: PERF203  each path is a chance of its own
            failures.append(str(error))
    raise SnapshotError("\n".join(failures) or "no path to a snapshot was given")


def resume_streams(
    position: Position,
    *,
    activations_in: object,
    gradients_in: object,
    activations_out: object,
    gradients_out: object,
) -> None:
    """Set the numbers of those ends that are ``Resumable``."""
    numbers = (
        (activations_in, position.needed_activation),
        (gradients_in, position.needed_gradient),
        (activations_out, position.next_activation),
        (gradients_out, position.next_gradient),
    )
    for end, number in numbers:
        if isinstance(end, Resumable):
            end.resume_at(number)


class Rebuild:
    """Puts a stage into the state of a snapshot, forward by forward.

    For each ``next``: ``show`` its weights and buffers, run the forward, and so on until there is
    none. Then, or at once if nothing was in flight, the stage is in the state of the snapshot.
    """

    def __init__(self, snapshot: Snapshot, stage: Stage, weights: Weights) -> None:
        self._snapshot = snapshot
        self._stage = stage
        self._weights = weights
        self._rest = deque(snapshot.in_flight)
        self._settle()

    @property
    def next(self) -> InFlight | None:
        """The micro-batch whose forward runs again next; None at the end."""
        return self._rest[0] if self._rest else None

    def show(self, keep: Key | None) -> None:
        """Let the layers see what the next forward saw the first time.

        Args:
            keep: the key that its weights were kept under then; None: they were not.
        """
        self._weights.show(self._rest[0].live, keep)
        self._stage.rebind_buffers(self._rest[0].buffers)

    def advance(self) -> None:
        """Leave the next forward behind: it ran."""
        self._rest.popleft()
        if not self._rest:
            self._settle()

    def _settle(self) -> None:
        snapshot = self._snapshot
        self._weights.resume(
            snapshot.position.update, snapshot.clean, snapshot.optimizer, snapshot.memory
        )
        self._stage.rebind_buffers(snapshot.buffers)
