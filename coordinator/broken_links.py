"""Links that broke although the workers at both ends live: which to build again, and when. Pure.

A worker that dies takes its links with it, and its successor gets new ones. But a cable between
two hosts can fail for longer than a connection bears it, and nobody dies of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .events import Instruction, Tell
from .fleet import Fleet, Worker

__all__ = ["BrokenLinks"]

EXPLAINED_WITHIN_S = 2.0
"""A death that explains a broken link is known by then, or else it was the link alone."""


@dataclass(frozen=True, slots=True)
class _Break:
    heard_at_s: float
    ends: tuple[str, ...]  # who was there: the worker that tells, and its neighbours
    reason: str


@dataclass
class BrokenLinks:
    """What workers tell of broken links.

    Attributes:
        fleet: everybody.
        join: makes a stage and the one after it, if both are ready, build a new link.
    """

    fleet: Fleet
    join: Callable[[int], list[Instruction]]
    _breaks: dict[int, _Break] = field(default_factory=dict[int, _Break])  # by stage that tells

    def heard(self, stage: int, reason: str, now: float) -> None:
        """Note that a stage has lost a link to one of its neighbours; it need not tell which."""
        ends = tuple(worker.identity for worker in self._around(stage))
        self._breaks.setdefault(stage, _Break(now, ends, reason))

    def rebuild(self, now: float) -> list[Instruction]:
        """Have links built again that no death explains."""
        instructions: list[Instruction] = []
        for stage, broken in list(self._breaks.items()):
            if now - broken.heard_at_s < EXPLAINED_WITHIN_S:
                continue
            del self._breaks[stage]
            around = self._around(stage)
            are_same = broken.ends == tuple(worker.identity for worker in around)
            if are_same and not any(worker.exited for worker in around):
                text = f"stage {stage} has lost a link and gets a new one: {broken.reason}"
                instructions += [Tell("warning", text), *self.join(stage - 1), *self.join(stage)]
        return instructions

    def _around(self, stage: int) -> list[Worker]:
        return self.fleet.workers[max(0, stage - 1) : stage + 2]
