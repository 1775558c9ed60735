"""Staleness and horizon: the paper's numbers, and counting against closed form."""

from __future__ import annotations

import pytest

from spectrain.protocol.schedule import Kind, Op, Schedule, Work, stage_ops
from spectrain.protocol.staleness import (
    Staleness,
    StalenessCounter,
    horizon,
    measure,
    predicted,
    with_versions,
)


def ops_from(text: str) -> list[Op]:
    return [Op.parse(word) for word in text.split()]


def horizons(stage: int, stages: int, kind: Kind, train_batches: int = 24) -> list[int]:
    """The horizon of every op of ``kind``, in order of batches."""
    work = Work(train_batches=train_batches, epoch_batches=train_batches)
    ops = stage_ops(Schedule.ASYNCHRONOUS, stage, stages, work)
    return [horizon(op, version, stage) for op, version in with_versions(ops) if op.kind is kind]


@pytest.mark.parametrize(
    ("stages", "paper"),
    [
        (1, [(0, 0)]),
        (2, [(1, 0), (0, 0)]),
        (3, [(2, 0), (1, 0), (1, 1)]),
        (4, [(3, 0), (2, 0), (2, 1), (1, 1)]),
        (8, [(7, 0), (6, 0), (6, 1), (5, 1), (5, 2), (4, 2), (4, 3), (3, 3)]),
    ],
)
def test_horizon_in_steady_state_is_the_papers_table(
    stages: int, paper: list[tuple[int, int]]
) -> None:
    steady = [
        (horizons(k, stages, Kind.FORWARD)[12], horizons(k, stages, Kind.BACKWARD)[12])
        for k in range(stages)
    ]
    assert steady == paper


@pytest.mark.parametrize("stages", range(1, 17))
def test_horizon_in_steady_state_is_the_papers_formula(stages: int) -> None:
    for k in range(stages):
        forward = horizons(k, stages, Kind.FORWARD)
        assert set(forward[stages - 1 - k :]) == {k // 2 + stages - k - 1}
        assert set(horizons(k, stages, Kind.BACKWARD)) == {k // 2}


def test_horizon_grows_while_the_pipeline_fills() -> None:
    assert horizons(0, 4, Kind.FORWARD, train_batches=6) == [0, 1, 2, 3, 3, 3]
    assert horizons(2, 4, Kind.FORWARD, train_batches=6) == [1, 2, 2, 2, 2, 2]


def test_horizon_is_not_cut_while_the_pipeline_drains() -> None:
    assert horizons(3, 4, Kind.BACKWARD, train_batches=2) == [1, 1]


@pytest.mark.parametrize("kind", [Kind.UPDATE, Kind.EVALUATE])
def test_only_forwards_and_backwards_have_a_horizon(kind: Kind) -> None:
    with pytest.raises(AssertionError, match="neither a forward nor a backward"):
        horizon(Op(kind, 3), 3, 0)


@pytest.mark.parametrize("version", [-1, 4])
def test_a_version_that_cannot_be_is_caught(version: int) -> None:
    with pytest.raises(AssertionError, match=f"B3 at version {version}"):
        horizon(Op(Kind.BACKWARD, 3), version, 0)


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
