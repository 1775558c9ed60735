"""What can happen to a run and what can be done about it: the words of ``run_state.py``. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..protocol.messages import Cause, Message
from ..protocol.schedule import Work

__all__ = [
    "End",
    "Event",
    "Export",
    "Exported",
    "GoBackTo",
    "Instruction",
    "LauncherGone",
    "Persist",
    "PlanRefused",
    "Planned",
    "Received",
    "Send",
    "StopFeeding",
    "StopNow",
    "StopWanted",
    "StoppedFeeding",
    "Tell",
    "Ticked",
    "WeightsArrived",
]


# -- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """An authenticated peer said something."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class Planned:
    """The job is loaded and cut."""

    layer_counts: tuple[int, ...]
    work: Work


@dataclass(frozen=True, slots=True)
class PlanRefused:
    """The job cannot be run."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class StopWanted:
    """Somebody asked for an end in order: after some batch, with weights."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class StoppedFeeding:
    """As ``StopFeeding`` said, the feed will give out no batch from ``before`` on."""

    before: int
    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class StopNow:
    """Somebody wants the end at once."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class LauncherGone:
    """The launcher's end of our standard input is closed."""


@dataclass(frozen=True, slots=True)
class WeightsArrived:
    """Every tensor of the model has come from its stage."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The model and the summary are written."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""


Event: TypeAlias = (
    Received | Planned | PlanRefused | StopWanted | StoppedFeeding | StopNow | LauncherGone
    | WeightsArrived | Exported | Ticked
)  # fmt: skip


# -- instructions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Say this to a peer."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Tell:
    """Say this to the user."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Persist:
    """Write down what a restarted coordinator must know, before anything that follows."""

    text: str


@dataclass(frozen=True, slots=True)
class GoBackTo:
    """Forget the numbers of later updates: the run goes on from a checkpoint after this one."""

    update: int


@dataclass(frozen=True, slots=True)
class StopFeeding:
    """Give out no batch that nobody has asked for yet, but all those before ``at_least``."""

    at_least: int
    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Export:
    """Write the model and the summary."""


@dataclass(frozen=True, slots=True)
class End:
    """End everything."""

    state: str  # "done", "stopped" or "failed"
    exit_code: int
    cause: Cause | None = None


Instruction: TypeAlias = Send | Tell | Persist | GoBackTo | StopFeeding | Export | End
