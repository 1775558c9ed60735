"""A snapshotter keeps to its plan, copies what changes, and never makes training wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import assert_same_bits, build_all, make_job, mlp

from spectrain.protocol.errors import SnapshotError
from spectrain.protocol.schedule import Op
from spectrain.worker.build import Parts
from spectrain.worker.snapshot import Origin, Position, Snapshot, read_snapshot
from spectrain.worker.snapshotter import Plan, Snapshotter, Written

ORIGIN = Origin("5e" * 16, 0, 3)


class Gate:
    """Holds up the writing thread after each file until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Semaphore(0)
        self.written: list[Written] = []
        self.skipped: list[tuple[int, str]] = []

    def on_written(self, written: Written) -> None:
        self.written.append(written)
        self.reached.release()
        assert self.open.wait(10), "nobody opened the gate"

    def on_skipped(self, update: int, reason: str) -> None:
        self.skipped.append((update, reason))


def build(method: str = "spectrain") -> Parts:
    return build_all(make_job(mlp), [3, 2, 2], method)[0]


@contextmanager
def watching(parts: Parts, directory: Path, *, is_open: bool = True) -> Iterator[Any]:
    gate = Gate()
    if is_open:
        gate.open.set()
    snapshotter = Snapshotter(
        parts, ORIGIN, directory, on_written=gate.on_written, on_skipped=gate.on_skipped
    )
    try:
        yield snapshotter, gate
    finally:
        gate.open.set()
        snapshotter.close()


def forward(parts: Parts, snapshotter: Snapshotter, batch: int) -> None:
    op = Op.parse(f"F{batch}")
    parts.weights.read(parts.method.forward(op, parts.weights.version))
    snapshotter.before_forward(op, 10 + batch)
    parts.stage.forward(op, torch.ones(2, 5) * (batch + 1))


def update(parts: Parts, snapshotter: Snapshotter) -> None:
    version = parts.weights.version
    parts.stage.backward(Op.parse(f"B{version}"), torch.ones(2, 8))
    parts.weights.collect_gradients()
    parts.weights.step()
    snapshotter.after_update(lambda: position(version + 1))


def position(update: int) -> Position:
    return Position(
        update=update, staleness=((0, 0, 0), (0, 0, 0)), next_activation=0,
        next_gradient=0, needed_activation=0, needed_gradient=0,
    )  # fmt: skip


def read(written: Written) -> Snapshot:
    return read_snapshot(written.path, written.digest, ORIGIN)


def test_a_plan_includes_its_first_update_and_each_so_many_after_it() -> None:
    assert [u for u in range(12) if Plan(4, 3).includes(u)] == [4, 7, 10]
    assert not any(Plan(4, 0).includes(u) for u in range(12))


def test_snapshots_follow_the_plan_and_hold_the_state_of_their_update(tmp_path: Path) -> None:
    parts = build()
    states: dict[int, Any] = {}
    with watching(parts, tmp_path) as (snapshotter, gate):
        snapshotter.plan(2, 3)
        for batch in range(6):
            forward(parts, snapshotter, batch)
            update(parts, snapshotter)
            states[batch + 1] = parts.weights.clean[0].clone()
            if batch + 1 in (2, 5):
                assert gate.reached.acquire(timeout=10)
    assert [written.update for written in gate.written] == [2, 5]
    assert gate.skipped == []
    for written in gate.written:
        assert written.path.name == f"stage-0.update-{written.update}.safetensors"
        assert written.size_bytes == written.path.stat().st_size
        assert min(written.capture_s, written.write_s) >= 0
        assert torch.equal(read(written).clean[0], states[written.update])


def test_old_live_weights_are_those_that_the_forward_read(tmp_path: Path) -> None:
    parts = build()
    seen: dict[str, Any] = {}
    with watching(parts, tmp_path) as (snapshotter, gate):
        snapshotter.plan(2, 2)
        for batch in range(3):
            forward(parts, snapshotter, batch)
        update(parts, snapshotter)
        parts.weights.read(parts.method.forward(Op.parse("F3"), parts.weights.version))
        seen["F3"] = parts.weights.live[0].clone()
        forward(parts, snapshotter, 3)
        update(parts, snapshotter)
        clean = parts.weights.clean[0].clone()
    (written,) = gate.written
    snapshot = read(written)
    assert [(str(each.op), each.number) for each in snapshot.in_flight] == [("F2", 12), ("F3", 13)]
    assert torch.equal(snapshot.in_flight[1].live[0], seen["F3"])
    assert not torch.equal(seen["F3"], clean)


def test_a_forward_may_be_in_flight_in_several_snapshots(tmp_path: Path) -> None:
    parts = build("vanilla")
    with watching(parts, tmp_path) as (snapshotter, gate):
        snapshotter.plan(1, 1)
        for batch in range(3):
            forward(parts, snapshotter, batch)
        for _ in range(2):
            update(parts, snapshotter)
            assert gate.reached.acquire(timeout=10)
    first, second = map(read, gate.written)
    assert [str(each.op) for each in first.in_flight] == ["F1", "F2"]
    assert [str(each.op) for each in second.in_flight] == ["F2"]
    assert torch.equal(first.in_flight[1].live[0], second.in_flight[0].live[0])


def test_a_plan_heard_too_late_for_its_first_snapshot_begins_with_the_next(tmp_path: Path) -> None:
    parts = build()
    with watching(parts, tmp_path) as (snapshotter, gate):
        forward(parts, snapshotter, 0)
        forward(parts, snapshotter, 1)
        snapshotter.plan(1, 1)
        update(parts, snapshotter)
        forward(parts, snapshotter, 2)
        update(parts, snapshotter)
    assert gate.skipped == [(1, "it was planned after forwards that belong into it")]
    assert [written.update for written in gate.written] == [2]


def test_without_a_plan_nothing_is_copied(tmp_path: Path) -> None:
    parts = build()
    with watching(parts, tmp_path) as (snapshotter, gate):
        forward(parts, snapshotter, 0)
        forward(parts, snapshotter, 1)
        update(parts, snapshotter)
        assert not snapshotter._forwards
    assert not gate.written
    assert not gate.skipped


def test_training_does_not_wait_for_a_slow_disk_but_leaves_rounds_out(tmp_path: Path) -> None:
    parts = build()
    with watching(parts, tmp_path, is_open=False) as (snapshotter, gate):
        snapshotter.plan(1, 1)
        for batch in range(5):
            forward(parts, snapshotter, batch)
            update(parts, snapshotter)
            if batch == 0:
                assert gate.reached.acquire(timeout=10)  # and is held up from here on
        late = "the ones before it are still being written"
        assert gate.skipped == [(3, late), (4, late), (5, late)]
    assert [written.update for written in gate.written] == [1, 2]
    assert not torch.equal(read(gate.written[1]).clean[0], parts.weights.clean[0])


def test_a_directory_that_cannot_be_written_to_costs_the_round_and_no_more(tmp_path: Path) -> None:
    parts = build()
    with watching(parts, tmp_path / "gone") as (snapshotter, gate):
        snapshotter.plan(1, 1)
        forward(parts, snapshotter, 0)
        update(parts, snapshotter)
        snapshotter.close()
        ((number, reason),) = gate.skipped
    assert number == 1
    assert "stage-0.update-1.safetensors could not be written" in reason
    assert not gate.written


def test_memory_is_used_again_by_later_snapshots(tmp_path: Path) -> None:
    parts = build()
    with watching(parts, tmp_path) as (snapshotter, gate):
        snapshotter.plan(2, 2)
        used: set[int] = set()
        for batch in range(20):
            forward(parts, snapshotter, batch)
            if batch:
                update(parts, snapshotter)
                if parts.weights.version % 2 == 0:
                    assert gate.reached.acquire(timeout=10)
            for copied in snapshotter._forwards.values():
                used |= {tensor.data_ptr() for tensor in copied.copy.tensors.values()}
    assert len(gate.written) == 9
    assert len(used) <= 3 * len(parts.weights.live)


def test_an_optimizer_that_cannot_be_saved_ends_the_run_with_its_name(tmp_path: Path) -> None:
    parts = build("vanilla")
    with watching(parts, tmp_path) as (snapshotter, _):
        snapshotter.plan(1, 1)
        forward(parts, snapshotter, 0)
        parts.weights.optimizer.param_groups[0]["closure"] = print
        with pytest.raises(SnapshotError, match=r"optimizer\.param_groups\.0\.closure is a"):
            update(parts, snapshotter)


def test_a_snapshot_does_not_change_with_later_updates(tmp_path: Path) -> None:
    parts = build()
    with watching(parts, tmp_path, is_open=False) as (snapshotter, gate):
        snapshotter.plan(1, 1)
        forward(parts, snapshotter, 0)
        update(parts, snapshotter)
        assert gate.reached.acquire(timeout=10)
        forward(parts, snapshotter, 1)
        update(parts, snapshotter)  # waits to be written
        expected = {"clean": parts.weights.clean[0].clone()}
        momentum = parts.weights.optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
        snapshotter.plan(1, 0)
        forward(parts, snapshotter, 2)
        update(parts, snapshotter)
    snapshot = read(gate.written[1])
    assert_same_bits({"clean": snapshot.clean[0]}, expected)
    assert torch.equal(snapshot.optimizer["state"][0]["momentum_buffer"], momentum)
