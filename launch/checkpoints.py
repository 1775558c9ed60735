"""Copies committed rounds from shared memory to disk, beside everything else; decides no round.

::

    <run_dir>/checkpoints/update-40/
        stage-2.safetensors     byte for byte the snapshot
        host-0.json             written last: what host 0 has put here, whole and verified

Several hosts may share the disk, so each host vouches for, and later removes, its own files only.
Whatever goes wrong is told as text: training goes on, older checkpoints stand, and the next
committed round is tried.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from ..protocol.messages import CheckpointWritten, SnapshotFile
from .snapshot_store import CHUNK_BYTES, digest_of

__all__ = ["CheckpointWriter", "read_checkpoints"]

_KEPT = 2


def read_checkpoints(run_dir: Path, run_id: str | None) -> tuple[SnapshotFile, ...]:
    """Return every snapshot on disk that a manifest vouches for, oldest first.

    Args:
        run_dir: of the run.
        run_id: leave out what other runs have written; None: take all, to go on from it.
    """
    files = [file for manifest in _manifests(run_dir, "*", run_id) for file in manifest.files]
    return tuple(sorted(files, key=lambda file: (file.update, file.stage)))


class CheckpointWriter:
    """One host's part of the checkpoints; a thread of its own writes one round at a time.

    Args:
        run_dir: of the run, on this host.
        run_id: of the run.
        host_index: of this host.
        goes_on: whether this run goes on from what earlier ones left in ``run_dir``, and so may
            remove it; else that is left alone.
        on_end: told of each round that is written or could not be; called in any thread.
    """

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        host_index: int,
        *,
        goes_on: bool = False,
        on_end: Callable[[CheckpointWritten], None],
    ) -> None:
        self._run_dir = run_dir
        self._run_id = run_id
        self._counted = None if goes_on else run_id
        self._host_index = host_index
        self._on_end = on_end
        self._changed = threading.Condition()
        self._waiting: _Round | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
        self._thread.start()

    def write(self, update: int, files: Sequence[SnapshotFile]) -> None:
        """Write this round as soon as the one under way is done; of those that wait, the newest.

        The files are opened here and now, so that they may be pruned meanwhile.
        """
        sources = ExitStack()
        try:
            opened = [
                (file, sources.enter_context(open(file.path, "rb", buffering=0)))  # noqa: PTH123, SIM115
                for file in files
            ]
        except OSError as error:
            sources.close()
            self._report(update, (), f"cannot read a snapshot: {error}")
            return
        with self._changed:
            skipped, self._waiting = self._waiting, _Round(update, opened, sources)
            self._changed.notify()
        if skipped is not None:
            skipped.sources.close()

    def close(self) -> None:
        """Abandon what is under way and end the thread; older checkpoints stand."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        if self._waiting is not None:
            self._waiting.sources.close()

    def _work(self) -> None:
        while (work := self._next()) is not None:
            with work.sources:
                try:
                    files = self._write_round(work)
                except _AbandonedError:
                    return
                except OSError as error:
                    self._report(work.update, (), str(error))
                else:
                    self._report(work.update, files, "")

    def _next(self) -> _Round | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting is not None)
            if self._closed:
                return None
            work, self._waiting = self._waiting, None
            return work

    def _report(self, update: int, files: Sequence[SnapshotFile], error: str) -> None:
        self._on_end(
            CheckpointWritten(
                host_index=self._host_index, update=update, files=tuple(files), error=error
            )
        )

    def _write_round(self, work: _Round) -> list[SnapshotFile]:
        directory = self._run_dir / "checkpoints" / f"update-{work.update}"
        directory.mkdir(parents=True, exist_ok=True)
        written: list[SnapshotFile] = []
        for file, source in work.files:
            path = directory / f"stage-{file.stage}.safetensors"
            self._write_file(path, self._chunks(source, file))
            if digest_of(path) != file.digest:
                path.unlink()
                raise OSError(
                    errno.EIO, "the disk gives back other bytes than it was given", str(path)
                )
            written.append(replace(file, path=str(path)))
        manifest = _Manifest(directory / f"host-{self._host_index}.json", written)
        self._write_file(manifest.path, iter([manifest.to_json(self._run_id)]))
        for above in (directory.parent, self._run_dir):
            _fsync_directory(above)
        self._remove_others(work.update)
        return written

    def _chunks(self, source: BinaryIO, file: SnapshotFile) -> Iterator[bytes]:
        """Yield the file, and raise instead of ending if it is not what its digest says."""
        digest = xxhash.xxh3_128()
        while chunk := source.read(CHUNK_BYTES):
            if self._closed:
                raise _AbandonedError
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != file.digest:
            problem = f"has digest {digest.hexdigest()}, not {file.digest}"
            raise OSError(errno.EIO, problem, file.path)

    def _write_file(self, path: Path, chunks: Iterator[bytes]) -> None:
        """Put a whole file in its place, or none: it is on the disk before it gets its name."""
        partial = path.with_name(f".{path.name}.host-{self._host_index}.partial")
        try:
            with partial.open("wb", buffering=0) as target:
                for chunk in chunks:
                    left = memoryview(chunk)
                    while left:  # a disk that fills up takes a part first
                        left = left[target.write(left) :]
                os.fsync(target.fileno())
                # What is read back to be verified shall come from the disk.
                os.posix_fadvise(target.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
        _fsync_directory(path.parent)

    def _remove_others(self, newest: int) -> None:
        """Keep this host's files of the round just written and of the one before it.

        Rounds above it are removed too: all stages went back to an older one and have begun anew.
        """
        own = {
            manifest.update: manifest
            for manifest in _manifests(self._run_dir, f"host-{self._host_index}", self._counted)
        }
        kept = sorted(update for update in own if update <= newest)[-_KEPT:]
        for update in own.keys() - kept:
            manifest = own[update]
            # The manifest goes first: without it the rest counts for nothing.
            for path in (manifest.path, *(Path(file.path) for file in manifest.files)):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # other hosts' files are still in it
                manifest.path.parent.rmdir()


class _AbandonedError(Exception):
    """The writer was closed while it wrote."""


@dataclass(frozen=True, slots=True)
class _Round:
    update: int
    files: Sequence[tuple[SnapshotFile, BinaryIO]]
    sources: ExitStack  # closes the files


@dataclass(frozen=True, slots=True)
class _Manifest:
    path: Path
    files: list[SnapshotFile]

    @property
    def update(self) -> int:
        return int(self.path.parent.name.removeprefix("update-"))

    def to_json(self, run_id: str) -> bytes:
        snapshots = [
            {"stage": file.stage, "digest": file.digest, "file": Path(file.path).name}
            for file in self.files
        ]
        values = {"run_id": run_id, "update": self.update, "snapshots": snapshots}
        return json.dumps(values, indent=2).encode() + b"\n"


def _manifests(run_dir: Path, name: str, run_id: str | None) -> Iterator[_Manifest]:
    for path in run_dir.glob(f"checkpoints/update-*/{name}.json"):
        # One that cannot be read vouches for nothing; it may be gone since it was listed.
        with suppress(OSError, ValueError, KeyError, TypeError):
            values: dict[str, Any] = json.loads(path.read_bytes())
            if run_id in (None, values["run_id"]):
                files = [
                    SnapshotFile(
                        stage=int(entry["stage"]),
                        update=int(values["update"]),
                        digest=str(entry["digest"]),
                        path=str(path.with_name(entry["file"])),
                    )
                    for entry in values["snapshots"]
                ]
                yield _Manifest(path, files)


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
