"""Turns a host file, a host list or Slurm's node list into hosts, and hosts into devices.

Pure but for ``read_host_file``, which only reads; nothing here connects to a host. All mistakes
of a text are told at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice, product
from pathlib import Path

from ..protocol.errors import HostError
from .host_entry import Host, parse_entry

__all__ = [
    "Host",
    "devices_of",
    "parse_host_file",
    "parse_host_list",
    "read_host_file",
    "slots_of",
    "slurm_hosts",
]

_MOST_HOSTS = 1 << 16  # a slip in a range must not fill the memory
_SLURM_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_SLURM_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,5})\))?")


def read_host_file(path: Path) -> tuple[Host, ...]:
    """Read a host file; see ``parse_host_file``.

    Raises:
        HostError: the file cannot be read, is no text, or has mistakes.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise HostError(f"host file {path}: not a text file; UTF-8 is expected") from error
    except OSError as error:
        raise HostError(
            f"host file {path}: {error.strerror}; nothing was started. Correct --nodes, or leave "
            "it out to run on this machine alone"
        ) from error
    return parse_host_file(text, str(path))


def parse_host_file(text: str, source: str) -> tuple[Host, ...]:
    """Read hosts, one a line: ``[user@]host[:slots] [slots=N] [gpus=I,J]``.

    The forms of Open MPI, DeepSpeed and Horovod are among these. Comments start with ``#``
    anywhere; blank lines, CRLF, a byte order mark and a missing last newline are fine; blanks may
    stand around ``=`` and after ``,``. IPv6 stands in brackets. ``max_slots`` and ``max-slots``
    are ignored.

    Args:
        text: the file's text.
        source: its name for error messages.

    Returns:
        The hosts in the order of the file, at least one.

    Raises:
        HostError: all mistakes, each with its place, the line, the rule and a corrected example.
    """
    lines = re.split(r"\r\n?|\n", text.removeprefix("\ufeff"))
    entries = [
        (number, entry)
        for number, line in enumerate(lines, start=1)
        if (entry := line.partition("#")[0].strip())
    ]
    return _parse(entries, source, place=f"{source}:{{}}", may_have_keys=True)


def parse_host_list(text: str, source: str = "--hosts") -> tuple[Host, ...]:
    """Read hosts from one text such as ``node1:4,ada@node2,[fe80::1]:2``.

    Raises:
        HostError: as ``parse_host_file``; the place is the entry's number.
    """
    parts = text.split(",") if text.strip() else []
    entries = [(number, part.strip()) for number, part in enumerate(parts, start=1)]
    return _parse(entries, source, place=f"{source}, entry {{}}", may_have_keys=False)


def _parse(
    entries: list[tuple[int, str]], source: str, *, place: str, may_have_keys: bool
) -> tuple[Host, ...]:
    if not entries:
        raise HostError(f"{source}: no host is named; name at least one, for example: node1:4")
    hosts: list[Host] = []
    reports: list[str] = []
    first_place: dict[str, str] = {}
    for number, text in entries:
        host, mistakes = parse_entry(text, number, may_have_keys=may_have_keys)
        hosts.append(host)
        here = place.format(number)
        reports += [
            f"{here}: {text!r}\n    {mistake.rule}. Example: {mistake.example}"
            for mistake in mistakes
        ]
        earlier = first_place.setdefault(host.name.lower(), here) if host.name else here
        if earlier != here:
            reports.append(
                f"{here}: {text!r}\n    the host {host.name!r} was named before at {earlier}. "
                "Name it once, with all its slots"
            )
    if reports:
        count = "1 mistake" if len(reports) == 1 else f"{len(reports)} mistakes"
        raise HostError("\n".join([f"{source}: {count}; nothing was started", *reports]))
    return tuple(hosts)


# -- devices ------------------------------------------------------------------------------------


def devices_of(host: Host, gpus_found: int | None) -> tuple[str, ...]:
    """Return the device of each slot, ``cpu`` or ``cuda:I``.

    Args:
        host: as the user named it.
        gpus_found: GPUs visible on that host; None when the run computes on CPU, where any
            number of slots is allowed and the default is one.

    Raises:
        HostError: a slot asks for a GPU that was not found there.
    """
    if gpus_found is None:
        default = 1 if host.gpus is None else len(host.gpus)
        return ("cpu",) * (default if host.slots is None else host.slots)
    found = f"{host.name}: {gpus_found} GPU{'' if gpus_found == 1 else 's'} visible there"
    if gpus_found == 0:
        raise HostError(
            f"{found}. A CUDA run needs at least one per host: look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES on it, or use --device cpu"
        )
    if host.gpus is not None:
        missing = [gpu for gpu in host.gpus if gpu >= gpus_found]
        if missing:
            raise HostError(
                f"{found}, so there is no GPU {', '.join(map(str, missing))}. The numbers in gpus= "
                "start at 0 and count within CUDA_VISIBLE_DEVICES of that host"
            )
        return tuple(f"cuda:{gpu}" for gpu in host.gpus)
    slots = gpus_found if host.slots is None else host.slots
    if slots > gpus_found:
        raise HostError(
            f"{found}, but {slots} slots are asked for. A slot is one GPU: write "
            f"slots={gpus_found} or leave it out"
        )
    return tuple(f"cuda:{gpu}" for gpu in range(slots))


def slots_of(host: Host, gpus_found: int | None) -> int:
    """Return the number of slots; arguments and errors as in ``devices_of``."""
    return len(devices_of(host, gpus_found))


# -- Slurm --------------------------------------------------------------------------------------


def slurm_hosts(nodelist: str, slots_per_node: str | None) -> tuple[Host, ...]:
    """Expand Slurm's list of nodes.

    Args:
        nodelist: as in ``SLURM_JOB_NODELIST``: ``node[01-03,07]-ib,other``.
        slots_per_node: as in ``SLURM_TASKS_PER_NODE``: ``4``, ``2(x3),1``; a single number holds
            for all nodes; None leaves the slots open.

    Raises:
        HostError: a text is not of Slurm's form, or the two differ in the number of nodes.
    """
    if not nodelist.strip():
        raise HostError(
            "Slurm's node list is empty: run inside an allocation (salloc, sbatch), or name the "
            "hosts with --nodes FILE or --hosts"
        )
    # A comma inside brackets separates ranges, one outside separates nodes.
    parts = re.split(r",(?![^\[]*\])", nodelist.strip())
    expanded = (name for part in parts for name in _expand(part, nodelist))
    names = list(islice(expanded, _MOST_HOSTS + 1))
    _check_count(len(names), nodelist)
    plain = parse_host_list(",".join(names), f"Slurm's node list {nodelist!r}")
    if slots_per_node is None:
        return plain
    counts = _slurm_counts(slots_per_node, len(names))
    return tuple(
        Host(host.name, slots=count, line=host.line)
        for host, count in zip(plain, counts, strict=True)
    )


def _expand(part: str, nodelist: str) -> Iterable[str]:
    """Expand one element, such as ``rack[1-2]node[01-16]``, last bracket fastest."""
    pieces = re.split(r"\[([^\[\]]*)\]", part)  # text, ranges, text, ranges, ..., text
    if any(set("[]") & set(text) for text in pieces[::2]):
        raise HostError(f"Slurm's node list {nodelist!r}: the brackets of {part!r} do not match")
    choices = [
        _numbers(piece, nodelist) if index % 2 else [piece] for index, piece in enumerate(pieces)
    ]
    return ("".join(chosen) for chosen in product(*choices))


def _numbers(ranges: str, nodelist: str) -> list[str]:
    """Expand ``01-03,07``; numbers are as wide as the first of their range."""
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _SLURM_RANGE.fullmatch(text)
        if match is None:
            raise HostError(
                f"Slurm's node list {nodelist!r}: {text!r} is not a number or a range such as 01-16"
            )
        first, last = match[1], match[2] or match[1]
        count = int(last) - int(first) + 1
        if count < 1:
            raise HostError(f"Slurm's node list {nodelist!r}: the range {text} runs backwards")
        _check_count(count, nodelist)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _check_count(count: int, nodelist: str) -> None:
    if count > _MOST_HOSTS:
        raise HostError(f"Slurm's node list {nodelist!r}: more than {_MOST_HOSTS} hosts")


def _slurm_counts(text: str, nodes: int) -> list[int]:
    counts: list[int] = []
    for part in text.strip().split(","):
        match = _SLURM_COUNT.fullmatch(part)
        if match is None or int(match[1]) == 0:
            raise HostError(
                f"Slurm's slots per node {text!r}: {part!r} is not a number from 1, or one with a "
                "repeat such as 2(x3)"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) == 1:
        return counts * nodes
    if len(counts) != nodes:
        raise HostError(
            f"Slurm's slots per node {text!r} are for {len(counts)} nodes, but its list has {nodes}"
        )
    return counts
