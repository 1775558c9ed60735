"""What holds for every pipeline: it ends, within its bounds, and as stale as the paper says."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.protocol.schedule import Kind, Op, Schedule, Work, stage_ops
from spectrain.protocol.simulate import LEAST_CAPACITY, Durations, Event, Timeline, simulate

schedules = st.sampled_from(Schedule)
stage_counts = st.integers(1, 16)
works = st.builds(
    Work,
    train_batches=st.integers(1, 40),
    epoch_batches=st.integers(1, 40),
    evaluation_batches=st.integers(0, 3),
    microbatches=st.integers(1, 6),
    last_microbatches=st.integers(1, 6),
)
any_durations = st.builds(
    Durations,
    forward_s=st.integers(0, 5),
    backward_s=st.integers(0, 5),
    update_s=st.integers(0, 2),
    evaluate_s=st.integers(0, 5),
)


def run(
    schedule: Schedule, stages: int, work: Work, *durations: Durations, capacity: int | None = None
) -> Timeline:
    """Simulate; the last of the ``durations`` stands for the rest of the stages."""
    last = durations[-1] if durations else Durations()
    return simulate(
        [stage_ops(schedule, stage, stages, work) for stage in range(stages)],
        [*durations[:stages], *[last] * (stages - len(durations))],
        capacity=capacity,
    )


def between(timeline: Timeline, stage: int, first: Op, last: Op) -> list[Event]:
    """What one stage did from one op to another, in order."""
    events = timeline.stages[stage]
    ops = [event.op for event in events]
    return list(events[ops.index(first) : ops.index(last) + 1])


@settings(deadline=None)
@given(schedules, stage_counts, works, st.integers(LEAST_CAPACITY, 20))
def test_no_deadlock_and_all_ops_are_done(
    schedule: Schedule, stages: int, work: Work, capacity: int
) -> None:
    timeline = run(schedule, stages, work, capacity=capacity)
    for stage, events in enumerate(timeline.stages):
        assert [event.op for event in events] == list(stage_ops(schedule, stage, stages, work))


@settings(deadline=None)
@given(schedules, works, st.lists(any_durations, min_size=1, max_size=5))
def test_order_and_versions_do_not_depend_on_timing(
    schedule: Schedule, work: Work, durations: list[Durations]
) -> None:
    def outcome(timeline: Timeline) -> list[list[tuple[Op, int]]]:
        return [[(event.op, event.version) for event in events] for events in timeline.stages]

    here = run(schedule, 5, work, *durations, capacity=LEAST_CAPACITY)
    assert outcome(here) == outcome(run(schedule, 5, work))


@settings(deadline=None)
@given(schedules, works, st.lists(any_durations, min_size=1, max_size=5), st.integers(2, 4))
def test_nothing_starts_before_its_input_is_there_nor_while_the_stage_is_busy(
    schedule: Schedule, work: Work, durations: list[Durations], capacity: int
) -> None:
    timeline = run(schedule, 4, work, *durations, capacity=capacity)
    end_s = {(event.stage, event.op): event.end_s for row in timeline.stages for event in row}
    for stage, events in enumerate(timeline.stages):
        assert all(a.end_s <= b.start_s for a, b in pairwise(events))
        for event in events:
            source = {Kind.UPDATE: stage, Kind.BACKWARD: stage + 1}.get(event.op.kind, stage - 1)
            if source != stage and 0 <= source < 4:
                assert end_s[source, event.op] <= event.start_s


@settings(deadline=None)
@given(works, st.lists(any_durations, min_size=1, max_size=4), st.integers(2, 4))
def test_a_link_never_holds_more_than_its_capacity(
    work: Work, durations: list[Durations], capacity: int
) -> None:
    """Seen from outside: when a sender goes on, all but ``capacity`` parcels have been taken."""
    timeline = run(Schedule.ASYNCHRONOUS, 4, work, *durations, capacity=capacity)
    for sender, receiver in pairwise(timeline.stages):
        takings = [
            event.start_s for event in receiver if event.op.kind in (Kind.FORWARD, Kind.EVALUATE)
        ]
        sent = 0
        for event, following in pairwise(sender):
            if event.op.kind in (Kind.FORWARD, Kind.EVALUATE):
                sent += 1
                taken = sum(taking <= following.start_s for taking in takings)
                assert sent - taken <= capacity


@settings(deadline=None)
@given(schedules, stage_counts, works)
def test_in_flight_peak_is_bounded_by_the_distance_to_the_end(
    schedule: Schedule, stages: int, work: Work
) -> None:
    timeline = run(schedule, stages, work)
    for stage in range(stages):
        peak = timeline.in_flight_peak(stage)
        assert peak <= stages - stage
        if schedule is Schedule.ASYNCHRONOUS:
            forwards = sum(map(work.microbatches_of, range(work.train_batches)))
            assert peak == min(stages - stage, forwards)


@settings(deadline=None)
@given(schedules, stage_counts, works)
def test_an_evaluation_reads_one_version_on_all_stages(
    schedule: Schedule, stages: int, work: Work
) -> None:
    timeline = run(schedule, stages, work)
    for event in timeline.stages[0]:
        if event.op.kind is Kind.EVALUATE:
            after = min((event.op.batch + 1) * work.epoch_batches, work.train_batches)
            assert timeline.versions(event.op) == (after,) * stages


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_steady_state_has_no_idle_slot(stages: int, forward_s: int, backward_s: int) -> None:
    work = Work(train_batches=5 * stages, epoch_batches=5 * stages)
    durations = Durations(forward_s=forward_s, backward_s=backward_s)
    timeline = run(Schedule.ASYNCHRONOUS, stages, work, durations)
    first, last = Op(Kind.FORWARD, 2 * stages), Op(Kind.BACKWARD, 4 * stages)
    for stage in range(stages):
        events = between(timeline, stage, first, last)
        assert all(a.end_s == b.start_s for a, b in pairwise(events))


@pytest.mark.parametrize("stages", range(1, 17))
@pytest.mark.parametrize(("forward_s", "backward_s"), [(1, 1), (1, 2), (2, 1), (3, 5)])
def test_later_updates_by_the_end_of_a_round_trip(
    stages: int, forward_s: int, backward_s: int
) -> None:
    """Where the paper's ``k // 2`` comes from, and that it is the packed timeline with f = b.

    Counted: updates of stage k by batches after i that are over when B_i ends on stage 0. In
    general that is floor(k*b/(f+b)), so with b = 2f it would be floor(2k/3).
    """
    batch = 2 * stages
    work = Work(train_batches=4 * stages, epoch_batches=4 * stages)
    durations = Durations(forward_s=forward_s, backward_s=backward_s)
    timeline = run(Schedule.ASYNCHRONOUS, stages, work, durations)
    end_s = timeline.event(0, Op(Kind.BACKWARD, batch)).end_s
    later = [
        sum(
            event.op.kind is Kind.UPDATE and event.op.batch > batch and event.end_s <= end_s
            for event in events
        )
        for events in timeline.stages
    ]
    assert later == [k * backward_s // (forward_s + backward_s) for k in range(stages)]
    if forward_s == backward_s:
        assert later == [k // 2 for k in range(stages)]
