"""Exit codes are a promise to scripts: they never change."""

from __future__ import annotations

import inspect

import pytest

from spectrain.protocol import errors
from spectrain.protocol.errors import ExitCode, SpectrainError, UserError, exit_code_of_signal

CODES = {
    "DONE": 0,
    "WORKER_FAILED": 1,
    "USAGE": 2,
    "PREFLIGHT": 3,
    "DEADLINE": 4,
    "OUT_OF_MEMORY": 5,
    "NON_FINITE": 6,
    "CHECKPOINT": 7,
    "STOPPED": 75,
    "INTERRUPTED": 130,
    "TERMINATED": 143,
}
CODES_OF_ERRORS = {
    "SpectrainError": 1,
    "UserError": 2,
    "SettingsError": 2,
    "HostError": 2,
    "JobError": 2,
    "DataError": 2,
    "PreflightError": 3,
    "ProtocolError": 1,
    "LinkError": 1,
    "SnapshotError": 1,
    "ReplayMismatchError": 1,
    "DeadlineError": 4,
    "NonFiniteError": 6,
}


def exceptions() -> dict[str, type[Exception]]:
    """Return every exception of the module by name."""
    members = inspect.getmembers(errors, inspect.isclass)
    return {name: member for name, member in members if issubclass(member, Exception)}


def test_exit_codes_are_frozen() -> None:
    assert {code.name: code.value for code in ExitCode} == CODES


def test_the_exit_code_of_every_error_is_frozen() -> None:
    found = {name: int(error.exit_code) for name, error in exceptions().items()}
    assert found == CODES_OF_ERRORS


def test_all_errors_are_one_tree_and_all_are_exported() -> None:
    assert all(issubclass(error, SpectrainError) for error in exceptions().values())
    assert {*exceptions(), "ExitCode", "exit_code_of_signal"} == set(errors.__all__)


def test_what_a_user_can_mend_is_a_user_error() -> None:
    mendable = {name for name, error in exceptions().items() if issubclass(error, UserError)}
    expected = {
        "UserError",
        "SettingsError",
        "HostError",
        "JobError",
        "DataError",
        "PreflightError",
    }
    assert mendable == expected


@pytest.mark.parametrize(("number", "code"), [(2, 130), (9, 137), (15, 143)])
def test_a_death_by_signal_has_the_shells_code(number: int, code: int) -> None:
    assert exit_code_of_signal(number) == code
