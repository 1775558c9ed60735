"""SpecTrain as a contestant: one real launch, as a user would start it, that trains by turns.

Its processes, streams, logs and snapshots are those of any run; only the job file knows of turns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from measure import Pace
from turns import GRANT, UPDATE, turns_pipe, updates_file

sys.path.append(str(Path(__file__).resolve().parents[1]))
from live_run import LiveRun

__all__ = ["SpecTrain"]

TURN_TIMEOUT_S = 120.0
REST_TIMEOUT_S = 3600  # a stage that rests while others have their turns does not hang
LAST_GRANT = 1 << 30


class SpecTrain:
    """One launch, with the settings of its job file and all others at their defaults.

    Only its patience is greater, with a stage that waits for a turn.

    Args:
        name: for tables.
        folder: an empty one.
        job: a job file that calls ``wait_for_turns`` and ``note_updates``.
        options: of the command.
        stages: N.
        hyper: for ``--set``.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        job: Path,
        *options: str,
        stages: int,
        hyper: Mapping[str, object],
    ) -> None:
        self.name = name
        self._stages = stages
        self._granted = 0
        self._batch_s: float | None = None
        os.mkfifo(turns_pipe(folder))
        self._pipe = os.open(turns_pipe(folder), os.O_RDWR)  # to write at once, reader or not
        texts = {key: str(value) for key, value in hyper.items()}
        options = ("--stages", str(stages), "--wait-timeout", str(REST_TIMEOUT_S), *options)
        self.run = LiveRun(folder, job, *options, hyper=texts)

    def take_turn(self, seconds: float) -> Pace:
        if self._batch_s is None:
            self._settle()
        timed = 10 if self._batch_s is None else max(3, round(seconds / self._batch_s))
        pace = self._train(self._stages + 4, timed)
        self._batch_s = pace.batch_s
        return pace

    def close(self) -> None:
        self._grant(LAST_GRANT)
        code = self.run.stop()
        os.close(self._pipe)
        if code != 130:  # stopped by SIGINT, nothing else went wrong
            raise SystemExit(f"exit code {code}:\n{self.run.output.read_text()}")

    def _settle(self) -> None:
        """Train until the run has measured itself and chosen how often to take snapshots."""
        while "a snapshot every" not in self.run.output.read_text():
            self._train(self._stages, 2 * self._stages)

    def _train(self, warm: int, timed: int) -> Pace:
        """Train so many batches and as many more as leave the pipeline filled.

        A pipeline that waits for its turn has N - 1 batches in flight: it need not be filled again.
        """
        cpu_s = self._cpu_s()
        first = self._granted + warm
        batches = warm + timed + self._stages - 1
        self._grant(batches)
        for stage in range(self._stages):
            due = self._granted - (self._stages - 1 - stage)
            self.run.wait_for(
                lambda stage=stage, due=due: len(self._updates(stage)) >= due,
                f"update {due} of stage {stage}",
                TURN_TIMEOUT_S,
            )
        cpu_s = self._cpu_s() - cpu_s
        ends = [self._updates(stage) for stage in range(self._stages)]
        slowest_s = max(updates[first + timed - 1] - updates[first - 1] for updates in ends)
        return Pace(slowest_s / timed, cpu_s / batches)

    def _grant(self, batches: int) -> None:
        os.write(self._pipe, GRANT.pack(batches))
        self._granted += batches

    def _updates(self, stage: int) -> list[float]:
        """Return when each update of a stage ended."""
        path = updates_file(self.run.run_dir, stage)
        content = path.read_bytes() if path.exists() else b""
        return [at_s for (at_s,) in UPDATE.iter_unpack(content)]

    def _cpu_s(self) -> float:
        """Return the CPU time that all processes of the run have used so far."""
        times = [process.psutil.cpu_times() for process in self.run.processes()]
        return sum(each.user + each.system for each in times)
