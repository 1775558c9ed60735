"""Op lists spelled out, and the text form of ops."""

from __future__ import annotations

import pytest

from spectrain.protocol.schedule import Kind, Op, Schedule, Work, stage_ops


def lists(schedule: Schedule, stages: int, **work: int) -> list[str]:
    work.setdefault("epoch_batches", work["train_batches"])
    return [
        " ".join(map(str, stage_ops(schedule, stage, stages, Work(**work))))
        for stage in range(stages)
    ]


def test_asynchronous_three_stages_six_batches() -> None:
    assert lists(Schedule.ASYNCHRONOUS, 3, train_batches=6) == [
        "F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 F5 B3 U3 B4 U4 B5 U5",
        "F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 F4 B3 U3 F5 B4 U4 B5 U5",
        "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4 F5 B5 U5",
    ]


def test_asynchronous_three_stages_three_batches_of_two_microbatches() -> None:
    assert lists(
        Schedule.ASYNCHRONOUS, 3, train_batches=3, microbatches=2, last_microbatches=1
    ) == [
        "F0 F0.1 F1 B0 F1.1 B0.1 U0 F2 B1 B1.1 U1 B2 U2",
        "F0 F0.1 B0 F1 B0.1 U0 F1.1 B1 F2 B1.1 U1 B2 U2",
        "F0 B0 F0.1 B0.1 U0 F1 B1 F1.1 B1.1 U1 F2 B2 U2",
    ]


def test_one_stage_alternates_as_a_plain_training_loop_does() -> None:
    plain = ["F0 B0 U0 F1 B1 U1 F2 B2 U2"]
    assert lists(Schedule.ASYNCHRONOUS, 1, train_batches=3) == plain
    assert lists(Schedule.FLUSHED, 1, train_batches=3) == plain


def test_a_run_shorter_than_the_pipeline_never_fills_it() -> None:
    assert lists(Schedule.ASYNCHRONOUS, 4, train_batches=2) == [
        "F0 F1 B0 U0 B1 U1",
        "F0 F1 B0 U0 B1 U1",
        "F0 F1 B0 U0 B1 U1",
        "F0 B0 U0 F1 B1 U1",
    ]


def test_a_single_batch_goes_down_and_up() -> None:
    assert lists(Schedule.ASYNCHRONOUS, 3, train_batches=1) == ["F0 B0 U0"] * 3


def test_flushed_three_stages_four_microbatches() -> None:
    assert lists(Schedule.FLUSHED, 3, train_batches=2, microbatches=4, last_microbatches=2) == [
        "F0 F0.1 F0.2 B0 F0.3 B0.1 B0.2 B0.3 U0 F1 F1.1 B1 B1.1 U1",
        "F0 F0.1 B0 F0.2 B0.1 F0.3 B0.2 B0.3 U0 F1 F1.1 B1 B1.1 U1",
        "F0 B0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 U0 F1 B1 F1.1 B1.1 U1",
    ]


def test_evaluation_follows_the_last_update_of_each_epoch_on_every_stage() -> None:
    assert lists(
        Schedule.ASYNCHRONOUS, 2, train_batches=4, epoch_batches=2, evaluation_batches=2
    ) == [
        "F0 F1 B0 U0 F2 B1 U1 E0.0 E0.1 F3 B2 U2 B3 U3 E1.0 E1.1",
        "F0 B0 U0 F1 B1 U1 E0.0 E0.1 F2 B2 U2 F3 B3 U3 E1.0 E1.1",
    ]


def test_flushed_evaluation_follows_the_update() -> None:
    assert (
        lists(Schedule.FLUSHED, 2, train_batches=2, epoch_batches=1, evaluation_batches=1)
        == ["F0 B0 U0 E0.0 F1 B1 U1 E1.0"] * 2
    )


def test_a_run_that_ends_within_an_epoch_evaluates_at_its_end() -> None:
    assert lists(
        Schedule.ASYNCHRONOUS, 1, train_batches=3, epoch_batches=2, evaluation_batches=1
    ) == ["F0 B0 U0 F1 B1 U1 E0.0 F2 B2 U2 E1.0"]


def test_work_stopped_early_evaluates_where_it_stops() -> None:
    work = Work(train_batches=9, epoch_batches=9, evaluation_batches=1).stopped_before(2)
    ops = stage_ops(Schedule.ASYNCHRONOUS, 0, 2, work)
    assert " ".join(map(str, ops)) == "F0 F1 B0 U0 B1 U1 E0.0"


def test_stopping_after_the_end_changes_nothing() -> None:
    work = Work(train_batches=3, epoch_batches=2)
    assert work.stopped_before(7) == work


def test_only_the_last_batch_of_an_epoch_has_fewer_microbatches() -> None:
    work = Work(train_batches=6, epoch_batches=3, microbatches=4, last_microbatches=1)
    assert [work.microbatches_of(batch) for batch in range(6)] == [4, 4, 1, 4, 4, 1]


def test_epochs_are_counted_from_zero() -> None:
    work = Work(train_batches=5, epoch_batches=2)
    assert [work.epoch_of(batch) for batch in range(5)] == [0, 0, 1, 1, 2]


def test_without_a_test_set_nothing_is_evaluated() -> None:
    work = Work(train_batches=4, epoch_batches=2)
    assert not any(work.evaluates_after(batch) for batch in range(4))


@pytest.mark.parametrize(
    "wrong",
    [
        {"train_batches": 0},
        {"epoch_batches": 0},
        {"microbatches": 0},
        {"last_microbatches": 0},
        {"evaluation_batches": -1},
    ],
)
def test_work_without_work_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        Work(**{"train_batches": 1, "epoch_batches": 1, **wrong})


@pytest.mark.parametrize("stage", [-1, 3])
def test_a_stage_outside_the_pipeline_is_refused_at_once(stage: int) -> None:
    work = Work(train_batches=1, epoch_batches=1)
    with pytest.raises(ValueError, match=rf"stage {stage} is not one of the 3 stages 0\.\.2"):
        stage_ops(Schedule.ASYNCHRONOUS, stage, 3, work)


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("F12", Op(Kind.FORWARD, 12)),
        ("B7.3", Op(Kind.BACKWARD, 7, 3)),
        ("U0", Op(Kind.UPDATE, 0)),
        ("E0.0", Op(Kind.EVALUATE, 0, 0)),
    ],
)
def test_an_op_and_its_text_say_the_same(text: str, op: Op) -> None:
    assert str(op) == text
    assert Op.parse(text) == op


@pytest.mark.parametrize("text", ["", "F", "f1", "X1", "F-1", "F1.", "F1.2.3", " F1", "F1 "])
def test_what_is_no_op_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="not an op") as caught:
        Op.parse(text)
    assert repr(text) in str(caught.value)
