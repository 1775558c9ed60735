"""Whatever happens, in whatever order: a commit never goes back and never promises too much."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from spectrain.coordinator.catalogue import Catalogue
from spectrain.protocol.messages import SnapshotFile

UPDATES = st.integers(1, 6)
PICK = st.integers(0, 5)


def file_of(stage: int, update: int, incarnation: int) -> SnapshotFile:
    """Return a snapshot whose bytes tell the incarnations apart."""
    name = f"{stage}@{update}"
    return SnapshotFile(stage=stage, update=update, digest=f"{name}#{incarnation}", path=f"/{name}")


class Run(RuleBasedStateMachine):
    """Stages that write and restart on hosts that come and go, kept in plain sets as a model."""

    files: Bundle[SnapshotFile] = Bundle("files")  # ever written, by whatever incarnation

    @initialize(stages=st.integers(1, 3), hosts=st.integers(1, 3))
    def begin(self, stages: int, hosts: int) -> None:
        self.stages, self.hosts = stages, set(range(hosts))
        self.catalogue = Catalogue(stages=stages, hosts=self.hosts)
        self.incarnations = [0] * stages
        self.written = [set[int]() for _ in range(stages)]  # by the present incarnation
        self.held: dict[int, set[SnapshotFile]] = {host: set() for host in self.hosts}
        self.committed = 0
        self.expected: tuple[str, ...] = ()

    def host(self, pick: int) -> int:
        return sorted(self.hosts)[pick % len(self.hosts)]

    @rule(target=files, stage=PICK, update=UPDATES, host=PICK)
    def write(self, stage: int, update: int, host: int) -> SnapshotFile:
        stage, place = stage % self.stages, self.host(host)
        file = file_of(stage, update, self.incarnations[stage])
        self.catalogue.written(file, place)
        if update > self.committed:
            self.written[stage].add(update)
            self.held[place] = {f for f in self.held[place] if f.path != file.path} | {file}
        return file

    @rule(file=files, host=PICK)
    def replica_arrives(self, file: SnapshotFile, host: int) -> None:
        place = self.host(host)
        self.catalogue.copied(file, place)
        if file.update >= self.committed:
            self.held[place] = {f for f in self.held[place] if f.path != file.path} | {file}

    @rule(file=files)
    def replicas_arrive_everywhere(self, file: SnapshotFile) -> None:
        for index in range(len(self.hosts)):
            self.replica_arrives(file, index)

    @rule(ahead=st.integers(1, 2), but=PICK)
    def a_round_is_written(self, ahead: int, but: int) -> None:
        """Let all stages but perhaps one write the same round, with all its replicas."""
        for stage in set(range(self.stages)) - {but}:
            file = self.write(stage, self.committed + ahead, stage)
            self.replicas_arrive_everywhere(file)

    @rule(stage=PICK)
    def restart(self, stage: int) -> None:
        stage %= self.stages
        self.catalogue.withdraw(stage)
        self.incarnations[stage] += 1
        self.written[stage] = {u for u in self.written[stage] if u <= self.committed}

    @precondition(lambda self: len(self.hosts) > 1)
    @rule(host=PICK)
    def lose_host(self, host: int) -> None:
        place = self.host(host)
        self.catalogue.lose_host(place)
        self.hosts.discard(place)
        self.held[place] = set()

    @rule()
    def commit(self) -> None:
        newest = self.catalogue.commit()
        if newest is None:
            return
        assert newest > self.committed
        needed = min(2, len(self.hosts))
        for stage, digest in enumerate(self.catalogue.digests):
            assert newest in self.written[stage], "no stage is promised what it has not written"
            holders = [h for h in self.hosts if digest in {f.digest for f in self.held[h]}]
            assert len(holders) >= needed
        self.committed, self.expected = newest, self.catalogue.digests

    @rule()
    def the_coordinator_restarts(self) -> None:
        text = self.catalogue.to_json()
        self.catalogue = Catalogue.from_json(text, stages=self.stages)
        for host in sorted(self.hosts):
            self.catalogue.surveyed(host, self.held[host], [])
        self.written = [{u for u in marks if u <= self.committed} for marks in self.written]

    @invariant()
    def the_commit_stands(self) -> None:
        assert self.catalogue.committed == self.committed
        assert self.catalogue.digests == self.expected

    @invariant()
    def every_path_to_restore_from_holds_the_committed_digest(self) -> None:
        for stage in range(self.stages if self.committed else 0):
            for host in self.hosts:
                restore = self.catalogue.restore(stage, host)
                assert restore is not None
                here = {f.path: f.digest for f in self.held[host]}
                assert all(here[path] == restore.digest for path in restore.paths)

    @invariant()
    def transfers_go_from_a_holder_to_a_living_host_without_a_copy(self) -> None:
        for transfer in self.catalogue.transfers():
            assert transfer.target in self.hosts
            assert transfer.digest in {f.digest for f in self.held[transfer.source]}
            assert transfer.digest not in {f.digest for f in self.held[transfer.target]}


TestRun = Run.TestCase
