"""The paper run of a pipeline: its timeline, its picture, and how it says that it is stuck."""

from __future__ import annotations

import pytest

from spectrain.protocol.errors import SpectrainError
from spectrain.protocol.schedule import Op, Schedule, Work, stage_ops
from spectrain.protocol.simulate import (
    LEAST_CAPACITY,
    DeadlockError,
    Durations,
    Timeline,
    simulate,
)


def run(
    *op_lists: str,
    durations: Durations | None = None,
    transfer_s: float = 0.0,
    capacity: int | None = None,
) -> Timeline:
    """Simulate stages whose ops are written as text."""
    return simulate(
        [map(Op.parse, ops.split()) for ops in op_lists],
        [durations or Durations()] * len(op_lists),
        transfer_s=transfer_s,
        capacity=capacity,
    )


def pipeline(
    stages: int,
    work: Work,
    *,
    schedule: Schedule = Schedule.ASYNCHRONOUS,
    durations: Durations | None = None,
    capacity: int | None = None,
) -> Timeline:
    return simulate(
        [stage_ops(schedule, stage, stages, work) for stage in range(stages)],
        [durations or Durations()] * stages,
        capacity=capacity,
    )


def batches(count: int) -> Work:
    return Work(train_batches=count, epoch_batches=count)


def spans(timeline: Timeline, stage: int) -> list[tuple[str, float, float]]:
    return [(str(event.op), event.start_s, event.end_s) for event in timeline.stages[stage]]


def drawing(text: str) -> str:
    """The lines of an indented block, without the indentation."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


# -- the timeline -------------------------------------------------------------------------------


def test_an_op_starts_when_the_stage_is_free_and_its_input_is_there() -> None:
    timeline = run("F0 F1 B0 U0 B1 U1", "F0 B0 U0 F1 B1 U1")
    assert spans(timeline, 0) == [
        ("F0", 0, 1), ("F1", 1, 2), ("B0", 3, 4), ("U0", 4, 4), ("B1", 5, 6), ("U1", 6, 6),
    ]  # fmt: skip
    assert spans(timeline, 1) == [
        ("F0", 1, 2), ("B0", 2, 3), ("U0", 3, 3), ("F1", 3, 4), ("B1", 4, 5), ("U1", 5, 5),
    ]  # fmt: skip


def test_every_kind_of_op_takes_its_own_time() -> None:
    durations = Durations(forward_s=2, backward_s=5, update_s=1, evaluate_s=3)
    timeline = run("F0 B0 U0 E0.0", durations=durations)
    assert spans(timeline, 0) == [("F0", 0, 2), ("B0", 2, 7), ("U0", 7, 8), ("E0.0", 8, 11)]
    assert timeline.end_s == 11


def test_stages_may_differ_in_speed() -> None:
    lists = [map(Op.parse, ["F0", "B0", "U0"]) for _ in range(2)]
    timeline = simulate(lists, [Durations(), Durations(forward_s=7)])
    assert timeline.event(0, Op.parse("B0")).start_s == 1 + 7 + 1


def test_a_transfer_takes_its_time_in_both_directions() -> None:
    timeline = run("F0 B0 U0", "F0 B0 U0", transfer_s=0.25)
    assert timeline.event(1, Op.parse("F0")).start_s == 1.25
    assert timeline.event(0, Op.parse("B0")).start_s == 3.5


def test_events_know_the_version_they_read() -> None:
    timeline = pipeline(3, batches(6))
    assert timeline.versions(Op.parse("F4")) == (2, 3, 4)
    assert timeline.versions(Op.parse("B4")) == (4, 4, 4)


def test_evaluation_reads_one_version_on_every_stage_without_a_drain() -> None:
    work = Work(train_batches=9, epoch_batches=4, evaluation_batches=2)
    timeline = pipeline(4, work, capacity=LEAST_CAPACITY)
    assert timeline.versions(Op.parse("E0.0")) == (4, 4, 4, 4)
    assert timeline.versions(Op.parse("E1.1")) == (8, 8, 8, 8)
    assert timeline.event(0, Op.parse("F6")).start_s < timeline.event(3, Op.parse("E0.0")).start_s


def test_an_op_that_was_not_done_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="stage 0 has no F9"):
        run("F0 B0 U0").event(0, Op.parse("F9"))


def test_in_flight_peak_is_n_minus_k() -> None:
    timeline = pipeline(4, batches(9))
    assert [timeline.in_flight_peak(stage) for stage in range(4)] == [4, 3, 2, 1]


def test_idle_time_is_all_that_is_not_work() -> None:
    """The flushed bubble of N stages and M micro-batches: (N-1)(f+b) on each stage."""
    work = Work(train_batches=1, epoch_batches=1, microbatches=6, last_microbatches=6)
    durations = Durations(forward_s=1, backward_s=2)
    timeline = pipeline(4, work, schedule=Schedule.FLUSHED, durations=durations)
    assert timeline.end_s == (6 + 4 - 1) * 3
    assert [timeline.idle_s(stage) for stage in range(4)] == [9, 9, 9, 9]


def test_the_asynchronous_pipeline_pays_that_bubble_once_and_not_per_batch() -> None:
    def idle_s(schedule: Schedule, count: int) -> float:
        return pipeline(4, batches(count), schedule=schedule).idle_s(0)

    assert [idle_s(Schedule.ASYNCHRONOUS, count) for count in (10, 50)] == [6, 6]
    assert [idle_s(Schedule.FLUSHED, count) for count in (10, 50)] == [60, 300]


def test_no_stages_or_no_ops_take_no_time() -> None:
    assert simulate([], []).end_s == 0
    assert run("", "").end_s == 0


# -- a link that holds few parcels --------------------------------------------------------------


def test_a_sender_stands_still_while_the_link_is_full() -> None:
    slow = [Durations(), Durations(forward_s=10)]
    lists = ["F0 F1 F2 F3", "F0 F1 F2 F3"]

    def starts(capacity: int | None) -> list[float]:
        parsed = [map(Op.parse, ops.split()) for ops in lists]
        return [event.start_s for event in simulate(parsed, slow, capacity=capacity).stages[0]]

    assert starts(None) == [0, 1, 2, 3]
    assert starts(2) == [0, 1, 2, 3]
    assert starts(1) == [0, 1, 2, 11]  # F2 is ready at 3, but F1 lies unread until 11


def test_a_later_parcel_may_be_taken_first_if_it_finds_room() -> None:
    lists = ("F0 E0.0 F1", "E0.0 F0 F1")
    assert [str(event.op) for event in run(*lists, capacity=2).stages[1]] == ["E0.0", "F0", "F1"]
    with pytest.raises(DeadlockError):
        run(*lists, capacity=1)


def test_training_alone_needs_room_for_one_parcel() -> None:
    pipeline(5, batches(20), capacity=1)


def test_one_parcel_is_too_few_once_there_is_evaluation() -> None:
    work = Work(train_batches=9, epoch_batches=3, evaluation_batches=1)
    with pytest.raises(DeadlockError) as caught:
        pipeline(2, work, capacity=LEAST_CAPACITY - 1)
    assert str(caught.value).splitlines() == [
        "no stage can go on:",
        "  stage 0 stuck at E0.0: waits for room at stage 1, which has not taken F3",
        "  stage 1 stuck at E0.0: waits for E0.0 from stage 0",
    ]


def test_a_link_without_room_for_any_parcel_is_refused() -> None:
    with pytest.raises(AssertionError, match="capacity 0"):
        run("F0", "F0", capacity=0)


def test_durations_are_needed_for_every_stage() -> None:
    with pytest.raises(AssertionError, match="1 durations for 2 stages"):
        simulate([[], []], [Durations()])


# -- lists that do not fit together -------------------------------------------------------------


def test_a_deadlock_names_every_stage_and_what_it_waits_for() -> None:
    with pytest.raises(SpectrainError) as caught:
        run("F0 B0 U0 F1 B1 U1", "F0 F1 B0 U0 B1 U1", "F0 B0 U0")
    assert str(caught.value).splitlines() == [
        "no stage can go on:",
        "  stage 0 stuck at B0: waits for B0 from stage 1",
        "  stage 1 stuck at F1: waits for F1 from stage 0",
        "  stage 2 finished",
    ]


@pytest.mark.parametrize(
    ("ops", "text"),
    [
        ("B0 U0 F0", "stuck at B0: waits for its own F0"),
        ("F0 U0 B0", "stuck at U0: waits for its own B0"),
        ("F0 F0.1 B0.2", "stuck at B0.2: waits for its own F0.2"),
    ],
)
def test_an_impossible_order_on_one_stage_is_found(ops: str, text: str) -> None:
    with pytest.raises(DeadlockError, match=text):
        run(ops)


def test_a_batch_that_the_stage_before_never_sends_is_found() -> None:
    with pytest.raises(DeadlockError, match=r"stage 1 stuck at F1: waits for F1 from stage 0"):
        run("F0", "F0 F1")


# -- the picture --------------------------------------------------------------------------------


def test_picture_of_the_asynchronous_pipeline() -> None:
    assert pipeline(3, batches(6)).picture() == drawing(
        """
        stage 0 | F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5
        stage 1 | .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .
        stage 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .
        """
    )


def test_picture_of_the_flushed_pipeline() -> None:
    work = Work(train_batches=1, epoch_batches=1, microbatches=3, last_microbatches=3)
    assert pipeline(2, work, schedule=Schedule.FLUSHED).picture() == drawing(
        """
        stage 0 | F0   F0.1 .    B0   F0.2 B0.1 .    B0.2
        stage 1 | .    F0   B0   F0.1 B0.1 F0.2 B0.2 .
        """
    )


def test_picture_draws_a_long_op_over_several_slots() -> None:
    timeline = pipeline(2, batches(2), durations=Durations(backward_s=2))
    assert timeline.picture() == drawing(
        """
        stage 0 | F0 F1 .  .  B0 =  .  B1 =
        stage 1 | .  F0 B0 =  F1 B1 =  .  .
        """
    )


def test_picture_shows_the_first_slots_only() -> None:
    assert pipeline(1, batches(9)).picture(slots=4) == "stage 0 | F0 B0 F1 B1"


def test_picture_counts_slots_of_the_length_asked_for() -> None:
    timeline = run("F0 B0 U0", durations=Durations(forward_s=0.01, backward_s=0.02))
    assert timeline.picture(slot_s=0.01) == "stage 0 | F0 B0 ="


def test_picture_aligns_stages_of_two_digits() -> None:
    lines = pipeline(11, batches(1)).picture(slots=1).splitlines()
    assert lines[0] == "stage  0 | F0"
    assert lines[10] == "stage 10 | ."


def test_picture_of_nothing_is_empty() -> None:
    assert run("").picture() == "stage 0 |"
