"""What the stage's thread and a stream's own thread share: one lock, one fault, one way to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from ..protocol.errors import DeadlineError, SpectrainError

__all__ = ["Gate"]


class Gate:
    """A lock, as a context manager, whose waits end early when the stream has failed.

    All methods but ``fail`` want the lock held.

    Args:
        stage: who waits, for errors.
        wait_timeout_s: how long ``wait`` waits unless told otherwise.
    """

    def __init__(self, stage: int, wait_timeout_s: float) -> None:
        self._stage = stage
        self._wait_timeout_s = wait_timeout_s
        self._changed = threading.Condition()
        self._fault: SpectrainError | None = None

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

    @property
    def has_failed(self) -> bool:
        """Whether waits fail at once."""
        return self._fault is not None

    def check(self) -> None:
        """Raise the stream's fault if it has one."""
        if self._fault is not None:
            raise self._fault

    def wait(
        self, done: Callable[[], bool], what: Callable[[], str], timeout_s: float | None = None
    ) -> float:
        """Wait until ``done``.

        Args:
            done: what is waited for; asked again after every change.
            what: names it, for errors.
            timeout_s: how long; None: as long as a stage may wait for a neighbour.

        Returns:
            How long it took, in seconds.

        Raises:
            SpectrainError: the stream's fault, above all ``LinkError``.
            DeadlineError: the time is up.
        """
        if done():
            return 0.0
        limit_s = self._wait_timeout_s if timeout_s is None else timeout_s
        start_s = now_s = time.monotonic()
        while not done():
            self.check()
            if now_s - start_s >= limit_s:
                raise DeadlineError(
                    f"stage {self._stage} waited {limit_s:g} s for {what()}; see what that side "
                    "was doing, or allow more time (--wait-timeout)"
                )
            self._changed.wait(start_s + limit_s - now_s)
            now_s = time.monotonic()
        return now_s - start_s

    def wait_without_limit(self, done: Callable[[], bool]) -> None:
        """Wait until ``done``, whatever happens."""
        self._changed.wait_for(done)

    def fail(self, error: Exception) -> None:
        """Make every wait fail; the first fault stays."""
        fault = error
        if not isinstance(fault, SpectrainError):
            fault = SpectrainError(f"{type(error).__name__}: {error}")
            fault.__cause__ = error
        with self:
            self._fault = self._fault or fault

    def recover(self) -> None:
        """Forget the fault: a new generation begins."""
        self._fault = None
