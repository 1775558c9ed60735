"""The questions to all hosts at once, and what is said of hosts that are not fit."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_ssh import FakeSsh

from spectrain.launch.hosts import Host
from spectrain.launch.preflight import (
    ProbeResult,
    clock_warnings,
    problems,
    run_preflight,
    table,
)
from spectrain.launch.probe import MISSING, HostFacts, ProbeRequest, versions
from spectrain.launch.remote import SshOptions
from spectrain.protocol.errors import ExitCode, PreflightError
from spectrain.protocol.messages import Versions

OURS = Versions(
    package="0.1.0", package_digest="aaaa", job_digest="bbbb", python="3.11.2", torch="2.13.0"
)
FACTS = HostFacts(
    host="n1.example.org",
    executable="/opt/python",
    versions=OURS,
    gpus=(),
    visible_devices=None,
    driver="",
    cores=8,
    free_memory_bytes=3 << 30,
    run_dir_problem="",
    clock_s=1000.0,
)
REQUEST = ProbeRequest(job="/jobs/job.py", run_dir="/runs/a", device="cpu")


def fit(name: str, **different: str) -> ProbeResult:
    return ProbeResult(host=Host(name), facts=replace(FACTS, versions=replace(OURS, **different)))


# -- what is wrong: pure ------------------------------------------------------------------------


def test_hosts_that_agree_have_no_problems() -> None:
    assert problems([fit("n1"), fit("n2")], REQUEST, OURS) == ()


def test_the_last_part_of_pythons_version_may_differ() -> None:
    assert problems([fit("n1", python="3.11.9")], REQUEST, OURS) == ()


@pytest.mark.parametrize(
    ("different", "message"),
    [
        ({"python": "3.12.2"}, "n2, n3: Python is 3.12, but 3.11 here; --python names"),
        ({"torch": "2.4.0"}, "n2, n3: torch is 2.4.0, but 2.13.0 here; install the same"),
        ({"torch": MISSING}, "n2, n3: torch is missing, but 2.13.0 here"),
        ({"package": "0.2.0"}, "n2, n3: spectrain is 0.2.0, but 0.1.0 here"),
        ({"package_digest": "c" * 64}, f"n2, n3: the source of spectrain is {'c' * 12}, but aaaa"),
        ({"job_digest": "d" * 64}, f"n2, n3: the job file is {'d' * 12}, but bbbb here; copy"),
        ({"job_digest": MISSING}, "n2, n3: the job file is missing, but bbbb here; copy the same"),
    ],
)
def test_what_differs_names_the_hosts_and_both_values(
    different: dict[str, str], message: str
) -> None:
    results = [fit("n1"), fit("n2", **different), fit("n3", **different)]
    (text,) = problems(results, REQUEST, OURS)
    assert text.startswith(message)


def test_each_different_value_is_told() -> None:
    results = [fit("n1", torch="2.4.0"), fit("n2", torch="2.5.0")]
    assert [text.partition(",")[0] for text in problems(results, REQUEST, OURS)] == [
        "n1: torch is 2.4.0",
        "n2: torch is 2.5.0",
    ]


def test_the_first_failure_does_not_hide_others() -> None:
    results = [
        ProbeResult(host=Host("n1"), failure="n1: no answer"),
        fit("n2", torch="2.4.0"),
        ProbeResult(host=Host("n3"), facts=replace(FACTS, run_dir_problem="/runs is not writable")),
        ProbeResult(host=Host("n4"), failure="n4: no answer"),
    ]
    texts = problems(results, REQUEST, OURS)
    assert [text.partition(":")[0] for text in texts] == ["n1", "n4", "n3", "n2"]


def test_a_run_directory_that_cannot_be_made_is_told_with_the_reason() -> None:
    facts = replace(FACTS, run_dir_problem="/runs is not writable")
    (text,) = problems([ProbeResult(host=Host("n1"), facts=facts)], REQUEST, OURS)
    assert text == (
        "n1: the run directory /runs/a cannot be made there, as /runs is not writable; choose "
        "another with --run-dir"
    )


def test_missing_gpus_matter_to_a_cuda_run_only() -> None:
    result = ProbeResult(host=Host("n1", slots=2), facts=replace(FACTS, gpus=("NVIDIA H200",)))
    assert problems([result], REQUEST, OURS) == ()
    (text,) = problems([result], replace(REQUEST, device="cuda"), OURS)
    assert text.startswith("n1: 1 GPU visible there, but 2 slots are asked for")


def test_a_clock_that_is_off_is_a_warning() -> None:
    results = [
        replace(fit("n1"), clock_ahead_s=0.5),
        replace(fit("n2"), clock_ahead_s=61.04),
        replace(fit("n3"), clock_ahead_s=-2.0),
    ]
    assert problems(results, REQUEST, OURS) == ()
    assert clock_warnings(results) == (
        "n2: its clock is at least 61.0 s ahead; times in its logs are off by that",
        "n3: its clock is at least 2.0 s behind; times in its logs are off by that",
    )


def test_the_table_has_a_line_for_every_host() -> None:
    gpus = ("NVIDIA H200", "NVIDIA H200", "Tesla T4")
    facts = replace(FACTS, gpus=gpus, visible_devices="0,1,2", driver="570.1")
    no_dir = replace(FACTS, run_dir_problem="/runs is not writable")
    text = table(
        [
            ProbeResult(host=Host("n1"), facts=facts, clock_ahead_s=-3.0),
            ProbeResult(host=Host("node2"), failure="node2: no answer"),
            ProbeResult(host=Host("n3"), facts=no_dir),
        ]
    )
    lines = [[cell.strip() for cell in line.split("  ") if cell] for line in text.splitlines()]
    assert lines == [
        ["host", "answers as", "python", "spectrain", "torch", "GPUs", "driver", "cores",
         "free memory", "run directory", "clock"],
        ["n1", "n1.example.org", "3.11.2", "0.1.0", "2.13.0",
         "2 x NVIDIA H200, 1 x Tesla T4 (CUDA_VISIBLE_DEVICES=0,1,2)", "570.1", "8", "3.0 GiB",
         "writable", "-3.0 s"],
        ["node2", "no answer", *"-" * 9],
        ["n3", "n1.example.org", "3.11.2", "0.1.0", "2.13.0", "-", "-", "8", "3.0 GiB",
         "not writable", "in time"],
    ]  # fmt: skip
    assert text.splitlines()[0].index("answers") == text.splitlines()[1].index("n1.example")


# -- the questions: real processes --------------------------------------------------------------


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    return FakeSsh(tmp_path, monkeypatch)


@pytest.fixture
def request_here(tmp_path: Path) -> ProbeRequest:
    job = tmp_path / "job.py"
    job.write_text("x = 1\n")
    return ProbeRequest(job=str(job), run_dir=str(tmp_path / "run"), device="cpu")


def preflight(
    hosts: list[Host],
    request: ProbeRequest,
    *,
    python: str = sys.executable,
    environment: dict[str, str] | None = None,
    deadline_s: float = 30.0,
    heard: list[str] | None = None,
) -> tuple[ProbeResult, ...]:
    return run_preflight(
        hosts,
        request,
        python=python,
        ssh=SshOptions(),
        environment=environment or {},
        cwd="/",
        on_stderr=(heard if heard is not None else []).append,
        deadline_s=deadline_s,
    )


def test_all_hosts_answer_in_their_order(ssh: FakeSsh, request_here: ProbeRequest) -> None:
    hosts = [Host("node2"), Host("localhost"), Host("node1", user="ada")]
    results = preflight(hosts, request_here)
    assert [result.host for result in results] == hosts
    assert all(result.facts and not result.failure for result in results)
    assert [result.clock_ahead_s for result in results] == [0.0, 0.0, 0.0]


def test_loopback_is_asked_without_ssh(
    request_here: ProbeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (result,) = preflight([Host("localhost")], request_here)
    assert result.facts is not None


def test_what_a_login_shell_prints_first_does_no_harm(
    ssh: FakeSsh, request_here: ProbeRequest
) -> None:
    (result,) = preflight([Host("noisy")], request_here)
    assert result.facts is not None


def test_every_unfit_host_is_named_with_its_reason_and_nothing_stays(
    ssh: FakeSsh, request_here: ProbeRequest
) -> None:
    heard: list[str] = []
    hosts = [Host("refused"), Host("silent"), Host("node1")]
    with pytest.raises(PreflightError) as caught:
        preflight(hosts, request_here, deadline_s=5.0, heard=heard)
    text = str(caught.value)
    assert "2 problems; nothing was started:" in text
    assert "ssh to refused failed" in text
    assert "Connection refused" in text
    assert "silent: no answer within 5 s; it said: nothing" in text
    assert text.startswith("host ")  # the table, with the good host in it
    assert "\nnode1 " in text
    assert heard == ["refused: ssh: connect to host refused port 22: Connection refused"]
    assert caught.value.exit_code == ExitCode.PREFLIGHT == 3


def test_a_missing_interpreter_is_reported_on_every_host(
    ssh: FakeSsh, request_here: ProbeRequest
) -> None:
    with pytest.raises(PreflightError) as caught:
        preflight([Host("node1"), Host("localhost")], request_here, python="/nowhere/python")
    text = str(caught.value)
    assert "node1 cannot run the Python interpreter /nowhere/python" in text
    assert "localhost: cannot start python '/nowhere/python' on this machine" in text


def shadow_package(folder: Path, probe: str | None) -> dict[str, str]:
    """Make a package of our name that comes first; return the environment that finds it."""
    launch = folder / "spectrain" / "launch"
    launch.mkdir(parents=True)
    (launch.parent / "__init__.py").touch()
    if probe is not None:
        (launch / "__init__.py").touch()
        (launch / "probe.py").write_text(probe)
    return {"PYTHONPATH": str(folder)}


def test_a_missing_package_is_reported_with_what_to_do(
    ssh: FakeSsh, request_here: ProbeRequest, tmp_path: Path
) -> None:
    environment = shadow_package(tmp_path / "other", None)
    with pytest.raises(PreflightError) as caught:
        preflight([Host("node1")], request_here, environment=environment)
    text = str(caught.value)
    assert "No module named" in text
    assert f"spectrain must be installed there for {sys.executable} (or give --python)" in text


@pytest.mark.parametrize(
    "answer", ["print('{\"versions\": {}}')", "print('hi')", "print('[]')", ""]
)
def test_an_answer_of_another_version_is_not_understood_but_explained(
    answer: str, ssh: FakeSsh, request_here: ProbeRequest, tmp_path: Path
) -> None:
    environment = shadow_package(tmp_path / "other", answer)
    with pytest.raises(PreflightError, match="seems to have another version of spectrain"):
        preflight([Host("node1")], request_here, environment=environment)


def test_a_job_that_only_the_launcher_has_is_found_out(
    ssh: FakeSsh, request_here: ProbeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PreflightError, match="node1: the job file is missing, but"):
        preflight([Host("node1")], replace(request_here, job="job.py"))


def test_the_environment_of_the_run_decides_which_gpus_are_found(
    ssh: FakeSsh, request_here: ProbeRequest
) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(PreflightError, match="node1: 0 GPUs visible there"):
        preflight([Host("node1")], replace(request_here, device="cuda"), environment=environment)


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_a_clock_that_is_off_is_measured(
    ahead_s: float, ssh: FakeSsh, request_here: ProbeRequest, tmp_path: Path
) -> None:
    clock_s = time.time() + ahead_s
    facts = replace(FACTS, versions=versions(request_here.job), clock_s=clock_s)
    environment = shadow_package(tmp_path / "other", f"print({facts.to_json()!r})")
    (result,) = preflight([Host("node1")], request_here, environment=environment)
    # The time that the question took is not blamed on the clock, so that at most it is missing.
    assert result.clock_ahead_s == pytest.approx(ahead_s, abs=60)
    assert len(clock_warnings([result])) == 1
