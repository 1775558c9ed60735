"""Asks every host at once whether it is fit for the run, and says all that is wrong with any.

Starts nothing of the run itself. What counts as wrong is decided by ``problems``, which is pure;
``run_preflight`` only asks and waits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from ..protocol.errors import HostError, PreflightError
from ..protocol.messages import Versions
from .address import is_this_machine
from .hosts import Host, devices_of
from .probe import MISSING, HostFacts, ProbeRequest, versions
from .remote import RemoteProcess, SshOptions, start_process

__all__ = ["ProbeResult", "clock_warnings", "problems", "run_preflight", "table"]

_MODULE = "spectrain.launch.probe"
_CLOCK_TOLERANCE_S = 1.0
_KILL_TIMEOUT_S = 2.0
_DIGEST_SHOWN = 12
_HEADINGS = (
    "host", "answers as", "python", "spectrain", "torch", "GPUs", "driver", "cores",
    "free memory", "run directory", "clock",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What one host answered.

    Attributes:
        host: as the user named it.
        facts: its answer; None if there was none.
        failure: why there was none, in one sentence; empty otherwise.
        clock_ahead_s: by how much its clock is surely ahead of ours, negative if behind; 0 when
            the time that the question took explains the difference.
    """

    host: Host
    facts: HostFacts | None = None
    failure: str = ""
    clock_ahead_s: float = 0.0


def run_preflight(
    hosts: Sequence[Host],
    request: ProbeRequest,
    *,
    python: str,
    ssh: SshOptions,
    environment: Mapping[str, str],
    cwd: str,
    on_stderr: Callable[[str], None],
    deadline_s: float = 20.0,
) -> tuple[ProbeResult, ...]:
    """Ask all hosts in parallel, loop-back names without ssh, and compare what they say.

    Call it from the main thread, as ``start_process`` wants.

    Args:
        hosts: whom to ask.
        request: what to ask.
        python: path of the interpreter on every host.
        ssh: how to connect.
        environment: what the run's processes will get; it decides what they find.
        cwd: working directory of the run on every host.
        on_stderr: gets what ssh and the hosts complain about, the host's name in front.
        deadline_s: how long to wait for the slowest host.

    Returns:
        One result per host, in their order.

    Raises:
        PreflightError: the table, and all that ``problems`` finds on any host.
    """
    deadline = time.monotonic() + deadline_s
    probes = [_Probe(host) for host in hosts]
    for probe in probes:  # all are under way before the first is waited for
        probe.start(
            json.dumps(asdict(request)).encode(),
            python=python,
            ssh=ssh,
            environment=environment,
            cwd=cwd,
            on_stderr=on_stderr,
        )
    results = tuple(probe.result(deadline, deadline_s) for probe in probes)
    found = problems(results, request, versions(request.job))
    if found:
        count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise PreflightError(
            "\n".join([table(results), "", f"{count}; nothing was started:", *found])
        )
    return results


def problems(
    results: Sequence[ProbeResult], request: ProbeRequest, ours: Versions
) -> tuple[str, ...]:
    """Return one sentence for each thing that forbids the run; empty when all hosts are fit.

    Args:
        results: what the hosts answered.
        request: what they were asked.
        ours: the launcher's own versions, which all hosts must have. Of Python's version only
            major and minor count.
    """
    answers = [(result.host, result.facts) for result in results if result.facts is not None]
    return (
        *(result.failure for result in results if result.facts is None),
        *(text for host, facts in answers for text in _unfit(host, facts, request)),
        *_differences([(host.name, facts.versions) for host, facts in answers], ours),
    )


def clock_warnings(results: Sequence[ProbeResult]) -> tuple[str, ...]:
    """Return one line per host whose clock is off: no reason to stop, but logs will mislead."""
    return tuple(
        f"{result.host.name}: its clock is at least {abs(result.clock_ahead_s):.1f} s "
        f"{'ahead' if result.clock_ahead_s > 0 else 'behind'}; times in its logs are off by that"
        for result in results
        if abs(result.clock_ahead_s) > _CLOCK_TOLERANCE_S
    )


def table(results: Sequence[ProbeResult]) -> str:
    """Return what the hosts answered as plain text, one line each, without trailing blanks."""
    rows = [_HEADINGS, *map(_row, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


class _Probe:
    """One question to one host and its answer."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._process: RemoteProcess | None = None
        self._failure = ""
        self._python = ""
        self._asked_s = self._answered_s = 0.0
        self._answer = ""

    def start(
        self,
        question: bytes,
        *,
        python: str,
        ssh: SshOptions,
        environment: Mapping[str, str],
        cwd: str,
        on_stderr: Callable[[str], None],
    ) -> None:
        self._python = python
        self._asked_s = time.time()
        try:
            self._process = start_process(
                None if is_this_machine(self._host) else self._host,
                ["-m", _MODULE],
                environment=environment,
                cwd=cwd,
                first_line=question,
                python=python,
                ssh=ssh,
                on_stderr=on_stderr,
                on_stdout=self._on_stdout,
            )
        except HostError as error:
            self._failure = f"{self._host.name}: {error}"

    def result(self, deadline: float, deadline_s: float) -> ProbeResult:
        """Wait for the answer until ``deadline`` of the monotonic clock; end who is late."""
        if self._process is None:
            return ProbeResult(host=self._host, failure=self._failure)
        status = self._process.wait(max(0.0, deadline - time.monotonic()))
        if status is None:
            self._process.kill()
            self._process.wait(_KILL_TIMEOUT_S)
            said = " / ".join(self._process.last_words()) or "nothing"
            failure = f"{self._host.name}: no answer within {deadline_s:g} s; it said: {said}"
            return ProbeResult(host=self._host, failure=failure)
        if status != 0:
            return ProbeResult(host=self._host, failure=self._exit_reason(self._process))
        try:
            facts = HostFacts.from_json(self._answer)
        except (ValueError, KeyError, TypeError):
            failure = (
                f"{self._host.name}: its answer cannot be read, so it seems to have another "
                f"version of spectrain; it said: {self._answer[:200] or 'nothing'}"
            )
            return ProbeResult(host=self._host, failure=failure)
        ahead_s = max(0.0, facts.clock_s - self._answered_s)
        behind_s = max(0.0, self._asked_s - facts.clock_s)
        return ProbeResult(host=self._host, facts=facts, clock_ahead_s=ahead_s - behind_s)

    def _on_stdout(self, line: str) -> None:
        # Start-up files of a login shell may print before us; the answer is the last line.
        self._answered_s = time.time()
        self._answer = line

    def _exit_reason(self, process: RemoteProcess) -> str:
        reason = f"{self._host.name}: {process.exit_reason()}"
        if "No module named" in reason:
            reason += f"; spectrain must be installed there for {self._python} (or give --python)"
        return reason


def _unfit(host: Host, facts: HostFacts, request: ProbeRequest) -> list[str]:
    """Say what one host lacks, whatever the others have."""
    found: list[str] = []
    if request.device == "cuda":
        try:
            devices_of(host, len(facts.gpus))
        except HostError as error:
            found.append(str(error))
    if facts.run_dir_problem:
        found.append(
            f"{host.name}: the run directory {request.run_dir} cannot be made there, as "
            f"{facts.run_dir_problem}; choose another with --run-dir"
        )
    return found


def _differences(answers: Sequence[tuple[str, Versions]], ours: Versions) -> list[str]:
    """Name the hosts that differ from this machine, once per thing and value."""
    found: list[str] = []
    for what, value_of, advice in _COMPARED:
        others: dict[str, list[str]] = {}
        for host, theirs in answers:
            if value_of(theirs) != value_of(ours):
                others.setdefault(value_of(theirs), []).append(host)
        for value, hosts in others.items():
            is_there = "is missing" if value == MISSING else f"is {value}"
            found.append(
                f"{', '.join(hosts)}: {what} {is_there}, but {value_of(ours)} here; {advice}"
            )
    return found


def _python_minor(python: str) -> str:
    return ".".join(python.split(".")[:2])


_COMPARED: tuple[tuple[str, Callable[[Versions], str], str], ...] = (
    ("Python", lambda v: _python_minor(v.python), "--python names the interpreter"),
    ("torch", lambda v: v.torch, "install the same version everywhere"),
    ("spectrain", lambda v: v.package, "install the same version everywhere"),
    (
        "the source of spectrain",
        lambda v: v.package_digest[:_DIGEST_SHOWN],
        "install the same files everywhere",
    ),
    (
        "the job file",
        lambda v: v.job_digest[:_DIGEST_SHOWN],
        "copy the same file to the same path on each host",
    ),
)


def _row(result: ProbeResult) -> tuple[str, ...]:
    name = result.host.name
    facts = result.facts
    if facts is None:
        return (name, "no answer", *("-",) * (len(_HEADINGS) - 2))
    return (
        name,
        facts.host,
        facts.versions.python,
        facts.versions.package,
        facts.versions.torch,
        _gpu_summary(facts),
        facts.driver or "-",
        str(facts.cores),
        f"{facts.free_memory_bytes / 2**30:.1f} GiB",
        "not writable" if facts.run_dir_problem else "writable",
        f"{result.clock_ahead_s:+.1f} s" if result.clock_ahead_s else "in time",
    )


def _gpu_summary(facts: HostFacts) -> str:
    """Summarise as ``2 x NVIDIA H200 (CUDA_VISIBLE_DEVICES=0,1)``."""
    kinds = [f"{facts.gpus.count(name)} x {name}" for name in dict.fromkeys(facts.gpus)]
    text = ", ".join(kinds) or "-"
    if facts.visible_devices is not None:
        text += f" (CUDA_VISIBLE_DEVICES={facts.visible_devices})"
    return text
