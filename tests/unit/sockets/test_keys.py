"""Over tcp only known keys get in, each under the names it stands for."""

from __future__ import annotations

import pytest
import zmq
from socket_peers import (
    AGENT_KEYS,
    LONG_S,
    RUN,
    SERVER_KEYS,
    WORKER_KEYS,
    Opened,
    tcp_client,
    watched,
)
from waiting import wait_until

from spectrain.protocol.keys import Authority, KeyPair
from spectrain.protocol.messages import (
    Go,
    Heartbeat,
    LauncherHello,
    StopBefore,
)
from spectrain.protocol.sockets import Client, Received, Server


def test_a_secret_key_is_not_shown() -> None:
    assert AGENT_KEYS.public in repr(AGENT_KEYS)
    assert AGENT_KEYS.secret not in repr(AGENT_KEYS)


def test_every_key_pair_is_new() -> None:
    assert KeyPair.new() != KeyPair.new()


def test_an_unknown_key_is_turned_away(opened: Opened, tcp_server: Server) -> None:
    with watched(tcp_server, zmq.EVENT_HANDSHAKE_FAILED_AUTH) as next_event:
        tcp_client(opened, tcp_server, "agent/0", KeyPair.new()).send(Go())
        assert next_event() == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    tcp_client(opened, tcp_server, "agent/0", AGENT_KEYS).send(StopBefore(batch=1))
    assert tcp_server.receive(LONG_S) == Received("agent/0", StopBefore(batch=1), [])


def test_a_key_allowed_later_is_let_in(
    opened: Opened, tcp_server: Server, authority: Authority
) -> None:
    keys = KeyPair.new()
    authority.allow(keys.public, "agent/1")
    tcp_client(opened, tcp_server, "agent/1", keys).send(Go())
    assert tcp_server.receive(LONG_S) == Received("agent/1", Go(), [])


def test_a_name_that_the_key_does_not_stand_for_is_dropped(
    opened: Opened, tcp_server: Server
) -> None:
    tcp_client(opened, tcp_server, "worker/0/0", AGENT_KEYS).send(Go())
    tcp_client(opened, tcp_server, "worker/1/0", WORKER_KEYS).send(Go())
    wait_until(
        lambda: tcp_server.receive(0.01) or tcp_server.send("worker/1/0", Go()), what="the other"
    )
    wait_until(lambda: tcp_server.receive(0.01) or tcp_server.dropped, what="the drop")
    assert tcp_server.dropped == {"identity": 1}
    assert not tcp_server.send("worker/0/0", Go())
    assert tcp_server.send("worker/1/0", Go())


def test_an_impostor_gets_no_messages_meant_for_the_name_it_took(
    opened: Opened, tcp_server: Server
) -> None:
    real = tcp_client(opened, tcp_server, "agent/0", AGENT_KEYS)
    real.send(Heartbeat())
    assert tcp_server.receive(LONG_S)
    real.close()
    impostor = tcp_client(opened, tcp_server, "agent/0", WORKER_KEYS)
    impostor.send(LauncherHello(pid=1))
    wait_until(lambda: tcp_server.receive(0.01) or tcp_server.dropped, what="the drop")
    assert tcp_server.dropped == {"identity": 1}
    assert not tcp_server.send("agent/0", Go())


def test_nobody_is_let_in_once_the_authority_is_gone(
    opened: Opened, tcp_server: Server, authority: Authority
) -> None:
    authority.close()
    tcp_client(opened, tcp_server, "agent/0", AGENT_KEYS).send(Go())
    assert tcp_server.receive(0.5) is None


@pytest.mark.parametrize(
    ("allowed", "identity", "permitted"),
    [
        ("agent/0", "agent/0", True),
        ("agent/0", "agent/0/log", True),
        ("agent/0", "agent/01", False),
        ("agent/0", "agent", False),
        ("worker/", "worker/3/0/activations", True),
        ("worker/", "workers", False),
        ("worker/", "launcher", False),
    ],
)
def test_a_key_stands_for_a_name_and_what_lies_below_it(
    authority: Authority,
    allowed: str,
    identity: str,
    permitted: bool,  # noqa: FBT001 - a parameter of the table above
) -> None:
    authority.allow("key", allowed)
    assert authority.permits("key", identity) is permitted


def test_a_key_that_is_not_listed_stands_for_nothing(authority: Authority) -> None:
    assert not authority.permits("another key", "agent/0")


@pytest.mark.parametrize(
    ("missing", "text"), [("keys", "needs keys"), ("authority", "needs an authority")]
)
def test_tcp_without_keys_or_authority_is_our_own_mistake(
    opened: Opened, authority: Authority, missing: str, text: str
) -> None:
    arguments = {"keys": SERVER_KEYS, "authority": authority, missing: None}
    with pytest.raises(AssertionError, match=text):
        opened(Server, run_id=RUN, tcp="127.0.0.1", **arguments)


def test_keys_are_not_used_on_ipc(opened: Opened, ipc_server: Server) -> None:
    client = opened(
        Client,
        run_id=RUN,
        identity="agent/0",
        endpoint=ipc_server.ipc_endpoint,
        server_key=SERVER_KEYS.public,
        keys=AGENT_KEYS,
    )
    client.send(Go())
    assert ipc_server.receive(LONG_S) == Received("agent/0", Go(), [])


def test_a_tcp_client_without_keys_is_our_own_mistake(opened: Opened) -> None:
    with pytest.raises(AssertionError, match="needs keys"):
        opened(Client, run_id=RUN, identity="agent/0", endpoint="tcp://127.0.0.1:1")
