"""Which host is this one, and by which address others reach it."""

from __future__ import annotations

import contextlib
import socket

import pytest

from spectrain.launch.address import (
    address_towards,
    bracketed,
    is_loopback_address,
    is_this_machine,
)
from spectrain.launch.hosts import Host
from spectrain.protocol.errors import HostError


def test_this_machine_is_reached_by_its_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_the_address_is_that_of_the_way_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    towards: list[object] = []

    class Probe(contextlib.nullcontext[object]):
        def __init__(self, *_: object) -> None:
            super().__init__(self)

        def connect(self, peer: object) -> None:
            towards.append(peer)

        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.7", 1234

    answer = (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("10.0.0.9", 9))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [answer])
    monkeypatch.setattr(socket, "socket", Probe)
    assert address_towards("node9") == "10.0.0.7"
    assert towards == [("10.0.0.9", 9)]


def test_a_name_that_nobody_knows_is_refused_with_a_way_out() -> None:
    with pytest.raises(HostError, match=r"address nowhere\.invalid reaches .*--bind ADDRESS"):
        address_towards("nowhere.invalid")


@pytest.mark.parametrize(
    ("address", "is_loopback"),
    [("127.0.0.1", True), ("127.0.1.1", True), ("::1", True), ("10.0.0.1", False),
     ("fe80::1", False), ("128.0.0.1", False)],
)  # fmt: skip
def test_loopback_addresses_are_known(address: str, *, is_loopback: bool) -> None:
    assert is_loopback_address(address) is is_loopback


def test_only_ipv6_gets_brackets() -> None:
    assert (bracketed("10.0.0.1"), bracketed("fe80::1")) == ("10.0.0.1", "[fe80::1]")


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        (Host("localhost"), True),
        (Host("left"), True),
        (Host("LEFT.example.org"), True),
        (Host("right"), False),
        (Host("left.example.com"), False),
        (Host("left", user="somebody"), False),
    ],
)
def test_this_machine_is_known_by_its_name(
    host: Host, monkeypatch: pytest.MonkeyPatch, *, is_here: bool
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "left.example.org")
    assert is_this_machine(host) is is_here
