"""What a run is to a coordinator that was started again: what it remembers, and who is missing.

Pure. ``memory.py`` says what is remembered; this turns it into a fleet, and a fleet into it.
"""

from __future__ import annotations

from ..protocol.messages import Go
from .catalogue import Catalogue
from .events import Instruction, StoppedFeeding, Tell
from .fleet import Fleet, Worker
from .memory import Memory
from .repairs import Repairs

__all__ = ["GENERATIONS_PER_LIFE", "go_on", "recall_workers", "remember", "stop_of"]

GENERATIONS_PER_LIFE = 1_000_000
"""More links than one coordinator will ever build, so that no generation is given out twice."""


def remember(
    life: int, fleet: Fleet, catalogue: Catalogue, repairs: Repairs, stop: StoppedFeeding | None
) -> Memory:
    """Return what the next coordinator must know."""
    return Memory(
        life=life,
        catalogue=catalogue.to_json(),
        slots=tuple(worker.slot for worker in fleet.workers),
        incarnations=tuple(worker.incarnation for worker in fleet.workers),
        restarts=repairs.restarts,
        repairs=tuple(repairs.records),
        stop_before=None if stop is None else stop.before,
        stop_reason="" if stop is None else stop.reason,
        stop_code=0 if stop is None else stop.exit_code,
    )


def recall_workers(memory: Memory, hosts: tuple[str, ...]) -> list[Worker]:
    """Return the workers that should be there; none of them has spoken yet."""
    return [
        Worker(stage, slot, hosts[slot[0]], incarnation=incarnation)
        for stage, (slot, incarnation) in enumerate(
            zip(memory.slots, memory.incarnations, strict=True)
        )
    ]


def stop_of(memory: Memory) -> StoppedFeeding | None:
    """Return the stop that the run was asked for, if it was."""
    if memory.stop_before is None:
        return None
    return StoppedFeeding(memory.stop_before, memory.stop_reason, memory.stop_code)


def go_on(fleet: Fleet, repairs: Repairs, now: float) -> list[Instruction]:
    """Let those go on who are there, and replace those who are not."""
    instructions: list[Instruction] = [
        Tell("warning", "the coordinator was restarted and has found the run again"),
        *fleet.to_workers(Go()),
    ]
    if repairs.stop_message is not None:  # written down, but perhaps not told
        instructions += fleet.to_workers(repairs.stop_message)
    for index in range(len(fleet.hosts)):
        if index not in fleet.agents:
            instructions += repairs.agent_missing(index, now)
    for worker in fleet.workers:
        worker.moved = now
        if worker.heard is None or worker.exited:
            instructions += repairs.missing(worker, now)
        elif worker.ready is None:
            # Nobody was there to answer its hello; one that had its answer does not mind another.
            instructions += repairs.assign(worker)
        elif not worker.connected:
            instructions += repairs.ready(worker, worker.ready, now)
    return instructions
