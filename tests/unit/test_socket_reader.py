"""Reading a socket ahead: notes and payloads come out as they went in, and nonsense is refused."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from spectrain.worker.socket_reader import SocketReader, limit, with_length


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, SocketReader]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, SocketReader(theirs)


def soon() -> float:
    return time.monotonic() + 10


@pytest.mark.parametrize("size", [0, 1, 5000, 70_000])
def test_a_note_and_the_payload_after_it_come_out_apart(
    ends: tuple[socket.socket, SocketReader], size: int
) -> None:
    sender, reader = ends
    payload = bytes(range(256)) * (size // 256 + 1)
    sender.sendall(with_length(b"first") + payload[:size] + with_length(b"second"))
    assert reader.note(soon()) == b"first"
    room = bytearray(size)
    reader.fill(memoryview(room), soon())
    assert bytes(room) == payload[:size]
    assert reader.note(soon()) == b"second"


def test_a_note_that_is_longer_than_any_is_refused_before_room_is_made(
    ends: tuple[socket.socket, SocketReader],
) -> None:
    sender, reader = ends
    sender.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ConnectionError, match="4294967295 bytes"):
        reader.note(soon())


def test_the_end_of_the_connection_is_told(ends: tuple[socket.socket, SocketReader]) -> None:
    sender, reader = ends
    sender.sendall(with_length(b"whole")[:-1])
    sender.close()
    with pytest.raises(ConnectionResetError, match="closed"):
        reader.note(soon())


def test_a_timeout_is_set_only_if_it_is_another_one() -> None:
    with socket.socket() as connection:
        limit(connection, 10.0)
        limit(connection, 10.05)
        assert connection.gettimeout() == 10.0
        limit(connection, 20.0)
        assert connection.gettimeout() == 20.0
        limit(connection, 1e6)
        assert connection.gettimeout() is None
