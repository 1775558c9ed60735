"""Several runs at once: starts the processes that train, hands out runs, collects results."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from grid import Run
from records import Result

__all__ = ["TaskError", "Trainer", "train_all"]


class TaskError(Exception):
    """A task cannot be trained here; the text says what it lacks."""


class Trainer:
    """One process that trains. It ends with its input, so it never outlives who started it."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("training.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def train(self, run: Run) -> Result:
        """Return how ``run`` went.

        Raises:
            TaskError: its task cannot be trained here.
            ChildProcessError: the process died.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asdict(run)) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise ChildProcessError(f"{run}: the training process died with {process.wait()}")
        error = json.loads(answer).get("error")
        if error is not None:
            raise TaskError(error)
        return Result.from_line(answer)

    def stop(self) -> None:
        """End the process, whatever it does; who waits for its answer learns that it died."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Let go of its pipes, once nobody waits for an answer any more."""
        self._process.__exit__(None, None, None)


def train_all(
    runs: Iterable[Run],
    *,
    jobs: int,
    may_start: Callable[[], bool],
    on_result: Callable[[Result], None],
) -> dict[str, str]:
    """Do ``runs`` in order, ``jobs`` at a time.

    Args:
        runs: what to do.
        jobs: processes that train at once, at least 1.
        may_start: asked before each run; once it says no, those that run are the last.
        on_result: gets each result as it comes; never called twice at once.

    Returns:
        By task that cannot be trained here, why. Its other runs are left out.
    """
    todo = iter(runs)
    missing: dict[str, str] = {}
    lock = threading.Lock()

    def next_run() -> Run | None:
        with lock:
            left = (run for run in todo if run.task not in missing)
            return next(left, None) if may_start() else None

    def do(run: Run, trainer: Trainer) -> None:
        try:
            result = trainer.train(run)
        except TaskError as error:
            with lock:
                missing[run.task] = str(error)
        else:
            with lock:
                on_result(result)

    def serve(trainer: Trainer) -> None:
        while (run := next_run()) is not None:
            do(run, trainer)

    trainers = [Trainer() for _ in range(jobs)]
    with ThreadPoolExecutor(jobs, thread_name_prefix="trainer") as pool:
        try:
            for served in as_completed([pool.submit(serve, trainer) for trainer in trainers]):
                served.result()
        finally:
            for trainer in trainers:
                trainer.stop()
    for trainer in trainers:
        trainer.close()
    return missing
