"""Replacing what has died while the run goes on. Pure.

A failed worker is started again from the committed round; its neighbours keep their processes and
only get a new link. A lost agent is started again with all workers of its host; a host that stays
lost gives its stages to spare or shared slots elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..protocol.errors import SnapshotError
from ..protocol.messages import (
    AgentHello,
    Assign,
    Connect,
    Go,
    KillWorker,
    Message,
    Progress,
    StartAgent,
    StartWorker,
    WorkerExited,
    WorkerFault,
    WorkerHello,
    WorkerReady,
)
from ..protocol.settings import Settings
from .broken_links import BrokenLinks
from .catalogue import Catalogue
from .events import Instruction, Planned, Send, Tell
from .first_cause import Fault, Silent, ending
from .fleet import Agent, Fleet, Slot, Worker, new_home
from .lost_hosts import LostHosts
from .recovery import FailureCounter, GiveUp, Repair, Rung
from .rounds import Rounds

__all__ = ["GiveUp", "Repairs"]

LAUNCHER = "launcher"


@dataclass
class Repairs:
    """The repairs of one run.

    Attributes:
        settings: the run's.
        fleet: everybody.
        catalogue: where snapshots are.
        rounds: when they are taken.
        plan: how the model is cut.
        stop_message: what workers were told when the run was asked to stop; None if it was not.
        generation: of the newest link.
        records: of the repairs that are over, for the summary.
    """

    settings: Settings
    fleet: Fleet
    catalogue: Catalogue
    rounds: Rounds
    plan: Planned | None = None
    stop_message: Message | None = None
    generation: int = 0
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _counters: dict[int, FailureCounter] = field(default_factory=dict[int, FailureCounter])
    _repairs: dict[int, Repair] = field(default_factory=dict[int, Repair])  # by stage
    _due: dict[int, float] = field(default_factory=dict[int, float])  # restarts, by stage
    _raised: dict[int, WorkerFault] = field(default_factory=dict[int, WorkerFault])
    _asked_for: set[int] = field(default_factory=set[int])  # stages whose end we brought about
    _killed: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    _lost: LostHosts = field(init=False)
    broken_links: BrokenLinks = field(init=False)

    def __post_init__(self) -> None:
        self._lost = LostHosts(self.settings.lease_s, self.settings.max_restarts)
        self.broken_links = BrokenLinks(self.fleet, self.join)

    @property
    def restarts(self) -> tuple[int, ...]:
        """How often each stage was started again because it failed."""
        return tuple(
            self._counters[stage].restarts if stage in self._counters else 0
            for stage in range(len(self.fleet.workers))
        )

    def remember(self, restarts: tuple[int, ...], records: Iterable[dict[str, Any]]) -> None:
        """Take over what a former coordinator counted."""
        self.records = list(records)
        self._counters = {
            stage: FailureCounter(restarts=count) for stage, count in enumerate(restarts)
        }

    # -- workers die ----------------------------------------------------------------------------

    def raised(self, worker: Worker, fault: WorkerFault) -> None:
        """Note what a worker says before it exits."""
        self._raised[worker.stage] = fault

    def exited(self, worker: Worker, message: WorkerExited, now: float) -> list[Instruction]:
        """A worker is gone: decide what to do about its stage.

        Raises:
            GiveUp: it has been tried often enough.
        """
        fault = self._raised.pop(worker.stage, None)
        what = fault.what if fault is not None else ending(message.status)
        if what == SnapshotError.__name__:
            self.catalogue.distrust(worker.stage, worker.slot[0])
        return self._failed(worker, what, fault.op if fault is not None else "", now)

    def _failed(self, worker: Worker, what: str, op: str, now: float) -> list[Instruction]:
        stage = worker.stage
        worker.exited = True
        told: list[Instruction] = []
        pause_s = 0.0
        if stage in self._asked_for:
            self._asked_for.discard(stage)
        else:
            counter = self._counters.setdefault(stage, FailureCounter())
            decision = counter.failed(worker.version, op, self.settings.max_restarts)
            if decision.rung is Rung.GIVE_UP:
                raise GiveUp(f"stage {stage}: {decision.why}")
            pause_s = decision.pause_s
            told = [Tell("warning", f"stage {stage} on {worker.host} died: {what}")]
            if decision.rung is Rung.ROLL_BACK:
                told += self._roll_back(stage)
        repair = self._repairs.get(stage)
        if repair is None:
            self._repairs[stage] = Repair(stage, what, now)
        self._due[stage] = now + pause_s
        self.catalogue.withdraw(stage)
        return [*told, *self.start_due(now)]

    def _roll_back(self, because_of: int) -> list[Instruction]:
        """End every other worker: all begin again from the committed round."""
        instructions: list[Instruction] = [
            Tell(
                "warning",
                f"stage {because_of} keeps failing: all stages roll back to update "
                f"{self.catalogue.committed}",
            )
        ]
        for worker in self.fleet.workers:
            if worker.stage != because_of and not worker.exited:
                instructions.append(self.kill(worker, "all stages roll back"))
                self._asked_for.add(worker.stage)
        return instructions

    def kill(self, worker: Worker, reason: str) -> Instruction:
        """End a worker that is there but no use."""
        return Send(
            worker.agent,
            KillWorker(stage=worker.stage, incarnation=worker.incarnation, reason=reason),
        )

    # -- workers come back ----------------------------------------------------------------------

    def tick(self, now: float) -> list[Instruction]:
        """Find new homes for stages of lost hosts; start what is due; mend broken links.

        Raises:
            GiveUp: no host is left.
        """
        moves = self._abandon_hosts(now)
        return [*moves, *self.start_due(now), *self.broken_links.rebuild(now)]

    def start_due(self, now: float) -> list[Instruction]:
        """Start agents and workers that are due, each as soon as what it needs is there."""
        instructions: list[Instruction] = [
            Send(LAUNCHER, StartAgent(host_index=index)) for index in self._lost.agents_due(now)
        ]
        for stage, due in sorted(self._due.items()):
            worker = self.fleet.workers[stage]
            if now >= due and self._is_there(worker.slot[0]):
                instructions += self._prepare(worker, now)
        return instructions

    def _is_there(self, index: int) -> bool:
        """Tell whether a host answers and has told which snapshots it holds."""
        agent = self.fleet.agents.get(index)
        is_known = agent is not None and agent.surveyed and not agent.lost
        return is_known and index not in self._lost

    def _prepare(self, worker: Worker, now: float) -> list[Instruction]:
        """Start a worker, or have the snapshot that it needs brought to its host first."""
        told: list[Instruction] = []
        if self.catalogue.homeless():
            agents = self.fleet.agents.values()
            if len(self._lost) or not all(agent.surveyed or agent.lost for agent in agents):
                return []  # it may still turn up
            update = self.catalogue.fall_back()
            text = f"snapshots are lost: all stages go back to update {update}"
            told = [Tell("warning", text), *self._roll_back(worker.stage)]
        on_its_way = self.rounds.bring(worker.stage, worker.slot[0])
        if on_its_way is not None:
            return [*told, *on_its_way]
        del self._due[worker.stage]
        return [*told, *self._start(worker, now)]

    def _start(self, worker: Worker, now: float) -> list[Instruction]:
        worker.begin_again(now)
        repair = self._repairs[worker.stage]
        repair.started_at = now
        repair.from_update = self.catalogue.committed
        request = StartWorker(
            stage=worker.stage, incarnation=worker.incarnation, slot=worker.slot[1]
        )
        # A restarted coordinator must not give the same incarnation to another process.
        return [self.rounds.persist(), Send(worker.agent, request)]

    def hello(self, worker: Worker, message: WorkerHello, now: float) -> list[Instruction]:
        """A worker introduces itself: give it its stage, and the state to begin from."""
        worker.pid = message.pid
        if worker.stage in self._repairs:
            self._repairs[worker.stage].hello_at = now
        return self.assign(worker)

    def assign(self, worker: Worker) -> list[Instruction]:
        """Tell a worker that has said hello what it is to do."""
        if self.plan is None:
            return []  # a restarted coordinator gets to know the run before it has loaded the job
        assignment = Assign(
            settings_json=self.settings.to_json(),
            work=self.plan.work,
            layer_counts=self.plan.layer_counts,
            restore=self.catalogue.restore(worker.stage, worker.slot[0]),
        )
        return [Send(worker.identity, assignment)]

    def ready(self, worker: Worker, message: WorkerReady, now: float) -> list[Instruction]:
        """A restarted worker has its state: join it to the neighbours that are ready too."""
        worker.ready = message
        repair = self._repairs.get(worker.stage)
        if repair is not None:
            repair.ready_at = now
        instructions = self.rounds.plan_for(worker)
        if self.stop_message is not None:
            instructions.append(Send(worker.identity, self.stop_message))
        for upstream in (worker.stage - 1, worker.stage):
            instructions += self.join(upstream)
        return instructions

    def join(self, upstream: int) -> list[Instruction]:
        """Let two neighbouring stages, if both are ready, build a new link between them.

        Args:
            upstream: the nearer to the inputs of the two.
        """
        workers = self.fleet.workers
        if not 0 <= upstream < len(workers) - 1:
            return []
        above, below = workers[upstream], workers[upstream + 1]
        if above.ready is None or below.ready is None or above.exited or below.exited:
            return []
        self.generation += 1
        down = Connect(
            generation=self.generation, upstream=None, downstream=below.peer(gradients=False)
        )
        up = Connect(
            generation=self.generation, upstream=above.peer(gradients=True), downstream=None
        )
        return [Send(above.identity, down), Send(below.identity, up)]

    def connected(self, worker: Worker, now: float) -> list[Instruction]:
        """A restarted worker has all its links: off it goes."""
        worker.moved = now
        repair = self._repairs.get(worker.stage)
        if repair is not None and repair.connected_at is None:
            repair.connected_at = now
        return [Send(worker.identity, Go())]

    def progress(self, worker: Worker, message: Progress, now: float) -> list[Instruction]:
        """Notice that a restarted worker makes what its former self has not made."""
        repair = self._repairs.get(worker.stage)
        if repair is None or repair.connected_at is None or worker.exited:
            return []
        if message.state not in ("training", "finishing", "done"):
            return []
        repair.replayed = message.replayed
        repair.caught_up_at = now
        self.records.append(self._repairs.pop(worker.stage).record())
        text = (
            f"stage {worker.stage} on {worker.host} restarted as incarnation {worker.incarnation}, "
            f"replayed {repair.replayed} batches, back in {now - repair.failed_at:.1f} s"
        )
        return [Tell("info", text)]

    # -- agents and hosts -----------------------------------------------------------------------

    def agent_lost(self, index: int, reason: str, now: float) -> list[Instruction]:
        """An agent is gone, and with it the workers of its host: start it again."""
        agent = self.fleet.agents.get(index)
        if index not in self._lost and (agent is None or agent.lost):
            return []  # its host was given up before
        if agent is not None:
            agent.lost = True
        self._lost.restart_agent(index, sum(worker.version for worker in self.fleet.workers), now)
        text = f"the agent on {self.fleet.hosts[index]} is lost: {reason}"
        return [Tell("warning", text), *self._host_lost(index, "its agent is lost", now)]

    def agent_missing(self, index: int, now: float) -> list[Instruction]:
        """A restarted coordinator has not heard from an agent: start it again."""
        self._lost.restart_agent(index, 0, now)
        return self._host_lost(index, "its agent was not heard from", now)

    def _host_lost(self, index: int, what: str, now: float) -> list[Instruction]:
        """Nothing of a host is there: neither its workers nor, for all we know, its snapshots."""
        self._lost.add(index, now)
        self.catalogue.doubt(index)
        instructions: list[Instruction] = []
        for worker in self.fleet.on_host(index):
            if not worker.exited:
                self._asked_for.add(worker.stage)
                instructions += self._failed(worker, what, "", now)
        return [*instructions, *self.start_due(now)]

    def missing(self, worker: Worker, now: float) -> list[Instruction]:
        """A restarted coordinator has not heard from a worker: replace it, wherever it is."""
        self._asked_for.add(worker.stage)
        agent = self.fleet.agents.get(worker.slot[0])
        kill = [] if agent is None or agent.lost else [self.kill(worker, "not heard from")]
        return [*kill, *self._failed(worker, "not heard from", "", now)]

    def silence(
        self, hosts: Iterable[int], workers: Iterable[tuple[Worker, Fault]], now: float
    ) -> list[Instruction]:
        """Deal with hosts and workers that say nothing, or get nowhere."""
        told = [each for index in hosts for each in self._host_silent(index)]
        return told + [e for w, fault in workers for e in self._worker_silent(w, fault, now)]

    def _host_silent(self, index: int) -> list[Instruction]:
        """A host says nothing although its connection stands: it may be cut off, or come back."""
        if index in self._lost:
            return []
        self._lost.add(index, self.fleet.agents[index].heard)
        host = self.fleet.hosts[index]
        text = f"host {host} has been silent for {self.settings.lease_s:g} s"
        return [Tell("warning", text)]

    def agent_spoke(self, index: int) -> None:
        """A host that was silent is there after all."""
        self._lost.remove(index)

    def _worker_silent(self, worker: Worker, fault: Fault, now: float) -> list[Instruction]:
        """A worker is silent or stuck on a host that answers: turn the hang into a death."""
        agent = self.fleet.agents.get(worker.slot[0])
        hangs = (worker.stage, worker.incarnation)
        if agent is None or agent.lost or now - agent.heard > self.settings.lease_s / 2:
            return []
        if hangs in self._killed:
            return []
        self._killed.add(hangs)
        return [
            Tell("warning", f"stage {worker.stage} on {worker.host} hangs, {worker.doing}"),
            self.kill(worker, fault.op),
        ]

    def agent_here(self, index: int, hello: AgentHello, now: float) -> None:
        """A new agent is here, without workers; which snapshots it has found it tells later."""
        self.fleet.agents[index] = Agent(hello, now)
        self._lost.remove(index)

    def _abandon_hosts(self, now: float) -> list[Instruction]:
        """Move the stages of hosts that stayed lost."""
        overdue = self._lost.overdue(now)
        if not overdue:
            return []
        slots = [slot for slot in self.fleet.slots() if slot[0] not in self._lost]
        if slots:
            return [each for index in overdue for each in self._abandon(index, slots, now)]
        if len(overdue) < len(self._lost):
            return []  # one of the others may come back and take the stages
        faults = [
            Fault(
                at_s=now - silent_s,
                host=self.fleet.hosts[index],
                event=Silent(stage=None, incarnation=0, silent_s=silent_s),
            )
            for index, silent_s in self._lost.lost_for_s(now).items()
        ]
        raise GiveUp("no host is left", faults)

    def _abandon(self, index: int, slots: Sequence[Slot], now: float) -> list[Instruction]:
        instructions = self._host_lost(index, "its host is lost", now)
        self._lost.remove(index)
        if index in self.fleet.agents:
            self.fleet.agents[index].lost = True
        self.catalogue.lose_host(index)
        for worker in self.fleet.on_host(index):
            taken = [other.slot for other in self.fleet.workers if other is not worker]
            slot = new_home(slots, taken)
            assert slot is not None, "there is a host left"
            host = self.fleet.hosts[slot[0]]
            text = f"stage {worker.stage} moves from {worker.host} to {host}"
            instructions.append(Tell("warning", text))
            worker.slot, worker.host = slot, host
        return instructions
