"""Trains a job with all its stages in this one process: ``python -m spectrain.simulator``.

The way to study depth without machines. Loops, stages, methods and feed are those of a real run,
streams stay in memory, and the bits are the same. It reads settings from standard input and prints
one JSON object per line: ``batch``, ``evaluation``, and at the end ``summary``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ..coordinator.export import weights_sha256
from ..coordinator.plan import make_plan
from ..protocol.errors import SpectrainError
from ..protocol.job import load_job
from ..protocol.messages import BatchResult
from ..protocol.settings import Settings
from ..worker.pipeline import run_in_one_process
from ..worker.scoreboard import EvaluationResult

__all__ = ["simulate"]


def simulate(settings: Settings) -> dict[str, Any]:
    """Train to the end, printing as it goes; return the summary.

    Raises:
        JobError: the job's functions fail, or the method cannot work with the optimizer.
        NonFiniteError: a loss is NaN or infinite.
    """
    torch.set_num_threads(settings.threads)
    job = load_job(Path(settings.job))
    plan = make_plan(settings)
    started_s = time.monotonic()
    outcome = run_in_one_process(
        job, settings, plan.feed, plan.layer_counts, on_batch=_show_batch, on_evaluation=_show_test
    )
    return {
        "kind": "summary",
        "stages": settings.stages,
        "layers": list(plan.layer_counts),
        "method": settings.method,
        "updates": len(outcome.batches),
        "train_loss": outcome.batches[-1].loss,
        "seconds": time.monotonic() - started_s,
        "weights_sha256": weights_sha256(outcome.state),
    }


def _show_batch(result: BatchResult) -> None:
    _print({"kind": "batch", "batch": result.batch, "loss": result.loss, "lr": result.lr})


def _show_test(result: EvaluationResult) -> None:
    _print({"kind": "evaluation", "epoch": result.round, "loss": result.loss, **result.metrics})


def _print(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)  # noqa: T201  the launcher reads these lines


def main() -> int:
    """Simulate the settings on standard input; return the exit code."""
    settings = Settings.from_json(sys.stdin.read())
    try:
        _print(simulate(settings))
    except SpectrainError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
