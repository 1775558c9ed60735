"""Committed rounds on disk: whole or not at all, two of them, and never in the way."""

from __future__ import annotations

import errno
import io
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import xxhash
from waiting import wait_until

from spectrain.launch import checkpoints
from spectrain.launch.checkpoints import CheckpointWriter, read_checkpoints
from spectrain.protocol.messages import CheckpointWritten, SnapshotFile

RUN = "run"


class Disk:
    """A run directory, a place for snapshots, and one host's writer."""

    def __init__(self, root: Path) -> None:
        self.run_dir = root / "run"
        self.memory = root / "memory"
        for directory in (self.run_dir, self.memory):
            directory.mkdir()
        self.reports: queue.SimpleQueue[CheckpointWritten] = queue.SimpleQueue()
        self.writers: list[CheckpointWriter] = []

    def writer(
        self, host_index: int = 0, run_id: str = RUN, *, goes_on: bool = False
    ) -> CheckpointWriter:
        self.writers.append(
            CheckpointWriter(
                self.run_dir, run_id, host_index, goes_on=goes_on, on_end=self.reports.put
            )
        )
        return self.writers[-1]

    def snapshot(self, stage: int, update: int, content: bytes = b"weights") -> SnapshotFile:
        path = self.memory / f"stage-{stage}.update-{update}.safetensors"
        path.write_bytes(content)
        digest = xxhash.xxh3_128_hexdigest(content)
        return SnapshotFile(stage=stage, update=update, digest=digest, path=str(path))

    def write(
        self, writer: CheckpointWriter, update: int, stages: Sequence[int] = (0,)
    ) -> CheckpointWritten:
        writer.write(update, [self.snapshot(stage, update) for stage in stages])
        return self.reports.get(timeout=20)

    def files(self) -> list[str]:
        found = (self.run_dir / "checkpoints").rglob("*")
        return sorted(
            str(path.relative_to(self.run_dir / "checkpoints")) for path in found if path.is_file()
        )

    def updates(self, run_id: str | None = RUN) -> list[int]:
        return [file.update for file in read_checkpoints(self.run_dir, run_id)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    for writer in disk.writers:
        writer.close()


class HeldBack:
    """Keeps the writer before its first byte until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        real = CheckpointWriter._write_file

        def write_file(*arguments: object) -> None:
            self.reached.set()
            assert self.go.wait(20)
            real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(CheckpointWriter, "_write_file", write_file)


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> HeldBack:
    return HeldBack(monkeypatch)


def fill_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the disk be full, after half of the first write; return what mends it."""
    real = Path.open

    class FullFile(io.FileIO):
        full = False

        def write(self, data: object) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.full = True
            return super().write(bytes(data)[:3])  # type: ignore[call-overload]

    def open_full(path: Path, mode: str = "r", **options: object) -> object:
        return FullFile(path, "wb") if path.suffix == ".partial" else real(path, mode, **options)

    monkeypatch.setattr(Path, "open", open_full)
    return lambda: monkeypatch.setattr(Path, "open", real)


# -- a round ------------------------------------------------------------------------------------


def test_a_round_is_copied_byte_for_byte_with_a_manifest(disk: Disk) -> None:
    file = disk.snapshot(2, 40, bytes(range(256)) * 1000)
    disk.writer().write(40, [file])
    report = disk.reports.get(timeout=20)
    path = disk.run_dir / "checkpoints" / "update-40" / "stage-2.safetensors"
    assert path.read_bytes() == Path(file.path).read_bytes()
    on_disk = SnapshotFile(stage=2, update=40, digest=file.digest, path=str(path))
    assert report == CheckpointWritten(host_index=0, update=40, files=(on_disk,), error="")
    assert json.loads(path.with_name("host-0.json").read_text()) == {
        "run_id": RUN,
        "update": 40,
        "snapshots": [{"stage": 2, "digest": file.digest, "file": "stage-2.safetensors"}],
    }
    assert read_checkpoints(disk.run_dir, RUN) == (on_disk,)


def test_a_large_file_comes_over_in_pieces(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "CHUNK_BYTES", 4)
    file = disk.snapshot(0, 10, b"0123456789")
    disk.writer().write(10, [file])
    (written,) = disk.reports.get(timeout=20).files
    assert Path(written.path).read_bytes() == b"0123456789"


def test_everything_is_on_the_disk_before_the_manifest_says_so(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        steps.append("fsync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        steps.append("rename " + target.name)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    disk.write(disk.writer(), 10)
    assert steps == [
        "fsync .stage-0.safetensors.host-0.partial",
        "rename stage-0.safetensors",
        "fsync update-10",
        "fsync .host-0.json.host-0.partial",
        "rename host-0.json",
        "fsync update-10",
        "fsync checkpoints",
        "fsync run",
    ]


def test_snapshots_may_be_pruned_as_soon_as_the_round_is_asked_for(
    disk: Disk, held_back: HeldBack
) -> None:
    writer = disk.writer()
    files = [disk.snapshot(stage, 10) for stage in (0, 1)]
    writer.write(10, files)
    for file in files:
        Path(file.path).unlink()
    held_back.go.set()
    assert len(disk.reports.get(timeout=20).files) == 2


def test_rounds_that_wait_give_way_to_the_newest(disk: Disk, held_back: HeldBack) -> None:
    writer = disk.writer()
    writer.write(10, [disk.snapshot(0, 10)])
    assert held_back.reached.wait(20)
    writer.write(20, [disk.snapshot(0, 20)])
    writer.write(30, [disk.snapshot(0, 30)])
    held_back.go.set()
    assert [disk.reports.get(timeout=20).update for _ in range(2)] == [10, 30]
    assert disk.updates() == [10, 30]


# -- two are kept -------------------------------------------------------------------------------


def test_the_two_newest_rounds_are_kept(disk: Disk) -> None:
    writer = disk.writer()
    for update in (10, 20, 30):
        disk.write(writer, update)
    assert disk.files() == [
        "update-20/host-0.json",
        "update-20/stage-0.safetensors",
        "update-30/host-0.json",
        "update-30/stage-0.safetensors",
    ]
    assert not (disk.run_dir / "checkpoints" / "update-10").exists()


def test_a_host_removes_its_own_files_only(disk: Disk) -> None:
    first, second = disk.writer(0), disk.writer(1)
    disk.write(second, 10, stages=[1])
    for update in (10, 20, 30):
        disk.write(first, update)
    assert [f for f in disk.files() if f.startswith("update-10/")] == [
        "update-10/host-1.json",
        "update-10/stage-1.safetensors",
    ]


def test_rounds_of_a_future_that_was_given_up_are_removed(disk: Disk) -> None:
    writer = disk.writer()
    for update in (10, 40, 20):
        disk.write(writer, update)
    assert disk.updates() == [10, 20]


def test_another_run_in_the_same_directory_is_left_alone(disk: Disk) -> None:
    earlier = disk.writer(run_id="earlier")
    for update in (40, 50):
        disk.write(earlier, update)
    writer = disk.writer()
    for update in (10, 20, 30):
        disk.write(writer, update)
    assert disk.updates() == [20, 30]
    assert disk.updates(None) == [20, 30, 40, 50]


def test_a_run_that_goes_on_from_another_supersedes_its_checkpoints(disk: Disk) -> None:
    earlier = disk.writer(run_id="earlier")
    for update in (10, 20):
        disk.write(earlier, update)
    disk.write(disk.writer(goes_on=True), 30)
    assert disk.updates(None) == [20, 30]


# -- what goes wrong ----------------------------------------------------------------------------


def test_a_full_disk_is_told_and_leaves_what_was_there(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = disk.writer()
    disk.write(writer, 10)
    before = disk.files()
    mend = fill_up(monkeypatch)
    report = disk.write(writer, 20)
    assert report.files == ()
    assert "No space left on device" in report.error
    assert disk.files() == before
    mend()
    assert disk.write(writer, 30).error == ""
    assert disk.updates() == [10, 30]


def test_a_snapshot_that_changed_in_memory_is_not_written(disk: Disk) -> None:
    file = disk.snapshot(0, 10)
    Path(file.path).write_bytes(b"flipped")
    disk.writer().write(10, [file])
    assert f"not {file.digest}" in disk.reports.get(timeout=20).error
    assert disk.files() == []


def test_a_disk_that_gives_back_other_bytes_is_not_believed(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "digest_of", lambda _: "other")
    report = disk.write(disk.writer(), 10)
    assert "the disk gives back other bytes than it was given" in report.error
    assert disk.files() == []


def test_a_snapshot_that_is_gone_is_told(disk: Disk) -> None:
    file = disk.snapshot(0, 10)
    Path(file.path).unlink()
    disk.writer().write(10, [file])
    report = disk.reports.get(timeout=20)
    assert report.error.startswith("cannot read a snapshot: ")
    assert report.files == ()


def test_closing_abandons_the_round_under_way_and_the_waiting_one(
    disk: Disk, held_back: HeldBack
) -> None:
    writer = disk.writer()
    writer.write(10, [disk.snapshot(0, 10)])
    assert held_back.reached.wait(20)
    writer.write(20, [disk.snapshot(0, 20)])
    closing = threading.Thread(target=writer.close)
    closing.start()
    wait_until(lambda: writer._closed, what="the writer to be told")
    held_back.go.set()
    closing.join(20)
    assert disk.files() == []
    assert disk.reports.empty()


def test_closing_drops_a_round_that_nobody_has_begun(disk: Disk) -> None:
    writer = disk.writer()
    with writer._changed:  # the thread cannot take it before both are there
        writer.write(10, [disk.snapshot(0, 10)])
        writer._closed = True
    writer.close()
    assert disk.files() == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"run_id": "run", "update": 1, "snapshots": [{}]}']
)
def test_a_manifest_that_cannot_be_read_vouches_for_nothing(disk: Disk, text: str) -> None:
    disk.write(disk.writer(), 10)
    broken = disk.run_dir / "checkpoints" / "update-10" / "host-1.json"
    broken.write_text(text)
    assert disk.updates() == [10]


def test_a_run_directory_without_checkpoints_has_none(disk: Disk) -> None:
    assert read_checkpoints(disk.run_dir, None) == ()
