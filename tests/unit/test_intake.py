"""A loop's intake knows what is still wanted, and from which number it would be needed again."""

from __future__ import annotations

import torch

from spectrain.protocol.schedule import Op, Work
from spectrain.worker.boundary import Parcel
from spectrain.worker.intake import Fed, Intake
from spectrain.worker.snapshot import Position

WORK = Work(train_batches=12, epoch_batches=3, evaluation_batches=2)


def parcel(op: str, number: int) -> Parcel:
    return Parcel(Op.parse(op), torch.ones(2), 2, 5, number)


def wants(intake: Intake, *ops: str) -> list[bool]:
    return [intake.wants(Op.parse(op)) for op in ops]


def resumed(update: int) -> Intake:
    intake = Intake()
    position = Position(
        update=update, staleness=((0, 0, 0), (0, 0, 0)), next_activation=9, next_gradient=8,
        needed_activation=7, needed_gradient=6,
    )  # fmt: skip
    intake.resume(position, WORK)
    return intake


def test_a_parcel_is_wanted_until_it_was_taken() -> None:
    intake = Intake()
    assert wants(intake, "F0", "B0", "E0.0") == [True, True, True]
    intake.took(parcel("F0", 0))
    intake.took(parcel("E0.0", 1))
    assert wants(intake, "F0", "F1", "B0", "E0.0", "E0.1") == [False, True, True, False, True]


def test_microbatches_are_told_apart() -> None:
    intake = Intake()
    intake.took(parcel("F1", 2))
    assert wants(intake, "F0.9", "F1", "F1.1", "F2") == [False, False, True, True]


def test_a_micro_batch_is_known_from_its_forward_to_its_backward() -> None:
    intake = Intake()
    intake.took(parcel("F0", 3))
    intake.took(parcel("F1", 4))
    assert intake.batches == {0, 1}
    assert intake.finish(Op.parse("B0")) == Fed(samples=2, batch_samples=5, number=3)
    assert intake.batches == {1}


def test_needed_is_what_comes_after_the_last_finished_micro_batch() -> None:
    intake = Intake()
    for number in (3, 5):
        intake.took(parcel(f"F{number - 3}", number))
    intake.took(parcel("B0", 8))
    intake.finish(Op.parse("B0"))
    assert (intake.needed_activation, intake.needed_gradient) == (4, 9)


def test_after_a_snapshot_forwards_in_flight_are_wanted_again() -> None:
    intake = resumed(update=4)
    assert wants(intake, "F3", "F4", "B3", "B4") == [False, True, False, True]
    assert (intake.needed_activation, intake.needed_gradient) == (7, 6)


def test_an_evaluation_round_right_after_the_snapshot_is_wanted_and_earlier_ones_are_not() -> None:
    assert wants(resumed(update=6), "E0.1", "E1.0", "E2.0") == [False, True, True]
    assert wants(resumed(update=7), "E1.1", "E2.0") == [False, True]
