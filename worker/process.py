"""The life of one worker process: build the stage, connect, train, deliver, and tell of a fault.

It joins the parts and owns none of their work: the loop executes ops, streams move parcels, the
snapshotter keeps states, the control thread speaks with the coordinator.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import zmq

from ..protocol.bootstrap import WorkerBirth
from ..protocol.errors import ExitCode, LinkError, SpectrainError, UserError
from ..protocol.job import load_job
from ..protocol.keys import Authority
from ..protocol.messages import (
    Assign,
    BatchResult,
    Committed,
    Connect,
    Evaluated,
    Go,
    LinkLost,
    Progress,
    SnapshotPlan,
    SnapshotSkipped,
    SnapshotWritten,
    StageDone,
    StopBefore,
    Trained,
    WorkerConnected,
    WorkerFault,
)
from ..protocol.schedule import Op, Schedule, stage_ops
from ..protocol.settings import Settings
from .build import Parts, build_stage
from .control import Control, peak_memory_bytes
from .delivery import deliver_weights
from .feed_inbox import FeedInbox
from .loop import Loop
from .neighbours import Neighbours
from .restore import load_snapshot
from .scoreboard import EvaluationResult
from .snapshot import Origin, Snapshot
from .snapshotter import Snapshotter, Written
from .stopwatch import Times
from .streams import Streams

__all__ = ["FAULTS_VARIABLE", "run_worker"]

FAULTS_VARIABLE = "SPECTRAIN_FAULTS"
"""Environment variable that names what is to go wrong where; see ``faults``."""

_ASSIGNMENT_TIMEOUT_S = 120.0
"""A coordinator that was restarted has to load the job first; one that is gone ends the lease."""

_RESULTS_EVERY_S = 0.2


def run_worker(birth: WorkerBirth) -> int:
    """Live as this worker; return the exit code of the process, if it ends by itself."""
    faulthandler.enable()
    if faults := os.environ.get(FAULTS_VARIABLE):
        from .faults import plant_faults  # tests only

        plant_faults(faults, stage=birth.stage, incarnation=birth.incarnation)
    worker = _Worker(birth, zmq.Context(), Control(birth, torch.__version__))
    try:
        worker.live()
    except Exception as error:  # noqa: BLE001  whatever it is, the coordinator must hear of it
        traceback.print_exc()
        return worker.tell_fault(error)
    # The control thread ends this process when the coordinator says so, or stays silent.
    threading.Event().wait()
    raise AssertionError("nothing sets that event")


class _Worker:
    def __init__(
        self, birth: WorkerBirth, context: zmq.Context[zmq.Socket[bytes]], control: Control
    ) -> None:
        self._birth = birth
        self._context = context
        self._control = control
        self._who = {"stage": birth.stage, "incarnation": birth.incarnation}
        self._state = "building"
        self._loop: Loop | None = None
        self._links: Neighbours | None = None
        self._results: list[BatchResult] = []
        # What a coordinator that died may have heard and not written down.
        self._recent: deque[BatchResult] = deque()
        self._evaluations: list[Evaluated] = []
        self._results_sent = time.monotonic()
        self._results_lock = threading.Lock()
        control.progress = self._progress

    def live(self) -> None:
        """Go through all states up to "done"."""
        control = self._control
        assign = control.wait_for(Assign, _ASSIGNMENT_TIMEOUT_S, "its assignment")
        settings = self._settings = Settings.from_json(assign.settings_json)
        self._work = assign.work
        torch.set_num_threads(settings.threads)
        device = torch.device(self._birth.device)
        job = load_job(Path(self._birth.job))
        parts = build_stage(
            job, settings, assign.layer_counts, self._birth.stage, device=device
        )  # fmt: skip
        snapshot = self._load_snapshot(assign)
        self._from = None if snapshot is None else snapshot.position
        neighbours = self._links = self._neighbours(device)
        streams = self._streams(neighbours, parts, device)
        snapshotter = self._snapshotter(parts)
        loop = self._loop = Loop(
            parts.stage,
            parts.weights,
            parts.method,
            streams,
            schedule=settings.schedule,
            work=assign.work,
            snapshots=snapshotter,
            on_batch=self._trained,
            on_evaluation=self._evaluated,
        )
        if snapshot is not None:
            loop.resume(snapshot)
            del snapshot  # it is as large as the stage
        self._listen(loop, neighbours, streams, snapshotter)
        state = parts.weights.clean_state()
        control.send(neighbours.ready(sum(tensor.numel() for tensor in state.values())))
        self._state = "ready"
        neighbours.wait_connected()
        control.send(WorkerConnected(**self._who, generation=0))
        control.wait_for(Go, settings.start_timeout_s, "the word to go")
        self._state = "training"
        loop.run()
        self._state = "finishing"
        self._send_results()
        neighbours.flush()
        self._deliver(parts)
        tell_again = control.on_restarted_coordinator

        def deliver_again() -> None:
            tell_again()
            self._deliver(parts)

        control.on_restarted_coordinator = deliver_again
        self._state = "done"

    # -- building -------------------------------------------------------------------------------

    def _load_snapshot(self, assign: Assign) -> Snapshot | None:
        if assign.restore is None:
            return None
        paths = [Path(path) for path in assign.restore.paths]
        return load_snapshot(paths, assign.restore.digest, self._origin)

    @property
    def _origin(self) -> Origin:
        return Origin(self._birth.run_id, self._birth.stage, self._settings.stages)

    def _neighbours(self, device: torch.device) -> Neighbours:
        authority = None
        if self._birth.address is not None:
            allowed = dict.fromkeys(self._birth.peer_keys, "worker/")
            authority = Authority(self._context, allowed)
        return Neighbours(
            self._birth,
            self._context,
            authority,
            self._settings,
            work=self._work,
            device=device,
            is_wanted=self._is_wanted,
            on_link_lost=self._link_lost,
        )

    def _streams(self, neighbours: Neighbours, parts: Parts, device: torch.device) -> Streams:
        def feed(part: str) -> FeedInbox:
            return FeedInbox(
                part,
                birth=self._birth,
                context=self._context,
                ops=self._ops,
                device=device,
                wait_timeout_s=self._settings.wait_timeout_s,
            )

        return Streams(
            inputs=neighbours.activations_in or feed("inputs"),
            targets=feed("targets") if parts.stage.is_last else None,
            activations=neighbours.activations_out,
            gradients_in=neighbours.gradients_in,
            gradients_out=neighbours.gradients_out,
        )

    def _ops(self) -> Iterator[Op]:
        """Return the ops that are still to be done, from this process's beginning."""
        settings, stage = self._settings, self._birth.stage
        remaining = stage_ops if self._from is None else self._from.remaining
        return remaining(settings.schedule, stage, settings.stages, self._work)

    def _snapshotter(self, parts: Parts) -> Snapshotter:
        return Snapshotter(
            parts,
            self._origin,
            Path(self._birth.snapshot_dir),
            on_written=self._snapshot_written,
            on_skipped=self._snapshot_skipped,
        )

    def _listen(
        self, loop: Loop, neighbours: Neighbours, streams: Streams, snapshotter: Snapshotter
    ) -> None:
        """Let the control thread act on what the coordinator says while the loop runs."""
        feeds = [end for end in (streams.inputs, streams.targets) if isinstance(end, FeedInbox)]

        def stop_before(message: StopBefore) -> None:
            self._work = self._work.stopped_before(message.batch)
            loop.stop_before(message.batch)
            neighbours.stop_before(message.batch)
            for feed in feeds:
                feed.stop_before(message.batch)

        def committed(message: Committed) -> None:
            neighbours.trim(message.update)
            with self._results_lock:
                while self._recent and self._recent[0].batch < message.update:
                    self._recent.popleft()

        def tell_again() -> None:
            for feed in feeds:
                feed.ask_again()
            with self._results_lock:
                recent = tuple(self._recent)
            if recent:
                self._control.send(Trained(**self._who, batches=recent))
            for evaluated in self._evaluations:
                self._control.send(evaluated)

        control = self._control
        control.handle(StopBefore, stop_before)
        control.handle(Connect, neighbours.connect)
        control.handle(Committed, committed)
        control.handle(
            SnapshotPlan,
            lambda plan: snapshotter.plan(plan.first, plan.every, patient=plan.patient),
        )
        control.on_restarted_coordinator = tell_again

    # -- what the parts report ------------------------------------------------------------------

    def _is_wanted(self, op: Op) -> bool:
        assert self._loop is not None, "links are built after the loop"
        return self._loop.wants(op)

    def _link_lost(self, stream: str, reason: str) -> None:
        self._control.send(LinkLost(**self._who, stream=stream, reason=reason))

    def _snapshot_written(self, written: Written) -> None:
        """Tell of a snapshot, after the results before it: nobody makes those again."""
        self._send_results()
        if self._is_of_the_drain(written.update):
            return
        self._control.send(
            SnapshotWritten(
                **self._who,
                update=written.update,
                path=str(written.path),
                size_bytes=written.size_bytes,
                digest=written.digest,
                capture_s=written.capture_s,
                write_s=written.write_s,
            )
        )

    def _is_of_the_drain(self, update: int) -> bool:
        """Tell whether forwards were left out before ``update`` because the work ends.

        A run that goes on after a stop, or is made longer, cannot begin there: in it they ran, and
        read older weights than there are now.
        """
        settings = self._settings
        warm_up = settings.stages - 1 - self._birth.stage
        is_asynchronous = settings.schedule is Schedule.ASYNCHRONOUS
        return is_asynchronous and update + warm_up > self._work.train_batches

    def _snapshot_skipped(self, update: int, reason: str) -> None:
        self._control.send(SnapshotSkipped(**self._who, update=update, reason=reason))

    def _trained(self, result: BatchResult) -> None:
        with self._results_lock:
            self._results.append(result)
        if time.monotonic() - self._results_sent > _RESULTS_EVERY_S:
            self._send_results()

    def _send_results(self) -> None:
        self._results_sent = time.monotonic()
        with self._results_lock:
            batches, self._results = tuple(self._results), []
            self._recent.extend(batches)
            if batches:
                self._control.send(Trained(**self._who, batches=batches))

    def _evaluated(self, result: EvaluationResult) -> None:
        self._send_results()
        evaluated = Evaluated(**self._who, **asdict(result))
        self._evaluations.append(evaluated)
        self._control.send(evaluated)

    def _progress(self, sent: int, dropped: int) -> Progress:
        loop, links = self._loop, self._links
        times: dict[str, Any] = asdict(Times() if loop is None else loop.times)
        return Progress(
            **self._who,
            **times,
            state="replaying" if self._is_replaying else self._state,
            last_op=loop.last_op if loop is not None else "",
            waiting_for=loop.waiting_for if loop is not None else "",
            version=loop.version if loop is not None else 0,
            in_flight=loop.in_flight if loop is not None else 0,
            log_bytes=links.log_bytes if links is not None else 0,
            **(links.peak_log_bytes if links is not None else {}),
            replayed=links.suppressed if links is not None else 0,
            peak_memory_bytes=peak_memory_bytes(),
            messages=sent,
            dropped=dropped,
        )

    @property
    def _is_replaying(self) -> bool:
        """Whether everything a restarted worker has made so far was made before."""
        reborn = self._birth.incarnation > 0 and self._state == "training"
        return reborn and self._links is not None and not self._links.has_sent

    # -- the end --------------------------------------------------------------------------------

    def _deliver(self, parts: Parts) -> None:
        assert self._loop is not None
        state = parts.weights.clean_state()
        # Kept, because what is queued is lost with its socket.
        self._delivery = deliver_weights(self._birth, self._context, state)
        staleness = self._loop.staleness
        self._control.send(
            StageDone(
                **self._who,
                updates=self._loop.version,
                forward_staleness=staleness.forward_mean,
                forward_staleness_max=staleness.forward_max,
                backward_staleness=staleness.backward_mean,
                backward_staleness_max=staleness.backward_max,
                tensors=len(state),
            )
        )

    def tell_fault(self, error: Exception) -> int:
        """Tell the coordinator what happened; return the exit code that goes with it."""
        code = error.exit_code if isinstance(error, SpectrainError) else ExitCode.WORKER_FAILED
        self._control.send(
            WorkerFault(
                **self._who,
                what=type(error).__name__,
                message=str(error),
                op=self._loop.current_op if self._loop is not None else "",
                traceback="".join(traceback.format_exception(error)),
                exit_code=code,
                is_consequence=isinstance(error, LinkError),
                user_error=isinstance(error, UserError),
            )
        )
        self._control.close()
        return code
