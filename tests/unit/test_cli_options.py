"""The options of ``spectrain-launch`` are a promise to scripts: they only change on purpose."""

from __future__ import annotations

import click
import pytest

from spectrain.launch.cli import launch, main

OPTIONS = """
-H --hosts
-h --help
-q --quiet
-x
--batch-size
--bind
--device
--dry-run
--env-file
--epochs
--evaluate --no-evaluate
--grace
--horizon
--json
--lease
--log-memory
--max-batches
--max-restarts
--method
--microbatches
--nodes
--partition
--precision
--predict-lr
--predictor
--python
--resume
--run-dir
--seed
--set
--snapshot-every
--ssh-identity
--ssh-option
--ssh-port
--stages
--start-timeout
--threads
--version
--wait-timeout
"""


def options_of(command: click.Command) -> list[str]:
    """Return every option of a command, its short form and its negation on one line."""
    context = click.Context(command, help_option_names=["-h", "--help"])
    return sorted(
        " ".join((*option.opts, *option.secondary_opts))
        for option in command.get_params(context)
        if isinstance(option, click.Option)
    )


def test_the_options_of_the_launcher_are_frozen() -> None:
    assert options_of(launch) == sorted(OPTIONS.strip().splitlines())


def test_the_launcher_takes_one_job_and_may_do_without() -> None:
    (job,) = [each for each in launch.params if isinstance(each, click.Argument)]
    assert (job.name, job.nargs, job.required) == ("job", 1, False)


def test_the_command_of_all_commands_knows_the_others() -> None:
    assert sorted(main.commands) == ["launch", "simulate", "status"]


@pytest.mark.parametrize("option", [each for each in launch.params if each.name != "version"])
def test_every_option_says_what_it_is_for(option: click.Parameter) -> None:
    assert isinstance(option, click.Argument) or getattr(option, "help", None)


@pytest.mark.parametrize(
    ("option", "variable"),
    [
        ("hosts", "SPECTRAIN_LAUNCH_HOSTS"),
        ("lease_s", "SPECTRAIN_LAUNCH_LEASE"),
        ("log_memory_bytes", "SPECTRAIN_LAUNCH_LOG_MEMORY"),
        ("assignments", "SPECTRAIN_LAUNCH_SET"),
        ("evaluate", "SPECTRAIN_LAUNCH_EVALUATE"),
    ],
)
def test_options_are_variables_by_the_name_that_the_user_types(option: str, variable: str) -> None:
    (found,) = [each for each in launch.params if each.name == option]
    assert found.envvar == variable
