"""What ``spectrain-launch`` does: find the job and the hosts, check them, then run or only tell.

Everything that can be refused is refused here, before a process of the run exists.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..protocol.errors import SettingsError
from ..protocol.job_file import find_job
from ..protocol.settings import Settings
from .address import is_this_machine
from .console import Started, open_console
from .dry_run import print_plan
from .environment import collect
from .hosts import devices_of
from .options import (
    check,
    choose_hosts,
    local_place,
    make_settings,
    parse_hyper,
    parse_partition,
    stages_for,
)
from .preflight import ProbeResult, clock_warnings, run_preflight, table
from .probe import ProbeRequest, gather
from .remote import SshOptions
from .resume import resumed_run
from .supervisor import Place, Supervisor, listen_address

__all__ = ["run"]

_SETTINGS = (
    "stages", "method", "microbatches", "predictor", "horizon", "predict_lr", "device",
    "precision", "batch_size", "epochs", "max_batches", "seed", "threads", "evaluate",
    "max_restarts", "snapshot_every", "log_memory_bytes", "start_timeout_s", "wait_timeout_s",
    "lease_s", "grace_s",
)  # fmt: skip
"""Options that are settings of the run under the same name."""


def run(**options: Any) -> int:
    """Carry out one command line; return the exit code.

    Raises:
        UserError: the job, the hosts or an option cannot be used.
    """
    # Hosts first: a wrong host file is told before anything else is looked at.
    hosts = choose_hosts(options["nodes"], options["hosts"], os.environ)
    given = {name: options[name] for name in _SETTINGS}
    given["partition"] = parse_partition(options["partition"])
    values, origin, run_id = _what_to_run(options, given)
    environment = collect(os.environ, options["exports"], *_env_file(options["env_file"]))
    ssh = SshOptions(
        port=options["ssh_port"],
        identity=options["ssh_identity"],
        options=tuple(options["ssh_options"]),
    )
    python = options["python"] or sys.executable
    request = ProbeRequest(
        job=values["job"], run_dir=values["run_dir"], device=values.get("device", "")
    )
    checked: Sequence[ProbeResult] = ()
    if hosts:
        request = ProbeRequest(
            job=request.job, run_dir=request.run_dir, device=request.device or "cuda"
        )
        checked = run_preflight(
            hosts,
            request,
            python=python,
            ssh=ssh,
            environment=environment,
            cwd=str(Path.cwd()),
            on_stderr=_to_stderr,
        )
        places = [_place(result, request.device) for result in checked]
        values["device"] = request.device
    else:
        places = [_this_machine(values, request)]
    settings = check(values, stages_for(values.get("stages"), places))
    if options["dry_run"]:
        return print_plan(settings, places, table(checked) if checked else "", python)
    bind = options["bind"] or listen_address(places)
    console = open_console(json_lines=options["json_lines"], quiet=options["quiet"])
    try:
        console.show(_started(settings, places, origin))
        for warning in clock_warnings(checked):
            _to_stderr(warning)
        return Supervisor(
            settings,
            places,
            bind=bind,
            ssh=ssh,
            python=python,
            environment=environment,
            console=console,
            resumes=run_id,
        ).run()
    finally:
        console.close()


def _what_to_run(
    options: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], str, str | None]:
    """Return settings, where the job comes from in words, and the id of a run to go on with."""
    if options["resume"] is not None:
        if options["job"] or options["assignments"] or options["run_dir"]:
            raise SettingsError("--resume takes the job, --set and --run-dir of the earlier launch")
        values, run_id = resumed_run(options["resume"], given)
        return values, f"going on with {options['resume']}", run_id
    job = find_job(options["job"], Path.cwd())
    hyper = parse_hyper(options["assignments"])
    return make_settings(job, given, hyper, options["run_dir"]), job.origin, None


def _place(result: ProbeResult, device: str) -> Place:
    assert result.facts is not None, "pre-flight lets no host through without an answer"
    gpus = len(result.facts.gpus) if device == "cuda" else None
    return Place(
        host=result.host,
        devices=devices_of(result.host, gpus),
        is_here=is_this_machine(result.host),
    )


def _this_machine(values: dict[str, Any], request: ProbeRequest) -> Place:
    """Return this machine as the only host; without a choice of device, its GPUs if it has any."""
    gpus = 0
    if request.device != "cpu":
        facts = gather(ProbeRequest(job=request.job, run_dir=request.run_dir, device="cuda"))
        gpus = len(facts.gpus)
    device = request.device or ("cuda" if gpus else "cpu")
    values["device"] = device
    return local_place(device, values.get("stages"), gpus)


def _env_file(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    return path.read_text(encoding="utf-8"), str(path)


def _started(settings: Settings, places: Sequence[Place], origin: str) -> Started:
    return Started(
        job=f"{settings.job} ({origin})",
        method=settings.method,
        stages=settings.stages,
        hosts=tuple(place.host.name for place in places),
        run_dir=settings.run_dir,
    )


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201  before there is a console
