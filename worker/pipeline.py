"""All stages of one run in one process and one thread: what real processes are compared with.

The loops, stages and weights are the real ones; only streams stay in memory. Results depend on
the op lists alone, so a run here and one over many hosts end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ..protocol.job import Job
from ..protocol.messages import BatchResult
from ..protocol.schedule import Op, Schedule, Work
from ..protocol.settings import Settings
from ..protocol.staleness import Staleness
from .boundary import Parcel, Value, copied
from .build import Parts, build_stage
from .loop import Loop, Streams
from .memory_stream import memory_pair
from .scoreboard import EvaluationResult

__all__ = ["Feed", "Outcome", "connect", "drive", "run_in_one_process"]


class FedPart(Protocol):
    """One end's data of one op."""

    @property
    def value(self) -> Value:
        """Inputs or targets."""
        ...

    @property
    def samples(self) -> int:
        """Samples of this micro-batch."""
        ...

    @property
    def batch_samples(self) -> int:
        """Samples of the whole mini-batch."""
        ...


class Feed(Protocol):
    """Where batches come from: the coordinator's feed, or any other with this face."""

    @property
    def work(self) -> Work:
        """How much there is to do."""
        ...

    def part(self, part: str, op: Op) -> FedPart:
        """Return the "inputs" or "targets" of a forward or an evaluation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run leaves behind.

    Attributes:
        batches: results of all mini-batches, in order.
        evaluations: results of all evaluation rounds, in order.
        state: clean weights and buffers under the keys of the model's ``state_dict``.
        staleness: measured, per stage.
    """

    batches: list[BatchResult] = field(default_factory=list[BatchResult])
    evaluations: list[EvaluationResult] = field(default_factory=list[EvaluationResult])
    state: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    staleness: list[Staleness] = field(default_factory=list[Staleness])


def run_in_one_process(
    job: Job,
    settings: Settings,
    feed: Feed,
    layer_counts: Sequence[int],
    *,
    on_batch: Callable[[BatchResult], None] = lambda _: None,
    on_evaluation: Callable[[EvaluationResult], None] = lambda _: None,
) -> Outcome:
    """Train ``job`` to the end of the feed's work.

    Args:
        job: the user's.
        settings: of the run.
        feed: its batches.
        layer_counts: layers per stage, in order.
        on_batch: told of each mini-batch when it is done.
        on_evaluation: told of each evaluation round when it is done.

    Raises:
        JobError: the job's functions fail, or the method cannot work with the optimizer.
        NonFiniteError: a loss is NaN or infinite.
    """
    parts = [
        build_stage(job, settings, layer_counts, index, device=settings.device)
        for index in range(len(layer_counts))
    ]
    outcome = Outcome()

    def note_batch(result: BatchResult) -> None:
        outcome.batches.append(result)
        on_batch(result)

    def note_evaluation(result: EvaluationResult) -> None:
        outcome.evaluations.append(result)
        on_evaluation(result)

    loops = connect(
        parts,
        feed,
        schedule=settings.schedule,
        on_batch=note_batch,
        on_evaluation=note_evaluation,
    )
    drive(loops)
    for part, loop in zip(parts, loops, strict=True):
        outcome.state.update(part.weights.clean_state())
        outcome.staleness.append(loop.staleness)
    return outcome


def connect(
    parts: Sequence[Parts],
    feed: Feed,
    *,
    schedule: Schedule,
    on_batch: Callable[[BatchResult], None] = lambda _: None,
    on_evaluation: Callable[[EvaluationResult], None] = lambda _: None,
) -> list[Loop]:
    """Return the loops of all stages, joined by streams in memory.

    Args:
        parts: of all stages, in order.
        feed: batches for the first and the last.
        schedule: the method's.
        on_batch: gets the result of each mini-batch.
        on_evaluation: gets the result of each evaluation round.
    """
    last = len(parts) - 1
    activations = [memory_pair() for _ in range(last)]
    gradients = [memory_pair() for _ in range(last)]
    return [
        Loop(
            part.stage,
            part.weights,
            part.method,
            Streams(
                inputs=activations[index - 1][1] if index > 0 else _FeedInbox(feed, "inputs"),
                targets=_FeedInbox(feed, "targets") if index == last else None,
                activations=activations[index][0] if index < last else None,
                gradients_in=gradients[index][1] if index < last else None,
                gradients_out=gradients[index - 1][0] if index > 0 else None,
            ),
            schedule=schedule,
            work=feed.work,
            on_batch=on_batch,
            on_evaluation=on_evaluation,
        )
        for index, part in enumerate(parts)
    ]


def drive(loops: Sequence[Loop]) -> None:
    """Step the loops in turn, each that can go on, until all are finished."""
    while not all(loop.done for loop in loops):
        stepped = [loop.ready() and loop.step() for loop in loops]
        assert any(stepped), f"stuck after {[loop.last_op for loop in loops]}"


class _FeedInbox:
    """One part of the feed as an inbox; always ready."""

    def __init__(self, feed: Feed, part: str) -> None:
        self._feed = feed
        self._part = part

    def take(self, op: Op) -> Parcel:
        fed = self._feed.part(self._part, op)
        # A layer may work in place, and the feed may keep what it hands out.
        return copied(Parcel(op, fed.value, fed.samples, fed.batch_samples))

    def ready(self, op: Op) -> bool:
        del op
        return True
