"""Executes the op list of one stage, op by op. It decides nothing.

The list says what comes next, the method which weights it reads, streams bring and take what it
works on. One thread steps a loop; other threads may read its progress and call ``stop_before``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from ..protocol.messages import BatchResult
from ..protocol.schedule import Kind, Op, Schedule, Work, stage_ops
from ..protocol.staleness import Staleness, StalenessCounter
from .boundary import Outbox, Parcel, Value
from .methods import Method
from .scoreboard import EvaluationResult, Scoreboard
from .stage import Stage
from .stopwatch import Stopwatch, Times
from .weights import Weights

__all__ = ["Loop", "Source", "Streams"]


class Source(Protocol):
    """Where a loop takes parcels from: any ``Inbox``, and one whose waiting can be cut short."""

    def take(self, op: Op) -> Parcel | None:
        """Return the parcel for ``op``, waiting for it; None if it will never come.

        None is allowed only for a forward that ``Loop.stop_before`` has cut off.
        """
        ...

    def ready(self, op: Op) -> bool:
        """Tell whether ``take(op)`` would return at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """The ends of streams that one stage holds; None where it has no such neighbour.

    Attributes:
        inputs: the feed's inputs on stage 0, activations from upstream elsewhere.
        targets: the feed's targets; on the last stage.
        activations: to the next stage; on all but the last.
        gradients_in: from the next stage; on all but the last.
        gradients_out: to the previous stage; on all but the first.
    """

    inputs: Source
    targets: Source | None = None
    activations: Outbox | None = None
    gradients_in: Source | None = None
    gradients_out: Outbox | None = None


class Loop:
    """One stage at work.

    Attributes:
        last_op: text of the newest finished op; empty before the first.
    """

    def __init__(
        self,
        stage: Stage,
        weights: Weights,
        method: Method,
        streams: Streams,
        *,
        schedule: Schedule,
        work: Work,
        on_batch: Callable[[BatchResult], None] = lambda _: None,
        on_evaluation: Callable[[EvaluationResult], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect the parts; nothing runs yet.

        Args:
            stage: the layers.
            weights: theirs.
            method: chooses what forwards and backwards read.
            streams: the stage's ends.
            schedule: the method's.
            work: how much there is to do.
            on_batch: gets the result of each mini-batch; on the last stage only.
            on_evaluation: gets the result of each evaluation round; on the last stage only.
            clock: monotonic, in seconds.
        """
        self._stage = stage
        self._weights = weights
        self._method = method
        self._streams = streams
        self._schedule = schedule
        self._work = self._wanted_work = work
        self._scoreboard = Scoreboard(
            round_batches=work.evaluation_batches, on_batch=on_batch, on_evaluation=on_evaluation
        )
        self._staleness = StalenessCounter()
        self._sizes: dict[tuple[int, int], tuple[int, int]] = {}  # of micro-batches in flight
        self._steps = 0
        self._ops = stage_ops(schedule, stage.index, stage.stages, work)
        self._next = next(self._ops, None)
        self._watch = Stopwatch(clock)
        self.last_op = ""

    @property
    def current_op(self) -> str:
        """Text of the op that runs, or comes next; empty when the list is finished."""
        return "" if self._next is None else str(self._next)

    @property
    def version(self) -> int:
        """Updates that this stage has done."""
        return self._weights.version

    @property
    def in_flight(self) -> int:
        """Micro-batches between their forward and their backward."""
        return self._stage.in_flight

    @property
    def times(self) -> Times:
        """Where the time went so far."""
        return self._watch.times

    @property
    def waiting_for(self) -> str:
        """What the loop waits for right now; empty while it works."""
        return self._watch.waiting_for

    @property
    def staleness(self) -> Staleness:
        """Staleness counted at the ops that really ran."""
        return self._staleness.staleness

    @property
    def done(self) -> bool:
        """Whether the op list is finished; only for the thread that steps."""
        return self._next_op() is None

    def run(self) -> None:
        """Execute the list to its end."""
        while self.step():
            pass

    def step(self) -> bool:
        """Execute the next op, waiting for what it needs.

        Returns:
            False if the list was finished, and nothing was done.
        """
        op = self._next_op()
        if op is None:
            return False
        if self._execute(op):
            self.last_op = str(op)
            self._steps += 1
            self._next = next(self._ops, None)
        else:
            assert self._wanted_work is not self._work, f"{op} will never come, yet is not cut off"
        return True

    def ready(self) -> bool:
        """Tell whether ``step`` would execute an op without waiting for anybody to send."""
        op = self._next_op()
        if op is None:
            return False
        streams = self._streams
        needs: list[Source | None] = []
        if op.kind in (Kind.FORWARD, Kind.EVALUATE):
            needs = [streams.inputs, streams.targets]
        elif op.kind is Kind.BACKWARD:
            needs = [streams.gradients_in]
        return all(source is None or source.ready(op) for source in needs)

    def stop_before(self, batch: int) -> None:
        """Leave out ``batch`` and all later ones; from any one other thread.

        If a ``take`` waits for the forward of such a batch right now, its stream has to free it:
        after this call, let it return None. Evaluations that were due stay due.

        Args:
            batch: at least 1, and later than any that this stage has begun.
        """
        self._wanted_work = self._wanted_work.stopped_before(batch)

    def _next_op(self) -> Op | None:
        work = self._wanted_work
        if work is not self._work:
            assert all(batch < work.train_batches for batch, _ in self._sizes), (
                f"stop before {work.train_batches}, but in flight are {list(self._sizes)}"
            )
            # The shorter list begins with all that was done so far; see ``stage_ops``.
            ops = stage_ops(self._schedule, self._stage.index, self._stage.stages, work)
            self._ops = islice(ops, self._steps, None)
            self._next = next(self._ops, None)
            self._work = work
        return self._next

    def _execute(self, op: Op) -> bool:
        """Run ``op``; return False if it was cut off while waiting for its parcels."""
        if op.kind is Kind.FORWARD:
            return self._forward(op)
        if op.kind is Kind.BACKWARD:
            return self._backward(op)
        if op.kind is Kind.UPDATE:
            return self._update(op)
        return self._evaluate(op)

    def _forward(self, op: Op) -> bool:
        taken = self._take(op)
        if taken is None:
            return False
        parcel, targets = taken
        self._sizes[op.batch, op.micro] = parcel.samples, parcel.batch_samples
        with self._reading(op):
            with self._watch.timed("forward_s"):
                outputs = self._stage.forward(op, _value(parcel))
                if targets is not None:
                    share = parcel.samples / parcel.batch_samples
                    score = self._stage.score(op, outputs, _value(targets), share)
                    self._scoreboard.trained(score, parcel.samples)
            # Before weights change: what is sent may be a view of a weight.
            self._send(op, outputs, parcel)
        return True

    def _backward(self, op: Op) -> bool:
        stage, streams = self._stage, self._streams
        samples, batch_samples = self._sizes.pop((op.batch, op.micro))
        gradients: Value | None = None
        if streams.gradients_in is not None:
            with self._watch.waiting("downstream", f"{op} from stage {stage.index + 1}"):
                parcel = streams.gradients_in.take(op)
            assert parcel is not None, f"{op} is owed by stage {stage.index + 1}"
            gradients = parcel.value
        with self._reading(op):
            with self._watch.timed("backward_s"):
                gradients = stage.backward(op, gradients)
            # At once: a neighbour waits for it.
            if streams.gradients_out is not None:
                with self._watch.waiting("upstream", f"room for {op} to stage {stage.index - 1}"):
                    streams.gradients_out.put(Parcel(op, gradients, samples, batch_samples))
            self._weights.collect_gradients()
        return True

    def _update(self, op: Op) -> bool:
        lr = self._weights.lr
        with self._watch.timed("update_s"):
            self._weights.step()
        if self._stage.is_last:
            self._scoreboard.updated(op.batch, lr)
        return True

    def _evaluate(self, op: Op) -> bool:
        taken = self._take(op)
        if taken is None:
            return False
        parcel, targets = taken
        with self._watch.timed("evaluate_s"):
            outputs = self._stage.evaluate(op, _value(parcel))
            if targets is not None:
                score = self._stage.score(op, outputs, _value(targets))
                self._scoreboard.evaluated(op, score, parcel.samples)
        self._send(op, outputs, parcel)
        return True

    def _take(self, op: Op) -> tuple[Parcel, Parcel | None] | None:
        """Wait for a forward's input and, on the last stage, its targets."""
        stage, streams = self._stage, self._streams
        if stage.is_first:
            with self._watch.waiting("feed", f"inputs of {op}"):
                parcel = streams.inputs.take(op)
        else:
            with self._watch.waiting("upstream", f"{op} from stage {stage.index - 1}"):
                parcel = streams.inputs.take(op)
        if parcel is None or streams.targets is None:
            return None if parcel is None else (parcel, None)
        with self._watch.waiting("feed", f"targets of {op}"):
            targets = streams.targets.take(op)
        if targets is None:
            return None
        sizes = {(part.op, part.samples, part.batch_samples) for part in (parcel, targets)}
        assert len(sizes) == 1, f"inputs and targets do not belong together: {sizes}"
        return parcel, targets

    def _send(self, op: Op, outputs: Value, parcel: Parcel) -> None:
        """Send a forward's output on, on all but the last stage."""
        if self._streams.activations is not None:
            with self._watch.waiting(
                "downstream", f"room for {op} to stage {self._stage.index + 1}"
            ):
                self._streams.activations.put(
                    Parcel(op, outputs, parcel.samples, parcel.batch_samples)
                )

    @contextmanager
    def _reading(self, op: Op) -> Generator[None]:
        """Let the body see the weights that the method chooses for ``op``."""
        with self._watch.timed("predict_s"):
            self._method.prepare(self._weights, op, self._stage.index)
        self._staleness.record(op, self._weights.version)
        yield
        with self._watch.timed("predict_s"):
            self._weights.restore()


def _value(parcel: Parcel) -> Value:
    assert parcel.value is not None, f"{parcel.op} came without a value"
    return parcel.value
