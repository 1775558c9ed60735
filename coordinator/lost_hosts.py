"""Which hosts do not answer, since when, and which of their agents to start again. Pure.

A host is believed to be lost for good after two leases: its workers end by themselves when they
hear nothing for one, so that by then none can be left, even behind a broken network.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .recovery import FailureCounter, Rung

__all__ = ["LostHosts"]


@dataclass
class LostHosts:
    """The hosts of one run that are lost at the moment, by index.

    Attributes:
        lease_s: how long a silent process is believed to live.
        max_restarts: how often the agent of one host may be started again.
    """

    lease_s: float
    max_restarts: int
    _since: dict[int, float] = field(default_factory=dict[int, float])
    _due: dict[int, float] = field(default_factory=dict[int, float])  # restarts of agents
    _counters: dict[int, FailureCounter] = field(default_factory=dict[int, FailureCounter])

    def __contains__(self, index: int) -> bool:
        return index in self._since

    def __len__(self) -> int:
        return len(self._since)

    def add(self, index: int, since: float) -> None:
        """Note that a host is lost; what was noted first stands."""
        self._since.setdefault(index, since)

    def remove(self, index: int) -> None:
        """Note that a host is there again, or given up."""
        self._since.pop(index, None)
        self._due.pop(index, None)

    def restart_agent(self, index: int, progress: int, now: float) -> None:
        """Let a lost host's agent be started again, later each time, a limited number of times.

        Args:
            index: of the host.
            progress: grows while the run gets on; failures without progress count towards the
                limit.
            now: when it was lost.
        """
        counter = self._counters.setdefault(index, FailureCounter())
        decision = counter.failed(progress, "", self.max_restarts)
        if decision.rung is not Rung.GIVE_UP:
            self._due[index] = now + decision.pause_s

    def agents_due(self, now: float) -> list[int]:
        """Return the hosts whose agents are to be started now; each is named once."""
        due = sorted(index for index, at in self._due.items() if now >= at)
        for index in due:
            del self._due[index]
        return due

    def lost_for_s(self, now: float) -> dict[int, float]:
        """Return how long each host has been lost, in seconds."""
        return {index: now - at for index, at in self._since.items()}

    def overdue(self, now: float) -> list[int]:
        """Return the hosts that have been lost for two leases."""
        return [
            index for index, lost_s in self.lost_for_s(now).items() if lost_s >= 2 * self.lease_s
        ]
