"""The coordinator's shell: it hears, asks the state machine, and does what that says.

All I/O of the coordinator is here or behind the objects made here; all decisions are in
``run_state.py``. One thread runs this loop. Others load the job ("plan"), answer requests for
data ("data") and watch the launcher's lifeline; they hand their results over as events.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections import deque

from ..protocol.bootstrap import CoordinatorBirth
from ..protocol.codec import Buffer
from ..protocol.errors import ExitCode, ProtocolError, SpectrainError, UserError
from ..protocol.messages import (
    Cause,
    EndAgent,
    Evaluated,
    Heartbeat,
    Message,
    Note,
    Progress,
    Quit,
    RunEnded,
    SnapshotWritten,
    StageDone,
    StopRequested,
    Trained,
    WeightsPart,
    WorkerFault,
)
from ..protocol.sockets import Server, Waker
from .data_channel import DataChannel
from .events import (
    End,
    Event,
    Export,
    Exported,
    GoBackTo,
    LauncherGone,
    Persist,
    Planned,
    PlanRefused,
    Received,
    Send,
    StopFeeding,
    StopNow,
    StoppedFeeding,
    StopWanted,
    Tell,
    Ticked,
    WeightsArrived,
)
from .record import RunRecord
from .run_state import Phase, RunState

__all__ = ["Coordinator"]

logger = logging.getLogger(__name__)

_LAUNCHER = "launcher"
_VIEW_EVERY_S = 0.5
_STATUS_EVERY_S = 1.0
_TIMINGS_EVERY_S = 5.0
_HELLO_POLL_S = 0.2


class Coordinator:
    """One run, from the first agent's hello to the last goodbye.

    Args:
        birth: what the launcher told us.
        control: the bound control socket; ``run``'s thread owns it from now on.
        data: the bound data socket; goes to the data channel.
        record: the files and numbers of the run.
    """

    def __init__(
        self, birth: CoordinatorBirth, control: Server, data: Server, record: RunRecord
    ) -> None:
        self._settings = birth.settings
        self._control = control
        self._record = record
        self._waker = Waker()
        self._events: deque[Event] = deque()
        record.begin(birth.run_id)
        self._state = RunState(
            birth.settings,
            birth.hosts,
            time.monotonic(),
            memory=record.memory() if birth.is_restarted else None,
            resumes=birth.resumes and not birth.is_restarted,
        )
        # A restarted coordinator hears workers before it has loaded the job again.
        self._unkept: deque[tuple[str, str, Message]] = deque()
        self._ended: End | None = None
        self._launcher_gone = threading.Event()
        self._due = {self._tick: 0.0, self._show: 0.0, self._status: 0.0, self._timings: 0.0}
        self._data = DataChannel(data, on_weights=self._take_weights, on_error=self._refuse)
        if self._state.stopping is not None:
            self._data.stop_feeding_before(self._state.stopping.before)

    def run(self) -> int:
        """Run to the end and return the exit code of the run."""
        for name, target in (("plan", self._make_plan), ("lifeline", self._watch_lifeline)):
            threading.Thread(target=target, name=name, daemon=True).start()
        while self._ended is None:
            received = self._control.receive(self._until_due(), self._waker.fd)
            self._waker.clear()
            if received is not None:
                self._hear(received.identity, received.message)
            self._keep_all()
            while self._events:
                self._handle(self._events.popleft())
            self._do_what_is_due()
        self._say_goodbye(self._ended)
        return self._ended.exit_code

    # -- what comes in --------------------------------------------------------------------------

    def _hear(self, sender: str, message: Message) -> None:
        if isinstance(message, StopRequested):
            self._handle(self._stop(message))
            return
        worker = self._state.fleet.named(sender)
        if worker is not None:
            self._unkept.append((sender, worker.host, message))
            self._keep_all()
        self._handle(Received(sender, message))

    def _keep_all(self) -> None:
        """Write down what workers said, once there is a plan to understand it by."""
        while self._record.is_planned and self._unkept:
            sender, host, message = self._unkept.popleft()
            try:
                self._keep(message, host)
            except ProtocolError as error:
                logger.warning("dropped a %s of %s: %s", type(message).__name__, sender, error)

    def _keep(self, message: Message, host: str) -> None:
        """Write down what a worker says of itself; decisions do not depend on it."""
        now = time.monotonic()
        if isinstance(message, WorkerFault):
            self._record.fault(message, host)
        elif isinstance(message, Progress):
            self._record.progress(message)
        elif isinstance(message, SnapshotWritten):
            self._record.snapshot_written(message)
        elif isinstance(message, Trained):
            self._record.trained(message, now)
        elif isinstance(message, Evaluated):
            self._record.evaluated(message)
        elif isinstance(message, StageDone):
            self._record.done(message)

    def _stop(self, request: StopRequested) -> Event:
        # A clean end that a scheduler asked for says "run me again", one by hand says so.
        by_hand = request.reason == "Ctrl-C"
        code = ExitCode.INTERRUPTED if by_hand else ExitCode.STOPPED
        if request.abort:
            return StopNow(request.reason, code)
        return StopWanted(request.reason, code)

    def _stop_feeding(self, stop: StopFeeding) -> StoppedFeeding:
        # Results that are written down must be of batches that the weights have seen.
        at_least = max(stop.at_least, self._record.batches)
        return StoppedFeeding(self._data.stop_feeding(at_least), stop.reason, stop.exit_code)

    def _post(self, event: Event) -> None:
        """Hand an event to the loop, from any thread."""
        self._events.append(event)
        self._waker.wake()

    # -- what is done ---------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        before = self._state.phase
        for instruction in self._state.handle(event, time.monotonic()):
            if isinstance(instruction, Send):
                self._control.send(instruction.to, instruction.message)
            elif isinstance(instruction, Tell):
                self._tell(instruction.level, instruction.text)
            elif isinstance(instruction, Persist):
                self._record.persist(instruction.text)
            elif isinstance(instruction, GoBackTo):
                self._record.resumed_from(instruction.update)
            elif isinstance(instruction, StopFeeding):
                self._post(self._stop_feeding(instruction))
            elif isinstance(instruction, Export):
                self._record.export(self._state)
                self._post(Exported())
            else:
                self._ended = instruction
        if self._state.phase is not before:
            self._entered(self._state.phase)
        if isinstance(event, StoppedFeeding) and self._ended is None:
            self._record.stopped_before(event.before)

    def _entered(self, phase: Phase) -> None:
        logger.info("now %s", phase.value)
        if phase is Phase.TRAINING:
            self._record.started(time.monotonic())
        self._due[self._show] = self._due[self._status] = 0.0

    def _tell(self, level: str, text: str) -> None:
        logger.log(logging.WARNING if level == "warning" else logging.INFO, "%s", text)
        self._control.send(_LAUNCHER, Note(level=level, text=text))

    def _until_due(self) -> float:
        return max(0.0, min(self._due.values()) - time.monotonic())

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for action, every_s in (
            (self._tick, self._settings.heartbeat_s),
            (self._show, _VIEW_EVERY_S),
            (self._status, _STATUS_EVERY_S),
            (self._timings, _TIMINGS_EVERY_S),
        ):
            if now >= self._due[action]:
                self._due[action] = now + every_s
                action()

    def _tick(self) -> None:
        self._handle(Ticked())
        self._control.send(_LAUNCHER, Heartbeat())

    def _show(self) -> None:
        self._control.send(_LAUNCHER, self._record.view(self._state, time.monotonic()))

    def _status(self) -> None:
        self._record.write_status(self._state, time.monotonic(), self._ended)

    def _timings(self) -> None:
        if self._state.phase is Phase.TRAINING:
            self._record.timings(time.monotonic())

    def _say_goodbye(self, end: End) -> None:
        """Tell everybody, then wait until the launcher lets go: queues die with this process."""
        self._status()
        fleet = self._state.fleet
        ending = EndAgent(grace_s=self._settings.grace_s)
        for each in (*fleet.to_workers(Quit()), *fleet.to_agents(ending)):
            self._control.send(each.to, each.message)
        ended = RunEnded(
            exit_code=end.exit_code,
            state=end.state,
            cause=end.cause,
            summary_json=self._record.summary_json,
        )
        deadline = time.monotonic() + 2 * self._settings.grace_s
        # A job may be refused before the launcher has said hello, which makes it known here.
        while not self._control.send(_LAUNCHER, ended):
            if self._launcher_gone.is_set() or time.monotonic() >= deadline:
                break
            self._control.receive(_HELLO_POLL_S)
        self._launcher_gone.wait(max(0.0, deadline - time.monotonic()))
        self._data.close()
        self._control.close()
        self._record.close()
        self._waker.close()

    # -- other threads --------------------------------------------------------------------------

    def _make_plan(self) -> None:
        from .plan import make_plan  # imports torch; the loop is at work meanwhile

        try:
            plan = make_plan(self._settings)
        except Exception as error:  # noqa: BLE001  whatever the user's code raises ends the run
            self._refuse(error)
            return
        self._record.planned(plan)
        if self._state.stopping is not None:  # as the coordinator before this one was asked to
            self._record.stopped_before(self._state.stopping.before)
        self._data.start(plan.feed)
        self._post(Planned(plan.layer_counts, plan.work))

    def _take_weights(self, part: WeightsPart, payload: Buffer) -> None:
        if self._record.take_weights(part, payload):
            self._post(WeightsArrived())

    def _refuse(self, error: Exception) -> None:
        """End the run because of the job's code or data; runs in the thread that met it."""
        user_error = isinstance(error, UserError)
        code = error.exit_code if isinstance(error, SpectrainError) else ExitCode.WORKER_FAILED
        cause = Cause(
            stage=None,
            host="the coordinator",
            what=type(error).__name__,
            message=str(error),
            traceback="" if user_error else traceback.format_exc(),
            exit_code=code,
            user_error=user_error,
        )
        self._post(PlanRefused(cause))

    def _watch_lifeline(self) -> None:
        while os.read(0, 1 << 12):
            pass
        self._launcher_gone.set()
        self._post(LauncherGone())
