"""Laws of every op list, whatever the pipeline and the amount of work."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from spectrain.protocol.schedule import Kind, Op, Schedule, Work, stage_ops

schedules = st.sampled_from(Schedule)
works = st.builds(
    Work,
    train_batches=st.integers(1, 40),
    epoch_batches=st.integers(1, 40),
    evaluation_batches=st.integers(0, 3),
    microbatches=st.integers(1, 6),
    last_microbatches=st.integers(1, 6),
)


@st.composite
def places(draw: st.DrawFn) -> tuple[int, int]:
    """A stage and the number of stages."""
    stages = draw(st.integers(1, 16))
    return draw(st.integers(0, stages - 1)), stages


def ops_of(schedule: Schedule, place: tuple[int, int], work: Work) -> list[Op]:
    return list(stage_ops(schedule, *place, work))


@given(schedules, places(), works)
def test_every_batch_is_forwarded_backwarded_and_updated_in_order(
    schedule: Schedule, place: tuple[int, int], work: Work
) -> None:
    ops = ops_of(schedule, place, work)
    order = {kind: [(op.batch, op.micro) for op in ops if op.kind is kind] for kind in Kind}
    parts = [
        (batch, part)
        for batch in range(work.train_batches)
        for part in range(work.microbatches_of(batch))
    ]
    assert order[Kind.FORWARD] == order[Kind.BACKWARD] == parts
    assert order[Kind.UPDATE] == [(batch, 0) for batch in range(work.train_batches)]
    assert len(set(ops)) == len(ops)


@given(schedules, places(), works)
def test_forward_comes_before_backward_and_backward_before_update(
    schedule: Schedule, place: tuple[int, int], work: Work
) -> None:
    position = {op: index for index, op in enumerate(ops_of(schedule, place, work))}
    for op, index in position.items():
        if op.kind is Kind.BACKWARD:
            assert position[Op(Kind.FORWARD, op.batch, op.micro)] < index
            assert index < position[Op(Kind.UPDATE, op.batch)]


@given(schedules, places(), works)
def test_at_most_n_minus_k_are_in_flight(
    schedule: Schedule, place: tuple[int, int], work: Work
) -> None:
    stage, stages = place
    in_flight = 0
    for op in ops_of(schedule, place, work):
        in_flight += (op.kind is Kind.FORWARD) - (op.kind is Kind.BACKWARD)
        assert 0 <= in_flight <= stages - stage
    assert in_flight == 0


@given(places(), works)
def test_the_flushed_pipeline_is_empty_at_every_update(place: tuple[int, int], work: Work) -> None:
    in_flight = 0
    for op in ops_of(Schedule.FLUSHED, place, work):
        in_flight += (op.kind is Kind.FORWARD) - (op.kind is Kind.BACKWARD)
        assert op.kind is not Kind.UPDATE or in_flight == 0


@given(schedules, st.integers(2, 16), works)
def test_all_stages_do_the_same_ops(schedule: Schedule, stages: int, work: Work) -> None:
    first, *others = (Counter(ops_of(schedule, (k, stages), work)) for k in range(stages))
    assert all(other == first for other in others)


@given(schedules, places(), works)
def test_evaluation_rounds_come_right_after_their_update(
    schedule: Schedule, place: tuple[int, int], work: Work
) -> None:
    ops = ops_of(schedule, place, work)
    for index, op in enumerate(ops):
        following = list(takewhile(lambda op: op.kind is Kind.EVALUATE, ops[index + 1 :]))
        if op.kind is Kind.UPDATE and work.evaluates_after(op.batch):
            epoch = work.epoch_of(op.batch)
            expected = [Op(Kind.EVALUATE, epoch, part) for part in range(work.evaluation_batches)]
            assert following == expected
        elif op.kind is not Kind.EVALUATE:
            assert following == []


@given(schedules, places(), works, st.integers(1, 40))
def test_stopping_early_only_leaves_ops_out(
    schedule: Schedule, place: tuple[int, int], work: Work, stop: int
) -> None:
    def training(work: Work) -> list[Op]:
        ops = ops_of(schedule, place, work)
        return [op for op in ops if op.kind is not Kind.EVALUATE]

    stopped = training(work.stopped_before(stop))
    assert stopped == [op for op in training(work) if op.batch < stop]


@given(st.builds(Op, st.sampled_from(Kind), st.integers(0), st.integers(0)))
def test_the_text_of_an_op_parses_back(op: Op) -> None:
    assert Op.parse(str(op)) == op
