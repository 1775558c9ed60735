"""Folds what the workers report into the numbers a run shows and keeps; no clocks, no files.

Every method that needs the time is given it (``now_s``, monotonic), so that the same reports give
the same numbers. The records that come back go into ``metrics.jsonl`` one per line. Those of kind
``train`` and ``evaluation`` depend on the job and the seed alone, byte for byte; everything that
has to do with time is kept apart, in the kinds ``speed`` and ``stage``.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Sequence

from ..protocol.errors import ProtocolError
from ..protocol.messages import (
    BatchResult,
    Evaluated,
    Progress,
    SnapshotWritten,
    StageDone,
    Trained,
    View,
)
from ..protocol.schedule import Work
from ..protocol.settings import Settings
from .stage_metrics import Placement, Record, StageMetrics

__all__ = ["Metrics", "Placement", "Record", "Throughput"]

LOSS_WINDOW_BATCHES = 50
"""The training loss shown is the mean over so many mini-batches: one alone says little."""

RATE_WINDOW_S = 10.0
"""Samples per second are counted over this long: calm to look at, yet a stall soon shows."""


class Throughput:
    """Samples per second over a sliding window.

    The rate is that between the window's oldest point and now, so it falls to zero when nothing
    arrives any more.
    """

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, samples: int) -> None:
        """Note that ``samples`` were trained in all by ``now_s``."""
        self._points.append((now_s, samples))

    def per_s(self, now_s: float) -> float | None:
        """Return samples per second, or None while no time has passed since the first point."""
        while len(self._points) > 1 and self._points[1][0] <= now_s - self._window_s:
            self._points.popleft()
        if not self._points or now_s <= self._points[0][0]:
            return None
        oldest_s, oldest_samples = self._points[0]
        return (self._points[-1][1] - oldest_samples) / (now_s - oldest_s)


class Metrics:
    """All numbers of one run.

    Args:
        settings: the run's settings.
        work: how much there is to do.
        layer_counts: layers per stage, in order.

    Attributes:
        batches: mini-batches trained so far.
        samples: samples trained so far.
        mismatches: results that a restarted stage reported again with another value; a replay is
            bit-identical, so anything above 0 is a fault of ours.
    """

    def __init__(self, settings: Settings, work: Work, layer_counts: Sequence[int]) -> None:
        self._settings = settings
        self._work = work
        self._stages = StageMetrics(layer_counts)
        self.batches = 0
        self.samples = 0
        self.mismatches = 0
        # One double per batch of the run, NaN while unknown: enough to recognise and to compare
        # a batch that is reported again, and 8 MB for a million of them.
        self._losses = array("d", [math.nan]) * work.train_batches
        self._recent: deque[BatchResult] = deque(maxlen=LOSS_WINDOW_BATCHES)
        self._evaluations: dict[int, Evaluated] = {}
        self._throughput = Throughput()
        self._samples_before = 0  # trained before this process told the workers to train
        self._started_s: float | None = None
        self._last_trained_s: float | None = None

    # -- what comes in ----------------------------------------------------------------------

    def started(self, now_s: float) -> None:
        """Note that the workers have been told to train."""
        self._started_s = now_s
        self._samples_before = self.samples
        self._throughput.add(now_s, self.samples)

    def cut(self, work: Work) -> None:
        """Take over ``work`` that ends earlier, because the run was asked to stop."""
        self._work = work

    def reload(self, records: Iterable[Record]) -> None:
        """Take over what a coordinator before this one wrote down."""
        for record in records:
            if record["kind"] == "train":
                result = BatchResult(
                    batch=record["update"],
                    samples=record["samples"],
                    loss=record["loss"],
                    metrics=record["metrics"],
                    lr=record["lr"],
                )
                if self._remember(result):
                    self.batches += 1
                    self.samples += result.samples
                    self._recent.append(result)
            elif record["kind"] == "evaluation":
                self._evaluations[record["round"]] = Evaluated(
                    stage=0,
                    incarnation=0,
                    round=record["round"],
                    samples=record["samples"],
                    loss=record["loss"],
                    metrics=record["metrics"],
                )

    def progress(self, message: Progress) -> None:
        """Take over one worker's counters."""
        self._stages.progress(message)

    def snapshot_written(self, message: SnapshotWritten) -> None:
        """Take over the size of a stage's newest snapshot."""
        self._stages.snapshot_written(message)

    def trained(self, message: Trained, now_s: float) -> list[Record]:
        """Take over results of mini-batches and return a ``train`` record for each new one.

        Raises:
            ProtocolError: a batch is not one of this run's.
        """
        records: list[Record] = []
        for result in message.batches:
            if not self._remember(result):
                continue
            self.batches += 1
            self.samples += result.samples
            self._recent.append(result)
            records.append(
                {
                    "kind": "train",
                    "update": result.batch,
                    "epoch": self._work.epoch_of(result.batch),
                    "samples": result.samples,
                    "loss": result.loss,
                    "lr": result.lr,
                    "metrics": result.metrics,
                }
            )
        if records:
            self._last_trained_s = now_s
            self._throughput.add(now_s, self.samples)
        return records

    def evaluated(self, message: Evaluated) -> list[Record]:
        """Take over one evaluation round and return its record, unless it is a repetition."""
        known = self._evaluations.setdefault(message.round, message)
        if known is not message:
            same = (known.loss, known.metrics) == (message.loss, message.metrics)
            self.mismatches += not same
            return []
        updates = (message.round + 1) * self._work.epoch_batches
        return [
            {
                "kind": "evaluation",
                "round": message.round,
                "updates": min(updates, self._work.train_batches),
                "samples": message.samples,
                "loss": message.loss,
                "metrics": message.metrics,
            }
        ]

    def done(self, message: StageDone) -> None:
        """Take over what a stage counted about itself when it finished."""
        self._stages.done(message)

    # -- what goes out ----------------------------------------------------------------------

    def timings(self, now_s: float) -> list[Record]:
        """Return one ``speed`` record and a ``stage`` record per stage: all that tells of time."""
        wall_s = None if self._started_s is None else now_s - self._started_s
        speed: Record = {
            "kind": "speed",
            "wall_s": wall_s,
            "updates": self.batches,
            "samples": self.samples,
            "samples_per_s": self._throughput.per_s(now_s),
        }
        return [speed, *self._stages.records(wall_s)]

    def view(
        self,
        state: str,
        placements: Sequence[Placement],
        now_s: float,
        waiting_for: tuple[str, ...] = (),
    ) -> View:
        """Return what the console and ``status.json`` show.

        Args:
            state: the run's.
            placements: one per stage that has a worker.
            now_s: monotonic time.
            waiting_for: in start-up, who is missing and what it does.
        """
        work = self._work
        samples_per_s = self._throughput.per_s(now_s)
        return View(
            state=state,
            waiting_for=waiting_for,
            batch=self.batches,
            train_batches=work.train_batches,
            epoch=work.epoch_of(max(self.batches - 1, 0)),
            epochs=work.epoch_of(work.train_batches - 1) + 1,
            loss=self._training_metrics().get("loss"),
            lr=self._recent[-1].lr if self._recent else None,
            samples_per_s=samples_per_s,
            eta_s=self._eta_s(samples_per_s),
            metrics=self._test_metrics(),
            stages=tuple(self._stages.view(placement) for placement in placements),
        )

    def summary(self, *, weights_sha256: str | None, restarts: int) -> Record:
        """Return the contents of ``summary.json``.

        Times of a stage are shares, 0..1, of all the time its newest worker accounted for.
        ``epochs`` counts passes over the training set and is not whole when the run ended within
        one. ``samples_per_s`` runs from the order to train to the last trained mini-batch, so
        evaluation in between is part of it.
        """
        test_metrics = self._test_metrics()
        wall_s = None
        if self._started_s is not None and self._last_trained_s is not None:
            wall_s = self._last_trained_s - self._started_s
        passes = self.batches / self._work.epoch_batches
        return {
            "method": self._settings.method,
            "seed": self._settings.seed,
            "updates": self.batches,
            "epochs": int(passes) if passes.is_integer() else round(passes, 4),
            "samples": self.samples,
            "final_metrics": test_metrics or self._training_metrics(),
            "final_metrics_of": "test" if test_metrics else "train",
            "wall_s": wall_s,
            "samples_per_s": (self.samples - self._samples_before) / wall_s if wall_s else None,
            "restarts": restarts,
            "mismatches": self.mismatches,
            "staleness": self._stages.staleness(),
            "weights_sha256": weights_sha256,
            "messages_per_batch": self._stages.messages / self.batches if self.batches else None,
            "slowest_stage": self._stages.slowest,
            "stages": self._stages.summary(),
        }

    # -- parts ------------------------------------------------------------------------------

    def _remember(self, result: BatchResult) -> bool:
        """Tell whether ``result`` is new; compare it with what is known if it is not."""
        if not 0 <= result.batch < len(self._losses):
            raise ProtocolError(
                f"result of batch {result.batch}: this run has batches 0..{len(self._losses) - 1}"
            )
        known = self._losses[result.batch]
        if math.isnan(known):
            self._losses[result.batch] = result.loss
            return True
        self.mismatches += known != result.loss
        return False

    def _training_metrics(self) -> dict[str, float]:
        samples = sum(result.samples for result in self._recent)
        if not samples:
            return {}
        sums: dict[str, float] = {}
        for result in self._recent:
            for name, value in {**result.metrics, "loss": result.loss}.items():
                sums[name] = sums.get(name, 0.0) + value * result.samples
        return {name: total / samples for name, total in sums.items()}

    def _test_metrics(self) -> dict[str, float]:
        if not self._evaluations:
            return {}
        latest = self._evaluations[max(self._evaluations)]
        return {**latest.metrics, "loss": latest.loss}

    def _eta_s(self, samples_per_s: float | None) -> float | None:
        if not samples_per_s or not self.batches:
            return None
        samples_per_batch = self.samples / self.batches
        return (self._work.train_batches - self.batches) * samples_per_batch / samples_per_s
