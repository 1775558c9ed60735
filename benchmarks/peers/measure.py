"""Lets contestants train by turns, one after the other alone on the machine, and times them.

All processes of all contestants are started once. In a round each contestant has one turn, so a
noisy minute disturbs all alike, and what is compared was measured within one round.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, TypeAlias

import torch

__all__ = ["Contestant", "Pace", "Peer", "Place", "Spread", "Train", "one_thread", "play"]

WARM_BATCHES = 1
LEAST_BATCHES = 2
ANSWER_TIMEOUT_S = 600.0  # DeepSpeed compiles for minutes when it starts for the first time
END_TIMEOUT_S = 5.0


def one_thread() -> None:
    """Give every process that is started from here on one thread for its sums."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Pace:
    """How fast a contestant was in one turn.

    Attributes:
        batch_s: from the end of one batch to that of the next, of the slowest process.
        cpu_s: CPU time per batch, of all processes together.
    """

    batch_s: float
    cpu_s: float


class Contestant(Protocol):
    """Somebody who trains when it is his turn, and rests until the next."""

    @property
    def name(self) -> str: ...

    def take_turn(self, seconds: float) -> Pace:
        """Train for about so long, from a warm-up on."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """A process among those of its contestant."""

    rank: int
    processes: int
    meeting: Path  # a file that does not exist yet

    def join(self) -> None:
        """Form a gloo group with the others."""
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{self.meeting}",
            rank=self.rank,
            world_size=self.processes,
        )


Train: TypeAlias = Callable[[Place], Iterator[None]]
"""Trains in one of a peer's processes and yields after every batch."""


class Peer:
    """Forked processes that train together, or side by side.

    Args:
        name: for tables.
        train: what each process does.
        processes: how many.
        folder: an empty one.
        copies: how many models they train at once; a batch of any of them counts.
    """

    def __init__(
        self, name: str, train: Train, processes: int, folder: Path, *, copies: int = 1
    ) -> None:
        self.name = name
        self._copies = copies
        self._batch_s: float | None = None
        self._pipes: list[Connection] = []
        self._processes: list[mp.process.BaseProcess] = []
        context = mp.get_context("fork")
        for rank in range(processes):
            ours, theirs = context.Pipe()
            place = Place(rank, processes, folder / "meeting")
            process = context.Process(target=_live, args=(theirs, train, place), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def take_turn(self, seconds: float) -> Pace:
        timed = LEAST_BATCHES
        if self._batch_s is not None:
            timed = max(timed, round(seconds / self._batch_s))
        for pipe in self._pipes:
            pipe.send((WARM_BATCHES, timed))
        answers = [self._answer(pipe) for pipe in self._pipes]
        self._batch_s = max(batch_s for batch_s, _ in answers)
        cpu_s = sum(cpu_s for _, cpu_s in answers)
        return Pace(self._batch_s / self._copies, cpu_s / self._copies)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(END_TIMEOUT_S)

    def _answer(self, pipe: Connection) -> tuple[float, float]:
        answer = pipe.recv() if pipe.poll(ANSWER_TIMEOUT_S) else "no answer"
        if isinstance(answer, str):
            raise SystemExit(f"{self.name}: {answer}")
        return answer


def _live(pipe: Connection, train: Train, place: Place) -> None:
    """Take turns until the pipe ends; answer each with seconds and CPU seconds per batch."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a peer prints is no table
    torch.set_num_threads(1)
    try:
        finished = train(place)
        while True:
            warm, timed = pipe.recv()
            _exhaust(islice(finished, warm))
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            _exhaust(islice(finished, timed))
            wall_s = time.perf_counter() - start_s
            pipe.send((wall_s / timed, (time.process_time() - start_cpu_s) / timed))
    except EOFError:
        return
    except Exception:  # noqa: BLE001  whatever it is, the other end waits for an answer
        pipe.send(traceback.format_exc())


def _exhaust(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


def play(
    contestants: Sequence[Contestant], rounds: int, seconds: float
) -> Iterator[tuple[int, dict[str, Pace]]]:
    """Yield the paces of each round by name; one more before them warms everybody up."""
    for number in range(rounds + 1):
        # Each round begins with another, so that nobody always follows the same.
        first = number % len(contestants)
        order = [*contestants[first:], *contestants[:first]]
        paces = {contestant.name: contestant.take_turn(seconds) for contestant in order}
        if number > 0:
            yield number, {contestant.name: paces[contestant.name] for contestant in contestants}


@dataclass(frozen=True)
class Spread:
    """Median, least and most of some values."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.least:{spec}}..{self.most:{spec}})"
