"""The phases of a run, and what each of the early ones waits for. Pure.

::

    GATHERING ──agents, plan──▶ STARTING ──all ready──▶ CONNECTING ──all connected──▶ TRAINING
        │                          │                        │                         │     │
        └───────── fault ──────────┴────────────────────────┴──────────────▶ FAILING ◀┘  all done
                                                                                │           ▼
                                                                              ENDED ◀── FINISHING

A coordinator that was started again begins in ``REJOINING`` instead and goes on in ``TRAINING``
when every worker has introduced itself, or has been silent for a lease. Whoever wants to stop it
there has to wait until then.
"""

from __future__ import annotations

from enum import Enum

from .fleet import Fleet

__all__ = ["Phase", "missing_in"]


class Phase(str, Enum):
    """Where a run is; ``ENDED`` is the only one nothing follows."""

    GATHERING = "gathering"  # agents are on their way, the job is being loaded and cut
    STARTING = "starting"  # workers are forked and build their stages
    CONNECTING = "connecting"  # workers build the links to their neighbours
    REJOINING = "rejoining"  # a restarted coordinator gets to know the run it has
    TRAINING = "training"
    FINISHING = "finishing"  # every stage is done; the model is being written
    FAILING = "failing"  # a fault was seen; others may still explain it
    ENDED = "ended"


def missing_in(phase: Phase, fleet: Fleet) -> tuple[str, ...]:
    """Name what a run waits for in this phase, one line each; nothing once it trains."""
    if phase is Phase.GATHERING:
        missing = tuple(
            f"host {host}: its agent has not reported yet"
            for index, host in enumerate(fleet.hosts)
            if index not in fleet.agents
        )
        return missing or ("the job: being loaded and cut",)
    if phase is Phase.STARTING:
        return tuple(
            f"stage {worker.stage} ({worker.host}, slot {worker.slot[1]}): {worker.state}"
            for worker in fleet.workers
            if worker.ready is None
        )
    if phase is Phase.CONNECTING:
        return tuple(
            f"stage {worker.stage} ({worker.host}): connecting to its neighbours"
            for worker in fleet.workers
            if not worker.connected
        )
    return ()
