"""What a coordinator that is started again must know of the run it finds. Pure.

It is written, whole and synced, before anything is done that depends on it: when training begins,
at every commit, and before a worker is started or moved. Everything else is asked of the living.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The contents of ``commit.json``.

    Attributes:
        life: how many coordinators this run has had, from 1; generations of links never repeat
            because each life counts its own.
        catalogue: the committed round, see ``Catalogue.to_json``.
        slots: host index and slot of each stage.
        incarnations: of each stage's worker.
        restarts: how often each stage was started again.
        repairs: records of the repairs that are over, for the summary.
        stop_before: first batch that will not be trained; None unless the run was asked to stop.
        stop_reason: who asked.
        stop_code: the exit code that goes with it.
    """

    life: int
    catalogue: str
    slots: tuple[tuple[int, int], ...]
    incarnations: tuple[int, ...]
    restarts: tuple[int, ...]
    repairs: tuple[dict[str, Any], ...] = ()
    stop_before: int | None = None
    stop_reason: str = ""
    stop_code: int = 0

    def to_json(self) -> str:
        """Return the text of the file."""
        values = asdict(self)
        values["catalogue"] = json.loads(self.catalogue)
        return json.dumps(values, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Memory:
        """Read ``to_json``'s text.

        Raises:
            ValueError: it is no such text.
        """
        try:
            values = json.loads(text)
            return cls(
                life=int(values["life"]),
                catalogue=json.dumps(values["catalogue"]),
                slots=tuple((int(host), int(slot)) for host, slot in values["slots"]),
                incarnations=tuple(map(int, values["incarnations"])),
                restarts=tuple(map(int, values["restarts"])),
                repairs=tuple(values["repairs"]),
                stop_before=values["stop_before"],
                stop_reason=str(values["stop_reason"]),
                stop_code=int(values["stop_code"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"not the commit file of a run: {error!r} is missing or odd"
            ) from error
