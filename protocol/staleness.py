"""How many updates lie between any two ops of one stage. Pure: no tensors, no clocks, no I/O.

A *version* counts the updates that a stage's weights have seen. In every schedule batch i is
updated after exactly i others, so version i is what batch i would read if nothing were in flight,
and all numbers here are distances from it:

* *staleness* is how far behind it the weights are when a batch reads them;
* the *horizon* s is how far ahead prediction has to look from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from .schedule import Kind, Op, Schedule, Work

__all__ = [
    "Staleness",
    "StalenessCounter",
    "Tallies",
    "horizon",
    "measure",
    "predicted",
    "with_versions",
]


Tallies: TypeAlias = tuple[tuple[int, int, int], tuple[int, int, int]]
"""Count, sum and maximum of the staleness of forwards, then of backwards."""


def horizon(op: Op, version: int, stage: int) -> int:
    """Return s, the number of updates that the weights read by ``op`` should be predicted ahead.

    SpecTrain (arXiv 1809.02839) aims every pass of a batch at one moment, the end of the batch's
    backward on stage 0. By then stage k has made the updates of all batches before this one, and,
    in the paper's packed timeline of equal slots, those of ``k // 2`` later ones::

        s = (batch - version) + k // 2

    In steady state this is the paper's ``N - 1 - k + k // 2`` for a forward and ``k // 2`` for a
    backward. The first term, counted rather than assumed, also holds in warm-up. The second is
    the paper's convention and is kept while the pipeline drains, although fewer than ``k // 2``
    later batches are left then.

    Args:
        op: a forward or a backward of the asynchronous schedule; the flushed one has no stale
            weights and predicts nothing.
        version: updates the stage's weights have seen, ``0 <= version <= op.batch``.
        stage: k, from 0 at the input side.
    """
    return _behind(op, version) + stage // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Updates that one stage's ops missed of those before their own batch's; 0 is serial SGD."""

    forward_mean: float = 0.0
    forward_max: int = 0
    backward_mean: float = 0.0
    backward_max: int = 0


class StalenessCounter:
    """Counts staleness op by op, the same way for a list on paper and for a worker's real work."""

    def __init__(self, tallies: Tallies = ((0, 0, 0), (0, 0, 0))) -> None:
        """Count on from what another counter had; from nothing by default."""
        forward, backward = tallies
        self._forward = _Tally(*forward)
        self._backward = _Tally(*backward)

    @property
    def tallies(self) -> Tallies:
        """What was counted so far, for another counter to go on from."""
        return self._forward.values, self._backward.values

    def record(self, op: Op, version: int) -> None:
        """Count ``op`` as read with weights that have seen ``version`` updates.

        Updates and evaluations read no weights on behalf of a batch and are passed over.
        """
        if op.kind is Kind.FORWARD:
            self._forward.add(_behind(op, version))
        elif op.kind is Kind.BACKWARD:
            self._backward.add(_behind(op, version))

    @property
    def staleness(self) -> Staleness:
        """What was counted so far; zeros before the first op."""
        return Staleness(
            forward_mean=self._forward.mean,
            forward_max=self._forward.largest,
            backward_mean=self._backward.mean,
            backward_max=self._backward.largest,
        )


def with_versions(ops: Iterable[Op]) -> Iterator[tuple[Op, int]]:
    """Pair each op of one stage with the version it finds; an update finds the one it replaces."""
    version = 0
    for op in ops:
        yield op, version
        version += op.kind is Kind.UPDATE


def measure(ops: Iterable[Op]) -> Staleness:
    """Count the staleness of one stage's op list; time grows with the list, memory does not."""
    counter = StalenessCounter()
    for op, version in with_versions(ops):
        counter.record(op, version)
    return counter.staleness


def predicted(schedule: Schedule, stage: int, stages: int, work: Work) -> Staleness:
    """Return what ``measure`` would count for this stage, without walking its op list.

    With ``d = N - 1 - k`` batches in flight behind it, the forward of batch i misses
    ``min(i, d)`` updates: none for the first batch, one more for each that fills the pipeline,
    then d for good. A backward comes right before its own update and misses none; nor does
    anything in the flushed schedule, which updates only when the pipeline is empty.
    """
    if schedule is Schedule.FLUSHED:
        return Staleness()
    batches = work.train_batches
    delay = min(stages - 1 - stage, batches)  # a run shorter than the pipeline never fills it
    missed = delay * (delay - 1) // 2 + delay * (batches - delay)
    return Staleness(forward_mean=missed / batches, forward_max=min(delay, batches - 1))


def _behind(op: Op, version: int) -> int:
    assert op.kind in (Kind.FORWARD, Kind.BACKWARD), f"{op} is neither a forward nor a backward"
    assert 0 <= version <= op.batch, f"{op} at version {version} comes after its own update"
    return op.batch - version


class _Tally:
    def __init__(self, count: int, total: int, largest: int) -> None:
        self._count = count
        self._total = total
        self.largest = largest

    @property
    def values(self) -> tuple[int, int, int]:
        return self._count, self._total, self.largest

    def add(self, value: int) -> None:
        self._count += 1
        self._total += value
        self.largest = max(self.largest, value)

    @property
    def mean(self) -> float:
        return self._total / self._count if self._count else 0.0
