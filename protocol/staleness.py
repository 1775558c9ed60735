"""How many updates lie between any two ops of one stage. Pure: no tensors, no clocks, no I/O.

A *version* counts the updates that a stage's weights have seen. In every schedule batch i is
updated after exactly i others, so version i is what batch i would read if nothing were in flight,
and all numbers here are distances from it:

* *staleness* is how far behind it the weights are when a batch reads them;
* the *horizon* s is how far ahead prediction has to look from there: over the updates that it is
  behind, and where a method aims at a later moment, over those of later batches until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from .methods import Horizon
from .schedule import Kind, Op, Schedule, Work

__all__ = [
    "Staleness",
    "StalenessCounter",
    "Tallies",
    "behind",
    "later_backwards",
    "measure",
    "predicted",
    "with_versions",
]


Tallies: TypeAlias = tuple[tuple[int, int, int], tuple[int, int, int]]
"""Count, sum and maximum of the staleness of forwards, then of backwards."""


def behind(op: Op, version: int) -> int:
    """Return how many updates of earlier batches are missing when a forward or backward runs.

    Args:
        op: a forward or a backward.
        version: updates the stage's weights have seen, ``0 <= version <= op.batch``.
    """
    assert op.kind in (Kind.FORWARD, Kind.BACKWARD), f"{op} is neither a forward nor a backward"
    assert 0 <= version <= op.batch, f"{op} at version {version} comes after its own update"
    return op.batch - version


def later_backwards(stage: int, horizon: Horizon) -> int:
    """Return how many later micro-batches stage k sends back before one of its is back on stage 0.

    In a packed pipeline of equal stages that is ``floor(k * b / (f + b))``, with f and b how long a
    forward and a backward last. SpecTrain's paper counts slots of one op each, ``k // 2``; a
    backward has twice the work of a forward as a rule, ``2 * k // 3``. A ratio that was measured
    would differ from run to run, and so would the weights.

    While the pipeline drains, fewer than that are left. This is not taken into account: where a
    run ends is not known before.

    Args:
        stage: k, from 0 at the input side.
        horizon: "paper" for b = f, "exact" for b = 2f.
    """
    return stage // 2 if horizon == "paper" else 2 * stage // 3


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
            self._forward.add(behind(op, version))
        elif op.kind is Kind.BACKWARD:
            self._backward.add(behind(op, version))

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

    With ``d = N - 1 - k`` micro-batches in flight behind it, the update of a batch is missed by the
    d forwards that follow the batch's last one, or by all that there are. A backward comes after
    all earlier updates and misses none; nor does anything in the flushed schedule, which updates
    only when the pipeline is empty.
    """
    if schedule is Schedule.FLUSHED:
        return Staleness()
    batches, delay = work.train_batches, stages - 1 - stage
    missed, following, batch = 0, 0, batches - 1
    while batch >= 0 and following < delay:  # from the end, as long as fewer than d follow
        missed += following
        following += work.microbatches_of(batch)
        batch -= 1
    missed += delay * (batch + 1)
    return Staleness(
        forward_mean=missed / _forwards(work),
        forward_max=max(_updates_within(delay, batch, work) for batch in _busiest(delay, work)),
    )


def _forwards(work: Work) -> int:
    """Return the forwards of the whole run on one stage."""
    epochs = work.train_batches // work.epoch_batches
    return (work.train_batches - epochs) * work.microbatches + epochs * work.last_microbatches


def _busiest(delay: int, work: Work) -> Iterable[int]:
    """Return batches, one of which has the most batches end within d forwards of its own end.

    All epochs are alike, and so are their batches as long as the end of the epoch is out of reach.
    """
    end = min(work.epoch_batches, work.train_batches)
    return {0, *range(max(0, end - 1 - delay), end)}


def _updates_within(delay: int, batch: int, work: Work) -> int:
    """Return how many batches end within d forwards, counted from and including the end of one.

    All of them are missed by the last of these forwards. No forward comes after the last batch.
    """
    updates, forwards = 0, 0
    while forwards < delay and batch + 1 < work.train_batches:
        updates += 1
        batch += 1
        forwards += work.microbatches_of(batch)
    return updates


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
