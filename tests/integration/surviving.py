"""Runs that processes die in, held against one that nothing happened to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from integration.jobs import NOISY, write_job
from integration.launching import Launch, launch
from waiting import wait_until

from spectrain.coordinator.export import weights_sha256
from spectrain.coordinator.plan import make_plan
from spectrain.protocol.job import load_job
from spectrain.protocol.settings import Settings
from spectrain.worker.pipeline import Outcome, run_in_one_process

__all__ = ["GONE_WITHIN_S", "Trial", "losses_of", "wait_for_losses", "worker_of"]

GONE_WITHIN_S = 15


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One job and its settings, to be run with and without faults.

    Attributes:
        folder: for the job and the run.
        job: its text.
        stages: one worker each.
        method: with three micro-batches if it is ``sync`` or ``xpipe``.
        epochs: of seven batches each.
        every: updates from one snapshot round to the next.
        hyper: for ``--set``.
        options: more of the command's.
    """

    folder: Path
    job: str = NOISY
    stages: int = 4
    method: str = "spectrain"
    epochs: int = 10
    every: int = 5
    hyper: Mapping[str, str] = field(default_factory=dict[str, str])
    options: Sequence[str] = ()

    @property
    def microbatches(self) -> int:
        return 3 if self.method in ("sync", "xpipe") else 1

    @property
    def job_path(self) -> Path:
        return self.folder / "job.py"

    def start(
        self, *faults: str, env: Mapping[str, str] | None = None, within: Sequence[str] = ()
    ) -> Launch:
        """Start the run; faults are lines of ``SPECTRAIN_FAULTS``; see ``launch``."""
        write_job(self.folder, self.job)
        options = [
            "--stages", str(self.stages), "--method", self.method,
            "--microbatches", str(self.microbatches), "--epochs", str(self.epochs),
            "--snapshot-every", str(self.every), *self.options,
        ]  # fmt: skip
        for name, value in self.hyper.items():
            options += ["--set", f"{name}={value}"]
        environment = {"SPECTRAIN_FAULTS": ";".join(faults), **(env or {})}
        run_dir = self.folder / "run"
        return launch(run_dir, *options, job=self.job_path, env=environment, within=within)

    def quiet(self, batches: int | None = None) -> Outcome:
        """Run it undisturbed, in this process; as far as ``batches`` if it is not None."""
        settings = Settings(
            job=str(self.job_path), run_dir="", stages=self.stages, method=self.method,
            microbatches=self.microbatches, batch_size=16, epochs=self.epochs, hyper=self.hyper,
            max_batches=batches,
        )  # fmt: skip
        plan = make_plan(settings)
        return run_in_one_process(load_job(self.job_path), settings, plan.feed, plan.layer_counts)

    def check(
        self, run: Launch, *, incarnations: Sequence[int], restarts: int | None = None
    ) -> str:
        """Wait for the end: nothing is lost, nobody is left; return what the user was told.

        Args:
            run: of ``start``.
            incarnations: of the worker that finished, by stage; one that was not restarted is
                the process that it was.
            restarts: as the summary counts them; None: as many as there were incarnations.
        """
        code, out, err = run.end()
        told = f"{out}\n{err}"
        assert code == 0, f"exit code {code}\n{told}"
        run.wait_for_nobody(GONE_WITHIN_S)
        outcome = self.quiet()
        assert run.losses() == losses_of(outcome), told
        summary = run.summary()
        assert summary["weights_sha256"] == weights_sha256(outcome.state), told
        workers = run.status()["workers"]
        assert [worker["incarnation"] for worker in workers] == list(incarnations), told
        assert summary["restarts"] == (sum(incarnations) if restarts is None else restarts), told
        return told


def losses_of(outcome: Outcome) -> list[float]:
    """Return the loss of every batch."""
    return [batch.loss for batch in outcome.batches]


def wait_for_losses(run: Launch, count: int) -> None:
    """Wait until the losses of so many batches are written down."""
    metrics = run.run_dir / "metrics.jsonl"

    def enough() -> bool:
        run.processes()
        return metrics.exists() and metrics.read_text().count('"kind": "train"') >= count

    wait_until(enough, what=f"{count} losses", timeout_s=90)


def worker_of(run: Launch, stage: int, incarnation: int = 0) -> psutil.Process:
    """Return the process of this worker: the one that writes its log."""
    life = f".restart-{incarnation}" if incarnation else ""
    log = run.run_dir / "logs" / f"stage-{stage}.localhost{life}.log"

    def find() -> psutil.Process | None:
        for process in run.processes():
            with suppress(OSError):  # it ended
                if Path(f"/proc/{process.pid}/fd/1").readlink() == log:
                    return process
        return None

    return wait_until(find, what=f"stage {stage}, incarnation {incarnation}", timeout_s=60)
