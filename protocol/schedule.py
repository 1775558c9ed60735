"""The op list of each stage, as data. Pure: no clocks, no tensors, no sockets.

A schedule says in which order one stage works; results depend on these lists alone, never on
timing. Ops have a short text form that parses back (``F12``, ``B7``, ``U7``, ``E0.3``), so that
logs, golden files and error messages speak one language.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice

__all__ = ["Kind", "Op", "Schedule", "Work", "stage_ops"]


class Kind(str, Enum):
    """What a stage does in one op.

    ``FORWARD`` reads a batch's activations and sends its own on; ``BACKWARD`` turns the gradient
    of its output into that of its input; ``UPDATE`` is one optimizer step; ``EVALUATE`` is a
    forward with clean weights that trains nothing.
    """

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"
    EVALUATE = "E"


class Schedule(str, Enum):
    """How a stage interleaves forwards and backwards.

    ``ASYNCHRONOUS``: 1F1B over the micro-batches of all batches in a row, without flush; a batch is
    updated after its last backward.
    ``FLUSHED``: 1F1B over the micro-batches of one batch, then one update for all of them.
    """

    ASYNCHRONOUS = "1f1b"
    FLUSHED = "1f1b-flush"


_TEXT = re.compile(r"([FBUE])(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class Op:
    """One step of one stage.

    ``batch`` counts mini-batches of the whole run from 0; for ``EVALUATE`` it counts evaluation
    rounds. ``micro`` counts micro-batches within the batch, or batches within the round.
    """

    kind: Kind
    batch: int
    micro: int = 0

    def __str__(self) -> str:
        part = f".{self.micro}" if self.micro or self.kind is Kind.EVALUATE else ""
        return f"{self.kind.value}{self.batch}{part}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read the text form back; raise ``ValueError`` with the text if it is none."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not an op: {text!r} (expected F12, B7, U7 or E0.3)")
        kind, batch, micro = match.groups()
        return cls(Kind(kind), int(batch), int(micro or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How much there is to do, the same for every stage.

    Attributes:
        train_batches: mini-batches of the whole run, at least 1.
        epoch_batches: mini-batches of one epoch, at least 1.
        evaluation_batches: batches of one evaluation round; 0 where there is no test set.
        microbatches: micro-batches of a full mini-batch.
        last_microbatches: micro-batches of an epoch's last, smaller mini-batch, which may hold
            fewer samples than ``microbatches``.
    """

    train_batches: int
    epoch_batches: int
    evaluation_batches: int = 0
    microbatches: int = 1
    last_microbatches: int = 1

    def __post_init__(self) -> None:
        least = min(
            self.train_batches, self.epoch_batches, self.microbatches, self.last_microbatches
        )
        if least < 1 or self.evaluation_batches < 0:
            raise ValueError(f"a run needs at least one batch of every kind: {self}")

    def microbatches_of(self, batch: int) -> int:
        """Return how many micro-batches ``batch`` is split into."""
        last_of_epoch = (batch + 1) % self.epoch_batches == 0
        return self.last_microbatches if last_of_epoch else self.microbatches

    def evaluates_after(self, batch: int) -> bool:
        """Tell whether an evaluation round follows the update of ``batch``."""
        last = batch == self.train_batches - 1
        return self.evaluation_batches > 0 and (last or (batch + 1) % self.epoch_batches == 0)

    def epoch_of(self, batch: int) -> int:
        """Return the epoch, from 0, that ``batch`` belongs to; also its evaluation round."""
        return batch // self.epoch_batches

    def stopped_before(self, batch: int) -> Work:
        """Return the same work without ``batch`` and all later ones; ``batch`` is at least 1."""
        return replace(self, train_batches=min(self.train_batches, batch))


def stage_ops(
    schedule: Schedule, stage: int, stages: int, work: Work, *, updates: int = 0
) -> Iterator[Op]:
    """Yield the ops of one stage in order.

    Stopping early only leaves ops out: the list for ``work.stopped_before(b)`` is this list
    without the ops of batches from ``b`` on (and with an evaluation at its own end).

    Args:
        schedule: the order of forwards and backwards.
        stage: 0 is the input side, ``0 <= stage < stages``.
        stages: how many stages the pipeline has, N.
        work: how much there is to do.
        updates: begin right after so many updates of this stage instead of at the start.

    Raises:
        ValueError: ``stage`` is not one of the ``stages``.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not one of the {stages} stages 0..{stages - 1}")
    if schedule is Schedule.FLUSHED:
        return _flushed(stage, stages, work, updates)
    return _asynchronous(stage, stages, work, updates)


def _asynchronous(stage: int, stages: int, work: Work, updates: int) -> Iterator[Op]:
    warm_up = stages - 1 - stage
    forwards = (
        Op(Kind.FORWARD, batch, micro)
        for batch in range(updates, work.train_batches)
        for micro in range(work.microbatches_of(batch))
    )
    begun = list(islice(forwards, warm_up))
    if updates:
        yield from _evaluation(updates - 1, work)
    else:
        yield from begun
    for batch in range(updates, work.train_batches):
        for micro in range(work.microbatches_of(batch)):
            yield from islice(forwards, 1)
            yield Op(Kind.BACKWARD, batch, micro)
        yield Op(Kind.UPDATE, batch)
        yield from _evaluation(batch, work)


def _flushed(stage: int, stages: int, work: Work, updates: int) -> Iterator[Op]:
    if updates:
        yield from _evaluation(updates - 1, work)
    for batch in range(updates, work.train_batches):
        count = work.microbatches_of(batch)
        warm_up = min(stages - 1 - stage, count)
        for micro in range(warm_up):
            yield Op(Kind.FORWARD, batch, micro)
        for micro in range(count):
            ahead = micro + warm_up
            if ahead < count:
                yield Op(Kind.FORWARD, batch, ahead)
            yield Op(Kind.BACKWARD, batch, micro)
        yield Op(Kind.UPDATE, batch)
        yield from _evaluation(batch, work)


def _evaluation(batch: int, work: Work) -> Iterator[Op]:
    if work.evaluates_after(batch):
        for index in range(work.evaluation_batches):
            yield Op(Kind.EVALUATE, work.epoch_of(batch), index)
