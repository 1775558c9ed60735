"""Where a loop's time goes, and what it waits for right now. Measures; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Stopwatch", "Times"]


@dataclass(slots=True)
class Times:
    """Seconds that a loop has spent, by activity; together nearly all of its time."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    predict_s: float = 0.0
    update_s: float = 0.0
    evaluate_s: float = 0.0
    wait_upstream_s: float = 0.0
    wait_downstream_s: float = 0.0
    wait_feed_s: float = 0.0


class Stopwatch:
    """Books time by activity. One thread uses it; others may read its attributes.

    Attributes:
        times: booked so far. What fails is not booked.
        waiting_for: the wait that goes on right now, or the one that failed; else empty.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start at zero.

        Args:
            clock: monotonic, in seconds.
        """
        self._clock = clock
        self.times = Times()
        self.waiting_for = ""

    @contextmanager
    def timed(self, activity: str) -> Generator[None]:
        """Book the time of the body under ``activity``, a field of ``Times``."""
        start = self._clock()
        yield
        seconds = getattr(self.times, activity) + self._clock() - start
        setattr(self.times, activity, seconds)

    @contextmanager
    def waiting(self, whom: str, what: str) -> Generator[None]:
        """Book the body as a wait.

        Args:
            whom: "upstream", "downstream" or "feed".
            what: for people, such as "F17 from stage 0".
        """
        self.waiting_for = what
        with self.timed(f"wait_{whom}_s"):
            yield
        self.waiting_for = ""
