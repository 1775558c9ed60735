"""Who has been silent, stuck or late for too long. Pure: looks, and changes nothing.

Slow is not dead: a loop that moves, or that waits for a neighbour, is never suspected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..protocol.errors import ExitCode
from ..protocol.messages import Cause, WorkerFault
from ..protocol.settings import Settings
from .first_cause import Fault, Silent, Stuck
from .fleet import Fleet, Worker

__all__ = ["is_fatal", "late_start", "silent_hosts", "silent_workers"]

_FATAL_CODES = (ExitCode.USAGE, ExitCode.DEADLINE, ExitCode.NON_FINITE)


def is_fatal(fault: WorkerFault) -> bool:
    """Tell whether replaying the stage cannot help: it would do the same again, bit for bit."""
    return fault.user_error or fault.exit_code in _FATAL_CODES


def silent_hosts(fleet: Fleet, settings: Settings, now: float) -> Iterator[tuple[int, Fault]]:
    """Find agents that have not spoken for a lease."""
    for index, agent in fleet.agents.items():
        silent_s = now - agent.heard
        if not agent.lost and silent_s > settings.lease_s:
            event = Silent(stage=None, incarnation=index, silent_s=silent_s)
            yield index, Fault(at_s=now, host=fleet.hosts[index], event=event)


def silent_workers(
    fleet: Fleet, settings: Settings, now: float, *, training: bool
) -> Iterator[tuple[Worker, Fault]]:
    """Find workers that have not spoken for a lease, and those that do not get on."""
    for worker in fleet.workers:
        if worker.exited:
            continue
        who = {"stage": worker.stage, "incarnation": worker.incarnation}
        silent_s = 0.0 if worker.heard is None else now - worker.heard
        stuck_s = now - worker.moved
        event: Silent | Stuck | None = None
        if silent_s > settings.lease_s:
            event = Silent(**who, silent_s=silent_s)
        elif training and stuck_s > _patience_s(worker, settings):
            event = Stuck(**who, stuck_s=stuck_s)
        if event is not None:
            yield worker, Fault(at_s=now, host=worker.host, event=event, op=worker.doing)


def _patience_s(worker: Worker, settings: Settings) -> float:
    """Return how long a worker may stay where it is while the run trains."""
    if worker.done is not None:
        return math.inf
    if worker.connected:
        # Half of what its neighbours wait for it: it is replaced before they give up.
        return settings.wait_timeout_s / 2
    if worker.ready is None:
        return settings.start_timeout_s
    return math.inf  # it waits for links, and keeps a deadline of its own


def late_start(limit_s: float, missing: tuple[str, ...]) -> Cause:
    """Say that start-up took too long, and who is to blame."""
    return Cause(
        stage=None,
        host="",
        what="start-up timed out",
        message=f"after {limit_s:g} s the run still waited for:\n" + "\n".join(missing),
        advice="--start-timeout allows more time; the logs of the run directory tell what each "
        "process was doing.",
        exit_code=ExitCode.DEADLINE,
    )
