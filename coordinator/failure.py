"""Faults that may end a run: until they are repaired, or until the first cause is named. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..protocol.messages import Cause
from .first_cause import Fault, first_cause

__all__ = ["SETTLE_S", "Failure"]

SETTLE_S = 1.0
"""After the first fatal fault, how long to listen for others before the first cause is named.

A worker that dies takes its neighbours' links with it; whose report comes first is chance.
"""


class Failure:
    """What went wrong and is not repaired."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._since: float | None = None
        self._gave_up = ""

    def note(self, *faults: Fault) -> None:
        """Remember faults."""
        self._faults.extend(faults)

    def forget(self, stage: int) -> None:
        """Drop the faults of a stage that is being repaired."""
        self._faults = [fault for fault in self._faults if fault.stage != stage]

    def give_up(self, reason: str, faults: Iterable[Fault]) -> None:
        """Say why there will be no repair."""
        self._gave_up = f"Restarting was given up: {reason}. "
        self._faults.extend(faults)

    def begin(self, now: float) -> None:
        """The run will end; from now on others may still explain it."""
        if self._since is None:
            self._since = now

    def cause(self, now: float) -> Cause | None:
        """Return why the run ends, once all had time to speak."""
        if self._since is None or now - self._since < SETTLE_S:
            return None
        cause = first_cause(self._faults)
        return replace(cause, advice=self._gave_up + cause.advice)
