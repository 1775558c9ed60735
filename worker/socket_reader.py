"""Reads a socket ahead: one call of the system brings a note and the small payload after it."""

from __future__ import annotations

import socket
import struct
import time

__all__ = ["SocketReader", "limit", "read_some", "with_length"]

_AHEAD_BYTES = 64 << 10
"""Read at a time. What is longer goes straight to where it is wanted."""

_LENGTH = struct.Struct("=I")

_LONGEST_NOTE_BYTES = 1 << 20
"""As long as a message may be; more is taken for nonsense, not for room to make."""

_FOREVER_S = 24 * 3600.0
_TOLERANCE = 0.01


def with_length(note: bytes) -> bytes:
    """Return a note as ``SocketReader.note`` expects it."""
    return _LENGTH.pack(len(note)) + note


def limit(connection: socket.socket, timeout_s: float) -> None:
    """Set the timeout of a connection, roughly, and only if it is another one.

    Each setting is a call of the system, and so is each wait with a timeout: a day is for ever.
    """
    wanted_s = None if timeout_s >= _FOREVER_S else max(0.001, timeout_s)
    present_s = connection.gettimeout()
    if wanted_s is None or present_s is None:
        is_near = wanted_s is present_s
    else:
        is_near = abs(wanted_s - present_s) <= _TOLERANCE * wanted_s
    if not is_near:
        connection.settimeout(wanted_s)


def read_some(connection: socket.socket, room: memoryview, deadline_s: float) -> int:
    """Wait for bytes, put them into ``room`` and return how many they are, at least 1.

    Raises:
        ConnectionError: the peer closed the connection, or it broke.
        TimeoutError: the deadline, by the monotonic clock, has passed.
    """
    limit(connection, deadline_s - time.monotonic())
    count = connection.recv_into(room)
    if not count:
        raise ConnectionResetError("the peer closed the connection")
    return count


class SocketReader:
    """The reading side of a connection; nobody else may read from it.

    Args:
        connection: connected.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memory = memoryview(bytearray(_AHEAD_BYTES))
        self._begin = self._end = 0  # what was read ahead

    def note(self, deadline_s: float) -> bytes:
        """Return the next bytes that were sent ``with_length``.

        Raises:
            ConnectionError: as ``fill``, or a note is longer than any can be.
            TimeoutError: as ``fill``.
        """
        head = bytearray(_LENGTH.size)
        self.fill(memoryview(head), deadline_s)
        size_bytes = _LENGTH.unpack(head)[0]
        if size_bytes > _LONGEST_NOTE_BYTES:
            raise ConnectionError(
                f"a note of {size_bytes} bytes is announced; at most {_LONGEST_NOTE_BYTES} are "
                "taken: what comes on this connection is not what the peer means"
            )
        note = bytearray(size_bytes)
        self.fill(memoryview(note), deadline_s)
        return bytes(note)

    def fill(self, room: memoryview, deadline_s: float) -> None:
        """Fill ``room``.

        Raises:
            ConnectionError: the peer closed the connection, or it broke.
            TimeoutError: the deadline, by the monotonic clock, has passed.
        """
        while room:
            if self._begin == self._end and len(room) < _AHEAD_BYTES:
                self._begin, self._end = 0, read_some(self._connection, self._memory, deadline_s)
            if self._begin < self._end:
                count = min(len(room), self._end - self._begin)
                room[:count] = self._memory[self._begin : self._begin + count]
                self._begin += count
            else:
                count = read_some(self._connection, room, deadline_s)
            room = room[count:]
