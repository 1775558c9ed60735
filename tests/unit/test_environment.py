"""Which variables reach the hosts, what workers get on top, and what a log may show of them."""

from __future__ import annotations

import pytest

from spectrain.launch.environment import (
    ALLOWED,
    collect,
    describe_changes,
    redact,
    worker_environment,
)
from spectrain.protocol.errors import SettingsError


def parse(text: str) -> dict[str, str]:
    return collect({}, env_file_text=text)


def worker(
    base: dict[str, str] | None = None,
    passed: dict[str, str] | None = None,
    *,
    workers_on_host: int = 2,
    coordinator: tuple[str, int] | None = ("10.0.0.1", 5555),
) -> dict[str, str]:
    return worker_environment(
        base or {},
        passed or {},
        stage=3,
        stages=4,
        slot=1,
        workers_on_host=workers_on_host,
        host_index=1,
        run_id="0123",
        run_dir="/runs/a",
        coordinator=coordinator,
    )


# -- what reaches the hosts ---------------------------------------------------------------------


def test_the_allow_list_is_as_documented() -> None:
    documented = (
        "CUDA_* GLOO_* HF_* LD_LIBRARY_PATH MLFLOW_* NCCL_* OMP_* PATH PYTHON* PYTORCH_* "
        "SPECTRAIN_* TORCH_* WANDB_*"
    )
    assert " ".join(ALLOWED) == documented


def test_only_what_is_on_the_list_is_taken_unasked() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/a:/b",
        "PATH": "/bin",
        "HOME": "/home/ada",
        "XPATH": "x",
        "nccl_debug": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
    }
    assert collect(environ) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/a:/b", "PATH": "/bin"}


def test_the_launchers_own_choice_of_gpus_stays_at_home_unless_asked_for() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_LAUNCH_BLOCKING": "1"}
    assert collect(environ) == {"CUDA_LAUNCH_BLOCKING": "1"}
    assert collect(environ, ["CUDA_VISIBLE_DEVICES"]) == environ


def test_a_name_takes_the_launchers_value_and_an_assignment_its_own() -> None:
    assert collect({"A": "a b", "B": "b"}, ["A", "B=x=y z", "C="]) == {
        "A": "a b",
        "B": "x=y z",
        "C": "",
    }


def test_an_option_wins_over_the_file_and_the_file_over_the_environment() -> None:
    environ = {"NCCL_A": "environ", "NCCL_B": "environ", "NCCL_C": "environ"}
    text = "NCCL_B=file\nNCCL_C=file"
    assert collect(environ, ["NCCL_C=option"], text) == {
        "NCCL_A": "environ",
        "NCCL_B": "file",
        "NCCL_C": "option",
    }


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        collect({}, ["MISSING", "1ST=x", "=x"], "fine=1\nnot a pair\n", "job.env")
    rule = "may only have letters, digits and _, and start with no digit"
    assert str(caught.value).splitlines() == [
        "job.env:2: expected NAME=value, perhaps after export",
        "-x MISSING: not set here; set it, or give -x MISSING=value",
        f"-x '1ST=x': expected NAME or NAME=value; the name '1ST' {rule}",
        f"-x '=x': expected NAME or NAME=value; the name '' {rule}",
    ]


# -- the environment file -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=plain", "plain"),
        ("A = spaced words ", "spaced words"),
        ("export A=exported", "exported"),
        ("A=", ""),
        ("A=a#b", "a#b"),
        ("A=a # comment", "a"),
        ("A=$HOME;`id`", "$HOME;`id`"),
        (r"A=C:\new", r"C:\new"),
        ("A=x=y", "x=y"),
        ("""A=it's""", "it's"),
        (r"""A='literal \n $X "" # '  # comment""", r'literal \n $X "" # '),
        (r'A="two\nlines\t\"quoted\" \\ \$X # "  # comment', 'two\nlines\t"quoted" \\ $X # '),
        ("A=''", ""),
    ],
)
def test_each_form_of_a_line_is_read(line: str, value: str) -> None:
    assert parse(line) == {"A": value}


def test_blank_lines_comments_and_line_ends_are_no_values() -> None:
    assert parse("\ufeff# head\r\n\r\n  # more\r\nA=1\r\n\r\nB=2") == {"A": "1", "B": "2"}


@pytest.mark.parametrize("value", ["'open", '"open', r'"open\"', "'a' b", '"a"b', "'it''s'"])
def test_quotes_must_match_and_end_the_value(value: str) -> None:
    with pytest.raises(SettingsError, match=r"job\.env:1: the quotes around the value of A"):
        collect({}, (), f"A={value}", "job.env")


def test_a_bad_name_in_the_file_is_told_with_its_line() -> None:
    with pytest.raises(SettingsError, match=r"--env-file:2: the name 'B-C' may only have letters"):
        parse("A=1\nB-C=2")


def test_a_bad_line_is_not_repeated_as_it_may_hold_a_secret() -> None:
    with pytest.raises(SettingsError) as caught:
        parse("API_KEY 's3cret'\nAPI_KEY='s3cret\n2=s3cret")
    assert "s3cret" not in str(caught.value)


# -- what a log may show ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "TOKEN", "client_secret", "PGPASSWORD", "DB_PASSWORD_FILE"],
)
def test_secrets_are_not_shown(name: str) -> None:
    assert redact({name: "s3cret"}) == {name: "***"}


@pytest.mark.parametrize("name", ["KEYBOARD", "TOKENIZERS_PARALLELISM", "MONKEY", "PATH"])
def test_other_values_are_shown(name: str) -> None:
    assert redact({name: "value"}) == {name: "value"}


def test_a_redacted_environment_is_sorted_and_a_copy() -> None:
    environment = {"B": "1", "A_KEY": "2"}
    assert list(redact(environment).items()) == [("A_KEY", "***"), ("B", "1")]
    assert environment == {"B": "1", "A_KEY": "2"}


# -- what workers get ---------------------------------------------------------------------------


def test_a_worker_learns_which_one_it_is() -> None:
    assert worker() == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5555",
        "SPECTRAIN_RUN_ID": "0123",
        "SPECTRAIN_RUN_DIR": "/runs/a",
        "SPECTRAIN_STAGE": "3",
        "SPECTRAIN_NUM_STAGES": "4",
        "SPECTRAIN_COORDINATOR": "10.0.0.1:5555",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def test_a_run_without_ports_names_none() -> None:
    assert not {"MASTER_ADDR", "MASTER_PORT", "SPECTRAIN_COORDINATOR"} & set(
        worker(coordinator=None)
    )


def test_an_ipv6_coordinator_is_written_with_brackets() -> None:
    values = worker(coordinator=("fe80::1", 7))
    assert (values["SPECTRAIN_COORDINATOR"], values["MASTER_ADDR"]) == ("[fe80::1]:7", "fe80::1")


def test_a_worker_alone_on_its_host_keeps_all_threads() -> None:
    assert "OMP_NUM_THREADS" not in worker(workers_on_host=1)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"])
def test_what_the_user_or_the_host_has_set_stays(name: str) -> None:
    assert worker(passed={name: "0"})[name] == "0"
    assert name not in worker(base={name: ""})


def test_only_the_variables_of_the_rank_replace_the_users() -> None:
    passed = {"RANK": "9", "SPECTRAIN_STAGE": "9", "NCCL_DEBUG": "INFO"}
    values = worker(passed=passed)
    assert (values["RANK"], values["SPECTRAIN_STAGE"]) == ("3", "3")
    assert values["NCCL_DEBUG"] == "INFO"
    assert passed["RANK"] == "9"


def test_each_change_is_described_once() -> None:
    base = {"OMP_NUM_THREADS": "8", "LOCAL_RANK": "1", "HOME": "/root"}
    passed = {"RANK": "9", "WANDB_API_KEY": "s3cret", "NCCL_DEBUG": "INFO"}
    lines = describe_changes(base, passed, worker(base, passed, coordinator=None))
    assert lines == (
        "GROUP_RANK=1 (was not set)",
        "LOCAL_WORLD_SIZE=2 (was not set)",
        "NODE_RANK=1 (was not set)",
        "PYTHONFAULTHANDLER=1 (was not set)",
        "PYTHONUNBUFFERED=1 (was not set)",
        "RANK=3 (was 9)",
        "SPECTRAIN_NUM_STAGES=4 (was not set)",
        "SPECTRAIN_RUN_DIR=/runs/a (was not set)",
        "SPECTRAIN_RUN_ID=0123 (was not set)",
        "SPECTRAIN_STAGE=3 (was not set)",
        "WORLD_SIZE=4 (was not set)",
    )


def test_descriptions_keep_secrets() -> None:
    assert describe_changes({"A_KEY": "old"}, {}, {"A_KEY": "new"}) == ("A_KEY=*** (was ***)",)
