"""A real run on this machine that benchmarks watch and disturb, and its quiet twin."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from spectrain.coordinator.export import weights_sha256
from spectrain.coordinator.plan import make_plan
from spectrain.protocol.job import load_job
from spectrain.protocol.settings import Settings
from spectrain.worker.pipeline import run_in_one_process

__all__ = ["NOISY_DIGITS", "LiveRun", "Process", "first_difference"]

NOISY_DIGITS = Path(__file__).with_name("noisy_digits.py")

_MODULES = {
    "coordinator": "spectrain.coordinator",
    "agent": "spectrain.launch.agent",
    "nursery": "spectrain.worker.nursery",
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a run: "worker", "agent", "nursery", "coordinator" or "launcher"."""

    role: str
    psutil: psutil.Process


class LiveRun:
    """A launch under way.

    Args:
        run_dir: of the run.
        job: the job file.
        options: more of the command's options.
        hyper: for ``--set``.
    """

    def __init__(
        self, run_dir: Path, job: Path, *options: str, hyper: Mapping[str, str] | None = None
    ) -> None:
        self.run_dir = run_dir
        self.hyper = dict(hyper or {})
        self._job = job
        command = Path(sys.executable).with_name("spectrain-launch")
        argv = [str(command), "--device", "cpu", "--run-dir", str(run_dir), *options, str(job)]
        for name, value in self.hyper.items():
            argv += ["--set", f"{name}={value}"]
        run_dir.mkdir(parents=True, exist_ok=True)
        self.output = run_dir / "launcher.log"
        with self.output.open("w") as output:
            self.launcher = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def is_over(self) -> bool:
        return self.launcher.poll() is not None

    def processes(self) -> list[Process]:
        """Return the processes that live now, the launcher first."""
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.launcher.pid)
            found = [Process("launcher", launcher)]
            for child in launcher.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    found.append(Process(_role(child), child))
            return [each for each in found if each.role]
        return []

    def status(self) -> dict[str, Any]:
        path = self.run_dir / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def losses(self) -> list[float]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        records = map(json.loads, lines)
        return [record["loss"] for record in records if record["kind"] == "train"]

    def wait_for(self, condition: Callable[[], T], what: str, timeout_s: float = 120.0) -> T:
        """Return the first true result of ``condition``; give up when the run is over."""
        deadline = time.monotonic() + timeout_s
        while not (result := condition()):
            if self.is_over or time.monotonic() > deadline:
                raise SystemExit(f"no {what}; the run says:\n{self.output.read_text()}")
            time.sleep(0.02)
        return result

    def wait_for_batch(self, batch: int) -> None:
        self.wait_for(lambda: self.status().get("batch", 0) >= batch, f"batch {batch}")

    def stop(self) -> int:
        """Ask for a clean end, wait for it and return the exit code."""
        if not self.is_over:
            self.launcher.send_signal(signal.SIGINT)
        return self.launcher.wait(120)

    def quiet_twin(self) -> tuple[str, list[float]]:
        """Do the same batches in one process; return the digest of the weights and the losses."""
        settings = Settings.from_dict(
            {
                **json.loads((self.run_dir / "settings.json").read_text()),
                "max_batches": self.summary()["updates"],
                "hyper": {name: value for name, value in self.hyper.items() if name != "pause_s"},
            }
        )
        plan = make_plan(settings)
        outcome = run_in_one_process(load_job(self._job), settings, plan.feed, plan.layer_counts)
        return weights_sha256(outcome.state), [batch.loss for batch in outcome.batches]


def first_difference(ours: list[float], theirs: list[float]) -> str:
    """Say where two lists of losses part; empty if they do not."""
    for batch, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return f"batch {batch}: loss {one!r}, quietly {other!r}"
    if len(ours) != len(theirs):
        return f"{len(ours)} losses, quietly {len(theirs)}"
    return ""


def _role(process: psutil.Process) -> str:
    """Return what a process is; a worker is a fork of its nursery, command line and all."""
    command = process.cmdline()
    role = next((role for role, module in _MODULES.items() if module in command), "")
    if role == "nursery":
        parent = process.parent()
        is_fork = parent is not None and _MODULES["nursery"] in parent.cmdline()
        return "worker" if is_fork else role
    return role
