"""One exception tree and the exit codes of the command; no behaviour beyond that.

::

    SpectrainError                 anything we raise on purpose
    ├── UserError                  the user can mend it; shown as one sentence, never a traceback
    │   ├── SettingsError          an option or setting that cannot be
    │   ├── HostError              host file, host list, a host that cannot be used
    │   ├── JobError               the job file or what its functions return
    │   ├── DataError              a user's copy of a data set that cannot be read
    │   └── PreflightError         a host is not fit: ssh, versions, files, ports
    ├── ProtocolError              a message that must be dropped
    ├── LinkError                  a neighbour's link failed; a consequence, seldom a first cause
    ├── SnapshotError              a snapshot cannot be taken, read, or trusted
    ├── ReplayMismatchError        a restarted stage is not what it was before
    ├── DeadlineError              a named wait took too long
    └── NonFiniteError             loss or gradient is NaN or infinite
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

__all__ = [
    "DataError",
    "DeadlineError",
    "ExitCode",
    "HostError",
    "JobError",
    "LinkError",
    "NonFiniteError",
    "PreflightError",
    "ProtocolError",
    "ReplayMismatchError",
    "SettingsError",
    "SnapshotError",
    "SpectrainError",
    "UserError",
    "exit_code_of_signal",
]


class ExitCode(IntEnum):
    """What the command returns to its caller; a worker killed by signal n gives 128 + n."""

    DONE = 0
    WORKER_FAILED = 1
    USAGE = 2
    PREFLIGHT = 3
    DEADLINE = 4
    OUT_OF_MEMORY = 5
    NON_FINITE = 6
    CHECKPOINT = 7
    STOPPED = 75
    INTERRUPTED = 130
    TERMINATED = 143


def exit_code_of_signal(signal_number: int) -> int:
    """Return the shell's exit code for a death by ``signal_number``."""
    return 128 + signal_number


class SpectrainError(Exception):
    """Anything this package raises on purpose."""

    exit_code: ClassVar[ExitCode] = ExitCode.WORKER_FAILED


class UserError(SpectrainError):
    """A mistake the user can mend; its text says what, where, the rule, and what to do."""

    exit_code: ClassVar[ExitCode] = ExitCode.USAGE


class SettingsError(UserError):
    """An option or setting has a value it cannot have."""


class HostError(UserError):
    """A host file or host list is wrong, or names what does not exist."""


class JobError(UserError):
    """The job file cannot be used as it is."""


class DataError(UserError):
    """A copy of a data set is missing, damaged, or of no known layout."""


class PreflightError(UserError):
    """A host is not fit to take part in this run."""

    exit_code: ClassVar[ExitCode] = ExitCode.PREFLIGHT


class ProtocolError(SpectrainError):
    """A message is malformed, too large, unknown, replayed or from an old incarnation."""


class LinkError(SpectrainError):
    """A neighbour's link failed; nearly always because that neighbour died first."""


class SnapshotError(SpectrainError):
    """A snapshot cannot be taken, cannot be read, is damaged, or is not the one asked for."""


class ReplayMismatchError(SpectrainError):
    """A restarted stage cannot take its former place: parcels differ, or are no longer kept."""


class DeadlineError(SpectrainError):
    """A wait with a name passed its deadline."""

    exit_code: ClassVar[ExitCode] = ExitCode.DEADLINE


class NonFiniteError(SpectrainError):
    """A loss or a gradient is NaN or infinite."""

    exit_code: ClassVar[ExitCode] = ExitCode.NON_FINITE
