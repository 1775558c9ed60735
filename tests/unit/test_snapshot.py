"""A snapshot file holds every bit, appears only whole, and is not mistaken for another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from spectrain.protocol.errors import SnapshotError
from spectrain.protocol.schedule import Op, Schedule, Work
from spectrain.worker.nested_state import dismantle
from spectrain.worker.snapshot import (
    Origin,
    Position,
    header_of,
    read_snapshot,
    tensors_of_forward,
    tensors_of_state,
    write_snapshot,
)

F3, F4 = Op.parse("F3"), Op.parse("F4")
ORIGIN = Origin(run_id="5e" * 16, stage=1, stages=4)
POSITION = Position(
    update=3,
    staleness=((5, 9, 2), (3, 0, 0)),
    next_activation=5,
    next_gradient=3,
    needed_activation=4,
    needed_gradient=3,
    in_flight=((F3, 6), (F4, 8)),
)


def optimizer_state() -> dict[str, Any]:
    return {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(4)}, 1: {"buffer": None}},
        "param_groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "fused": None, "params": [0, 1]}],
    }


def parts(clean: list[Tensor], state: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    memory = {"version.2.0": torch.full((32,), 2.0)}
    tensors = tensors_of_state(clean, {"bn.running_mean": torch.arange(4.0)}, memory)
    for op in (F3, F4):
        live = [torch.full((32,), float(op.batch), dtype=torch.bfloat16)]
        tensors.update(tensors_of_forward(op, live, {"bn.running_mean": torch.ones(4)}))
    optimizer = dismantle(state, "optimizer", tensors)
    return header_of(ORIGIN, POSITION, optimizer), tensors


def written(directory: Path) -> tuple[Path, str]:
    path = directory / "stage-1.update-3.safetensors"
    header, tensors = parts([torch.randn(32)], optimizer_state())
    _, digest = write_snapshot(path, header, tensors)
    return path, digest


def test_a_file_gives_back_what_went_in(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    clean = [torch.randn(32) * 10.0**index for index in range(12)]
    state = optimizer_state()
    size_bytes, digest = write_snapshot(path, *parts(clean, state))
    snapshot = read_snapshot(path, digest, ORIGIN)
    assert size_bytes == path.stat().st_size
    assert snapshot.position == POSITION
    assert all(map(torch.equal, snapshot.clean, clean))
    assert snapshot.buffers["bn.running_mean"].tolist() == [0, 1, 2, 3]
    assert list(snapshot.memory) == ["version.2.0"]
    assert snapshot.memory["version.2.0"].unique().tolist() == [2]
    assert [(each.op, each.number) for each in snapshot.in_flight] == [(F3, 6), (F4, 8)]
    assert snapshot.in_flight[1].live[0].dtype == torch.bfloat16
    assert snapshot.in_flight[1].live[0].unique().tolist() == [4]
    assert snapshot.in_flight[0].buffers["bn.running_mean"].tolist() == [1, 1, 1, 1]
    loaded = snapshot.optimizer
    assert loaded["param_groups"] == state["param_groups"]
    assert isinstance(loaded["param_groups"][0]["betas"], tuple)
    assert loaded["state"][1] == {"buffer": None}
    assert torch.equal(loaded["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    assert loaded["state"][0]["step"].shape == ()


def test_the_file_is_in_the_safetensors_format_and_its_digest_is_that_of_its_bytes(
    tmp_path: Path,
) -> None:
    path, digest = written(tmp_path)
    assert safetensors.torch.load_file(path)["F3.buffer.bn.running_mean"].tolist() == [1, 1, 1, 1]
    assert xxhash.xxh3_128_hexdigest(path.read_bytes()) == digest


def test_names_of_ops_that_begin_alike_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    first, tenth = Op.parse("F1"), Op.parse("F10")
    tensors = {
        **tensors_of_forward(first, [torch.zeros(1)], {}),
        **tensors_of_forward(tenth, [torch.ones(1)], {}),
    }
    position = replace(POSITION, in_flight=((first, 1), (tenth, 2)))
    header = header_of(ORIGIN, position, {"dict": []})
    _, digest = write_snapshot(path, header, tensors)
    snapshot = read_snapshot(path, digest, ORIGIN)
    assert [len(each.live) for each in snapshot.in_flight] == [1, 1]
    assert snapshot.in_flight[1].live[0].item() == 1


def test_a_written_file_leaves_no_partial_one_and_replaces_an_older_one(tmp_path: Path) -> None:
    written(tmp_path)
    path, digest = written(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    read_snapshot(path, digest, ORIGIN)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises((OSError, SafetensorError)):
        written(tmp_path / "missing")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_put_in_place_leaves_no_partial_one(tmp_path: Path) -> None:
    (tmp_path / "stage-1.update-3.safetensors").mkdir()
    with pytest.raises(OSError, match="directory"):
        written(tmp_path)
    assert [file.is_dir() for file in tmp_path.iterdir()] == [True]


@pytest.mark.parametrize("offset", [3, 200, -1])
def test_a_flipped_bit_is_noticed(offset: int, tmp_path: Path) -> None:
    path, digest = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=rf"{path} is damaged: its {len(data)} bytes have dig"):
        read_snapshot(path, digest, ORIGIN)


@pytest.mark.parametrize("size_bytes", [0, 5, 300])
def test_a_truncated_file_is_noticed(size_bytes: int, tmp_path: Path) -> None:
    path, digest = written(tmp_path)
    path.write_bytes(path.read_bytes()[:size_bytes])
    with pytest.raises(SnapshotError, match=rf"is damaged: its {size_bytes} bytes"):
        read_snapshot(path, digest, ORIGIN)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"gone\.safetensors cannot be read: No such file"):
        read_snapshot(tmp_path / "gone.safetensors", "00", ORIGIN)


@pytest.mark.parametrize(
    "other",
    [replace(ORIGIN, run_id="00" * 16), replace(ORIGIN, stage=2), replace(ORIGIN, stages=5)],
)
def test_a_snapshot_of_another_run_or_stage_is_refused(other: Origin, tmp_path: Path) -> None:
    path, digest = written(tmp_path)
    with pytest.raises(SnapshotError, match=rf"{path} is of .*'stage': 1.*, expected "):
        read_snapshot(path, digest, other)


def test_a_snapshot_in_another_format_is_refused(tmp_path: Path) -> None:
    header, tensors = parts([torch.zeros(1)], {})
    path = tmp_path / "s.safetensors"
    newer = json.dumps({**json.loads(header), "format": 2})
    _, digest = write_snapshot(path, newer, tensors)
    with pytest.raises(SnapshotError, match="has format 2, expected 1: it was written by another"):
        read_snapshot(path, digest, ORIGIN)


def test_optimizer_state_that_no_file_can_hold_is_named() -> None:
    state = {"state": {0: {"hook": print}}}
    with pytest.raises(SnapshotError, match=r"optimizer\.state\.0\.hook is a builtin_function"):
        dismantle(state, "optimizer", {})


def test_what_remains_are_the_forwards_in_flight_and_the_rest_of_the_list() -> None:
    work = Work(train_batches=5, epoch_batches=5)
    ops = POSITION.remaining(Schedule.ASYNCHRONOUS, 1, 4, work)
    assert list(map(str, ops)) == ["F3", "F4", "B3", "U3", "B4", "U4"]
