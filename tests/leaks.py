"""What a test may leave behind in this process and on this machine: nothing. Finds it, ends none.

Python's own warnings (errors here) already catch unclosed files and sockets of Python; this
catches the rest: threads, child processes, descriptors opened by C libraries such as ZeroMQ and
gloo, and files in shared memory.
"""

# multiprocessing has no public word for the processes that it keeps.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import psutil

__all__ = ["Snapshot", "left_behind", "take_snapshot"]

_SHARED_MEMORY = Path("/dev/shm")
_KINDS_OF_DESCRIPTOR = ("socket:", "pipe:", "anon_inode:", "/memfd:", "/dev/shm/")


class Snapshot(NamedTuple):
    """What exists at one moment, in words fit for a failure's text.

    Threads count by identity, processes by pid and start time: names and pids come again.
    """

    threads: dict[threading.Thread, str]
    processes: dict[tuple[int, float], str]
    descriptors: dict[tuple[int, str], str]
    shared_memory: frozenset[str]


def take_snapshot() -> Snapshot:
    """Look around."""
    return Snapshot(
        threads={thread: f"thread {thread.name}" for thread in threading.enumerate()},
        processes=_processes(),
        descriptors=_descriptors(),
        shared_memory=frozenset(path.name for path in _SHARED_MEMORY.glob("*")),
    )


def left_behind(before: Snapshot) -> list[str]:
    """Return one line for each thing that has come since ``before`` and is still there."""
    lines = _compare(before, take_snapshot())
    if not lines:
        return []
    gc.collect()  # slow, hence late: what only a reference cycle holds is garbage, not a leak
    return _compare(before, take_snapshot())


def _compare(before: Snapshot, now: Snapshot) -> list[str]:
    lines = [
        *_new(before.threads, now.threads),
        *_new(before.processes, now.processes),
        *_new(before.descriptors, now.descriptors),
    ]
    new_files = sorted(now.shared_memory - before.shared_memory)
    if new_files:  # other programs use shared memory too: what they hold open is theirs
        held = _shared_memory_in_use()
        lines.extend(f"/dev/shm/{name}, in nobody's use" for name in new_files if name not in held)
    return lines


def _new(before: Mapping[Any, str], now: Mapping[Any, str]) -> list[str]:
    return [text for key, text in now.items() if key not in before]


def _processes() -> dict[tuple[int, float], str]:
    lasting = _processes_of_the_standard_library()
    children = psutil.Process().children(recursive=True)
    return {
        (child.pid, child.create_time()): f"process {child.pid}: {_command(child)}"
        for child in children
        if child.pid not in lasting
    }


def _command(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):  # it ended while we looked, or nobody waited for it
        return " ".join(process.cmdline())[:200]
    return "(ended, but not waited for)"


def _descriptors() -> dict[tuple[int, str], str]:
    lasting = {
        resource_tracker._resource_tracker._fd,
        forkserver._forkserver._forkserver_alive_fd,
    }
    targets = {int(entry.name): _target(entry) for entry in Path("/proc/self/fd").iterdir()}
    return {
        (number, target): f"descriptor {number}: {target}"
        for number, target in targets.items()
        if number not in lasting and target.startswith(_KINDS_OF_DESCRIPTOR)
    }


def _processes_of_the_standard_library() -> set[int | None]:
    """Return the pids that multiprocessing starts once and keeps for ever, by design."""
    return {
        resource_tracker._resource_tracker._pid,
        forkserver._forkserver._forkserver_pid,
    }


def _shared_memory_in_use() -> set[str]:
    """Return the names in shared memory that any process has open or mapped."""
    paths: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is not ours to look at
            paths.extend(map(_target, (process / "fd").iterdir()))
            maps = (process / "maps").read_text(errors="replace")
            paths.extend(line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return {
        Path(path).relative_to(_SHARED_MEMORY).parts[0]
        for path in paths
        if path.startswith(f"{_SHARED_MEMORY}/")
    }


def _target(entry: Path) -> str:
    """Return where a link in /proc points; empty when it is gone, like a listing's own."""
    with suppress(OSError):
        return str(entry.readlink())
    return ""
