"""Folds the counters that workers report about themselves; no clocks, no files.

``metrics.py`` owns what is true of the run as a whole; here is what is true of one stage: where
its time goes, how stale its weights were, how much memory it took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..protocol.messages import Progress, SnapshotWritten, StageDone, StageView

__all__ = ["Placement", "Record", "StageMetrics"]

Record: TypeAlias = dict[str, Any]
"""Plain values under stable names, ready for JSON."""

_WORK_TIMES = ("forward_s", "backward_s", "predict_s", "update_s", "evaluate_s")
_WAIT_TIMES = ("wait_upstream_s", "wait_downstream_s", "wait_feed_s")
_TIMES = (*_WORK_TIMES, *_WAIT_TIMES)
_PEAKS = ("peak_memory_bytes", "peak_activations_log_bytes", "peak_gradients_log_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one stage runs at the moment, as the coordinator's state machine knows it."""

    stage: int
    host: str
    pid: int
    incarnation: int
    state: str


class StageMetrics:
    """What the stages say of themselves, newest report first; all by stage number.

    Args:
        layer_counts: layers per stage, in order.
    """

    def __init__(self, layer_counts: Sequence[int]) -> None:
        self._layer_counts = tuple(layer_counts)
        self._progress: dict[int, Progress] = {}
        self._wait_shares: dict[int, float] = {}
        self._done: dict[int, StageDone] = {}
        self._snapshot_bytes: dict[int, int] = {}

    def progress(self, message: Progress) -> None:
        """Take over one worker's counters; those of an incarnation already replaced are old."""
        known = self._progress.get(message.stage)
        if known is not None and message.incarnation < known.incarnation:
            return
        is_same_worker = known is not None and message.incarnation == known.incarnation
        self._wait_shares[message.stage] = _wait_share(known if is_same_worker else None, message)
        self._progress[message.stage] = message

    def snapshot_written(self, message: SnapshotWritten) -> None:
        """Note the size of a stage's newest snapshot."""
        self._snapshot_bytes[message.stage] = message.size_bytes

    def done(self, message: StageDone) -> None:
        """Take over what a stage counted about itself when it finished."""
        self._done[message.stage] = message

    @property
    def messages(self) -> int:
        """Control messages sent by all workers together."""
        return sum(progress.messages for progress in self._progress.values())

    @property
    def slowest(self) -> int | None:
        """The stage that works longest, which sets the pace of all; None before any worked."""
        busy_s = {stage: _seconds(self._progress[stage], _WORK_TIMES) for stage in self._stages}
        return max(busy_s, key=busy_s.__getitem__) if any(busy_s.values()) else None

    def view(self, placement: Placement) -> StageView:
        """Return one stage's line; its counters are 0 until its present worker has reported."""
        version, in_flight, wait_share = 0, 0, 0.0
        progress = self._progress.get(placement.stage)
        if progress is not None and progress.incarnation == placement.incarnation:
            version, in_flight = progress.version, progress.in_flight
            wait_share = self._wait_shares[placement.stage]
        return StageView(
            stage=placement.stage,
            host=placement.host,
            pid=placement.pid,
            incarnation=placement.incarnation,
            state=placement.state,
            version=version,
            last_batch=version - 1,  # under every method one batch makes one update
            in_flight=in_flight,
            wait_share=wait_share,
        )

    def records(self, wall_s: float | None) -> list[Record]:
        """Return one record of kind ``stage`` each.

        Times are sums, and peaks maxima, since the worker started; ``snapshot_bytes`` is the size
        of the newest snapshot file, 0 before the first.
        """
        return [
            {
                "kind": "stage",
                "wall_s": wall_s,
                "stage": progress.stage,
                "incarnation": progress.incarnation,
                "version": progress.version,
                "in_flight": progress.in_flight,
                **{name: getattr(progress, name) for name in _TIMES},
                "log_bytes": progress.log_bytes,
                **self._sizes(progress),
                "messages": progress.messages,
                "dropped": progress.dropped,
            }
            for progress in map(self._progress.__getitem__, self._stages)
        ]

    def staleness(self) -> list[Record]:
        """Return how many updates old the weights were, measured by each stage that is done."""
        return [
            {
                "stage": stage,
                "forward": done.forward_staleness,
                "forward_max": done.forward_staleness_max,
                "backward": done.backward_staleness,
                "backward_max": done.backward_staleness_max,
            }
            for stage, done in sorted(self._done.items())
        ]

    def summary(self) -> list[Record]:
        """Return each stage's shares of time, 0..1 of what its newest worker booked, and more."""
        return [
            {
                "stage": stage,
                "layers": self._layer_counts[stage],
                **_shares(self._progress[stage]),
                **self._sizes(self._progress[stage]),
                "messages": self._progress[stage].messages,
                "dropped": self._progress[stage].dropped,
            }
            for stage in self._stages
        ]

    @property
    def _stages(self) -> list[int]:
        return sorted(self._progress)

    def _sizes(self, progress: Progress) -> dict[str, int]:
        peaks = {name: getattr(progress, name) for name in _PEAKS}
        return {**peaks, "snapshot_bytes": self._snapshot_bytes.get(progress.stage, 0)}


def _seconds(progress: Progress, names: Sequence[str]) -> float:
    return sum(getattr(progress, name) for name in names)


def _shares(progress: Progress) -> dict[str, float]:
    total_s = _seconds(progress, _TIMES) or 1.0
    shares = {name.removesuffix("_s"): getattr(progress, name) / total_s for name in _TIMES}
    return {**shares, "idle": _seconds(progress, _WAIT_TIMES) / total_s}


def _wait_share(before: Progress | None, after: Progress) -> float:
    """Return the share of waiting, 0..1, between two reports, by the worker's own clock."""
    waited_s = _seconds(after, _WAIT_TIMES)
    booked_s = _seconds(after, _TIMES)
    if before is not None:
        waited_s -= _seconds(before, _WAIT_TIMES)
        booked_s -= _seconds(before, _TIMES)
    if booked_s <= 0.0:
        # Time is booked when an op or a wait ends: one of the two fills the whole interval.
        return 1.0 if after.waiting_for else 0.0
    return min(max(waited_s / booked_s, 0.0), 1.0)
