"""What the stage's thread and a stream's own thread share: one lock, one fault, one way to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from ..protocol.errors import DeadlineError, SpectrainError

__all__ = ["Gate"]

_ADVICE = "see what that side was doing, or allow more time (--wait-timeout)"


class Gate:
    """A lock, as a context manager, whose waits end early when the stream has failed.

    While the clock is stopped the time that passes counts towards no deadline of a stage: its
    neighbour is being restarted, and how long that may take is for others to judge. All methods
    but ``fail`` want the lock held.

    Args:
        stage: who waits, for errors.
        wait_timeout_s: how long ``wait`` waits unless told otherwise.
    """

    def __init__(self, stage: int, wait_timeout_s: float) -> None:
        self._stage = stage
        self._wait_timeout_s = wait_timeout_s
        self._changed = threading.Condition()
        self._fault: SpectrainError | None = None
        self._is_clock_stopped = True

    def __enter__(self) -> None:
        self._changed.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Whoever held the lock may have changed what others wait for.
        self._changed.notify_all()
        self._changed.release()

    def check(self) -> None:
        """Raise the stream's fault if it has one."""
        if self._fault is not None:
            raise self._fault

    def stop_clock(self) -> None:
        """Let no time count from here on; so it is in the beginning."""
        self._is_clock_stopped = True

    def start_clock(self) -> None:
        """Let time count again."""
        self._is_clock_stopped = False

    def wait(
        self,
        done: Callable[[], bool],
        what: Callable[[], str],
        timeout_s: float | None = None,
        *,
        counts_always: bool = False,
        advice: str = _ADVICE,
    ) -> float:
        """Wait until ``done``.

        Args:
            done: what is waited for; asked again after every change.
            what: names it, for errors.
            timeout_s: how long; None: as long as a stage may wait for a neighbour.
            counts_always: whether time counts although the clock is stopped.
            advice: what to do about a deadline that is missed.

        Returns:
            How long it took, in seconds, whether that counted or not.

        Raises:
            SpectrainError: the stream's fault.
            DeadlineError: the time is up.
        """
        limit_s = self._wait_timeout_s if timeout_s is None else timeout_s
        waited_s = counted_s = 0.0
        while not done():
            self.check()
            if counted_s >= limit_s:
                raise DeadlineError(
                    f"stage {self._stage} waited {limit_s:g} s for {what()}; {advice}"
                )
            counts = counts_always or not self._is_clock_stopped
            start_s = time.monotonic()
            self._changed.wait(limit_s - counted_s if counts else None)
            passed_s = time.monotonic() - start_s
            waited_s += passed_s
            counted_s += passed_s if counts else 0.0
        return waited_s

    def wait_without_limit(self, done: Callable[[], bool]) -> None:
        """Wait until ``done``, whatever happens."""
        self._changed.wait_for(done)

    def fail(self, error: Exception) -> None:
        """Make every wait fail from here on; the first fault stays."""
        fault = error
        if not isinstance(fault, SpectrainError):
            fault = SpectrainError(f"{type(error).__name__}: {error}")
            fault.__cause__ = error
        with self:
            self._fault = self._fault or fault
