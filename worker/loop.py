"""Executes the op list of one stage, op by op. It decides nothing.

The list says what comes next, the method which weights it reads, streams bring and take what it
works on. One thread steps a loop; other threads may read its progress and call ``stop_before``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from ..protocol.messages import BatchResult
from ..protocol.schedule import Kind, Op, Schedule, Work, stage_ops
from ..protocol.staleness import Staleness, StalenessCounter
from .boundary import Parcel, Value
from .intake import Intake
from .methods import Method
from .reading import NEWEST, Ahead
from .restore import Rebuild, resume_streams
from .scoreboard import EvaluationResult, Scoreboard
from .snapshot import Position, Snapshot
from .stage import Stage
from .stopwatch import Stopwatch, Times
from .streams import Source, Streams
from .weights import Weights

__all__ = ["Loop", "Snapshots", "Source", "Streams"]


class Snapshots(Protocol):
    """Who watches a loop in order to take snapshots of its stage."""

    def before_forward(self, op: Op, number: int) -> None:
        """Look at live weights and buffers: ``op`` will read them, and send parcel ``number``."""
        ...

    def after_update(self, position: Callable[[], Position]) -> None:
        """Look at the stage after an update; ``position`` tells all but what is in flight."""
        ...


class Loop:
    """One stage at work."""

    def __init__(
        self,
        stage: Stage,
        weights: Weights,
        method: Method,
        streams: Streams,
        *,
        schedule: Schedule,
        work: Work,
        snapshots: Snapshots | None = None,
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
            snapshots: takes them; None: nobody does.
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
        self._snapshots = snapshots
        self._intake = Intake()
        self._since_update = 0  # ops
        self._rebuild: Rebuild | None = None
        self._ops = stage_ops(schedule, stage.index, stage.stages, work)
        self._next = next(self._ops, None)
        self._watch = Stopwatch(clock)
        self._from_upstream = f"{{}} from stage {stage.index - 1}"
        self._to_upstream = f"room for {{}} to stage {stage.index - 1}"
        self._from_downstream = f"{{}} from stage {stage.index + 1}"
        self._to_downstream = f"room for {{}} to stage {stage.index + 1}"
        self._last: Op | None = None

    @property
    def last_op(self) -> str:
        """Text of the newest finished op; empty before the first."""
        return "" if self._last is None else str(self._last)

    @property
    def current_op(self) -> str:
        """Text of the op that runs, or comes next; empty when the list is finished."""
        if self._rebuild is not None and self._rebuild.next is not None:
            return str(self._rebuild.next.op)
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

    def wants(self, op: Op) -> bool:
        """Tell whether the parcel for ``op`` is still to be taken; from any thread."""
        return self._intake.wants(op)

    def resume(self, snapshot: Snapshot) -> None:
        """Go on where ``snapshot`` was taken; before the first step, and before links are built.

        The stage, its weights and the streams' numbers become those of the snapshot. The first
        steps run the forwards again that were in flight.
        """
        assert self._last is None, f"resumed after {self._last}"
        position = snapshot.position
        self._staleness = StalenessCounter(position.staleness)
        self._intake.resume(position, self._work)
        streams = self._streams
        resume_streams(
            position,
            activations_in=streams.inputs,
            gradients_in=streams.gradients_in,
            activations_out=streams.activations,
            gradients_out=streams.gradients_out,
        )
        self._rebuild = Rebuild(snapshot, self._stage, self._weights)
        self._list_ops()
        self._last = Op(Kind.UPDATE, position.update - 1)

    def run(self) -> None:
        """Execute the list to its end."""
        while self.step():
            pass

    def step(self) -> bool:
        """Execute the next op, waiting for what it needs.

        Returns:
            False if the list was finished, and nothing was done.
        """
        if self._rerun():
            return True
        op = self._next_op()
        if op is None:
            return False
        if self._execute(op):
            self._last = op
            self._since_update = 0 if op.kind is Kind.UPDATE else self._since_update + 1
            self._next = next(self._ops, None)
            if op.kind is Kind.UPDATE and self._snapshots is not None:
                self._snapshots.after_update(self._position)
        else:
            assert self._wanted_work is not self._work, f"{op} will never come, yet is not cut off"
        return True

    def ready(self) -> bool:
        """Tell whether ``step`` would execute an op without waiting for anybody to send."""
        again = self._rebuild.next if self._rebuild is not None else None
        op = self._next_op() if again is None else again.op
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
            in_flight = self._intake.batches
            assert max(in_flight, default=0) < work.train_batches, (
                f"stop before {work.train_batches}, but in flight are {in_flight}"
            )
            self._work = work
            # The shorter list begins with all that was done so far; see ``stage_ops``.
            self._list_ops()
        return self._next

    def _list_ops(self) -> None:
        """List the ops from the present position on."""
        stage, updates = self._stage, self._weights.version
        ops = stage_ops(self._schedule, stage.index, stage.stages, self._work, updates=updates)
        self._ops = islice(ops, self._since_update, None)
        self._next = next(self._ops, None)

    def _position(self) -> Position:
        """Tell how far the loop is, right after an update, and not what is in flight."""
        streams = self._streams
        return Position(
            update=self._weights.version,
            staleness=self._staleness.tallies,
            next_activation=streams.activations.number if streams.activations else 0,
            next_gradient=streams.gradients_out.number if streams.gradients_out else 0,
            needed_activation=self._intake.needed_activation,
            needed_gradient=self._intake.needed_gradient,
        )

    def _rerun(self) -> bool:
        """Run a forward again that was in flight in the snapshot; return False if none is left."""
        rebuild = self._rebuild
        again = rebuild.next if rebuild is not None else None
        if rebuild is None or again is None:
            self._rebuild = None
            return False
        taken = self._take(again.op)
        assert taken is not None, f"{again.op} was begun before, yet is cut off now"
        parcel, targets = taken
        assert targets is None, "nothing is in flight on the last stage after an update"
        reading = self._method.forward(again.op, self._weights.version)
        rebuild.show(reading.keep if isinstance(reading, Ahead) else None)
        if self._snapshots is not None:
            self._snapshots.before_forward(again.op, again.number)
        with self._watch.timed("forward_s"):
            outputs = self._stage.forward(again.op, _value(parcel))
        self._send(again.op, outputs, parcel, again.number)
        rebuild.advance()
        return True

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
        self._read(op)
        if self._streams.activations is not None and self._snapshots is not None:
            self._snapshots.before_forward(op, self._streams.activations.number)
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
        fed = self._intake.finish(op)
        gradients: Value | None = None
        if streams.gradients_in is not None:
            with self._watch.waiting("downstream", self._from_downstream, op):
                parcel = streams.gradients_in.take(op)
            assert parcel is not None, f"{op} is owed by stage {stage.index + 1}"
            self._intake.took(parcel)
            gradients = parcel.value
        self._read(op)
        with self._watch.timed("backward_s"):
            gradients = stage.backward(op, gradients)
        # At once: a neighbour waits for it.
        if streams.gradients_out is not None:
            with self._watch.waiting("upstream", self._to_upstream, op):
                streams.gradients_out.put(Parcel(op, gradients, fed.samples, fed.batch_samples))
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
            self._weights.read(NEWEST)
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
            with self._watch.waiting("feed", "inputs of {}", op):
                parcel = streams.inputs.take(op)
        else:
            with self._watch.waiting("upstream", self._from_upstream, op):
                parcel = streams.inputs.take(op)
        targets: Parcel | None = None
        if parcel is not None and streams.targets is not None:
            with self._watch.waiting("feed", "targets of {}", op):
                targets = streams.targets.take(op)
        if parcel is None or (targets is None and streams.targets is not None):
            return None
        if targets is not None:
            sizes = {(part.op, part.samples, part.batch_samples) for part in (parcel, targets)}
            assert len(sizes) == 1, f"inputs and targets do not belong together: {sizes}"
        self._intake.took(parcel)
        return parcel, targets

    def _send(self, op: Op, outputs: Value, parcel: Parcel, number: int | None = None) -> None:
        """Send a forward's output on, on all but the last stage."""
        activations = self._streams.activations
        if activations is None:
            return
        onward = Parcel(op, outputs, parcel.samples, parcel.batch_samples)
        with self._watch.waiting("downstream", self._to_downstream, op):
            activations.put(onward, number)

    def _read(self, op: Op) -> None:
        """Let the layers see the weights that the method chooses for ``op``."""
        method, version = self._method, self._weights.version
        with self._watch.timed("predict_s"):
            is_forward = op.kind is Kind.FORWARD
            reading = (method.forward if is_forward else method.backward)(op, version)
            self._weights.read(reading)
        self._staleness.record(op, version)


def _value(parcel: Parcel) -> Value:
    assert parcel.value is not None, f"{parcel.op} came without a value"
    return parcel.value
