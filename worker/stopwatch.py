"""Where a loop's time goes, and what it waits for right now. Measures; decides nothing.

It is asked a dozen times per mini-batch: laps are made once, and texts only for who wants to read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import TracebackType

from ..protocol.schedule import Op

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
    """Books time by activity. One thread uses it; others may read its properties.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._laps = {field.name: _Lap(clock) for field in fields(Times)}
        self._waits = {
            whom: _Wait(self._laps[f"wait_{whom}_s"]) for whom in ("upstream", "downstream", "feed")
        }

    @property
    def times(self) -> Times:
        """Booked so far. What fails is not booked."""
        return Times(**{name: lap.seconds for name, lap in self._laps.items()})

    @property
    def waiting_for(self) -> str:
        """The wait that goes on right now, or the one that failed; else empty."""
        texts = (wait.text for wait in self._waits.values())
        return next((text for text in texts if text), "")

    def timed(self, activity: str) -> _Lap:
        """Book the time of a ``with`` body under ``activity``, a field of ``Times``."""
        return self._laps[activity]

    def waiting(self, whom: str, what: str, op: Op) -> _Wait:
        """Book the body of a ``with`` as a wait.

        Args:
            whom: "upstream", "downstream" or "feed".
            what: for people, with a place for the op, such as "{} from stage 0".
            op: that waits.
        """
        wait = self._waits[whom]
        wait.what = what, op
        return wait


class _Lap:
    """Sums up the time of bodies that end well."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = self._clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.seconds += self._clock() - self._start


class _Wait:
    """A lap that can tell what is waited for."""

    def __init__(self, lap: _Lap) -> None:
        self.what: tuple[str, Op] | None = None
        self._lap = lap

    @property
    def text(self) -> str:
        what = self.what  # once: the loop may be done waiting any time
        return what[0].format(what[1]) if what is not None else ""

    def __enter__(self) -> None:
        self._lap.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lap.__exit__(kind, error, traceback)
        if kind is None:
            self.what = None
