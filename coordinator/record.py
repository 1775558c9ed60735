"""Everything a run writes down and shows: numbers in, files and views out. Decides nothing.

It joins ``metrics.py`` (what the numbers are), ``sinks.py`` (where files go) and ``export.py``
(the model), so that the loop in ``service.py`` can speak of one thing.
"""

from __future__ import annotations

import socket
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

import psutil

from ..protocol.codec import Buffer
from ..protocol.messages import (
    Evaluated,
    Progress,
    SnapshotWritten,
    StageDone,
    Trained,
    View,
    WeightsPart,
    WorkerFault,
)
from ..protocol.settings import Settings
from .events import End
from .memory import Memory
from .metrics import Metrics, Placement
from .phase import missing_in
from .run_state import RunState
from .sinks import RunDirectory, json_text, status_record

if TYPE_CHECKING:  # both import torch, which the control loop must not wait for
    from .export import WeightsCollector
    from .plan import Plan

__all__ = ["RunRecord"]


class RunRecord:
    """The record of one run.

    Args:
        settings: the run's.
        files: where it is written.
    """

    def __init__(self, settings: Settings, files: RunDirectory) -> None:
        self._settings = settings
        self._files = files
        self._plan: Plan | None = None
        self._metrics: Metrics | None = None
        self._weights: WeightsCollector | None = None
        self._host = socket.gethostname()
        self._started = psutil.Process().create_time()
        self.summary_json = ""
        files.write_settings(settings)

    def begin(self, run_id: str) -> None:
        """Write down which run this is."""
        self._files.write_run_id(run_id)

    def memory(self) -> Memory:
        """Return what the coordinator before this one wrote down.

        Raises:
            OSError: it wrote nothing.
        """
        return Memory.from_json(self._files.read_commit())

    @property
    def is_planned(self) -> bool:
        """Whether there can be numbers."""
        return self._metrics is not None

    @property
    def batches(self) -> int:
        """How many batches have results."""
        return self._known_metrics.batches

    def resumed_from(self, update: int) -> None:
        """Forget what the run did after ``update``: it will be done again, bit for bit."""
        self._files.cut_metrics(update)
        metrics = Metrics(self._settings, self._plan_known.work, self._plan_known.layer_counts)
        metrics.reload(self._files.read_metrics())
        self._metrics = metrics

    def planned(self, plan: Plan) -> None:
        """Write the plan; from now on there can be numbers."""
        from .export import WeightsCollector
        from .plan import stage_rows

        self._weights = WeightsCollector(plan.state_names)
        metrics = Metrics(self._settings, plan.work, plan.layer_counts)
        metrics.reload(self._files.read_metrics())
        self._metrics = metrics
        self._plan = plan
        self._files.write_plan({"stages": stage_rows(plan, self._settings)})

    def started(self, now: float) -> None:
        """Note when the workers were told to train."""
        self._known_metrics.started(now)

    def stopped_before(self, batch: int) -> None:
        """Note that the run will end before this batch."""
        self._known_metrics.cut(self._plan_known.work.stopped_before(batch))

    def progress(self, message: Progress) -> None:
        """Note how far a worker is."""
        if self._metrics is not None:
            self._metrics.progress(message)

    def snapshot_written(self, message: SnapshotWritten) -> None:
        """Note how large a stage's newest snapshot is."""
        self._known_metrics.snapshot_written(message)

    def trained(self, message: Trained, now: float) -> None:
        """Write down trained batches."""
        self._files.append_metrics(self._known_metrics.trained(message, now))

    def evaluated(self, message: Evaluated) -> None:
        """Write down an evaluation round."""
        self._files.append_metrics(self._known_metrics.evaluated(message))

    def done(self, message: StageDone) -> None:
        """Note what a stage counted about itself."""
        self._known_metrics.done(message)

    def fault(self, message: WorkerFault, host: str) -> None:
        """Write a worker's own account of its end."""
        self._files.write_fault(message, host)

    def timings(self, now: float) -> None:
        """Write down where the time goes."""
        self._files.append_metrics(self._known_metrics.timings(now))

    def take_weights(self, part: WeightsPart, payload: Buffer) -> bool:
        """Keep one tensor of a finished stage; tell whether it was the last of the model."""
        assert self._weights is not None
        self._weights.add(part, payload)
        return not self._weights.missing

    def persist(self, text: str) -> None:
        """Write the commit file; it is on the disk when this returns."""
        self._files.write_commit(text)

    def export(self, state: RunState) -> None:
        """Write the model and the summary."""
        from .export import weights_sha256, write_model

        assert self._weights is not None
        tensors = self._weights.tensors
        digest = weights_sha256(tensors)
        repairs = state.repairs
        summary = self._known_metrics.summary(weights_sha256=digest, restarts=sum(repairs.restarts))
        summary["stopped_early"] = state.stopping is not None
        summary["repairs"] = repairs.records
        metadata = {
            "spectrain": version("spectrain"),
            "method": self._settings.method,
            "seed": str(self._settings.seed),
            "updates": str(summary["updates"]),
        }
        write_model(self._files.model_path, tensors, metadata)
        self._files.write_summary(summary)
        self.summary_json = json_text(summary)

    def view(self, state: RunState, now: float) -> View:
        """Return what the console shows."""
        waiting_for = missing_in(state.phase, state.fleet)
        if self._metrics is None:
            return View(state=state.phase.value, waiting_for=waiting_for)
        placements = [
            Placement(
                stage=worker.stage,
                host=worker.host,
                pid=worker.pid,
                incarnation=worker.incarnation,
                state=worker.state,
            )
            for worker in state.fleet.workers
        ]
        return self._metrics.view(state.phase.value, placements, now, waiting_for)

    def write_status(self, state: RunState, now: float, end: End | None) -> None:
        """Write ``status.json``."""
        view = self.view(state, now)
        status = status_record(
            view,
            coordinator_host=self._host,
            coordinator_started=self._started,
            updated=time.time(),
            exit_code=None if end is None else end.exit_code,
            cause=None if end is None else end.cause,
        )
        if end is not None:
            status["state"] = end.state
        self._files.write_status(status)

    def close(self) -> None:
        """Close what is open."""
        self._files.close()

    @property
    def _plan_known(self) -> Plan:
        assert self._plan is not None, "a run is resumed after it is planned"
        return self._plan

    @property
    def _known_metrics(self) -> Metrics:
        assert self._metrics is not None, "numbers came before the plan"
        return self._metrics
