"""What a run does next: events in, instructions out. Pure: no sockets, clocks, files or threads.

While a run trains, workers, agents and hosts may die and be replaced (``repairs.py``). The shell
(``service.py``) turns what happens into events, carries out the instructions, and tells the time:
every event comes with ``now``, seconds of a monotonic clock.
"""

from __future__ import annotations

from ..protocol.errors import ExitCode
from ..protocol.messages import (
    AgentHello,
    AgentLost,
    Cause,
    Go,
    Heartbeat,
    LinkLost,
    Message,
    Progress,
    SnapshotSkipped,
    SnapshotsReserved,
    SnapshotWritten,
    StageDone,
    StopBefore,
    WhoAreYou,
    WorkerConnected,
    WorkerExited,
    WorkerFault,
    WorkerHello,
    WorkerReady,
    WorkerStarted,
)
from ..protocol.settings import Settings
from .catalogue import Catalogue
from .events import (
    End,
    Event,
    Export,
    Exported,
    Instruction,
    LauncherGone,
    Persist,
    Planned,
    PlanRefused,
    Received,
    Send,
    StopNow,
    StoppedFeeding,
    StopWanted,
    Tell,
    WeightsArrived,
)
from .failure import Failure
from .first_cause import Fault
from .fleet import Fleet, Worker
from .memory import Memory
from .phase import Phase, missing_in
from .rejoin import GENERATIONS_PER_LIFE, go_on, recall_workers, remember, stop_of
from .repairs import GiveUp, Repairs
from .room import ask_for_room, lacks_room
from .rounds import ABOUT_SNAPSHOTS, Rounds
from .startup import are_all_here, begin_from_checkpoint, place_workers
from .stopping import Stopping
from .watch import is_fatal, late_start, silent_hosts, silent_workers

__all__ = ["Phase", "RunState"]


class RunState:
    """One run. ``handle`` is its only entrance.

    Args:
        settings: the run's.
        hosts: names in the order of the user's list.
        now: when the run, or this coordinator's part in it, began.
        memory: what the coordinator before this one wrote down; None at the beginning.
        resumes: whether the run goes on from what an earlier launch left on disk.

    Attributes:
        phase: where it is.
        fleet: who takes part.
        repairs: what is and was repaired.
        stopping: why and where the run was asked to stop; None if it was not.
    """

    def __init__(
        self,
        settings: Settings,
        hosts: tuple[str, ...],
        now: float,
        *,
        memory: Memory | None = None,
        resumes: bool = False,
    ) -> None:
        self.settings = settings
        self.phase = Phase.GATHERING if memory is None else Phase.REJOINING
        self.fleet = Fleet(hosts)
        self.stopping = None if memory is None else stop_of(memory)
        self._life = 1 if memory is None else memory.life + 1
        self._started = now
        self._plan: Planned | None = None
        self._catalogue = Catalogue(stages=settings.stages, hosts=range(len(hosts)))
        if memory is not None:
            self.fleet.workers = recall_workers(memory, hosts)
            self._catalogue = Catalogue.from_json(
                memory.catalogue, stages=settings.stages, hosts=range(len(hosts))
            )
        self._rounds = Rounds(settings, self.fleet, self._catalogue, self._persist)
        self.repairs = Repairs(settings, self.fleet, self._catalogue, self._rounds)
        self.repairs.generation = (self._life - 1) * GENERATIONS_PER_LIFE
        if memory is not None:
            self.repairs.remember(memory.restarts, memory.repairs)
        if self.stopping is not None:
            self.repairs.stop_message = StopBefore(batch=self.stopping.before)
        self._resumes = resumes
        self._stopping = Stopping(self.fleet, has_fed_all=memory is None and not resumes)
        self._failure = Failure()
        self._weights_arrived = False

    def handle(  # noqa: PLR0911  one for each kind of event
        self, event: Event, now: float
    ) -> list[Instruction]:
        """Take one event into account and say what is to be done about it."""
        if self.phase is Phase.ENDED:
            return []
        if isinstance(event, Received):
            return self._received(event.sender, event.message, now)
        if isinstance(event, Planned):
            self._plan = self.repairs.plan = event
            return [*self._start_workers(), *self._rejoined(now)]
        if isinstance(event, PlanRefused):
            return self._end("failed", event.cause.exit_code, event.cause)
        if isinstance(event, StopWanted | StopNow):
            return self._stop(event)
        if isinstance(event, StoppedFeeding):
            return self._stop_before(event)
        if isinstance(event, LauncherGone):
            return self._end("failed", ExitCode.WORKER_FAILED)
        if isinstance(event, WeightsArrived):
            self._weights_arrived = True
            return self._export()
        if isinstance(event, Exported):
            return self._finished()
        return self._ticked(now)

    # -- what peers say -------------------------------------------------------------------------

    def _received(self, sender: str, message: Message, now: float) -> list[Instruction]:
        role, _, rest = sender.partition("/")
        if role == "agent":
            return self._from_agent(int(rest), message, now)
        if role == "worker":
            worker = self.fleet.named(sender)
            return [] if worker is None else self._from_worker(worker, message, now)
        if isinstance(message, AgentLost):
            return self._agent_lost(message, now)
        return []

    def _from_agent(  # noqa: PLR0911  one for each kind of message
        self, index: int, message: Message, now: float
    ) -> list[Instruction]:
        if isinstance(message, AgentHello):
            self.repairs.agent_here(index, message, now)
            return self._start_workers()
        agent = self.fleet.agents.get(index)
        if agent is None:
            return [Send(f"agent/{index}", WhoAreYou())]
        if agent.lost:
            return []  # from before its end, or of one whose stages are elsewhere by now
        agent.heard = now
        self.repairs.agent_spoke(index)
        if isinstance(message, SnapshotsReserved):
            cause = lacks_room(message, self.fleet)
            return [] if cause is None else self._end("failed", cause.exit_code, cause)
        if isinstance(message, ABOUT_SNAPSHOTS):
            told = [*self._rounds.hear(index, message), *self._start_workers()]
            return [*told, *self.repairs.start_due(now)]
        if not isinstance(message, WorkerStarted | WorkerExited):
            return []
        worker = self.fleet.named(f"worker/{message.stage}/{message.incarnation}")
        if worker is None or worker.slot[0] != index:
            return []
        if isinstance(message, WorkerExited):
            return self._worker_exited(worker, message, now)
        worker.pid = message.pid
        return []

    def _worker_exited(
        self, worker: Worker, message: WorkerExited, now: float
    ) -> list[Instruction]:
        worker.exited = True
        is_delivered = self.phase is Phase.FINISHING and message.status == 0
        if is_delivered or self.phase is Phase.REJOINING:  # which replaces all who are missing
            return []
        self._failure.note(Fault(at_s=now, host=worker.host, event=message, op=worker.doing))
        if not self._is_repairable:
            return self._fail(now)
        try:
            instructions = self.repairs.exited(worker, message, now)
        except GiveUp as reason:
            return self._give_up(reason, now)
        self._failure.forget(worker.stage)
        return instructions

    def _agent_lost(self, message: AgentLost, now: float) -> list[Instruction]:
        index = message.host_index
        if self.phase is Phase.REJOINING:
            self.fleet.agents.pop(index, None)  # as one that was never heard from
            return []
        if self._is_repairable:
            return self.repairs.agent_lost(index, message.reason, now)
        if index in self.fleet.agents:
            self.fleet.agents[index].lost = True
        self._failure.note(Fault(at_s=now, host=self.fleet.hosts[index], event=message))
        return self._fail(now)

    def _from_worker(  # noqa: PLR0911  one for each kind of message
        self, worker: Worker, message: Message, now: float
    ) -> list[Instruction]:
        is_stranger = worker.heard is None and not isinstance(message, WorkerHello)
        worker.heard = now
        if is_stranger:
            return [Send(worker.identity, WhoAreYou())]
        match message:
            case WorkerHello():
                return self.repairs.hello(worker, message, now)
            case WorkerReady() | WorkerConnected():
                return self._worker_up(worker, message, now)
            case Progress():
                worker.reported(message, now)
                return self.repairs.progress(worker, message, now)
            # Before there is a plan, results could not be written down before their commit.
            case SnapshotWritten() if self._plan is not None:
                return self._rounds.hear(worker.slot[0], message)
            case SnapshotSkipped():
                return self._rounds.skipped(worker, message)
            case LinkLost():
                self.repairs.broken_links.heard(worker.stage, message.reason, now)
                return []
            case StageDone():
                worker.done = message
                return self._export()
            case WorkerFault():
                return self._worker_fault(worker, message, now)
            case _:
                return []

    def _worker_up(
        self, worker: Worker, message: WorkerReady | WorkerConnected, now: float
    ) -> list[Instruction]:
        restarted = self.phase is Phase.TRAINING
        if isinstance(message, WorkerReady):
            if restarted:
                return self.repairs.ready(worker, message, now)
            worker.ready = message
            return [*self._connect(), *self._rejoined(now)]
        worker.connected = True
        if restarted:
            return self.repairs.connected(worker, now)
        return [*self._go(now), *self._rejoined(now)]

    def _worker_fault(self, worker: Worker, message: WorkerFault, now: float) -> list[Instruction]:
        if self.phase is Phase.REJOINING:
            return []
        self._failure.note(Fault(at_s=now, host=worker.host, event=message, op=worker.doing))
        if is_fatal(message) or not self._is_repairable:
            return self._fail(now)
        self.repairs.raised(worker, message)
        return []

    # -- the way up -----------------------------------------------------------------------------

    def _start_workers(self) -> list[Instruction]:
        complete = self._plan is not None and are_all_here(self.fleet, surveyed=self._resumes)
        if self.phase is not Phase.GATHERING or not complete:
            return []
        resumed = begin_from_checkpoint(self._catalogue) if self._resumes else []
        self.phase = Phase.STARTING
        return [*resumed, *place_workers(self.fleet, self.settings.stages)]

    def _connect(self) -> list[Instruction]:
        workers = self.fleet.workers
        if self.phase is not Phase.STARTING or any(worker.ready is None for worker in workers):
            return []
        self.phase = Phase.CONNECTING
        room = ask_for_room(self.fleet, self.settings) if self.settings.repairs else []
        links = [each for stage in range(len(workers)) for each in self.repairs.join(stage)]
        return [*room, *links]

    def _go(self, now: float) -> list[Instruction]:
        workers = self.fleet.workers
        if self.phase is not Phase.CONNECTING or not all(w.connected for w in workers):
            return []
        self.phase = Phase.TRAINING
        for worker in workers:
            worker.moved = now
        return [self._persist(), *self._rounds.begin(), *self.fleet.to_workers(Go())]

    # -- after a restart of the coordinator -----------------------------------------------------

    def _persist(self) -> Persist:
        memory = remember(self._life, self.fleet, self._catalogue, self.repairs, self.stopping)
        return Persist(memory.to_json())

    def _rejoined(self, now: float, *, waited: bool = False) -> list[Instruction]:
        """Go on as soon as everybody is known, or has had a lease to introduce itself."""
        all_known = waited or all(worker.connected for worker in self.fleet.workers)
        if self.phase is not Phase.REJOINING or self._plan is None or not all_known:
            return []
        self.phase = Phase.TRAINING
        return [self._persist(), *self._rounds.begin(), *go_on(self.fleet, self.repairs, now)]

    # -- the way down ---------------------------------------------------------------------------

    def _stop(self, event: StopWanted | StopNow) -> list[Instruction]:
        if isinstance(event, StopNow) or self.phase not in (Phase.TRAINING, Phase.REJOINING):
            return self._end("stopped", event.exit_code)
        self._stopping.want(event)
        text = f"{event.reason}: stopping when every stage has told how far it is"
        return self._stop_feeding() or [Tell("warning", text)]

    def _stop_feeding(self) -> list[Instruction]:
        if self.phase is not Phase.TRAINING or self._plan is None:
            return []
        return [*self._stopping.begin(self._catalogue.committed, self._plan.work.train_batches)]

    def _stop_before(self, event: StoppedFeeding) -> list[Instruction]:
        if self.phase is not Phase.TRAINING or self.stopping is not None:
            return []
        if event.before < 1:
            return self._end("stopped", event.exit_code)
        self.stopping = event
        message = self.repairs.stop_message = StopBefore(batch=event.before)
        told = Tell("warning", f"{event.reason}: stopping after batch {event.before - 1}")
        return [self._persist(), told, *self.fleet.to_workers(message)]

    def _export(self) -> list[Instruction]:
        all_done = all(worker.done is not None for worker in self.fleet.workers)
        if self.phase is not Phase.TRAINING or not all_done or not self._weights_arrived:
            return []
        self.phase = Phase.FINISHING
        return [Export()]

    def _finished(self) -> list[Instruction]:
        if self.stopping is not None:
            return self._end("stopped", self.stopping.exit_code)
        return self._end("done", ExitCode.DONE)

    @property
    def _is_repairable(self) -> bool:
        return self.phase is Phase.TRAINING and self.settings.repairs

    def _give_up(self, reason: GiveUp, now: float) -> list[Instruction]:
        self._failure.give_up(str(reason), reason.faults)
        return self._fail(now)

    def _fail(self, now: float) -> list[Instruction]:
        self.phase = Phase.FAILING
        self._failure.begin(now)
        return []

    def _end(self, state: str, code: int, cause: Cause | None = None) -> list[Instruction]:
        self.phase = Phase.ENDED
        return [End(state, code, cause)]

    # -- the clock ------------------------------------------------------------------------------

    def _ticked(self, now: float) -> list[Instruction]:
        if self.phase is Phase.FAILING:
            cause = self._failure.cause(now)
            return [] if cause is None else self._end("failed", cause.exit_code, cause)
        missing = missing_in(self.phase, self.fleet)
        if missing and now - self._started > self.settings.start_timeout_s:
            cause = late_start(self.settings.start_timeout_s, missing)
            return self._end("failed", cause.exit_code, cause)
        try:
            told = self._what_time_brings(now)
        except GiveUp as reason:
            return self._give_up(reason, now)
        return [*told, *self.fleet.to_agents(Heartbeat()), *self.fleet.to_workers(Heartbeat())]

    def _what_time_brings(self, now: float) -> list[Instruction]:
        if self.phase is Phase.REJOINING:
            return self._rejoined(now, waited=now - self._started > self.settings.lease_s)
        if self.phase is not Phase.TRAINING:
            return self._deal_with_silence(now)
        repairs = [*self.repairs.tick(now), *self._rounds.tick(now)]
        return [*repairs, *self._stop_feeding(), *self._deal_with_silence(now)]

    def _deal_with_silence(self, now: float) -> list[Instruction]:
        """Turn hangs into deaths where the run can be repaired, into its end where it cannot."""
        training = self.phase is Phase.TRAINING
        hosts = list(silent_hosts(self.fleet, self.settings, now))
        workers = list(silent_workers(self.fleet, self.settings, now, training=training))
        if self._is_repairable:
            return self.repairs.silence((index for index, _ in hosts), workers, now)
        if hosts or workers:
            self._failure.note(*(fault for _, fault in (*hosts, *workers)))
            self._fail(now)
        return []
