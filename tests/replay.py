"""A pipeline in one process whose stages can be destroyed and rebuilt at any moment.

Loops, stages, snapshots and files are the real ones; streams, logs, commits and the scheduler are
small stand-ins that follow the same rules. All choices come from one ``random.Random``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import torch
from logged_streams import FeedEnd, Link, Receiver, Sender
from pipelines import ListFeed, make_settings
from torch import Tensor, nn

from spectrain.protocol.job import Job
from spectrain.protocol.messages import BatchResult
from spectrain.protocol.schedule import Work
from spectrain.protocol.staleness import Staleness
from spectrain.worker.build import build_stage
from spectrain.worker.loop import Loop, Streams
from spectrain.worker.restore import load_snapshot
from spectrain.worker.scoreboard import EvaluationResult
from spectrain.worker.snapshot import Origin
from spectrain.worker.snapshotter import Snapshotter, Written

RUN_ID = "ab" * 16


class Drift(nn.Module):
    """Adds a buffer that follows what it sees: unlike batch norm's, it changes the output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.shift
        if self.training:
            self.shift = 0.9 * self.shift + 0.1 * x.detach().mean(0)
        return y


NOISY_LAYERS = 12


def noisy_model() -> nn.Sequential:
    """State of every kind: batch norm, dropout, and a buffer that changes the output."""
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2),
        nn.Linear(8, 8), Drift(), nn.Tanh(),
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2),
        nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3),
    )  # fmt: skip


class Worker:
    """One incarnation of one stage."""

    def __init__(self, pipeline: Pipeline, index: int) -> None:
        last = pipeline.stages - 1
        feed, settings = pipeline.feed, pipeline.settings
        self.parts = build_stage(pipeline.job, settings, pipeline.layer_counts, index)
        self.activations_in = Receiver() if index > 0 else None
        self.gradients_out = Sender() if index > 0 else None
        self.gradients_in = Receiver() if index < last else None
        self.activations_out = Sender() if index < last else None
        self.reports: SimpleQueue[Written | str] = SimpleQueue()
        self.snapshotter = Snapshotter(
            self.parts,
            Origin(RUN_ID, index, pipeline.stages),
            pipeline.directory,
            on_written=self.reports.put,
            on_skipped=lambda update, reason: self.reports.put(f"{update}: {reason}"),
        )
        self.snapshotter.plan(pipeline.every, pipeline.every)
        self.loop = Loop(
            self.parts.stage,
            self.parts.weights,
            self.parts.method,
            Streams(
                inputs=self.activations_in or FeedEnd(feed, "inputs"),
                targets=FeedEnd(feed, "targets") if index == last else None,
                activations=self.activations_out,
                gradients_in=self.gradients_in,
                gradients_out=self.gradients_out,
            ),
            schedule=settings.schedule,
            work=feed.work,
            snapshots=self.snapshotter if pipeline.every else None,
            on_batch=pipeline.scored,
            on_evaluation=pipeline.evaluated,
        )
        for receiver in (self.activations_in, self.gradients_in):
            if receiver is not None:
                receiver.wants = self.loop.wants

    def trim(self, update: int, work: Work) -> None:
        for sender in (self.activations_out, self.gradients_out):
            if sender is not None:
                sender.trim(update, work)


@dataclass(kw_only=True)
class Pipeline:
    """All stages, their links and the coordinator's knowledge of snapshots."""

    job: Job
    feed: ListFeed
    layer_counts: Sequence[int]
    directory: Path
    method: str = "spectrain"
    every: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    losses: dict[int, BatchResult] = field(default_factory=dict)
    rounds: dict[int, EvaluationResult] = field(default_factory=dict)
    committed: int = 0
    kills: int = 0
    reruns: int = 0  # forwards that had been in flight

    def __post_init__(self) -> None:
        self.stages = len(self.layer_counts)
        microbatches = self.feed.microbatches
        self.settings = make_settings(
            self.stages, self.method, microbatches=microbatches, **self.options
        )
        self.durable: list[dict[int, Written]] = [{} for _ in range(self.stages)]
        self.workers = [Worker(self, index) for index in range(self.stages)]
        self.links: dict[tuple[int, str], Link] = {}
        self._connect(range(self.stages))

    def run(self, random: Random, kill: Callable[[int], Sequence[int]] = lambda _: ()) -> None:
        """Train to the end; ``kill`` tells which stages die after so many events."""
        try:
            for event in itertools.count():
                if all(worker.loop.done for worker in self.workers):
                    return
                assert event < 20_000, [worker.loop.current_op for worker in self.workers]
                self._move(random)
                self._kill(kill(event))
        finally:
            self._close(range(self.stages))

    def _move(self, random: Random) -> None:
        for link in self.links.values():
            if random.random() < 0.7:
                link.deliver()
        index = random.randrange(self.stages)
        if self.workers[index].loop.ready():
            self._step(index)
        if random.random() < 0.3:
            self._commit()

    def scored(self, result: BatchResult) -> None:
        assert self.losses.setdefault(result.batch, result) == result, "a batch scored differently"

    def evaluated(self, result: EvaluationResult) -> None:
        assert self.rounds.setdefault(result.round, result) == result, "a round scored differently"

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for worker in self.workers:
            state.update(worker.parts.weights.clean_state())
        return state

    def staleness(self) -> list[Staleness]:
        return [worker.loop.staleness for worker in self.workers]

    def _step(self, index: int) -> None:
        worker = self.workers[index]
        before = worker.loop.version
        worker.loop.step()
        version = worker.loop.version
        if self.every and version > before and version % self.every == 0:
            report = worker.reports.get(timeout=20)
            assert isinstance(report, Written), report
            self.durable[index][version] = report

    def _commit(self) -> None:
        whole = set.intersection(*(set(durable) for durable in self.durable))
        newest = max(whole, default=0)
        assert newest >= self.committed, "a committed round was lost"
        self.committed = newest
        if newest:
            for worker in self.workers:
                worker.trim(newest, self.feed.work)

    def _kill(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        self._close(indices)
        for index in indices:
            self.kills += 1
            marks = self.durable[index]
            for newer in [update for update in marks if update > self.committed]:
                marks.pop(newer).path.unlink()
            worker = self.workers[index] = Worker(self, index)
            if self.committed:
                written = marks[self.committed]
                origin = Origin(RUN_ID, index, self.stages)
                snapshot = load_snapshot([written.path], written.digest, origin)
                worker.loop.resume(snapshot)
                self.reruns += len(snapshot.in_flight)
        self._connect(indices)

    def _connect(self, indices: Sequence[int]) -> None:
        for upper, lower in zip(range(self.stages), range(1, self.stages), strict=False):
            if upper in indices or lower in indices:
                above, below = self.workers[upper], self.workers[lower]
                self.links[upper, "activations"] = _link(
                    above.activations_out, below.activations_in
                )
                self.links[upper, "gradients"] = _link(below.gradients_out, above.gradients_in)

    def _close(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.workers[index].snapshotter.close()


def _link(sender: Sender | None, receiver: Receiver | None) -> Link:
    assert sender is not None
    assert receiver is not None
    return Link(sender, receiver)


def cut(stages: int, layers: int = NOISY_LAYERS) -> list[int]:
    return [layers * (k + 1) // stages - layers * k // stages for k in range(stages)]


def random_kills(random: Random, stages: int, *, most: int = 8) -> Callable[[int], Sequence[int]]:
    """Kill one stage, two adjacent ones or all, now and then, at most ``most`` times.

    Faults that come faster than a round can be committed would let no run end.
    """
    left = most
    chance = 0.08 / stages

    def kill(_: int) -> Sequence[int]:
        nonlocal left
        if left == 0 or random.random() >= chance:
            return ()
        left -= 1
        first = random.randrange(stages)
        groups = ((first,), range(first, min(first + 2, stages)), range(stages))
        return random.choice(groups)

    return kill
