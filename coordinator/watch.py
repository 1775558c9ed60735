"""Who has been silent, stuck or late for too long. Pure: looks, and changes nothing.

Slow is not dead: a loop that moves, or that waits for a neighbour, is never suspected.
"""

from __future__ import annotations

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
    """Find workers that have not spoken for a lease, and loops that neither move nor wait.

    A loop is given half of what its neighbours may wait for it, so that it is found and replaced
    before they give up.
    """
    for worker in fleet.workers:
        if worker.exited or worker.heard is None:
            continue
        who = {"stage": worker.stage, "incarnation": worker.incarnation}
        silent_s, stuck_s = now - worker.heard, now - worker.moved
        event: Silent | Stuck | None = None
        if silent_s > settings.lease_s:
            event = Silent(**who, silent_s=silent_s)
        elif (
            training
            and worker.connected
            and worker.done is None
            and stuck_s > settings.wait_timeout_s / 2
        ):
            event = Stuck(**who, stuck_s=stuck_s)
        if event is not None:
            yield worker, Fault(at_s=now, host=worker.host, event=event, op=worker.doing)


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
