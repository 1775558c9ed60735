"""Which snapshots lie where, and which round is committed. Pure: no files, no sockets, no clocks.

A round is the state of all stages after the same update; round 0 is the initial state, which is
everywhere without being kept anywhere. A stage's snapshot is *durable* when it lies in the shared
memory of two living hosts, or of the only one there is. A round is *committed* when it is durable
at every stage; every stage that fails restarts from the newest committed round, so only what that
round needs is remembered.

Two things are kept apart: what a stage's present incarnation has written (its *marks*), and where
files lie (their *copies*). A copy counts only while a mark with the same digest stands, which is
what makes files of a dead incarnation, and late words about them, harmless.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from ..protocol.messages import Restore, SnapshotFile
from .held_files import HeldFiles, Place

__all__ = ["Catalogue", "Transfer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A copy that one host shall send to another."""

    stage: int
    update: int
    digest: str
    source: int  # host index
    target: int


class Catalogue:
    """What the coordinator knows of snapshots.

    Args:
        stages: of the run, at least 1.
        hosts: indices of the hosts that live, in no order.
    """

    def __init__(self, *, stages: int, hosts: Iterable[int]) -> None:
        assert stages >= 1, f"a run has at least one stage, not {stages}"
        self._committed = 0
        self._hosts = set(hosts)
        self._marks: list[dict[int, str]] = [{} for _ in range(stages)]  # digest by update
        # In the order in which they were heard of: a stage's own comes first.
        self._copies = HeldFiles()
        self._checkpoints = HeldFiles()
        self._asked: set[Transfer] = set()

    @property
    def committed(self) -> int:
        """The newest round that every stage can be restored to; 0 is the initial state."""
        return self._committed

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of the committed round's snapshots, by stage; empty for round 0."""
        return tuple(marks[self._committed] for marks in self._marks) if self._committed else ()

    # -- what is heard --------------------------------------------------------------------------

    def written(self, file: SnapshotFile, host: int) -> None:
        """Note that a stage's present worker, on ``host``, has written this snapshot."""
        if file.update > self._committed:
            self._marks[file.stage][file.update] = file.digest
            self.copied(file, host)

    def copied(self, file: SnapshotFile, host: int) -> None:
        """Note that ``host`` holds a copy of a snapshot in its shared memory."""
        if host in self._hosts and file.update >= self._committed:
            self._copies.add(host, file)

    def surveyed(
        self, host: int, snapshots: Iterable[SnapshotFile], checkpoints: Iterable[SnapshotFile]
    ) -> None:
        """Take a host's word for what it holds; it lives, and what it does not name is gone.

        A newer round may have been written while the host was looking, so only what the
        committed round needs is taken from it by silence.
        """
        self._hosts.add(host)
        self._forget_requests(host)
        self._copies.drop(lambda at, copy: at == host and copy.update <= self._committed)
        self._checkpoints.drop(lambda at, _: at == host)
        for file in snapshots:
            self.copied(file, host)
        self.checkpointed(checkpoints, host)

    def checkpointed(self, files: Iterable[SnapshotFile], host: int) -> None:
        """Note that these snapshots are on a disk that ``host`` can read."""
        for file in files:
            self._checkpoints.add(host, file)

    def withdraw(self, stage: int) -> None:
        """Forget what a stage wrote after the committed round: it restarts from there.

        Its successor will write those rounds again. Were the old marks to stand, the commit could
        run ahead of its replay and trim what the replay still needs.
        """
        marks = self._marks[stage]
        self._marks[stage] = {u: digest for u, digest in marks.items() if u <= self._committed}
        self._copies.drop(lambda _, copy: copy.stage == stage and copy.update > self._committed)
        self._asked = {t for t in self._asked if t.stage != stage or t.update <= self._committed}

    def distrust(self, stage: int, host: int) -> None:
        """Forget what a worker of ``stage`` on ``host`` was told to read: it could read none."""
        restore = self.restore(stage, host)
        unreadable = () if restore is None else restore.paths
        self._copies.drop(lambda at, copy: at == host and copy.path in unreadable)
        self._checkpoints.drop(lambda _, file: file.path in unreadable)

    def doubt(self, host: int) -> None:
        """Forget what a host holds until it is surveyed again: its agent is gone."""
        for files in (self._copies, self._checkpoints):
            files.drop(lambda at, _: at == host)
        self._forget_requests(host)

    def lose_host(self, host: int) -> None:
        """Forget a host and all it holds; fewer living hosts may ask for fewer copies."""
        self._hosts.discard(host)
        self.doubt(host)

    # -- what follows ---------------------------------------------------------------------------

    def commit(self) -> int | None:
        """Move to the largest round that is durable at every stage; None if none is newer."""
        durable = (
            update
            for update in self._marks[0]
            if update > self._committed
            and all(self._is_durable(stage, update) for stage in self._stages)
        )
        newest = max(durable, default=None)
        if newest is None:
            return None
        self._committed = newest
        self._marks = [
            {update: digest for update, digest in marks.items() if update >= newest}
            for marks in self._marks
        ]
        self._copies.drop(lambda _, copy: copy.update < newest)
        self._asked = {transfer for transfer in self._asked if transfer.update >= newest}
        return newest

    def transfers(self, stage: int | None = None) -> list[Transfer]:
        """Return the copies that are missing to make every written round durable, oldest first.

        Those of one stage, if it is given. Each is named once, until one of its hosts is lost or
        its stage is withdrawn; one that fails is left to the next round.
        """
        missing = [
            transfer
            for stage in (self._stages if stage is None else (stage,))
            for update in self._marks[stage]
            if (transfer := self._missing(stage, update)) and transfer not in self._asked
        ]
        self._asked.update(missing)
        return sorted(missing, key=lambda transfer: (transfer.update, transfer.stage))

    def transfer_to(self, stage: int, host: int) -> Transfer | None:
        """Return what brings a stage's committed snapshot to ``host``.

        None where it lies already, for round 0, and where no living host holds it.
        """
        holders = self._holders(stage, self._committed)
        if not holders or host in holders:
            return None
        return self._transfer(stage, self._committed, holders[0], host)

    def restore(self, stage: int, host: int) -> Restore | None:
        """Return where a worker of ``stage`` on ``host`` finds its committed snapshot.

        Shared memory of that host comes first, then disk; a checkpoint that another host has
        written may lie on a disk that both can read. None stands for the initial state.
        """
        if not self._committed:
            return None
        digest = self._marks[stage][self._committed]
        here = [path for holder, path in self._places(stage, self._committed) if holder == host]
        disk = [path for _, path in self._places_on_disk(stage)]
        return Restore(
            update=self._committed, digest=digest, paths=tuple(dict.fromkeys(here + disk))
        )

    def homeless(self) -> tuple[int, ...]:
        """Return the stages whose committed snapshot is nowhere: not in memory, not on disk.

        While there are any, no stage may be restarted from the committed round; see
        ``fall_back``.
        """
        if not self._committed:
            return ()
        return tuple(
            stage
            for stage in self._stages
            if not self._holders(stage, self._committed) and not self._places_on_disk(stage)
        )

    def newest_checkpoint(self) -> int:
        """Return the newest round that is whole on disk; 0, the initial state, if none is."""
        on_disk = [
            {f.update for f in self._checkpoints if f.stage == stage} for stage in self._stages
        ]
        return max(set.intersection(*on_disk), default=0)

    def fall_back(self) -> int:
        """Go back to the newest whole checkpoint, and return its round.

        The one way in which the committed round may become smaller: the last rung before giving
        up, and the beginning of a resumed run. All stages have to begin again from there.
        """
        update = self.newest_checkpoint()
        digests = {f.stage: f.digest for f in self._checkpoints if f.update == update}
        self._marks = [{update: digests[s]} if update else {} for s in self._stages]
        self._committed = update
        self._copies.drop(lambda _, copy: copy.update != update)
        self._checkpoints.drop(lambda _, file: file.update > update)
        self._asked.clear()
        return update

    # -- the commit file ------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return what must outlive the coordinator; where files lie the agents tell anew."""
        return json.dumps({"committed": self._committed, "digests": self.digests})

    @classmethod
    def from_json(cls, text: str, *, stages: int, hosts: Iterable[int] = ()) -> Catalogue:
        """Read ``to_json``'s text; newer rounds count only once they are written again.

        Raises:
            ValueError: the text is not of a run with so many stages.
        """
        values = json.loads(text)
        committed, digests = values["committed"], values["digests"]
        if len(digests) != (stages if committed else 0):
            raise ValueError(
                f"the commit file holds {len(digests)} digests for update {committed}, but the "
                f"run has {stages} stages. It belongs to another run"
            )
        catalogue = cls(stages=stages, hosts=hosts)
        catalogue._committed = committed
        for stage, digest in enumerate(digests):
            catalogue._marks[stage][committed] = digest
        return catalogue

    # -- helpers --------------------------------------------------------------------------------

    @property
    def _stages(self) -> range:
        return range(len(self._marks))

    def _forget_requests(self, host: int) -> None:
        """Let copies from and to a host be asked for anew."""
        self._asked = {t for t in self._asked if host not in (t.source, t.target)}

    @property
    def _copies_needed(self) -> int:
        return 2 if len(self._hosts) > 1 else 1

    def _is_durable(self, stage: int, update: int) -> bool:
        return len(self._holders(stage, update)) >= self._copies_needed

    def _holders(self, stage: int, update: int) -> list[int]:
        """Return the hosts that hold what the stage's mark stands for, its writer first."""
        return list(dict.fromkeys(host for host, _ in self._places(stage, update)))

    def _places(self, stage: int, update: int) -> list[Place]:
        digest = self._marks[stage].get(update)
        return [] if digest is None else self._copies.places(stage, update, digest)

    def _places_on_disk(self, stage: int) -> list[Place]:
        digest = self._marks[stage].get(self._committed)
        return [] if digest is None else self._checkpoints.places(stage, self._committed, digest)

    def _missing(self, stage: int, update: int) -> Transfer | None:
        """Return the copy to the next host in the ring that would bring a round nearer."""
        holders = self._holders(stage, update)
        if not 0 < len(holders) < self._copies_needed:
            return None
        ring = sorted(self._hosts - set(holders))
        target = next((host for host in ring if host > holders[0]), ring[0])
        return self._transfer(stage, update, holders[0], target)

    def _transfer(self, stage: int, update: int, source: int, target: int) -> Transfer:
        digest = self._marks[stage][update]
        return Transfer(stage=stage, update=update, digest=digest, source=source, target=target)
