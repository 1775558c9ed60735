"""How often and how hard to try when a stage fails. Pure: failures in, a decision out.

The ladder: replay the failed stage; roll all stages back to the committed round; end with a
report. A run may lose any number of workers as long as it gets on in between; what is counted is
failures without progress, and exceptions of the user's code at one and the same op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .first_cause import Fault

__all__ = ["Decision", "FailureCounter", "GiveUp", "Repair", "Rung"]

SAME_OP_LIMIT = 3
"""Exceptions at one op after which replaying that stage alone has been tried enough."""

STALLED_LIMIT = 5
"""Failures of one stage in a row, without a new update in between, before all roll back."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class Rung(str, Enum):
    """What to do about a failure."""

    REPLAY = "replay"
    ROLL_BACK = "roll back"
    GIVE_UP = "give up"


class GiveUp(Exception):  # noqa: N818  it is a decision, not an error
    """The ladder has no more rungs; the text says why.

    Args:
        reason: in a few words.
        faults: what is the cause, where nobody has told of one yet.
    """

    def __init__(self, reason: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(reason)
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Decision:
    """A rung, and how long to wait before it."""

    rung: Rung
    pause_s: float = 0.0
    why: str = ""


@dataclass
class FailureCounter:
    """Failures of one stage.

    Attributes:
        restarts: how often it was started again, in all.
    """

    restarts: int = 0
    _stalled: int = 0
    _furthest: int = -1
    _op: str = ""
    _same_op: int = 0

    def failed(self, version: int, op: str, limit: int) -> Decision:
        """Count a failure and decide.

        Args:
            version: updates the stage had done when it failed.
            op: where its own code raised an exception; empty for any other death.
            limit: restarts of one stage that the user allows for the whole run.
        """
        self._stalled = 1 if version > self._furthest else self._stalled + 1
        self._furthest = max(self._furthest, version)
        self._same_op = self._same_op + 1 if op and op == self._op else 1 if op else 0
        self._op = op
        if self.restarts >= limit:
            return Decision(Rung.GIVE_UP, why=f"it was restarted {limit} times (--max-restarts)")
        self.restarts += 1
        if self._same_op > SAME_OP_LIMIT:
            return Decision(Rung.GIVE_UP, why=f"{op} failed {self._same_op} times")
        if self._stalled > 2 * STALLED_LIMIT:
            return Decision(Rung.GIVE_UP, why=f"it failed {self._stalled} times without an update")
        if self._same_op == SAME_OP_LIMIT or self._stalled == STALLED_LIMIT:
            return Decision(Rung.ROLL_BACK, self._pause_s())
        return Decision(Rung.REPLAY, self._pause_s())

    def _pause_s(self) -> float:
        """Return nothing at first, then twice as much each time."""
        if self._stalled <= 1:
            return 0.0
        return min(FIRST_PAUSE_S * 2 ** (self._stalled - 2), LONGEST_PAUSE_S)


@dataclass
class Repair:
    """One recovery of one stage, from its failure until it makes what it has not made before.

    Attributes:
        stage: k.
        what: how it died.
        failed_at: when the coordinator heard of it; times are monotonic, None until reached.
        from_update: the committed round it was restored to.
        replayed: mini-batches it went through a second time.
    """

    stage: int
    what: str
    failed_at: float
    from_update: int = 0
    replayed: int = 0
    started_at: float | None = None
    hello_at: float | None = None
    ready_at: float | None = None
    connected_at: float | None = None
    caught_up_at: float | None = None

    def record(self) -> dict[str, Any]:
        """Return what the summary says of it."""
        return {
            "stage": self.stage,
            "cause": self.what,
            "from_update": self.from_update,
            "replayed": self.replayed,
            "seconds": self.split_s(),
        }

    def split_s(self) -> dict[str, float]:
        """Return seconds from failure to start, hello, readiness, links and the old position."""
        points = {
            "detect": self.started_at,
            "spawn": self.hello_at,
            "load": self.ready_at,
            "link": self.connected_at,
            "replay": self.caught_up_at,
        }
        split: dict[str, float] = {}
        before = self.failed_at
        for name, at in points.items():
            if at is not None:
                split[name] = round(max(0.0, at - before), 4)
                before = at
        return split
