from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from links import exchanges, over_network

from spectrain.worker.rendezvous import Exchange
from spectrain.worker.socket_meeting import meet_at_socket


def meet(
    exchange: tuple[Exchange, Exchange], address: str, timeout_s: float = 10
) -> tuple[socket.socket, socket.socket]:
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(meet_at_socket, rank, address=address, exchange=each, timeout_s=timeout_s)
            for rank, each in enumerate(exchange)
        ]
        first, second = (end.result() for end in ends)
    return first, second


def families(exchange: tuple[Exchange, Exchange], address: str) -> set[socket.AddressFamily]:
    first, second = meet(exchange, address)
    with first, second:
        first.sendall(b"hello")
        assert second.recv(5, socket.MSG_WAITALL) == b"hello"
        return {first.family, second.family}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0"])
def test_ranks_on_one_host_meet_at_a_unix_socket_whatever_their_address(address: str) -> None:
    assert families(exchanges(), address) == {socket.AF_UNIX}


def test_ranks_on_two_hosts_meet_at_a_tcp_socket() -> None:
    assert families(over_network(), "0.0.0.0") == {socket.AF_INET}


def test_with_a_loopback_address_no_port_is_opened() -> None:
    offers: list[bytes] = []

    def spy(own: bytes) -> bytes:
        offers.append(own)
        return b""

    with pytest.raises(TimeoutError, match="the peer did not connect in time"):
        meet_at_socket(0, address="127.0.0.1", exchange=spy, timeout_s=0.05)
    assert len(offers[0].split()) == 2  # token and Unix name


def test_a_peer_that_is_gone_is_an_error() -> None:
    offers: list[bytes] = []
    with pytest.raises(TimeoutError):
        meet_at_socket(0, address="127.0.0.1", exchange=keep(offers), timeout_s=0.05)
    with pytest.raises(ConnectionRefusedError):
        meet_at_socket(1, address="127.0.0.1", exchange=lambda _: offers[0], timeout_s=1)


def keep(offers: list[bytes]) -> Callable[[bytes], bytes]:
    def exchange(own: bytes) -> bytes:
        offers.append(own)
        return b""

    return exchange


@pytest.mark.parametrize("says", [bytes(16), b"short", b""])
def test_a_stranger_without_the_token_is_turned_away(says: bytes) -> None:
    def send_a_stranger_first(own: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(b"\0" + own.split()[1])
            stranger.sendall(says)
        return listening(own)

    listening, connecting = exchanges()
    first, second = meet((send_a_stranger_first, connecting), "127.0.0.1")
    with first, second:
        second.sendall(b"hello")
        assert first.recv(5, socket.MSG_WAITALL) == b"hello"
