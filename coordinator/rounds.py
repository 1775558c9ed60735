"""Snapshot rounds: when to take them, when they are committed, what follows from that. Pure.

The catalogue knows what lies where; this asks agents for copies, writes the commit down before
anybody hears of it, and chooses how far apart rounds are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..protocol.messages import (
    AgentSnapshots,
    CheckpointWritten,
    Committed,
    Message,
    Replicate,
    Replicated,
    ReplicationFailed,
    SnapshotFile,
    SnapshotPlan,
    SnapshotSkipped,
    SnapshotWritten,
)
from ..protocol.settings import Settings
from .catalogue import Catalogue, Transfer
from .events import Instruction, Persist, Send, Tell
from .fleet import Fleet, Worker
from .snapshot_interval import choose_interval

__all__ = ["ABOUT_SNAPSHOTS", "Rounds"]

ABOUT_SNAPSHOTS = (
    AgentSnapshots,
    CheckpointWritten,
    Replicated,
    ReplicationFailed,
    SnapshotWritten,
)
"""What ``Rounds.hear`` understands."""

_MEASURE_S = 2.0
"""Training time after which the distance between rounds is chosen from what was measured."""

_AHEAD_S = 0.5
"""How far in the future a new plan begins: it must reach every stage before its first round."""


@dataclass
class Rounds:
    """The rounds of one run.

    Attributes:
        settings: the run's.
        fleet: everybody.
        catalogue: where snapshots are.
        persist: makes the instruction that writes down what a restarted coordinator must know.
        plan: what workers were told last; None before that.
    """

    settings: Settings
    fleet: Fleet
    catalogue: Catalogue
    persist: Callable[[], Persist]
    plan: SnapshotPlan | None = None
    _fetching: dict[int, Transfer] = field(default_factory=dict[int, Transfer])  # by stage
    _measured_from: tuple[float, int] | None = None  # a time, and the least version then
    _skips: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    _update_bytes: float = 0.0  # that one update adds to the fullest log
    _captures_s: dict[int, float] = field(default_factory=dict[int, float])  # by stage
    _is_chosen: bool = False

    def begin(self) -> list[Instruction]:
        """Training begins: tell the workers when to take snapshots."""
        every = self.settings.snapshot_every
        if every is None:
            # A first guess, so that there is something to measure and to restart from.
            every = 4 * self.settings.stages
        else:
            self._is_chosen = True
        first = self.catalogue.committed + every
        # What the user asked for, and the first rounds, are kept even if a stage has to wait for
        # a file.
        self.plan = SnapshotPlan(first=first, every=every, patient=True)
        return [*self.fleet.to_workers(self.plan)]

    def hear(self, sender_host: int, message: Message) -> list[Instruction]:
        """Take word of a snapshot into account, and say what follows."""
        catalogue = self.catalogue
        told: list[Instruction] = []
        stage: int | None = None  # that the word is about
        if isinstance(message, SnapshotWritten):
            stage = message.stage
            # The first one of a stage also takes memory; what counts is what they cost from then.
            least_s = self._captures_s.get(message.stage, message.capture_s)
            self._captures_s[message.stage] = min(least_s, message.capture_s)
            file = SnapshotFile(
                stage=message.stage,
                update=message.update,
                digest=message.digest,
                path=message.path,
            )
            catalogue.written(file, sender_host)
        elif isinstance(message, Replicated):
            stage = message.file.stage
            catalogue.copied(message.file, message.host_index)
        elif isinstance(message, AgentSnapshots):
            self._surveyed(message)
        elif isinstance(message, CheckpointWritten):
            catalogue.checkpointed(message.files, message.host_index)
            if message.error:
                host = self.fleet.hosts[message.host_index]
                told.append(Tell("warning", f"checkpoint on {host} failed: {message.error}"))
        elif isinstance(message, ReplicationFailed):
            self._fetching.pop(message.stage, None)  # to be tried again, if still needed
            host = self.fleet.hosts[message.host_index]
            told.append(Tell("warning", f"no copy of a snapshot on {host}: {message.error}"))
        return [*told, *self._replicate(stage), *self._commit()]

    def skipped(self, worker: Worker, message: SnapshotSkipped) -> list[Instruction]:
        """Tell the user that a stage left a snapshot out, once for each stage and reason."""
        reason = message.reason.partition(":")[0]
        if (worker.stage, reason) in self._skips:
            return []
        self._skips.add((worker.stage, reason))
        text = f"stage {worker.stage} took no snapshot after update {message.update}: "
        return [Tell("warning", text + message.reason)]

    def tick(self, now: float) -> list[Instruction]:
        """Choose the distance between rounds once enough has been measured."""
        most = self._most_by_log()
        update_s = self._update_s(now)
        if self.plan is None or not self.plan.every or update_s is None:
            return []
        if most is not None and self.plan.every > most and self._is_chosen:
            text = f"the log fills up: a snapshot every {most} updates from now on"
            return [Tell("warning", text), *self._plan_anew(most, update_s, patient=True)]
        if self._is_chosen or self.catalogue.committed == 0:
            return []
        self._is_chosen = True
        capture_s = max(self._captures_s.values(), default=0.0)
        every = choose_interval(
            capture_s=capture_s,
            update_s=update_s,
            workers=len(self.fleet.workers),
            update_bytes=self._bytes_by_peak(),
            most=most,
        )
        text = (
            f"a snapshot every {every} updates ({every * update_s:.1f} s; taking one stops a "
            f"stage for {1000 * capture_s:.1f} ms, an update takes {1000 * update_s:.1f} ms)"
        )
        told = Tell("info", text)
        return [told, *self._plan_anew(every, update_s, patient=every == most)]

    def _update_s(self, now: float) -> float | None:
        """Return the time from one update to the next, once enough has been seen."""
        version = min(worker.version for worker in self.fleet.workers)
        if self._measured_from is None and version > 0:
            self._measured_from = (now, version)
        since, before = self._measured_from or (now, version)
        if now - since < _MEASURE_S or version <= before:
            return None
        return (now - since) / (version - before)

    def _plan_anew(self, every: int, update_s: float, *, patient: bool) -> list[Instruction]:
        """Change the distance from a point on that no stage has come near to yet."""
        ahead = self.settings.stages + int(_AHEAD_S / update_s) + 1
        newest = max(worker.version for worker in self.fleet.workers)
        self.plan = SnapshotPlan(first=newest + ahead, every=every, patient=patient)
        return [*self.fleet.to_workers(self.plan)]

    def _most_by_log(self) -> int | None:
        """Return how far apart rounds may be for the fullest log to hold two of them."""
        for worker in self.fleet.workers:
            updates = worker.version - self.catalogue.committed
            log_bytes = 0 if worker.progress is None else worker.progress.log_bytes
            # What is in flight counts too, so few updates would say too much.
            if updates > self.settings.stages:
                self._update_bytes = max(self._update_bytes, log_bytes / updates)
        if not self._update_bytes:
            return None
        return max(1, int(self.settings.log_memory_bytes / self._update_bytes / 2))

    def _bytes_by_peak(self) -> float:
        """Return what one update adds to the fullest log, by the most that it ever held.

        Between two rounds that is what the updates from one to the next have added, and those in
        flight. Reports are too seldom to tell it from what a log holds when they are made.
        """
        reports = [worker.progress for worker in self.fleet.workers if worker.progress is not None]
        peaks = [
            max(report.peak_activations_log_bytes, report.peak_gradients_log_bytes)
            for report in reports
        ]
        every = self.plan.every if self.plan is not None else 0
        return max(peaks, default=0) / (every + self.settings.stages)

    def plan_for(self, worker: Worker) -> list[Instruction]:
        """Tell a restarted worker what the others were told."""
        return [] if self.plan is None else [Send(worker.identity, self.plan)]

    def bring(self, stage: int, host: int) -> list[Instruction] | None:
        """Have a stage's committed snapshot copied to the host it will be restored on.

        Returns:
            What to do before it can be restored there, empty while that is under way; None once
            the snapshot is there, and where no host has it in memory.
        """
        transfer = self.catalogue.transfer_to(stage, host)
        if transfer is None:
            self._fetching.pop(stage, None)
            return None
        if transfer == self._fetching.get(stage):
            return []
        self._fetching[stage] = transfer
        return self._request(transfer)

    def _surveyed(self, message: AgentSnapshots) -> None:
        index = message.host_index
        self.catalogue.surveyed(index, message.snapshots, message.checkpoints)
        self.fleet.agents[index].surveyed = True
        # What its former agent was to send or to receive will not come.
        for stage, transfer in list(self._fetching.items()):
            if index in (transfer.source, transfer.target):
                del self._fetching[stage]

    def _replicate(self, stage: int | None) -> list[Instruction]:
        transfers = self.catalogue.transfers(stage)
        return [request for transfer in transfers for request in self._request(transfer)]

    def _request(self, transfer: Transfer) -> list[Instruction]:
        source, target = map(self.fleet.agents.get, (transfer.source, transfer.target))
        if source is None or source.lost or target is None or target.lost:
            return []  # the survey of an agent that comes, or comes back, brings this up again
        request = Replicate(
            stage=transfer.stage,
            update=transfer.update,
            digest=transfer.digest,
            host_index=transfer.target,
            endpoint=target.hello.replica_endpoint,
            public_key=target.hello.public_key,
        )
        return [Send(f"agent/{transfer.source}", request)]

    def _commit(self) -> list[Instruction]:
        update = self.catalogue.commit()
        if update is None:
            return []
        message = Committed(update=update, digests=self.catalogue.digests)
        return [
            self.persist(),
            *self.fleet.to_workers(message),
            *self.fleet.to_agents(message),
        ]
