"""What is no valid message is dropped and counted, and the next one is served."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from socket_peers import (
    AGENT_KEYS,
    LONG_S,
    OTHER_RUN,
    RUN,
    Opened,
    header,
    ipc_client,
    raw_dealer,
    tcp_client,
    watched,
)
from waiting import wait_until

from spectrain.protocol.codec import (
    MAX_MESSAGE_BYTES,
    Encoder,
    InvalidMessageError,
)
from spectrain.protocol.messages import (
    Go,
    Heartbeat,
    Note,
    StopBefore,
)
from spectrain.protocol.sockets import Client, Received, Server


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"GET / HTTP/1.1"], "header"),
        ([b"", b""], "header"),
        ([header()[:-1], msgpack.packb({"kind": "Go"})], "header"),
        ([header(), b"\xc1"], "malformed"),
        ([header(), msgpack.packb({"kind": "StopBefore"})], "malformed"),
        ([header(), msgpack.packb({"kind": "StopBefore", "batch": 1})[:-1]], "malformed"),
        ([header(), msgpack.packb({"kind": "Exec"})], "unknown kind"),
        ([header(), bytes(MAX_MESSAGE_BYTES + 1)], "oversized"),
        ([header(), msgpack.packb({"kind": "Go"}), b"raw"], "payload"),
        (Encoder(OTHER_RUN).encode(Go()), "run"),
    ],
)
def test_a_server_drops_and_counts_what_is_not_a_message_and_goes_on(
    context: zmq.Context[Any], ipc_server: Server, frames: list[bytes], reason: str
) -> None:
    with raw_dealer(context, ipc_server, b"worker/0/0") as dealer:
        dealer.send_multipart(frames)
        dealer.send_multipart(Encoder(RUN).encode(Go()))
        assert ipc_server.receive(LONG_S) == Received("worker/0/0", Go(), [])
    assert ipc_server.dropped == {reason: 1}


def test_a_server_drops_a_replayed_message(context: zmq.Context[Any], ipc_server: Server) -> None:
    encoder = Encoder(RUN)
    frames = encoder.encode(StopBefore(batch=1))
    with raw_dealer(context, ipc_server, b"worker/0/0") as dealer:
        for sent in (frames, frames, encoder.encode(StopBefore(batch=2))):
            dealer.send_multipart(sent)
        batches = [ipc_server.receive(LONG_S).message.batch for _ in range(2)]
    assert batches == [1, 2]
    assert ipc_server.dropped == {"replayed": 1}


@pytest.mark.parametrize("identity", [None, b"w\xffrker", b"worker\n"])
def test_a_server_drops_peers_without_a_proper_name(
    context: zmq.Context[Any], opened: Opened, ipc_server: Server, identity: bytes | None
) -> None:
    with raw_dealer(context, ipc_server, identity) as dealer:
        dealer.send_multipart(Encoder(RUN).encode(Go()))
        wait_until(
            lambda: ipc_server.receive(0.01) or ipc_server.dropped, what="the message to be seen"
        )
    assert ipc_server.dropped == {"identity": 1}


def test_a_frame_above_the_sockets_limit_costs_the_connection_and_no_more(
    context: zmq.Context[Any], opened: Opened, ipc_server: Server
) -> None:
    good = ipc_client(opened, ipc_server, "worker/1/0")
    with (
        watched(ipc_server, zmq.EVENT_DISCONNECTED) as next_event,
        raw_dealer(context, ipc_server, b"worker/0/0") as dealer,
    ):
        dealer.send_multipart([header(), bytes(2 * MAX_MESSAGE_BYTES)])
        assert next_event() == zmq.EVENT_DISCONNECTED
    good.send(Go())
    assert ipc_server.receive(LONG_S) == Received("worker/1/0", Go(), [])


def test_bytes_that_are_not_zeromq_do_no_harm(opened: Opened, tcp_server: Server) -> None:
    address, port = tcp_server.tcp_endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((address, int(port)), timeout=LONG_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
    tcp_client(opened, tcp_server, "agent/0", AGENT_KEYS).send(Go())
    assert tcp_server.receive(LONG_S) == Received("agent/0", Go(), [])


def test_a_client_drops_and_counts_what_is_not_a_message_and_goes_on(
    context: zmq.Context[Any], opened: Opened, path: Path
) -> None:
    with context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(f"ipc://{path}")
        client = opened(Client, run_id=RUN, identity="agent/0", endpoint=f"ipc://{path}")
        client.send(Heartbeat())
        assert router.poll(LONG_S * 1000)
        router.send_multipart([b"agent/0", b"junk"])
        wait_until(lambda: client.receive(0) or client.dropped, what="the drop")
        for frames in ([b"junk"], Encoder(OTHER_RUN).encode(Go()), Encoder(RUN).encode(Go())):
            router.send_multipart([b"agent/0", *frames])
        assert client.receive(LONG_S) == (Go(), [])
    assert client.dropped == {"header": 2, "run": 1}


def test_a_message_too_large_to_send_is_an_error_of_the_sender(
    opened: Opened, ipc_server: Server
) -> None:
    client = ipc_client(opened, ipc_server)
    with pytest.raises(InvalidMessageError, match="Note: the body has"):
        client.send(Note(level="info", text="x" * MAX_MESSAGE_BYTES))
    assert client.sent == 0
