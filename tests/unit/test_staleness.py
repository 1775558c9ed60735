"""Staleness and horizon: the paper's numbers, and counting against closed form."""

from __future__ import annotations

from typing import Any

import pytest

from spectrain.protocol.schedule import Kind, Op, Schedule, Work, stage_ops
from spectrain.protocol.simulate import Durations, simulate
from spectrain.protocol.staleness import (
    Staleness,
    StalenessCounter,
    behind,
    later_backwards,
    measure,
    predicted,
    with_versions,
)


def ops_from(text: str) -> list[Op]:
    return [Op.parse(word) for word in text.split()]


def missed(stage: int, stages: int, kind: Kind, **work: int) -> list[int]:
    """How far behind every op of ``kind`` is, in order."""
    ops = stage_ops(Schedule.ASYNCHRONOUS, stage, stages, Work(epoch_batches=1000, **work))
    return [behind(op, version) for op, version in with_versions(ops) if op.kind is kind]


@pytest.mark.parametrize("stages", range(1, 17))
def test_a_forward_in_steady_state_is_behind_by_the_distance_to_the_last_stage(
    stages: int,
) -> None:
    for k in range(stages):
        assert set(missed(k, stages, Kind.FORWARD, train_batches=24)[stages - 1 - k :]) == {
            stages - 1 - k
        }
        assert set(missed(k, stages, Kind.BACKWARD, train_batches=24)) == {0}


def test_forwards_fall_behind_while_the_pipeline_fills() -> None:
    assert missed(0, 4, Kind.FORWARD, train_batches=6) == [0, 1, 2, 3, 3, 3]
    assert missed(2, 4, Kind.FORWARD, train_batches=6) == [0, 1, 1, 1, 1, 1]


def test_with_micro_batches_they_are_behind_by_fewer_updates() -> None:
    behind = missed(0, 4, Kind.FORWARD, train_batches=4, microbatches=2)
    assert behind == [0, 0, 1, 1, 2, 1, 2, 1]
    behind = missed(0, 4, Kind.FORWARD, train_batches=3, microbatches=3)
    assert behind == [0, 0, 0, 1, 1, 1, 1, 1, 1]


def test_later_backwards_count_slots_in_the_paper_and_time_where_backwards_last_twice() -> None:
    assert [later_backwards(k, "paper") for k in range(9)] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert [later_backwards(k, "exact") for k in range(9)] == [0, 0, 1, 2, 2, 3, 4, 4, 5]


@pytest.mark.parametrize(("horizon", "backward_s"), [("paper", 1.0), ("exact", 2.0)])
def test_later_backwards_are_those_of_a_packed_timeline(horizon: Any, backward_s: float) -> None:
    stages = 9
    work = Work(train_batches=40, epoch_batches=40)
    lists = [stage_ops(Schedule.ASYNCHRONOUS, k, stages, work) for k in range(stages)]
    timeline = simulate(lists, [Durations(forward_s=1.0, backward_s=backward_s)] * stages)
    batch = 20
    back_s = timeline.event(0, Op(Kind.BACKWARD, batch)).end_s
    for k in range(stages):
        done = [e for e in timeline.stages[k] if e.op.kind is Kind.BACKWARD and e.end_s <= back_s]
        assert max(e.op.batch for e in done) - batch == later_backwards(k, horizon), k


@pytest.mark.parametrize("kind", [Kind.UPDATE, Kind.EVALUATE])
def test_only_forwards_and_backwards_can_be_behind(kind: Kind) -> None:
    with pytest.raises(AssertionError, match="neither a forward nor a backward"):
        behind(Op(kind, 3), 3)


@pytest.mark.parametrize("version", [-1, 4])
def test_a_version_that_cannot_be_is_caught(version: int) -> None:
    with pytest.raises(AssertionError, match=f"B3 at version {version}"):
        behind(Op(Kind.BACKWARD, 3), version)


def test_versions_count_the_updates_before_each_op() -> None:
    ops = ops_from("F0 F1 B0 U0 F2 B1 U1 E0.0 B2 U2")
    assert [version for _, version in with_versions(ops)] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_measure_counts_the_updates_each_op_missed() -> None:
    ops = ops_from("F0 F1 F2 B0 U0 F3 B1 U1 B2 U2 B3 U3")
    assert measure(ops) == Staleness(
        forward_mean=(0 + 1 + 2 + 2) / 4, forward_max=2, backward_mean=0.0, backward_max=0
    )


def test_measure_shows_a_stale_backward_too() -> None:
    """No schedule of ours has one; a counter that cannot see it would prove nothing."""
    counter = StalenessCounter()
    counter.record(Op(Kind.BACKWARD, 5), 5)
    counter.record(Op(Kind.BACKWARD, 6), 3)
    assert counter.staleness == Staleness(backward_mean=1.5, backward_max=3)


def test_counter_passes_over_updates_and_evaluations() -> None:
    counter = StalenessCounter()
    counter.record(Op(Kind.UPDATE, 2), 2)
    counter.record(Op(Kind.EVALUATE, 0, 1), 3)
    assert counter.staleness == Staleness()


def test_counter_can_be_read_in_between() -> None:
    counter = StalenessCounter()
    counter.record(Op(Kind.FORWARD, 2), 0)
    assert counter.staleness.forward_mean == 2.0
    counter.record(Op(Kind.FORWARD, 3), 3)
    assert counter.staleness.forward_mean == 1.0
    assert counter.staleness.forward_max == 2


def test_the_flushed_schedule_is_never_stale() -> None:
    work = Work(train_batches=5, epoch_batches=5, microbatches=8, last_microbatches=3)
    assert measure(stage_ops(Schedule.FLUSHED, 0, 4, work)) == Staleness()
    assert predicted(Schedule.FLUSHED, 0, 4, work) == Staleness()


def test_prediction_for_a_million_batches() -> None:
    work = Work(train_batches=10**6, epoch_batches=10**6)
    assert predicted(Schedule.ASYNCHRONOUS, 0, 4, work) == Staleness(
        forward_mean=(0 + 1 + 2 + 3 * (10**6 - 3)) / 10**6, forward_max=3
    )


def test_prediction_for_a_million_batches_of_several_micro_batches() -> None:
    work = Work(train_batches=10**6, epoch_batches=10**3, microbatches=4, last_microbatches=1)
    staleness = predicted(Schedule.ASYNCHRONOUS, 0, 8, work)
    assert staleness.forward_max == 2 + 1  # two full batches, and one of one micro-batch, in seven
    assert staleness.forward_mean == pytest.approx(7 / (999 * 4 + 1) * 1000, rel=1e-5)


def test_a_counter_goes_on_from_what_another_had() -> None:
    ops = list(
        with_versions(
            stage_ops(Schedule.ASYNCHRONOUS, 0, 3, Work(train_batches=9, epoch_batches=9))
        )
    )
    whole, first = StalenessCounter(), StalenessCounter()
    for op, version in ops:
        whole.record(op, version)
    for op, version in ops[:11]:
        first.record(op, version)
    second = StalenessCounter(first.tallies)
    for op, version in ops[11:]:
        second.record(op, version)
    assert second.tallies == whole.tallies
    assert second.staleness == whole.staleness != first.staleness
