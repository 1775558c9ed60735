"""Laws of host files and of Slurm's ranges, for names and numbers nobody would write by hand."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrain.launch.hosts import Host, parse_host_file, parse_host_list, slurm_hosts
from spectrain.protocol.errors import HostError

LETTERS = string.ascii_lowercase
labels = st.text(LETTERS + string.digits, min_size=1, max_size=8).map(lambda text: f"h{text}")
names = st.one_of(
    st.lists(labels, min_size=1, max_size=3).map(".".join),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
users = st.none() | labels
slots = st.none() | st.integers(1, 1024)
blanks = st.text(" \t", max_size=3)


@st.composite
def hosts(draw: st.DrawFn) -> list[Host]:
    distinct = draw(st.lists(names, min_size=1, max_size=6, unique=True))
    return [
        Host(name, user=draw(users), slots=draw(slots), line=number)
        for number, name in enumerate(distinct, start=1)
    ]


def target(host: Host) -> str:
    name = f"[{host.name}]" if ":" in host.name else host.name
    return name if host.user is None else f"{host.user}@{name}"


@given(hosts(), st.data())
def test_a_written_file_is_read_back(expected: list[Host], data: st.DataObject) -> None:
    def blank() -> str:
        return data.draw(blanks)

    lines: list[str] = []
    for host in expected:
        key = "" if host.slots is None else f" {blank()}slots{blank()}={blank()}{host.slots}"
        comment = data.draw(st.sampled_from(["", "# slots=9", " # node9:9"]))
        lines.append(f"{blank()}{target(host)}{key}{blank()}{comment}")
    ending = data.draw(st.sampled_from(["\n", "\r\n"]))
    text = data.draw(st.sampled_from(["", "\ufeff"])) + ending.join(lines)
    text += data.draw(st.sampled_from(["", ending]))
    assert parse_host_file(text, "hosts.txt") == tuple(expected)


@given(hosts())
def test_a_written_list_is_read_back(expected: list[Host]) -> None:
    # As :22 is refused for looking like a port, it is written with a key, which a list has not.
    some = [host for host in expected if host.slots != 22]
    if some:
        text = ",".join(target(h) + ("" if h.slots is None else f":{h.slots}") for h in some)
        read = parse_host_list(text)
        assert [(h.name, h.user, h.slots) for h in read] == [
            (h.name, h.user, h.slots) for h in some
        ]


@given(st.text(max_size=60))
@pytest.mark.parametrize("parse", [lambda text: parse_host_file(text, "f"), parse_host_list])
def test_any_text_is_read_or_refused_and_never_crashes(
    parse: Callable[[str], tuple[Host, ...]], text: str
) -> None:
    with suppress(HostError):
        read = parse(text)
        assert read
        assert not any(re.search(r"^-|[^A-Za-z0-9_.:%-]", host.name) for host in read)


ranges = st.tuples(st.integers(0, 2000), st.integers(0, 12), st.integers(1, 5))


@given(st.lists(ranges, min_size=1, max_size=4), labels, st.sampled_from(["", "-ib", ".x"]))
def test_a_compressed_node_list_expands_to_its_nodes(
    spans: list[tuple[int, int, int]], prefix: str, suffix: str
) -> None:
    texts: list[str] = []
    expected: list[str] = []
    for start, more, width in spans:
        first = f"{start:0{width}d}"
        texts.append(first if more == 0 else f"{first}-{start + more}")
        expected += [
            f"{prefix}{number:0{len(first)}d}{suffix}" for number in range(start, start + more + 1)
        ]
    nodelist = f"{prefix}[{','.join(texts)}]{suffix},last"
    if len(set(expected)) == len(expected):
        read = slurm_hosts(nodelist, None)
        assert [host.name for host in read] == [*expected, "last"]
        assert [host.line for host in read] == list(range(1, len(expected) + 2))


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 5)), min_size=1, max_size=5))
def test_compressed_slots_go_to_the_nodes_in_order(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    expected = [count for count, times in runs for _ in range(times)]
    read = slurm_hosts(f"n[1-{len(expected)}]", text)
    assert [host.slots for host in read] == expected
