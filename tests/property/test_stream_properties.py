"""Whoever dies and whenever: each life of a receiver gets all that it needs, in order, once.

Two stages go through their real op lists over a real stream; what they compute is left out. Now
and then one of them, or both, or their link, is killed, and comes back from the newest update
that both have passed, as the coordinator would decide.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from links import BACKENDS_ON_CPU
from resumable import Stream, parcel, resumable_stream
from waiting import wait_until

from spectrain.protocol.schedule import Kind, Op, Schedule, Work, stage_ops
from spectrain.worker import receiving_stream, sending_stream

WORK = Work(train_batches=40, epoch_batches=7, evaluation_batches=2)
KILLS = 30
SENDER, RECEIVER = 0, 1


@dataclass(frozen=True)
class Snapshot:
    """A stage after an update; the numbers are those of the stream's next and needed parcel."""

    steps: int = 0
    number: int = 0
    in_flight: tuple[tuple[Op, int], ...] = ()


@dataclass
class Life:
    """Where one stage is in its op list."""

    stage: int
    steps: int = 0
    number: int = 0
    in_flight: dict[int, tuple[Op, int]] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=lambda: {0: Snapshot()})

    def __post_init__(self) -> None:
        self.ops = list(stage_ops(Schedule.ASYNCHRONOUS, self.stage, 2, WORK))

    @property
    def next_op(self) -> Op | None:
        return self.ops[self.steps] if self.steps < len(self.ops) else None

    def wants(self, op: Op) -> bool:
        return op in self.ops[self.steps :] or op in [each for each, _ in self.in_flight.values()]

    def passed(self, op: Op) -> bool:
        return op in self.ops[: self.steps]

    def advance(self) -> None:
        op = self.ops[self.steps]
        self.steps += 1
        if op.kind is Kind.BACKWARD:
            _, number = self.in_flight.pop(op.batch)
            if self.stage == RECEIVER:
                self.number = number + 1
        if op.kind is Kind.UPDATE:
            flying = tuple(self.in_flight.values())
            self.snapshots[op.batch + 1] = Snapshot(self.steps, self.number, flying)

    def restore(self, update: int) -> Snapshot:
        snapshot = self.snapshots[update]
        self.steps, self.number = snapshot.steps, snapshot.number
        self.in_flight = {op.batch: (op, number) for op, number in snapshot.in_flight}
        self.snapshots = {u: each for u, each in self.snapshots.items() if u <= update}
        return snapshot


class Pair:
    """Both stages, their stream, and the round from which either comes back."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.lives = Life(SENDER), Life(RECEIVER)
        self.committed = 0
        self.numbers: dict[Op, int] = {}
        self.suppressed = self.discarded = 0

    @property
    def is_done(self) -> bool:
        return all(life.next_op is None for life in self.lives)

    def step(self, first: int) -> None:
        """Let one stage execute an op, this one if it can."""
        steps = [self.step_sender, self.step_receiver][:: -1 if first == RECEIVER else 1]
        wait_until(lambda: any(step() for step in steps), what="progress", interval_s=0.001)

    def step_sender(self) -> bool:
        life, stream = self.lives[SENDER], self.stream
        op = life.next_op
        # Its gradient comes from the receiver; and never so much at once that a put would wait.
        ahead = stream.sender.number - self.lives[RECEIVER].number
        if op is None or (op.kind is Kind.BACKWARD and not self.lives[RECEIVER].passed(op)):
            return False
        if op.kind in (Kind.FORWARD, Kind.EVALUATE):
            assert ahead < 8, "one batch in flight and an evaluation"
            number = stream.sender.number
            assert self.numbers.setdefault(op, number) == number, f"{op} has another number"
            stream.sender.put(parcel(str(op)))
            life.number = stream.sender.number
            if op.kind is Kind.FORWARD:
                life.in_flight[op.batch] = op, number
        life.advance()
        return True

    def step_receiver(self) -> bool:
        life, receiver = self.lives[RECEIVER], self.stream.receiver
        op = life.next_op
        if op is None:
            return False
        if op.kind in (Kind.FORWARD, Kind.EVALUATE):
            if not receiver.ready(op):
                return False
            taken = receiver.take(op)
            assert torch.equal(taken.value, parcel(str(op)).value), op
            assert taken.number == self.numbers[op]
            if op.kind is Kind.FORWARD:
                life.in_flight[op.batch] = op, taken.number
            else:
                life.number = taken.number + 1
        life.advance()
        return True

    def commit(self) -> None:
        both = self.lives[SENDER].snapshots.keys() & self.lives[RECEIVER].snapshots.keys()
        self.committed = max(both)
        self.stream.sender.trim(self.committed)
        self.stream.receiver.trim(self.committed)

    def kill(self, victims: tuple[int, ...]) -> None:
        stream = self.stream
        if SENDER in victims:
            self.suppressed += stream.sender.suppressed
            stream.sender.close()
            number = self.lives[SENDER].restore(self.committed).number
            stream.start_sender(number)
        if RECEIVER in victims:
            self.discarded += stream.receiver.discarded
            stream.receiver.close()
            number = self.lives[RECEIVER].restore(self.committed).number
            stream.start_receiver(number, is_wanted=self.lives[RECEIVER].wants)
        stream.connect()
        if SENDER in victims:
            for op, number in self.lives[SENDER].in_flight.values():
                stream.sender.put(parcel(str(op)), number=number)
        if RECEIVER in victims:
            assert not self.lives[RECEIVER].in_flight, "the last stage has none after an update"


@pytest.mark.parametrize("backend", BACKENDS_ON_CPU)
@pytest.mark.parametrize("seed", range(2))
def test_all_parcels_come_in_order_whoever_is_killed(
    tmp_path: Path, backend: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for end in (sending_stream, receiving_stream):  # gloo may leave threads behind until then
        monkeypatch.setattr(end, "LINK_TIMEOUT_S", 3)
    chance = random.Random(seed)
    kills_left = KILLS
    with resumable_stream(tmp_path, backend=backend) as stream:
        pair = Pair(stream)
        stream.receiver._is_wanted = pair.lives[RECEIVER].wants
        while not pair.is_done:
            pair.step(first=chance.choice([SENDER, RECEIVER]))
            if chance.random() < 0.1:
                pair.commit()
            if kills_left and chance.random() < 0.2:
                kills_left -= 1
                pair.kill(chance.choice([(SENDER,), (RECEIVER,), (SENDER, RECEIVER), ()]))
        assert not kills_left
        assert not stream.faults
        assert pair.suppressed > 0
        stream.sender.flush(timeout_s=20)
