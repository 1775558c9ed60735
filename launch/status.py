"""Tells how a run is, or was, from its run directory alone; talks to no process of it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from ..protocol.errors import UserError
from .render import duration, metrics_text, table

__all__ = ["read_status", "render_status"]

Status: TypeAlias = dict[str, Any]
"""The contents of ``status.json``; here ``explanation`` and ``summary`` may be added."""

FINAL_STATES = frozenset({"done", "stopped", "failed"})

STALE_AFTER_S = 30.0
"""``status.json`` is rewritten every second; this old, something is wrong with its writer."""

_START_TOLERANCE_S = 1.0
"""The start of a process is computed from the host's boot time, which may drift a little."""


def read_status(
    run_dir: Path,
    *,
    now: float | None = None,
    host: str | None = None,
    is_alive: Callable[[int, float], bool] | None = None,
) -> Status:
    """Return the state of the run in ``run_dir``.

    A run whose coordinator is dead although it had not ended has the state ``lost``.

    Args:
        run_dir: the run directory.
        now: seconds of the epoch; this host's clock unless given.
        host: name of this host; asked of the system unless given.
        is_alive: tells whether a process with this pid and start time lives on this host.

    Raises:
        UserError: there is no run in ``run_dir``, or its status cannot be read.
    """
    status = _load(run_dir)
    if status["state"] in FINAL_STATES:
        summary = run_dir / "summary.json"
        return (
            {**status, "summary": json.loads(summary.read_text())} if summary.exists() else status
        )
    coordinator = status["coordinator"]
    age_s = max((time.time() if now is None else now) - status["updated"], 0.0)
    pid, where = coordinator["pid"], coordinator["host"]
    if where != (host or socket.gethostname()):
        if age_s < STALE_AFTER_S:
            return status
        explanation = (
            f"last written {duration(age_s)} ago by process {pid} on {where}; whether that lives "
            f"can only be seen there"
        )
        return {**status, "explanation": explanation}
    if (is_alive or _is_alive)(pid, coordinator["started"]):
        return status
    explanation = (
        f"the coordinator, process {pid} on {where}, ended without a word {duration(age_s)} ago, "
        f"while the run was {status['state']}; see the logs in {run_dir / 'logs'}"
    )
    return {**status, "state": "lost", "explanation": explanation}


def render_status(status: Status) -> str:
    """Return ``status`` as text for people."""
    lines = [f"state: {status['state']}"]
    if "explanation" in status:
        lines.append(status["explanation"])
    lines += [f"waiting for {who}" for who in status.get("waiting_for") or ()]
    if status.get("batch"):
        lines.append(f"batch {status['batch']}/{status['train_batches']}")
    if status.get("metrics"):
        lines.append(f"test: {metrics_text(status['metrics'])}")
    cause = status.get("cause")
    if cause is not None:
        lines.append(f"first cause: {cause['what']}: {cause['message']}")
    columns = ("stage", "host", "pid", "incarnation", "last_batch", "state")
    rows = [[worker[column] for column in columns] for worker in status["workers"]]
    if rows:
        lines += table([column.replace("_", " ") for column in columns], rows)
    return "\n".join(lines)


def _load(run_dir: Path) -> Status:
    if not run_dir.is_dir():
        raise UserError(
            f"{run_dir} is not a directory. Name the run directory, such as runs/<time>."
        )
    path = run_dir / "status.json"
    if not path.exists():
        raise UserError(
            f"{path} does not exist: either {run_dir} is no run directory, or its run has not got "
            f"as far as starting its coordinator."
        )
    try:
        status: Status = json.loads(path.read_text(encoding="utf-8"))
        state, workers, coordinator = status["state"], status["workers"], status["coordinator"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read as the status of a run: {error!r}") from error
    del state, workers, coordinator
    return status


def _is_alive(pid: int, started: float) -> bool:
    """Tell whether the very process lives: pids are used again, start times are not."""
    import psutil

    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < _START_TOLERANCE_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
