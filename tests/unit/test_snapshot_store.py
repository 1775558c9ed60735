"""The directory in shared memory: who may have it, what lies in it, what goes when."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from spectrain.launch import snapshot_store
from spectrain.launch.snapshot_store import (
    SnapshotStore,
    digest_of,
    remove_run,
    snapshot_name,
)
from spectrain.protocol.errors import HostError

RUN = "0123456789abcdef" * 2
OTHER_RUN = "fedcba9876543210" * 2

Open = Callable[..., SnapshotStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Open stores below ``tmp_path`` and close those that are still open."""
    stores: list[SnapshotStore] = []

    def open_one(run_id: str = RUN, host_index: int = 0, wait_s: float = 0.0) -> SnapshotStore:
        stores.append(SnapshotStore(run_id, host_index, wait_s=wait_s, base=tmp_path))
        return stores[-1]

    yield open_one
    for store in stores:
        if store._lock >= 0 and store.directory.exists():
            store.close()


def kill(store: SnapshotStore) -> None:
    """Let go of the lock as the kernel does when the agent is killed."""
    os.close(store._lock)
    store._lock = -1


def make_old(directory: Path) -> None:
    """Let the last sign of life of a directory's agent be long ago."""
    for path in (*directory.glob("lock"), directory):
        os.utime(path, (0, 0))


def put(directory: Path, stage: int, update: int, content: bytes = b"snapshot") -> Path:
    path = directory / snapshot_name(stage, update)
    path.write_bytes(content)
    return path


# -- whose directory it is ----------------------------------------------------------------------


def test_the_directory_is_closed_to_everybody_else(open_store: Open, tmp_path: Path) -> None:
    store = open_store(host_index=3)
    assert store.directory == tmp_path / f"spectrain-{os.getuid()}-0123456789ab-3"
    for directory in (store.directory, store.ipc, store.replicas):
        assert directory.stat().st_mode & 0o777 == 0o700


def test_nothing_is_left_at_a_normal_end(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    put(store.directory, 0, 10)
    put(store.replicas, 1, 10)
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_agent_of_another_run_left_is_removed(
    open_store: Open, tmp_path: Path
) -> None:
    abandoned = open_store(OTHER_RUN)
    put(abandoned.directory, 0, 10)
    kill(abandoned)
    make_old(abandoned.directory)
    store = open_store()
    assert list(tmp_path.iterdir()) == [store.directory]


@pytest.mark.parametrize("sign", ["", "lock"])
def test_a_killed_agent_of_another_run_has_time_to_come_back(open_store: Open, sign: str) -> None:
    killed = open_store(OTHER_RUN)
    kill(killed)
    make_old(killed.directory)
    os.utime(killed.directory / sign)
    open_store()
    assert killed.directory.is_dir()


def test_an_agent_shows_life_so_that_its_time_to_come_back_begins_at_its_death(
    open_store: Open,
) -> None:
    killed = open_store(OTHER_RUN)
    make_old(killed.directory)
    killed.show_life()
    kill(killed)
    open_store()
    assert killed.directory.is_dir()


def test_two_agents_may_remove_the_same_at_once(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned = open_store(OTHER_RUN)
    kill(abandoned)
    make_old(abandoned.directory)

    def too_late(directory: Path) -> bool:
        shutil.rmtree(directory)
        raise FileNotFoundError(directory)

    with monkeypatch.context() as patch:
        patch.setattr(snapshot_store, "_remove_if_unheld", too_late)
        snapshot_store._remove_abandoned(abandoned.directory.parent, but_run=RUN)
    assert not abandoned.directory.exists()


def test_a_directory_that_was_never_locked_is_removed(open_store: Open, tmp_path: Path) -> None:
    nameless = tmp_path / f"spectrain-{os.getuid()}-{OTHER_RUN[:12]}-0"
    nameless.mkdir()
    make_old(nameless)
    store = open_store()
    assert list(tmp_path.iterdir()) == [store.directory]


def test_the_directory_of_a_living_run_stays(open_store: Open) -> None:
    living = open_store(OTHER_RUN)
    make_old(living.directory)
    open_store()
    assert living.directory.is_dir()


def test_a_directory_with_our_name_that_is_not_ours_stays(open_store: Open, tmp_path: Path) -> None:
    foreign = tmp_path / f"spectrain-{os.getuid()}-{OTHER_RUN[:12]}-0"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    make_old(elsewhere)
    foreign.symlink_to(elsewhere)
    open_store()
    assert foreign.is_symlink()
    assert list(elsewhere.iterdir()) == []


def test_an_agent_of_the_same_run_finds_its_snapshots_again(open_store: Open) -> None:
    former = open_store()
    path = put(former.directory, 0, 10)
    kill(former)
    assert open_store().own(10) == {0: path}


def test_agents_of_one_run_on_two_hosts_do_not_meet(open_store: Open) -> None:
    former = open_store(host_index=0)
    kill(former)
    open_store(host_index=1)
    assert former.directory.is_dir(), "its agent will come back"


def test_a_second_agent_for_the_same_host_is_refused(open_store: Open) -> None:
    open_store()
    with pytest.raises(HostError, match=r"still held after 0 s: there can be one agent"):
        open_store()


def test_an_agent_waits_for_its_predecessor_to_end(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = open_store()
    refused = threading.Event()
    real = snapshot_store._lock

    def lock(directory: Path) -> int | None:
        taken = real(directory)
        if taken is None and not refused.is_set():
            refused.set()
            former.close()  # directory and all: the successor has to make it anew
        return taken

    monkeypatch.setattr(snapshot_store, "_lock", lock)
    store = open_store(wait_s=20)
    assert refused.is_set()
    assert store.ipc.is_dir()


def test_a_lock_file_that_was_replaced_meanwhile_is_not_taken(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    path, other = store.directory / "lock", store.directory / "other"
    other.touch()
    real = os.open

    def open_and_lose(*arguments: object, **options: object) -> int:
        descriptor = real(*arguments, **options)
        other.rename(path)
        return descriptor

    path.unlink()
    monkeypatch.setattr(os, "open", open_and_lose)
    assert snapshot_store._lock(store.directory) is None


def test_a_place_that_somebody_else_has_taken_is_refused(open_store: Open, tmp_path: Path) -> None:
    name = f"spectrain-{os.getuid()}-{RUN[:12]}-0"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostError, match="belongs to somebody else"):
        open_store()


def test_the_end_of_a_run_may_remove_what_its_killed_agents_left(
    open_store: Open, tmp_path: Path
) -> None:
    kill(open_store())
    living = open_store(OTHER_RUN)
    remove_run(RUN, tmp_path)
    assert list(tmp_path.iterdir()) == [living.directory]


# -- what lies in it ----------------------------------------------------------------------------


def test_a_host_knows_its_own_snapshots_of_a_round(open_store: Open) -> None:
    store = open_store()
    paths = {stage: put(store.directory, stage, 10) for stage in (0, 12)}
    put(store.directory, 0, 20)
    put(store.replicas, 1, 10)
    assert store.own(10) == paths


def test_its_own_snapshot_is_found_before_a_replica(open_store: Open) -> None:
    store = open_store()
    replica = put(store.replicas, 0, 10)
    assert store.find(0, 10) == replica
    own = put(store.directory, 0, 10)
    assert store.find(0, 10) == own
    assert store.find(0, 20) is None


def test_a_survey_reads_every_whole_file(open_store: Open) -> None:
    store = open_store()
    put(store.replicas, 1, 10, b"replica")
    put(store.directory, 0, 10, b"own")
    (store.directory / ".stage-0.update-20.safetensors.tmp").write_bytes(b"half")
    found = [(file.stage, file.update, file.digest) for file in store.survey()]
    assert found == [
        (0, 10, xxhash.xxh3_128_hexdigest(b"own")),
        (1, 10, xxhash.xxh3_128_hexdigest(b"replica")),
    ]


def test_a_survey_does_not_mind_a_file_that_goes(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    put(store.directory, 0, 10)
    put(store.directory, 1, 10)
    gone: list[Path] = []

    def digest(path: Path) -> str:
        if not gone:
            path.unlink()
            gone.append(path)
        return digest_of(path)

    monkeypatch.setattr(snapshot_store, "digest_of", digest)
    assert [file.stage for file in store.survey()] == [1]


def test_a_survey_does_not_mind_the_end_of_the_run(open_store: Open) -> None:
    store = open_store()
    store.close()
    assert store.survey() == ()


def test_what_is_older_than_the_committed_round_goes(open_store: Open) -> None:
    store = open_store()
    for directory in (store.directory, store.replicas):
        for update in (10, 20, 30):
            put(directory, 0, update)
    store.prune(20)
    assert store.own(10) == {}
    assert [file.update for file in store.survey()] == [20, 30, 20, 30]


def test_what_a_dead_worker_left_half_done_goes(open_store: Open) -> None:
    store = open_store()
    whole = put(store.directory, 1, 10)
    half = store.directory / ".stage-1.update-20.safetensors.tmp"
    other = store.directory / ".stage-11.update-20.safetensors.tmp"
    for path in (half, other):
        path.write_bytes(b"half")
    store.discard_unfinished(1)
    assert (whole.exists(), half.exists(), other.exists()) == (True, False, True)


def test_free_space_is_what_the_file_system_has_left(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    free = os.statvfs(store.directory)
    assert 0 < store.free_bytes() <= free.f_bavail * free.f_frsize * 1.1

    class Memory:
        available = 5

    monkeypatch.setattr(snapshot_store.psutil, "virtual_memory", Memory)
    assert store.free_bytes() == 5, "shared memory is memory"


def test_a_digest_is_over_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_store, "CHUNK_BYTES", 4)
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert digest_of(path) == xxhash.xxh3_128_hexdigest(b"0123456789")
