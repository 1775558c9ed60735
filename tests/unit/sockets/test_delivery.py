"""Messages between living peers arrive once, in order, at the right one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import zmq
from socket_peers import (
    BATCH,
    LONG_S,
    PART,
    RUN,
    SERVER_KEYS,
    WORKER_KEYS,
    Opened,
    ipc_client,
    raw_dealer,
    tcp_client,
)
from waiting import wait_until

from spectrain.protocol.codec import (
    MAX_PAYLOAD_BYTES,
    Encoder,
)
from spectrain.protocol.keys import Authority
from spectrain.protocol.messages import (
    Go,
    Heartbeat,
    Note,
    StopBefore,
)
from spectrain.protocol.sockets import Client, Received, Server


def test_a_message_over_ipc_arrives_with_its_sender(opened: Opened, ipc_server: Server) -> None:
    ipc_client(opened, ipc_server).send(StopBefore(batch=7))
    assert ipc_server.receive(LONG_S) == Received("worker/0/0", StopBefore(batch=7), [])


def test_a_message_over_tcp_arrives_with_its_sender(opened: Opened, tcp_server: Server) -> None:
    tcp_client(opened, tcp_server, "worker/1/0", WORKER_KEYS).send(StopBefore(batch=7))
    assert tcp_server.receive(LONG_S) == Received("worker/1/0", StopBefore(batch=7), [])


def test_an_answer_goes_to_the_peer_it_is_for(opened: Opened, ipc_server: Server) -> None:
    clients = [ipc_client(opened, ipc_server, f"worker/{stage}/0") for stage in range(3)]
    for client in clients:
        client.send(Heartbeat())
        ipc_server.receive(LONG_S)
    for stage, _ in enumerate(clients):
        assert ipc_server.send(f"worker/{stage}/0", StopBefore(batch=stage))
    for stage, client in enumerate(clients):
        assert client.receive(LONG_S) == (StopBefore(batch=stage), [])


def test_messages_sent_before_the_server_exists_wait_for_it(opened: Opened, path: Path) -> None:
    client = opened(Client, run_id=RUN, identity="agent/0", endpoint=f"ipc://{path}")
    client.send(StopBefore(batch=1))
    server = opened(Server, run_id=RUN, ipc=path)
    assert server.receive(LONG_S) == Received("agent/0", StopBefore(batch=1), [])


def test_one_server_serves_ipc_and_tcp_in_turn(
    opened: Opened, path: Path, authority: Authority
) -> None:
    server = opened(
        Server, run_id=RUN, ipc=path, tcp="127.0.0.1", keys=SERVER_KEYS, authority=authority
    )
    near = ipc_client(opened, server, "agent/0")
    far = tcp_client(opened, server, "worker/0/0", WORKER_KEYS)
    for _ in range(3):
        near.send(Heartbeat())
        far.send(Heartbeat())
    assert all(bound.poll(LONG_S * 1000) for bound in server._sockets)
    identities = [server.receive(LONG_S).identity for _ in range(2)]
    assert sorted(identities) == ["agent/0", "worker/0/0"]
    assert server.send("agent/0", Go())
    assert server.send("worker/0/0", Go())
    assert near.receive(LONG_S) == far.receive(LONG_S) == (Go(), [])


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_eight_megabytes_go_there_and_back_unchanged(
    opened: Opened, path: Path, authority: Authority, transport: str
) -> None:
    tensor = os.urandom(8 << 20)
    listen = {"ipc": {"ipc": path}, "tcp": {"tcp": "127.0.0.1"}}[transport]
    server = opened(
        Server,
        run_id=RUN,
        keys=SERVER_KEYS,
        authority=authority,
        max_frame_bytes=MAX_PAYLOAD_BYTES,
        **listen,
    )
    client = (
        ipc_client(opened, server)
        if transport == "ipc"
        else tcp_client(opened, server, "worker/0/0", WORKER_KEYS)
    )
    client.send(PART, [tensor])
    received = server.receive(LONG_S)
    assert received.message == PART
    assert received.payload == [tensor]
    assert server.send("worker/0/0", BATCH, [tensor, b""])
    assert client.receive(LONG_S) == (BATCH, [tensor, b""])


def test_payload_is_the_memory_of_the_socket_and_may_be_written(
    opened: Opened, ipc_server: Server
) -> None:
    ipc_client(opened, ipc_server).send(PART, [bytes(1000)])
    (view,) = ipc_server.receive(LONG_S).payload
    assert isinstance(view, memoryview)
    assert not view.readonly


def test_a_client_counts_what_it_has_sent(opened: Opened, ipc_server: Server) -> None:
    client = ipc_client(opened, ipc_server)
    for _ in range(3):
        client.send(Heartbeat())
    assert client.sent == 3


def test_sending_to_a_peer_never_heard_of_says_no(ipc_server: Server) -> None:
    assert not ipc_server.send("worker/9/0", Go())


def test_sending_to_a_peer_that_is_gone_says_no(opened: Opened, ipc_server: Server) -> None:
    client = ipc_client(opened, ipc_server)
    client.send(Heartbeat())
    assert ipc_server.receive(LONG_S)
    client.close()
    wait_until(lambda: not ipc_server.send("worker/0/0", Go()), what="the peer to be gone")
    assert not ipc_server.send("worker/0/0", Go())


def test_sending_through_a_closed_server_is_an_error(opened: Opened, ipc_server: Server) -> None:
    ipc_client(opened, ipc_server).send(Heartbeat())
    assert ipc_server.receive(LONG_S)
    ipc_server.close()
    with pytest.raises(zmq.ZMQError):
        ipc_server.send("worker/0/0", Go())


def test_sending_to_a_peer_that_does_not_read_says_no(
    context: zmq.Context[Any], opened: Opened, path: Path
) -> None:
    server = opened(Server, run_id=RUN, ipc=path, high_water=2)
    with raw_dealer(context, server, b"worker/0/0") as deaf:
        deaf.rcvhwm = 1  # for connections made from here on
        deaf.connect(server.ipc_endpoint)
        deaf.send_multipart(Encoder(RUN).encode(Heartbeat()))
        assert server.receive(LONG_S)
        note = Note(level="info", text="x" * 500_000)
        wait_until(lambda: not server.send("worker/0/0", note), what="a full queue", interval_s=0)


def test_a_client_outlives_a_server_that_starts_again(path: Path, opened: Opened) -> None:
    client = opened(Client, run_id=RUN, identity="agent/0", endpoint=f"ipc://{path}")

    def exchange(server: Server) -> bool:
        client.send(Heartbeat())
        if server.receive(0.1) is None:
            return False
        return server.send("agent/0", Go()) and client.receive(LONG_S) == (Go(), [])

    for _ in range(2):
        with zmq.Context() as another_context:
            server = Server(another_context, run_id=RUN, ipc=path)
            wait_until(lambda server=server: exchange(server), what="an answer")
            server.close()
    assert not client.dropped


def test_a_peer_that_reconnects_under_its_name_is_the_one_that_is_answered(
    opened: Opened, ipc_server: Server
) -> None:
    ipc_client(opened, ipc_server, "agent/0").send(Heartbeat())
    assert ipc_server.receive(LONG_S)
    again = ipc_client(opened, ipc_server, "agent/0")
    again.send(Heartbeat())
    assert ipc_server.receive(LONG_S)
    assert ipc_server.send("agent/0", Go())
    assert again.receive(LONG_S) == (Go(), [])


def test_last_words_leave_before_the_context_ends(opened: Opened, ipc_server: Server) -> None:
    with zmq.Context() as worker_context:
        client = Client(
            worker_context, run_id=RUN, identity="worker/0/0", endpoint=ipc_server.ipc_endpoint
        )
        for batch in range(500):
            client.send(StopBefore(batch=batch))
        client.close(flush_s=LONG_S)
    batches = [ipc_server.receive(LONG_S).message.batch for _ in range(500)]
    assert batches == list(range(500))
