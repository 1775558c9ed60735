"""The laws of the log, over op lists of any pipeline: nothing that may be asked for is missing."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.protocol.schedule import Kind, Op, Schedule, Work, stage_ops
from spectrain.worker.boundary import Parcel
from spectrain.worker.stream_log import LoggedParcel, StreamLog, is_needed_after

WORKS = st.builds(
    Work,
    train_batches=st.integers(1, 12),
    epoch_batches=st.integers(1, 5),
    evaluation_batches=st.integers(0, 2),
)


def parcels_of(stage: int, stages: int, work: Work) -> list[Op]:
    """Return the consumers of what this stage sends on, in order: they are its own forwards."""
    ops = stage_ops(Schedule.ASYNCHRONOUS, stage, stages, work)
    return [op for op in ops if op.kind in (Kind.FORWARD, Kind.EVALUATE)]


def logged(op: Op, number: int) -> LoggedParcel:
    return LoggedParcel.of(Parcel(op, torch.zeros(1 + number % 3), 1, 1), number)


@given(work=WORKS, stages=st.integers(2, 5), data=st.data())
@settings(max_examples=60)
def test_after_trims_the_log_has_all_that_is_needed_and_nothing_else(
    work: Work, stages: int, data: st.DataObject
) -> None:
    log = StreamLog(work.epoch_batches)
    kept: dict[int, LoggedParcel] = {}
    committed = 0
    for number, op in enumerate(parcels_of(data.draw(st.integers(0, stages - 2)), stages, work)):
        parcel = logged(op, number)
        log.append(parcel)
        kept[number] = parcel
        if data.draw(st.booleans()):
            committed = data.draw(
                st.integers(committed, op.batch if op.kind is Kind.FORWARD else committed)
            )
            log.trim(committed)
            kept = {
                number: parcel
                for number, parcel in kept.items()
                if is_needed_after(parcel.op, committed, work.epoch_batches)
            }
        assert len(log) == len(kept) == log.count_from(0)
        assert log.size_bytes == sum(parcel.size_bytes for parcel in kept.values())
        for asked in range(number + 2):
            above = [each for each in kept.values() if each.number >= asked]
            assert log.from_number(asked) is (above[0] if above else None)
            assert log.count_from(asked) == len(above)


@given(work=WORKS, stages=st.integers(2, 5), data=st.data())
@settings(max_examples=60)
def test_a_receiver_restored_from_the_newest_commit_never_asks_below_the_first_number(
    work: Work, stages: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 2))
    log = StreamLog(work.epoch_batches)
    numbers: dict[Op, int] = {}
    for number, op in enumerate(parcels_of(stage, stages, work)):
        numbers[op] = number
        log.append(logged(op, number))
    for update in sorted(data.draw(st.sets(st.integers(1, work.train_batches)))):
        log.trim(update)
        # It needs nothing up to the forward of the last batch that it is done with.
        position = numbers[Op(Kind.FORWARD, update - 1)] + 1
        assert log.first_number == position
        receives = parcels_of(stage + 1, stages, work)
        wanted = {op for op in receives if is_needed_after(op, update, work.epoch_batches)}
        got: set[Op] = set()
        parcel = log.from_number(position)
        while parcel is not None:
            got.add(parcel.op)
            parcel = log.from_number(parcel.number + 1)
        assert got == wanted
