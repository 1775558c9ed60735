"""Writes the files of one run directory; knows their names and forms, decides nothing.

::

    run.json        the id of the run, which its checkpoints carry
    settings.json   what the run was asked to do, every value resolved
    plan.json       layers, size and predicted staleness of each stage
    status.json     who runs where and how far; rewritten while the run goes on
    metrics.jsonl   one record per line, see ``metrics.py``
    commit.json     the newest snapshot round that every stage can be restored to
    summary.json    the result; its presence says that the run is over
    faults/         one report per worker that failed
    model.safetensors, logs/   written by others

A file is written beside its place and renamed into it, so a reader sees the old one or the new
one, never half. Floats that JSON has no word for (NaN, infinities) become ``null``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..protocol.errors import UserError
from ..protocol.messages import Cause, View, WorkerFault
from ..protocol.settings import Settings
from ..protocol.strict_json import json_text

__all__ = ["RunDirectory", "json_text", "status_record"]


class RunDirectory:
    """The files of one run; one process writes them, any may read.

    Args:
        path: the run directory; it is made, with its parents, where it does not exist.

        goes_on: whether the run is under way and its files are to be continued.

    Raises:
        UserError: it already holds a run, which is never overwritten, or cannot be written.
    """

    def __init__(self, path: Path, *, goes_on: bool = False) -> None:
        self.path = path
        if not goes_on and (path / "status.json").exists():
            raise UserError(
                f"run directory {path} already holds a run (it has a status.json); a run is never "
                f"overwritten. Choose another --run-dir, or remove this one."
            )
        try:
            (path / "faults").mkdir(parents=True, exist_ok=True)
            self._metrics = (path / "metrics.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"run directory {path} cannot be written: {error.strerror}. Choose another "
                f"--run-dir."
            ) from error

    @property
    def model_path(self) -> Path:
        """Where the final weights belong."""
        return self.path / "model.safetensors"

    def write_settings(self, settings: Settings) -> None:
        """Write ``settings.json``."""
        self._write("settings.json", settings.to_dict())

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Write ``plan.json``."""
        self._write("plan.json", plan)

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Write ``status.json``, made by ``status_record``."""
        self._write("status.json", status)

    def read_commit(self) -> str:
        """Return what ``write_commit`` wrote last.

        Raises:
            OSError: there is nothing.
        """
        return (self.path / "commit.json").read_text(encoding="utf-8")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all whole records of ``metrics.jsonl``; the last may have been cut off."""
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1] if line]

    def cut_metrics(self, update: int) -> None:
        """Keep only what was known right after ``update`` updates."""
        kept = [
            record
            for record in self.read_metrics()
            if (record["kind"] == "train" and record["update"] < update)
            or (record["kind"] == "evaluation" and record["updates"] < update)
        ]
        self._metrics.truncate(0)
        self.append_metrics(kept)

    def write_run_id(self, run_id: str) -> None:
        """Write ``run.json``, by which a later launch can continue this run."""
        self._write("run.json", {"run_id": run_id})

    def write_commit(self, text: str) -> None:
        """Write ``commit.json`` so that not even a crash of this host loses it."""
        target = self.path / "commit.json"
        beside = target.with_name(".commit.json.new")
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
        directory = os.open(self.path, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        self._write("summary.json", summary)

    def write_fault(self, fault: WorkerFault, host: str) -> None:
        """Write a worker's own account of its failure, one file per incarnation of a stage."""
        name = f"faults/stage-{fault.stage}.incarnation-{fault.incarnation}.json"
        self._write(name, {"host": host, **asdict(fault)})

    def append_metrics(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add lines to ``metrics.jsonl`` and hand them to the operating system."""
        self._metrics.writelines(json_text(record) + "\n" for record in records)
        self._metrics.flush()

    def close(self) -> None:
        """Close ``metrics.jsonl``; the other files are never kept open."""
        self._metrics.close()

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        target = self.path / name
        beside = target.with_name(f".{target.name}.new")
        beside.write_text(json_text(value) + "\n", encoding="utf-8")
        beside.replace(target)


def status_record(
    view: View,
    *,
    coordinator_host: str,
    coordinator_started: float,
    updated: float,
    exit_code: int | None = None,
    cause: Cause | None = None,
) -> dict[str, Any]:
    """Return the contents of ``status.json``.

    Args:
        view: the newest one.
        coordinator_host: name of this host.
        coordinator_started: when this process started, in seconds of the epoch as ``psutil``
            tells it; with the pid it names the process for ever, the pid alone does not.
        updated: now, in seconds of the epoch.
        exit_code: of the run, once it has ended.
        cause: why it failed, if it did.
    """
    workers = [
        {
            "stage": stage.stage,
            "host": stage.host,
            "pid": stage.pid,
            "incarnation": stage.incarnation,
            "last_batch": stage.last_batch,
            "state": stage.state,
        }
        for stage in view.stages
    ]
    return {
        "state": view.state,
        "workers": workers,
        "coordinator": {
            "pid": os.getpid(),
            "host": coordinator_host,
            "started": coordinator_started,
        },
        "updated": updated,
        "waiting_for": view.waiting_for,
        "batch": view.batch,
        "train_batches": view.train_batches,
        "epoch": view.epoch,
        "epochs": view.epochs,
        "loss": view.loss,
        "lr": view.lr,
        "samples_per_s": view.samples_per_s,
        "eta_s": view.eta_s,
        "metrics": view.metrics,
        "exit_code": exit_code,
        "cause": None if cause is None else asdict(cause),
    }
