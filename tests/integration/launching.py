"""Runs the real ``spectrain-launch`` on this machine and finds the processes of its run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from waiting import wait_until

__all__ = ["Launch", "launch", "run_to_end"]

LAUNCH = str(Path(sys.executable).with_name("spectrain-launch"))
ROLES = {
    "coordinator": "spectrain.coordinator",
    "agent": "spectrain.launch.agent",
    "nursery": "spectrain.worker.nursery",
}


@dataclass
class Launch:
    """One launch that is under way or over."""

    process: subprocess.Popen[str]
    run_dir: Path
    seen: dict[int, psutil.Process] = field(default_factory=dict[int, psutil.Process])

    def processes(self) -> list[psutil.Process]:
        """Return every process of the run that has ever been seen and still lives."""
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.seen.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            pass
        return [process for process in self.seen.values() if _lives(process)]

    def role(self, name: str) -> psutil.Process:
        """Return the process that plays this role."""
        module = ROLES[name]
        return wait_until(
            lambda: next((p for p in self.processes() if module in _command_line(p)), None),
            what=f"the {name}",
            timeout_s=60,
        )

    def status(self) -> dict[str, Any]:
        """Return what ``status.json`` says; empty before there is one."""
        path = self.run_dir / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def summary(self) -> dict[str, Any]:
        """Return what ``summary.json`` says."""
        return json.loads((self.run_dir / "summary.json").read_text())

    def losses(self) -> list[float]:
        """Return the loss of every trained batch, in order."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [record["loss"] for record in records if record["kind"] == "train"]

    def wait_for_batch(self, batch: int) -> dict[str, Any]:
        """Wait until so many batches are trained; return the status that says so."""
        self.processes()

        def trained() -> dict[str, Any] | None:
            self.processes()
            status = self.status()
            return status if status.get("batch", 0) >= batch else None

        return wait_until(trained, what=f"batch {batch}", timeout_s=90)

    def wait_for_nobody(self, timeout_s: float) -> None:
        """Wait until no process of the run is left."""
        wait_until(lambda: not self.processes(), what="every process to end", timeout_s=timeout_s)

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return the exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def launch(
    run_dir: Path,
    *options: str,
    job: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
) -> Launch:
    """Start a launch on CPU and return at once.

    Args:
        run_dir: of the run.
        options: more of the command's.
        job: the job file.
        env: variables on top of our own.
        within: a program and its arguments that becomes the command which follows them.
    """
    argv = [*within, LAUNCH, "--device", "cpu", "--run-dir", str(run_dir), *options]
    if job is not None:
        argv.append(str(job))
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    return Launch(process, run_dir)


def run_to_end(
    run_dir: Path, *options: str, job: str | Path | None = None, exit_code: int = 0
) -> Launch:
    """Launch, wait for the end and check the exit code."""
    started = launch(run_dir, *options, job=job)
    code, out, err = started.end()
    assert code == exit_code, f"exit code {code}, expected {exit_code}\n{out}\n{err}"
    return started


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command_line(process: psutil.Process) -> Sequence[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return ()
