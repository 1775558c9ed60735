"""Finds why a run failed among everything that went wrong; pure: faults in, one ``Cause`` out.

When one process dies its neighbours lose their links and die too, often reporting first. So the
earliest report is not the first cause: faults are ranked by kind and only then by time.

0. A worker's own exception, a death without a word, a process silent or stuck, a lost agent.
1. A wait that passed its deadline: true, but the one waited for may know better.
2. A lost link: nearly always because the neighbour died.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ..protocol.errors import ExitCode, exit_code_of_signal
from ..protocol.messages import AgentLost, Cause, WorkerExited, WorkerFault

__all__ = ["Fault", "Silent", "Stuck", "ending", "first_cause", "signal_name"]

LOW_MEMORY_BYTES = 2 * 2**30
"""With less than this free just after a SIGKILL, lack of memory is the likely reason."""

_OUT_OF_MEMORY = frozenset({"OutOfMemoryError", "MemoryError"})
"""Exceptions that mean memory ran out: torch's on a GPU, Python's on the host."""

_ADVICE = {
    "OutOfMemoryError": "Lower --batch-size, or use more stages so that each holds less.",
    "MemoryError": "Lower --batch-size, or use more stages on more hosts.",
    "NonFiniteError": "Lower the learning rate. If --method sync trains with this one, staleness "
    "is what it cannot bear.",
    "SIGSEGV": "Native code crashed; the end of the log shows where Python was.",
    "SIGABRT": "Native code gave up; the end of the log says why.",
    "SIGBUS": "Memory could not be backed: look whether /dev/shm or the disk is full.",
    "SIGILL": "The CPU lacks an instruction that torch was built for: do the hosts differ?",
    "SIGTERM": "Somebody, or the host's scheduler, ended this process alone.",
    "silent": "The process was stopped, its host swaps or is cut off, or it died unseen.",
    "stuck": "A call into the model, torch or a data loader does not return.",
    "agent lost": "See whether the host is up and reachable; all workers on it ended with it.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """A process has said nothing for longer than its lease; ``stage`` is None for an agent."""

    stage: int | None
    incarnation: int
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A worker lives and waits for nobody, yet finishes no op."""

    stage: int
    incarnation: int
    stuck_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that went wrong.

    Attributes:
        at_s: when the coordinator heard of it, monotonic.
        host: name of the host it happened on.
        event: what was heard.
        op: what the stage was doing by its last report; for events that do not say.
    """

    at_s: float
    host: str
    event: WorkerFault | WorkerExited | AgentLost | Silent | Stuck
    op: str = ""

    @property
    def stage(self) -> int | None:
        """Whose it is; None for an agent."""
        return None if isinstance(self.event, AgentLost) else self.event.stage

    @property
    def process(self) -> tuple[str | int, int]:
        """The one process it is about: incarnations tell workers apart, hosts tell agents."""
        if isinstance(self.event, AgentLost) or self.event.stage is None:
            return (self.host, 0)
        return (self.event.stage, self.event.incarnation)

    @property
    def rank(self) -> int:
        """How likely it is that something else was the reason, see the top of this file."""
        if not isinstance(self.event, WorkerFault):
            return 0
        if self.event.is_consequence:
            return 2
        return 1 if self.event.exit_code == ExitCode.DEADLINE else 0

    @property
    def exit_code(self) -> int:
        """What the run returns if this is the first cause."""
        event = self.event
        if isinstance(event, WorkerFault):
            if event.what in _OUT_OF_MEMORY:
                return ExitCode.OUT_OF_MEMORY
            return event.exit_code or ExitCode.WORKER_FAILED
        if isinstance(event, WorkerExited) and event.status < 0:
            return exit_code_of_signal(-event.status)
        if isinstance(event, (Silent, Stuck)):
            return ExitCode.DEADLINE
        return ExitCode.WORKER_FAILED

    def words(self) -> tuple[str, str]:
        """Return what happened as one word and as one sentence."""
        event = self.event
        if isinstance(event, WorkerFault):
            return event.what, event.message
        if isinstance(event, WorkerExited):
            return _end_words(event)
        if isinstance(event, AgentLost):
            return "agent lost", event.reason
        if isinstance(event, Stuck):
            return "stuck", f"finished no op for {event.stuck_s:.0f} s, though it waits for nobody"
        who = "agent" if event.stage is None else "worker"
        return "silent", f"the {who} has said nothing for {event.silent_s:.0f} s"


def first_cause(faults: Sequence[Fault]) -> Cause:
    """Return the first cause among ``faults``, with one line for each other process.

    A worker that reports an exception and then exits is one fault; its exit adds the log.

    Args:
        faults: at least one, in any order. Ends that were asked for are no faults.

    Raises:
        ValueError: there are no faults.
    """
    first, others = _sorted_out(faults)
    what, message = first.words()
    exited = _exit_of(first, faults)
    reported = first.event if isinstance(first.event, WorkerFault) else None
    user_error = reported is not None and reported.user_error
    return Cause(
        stage=first.stage,
        host=first.host,
        what=what,
        message=message,
        op=(reported and reported.op) or first.op,
        traceback=reported.traceback if reported and not user_error else "",
        log_path=exited.log_path if exited else "",
        log_tail=exited.log_tail if exited else (),
        advice=_ADVICE.get(what, ""),
        consequences=tuple(_line(fault) for fault in others),
        exit_code=first.exit_code,
        user_error=user_error,
    )


def _sorted_out(faults: Sequence[Fault]) -> tuple[Fault, list[Fault]]:
    """Return the first cause and the most telling fault of every other process, by time."""
    if not faults:
        raise ValueError("a cause needs at least one fault")
    telling: dict[tuple[str | int, int], Fault] = {}
    for fault in sorted(faults, key=lambda fault: fault.at_s):
        known = telling.setdefault(fault.process, fault)
        # An exit may overtake the worker's own words, which came another way; the words win.
        if isinstance(known.event, WorkerExited) and isinstance(fault.event, WorkerFault):
            telling[fault.process] = fault
    ranked = sorted(telling.values(), key=lambda fault: (fault.rank, fault.at_s))
    return ranked[0], sorted(ranked[1:], key=lambda fault: fault.at_s)


def _exit_of(first: Fault, faults: Sequence[Fault]) -> WorkerExited | None:
    for fault in faults:
        if fault.process == first.process and isinstance(fault.event, WorkerExited):
            return fault.event
    return None


def _end_words(event: WorkerExited) -> tuple[str, str]:
    if event.status < 0:
        return signal_name(-event.status), _killed(-event.status, event.free_memory_bytes)
    return "exit", f"ended with exit code {event.status} before its work was done"


def _killed(number: int, free_memory_bytes: int) -> str:
    text = f"killed by {signal_name(number)} ({exit_code_of_signal(number)})"
    if number != signal.SIGKILL:
        return text
    text += f". Just after, the host had {free_memory_bytes / 2**30:.1f} GiB free; "
    if free_memory_bytes < LOW_MEMORY_BYTES:
        return text + (
            "likely the kernel's out-of-memory killer: lower --batch-size, or put fewer workers "
            "on this host"
        )
    return text + (
        "either somebody killed it, or what is free now is what it held (then dmesg there tells "
        "of an out-of-memory kill)"
    )


def ending(status: int) -> str:
    """Say in a word how a process ended, by its exit code or minus its signal."""
    return signal_name(-status) if status < 0 else f"exit code {status}"


def signal_name(number: int) -> str:
    """Return the name of a signal, for the user."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has a number only
        return f"signal {number}"


def _line(fault: Fault) -> str:
    who = "agent" if fault.stage is None else f"stage {fault.stage}"
    what, message = fault.words()
    first_line = message.partition("\n")[0]
    return f"{who} ({fault.host}): {what}: {first_line}"
