"""What a run does next: events in, instructions out. Pure: no sockets, clocks, files or threads.

::

    GATHERING ──agents, plan──▶ STARTING ──all ready──▶ CONNECTING ──all connected──▶ TRAINING
        │                          │                        │                         │     │
        └───────── fault ──────────┴────────────────────────┴──────────────▶ FAILING ◀┘  all done
                                                                                │           ▼
                                                                              ENDED ◀── FINISHING

The shell (``service.py``) turns what happens into events, carries out the instructions, and tells
the time: every event comes with ``now``, seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ..protocol.errors import ExitCode
from ..protocol.messages import (
    AgentHello,
    AgentLost,
    Assign,
    Cause,
    Connect,
    Go,
    Heartbeat,
    Message,
    Peer,
    Progress,
    StageDone,
    StartWorker,
    StopBefore,
    WorkerConnected,
    WorkerExited,
    WorkerFault,
    WorkerHello,
    WorkerReady,
    WorkerStarted,
)
from ..protocol.schedule import Work
from ..protocol.settings import Settings
from .first_cause import Fault, Silent, Stuck, first_cause

__all__ = [
    "End",
    "Event",
    "Export",
    "Exported",
    "Instruction",
    "LauncherGone",
    "Phase",
    "PlanRefused",
    "Planned",
    "Received",
    "RunState",
    "Send",
    "StopNow",
    "StoppedFeeding",
    "Tell",
    "Ticked",
    "WeightsArrived",
]

_SETTLE_S = 1.0
"""After the first fault, how long to listen for others before the first cause is named.

A worker that dies takes its neighbours' links with it; whose report comes first is chance.
"""


class Phase(str, Enum):
    """Where a run is; ``ENDED`` is the only one nothing follows."""

    GATHERING = "gathering"  # agents are on their way, the job is being loaded and cut
    STARTING = "starting"  # workers are forked and build their stages
    CONNECTING = "connecting"  # workers build the links to their neighbours
    TRAINING = "training"
    FINISHING = "finishing"  # every stage is done; the model is being written
    FAILING = "failing"  # a fault was seen; others may still explain it
    ENDED = "ended"


# -- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """An authenticated peer said something."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class Planned:
    """The job is loaded and cut."""

    layer_counts: tuple[int, ...]
    work: Work


@dataclass(frozen=True, slots=True)
class PlanRefused:
    """The job cannot be run."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class StoppedFeeding:
    """Somebody asked to stop; the feed will give out no batch from ``before`` on."""

    before: int
    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class StopNow:
    """Somebody wants the end at once."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class LauncherGone:
    """The launcher's end of our standard input is closed."""


@dataclass(frozen=True, slots=True)
class WeightsArrived:
    """Every tensor of the model has come from its stage."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The model and the summary are written."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""


Event: TypeAlias = (
    Received | Planned | PlanRefused | StoppedFeeding | StopNow | LauncherGone
    | WeightsArrived | Exported | Ticked
)  # fmt: skip


# -- instructions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Say this to a peer."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Tell:
    """Say this to the user."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Export:
    """Write the model and the summary."""


@dataclass(frozen=True, slots=True)
class End:
    """End everything."""

    state: str  # "done", "stopped" or "failed"
    exit_code: int
    cause: Cause | None = None


Instruction: TypeAlias = Send | Tell | Export | End


# -- state --------------------------------------------------------------------------------------


@dataclass
class Agent:
    """What is known of one host's agent."""

    hello: AgentHello
    heard: float
    lost: bool = False


@dataclass
class Worker:
    """What is known of the worker that owns one stage."""

    stage: int
    host_index: int
    slot: int
    host: str
    incarnation: int = 0
    pid: int = 0
    heard: float | None = None  # None until its hello
    ready: WorkerReady | None = None
    connected: bool = False
    progress: Progress | None = None
    moved: float = 0.0  # when its newest op last changed, or it last waited
    done: StageDone | None = None
    exited: bool = False

    @property
    def identity(self) -> str:
        """Its name on the control plane."""
        return f"worker/{self.stage}/{self.incarnation}"

    @property
    def state(self) -> str:
        """One word for the user."""
        if self.exited:
            return "ended"
        if self.progress is not None:
            return self.progress.state
        return "starting" if self.heard is None else "building"


@dataclass
class RunState:
    """One run. ``handle`` is its only entrance."""

    settings: Settings
    hosts: tuple[str, ...]
    started: float
    phase: Phase = Phase.GATHERING
    agents: dict[int, Agent] = field(default_factory=dict[int, Agent])
    workers: list[Worker] = field(default_factory=list[Worker])
    plan: Planned | None = None
    faults: list[Fault] = field(default_factory=list[Fault])
    stopping: StoppedFeeding | None = None
    failing_since: float | None = None
    weights_arrived: bool = False

    def handle(  # noqa: PLR0911  one for each kind of event
        self, event: Event, now: float
    ) -> list[Instruction]:
        """Take one event into account and say what is to be done about it."""
        if self.phase is Phase.ENDED:
            return []
        if isinstance(event, Received):
            return self._received(event.sender, event.message, now)
        if isinstance(event, Planned):
            self.plan = event
            return self._start_workers()
        if isinstance(event, PlanRefused):
            return self._end("failed", event.cause.exit_code, event.cause)
        if isinstance(event, StoppedFeeding):
            return self._stop_before(event)
        if isinstance(event, StopNow):
            return self._end("stopped", event.exit_code)
        if isinstance(event, LauncherGone):
            return self._end("failed", ExitCode.WORKER_FAILED)
        if isinstance(event, WeightsArrived):
            self.weights_arrived = True
            return self._export()
        if isinstance(event, Exported):
            return self._finished()
        return self._ticked(now)

    def waiting_for(self) -> tuple[str, ...]:
        """Name what start-up still waits for, one line each."""
        if self.phase is Phase.GATHERING:
            missing = tuple(
                f"host {host}: its agent has not reported yet"
                for index, host in enumerate(self.hosts)
                if index not in self.agents
            )
            return missing or ("the job: being loaded and cut",)
        if self.phase is Phase.STARTING:
            return tuple(
                f"stage {worker.stage} ({worker.host}, slot {worker.slot}): {worker.state}"
                for worker in self.workers
                if worker.ready is None
            )
        if self.phase is Phase.CONNECTING:
            return tuple(
                f"stage {worker.stage} ({worker.host}): connecting to its neighbours"
                for worker in self.workers
                if not worker.connected
            )
        return ()

    # -- what peers say -------------------------------------------------------------------------

    def _received(self, sender: str, message: Message, now: float) -> list[Instruction]:
        role, _, rest = sender.partition("/")
        if role == "agent":
            return self._from_agent(int(rest), message, now)
        if role == "worker":
            worker = self.worker_named(sender)
            return [] if worker is None else self._from_worker(worker, message, now)
        if isinstance(message, AgentLost):
            return self._agent_lost(message, now)
        return []

    def worker_named(self, identity: str) -> Worker | None:
        """Find the worker; None for one of another incarnation."""
        return next((worker for worker in self.workers if worker.identity == identity), None)

    def _from_agent(self, index: int, message: Message, now: float) -> list[Instruction]:
        if isinstance(message, AgentHello):
            self.agents[index] = Agent(message, now)
            return self._start_workers()
        agent = self.agents.get(index)
        if agent is None:
            return []
        agent.heard = now
        if not isinstance(message, WorkerStarted | WorkerExited):
            return []
        worker = self.worker_named(f"worker/{message.stage}/{message.incarnation}")
        if worker is None or worker.host_index != index:
            return []
        if isinstance(message, WorkerExited):
            return self._worker_exited(worker, message, now)
        worker.pid = message.pid
        return []

    def _worker_exited(
        self, worker: Worker, message: WorkerExited, now: float
    ) -> list[Instruction]:
        worker.exited = True
        if self.phase is Phase.FINISHING and message.status == 0:
            return []
        return self._fault(_fault(worker, message, now), now)

    def _agent_lost(self, message: AgentLost, now: float) -> list[Instruction]:
        agent = self.agents.get(message.host_index)
        if agent is not None:
            agent.lost = True
        return self._fault(Fault(at_s=now, host=self.hosts[message.host_index], event=message), now)

    def _from_worker(self, worker: Worker, message: Message, now: float) -> list[Instruction]:
        worker.heard = now
        if isinstance(message, WorkerHello):
            return self._assign(worker)
        if isinstance(message, WorkerReady):
            worker.ready = message
            return self._connect()
        if isinstance(message, WorkerConnected):
            worker.connected = True
            return self._go(now)
        if isinstance(message, Progress):
            self._progress(worker, message, now)
        elif isinstance(message, StageDone):
            worker.done = message
            return self._export()
        elif isinstance(message, WorkerFault):
            return self._fault(_fault(worker, message, now), now)
        return []

    def _progress(self, worker: Worker, message: Progress, now: float) -> None:
        before = worker.progress
        if before is None or before.last_op != message.last_op or message.waiting_for:
            worker.moved = now
        worker.progress = message

    # -- the way up -----------------------------------------------------------------------------

    def _start_workers(self) -> list[Instruction]:
        ready = self.plan is not None and len(self.agents) == len(self.hosts)
        if self.phase is not Phase.GATHERING or not ready:
            return []
        slots = [
            (index, slot)
            for index in sorted(self.agents)
            for slot in range(self.agents[index].hello.slots)
        ]
        self.phase = Phase.STARTING
        self.workers = [
            Worker(stage, index, slot, self.hosts[index])
            for stage, (index, slot) in zip(range(self.settings.stages), slots, strict=False)
        ]
        spares = len(slots) - len(self.workers)
        instructions: list[Instruction] = [
            Send(f"agent/{worker.host_index}", StartWorker(
                stage=worker.stage, incarnation=worker.incarnation, slot=worker.slot
            ))
            for worker in self.workers
        ]  # fmt: skip
        if spares:
            instructions.append(Tell("info", f"{spares} spare slot{'s' * (spares > 1)}"))
        return instructions

    def _assign(self, worker: Worker) -> list[Instruction]:
        assert self.plan is not None
        assignment = Assign(
            settings_json=self.settings.to_json(),
            work=self.plan.work,
            layer_counts=self.plan.layer_counts,
        )
        return [Send(worker.identity, assignment)]

    def _connect(self) -> list[Instruction]:
        if self.phase is not Phase.STARTING or any(w.ready is None for w in self.workers):
            return []
        self.phase = Phase.CONNECTING
        return [
            Send(worker.identity, Connect(
                generation=0,
                upstream=self._peer(worker.stage - 1, gradients=True),
                downstream=self._peer(worker.stage + 1, gradients=False),
            ))
            for worker in self.workers
        ]  # fmt: skip

    def _peer(self, stage: int, *, gradients: bool) -> Peer | None:
        if not 0 <= stage < len(self.workers):
            return None
        ready = self.workers[stage].ready
        assert ready is not None
        return Peer(
            stage=stage,
            incarnation=ready.incarnation,
            endpoint=ready.gradients_endpoint if gradients else ready.activations_endpoint,
            public_key=ready.public_key,
        )

    def _go(self, now: float) -> list[Instruction]:
        if self.phase is not Phase.CONNECTING or not all(w.connected for w in self.workers):
            return []
        self.phase = Phase.TRAINING
        for worker in self.workers:
            worker.moved = now
        return self._to_all_workers(Go())

    def _to_all_workers(self, message: Message) -> list[Instruction]:
        return [Send(worker.identity, message) for worker in self.workers]

    # -- the way down ---------------------------------------------------------------------------

    def _stop_before(self, event: StoppedFeeding) -> list[Instruction]:
        if self.phase is not Phase.TRAINING or event.before < 1:
            return self._end("stopped", event.exit_code)
        if self.stopping is not None:
            return []
        self.stopping = event
        return [
            Tell("warning", f"{event.reason}: stopping after batch {event.before - 1}"),
            *self._to_all_workers(StopBefore(batch=event.before)),
        ]

    def _export(self) -> list[Instruction]:
        all_done = all(worker.done is not None for worker in self.workers)
        if self.phase is not Phase.TRAINING or not all_done or not self.weights_arrived:
            return []
        self.phase = Phase.FINISHING
        return [Export()]

    def _finished(self) -> list[Instruction]:
        if self.stopping is not None:
            return self._end("stopped", self.stopping.exit_code)
        return self._end("done", ExitCode.DONE)

    def _fault(self, fault: Fault, now: float) -> list[Instruction]:
        self.faults.append(fault)
        if self.phase is not Phase.FAILING:
            self.phase = Phase.FAILING
            self.failing_since = now
        return []

    def _end(self, state: str, code: int, cause: Cause | None = None) -> list[Instruction]:
        self.phase = Phase.ENDED
        return [End(state, code, cause)]

    # -- the clock ------------------------------------------------------------------------------

    def _ticked(self, now: float) -> list[Instruction]:
        if self.phase is Phase.FAILING:
            assert self.failing_since is not None
            if now - self.failing_since < _SETTLE_S:
                return []
            cause = first_cause(self.faults)
            return self._end("failed", cause.exit_code, cause)
        missing = self.waiting_for()
        if missing and now - self.started > self.settings.start_timeout_s:
            cause = _late(self.settings.start_timeout_s, missing)
            return self._end("failed", cause.exit_code, cause)
        for fault in self._silent(now):
            self._fault(fault, now)
        keep_alive = [f"agent/{index}" for index, agent in self.agents.items() if not agent.lost]
        keep_alive += [w.identity for w in self.workers if w.heard is not None and not w.exited]
        return [Send(identity, Heartbeat()) for identity in keep_alive]

    def _silent(self, now: float) -> Iterable[Fault]:
        """Find processes that have not spoken for a lease, and loops that have not moved."""
        lease_s = self.settings.lease_s
        for index, agent in self.agents.items():
            if not agent.lost and now - agent.heard > lease_s:
                silent = Silent(stage=None, incarnation=index, silent_s=now - agent.heard)
                yield Fault(at_s=now, host=self.hosts[index], event=silent)
        for worker in self.workers:
            if worker.exited or worker.heard is None:
                continue
            who = {"stage": worker.stage, "incarnation": worker.incarnation}
            training = self.phase is Phase.TRAINING and worker.done is None
            if now - worker.heard > lease_s:
                yield _fault(worker, Silent(**who, silent_s=now - worker.heard), now)
            elif training and now - worker.moved > self.settings.wait_timeout_s:
                yield _fault(worker, Stuck(**who, stuck_s=now - worker.moved), now)


def _fault(worker: Worker, event: WorkerExited | WorkerFault | Silent | Stuck, now: float) -> Fault:
    return Fault(at_s=now, host=worker.host, event=event, op=_doing(worker))


def _late(limit_s: float, missing: tuple[str, ...]) -> Cause:
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


def _doing(worker: Worker) -> str:
    progress = worker.progress
    if progress is None:
        return worker.state
    last = f"after {progress.last_op}" if progress.last_op else "before its first op"
    return f"{last}, waiting for {progress.waiting_for}" if progress.waiting_for else last
