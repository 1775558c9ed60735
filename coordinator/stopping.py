"""Before which batch a run that was asked to stop may do so, at the earliest. Pure.

A coordinator that was there from the beginning has given out every batch itself and knows the
newest. One that was started again, or goes on with what an earlier launch left, does not: stages
have begun batches, or hold such, that it never saw. It stops after all of these.
"""

from __future__ import annotations

from .events import StopFeeding, StopWanted
from .fleet import Fleet

__all__ = ["ASKED_AHEAD", "Stopping"]

ASKED_AHEAD = 3
"""Batches that the first stage may have been given and not begun; its ``LOOK_AHEAD``."""

_WINDOW_PARCELS = 2
"""What a stage may hold of its neighbour beyond one batch for each stage."""


class Stopping:
    """The wish to stop, until it can be fulfilled.

    Args:
        fleet: everybody.
        has_fed_all: whether every batch that any stage may know of was given out by this process.
    """

    def __init__(self, fleet: Fleet, *, has_fed_all: bool) -> None:
        self._fleet = fleet
        self._has_fed_all = has_fed_all
        self._wanted: StopWanted | None = None

    def want(self, event: StopWanted) -> None:
        """Remember that somebody wants to stop; the newest reason counts."""
        self._wanted = event

    def begin(self, committed: int, train_batches: int) -> list[StopFeeding]:
        """Stop feeding, if that is wanted and all living stages have told how far they are.

        Args:
            committed: updates of the committed round.
            train_batches: of the whole run.
        """
        if self._wanted is None:
            return []
        at_least = 0 if self._has_fed_all else self._first_unknown(committed)
        if at_least is None:
            return []
        wanted, self._wanted = self._wanted, None
        return [StopFeeding(min(at_least, train_batches), wanted.reason, wanted.exit_code)]

    def _first_unknown(self, committed: int) -> int | None:
        """Return the first batch that no stage can have; None while that cannot be known.

        A living first stage has begun those that it tells of and holds three more. If it is gone,
        the stages after it have begun less than they tell of plus what they hold of their
        neighbour. What was given out by this process since, the feed knows.
        """
        workers = self._fleet.workers
        begun = [committed]
        for worker in workers:
            if worker.heard is None or worker.exited:
                continue
            if worker.progress is None:
                return None
            begun.append(worker.progress.version + worker.progress.in_flight)
        return max(begun) + len(workers) + _WINDOW_PARCELS + ASKED_AHEAD
