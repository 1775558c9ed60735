"""A loop executes its op list, tells where it is, and can be cut short from another thread."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from pipelines import (
    ListFeed,
    adamw,
    assert_same_bits,
    build_all,
    join,
    make_job,
    mlp,
    regression,
    sgd,
    train,
)
from torch import nn
from waiting import wait_until

from spectrain.protocol.errors import LinkError
from spectrain.protocol.schedule import Op, Schedule, Work, stage_ops
from spectrain.worker.boundary import Outbox, Parcel, Value
from spectrain.worker.build import Parts
from spectrain.worker.loop import Loop, Source, Streams
from spectrain.worker.memory_stream import memory_pair
from spectrain.worker.pipeline import drive


class Cuttable:
    """A source of one value for every op before ``limit``; waits for others until cut off."""

    def __init__(self, value: Value, limit: int) -> None:
        self.value = value
        self.limit = limit
        self.waits = threading.Event()
        self._cut = threading.Event()

    def take(self, op: Op) -> Parcel | None:
        if not self.ready(op):
            self.waits.set()
            assert self._cut.wait(10), f"nobody cut {op} off"
            return None
        return Parcel(op, self.value, 2, 2)

    def ready(self, op: Op) -> bool:
        return op.batch < self.limit

    def cut(self) -> None:
        self._cut.set()


class Script:
    """A clock that shows one more second each time it is read."""

    def __init__(self) -> None:
        self._seconds = itertools.count()

    def __call__(self) -> float:
        return float(next(self._seconds))


INPUTS, TARGETS = torch.ones(2, 5), torch.zeros(2, 3)


def work(batches: int = 3, **options: int) -> Work:
    return Work(
        train_batches=batches, epoch_batches=options.pop("epoch_batches", batches), **options
    )


def part(index: int, stages: int, method: str = "spectrain") -> Parts:
    counts = {1: [7], 2: [4, 3], 3: [2, 2, 3]}[stages]
    return build_all(make_job(mlp), counts, method)[index]


def alone(batches: int = 3, *, inputs: Source | None = None, targets: Source | None = None,
          **options: Any) -> Loop:  # fmt: skip
    """Return the loop of a pipeline of one stage."""
    parts = part(0, 1)
    streams = Streams(
        inputs=inputs or Cuttable(INPUTS, 99), targets=targets or Cuttable(TARGETS, 99)
    )
    given = options.pop("work", work(batches))
    return Loop(
        parts.stage, parts.weights, parts.method, streams,
        schedule=Schedule.ASYNCHRONOUS, work=given, **options,
    )  # fmt: skip


def middle(clock: Callable[[], float] = time.monotonic, **streams: Any) -> Loop:
    """Return the loop of stage 1 of 3, each stream in memory unless given."""
    parts = part(1, 3)
    ends: dict[str, Any] = {
        "inputs": memory_pair()[1], "activations": memory_pair()[0],
        "gradients_in": memory_pair()[1], "gradients_out": memory_pair()[0],
    }  # fmt: skip
    return Loop(
        parts.stage, parts.weights, parts.method, Streams(**{**ends, **streams}),
        schedule=Schedule.ASYNCHRONOUS, work=work(), clock=clock,
    )  # fmt: skip


def activation(op: str) -> Parcel:
    return Parcel(Op.parse(op), torch.randn(2, 8, requires_grad=True), 2, 2)


# -- order and progress ---------------------------------------------------------------------------


def test_ops_run_in_the_order_of_the_list() -> None:
    loop = alone(work=work(4, epoch_batches=2, evaluation_batches=2))
    done: list[str] = []
    while loop.step():
        done.append(loop.last_op)
    expected = stage_ops(
        Schedule.ASYNCHRONOUS, 0, 1, work(4, epoch_batches=2, evaluation_batches=2)
    )
    assert done == list(map(str, expected))


def test_run_goes_to_the_end() -> None:
    loop = alone(3)
    loop.run()
    assert (loop.last_op, loop.version, loop.in_flight, loop.done) == ("U2", 3, 0, True)


def test_a_finished_loop_has_nothing_more_to_do() -> None:
    loop = alone(1)
    loop.run()
    assert not loop.step()
    assert not loop.ready()


def test_progress_before_the_first_op() -> None:
    loop = alone()
    assert (loop.last_op, loop.waiting_for, loop.version, loop.in_flight) == ("", "", 0, 0)
    assert not loop.done
    assert loop.staleness.forward_mean == 0


def test_a_failed_op_is_still_the_current_one() -> None:
    options: dict[str, Any] = {"inputs": Broken()}
    loop = alone(**options)
    with pytest.raises(LinkError):
        loop.step()
    assert (loop.current_op, loop.last_op) == ("F0", "")


def test_the_current_op_is_the_one_after_the_last() -> None:
    loop = alone(1)
    loop.step()
    assert (loop.last_op, loop.current_op) == ("F0", "B0")
    loop.run()
    assert (loop.last_op, loop.current_op) == ("U0", "")


def test_in_flight_counts_forwards_without_backward() -> None:
    outbox, inbox = memory_pair()
    loop = middle(inputs=inbox)
    for op in ("F0", "F1"):
        outbox.put(activation(op))
        loop.step()
    assert (loop.last_op, loop.in_flight) == ("F1", 2)


def test_ready_means_that_everything_is_there() -> None:
    outbox, inbox = memory_pair()
    gradients, gradients_in = memory_pair()
    loop = middle(inputs=inbox, gradients_in=gradients_in)
    assert not loop.ready()
    for op in ("F0", "F1"):
        outbox.put(activation(op))
        assert loop.ready()
        loop.step()
    assert not loop.ready()  # B0 needs a gradient
    gradients.put(Parcel(Op.parse("B0"), torch.ones(2, 8), 2, 2))
    assert loop.ready()
    loop.step()
    assert loop.ready()  # U0 needs nothing


@pytest.mark.parametrize("missing", ["inputs", "targets"])
def test_the_last_stage_needs_inputs_and_targets(missing: str) -> None:
    assert alone().ready()
    empty = {"inputs": Cuttable(INPUTS, 0), "targets": Cuttable(TARGETS, 0)}[missing]
    options: dict[str, Any] = {missing: empty}
    assert not alone(**options).ready()


def test_gradients_go_up_with_the_size_of_their_batch() -> None:
    outbox, inbox = memory_pair()
    gradients, gradients_in = memory_pair()
    gradients_out, upstream = memory_pair()
    activations, downstream = memory_pair()
    loop = middle(
        inputs=inbox, gradients_in=gradients_in, gradients_out=gradients_out,
        activations=activations,
    )  # fmt: skip
    for op, samples in (("F0", 2), ("F1", 3)):
        outbox.put(Parcel(Op.parse(op), torch.randn(samples, 8, requires_grad=True), samples, 7))
        loop.step()
        sent = downstream.take(Op.parse(op))
        assert (sent.samples, sent.batch_samples) == (samples, 7)
    gradients.put(Parcel(Op.parse("B0"), torch.ones(2, 8), 2, 7))
    loop.step()
    parcel = upstream.take(Op.parse("B0"))
    assert (parcel.samples, parcel.batch_samples) == (2, 7)
    assert isinstance(parcel.value, torch.Tensor)
    assert parcel.value.shape == (2, 8)


def test_targets_of_other_samples_are_never_used() -> None:
    class Wrong(Cuttable):
        def take(self, op: Op) -> Parcel | None:
            return Parcel(op, self.value, 1, 2)

    with pytest.raises(AssertionError, match="do not belong together"):
        alone(targets=Wrong(TARGETS, 99)).step()


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [sgd(), adamw()])
def test_evaluation_reads_clean_weights(optimizer: Any) -> None:
    feed = ListFeed(regression(7), test=regression(2), epoch_batches=4)
    parts = build_all(make_job(mlp, optimizer=optimizer), [2, 2, 3])
    loops = join(parts, feed)
    evaluated = 0
    while not all(loop.done for loop in loops):
        for loop, each in zip(loops, parts, strict=True):
            if loop.ready():
                loop.step()
                if loop.last_op.startswith("E"):
                    evaluated += 1
                    assert_same_bits(live_state(each), each.weights.clean_state())
    assert evaluated == 2 * 2 * 3


@pytest.mark.parametrize("method", ["spectrain", "vanilla", "sync"])
def test_no_op_but_an_update_changes_clean_weights(method: str) -> None:
    feed = ListFeed(regression(7), test=regression(1), epoch_batches=4)
    parts = build_all(make_job(mlp), [2, 2, 3], method)
    loops = join(parts, feed, method)
    while not all(loop.done for loop in loops):
        for loop, each in zip(loops, parts, strict=True):
            if loop.ready():
                before = {name: value.clone() for name, value in each.weights.clean_state().items()}
                loop.step()
                if not loop.last_op.startswith("U"):
                    assert_same_bits(each.weights.clean_state(), before)


def live_state(parts: Parts) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": tensor
        for name, layer in parts.stage.layers
        for key, tensor in layer.state_dict().items()
    }


def test_spectrain_really_predicts() -> None:
    job, feed = make_job(mlp), ListFeed(regression(6))
    vanilla, spectrain = (train(job, feed, [4, 3], method) for method in ("vanilla", "spectrain"))
    assert not torch.equal(vanilla.state["0.weight"], spectrain.state["0.weight"])


class Positions(nn.Module):
    """Hands on a parameter itself beside what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.positions


class Add(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] + pair[1]


def test_a_parameter_that_is_sent_itself_travels_as_it_was_read() -> None:
    job = make_job(lambda: nn.Sequential(Positions(), Add(), nn.Linear(5, 3)))
    parts = build_all(job, [1, 2])
    outbox, inbox = memory_pair()
    gradients, gradients_in = memory_pair()
    loop = Loop(
        parts[0].stage, parts[0].weights, parts[0].method,
        Streams(inputs=Cuttable(INPUTS, 9), activations=outbox, gradients_in=gradients_in),
        schedule=Schedule.ASYNCHRONOUS, work=work(4),
    )  # fmt: skip
    gradients.put(Parcel(Op.parse("B0"), (None, torch.ones(5)), 2, 2))
    for _ in range(5):  # F0 F1 B0 U0 F2
        loop.step()
    sent = inbox.take(Op.parse("F2")).value
    assert isinstance(sent, tuple)
    assert sent[1] is not None
    # After one update with v = 1: W = 1 - 0.1, and F2 looks one update further.
    torch.testing.assert_close(sent[1].detach(), torch.full((5,), 0.8))


# -- results --------------------------------------------------------------------------------------


def test_each_mini_batch_and_each_round_is_reported_once() -> None:
    batches: list[Any] = []
    rounds: list[Any] = []
    loop = alone(
        work=work(5, epoch_batches=2, evaluation_batches=2),
        on_batch=batches.append, on_evaluation=rounds.append,
    )  # fmt: skip
    loop.run()
    assert [(result.batch, result.samples, result.lr) for result in batches] == [
        (batch, 2, 0.1) for batch in range(5)
    ]
    assert [(result.round, result.samples) for result in rounds] == [(0, 4), (1, 4), (2, 4)]


def test_only_the_last_stage_reports() -> None:
    feed = ListFeed(regression(4))
    parts = build_all(make_job(mlp), [4, 3])
    reporting: list[int] = []
    loops = join(parts, feed)
    for index, loop in enumerate(loops):
        loop._scoreboard._on_batch = lambda _, index=index: reporting.append(index)
    drive(loops)
    assert reporting == [1] * 4


# -- time -----------------------------------------------------------------------------------------


def test_time_is_booked_by_activity() -> None:
    loop = alone(2, work=work(2, evaluation_batches=1), clock=Script())
    loop.run()
    assert asdict(loop.times) == {
        "forward_s": 2, "backward_s": 2, "predict_s": 4, "update_s": 2, "evaluate_s": 1,
        "wait_upstream_s": 0, "wait_downstream_s": 0, "wait_feed_s": 6,
    }  # fmt: skip


def test_waiting_is_booked_by_neighbour() -> None:
    outbox, inbox = memory_pair()
    gradients, gradients_in = memory_pair()
    loop = middle(clock=Script(), inputs=inbox, gradients_in=gradients_in)
    for op in ("F0", "F1"):
        outbox.put(activation(op))
    gradients.put(Parcel(Op.parse("B0"), torch.ones(2, 8), 2, 2))
    for _ in range(3):
        loop.step()
    assert loop.times.wait_upstream_s == 3  # takes of F0, F1; put of B0
    assert loop.times.wait_downstream_s == 3  # puts of F0, F1; take of B0
    assert loop.times.wait_feed_s == 0


class Broken:
    """A stream whose neighbour has died."""

    def take(self, op: Op) -> Parcel:
        raise LinkError(f"{op} is gone")

    def put(self, parcel: Parcel, *_: object) -> None:
        raise LinkError(f"{parcel.op} is gone")


@pytest.mark.parametrize(
    ("broken", "steps", "waiting_for"),
    [
        ("inputs", 1, "F0 from stage 0"),
        ("activations", 1, "room for F0 to stage 2"),
        ("gradients_in", 3, "B0 from stage 2"),
        ("gradients_out", 3, "room for B0 to stage 0"),
    ],
)
def test_a_failed_wait_still_says_what_it_was_for(
    broken: str, steps: int, waiting_for: str
) -> None:
    outbox, inbox = memory_pair()
    gradients, gradients_in = memory_pair()
    for op in ("F0", "F1"):
        outbox.put(activation(op))
    gradients.put(Parcel(Op.parse("B0"), torch.ones(2, 8), 2, 2))
    loop = middle(**{"inputs": inbox, "gradients_in": gradients_in, broken: Broken()})

    def run() -> None:
        for _ in range(steps):
            loop.step()

    with pytest.raises(LinkError):
        run()
    assert loop.waiting_for == waiting_for


@pytest.mark.parametrize("part_name", ["inputs", "targets"])
def test_a_failed_feed_still_says_what_it_was_for(part_name: str) -> None:
    options: dict[str, Any] = {part_name: Broken()}
    loop = alone(**options)
    with pytest.raises(LinkError):
        loop.step()
    assert loop.waiting_for == f"{part_name} of F0"


# -- stopping early -------------------------------------------------------------------------------


def steps_of(loop: Loop) -> list[str]:
    ops: list[str] = []
    while loop.step():
        ops.append(loop.last_op)
    return ops


def test_stopping_before_a_batch_leaves_it_and_all_later_ones_out() -> None:
    loop = alone(work=work(9, epoch_batches=9, evaluation_batches=1))
    first = [loop.step() and loop.last_op for _ in range(4)]
    loop.stop_before(3)
    done = [*first, *steps_of(loop)]
    assert done == ["F0", "B0", "U0", "F1", "B1", "U1", "F2", "B2", "U2", "E0.0"]


def test_stopping_after_the_end_changes_nothing() -> None:
    loop = alone(2)
    loop.run()
    loop.stop_before(5)
    assert loop.done


def test_the_earliest_stop_counts() -> None:
    loop = alone(9)
    loop.stop_before(2)
    loop.stop_before(5)
    assert steps_of(loop)[-1] == "U1"


def test_a_loop_that_waits_for_a_batch_cut_off_goes_on_with_the_rest() -> None:
    source = Cuttable(INPUTS, 2)
    loop = alone(9, inputs=source)
    thread = threading.Thread(target=loop.run, name="loop")
    thread.start()
    assert source.waits.wait(10)
    wait_until(lambda: loop.waiting_for == "inputs of F2", what="the loop to wait")
    loop.stop_before(2)
    source.cut()
    thread.join(10)
    assert (loop.last_op, loop.version) == ("U1", 2)


def test_targets_may_be_cut_off_too() -> None:
    targets = Cuttable(TARGETS, 1)
    loop = alone(9, targets=targets)
    targets.cut()
    for _ in range(3):
        loop.step()
    loop.stop_before(1)
    assert not loop.step()
    assert loop.done


def test_an_evaluation_is_never_cut_off() -> None:
    source = Cuttable(INPUTS, 99)
    loop = alone(inputs=source, work=work(4, epoch_batches=2, evaluation_batches=1))
    for _ in range(6):
        loop.step()
    source.limit = 0  # a stream must free forwards only
    source.cut()
    loop.stop_before(2)
    with pytest.raises(AssertionError, match=r"E0\.0 will never come"):
        loop.step()


def test_a_source_that_gives_up_without_a_stop_is_a_mistake() -> None:
    source = Cuttable(INPUTS, 0)
    source.cut()
    with pytest.raises(AssertionError, match="F0 will never come"):
        alone(inputs=source).step()


def test_stopping_before_a_batch_in_flight_is_a_mistake() -> None:
    outbox, inbox = memory_pair()
    loop = middle(inputs=inbox)
    for op in ("F0", "F1"):
        outbox.put(activation(op))
        loop.step()
    loop.stop_before(1)
    with pytest.raises(AssertionError, match="stop before 1, but in flight"):
        loop.step()


@pytest.mark.parametrize("method", ["spectrain", "sync"])
@pytest.mark.parametrize("stop", range(3, 8))
def test_a_run_cut_short_equals_a_shorter_run(method: str, stop: int) -> None:
    job, pairs, test = make_job(mlp), regression(9), regression(1)
    feed = ListFeed(pairs, test=test, epoch_batches=9)
    parts = build_all(job, [2, 2, 3], method)
    loops = join(parts, feed, method)
    while loops[0].version < 1:
        for loop in loops:
            if loop.ready():
                loop.step()
    for loop in loops:
        loop.stop_before(stop)
    drive(loops)
    state = {name: t for each in parts for name, t in each.weights.clean_state().items()}
    shorter = train(job, ListFeed(pairs[:stop], test=test), [2, 2, 3], method)
    assert_same_bits(state, shorter.state)


# -- the virtual pipeline -------------------------------------------------------------------------


def test_batches_leave_no_garbage() -> None:
    parts = build_all(make_job(mlp), [2, 2, 3])
    seen: list[weakref.ref[Any]] = []
    loops = join(parts, ListFeed(regression(6)))
    for each in parts:
        for _, layer in each.stage.layers:
            layer.register_forward_hook(lambda _, __, output: seen.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        drive(loops)
        assert len(seen) == 6 * 7
        assert [ref for ref in seen if ref() is not None] == []
    finally:
        gc.enable()


class Deaf:
    """A stream that loses everything."""

    number = 0

    def put(self, *_: object) -> None: ...


def test_a_stuck_pipeline_says_where() -> None:
    parts = build_all(make_job(mlp), [4, 3])
    loops = join(parts, ListFeed(regression(3)))
    outboxes: Sequence[Outbox] = [Deaf()]
    loops[0]._streams = Streams(
        inputs=loops[0]._streams.inputs,
        activations=outboxes[0],
        gradients_in=loops[0]._streams.gradients_in,
    )
    with pytest.raises(AssertionError, match=r"stuck after \['F1', ''\]"):
        drive(loops)


def test_inputs_and_targets_are_asked_for_once_each() -> None:
    feed = ListFeed(regression(3), test=regression(1))
    train(make_job(mlp), feed, [4, 3])
    assert len(feed.taken) == len(set(feed.taken)) == 2 * 4


def test_layers_that_work_in_place_do_not_spoil_the_feed() -> None:
    pairs = regression(2)
    before = [inputs.clone() for inputs, _ in pairs]
    job = make_job(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 3)))
    train(job, ListFeed(pairs), [1, 1])
    assert all(torch.equal(inputs, old) for (inputs, _), old in zip(pairs, before, strict=True))
