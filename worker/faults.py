"""Faults at named points of a worker, for tests: "stage 1, op B17, phase send: kill".

``SPECTRAIN_FAULTS`` names them, with ``;`` between two::

    stage=1 phase=send op=B17 action=kill; stage=0 phase=link action=kill incarnation=1

The functions at the points named are wrapped when the worker begins, and no others: where the
variable is not set, this module is not even imported. Nothing here knows what a fault is good for.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from ..protocol.errors import SettingsError
from ..protocol.schedule import Op
from .fault_points import POINTS

__all__ = ["ACTIONS", "Fault", "InjectedError", "parse_faults", "plant_faults"]

_EXIT_STATUS = 3


class InjectedError(RuntimeError):
    """What the action ``raise`` raises: an error of nobody's class, as user code makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is to go wrong, once in the life of one worker.

    Attributes:
        stage: whose worker.
        phase: of ``POINTS``.
        action: of ``ACTIONS``.
        op: text of the op at which; empty: whichever.
        nth: how often the phase must be reached with that op, from 1.
        incarnation: of the worker; None: every one.
    """

    stage: int
    phase: str
    action: str
    op: str = ""
    nth: int = 1
    incarnation: int | None = 0


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read the value of ``SPECTRAIN_FAULTS``.

    Raises:
        SettingsError: it is none; the text says which part and why.
    """
    return tuple(_parse_fault(part) for part in text.split(";") if part.strip())


def _parse_fault(text: str) -> Fault:
    pairs = (word.partition("=") for word in text.split())
    words = {name: value for name, _, value in pairs}
    try:
        incarnation = words.pop("incarnation", "0")
        fault = Fault(
            stage=int(words.pop("stage")),
            phase=words.pop("phase"),
            action=words.pop("action"),
            op=str(Op.parse(words.pop("op"))) if "op" in words else "",
            nth=int(words.pop("nth", "1")),
            incarnation=None if incarnation == "any" else int(incarnation),
        )
    except (KeyError, ValueError) as error:
        raise SettingsError(
            f"fault {text.strip()!r}: {error!r}; expected stage=1 phase=send op=B17 action=kill, "
            "op only where it matters, nth=2 for the second time, incarnation=1 or any for other "
            "workers than the first"
        ) from error
    for name, known in (("phase", POINTS), ("action", ACTIONS)):
        if getattr(fault, name) not in known:
            raise SettingsError(
                f"fault {text.strip()!r}: {name} must be one of {', '.join(sorted(known))}"
            )
    if words:
        raise SettingsError(f"fault {text.strip()!r}: unknown are {', '.join(words)}")
    return fault


def plant_faults(text: str, *, stage: int, incarnation: int) -> None:
    """Wrap the functions at the points where this worker is to fail.

    Args:
        text: value of ``SPECTRAIN_FAULTS``.
        stage: of this worker.
        incarnation: of this worker.

    Raises:
        SettingsError: the value cannot be read.
    """
    due = {
        fault: fault.nth
        for fault in parse_faults(text)
        if fault.stage == stage and fault.incarnation in (None, incarnation)
    }

    def reach(phase: str, op: str) -> None:
        for fault, left in due.items():
            if fault.phase == phase and fault.op in ("", op):
                due[fault] = left - 1
                if left == 1:
                    print(f"fault: {fault.action}, {phase} {op}", flush=True)  # noqa: T201  our log
                    ACTIONS[fault.action]()

    for phase in {fault.phase for fault in due}:
        for point in POINTS[phase]:
            function = getattr(point.owner, point.name)
            setattr(point.owner, point.name, point.wrap(reach, phase, function))


# -- what goes wrong ----------------------------------------------------------------------------


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit() -> NoReturn:
    os._exit(_EXIT_STATUS)


def _raise() -> NoReturn:
    raise InjectedError("a fault was asked for here")


def _hang() -> NoReturn:
    while True:
        pass


def _freeze() -> None:
    """Wait for ever with the interpreter's lock held: no other thread runs either."""
    ctypes.PyDLL(None).pause()


ACTIONS: dict[str, Callable[[], object]] = {
    "kill": _kill,
    "stop": _stop,
    "exit": _exit,
    "raise": _raise,
    "hang": _hang,
    "freeze": _freeze,
}
