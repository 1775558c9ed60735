"""Runs the op lists of all stages on paper. Pure: time is arithmetic here, nothing waits or sleeps.

It answers what a schedule does before any process is started: whether it can hang, how many
batches are in flight, which version every op reads, when each stage has nothing to do. It trains
nothing and knows nothing of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .errors import SpectrainError
from .schedule import Kind, Op
from .staleness import with_versions

__all__ = ["LEAST_CAPACITY", "DeadlockError", "Durations", "Event", "Timeline", "simulate"]

LEAST_CAPACITY = 2
"""Parcels a link must be able to hold, with any number of stages and of batches.

A stage that is one step ahead sends the next forward before an evaluation round that its neighbour
wants first; so one parcel lies unread while another has to pass. Without evaluation 1 is enough.
"""


class DeadlockError(SpectrainError):
    """No stage can go on; the text names for each the op it stopped at and what it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long the ops of one stage take; the defaults count in slots of one forward."""

    forward_s: float = 1.0
    backward_s: float = 1.0
    update_s: float = 0.0
    evaluate_s: float = 1.0

    def of(self, op: Op) -> float:
        """Return the duration of ``op`` in seconds."""
        return {
            Kind.FORWARD: self.forward_s,
            Kind.BACKWARD: self.backward_s,
            Kind.UPDATE: self.update_s,
            Kind.EVALUATE: self.evaluate_s,
        }[op.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One op as it happened; times in seconds since the start of the run."""

    stage: int
    op: Op
    start_s: float
    end_s: float
    version: int  # updates that the stage's weights had seen at the start


@dataclass(frozen=True, slots=True)
class Timeline:
    """All that happened, per stage in the order of its op list."""

    stages: tuple[tuple[Event, ...], ...]

    @property
    def end_s(self) -> float:
        """When the last stage finished its last op."""
        return max((events[-1].end_s for events in self.stages if events), default=0.0)

    def event(self, stage: int, op: Op) -> Event:
        """Return when and with what ``stage`` did ``op``; raise ``KeyError`` if it did not."""
        for event in self.stages[stage]:
            if event.op == op:
                return event
        raise KeyError(f"stage {stage} has no {op}")

    def versions(self, op: Op) -> tuple[int, ...]:
        """Return the version that each stage had when it did ``op``."""
        return tuple(self.event(stage, op).version for stage in range(len(self.stages)))

    def idle_s(self, stage: int) -> float:
        """Return how long ``stage`` had nothing to do, from the start to the end of the run.

        Waiting for room on a full link counts as idle too.
        """
        return self.end_s - sum(event.end_s - event.start_s for event in self.stages[stage])

    def in_flight_peak(self, stage: int) -> int:
        """Return how many (micro-)batches at most were past their forward, before the backward."""
        count = peak = 0
        for event in self.stages[stage]:
            count += (event.op.kind is Kind.FORWARD) - (event.op.kind is Kind.BACKWARD)
            peak = max(peak, count)
        return peak

    def picture(self, slots: int = 30, slot_s: float = 1.0) -> str:
        """Draw the first ``slots`` slots of ``slot_s`` seconds, one line per stage.

        A slot shows the op that runs in its middle, once by name and then as ``=`` while it lasts;
        ``.`` is an idle slot. What is too short for that, such as an update, is left out.
        """
        slots = min(slots, math.ceil(self.end_s / slot_s))
        rows = [_cells(events, slots, slot_s) for events in self.stages]
        width = max((len(cell) for row in rows for cell in row), default=1)
        label = len(str(len(rows) - 1))
        return "\n".join(
            f"stage {stage:>{label}} |" + "".join(f" {cell:<{width}}" for cell in row).rstrip()
            for stage, row in enumerate(rows)
        )


def simulate(
    op_lists: Sequence[Iterable[Op]],
    durations: Sequence[Durations],
    *,
    transfer_s: float = 0.0,
    capacity: int | None = None,
) -> Timeline:
    """Run every stage's op list in its own order, each op as early as its inputs allow.

    A forward or evaluation needs the parcel of the same op from the stage before, a backward that
    of the stage after. Parcels are taken by name, so one sent later may be taken earlier. A feed
    that is never late stands before the first and behind the last stage.

    Args:
        op_lists: of every stage, from the input side.
        durations: of every stage's ops.
        transfer_s: from the end of an op until its parcel has reached the neighbour.
        capacity: parcels that a link holds, one link per pair of neighbours and direction; the
            sender of one more stands still until the receiver takes one, in any order, to work
            on it. At least 1; ``LEAST_CAPACITY`` is always enough; None is without limit.

    Raises:
        DeadlockError: the lists do not fit together, or not through links of this capacity.
    """
    count = len(op_lists)
    assert len(durations) == count, f"{len(durations)} durations for {count} stages"
    assert capacity is None or capacity >= 1, f"capacity {capacity} lets nothing through"
    links = {
        (sender, receiver): _Link(capacity, transfer_s)
        for sender in range(count)
        for receiver in (sender - 1, sender + 1)
        if 0 <= receiver < count
    }
    events: list[list[Event]] = [[] for _ in range(count)]
    runs = [_run(k, op_lists[k], durations[k], links, events[k]) for k in range(count)]
    # Every time is a sum or maximum of earlier ones, so the order in which stages are looked at
    # changes nothing: in turns, each goes as far as it can.
    stuck: list[str | None] = []
    while True:
        before, stuck = stuck, [next(run, None) for run in runs]
        if not any(stuck):
            return Timeline(tuple(map(tuple, events)))
        if stuck == before:
            raise DeadlockError(_report(stuck))


@dataclass(slots=True)
class _Link:
    """Parcels on their way from one stage to its neighbour, by the op that will take them."""

    capacity: int | None
    transfer_s: float
    sent: int = 0
    arrivals_s: dict[Op, float] = field(default_factory=dict[Op, float])
    takings_s: list[float] = field(default_factory=list[float])

    def room_s(self) -> float | None:
        """Return since when there is room for one more parcel; None while there is not."""
        if self.capacity is None or self.sent < self.capacity:
            return 0.0
        makes_room = self.sent - self.capacity  # the taking that leaves a place for the next
        return self.takings_s[makes_room] if makes_room < len(self.takings_s) else None

    def put(self, op: Op, now_s: float) -> None:
        self.sent += 1
        self.arrivals_s[op] = now_s + self.transfer_s

    def take(self, op: Op, now_s: float) -> None:
        del self.arrivals_s[op]
        self.takings_s.append(now_s)


def _run(
    stage: int,
    ops: Iterable[Op],
    durations: Durations,
    links: Mapping[tuple[int, int], _Link],
    events: list[Event],
) -> Iterator[str]:
    """Do op after op; yield what the stage waits for, for as long as it has to."""
    done: set[Op] = set()
    free_s = 0.0
    for op, version in with_versions(ops):
        while (own := _own_need(op)) and own not in done:
            yield f"{op}: waits for its own {own}"
        source, target = _route(op, stage)
        start_s = free_s
        if inbox := links.get((source, stage)):
            while op not in inbox.arrivals_s:
                yield f"{op}: waits for {op} from stage {source}"
            start_s = max(free_s, inbox.arrivals_s[op])
            inbox.take(op, start_s)
        free_s = start_s + durations.of(op)
        events.append(Event(stage=stage, op=op, start_s=start_s, end_s=free_s, version=version))
        done.add(op)
        if outbox := links.get((stage, target)):
            while (room_s := outbox.room_s()) is None:
                unread = ", ".join(map(str, outbox.arrivals_s))
                yield f"{op}: waits for room at stage {target}, which has not taken {unread}"
            free_s = max(free_s, room_s)
            outbox.put(op, free_s)


def _own_need(op: Op) -> Op | None:
    """Return the op of the same stage that has to come before ``op`` in any schedule."""
    if op.kind is Kind.BACKWARD:
        return replace(op, kind=Kind.FORWARD)
    if op.kind is Kind.UPDATE:
        return replace(op, kind=Kind.BACKWARD)
    return None


def _route(op: Op, stage: int) -> tuple[int, int]:
    """Return from which stage the input of ``op`` comes and to which its output goes.

    Beyond either end of the pipeline is no stage, so no link; an update stays where it is.
    """
    if op.kind is Kind.UPDATE:
        return stage, stage
    if op.kind is Kind.BACKWARD:
        return stage + 1, stage - 1
    return stage - 1, stage + 1


def _report(stuck: Sequence[str | None]) -> str:
    lines = (
        f"  stage {stage} stuck at {what}" if what else f"  stage {stage} finished"
        for stage, what in enumerate(stuck)
    )
    return "\n".join(["no stage can go on:", *lines])


def _cells(events: Iterable[Event], slots: int, slot_s: float) -> list[str]:
    """Return what one stage does in the middle of each slot."""
    cells = ["."] * slots
    for event in events:
        first = max(0, math.ceil(event.start_s / slot_s - 0.5))
        end = min(slots, math.ceil(event.end_s / slot_s - 0.5))
        for slot in range(first, end):
            cells[slot] = str(event.op) if slot == first else "="
    return cells
