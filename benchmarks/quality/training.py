"""Trains one run after the other, as asked on standard input: a process of its own for each core.

A line holds the fields of a ``Run`` as JSON. The answer is the line of its ``Result``, or an
object with ``error`` where the task cannot be trained on this machine. It ends with its input.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from grid import Run, settings_of
from records import Result
from tasks import TASKS

from spectrain.coordinator.plan import make_plan
from spectrain.protocol.errors import NonFiniteError, UserError
from spectrain.protocol.job import load_job
from spectrain.protocol.messages import BatchResult
from spectrain.worker.pipeline import run_in_one_process
from spectrain.worker.scoreboard import EvaluationResult

__all__ = ["train"]


def train(run: Run) -> Result:
    """Train to the end, or until the loss is not finite.

    All stages are in this process, on one thread: the same bits as real workers have.

    Raises:
        UserError: the job cannot be run, for example because its data are not there.
    """
    torch.set_num_threads(1)
    settings, metric = settings_of(run), TASKS[run.task].metric
    plan = make_plan(settings)
    batches: list[BatchResult] = []
    evaluations: list[EvaluationResult] = []
    started_s = time.monotonic()
    diverged = False
    try:
        run_in_one_process(
            load_job(Path(settings.job)),
            settings,
            plan.feed,
            plan.layer_counts,
            on_batch=batches.append,
            on_evaluation=evaluations.append,
        )
    except NonFiniteError:
        diverged = True
    seconds = time.monotonic() - started_s
    curve = tuple(round(metric.scale * result.metrics[metric.key], 4) for result in evaluations)
    better = max if metric.higher_is_better else min
    losses = epoch_means([batch.loss for batch in batches], plan.work.epoch_batches)
    return Result(
        run=run,
        final=metric.chance if diverged else curve[-1],
        best=better(curve, default=metric.chance),
        train_loss=losses[-1] if losses else None,
        diverged=diverged,
        metric_curve=curve,
        loss_curve=losses,
        seconds=round(seconds, 2),
        torch=torch.__version__,
    )


def epoch_means(losses: Sequence[float], epoch_batches: int) -> tuple[float, ...]:
    """Return the mean of each epoch that is complete, to five digits."""
    return tuple(
        float(f"{statistics.fmean(losses[first : first + epoch_batches]):.5g}")
        for first in range(0, len(losses) - epoch_batches + 1, epoch_batches)
    )


def main() -> None:
    """Serve until standard input ends."""
    for number in (signal.SIGINT, signal.SIGPIPE):  # who started this one tells of it, if anybody
        signal.signal(number, signal.SIG_DFL)
    for line in sys.stdin:
        try:
            answer = train(Run(**json.loads(line))).to_line()
        except UserError as error:
            answer = json.dumps({"error": str(error)})
        print(answer, flush=True)


if __name__ == "__main__":
    main()
