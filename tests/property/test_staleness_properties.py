"""Closed forms of staleness against counting them out of the op lists."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from spectrain.protocol.schedule import Kind, Op, Schedule, Work, stage_ops
from spectrain.protocol.staleness import (
    StalenessCounter,
    behind,
    measure,
    predicted,
    with_versions,
)

schedules = st.sampled_from(Schedule)
works = st.builds(
    Work,
    train_batches=st.integers(1, 40),
    epoch_batches=st.integers(1, 40),
    evaluation_batches=st.integers(0, 2),
    microbatches=st.integers(1, 6),
    last_microbatches=st.integers(1, 6),
)


@st.composite
def places(draw: st.DrawFn) -> tuple[int, int]:
    """A stage and the number of stages."""
    stages = draw(st.integers(1, 16))
    return draw(st.integers(0, stages - 1)), stages


@given(schedules, places(), works)
def test_an_op_is_behind_by_the_updates_until_its_backward(
    schedule: Schedule, place: tuple[int, int], work: Work
) -> None:
    ops = list(stage_ops(schedule, *place, work))
    for index, (op, version) in enumerate(with_versions(ops)):
        if op.kind in (Kind.FORWARD, Kind.BACKWARD):
            backward = ops.index(Op(Kind.BACKWARD, op.batch, op.micro))
            ahead = sum(other.kind is Kind.UPDATE for other in ops[index:backward])
            assert behind(op, version) == ahead


@given(schedules, places(), works)
def test_a_batch_is_updated_after_as_many_updates_as_its_number(
    schedule: Schedule, place: tuple[int, int], work: Work
) -> None:
    for op, version in with_versions(stage_ops(schedule, *place, work)):
        if op.kind in (Kind.BACKWARD, Kind.UPDATE):
            assert version == op.batch


@given(schedules, places(), works)
def test_predicted_staleness_is_what_measuring_gives(
    schedule: Schedule, place: tuple[int, int], work: Work
) -> None:
    assert predicted(schedule, *place, work) == measure(stage_ops(schedule, *place, work))


@given(places(), works)
def test_staleness_is_bounded_by_the_distance_over_the_micro_batches(
    place: tuple[int, int], work: Work
) -> None:
    stage, stages = place
    least = min(work.microbatches, work.last_microbatches)
    staleness = predicted(Schedule.ASYNCHRONOUS, stage, stages, work)
    assert staleness.forward_max <= -(-(stages - 1 - stage) // least)


@given(places(), works)
def test_staleness_in_steady_state_is_the_distance_to_the_last_stage(
    place: tuple[int, int], work: Work
) -> None:
    work = replace(work, microbatches=1, last_microbatches=1)
    stage, stages = place
    delay = stages - 1 - stage
    counter = StalenessCounter()
    for op, version in with_versions(stage_ops(Schedule.ASYNCHRONOUS, stage, stages, work)):
        if op.batch >= delay:
            counter.record(op, version)
    steady = counter.staleness
    if work.train_batches > delay:
        assert (steady.forward_mean, steady.forward_max) == (delay, delay)
    assert (steady.backward_mean, steady.backward_max) == (0, 0)
