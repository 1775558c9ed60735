"""The directory in a host's shared memory that outlives its workers; reads snapshots, makes none.

::

    /dev/shm/spectrain-<uid>-<run>-<host index>/
        lock                              held by the agent for as long as it lives
        ipc/                              sockets of this host
        stage-2.update-40.safetensors     written by the worker of stage 2
        replica/                          the same of other hosts, written by this host's agent

Nobody but its owner may enter. The lock tells who is at home: a directory that nobody holds was
left by an agent that was killed. This run's is taken over as it stands; another run's is removed
once its agent has had time enough to be started again.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import xxhash

from ..protocol.errors import HostError
from ..protocol.messages import SnapshotFile

__all__ = ["SHARED_MEMORY", "SnapshotStore", "digest_of", "remove_run", "snapshot_name"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the directory itself is private
CHUNK_BYTES = 4 << 20

_NAME = re.compile(r"stage-(\d+)\.update-(\d+)\.safetensors")
_RETRY_S = 0.05
_ABANDONED_AFTER_S = 60.0  # a killed agent's successor is there within a lease and an ssh login


def snapshot_name(stage: int, update: int) -> str:
    """Return the file name of one stage's snapshot, the same in memory and on disk."""
    return f"stage-{stage}.update-{update}.safetensors"


def digest_of(path: Path) -> str:
    """Return the xxh3_128 of a file, hexadecimal.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def remove_run(run_id: str, base: Path = SHARED_MEMORY) -> None:
    """Remove what killed agents of a run that is over have left on this host."""
    for directory in base.glob(f"{_prefix()}{_short(run_id)}-*"):
        _remove_if_unheld(directory)


def _remove_abandoned(base: Path, *, but_run: str) -> None:
    """Remove what killed agents of other runs of this user have left on this host."""
    for directory in base.glob(f"{_prefix()}*"):
        if directory.name.startswith(f"{_prefix()}{_short(but_run)}-"):
            continue
        with suppress(FileNotFoundError):  # another agent does the same
            last_sign_s = max(path.stat().st_mtime for path in (directory, *directory.glob("lock")))
            if time.time() - last_sign_s > _ABANDONED_AFTER_S:
                _remove_if_unheld(directory)


def _remove_if_unheld(directory: Path) -> None:
    if not _is_private(directory):
        return  # its name says it is ours, its owner does not
    lock = _lock(directory)
    if lock is not None:
        shutil.rmtree(directory)
        os.close(lock)


class SnapshotStore:
    """One host's snapshots of one run, held by its agent.

    Args:
        run_id: of the run.
        host_index: of this host in the run.
        wait_s: how long to wait for a former agent of this run and host to end.
        base: where the directory is made.

    Raises:
        HostError: a former agent still lives, or the directory is not ours.
    """

    def __init__(
        self, run_id: str, host_index: int, *, wait_s: float, base: Path = SHARED_MEMORY
    ) -> None:
        _remove_abandoned(base, but_run=run_id)
        self.directory = base / f"{_prefix()}{_short(run_id)}-{host_index}"
        self.ipc = self.directory / "ipc"
        self.replicas = self.directory / "replica"
        self._is_kept = False
        self._lock = _take(self.directory, wait_s)
        for directory in (self.ipc, self.replicas):
            directory.mkdir(mode=0o700, exist_ok=True)

    def show_life(self) -> None:
        """Mark the directory as in use; to be called every few seconds."""
        os.utime(self._lock)

    def own(self, update: int) -> dict[int, Path]:
        """Return the snapshots that this host's workers wrote after ``update``, by stage."""
        return {
            stage: path for stage, of, path in _snapshots(self.directory) if of == update
        }  # fmt: skip

    def find(self, stage: int, update: int) -> Path | None:
        """Return a snapshot of this stage, its own rather than a replica; None if there is none."""
        name = snapshot_name(stage, update)
        places = (self.directory / name, self.replicas / name)
        return next((path for path in places if path.exists()), None)

    def survey(self) -> tuple[SnapshotFile, ...]:
        """Read every snapshot and return what was found, own ones first; takes its time."""
        found: list[SnapshotFile] = []
        for directory in (self.directory, self.replicas):
            with suppress(FileNotFoundError):  # the run ended meanwhile
                for stage, update, path in _snapshots(directory):
                    with suppress(FileNotFoundError):  # pruned meanwhile
                        file = SnapshotFile(
                            stage=stage, update=update, digest=digest_of(path), path=str(path)
                        )
                        found.append(file)
        return tuple(found)

    def prune(self, committed: int) -> None:
        """Remove what is older than the committed round; who has it open may read on."""
        for directory in (self.directory, self.replicas):
            for _, update, path in _snapshots(directory):
                if update < committed:
                    path.unlink()

    def discard_unfinished(self, stage: int) -> None:
        """Remove what a worker that is dead was about to write."""
        for path in self.directory.glob(f"*stage-{stage}.update-*"):
            if _NAME.fullmatch(path.name) is None:
                path.unlink()

    def free_bytes(self) -> int:
        """Return how much more fits: what is kept here is memory, whatever the limit says."""
        return min(shutil.disk_usage(self.directory).free, psutil.virtual_memory().available)

    def keep(self) -> None:
        """Leave the directory as it is at the end: this host's part of the run is not over."""
        self._is_kept = True

    def close(self) -> None:
        """Remove the directory and all in it, unless it is kept, and let go of the lock."""
        # What a dying worker still adds while we are at it, the next run removes.
        if not self._is_kept:
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)


def _prefix() -> str:
    return f"spectrain-{os.getuid()}-"


def _short(run_id: str) -> str:
    return run_id[:12]


def _snapshots(directory: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield stage, update and path of each whole snapshot, in order."""
    for path in sorted(directory.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            yield int(match[1]), int(match[2]), path


def _is_private(directory: Path) -> bool:
    """Tell whether this is a directory of ours, not a link to one; anybody may write above it."""
    facts = directory.lstat()
    return directory.is_dir() and not directory.is_symlink() and facts.st_uid == os.getuid()


def _take(directory: Path, wait_s: float) -> int:
    """Make the directory or take it over; return its lock."""
    deadline = time.monotonic() + wait_s
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(directory):
            raise HostError(
                f"{directory} belongs to somebody else: snapshots need a directory of our own. "
                "Remove it, or ask its owner to"
            )
        lock = _lock(directory)
        if lock is not None:
            return lock
        if time.monotonic() >= deadline:
            raise HostError(
                f"{directory} is still held after {wait_s:g} s: there can be one agent of a run "
                f"on a host. `fuser {directory}/lock` names the process that holds it"
            )
        time.sleep(_RETRY_S)


def _lock(directory: Path) -> int | None:
    """Return the directory's lock if nobody holds it, else None.

    Between opening the file and locking it, somebody may have removed the whole directory and
    another been made; then what is locked here is a file without a name.
    """
    path = directory / "lock"
    lock = -1
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(lock).st_ino:
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    if lock >= 0:
        os.close(lock)
    return None
