"""Where a server listens, with which options, and what it says when it cannot."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import zmq
from socket_peers import AGENT_KEYS, ALLOWED, LONG_S, RUN, Opened, tcp_arguments, tcp_client

from spectrain.protocol.errors import HostError
from spectrain.protocol.keys import Authority
from spectrain.protocol.messages import (
    Go,
)
from spectrain.protocol.sockets import Client, Received, Server


def test_the_system_chooses_a_port_where_none_is_given(tcp_server: Server) -> None:
    address, port = tcp_server.tcp_endpoint.rsplit(":", 1)
    assert address == "tcp://127.0.0.1"
    assert int(port) > 0
    assert tcp_server.ipc_endpoint == ""


def test_a_given_port_is_used(opened: Opened, authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = opened(Server, tcp=f"127.0.0.1:{port}", **tcp_arguments(authority))
    assert server.tcp_endpoint == f"tcp://127.0.0.1:{port}"


def test_ipv6_works(opened: Opened, authority: Authority) -> None:
    try:
        server = opened(Server, tcp="[::1]", **tcp_arguments(authority))
    except HostError as error:
        pytest.skip(f"this host has no IPv6: {error}")
    tcp_client(opened, server, "agent/0", AGENT_KEYS).send(Go())
    assert server.receive(LONG_S) == Received("agent/0", Go(), [])


def test_a_port_in_use_is_an_error_that_names_it(opened: Opened, authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            HostError, match=rf"cannot listen on tcp://127\.0\.0\.1:{port}: Address"
        ):
            opened(Server, tcp=f"127.0.0.1:{port}", **tcp_arguments(authority))


@pytest.mark.parametrize("address", ["", "::1", "[::1", "10.0.0.1:", "10.0.0.1:http", "a:1:2"])
def test_what_is_not_an_address_is_refused(
    opened: Opened, authority: Authority, address: str
) -> None:
    with pytest.raises(ValueError, match="not an address to listen on"):
        opened(Server, tcp=address, **tcp_arguments(authority))


def test_a_server_listens_somewhere(opened: Opened) -> None:
    with pytest.raises(AssertionError, match="listens somewhere"):
        opened(Server, run_id=RUN)


def test_an_ipc_directory_that_others_may_enter_is_refused(opened: Opened, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(HostError, match=rf"has mode 755: .*; chmod 700 {tmp_path}"):
        opened(Server, run_id=RUN, ipc=tmp_path / "control")


def test_an_ipc_path_too_long_for_a_socket_is_refused(opened: Opened, tmp_path: Path) -> None:
    with pytest.raises(HostError, match="holds at most 107"):
        opened(Server, run_id=RUN, ipc=tmp_path / ("x" * 108))


def test_every_socket_is_bounded_probed_and_never_lingers(
    opened: Opened, path: Path, authority: Authority
) -> None:
    server = opened(
        Server,
        ipc=path,
        tcp="127.0.0.1",
        high_water=12,
        heartbeat_s=0.2,
        lease_s=1.5,
        **tcp_arguments(authority),
    )
    client = opened(
        Client,
        run_id=RUN,
        identity="a",
        endpoint=server.ipc_endpoint,
        heartbeat_s=0.2,
        lease_s=1.5,
    )
    for bound in (*server._sockets, client._socket):
        assert (bound.linger, bound.heartbeat_ivl, bound.heartbeat_timeout) == (0, 200, 1500)
        assert bound.maxmsgsize > 0
    assert [(bound.sndhwm, bound.rcvhwm) for bound in server._sockets] == [(12, 12)] * 2


def test_closing_everything_ends_every_thread(path: Path) -> None:
    before = set(threading.enumerate())
    with zmq.Context() as context:
        authority = Authority(context, ALLOWED)
        server = Server(context, ipc=path, tcp="127.0.0.1", **tcp_arguments(authority))
        client = Client(context, run_id=RUN, identity="a", endpoint=server.ipc_endpoint)
        client.send(Go())
        server.receive(LONG_S)
        for thing in (client, server, authority):
            thing.close()
    assert set(threading.enumerate()) == before
