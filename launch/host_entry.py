"""Reads one host as a user names it: ``ada@node1:4`` or ``node1 slots=2 gpus=0,1``. Pure.

This is the grammar that host files and host lists share. It finds every mistake of an entry and
says how to mend it; whole files, and what is wrong between entries, are for ``hosts.py``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address

__all__ = ["Host", "Mistake", "parse_entry"]

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?")
_LONGEST_LABEL = 63  # RFC 1035, section 2.3.4
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")  # of a link-local address: the interface's name
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")
_MOST_SLOTS = 1024
_SSH_PORT = 22
_KEYS = ("slots", "gpus")
_IGNORED_KEYS = ("max_slots", "max-slots")  # Open MPI's, for oversubscription


@dataclass(frozen=True, slots=True)
class Host:
    """One machine as the user named it.

    Attributes:
        name: host name, address, or alias of ``~/.ssh/config``; IPv6 without its brackets.
        user: whom to log in as; None leaves it to ssh.
        slots: places for workers; None: as many as there are GPUs (CPU: one).
        gpus: device numbers within what is visible on that host, one slot each.
        line: line of the file, or entry of the list, from 1; 0 where there is none.
    """

    name: str
    _: KW_ONLY
    user: str | None = None
    slots: int | None = None
    gpus: tuple[int, ...] | None = None
    line: int = 0

    @property
    def destination(self) -> str:
        """The host as ssh takes it: ``user@name``."""
        return self.name if self.user is None else f"{self.user}@{self.name}"

    @property
    def is_loopback(self) -> bool:
        """Whether it can only mean this machine and this user, so that no ssh is needed."""
        return self.user is None and self.name.lower() in _LOOPBACK


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong with an entry, and the entry as it could be."""

    rule: str
    example: str


def parse_entry(text: str, line: int, *, may_have_keys: bool) -> tuple[Host, list[Mistake]]:
    """Read ``[user@]host[:slots] [slots=N] [gpus=I,J]``.

    Args:
        text: the entry, without comment.
        line: where it stands, for ``Host.line``.
        may_have_keys: whether ``slots=`` and ``gpus=`` may follow the host.

    Returns:
        The host and all mistakes. With mistakes the host is only good for finding more of them;
        its name is empty where it could not be read.
    """
    mistakes: list[Mistake] = []
    without_blanks = re.sub(r"\s*=\s*", "=", re.sub(r",\s+", ",", text))
    target, *words = without_blanks.split() or [""]
    if "=" in target:
        rule = f"{target!r} stands where the host's name belongs"
        return Host("", line=line), [Mistake(rule, f"node1 {target}")]
    user, name, colon_slots = _parse_target(target, mistakes)
    shown = f"[{name}]" if ":" in name else name or "node1"
    if words and not may_have_keys:
        rule = f"{words[0]!r} follows the host; an entry of a list is only host:slots"
        mistakes.append(Mistake(rule, f"{shown}:4"))
        words = []
    slots, gpus = _parse_words(words, shown, mistakes)
    if colon_slots is not None and slots is not None:
        rule = f"slots are given twice, as :{colon_slots} and as slots={slots}"
        mistakes.append(Mistake(rule, f"{shown} slots={slots}"))
    slots = colon_slots if slots is None else slots
    if gpus is not None and slots is not None and slots != len(gpus):
        numbers = ",".join(map(str, gpus))
        rule = f"slots={slots} disagrees with gpus={numbers}, which names {len(gpus)}"
        mistakes.append(Mistake(f"{rule}; a GPU is one slot", f"{shown} gpus={numbers}"))
    return Host(name, user=user, slots=slots, gpus=gpus, line=line), mistakes


def _parse_target(text: str, mistakes: list[Mistake]) -> tuple[str | None, str, int | None]:
    """Split ``[user@]host[:slots]`` into user, name (empty where unreadable) and slots."""
    user, at, place = text.rpartition("@")
    if at:
        _check_user(user, f"ada@{place or 'node1'}", mistakes)
    if place.startswith("["):
        name, bracket, rest = place[1:].partition("]")
        readable = _check_bracketed(name, bracket, rest, mistakes)
    elif place.count(":") > 1:
        name, rest, readable = place, "", False
        rule = "an IPv6 address stands in brackets, so that its end can be told from :slots"
        mistakes.append(Mistake(rule, f"[{place}]" if _is_ipv6(place) else "[fe80::1]:4"))
    else:
        name, colon, slots = place.partition(":")
        rest = colon + slots
        readable = _check_name(name, mistakes)
    if not readable:
        return user or None, "", None
    return user or None, name, _parse_colon(rest, place.removesuffix(rest), mistakes)


def _check_user(user: str, example: str, mistakes: list[Mistake]) -> None:
    if not user:
        mistakes.append(Mistake("there is no user before the @", example))
    elif "@" in user:
        mistakes.append(Mistake("there is more than one @", example))
    elif not _USER.fullmatch(user):
        rule = f"the user {user!r} may only have letters, digits, _ and, not first, . + -"
        mistakes.append(Mistake(rule, example))


def _check_bracketed(name: str, bracket: str, rest: str, mistakes: list[Mistake]) -> bool:
    before = len(mistakes)
    if not bracket:
        mistakes.append(Mistake("the bracket [ is not closed", "[fe80::1]:4"))
    elif not _is_ipv6(name):
        mistakes.append(Mistake(f"{name!r} in brackets is no IPv6 address", "[fe80::1]:4"))
    elif rest and not rest.startswith(":"):
        rule = f"{rest!r} follows the bracket; only :slots may"
        mistakes.append(Mistake(rule, f"[{name}]:4"))
    return len(mistakes) == before


def _check_name(name: str, mistakes: list[Mistake]) -> bool:
    before = len(mistakes)
    labels = name.removesuffix(".").split(".")
    illegal = sorted(set(re.findall(r"[^A-Za-z0-9_.-]", name)))
    if not name:
        mistakes.append(Mistake("the host's name is empty", "node1:4"))
    elif "[" in illegal:
        rule = "ranges in brackets are expanded only in Slurm's own list; name each host"
        mistakes.append(Mistake(rule, "node01 slots=4"))
    elif "," in illegal:
        mistakes.append(Mistake("a file names one host a line, without commas", "node1 slots=4"))
    elif illegal:
        rule = f"the name {name!r} has {' '.join(map(repr, illegal))}; allowed are letters, digits"
        mistakes.append(Mistake(f"{rule}, dots, - and _", "node1.example.org"))
    elif any(len(label) > _LONGEST_LABEL for label in labels):
        rule = f"a part of the name is longer than {_LONGEST_LABEL} characters"
        mistakes.append(Mistake(rule, "node1.example.org"))
    elif not all(map(_LABEL.fullmatch, labels)):
        # Also keeps a name from being read as an option of ssh.
        rule = f"a part of the name {name!r} is empty or starts or ends with -"
        mistakes.append(Mistake(rule, "node-1.example.org"))
    elif re.fullmatch(r"[0-9.]+", name) and not _is_ipv4(name):
        rule = f"{name!r} is made of digits but is no IPv4 address"
        mistakes.append(Mistake(rule, "10.0.0.1:4"))
    return len(mistakes) == before


def _parse_colon(text: str, host: str, mistakes: list[Mistake]) -> int | None:
    """Read ``:slots`` or nothing."""
    if not text:
        return None
    value = text[1:]
    if _WHOLE_NUMBER.fullmatch(value) and (int(value) > _MOST_SLOTS or int(value) == _SSH_PORT):
        rule = f"{text} looks like a port, but the number of slots follows the colon"
        example = f"{host} slots={value}" if int(value) == _SSH_PORT else f"{host}:4"
        mistakes.append(Mistake(f"{rule}; the port goes to --ssh-port", example))
        return None
    return _parse_slots(value, f"{host}:4", mistakes)


def _parse_words(
    words: Iterable[str], host: str, mistakes: list[Mistake]
) -> tuple[int | None, tuple[int, ...] | None]:
    """Read ``slots=N`` and ``gpus=I,J``."""
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lower()
        if not equals:
            rule = f"{word!r} follows the host; only slots=N and gpus=I,J may, one host a line"
            mistakes.append(Mistake(rule, f"{host} slots=4"))
        elif key in _IGNORED_KEYS:
            continue
        elif key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.5) or ["slots"]
            rule = f"the key {key!r} is unknown; known are {' and '.join(_KEYS)}"
            mistakes.append(Mistake(rule, f"{host} {near[0]}={value or 4}"))
        elif key in values:
            mistakes.append(Mistake(f"{key}= is given twice", f"{host} {key}={value}"))
        else:
            values[key] = value
    slots, gpus = values.get("slots"), values.get("gpus")
    return (
        None if slots is None else _parse_slots(slots, f"{host} slots=4", mistakes),
        None if gpus is None else _parse_gpus(gpus, f"{host} gpus=0,1", mistakes),
    )


def _parse_slots(value: str, example: str, mistakes: list[Mistake]) -> int | None:
    if not value:
        mistakes.append(Mistake("the number of slots is missing", example))
    elif not _WHOLE_NUMBER.fullmatch(value):
        mistakes.append(Mistake(f"slots must be a whole number, not {value!r}", example))
    elif int(value) == 0:
        rule = "a host with 0 slots takes no part; give it at least 1 or leave it out"
        mistakes.append(Mistake(rule, example))
    elif int(value) > _MOST_SLOTS:
        mistakes.append(Mistake(f"slots={value} is more than {_MOST_SLOTS}", example))
    else:
        return int(value)
    return None


def _parse_gpus(value: str, example: str, mistakes: list[Mistake]) -> tuple[int, ...] | None:
    numbers = value.split(",")
    if not value:
        mistakes.append(Mistake("the list of GPUs is empty", example))
    elif not all(map(_WHOLE_NUMBER.fullmatch, numbers)):
        rule = f"gpus must be numbers from 0 with commas between, not {value!r}"
        mistakes.append(Mistake(rule, example))
    elif len(set(map(int, numbers))) < len(numbers):
        mistakes.append(Mistake(f"gpus={value} names a GPU twice; a GPU is one slot", example))
    else:
        return tuple(map(int, numbers))
    return None


def _is_ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except AddressValueError:
        return False
    return True


def _is_ipv6(text: str) -> bool:
    address, percent, zone = text.partition("%")
    try:
        IPv6Address(address)
    except AddressValueError:
        return False
    return not percent or _ZONE.fullmatch(zone) is not None
