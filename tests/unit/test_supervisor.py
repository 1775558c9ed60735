"""Where the launcher listens; what it does with a run is in ``tests/integration``."""

from __future__ import annotations

import pytest

from spectrain.launch import supervisor
from spectrain.launch.hosts import Host
from spectrain.launch.supervisor import Place, listen_address, split_ports
from spectrain.protocol.errors import HostError


def place(name: str, *, is_here: bool = False) -> Place:
    return Place(host=Host(name), devices=("cpu",), is_here=is_here)


def reach(monkeypatch: pytest.MonkeyPatch, addresses: dict[str, str]) -> None:
    monkeypatch.setattr(supervisor, "address_towards", addresses.__getitem__)


@pytest.mark.parametrize(
    ("bind", "split"),
    [
        (None, (None, (0, 0))),
        ("10.0.0.1", ("10.0.0.1", (0, 0))),
        ("10.0.0.1:5000", ("10.0.0.1", (5000, 5001))),
        ("[fe80::1]", ("[fe80::1]", (0, 0))),
        ("[fe80::1]:5000", ("[fe80::1]", (5000, 5001))),
        ("10.0.0.1:0", ("10.0.0.1", (0, 0))),
        ("10.0.0.1:65534", ("10.0.0.1", (65534, 65535))),
    ],
)
def test_an_address_may_come_with_a_port_of_which_the_next_is_for_data(
    bind: str | None, split: tuple[str | None, tuple[int, int]]
) -> None:
    assert split_ports(bind) == split


@pytest.mark.parametrize(
    "bind", ["10.0.0.1:", "10.0.0.1:http", ":5000", "fe80::1", "::1", "fe80::a", "10.0.0.1:65535",
             "10.0.0.1:-1"],
)  # fmt: skip
def test_what_is_no_address_with_a_port_is_refused(bind: str) -> None:
    with pytest.raises(HostError, match=r"expected ADDRESS or ADDRESS:PORT, IPv6 in brackets"):
        split_ports(bind)


def test_a_run_on_this_machine_alone_listens_nowhere() -> None:
    assert listen_address([place("localhost", is_here=True)]) is None


def test_other_hosts_are_listened_for_where_they_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    reach(monkeypatch, {"left": "10.0.0.1", "right": "10.0.0.1"})
    here = place("localhost", is_here=True)
    assert listen_address([here, place("left"), place("right")]) == "10.0.0.1"


def test_an_ipv6_address_is_put_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    reach(monkeypatch, {"left": "fd00::1"})
    assert listen_address([place("left")]) == "[fd00::1]"


def test_a_host_that_resolves_to_our_own_loopback_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reach(monkeypatch, {"left": "10.0.0.1", "right": "127.0.1.1"})
    with pytest.raises(HostError, match=r"right resolves to this machine's loopback \(127.0.1.1\)"):
        listen_address([place("left"), place("right")])


def test_hosts_that_come_in_by_different_addresses_are_refused_with_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reach(monkeypatch, {"left": "10.0.0.1", "right": "10.1.0.1"})
    with pytest.raises(HostError, match=r"left by 10.0.0.1, right by 10.1.0.1. --bind ADDRESS"):
        listen_address([place("left"), place("right")])
