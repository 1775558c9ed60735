"""The first steps of a run: which stage goes to which slot, where a resumed run begins. Pure."""

from __future__ import annotations

from ..protocol.messages import StartWorker
from .catalogue import Catalogue
from .events import GoBackTo, Instruction, Send, Tell
from .fleet import Fleet, Worker

__all__ = ["are_all_here", "begin_from_checkpoint", "place_workers"]


def are_all_here(fleet: Fleet, *, surveyed: bool) -> bool:
    """Tell whether every host's agent has come.

    Args:
        fleet: everybody.
        surveyed: whether it must have told, too, what lies on its host's disk.
    """
    agents = fleet.agents.values()
    return sum(agent.surveyed or not surveyed for agent in agents) == len(fleet.hosts)


def place_workers(fleet: Fleet, stages: int) -> list[Instruction]:
    """Give each stage a slot, in the order of the hosts, and have its worker started.

    Slots that are left over are spares, for stages whose host is lost.
    """
    slots = fleet.slots()
    fleet.workers = [
        Worker(stage, slot, fleet.hosts[slot[0]])
        for stage, slot in zip(range(stages), slots, strict=False)
    ]
    instructions: list[Instruction] = [
        Send(worker.agent, StartWorker(
            stage=worker.stage, incarnation=worker.incarnation, slot=worker.slot[1]
        ))
        for worker in fleet.workers
    ]  # fmt: skip
    spares = len(slots) - stages
    if spares > 0:
        instructions.append(Tell("info", f"{spares} spare slot{'s' * (spares > 1)}"))
    return instructions


def begin_from_checkpoint(catalogue: Catalogue) -> list[Instruction]:
    """Let a resumed run begin at the newest round that is whole on disk."""
    update = catalogue.fall_back()
    told = Tell("info", f"going on from the checkpoint after update {update}")
    if update == 0:
        told = Tell("warning", "there is no whole checkpoint: beginning again")
    return [told, GoBackTo(update)]
