"""Makes one run's settings out of what was said where: command line, environment, job, hosts.

Pure but for looking at the job file's text and at the machine's own name. The command line wins
over the environment (click sees to that), the environment over the job's ``settings``, and those
over the defaults.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..protocol.errors import HostError, SettingsError
from ..protocol.job_file import JobSource, read_settings
from ..protocol.settings import Settings
from .hosts import Host, parse_host_list, read_host_file, slurm_hosts
from .supervisor import Place

__all__ = [
    "choose_hosts",
    "local_place",
    "make_settings",
    "parse_hyper",
    "parse_partition",
    "parse_size",
    "stages_for",
]


def choose_hosts(
    nodes: str | None, hosts: str | None, environ: Mapping[str, str]
) -> tuple[Host, ...]:
    """Return the hosts that the user named; none means this machine.

    Args:
        nodes: ``--nodes``: a host file, or "slurm" for the allocation this runs in.
        hosts: ``-H/--hosts``: a list such as ``node1:4,node2:4``.
        environ: Slurm's variables are looked for here.

    Raises:
        HostError: the file or list is wrong, or both were given.
    """
    if nodes is not None and hosts is not None:
        raise HostError("--nodes and --hosts name hosts twice; give one of them")
    if hosts is not None:
        return parse_host_list(hosts)
    if nodes is None:
        return ()
    if nodes == "slurm":
        nodelist = environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST"))
        if not nodelist:
            raise HostError(
                "--nodes slurm: SLURM_JOB_NODELIST is not set; run inside an allocation "
                "(sbatch, salloc), or name a host file"
            )
        per_node = environ.get("SLURM_NTASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
        return slurm_hosts(nodelist, per_node)
    return read_host_file(Path(nodes))


def local_place(device: str, stages: int | None, gpus: int) -> Place:
    """Return this machine as the only host.

    Raises:
        SettingsError: nothing says how many stages there are.
    """
    if device == "cpu":
        if stages is None:
            raise SettingsError(
                "--device cpu without hosts needs --stages: how many workers to start here"
            )
        devices = ("cpu",) * stages
    else:
        devices = tuple(f"cuda:{index}" for index in range(gpus))
    return Place(host=Host("localhost"), devices=devices, is_here=True)


def stages_for(wanted: int | None, places: Sequence[Place]) -> int:
    """Return the number of stages: what was asked for, else one per slot.

    Raises:
        HostError: there are fewer slots than stages.
    """
    slots = sum(len(place.devices) for place in places)
    if wanted is None:
        return slots
    if wanted > slots:
        offers = ", ".join(f"{place.host.name}: {len(place.devices)}" for place in places)
        raise HostError(
            f"{wanted} stages need {wanted} slots, one worker each, and the hosts offer {slots} "
            f"({offers}); name more slots or hosts, or lower --stages"
        )
    return wanted


def make_settings(
    job: JobSource, given: Mapping[str, Any], hyper: Mapping[str, str], run_dir: str | None
) -> dict[str, Any]:
    """Return the values of ``Settings`` that are known before the hosts are.

    Args:
        job: the job file.
        given: options that the user gave, by name of the setting; None: not given.
        hyper: what ``--set`` gave.
        run_dir: ``--run-dir``; None: ``runs/<time>``.
    """
    values: dict[str, Any] = read_settings(job.path)
    values.update({name: value for name, value in given.items() if value is not None})
    if isinstance(values.get("partition"), list):
        values["partition"] = tuple(values["partition"])
    directory = run_dir or time.strftime("runs/%Y-%m-%d_%H-%M-%S")
    values.update(job=str(job.path), hyper=dict(hyper), run_dir=str(Path(directory).resolve()))
    return values


def parse_hyper(assignments: Sequence[str]) -> dict[str, str]:
    """Read ``--set name=value``; values keep their text until the job's types are known.

    Raises:
        SettingsError: no equals sign, or no name.
    """
    hyper: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise SettingsError(
                f"--set {assignment!r}: expected name=value, for example --set lr=0.01"
            )
        hyper[name] = value
    return hyper


def parse_partition(text: str | None) -> str | tuple[int, ...] | None:
    """Read ``--partition``: "auto", "equal", or layer counts such as "8,10,10".

    Raises:
        SettingsError: it is none of these.
    """
    if text is None or text in ("auto", "equal"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        nearest = difflib.get_close_matches(text, ["auto", "equal"], n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise SettingsError(
            f"--partition {text!r}: expected auto, equal, or layer counts such as 8,10,10{hint}"
        ) from None


def parse_size(text: str) -> int:
    """Return a number of bytes: ``1000000``, ``512MiB``, ``2GB``.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"(\d+)\s*(?:([KMGT])(i?)B?|B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size; write 512MiB, 2GB or a number of bytes")
    number, letter, binary = match.groups()
    power = 0 if letter is None else 1 + "KMGT".index(letter.upper())
    return int(number) * (1024 if binary else 1000) ** power


def check(values: Mapping[str, Any], stages: int) -> Settings:
    """Return the settings of the run; every mistake in them is told at once.

    Raises:
        SettingsError: a value is unknown or out of its range.
    """
    return Settings.from_dict({**values, "stages": stages})
