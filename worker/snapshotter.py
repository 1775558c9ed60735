"""Takes snapshots of a running stage: copies in the loop's thread, writes files in its own.

The loop stands still only for the copying. If a round comes while one is being written and
another waits, it is left out: training never waits for a file. What a snapshot holds and how it
looks as a file is in ``snapshot``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..protocol.schedule import Op
from .build import Parts
from .nested_state import dismantle
from .snapshot import (
    Origin,
    Position,
    header_of,
    tensors_of_forward,
    tensors_of_state,
    write_snapshot,
)

__all__ = ["Plan", "Snapshotter", "Written"]

_CAPTURES = 2  # one being written, one waiting


@dataclass(frozen=True, slots=True)
class Plan:
    """Which updates are followed by a snapshot: ``first``, ``first + every``, ...; 0: none.

    Before ``first`` the plan that was made earlier holds, if there was one.
    """

    first: int = 0
    every: int = 0
    patient: bool = False
    former: Plan | None = None

    def includes(self, update: int) -> bool:
        """Tell whether there is a snapshot after ``update`` updates."""
        if update < self.first:
            return self.former is not None and self.former.includes(update)
        return self.every > 0 and (update - self.first) % self.every == 0

    def includes_any(self, low: int, high: int) -> bool:
        """Tell whether there is a snapshot after u updates for any ``low <= u <= high``."""
        if low < self.first and self.former is not None:
            if self.former.includes_any(low, min(high, self.first - 1)):
                return True
            low = self.first
        if self.every == 0 or high < max(low, self.first):
            return False
        newest = high - (high - self.first) % self.every
        return newest >= low


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A snapshot that lies complete under its name; see ``messages.SnapshotWritten``."""

    update: int
    path: Path
    size_bytes: int
    digest: str
    capture_s: float
    write_s: float


class Snapshotter:
    """Keeps to a plan of snapshots; a ``loop.Snapshots``.

    Args:
        parts: the stage to take snapshots of.
        origin: whose they are.
        directory: where files go, as ``stage-K.update-U.safetensors``. Older ones stay.
        on_written: called for each file, in the writing thread.
        on_skipped: called with the update and the reason for each planned snapshot that is not
            taken, in either thread.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        parts: Parts,
        origin: Origin,
        directory: Path,
        *,
        on_written: Callable[[Written], None],
        on_skipped: Callable[[int, str], None] = lambda _update, _reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage = parts.stage
        self._weights = parts.weights
        self._origin = origin
        self._directory = directory
        self._on_written = on_written
        self._on_skipped = on_skipped
        self._clock = clock
        self._plan = Plan()
        self._forwards: dict[Op, _Forward] = {}  # copied, in order; only the loop's thread
        self._captures: SimpleQueue[_Capture | None] = SimpleQueue()
        self._lock = threading.Condition()  # of the copies to use again, and of their users
        self._spare = [_HostCopy() for _ in range(_CAPTURES)]
        self._spare_forwards: list[_HostCopy] = []
        self._thread = threading.Thread(target=self._write_all, name="snapshot", daemon=True)
        self._thread.start()

    def plan(self, first: int, every: int, *, patient: bool = False) -> None:
        """Take a snapshot after ``first`` updates and each ``every`` from there; from any thread.

        Args:
            first: at least 1. A stage that is past what it needs for it begins with a later one.
            every: 0: no snapshots.
            patient: let the loop wait for the files before rather than leave a snapshot out.
        """
        self._plan = Plan(first, every, patient, replace(self._plan, former=None))

    def before_forward(self, op: Op, number: int) -> None:
        """Copy what ``op`` reads if it will be in flight when a snapshot is due."""
        # In flight after update u are micro-batches of batch u and later.
        if not self._plan.includes_any(self._weights.version + 1, op.batch):
            return
        with self._lock:
            copy = self._spare_forwards.pop() if self._spare_forwards else _HostCopy()
        copy.fill(tensors_of_forward(op, self._weights.live, self._stage.buffers()))
        self._forwards[op] = _Forward(number, copy)

    def after_update(self, position: Callable[[], Position]) -> None:
        """Take a snapshot if one is due."""
        update = self._weights.version
        plan = self._plan
        if plan.includes(update):
            self._capture(update, position)
        for op in [op for op in self._forwards if not plan.includes_any(update + 1, op.batch)]:
            self._release(self._forwards.pop(op))

    def close(self) -> None:
        """Write what was taken, then end the thread."""
        self._captures.put(None)
        self._thread.join()

    def _capture(self, update: int, position: Callable[[], Position]) -> None:
        forwards = {op: forward for op, forward in self._forwards.items() if op.batch >= update}
        if len(forwards) != self._stage.in_flight:
            self._on_skipped(update, "it was planned after forwards that belong into it")
            return
        with self._lock:
            if self._plan.patient:
                self._lock.wait_for(lambda: self._spare)
            copy = self._spare.pop() if self._spare else None
        if copy is None:
            self._on_skipped(update, "the ones before it are still being written")
            return
        started = self._clock()
        weights = self._weights
        sources = tensors_of_state(weights.clean, self._stage.buffers(), weights.memory())
        optimizer = dismantle(weights.optimizer.state_dict(), "optimizer", sources)
        copy.fill(sources)
        in_flight = tuple((op, forward.number) for op, forward in forwards.items())
        header = header_of(self._origin, replace(position(), in_flight=in_flight), optimizer)
        with self._lock:
            for forward in forwards.values():
                forward.users += 1
        capture_s = self._clock() - started
        self._captures.put(_Capture(update, header, copy, tuple(forwards.values()), capture_s))

    def _release(self, forward: _Forward) -> None:
        with self._lock:
            forward.users -= 1
            if forward.users == 0:
                self._spare_forwards.append(forward.copy)

    # -- in the writing thread ----------------------------------------------------------------

    def _write_all(self) -> None:
        while (capture := self._captures.get()) is not None:
            self._write(capture)
            for forward in capture.forwards:
                self._release(forward)
            with self._lock:
                self._spare.append(capture.copy)
                self._lock.notify_all()

    def _write(self, capture: _Capture) -> None:
        started = self._clock()
        tensors = dict(capture.copy.tensors)
        for forward in capture.forwards:
            tensors.update(forward.copy.tensors)
        name = f"stage-{self._origin.stage}.update-{capture.update}.safetensors"
        path = self._directory / name
        try:
            size_bytes, digest = write_snapshot(path, capture.header, tensors)
        except (OSError, SafetensorError) as error:  # a full disk must not end the training
            self._on_skipped(capture.update, f"{path} could not be written: {error}")
            return
        self._on_written(
            Written(
                update=capture.update,
                path=path,
                size_bytes=size_bytes,
                digest=digest,
                capture_s=capture.capture_s,
                write_s=self._clock() - started,
            )
        )


class _HostCopy:
    """Copies of tensors in host memory, which the next copies of the same shapes reuse."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._memory: list[Tensor] = []

    def fill(self, sources: Mapping[str, Tensor]) -> None:
        """Hold the values of ``sources``, by name, and no others."""
        reusable = iter(self._memory)
        copies: dict[str, Tensor] = {}
        on_device = False
        for name, source in sources.items():
            kept = next(reusable, None)
            if kept is None or kept.shape != source.shape or kept.dtype != source.dtype:
                kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            copies[name] = kept.copy_(source.detach(), non_blocking=True)
            on_device |= source.is_cuda
        if on_device:
            torch.cuda.current_stream().synchronize()
        self.tensors = copies
        self._memory = list(copies.values())


@dataclass(slots=True)
class _Forward:
    """What a forward read, and how many need the copy: the loop, and captures not yet written."""

    number: int
    copy: _HostCopy
    users: int = 1


@dataclass(frozen=True, slots=True)
class _Capture:
    """A snapshot in memory."""

    update: int
    header: str
    copy: _HostCopy
    forwards: tuple[_Forward, ...]
    capture_s: float
