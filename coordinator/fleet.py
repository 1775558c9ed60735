"""Who takes part in a run and where: hosts, their agents, the workers of the stages. Pure.

A stage has one worker at a time. Its incarnation counts the workers it has had before, and is
part of the worker's name, so that late words of a dead one are known as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..protocol.messages import AgentHello, Message, Peer, Progress, StageDone, WorkerReady
from .events import Send

__all__ = ["Agent", "Fleet", "Slot", "Worker", "new_home"]

Slot = tuple[int, int]
"""Host index and number of the slot on it."""


@dataclass
class Agent:
    """What is known of one host's agent.

    Attributes:
        hello: its introduction.
        heard: when it last spoke.
        lost: whether it is known to be gone.
        surveyed: whether it has told which snapshots are on its host.
    """

    hello: AgentHello
    heard: float
    lost: bool = False
    surveyed: bool = False


@dataclass
class Worker:
    """What is known of the worker that owns one stage.

    Attributes:
        stage: k, 0 is the input side.
        slot: where it runs.
        host: name of that host.
        incarnation: workers this stage has had before.
        pid: process id on its host; 0 until the agent tells.
        heard: when it last spoke; None until its hello.
        ready: its address, once its stage is built.
        connected: whether all its links stand.
        progress: its newest report.
        moved: when its newest op last changed, it last waited, or it was started.
        done: its last word, when its op list is finished.
        exited: whether it is known to be gone.
    """

    stage: int
    slot: Slot
    host: str
    incarnation: int = 0
    pid: int = 0
    heard: float | None = None
    ready: WorkerReady | None = None
    connected: bool = False
    progress: Progress | None = None
    moved: float = 0.0
    done: StageDone | None = None
    exited: bool = False

    @property
    def identity(self) -> str:
        """Its name on the control plane."""
        return f"worker/{self.stage}/{self.incarnation}"

    @property
    def agent(self) -> str:
        """The name of the agent on its host."""
        return f"agent/{self.slot[0]}"

    @property
    def state(self) -> str:
        """One word for the user."""
        if self.exited:
            return "ended"
        if self.progress is not None:
            return self.progress.state
        return "starting" if self.heard is None else "building"

    @property
    def doing(self) -> str:
        """What it was doing by its newest report."""
        if self.progress is None:
            return self.state
        last = self.progress.last_op
        text = f"after {last}" if last else "before its first op"
        waiting_for = self.progress.waiting_for
        return f"{text}, waiting for {waiting_for}" if waiting_for else text

    @property
    def version(self) -> int:
        """Updates it has done by its newest report."""
        return 0 if self.progress is None else self.progress.version

    def reported(self, progress: Progress, now: float) -> None:
        """Take note of how far its loop is."""
        before = self.progress
        if before is None or before.last_op != progress.last_op or progress.waiting_for:
            self.moved = now
        self.progress = progress

    def peer(self, *, gradients: bool) -> Peer:
        """Return where a neighbour connects to; it must be ready.

        Args:
            gradients: the neighbour sends gradients, else activations.
        """
        assert self.ready is not None
        ready = self.ready
        return Peer(
            stage=self.stage,
            incarnation=self.incarnation,
            endpoint=ready.gradients_endpoint if gradients else ready.activations_endpoint,
            public_key=ready.public_key,
        )

    def begin_again(self, now: float) -> None:
        """Forget the process that was; the next incarnation is on its way."""
        self.moved = now
        self.incarnation += 1
        self.pid = 0
        self.heard = self.ready = self.progress = self.done = None
        self.connected = self.exited = False


@dataclass
class Fleet:
    """Everybody.

    Attributes:
        hosts: names in the order of the user's list; agents are known by index.
        agents: by host index.
        workers: by stage.
    """

    hosts: tuple[str, ...]
    agents: dict[int, Agent] = field(default_factory=dict[int, Agent])
    workers: list[Worker] = field(default_factory=list[Worker])

    def named(self, identity: str) -> Worker | None:
        """Find a worker by its name; None for one of another incarnation."""
        stage = identity.split("/")[1] if identity.count("/") == 2 else ""  # noqa: PLR2004
        if not stage.isdecimal() or int(stage) >= len(self.workers):
            return None
        worker = self.workers[int(stage)]
        return worker if worker.identity == identity else None

    def on_host(self, index: int) -> list[Worker]:
        """Return the workers of one host."""
        return [worker for worker in self.workers if worker.slot[0] == index]

    def slots(self) -> list[Slot]:
        """Return every slot of the hosts whose agent lives, in the order of the hosts."""
        return [
            (index, slot)
            for index in sorted(self.agents)
            if not self.agents[index].lost
            for slot in range(self.agents[index].hello.slots)
        ]

    def to_workers(self, message: Message) -> list[Send]:
        """Say this to every worker that has said hello and lives."""
        return [
            Send(worker.identity, message)
            for worker in self.workers
            if worker.heard is not None and not worker.exited
        ]

    def to_agents(self, message: Message) -> list[Send]:
        """Say this to every agent that lives."""
        return [
            Send(f"agent/{index}", message)
            for index, agent in self.agents.items()
            if not agent.lost
        ]


def new_home(slots: Sequence[Slot], taken: Iterable[Slot]) -> Slot | None:
    """Return a slot for a stage whose host is lost: a spare one, else the least crowded.

    Args:
        slots: of all hosts that are left.
        taken: slots that stages have now, a slot once per stage.
    """
    crowd = list(taken)
    return min(slots, key=lambda slot: (crowd.count(slot), slot), default=None)
