"""The life of one worker process: build the stage, connect, train, deliver, and tell of a fault.

It joins the parts and owns none of their work: the loop executes ops, streams move parcels, the
control thread speaks with the coordinator.
"""

from __future__ import annotations

import faulthandler
import threading
import time
import traceback
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
    Connect,
    Evaluated,
    Go,
    Progress,
    StageDone,
    Trained,
    WorkerConnected,
    WorkerFault,
)
from ..protocol.schedule import Op, stage_ops
from ..protocol.settings import Settings
from .build import build_stage
from .control import Control, peak_memory_bytes
from .delivery import deliver_weights
from .feed_inbox import FeedInbox
from .loop import Loop, Streams, Times
from .neighbours import Neighbours
from .scoreboard import EvaluationResult

__all__ = ["run_worker"]

_RESULTS_EVERY_S = 0.2


def run_worker(birth: WorkerBirth) -> int:
    """Live as this worker; return the exit code of the process, if it ends by itself."""
    faulthandler.enable()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    control = Control(birth, torch.__version__)
    worker = _Worker(birth, context, control)
    try:
        worker.live()
    except Exception as error:  # noqa: BLE001  whatever it is, the coordinator must hear of it
        traceback.print_exc()
        fault = worker.fault_of(error)
        control.send(fault)
        control.close()
        return fault.exit_code
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
        self._state = "building"
        self._loop: Loop | None = None
        self._results: list[BatchResult] = []
        self._results_sent = time.monotonic()
        control.progress = self._progress

    def live(self) -> None:
        """Go through all states up to "done"."""
        birth, control = self._birth, self._control
        assign = control.wait_for(Assign, birth.lease_s, "its assignment")
        settings = Settings.from_json(assign.settings_json)
        self._settings = settings
        self._work = assign.work
        torch.set_num_threads(settings.threads)
        device = torch.device(birth.device)
        parts = build_stage(
            load_job(Path(birth.job)), settings, assign.layer_counts, birth.stage, device=device
        )
        neighbours = self._neighbours(device)
        streams = Streams(
            inputs=neighbours.activations_in or self._feed("inputs", device),
            targets=self._feed("targets", device) if parts.stage.is_last else None,
            activations=neighbours.activations_out,
            gradients_in=neighbours.gradients_in,
            gradients_out=neighbours.gradients_out,
        )
        self._loop = loop = Loop(
            parts.stage,
            parts.weights,
            parts.method,
            streams,
            schedule=settings.schedule,
            work=assign.work,
            on_batch=self._trained,
            on_evaluation=self._evaluated,
        )
        feeds = [end for end in (streams.inputs, streams.targets) if isinstance(end, FeedInbox)]

        def stop_before(batch: int) -> None:
            self._work = self._work.stopped_before(batch)
            loop.stop_before(batch)
            neighbours.stop_before(batch)
            for feed in feeds:
                feed.stop_before(batch)

        control.on_stop_before = stop_before
        state = parts.weights.clean_state()
        control.send(neighbours.ready(sum(tensor.numel() for tensor in state.values())))
        self._state = "ready"
        connect = control.wait_for(Connect, settings.start_timeout_s, "its neighbours' addresses")
        neighbours.connect(connect)
        control.send(
            WorkerConnected(
                stage=birth.stage, incarnation=birth.incarnation, generation=connect.generation
            )
        )
        control.wait_for(Go, settings.start_timeout_s, "the word to go")
        self._state = "training"
        loop.run()
        self._state = "finishing"
        self._send_results()
        neighbours.flush()
        state = parts.weights.clean_state()
        self._delivery = deliver_weights(birth, self._context, state)
        control.send(self._done(loop, len(state)))
        self._state = "done"

    # -- building -------------------------------------------------------------------------------

    def _neighbours(self, device: torch.device) -> Neighbours:
        authority = None
        if self._birth.address is not None:
            allowed = dict.fromkeys(self._birth.peer_keys, "worker/")
            authority = Authority(self._context, allowed)
        return Neighbours(self._birth, self._context, authority, self._settings, device)

    def _feed(self, part: str, device: torch.device) -> FeedInbox:
        return FeedInbox(
            part,
            birth=self._birth,
            context=self._context,
            ops=self._ops,
            device=device,
            wait_timeout_s=self._settings.wait_timeout_s,
        )

    def _ops(self) -> Iterator[Op]:
        settings = self._settings
        return stage_ops(settings.schedule, self._birth.stage, settings.stages, self._work)

    # -- reporting ------------------------------------------------------------------------------

    def _trained(self, result: BatchResult) -> None:
        self._results.append(result)
        if time.monotonic() - self._results_sent > _RESULTS_EVERY_S:
            self._send_results()

    def _send_results(self) -> None:
        self._results_sent = time.monotonic()
        if self._results:
            batches, self._results = tuple(self._results), []
            self._control.send(Trained(**self._who, batches=batches))

    def _evaluated(self, result: EvaluationResult) -> None:
        self._send_results()
        self._control.send(Evaluated(**self._who, **asdict(result)))

    @property
    def _who(self) -> dict[str, int]:
        return {"stage": self._birth.stage, "incarnation": self._birth.incarnation}

    def _progress(self, sent: int, dropped: int) -> Progress:
        loop = self._loop
        times: dict[str, Any] = asdict(Times() if loop is None else loop.times)
        return Progress(
            **self._who,
            **times,
            state=self._state,
            last_op=loop.last_op if loop is not None else "",
            waiting_for=loop.waiting_for if loop is not None else "",
            version=loop.version if loop is not None else 0,
            in_flight=loop.in_flight if loop is not None else 0,
            peak_memory_bytes=peak_memory_bytes(),
            messages=sent,
            dropped=dropped,
        )

    def _done(self, loop: Loop, tensors: int) -> StageDone:
        staleness = loop.staleness
        return StageDone(
            **self._who,
            updates=loop.version,
            forward_staleness=staleness.forward_mean,
            forward_staleness_max=staleness.forward_max,
            backward_staleness=staleness.backward_mean,
            backward_staleness_max=staleness.backward_max,
            tensors=tensors,
        )

    def fault_of(self, error: Exception) -> WorkerFault:
        """Say what happened, in the form the coordinator takes."""
        code = error.exit_code if isinstance(error, SpectrainError) else ExitCode.WORKER_FAILED
        return WorkerFault(
            **self._who,
            what=type(error).__name__,
            message=str(error),
            op=self._loop.current_op if self._loop is not None else "",
            traceback="".join(traceback.format_exception(error)),
            exit_code=code,
            is_consequence=isinstance(error, LinkError),
            user_error=isinstance(error, UserError),
        )

