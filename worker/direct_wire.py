"""Raw bytes one way between two ranks on one host: the receiver reads the sender's own memory.

``process_vm_readv`` copies each payload once, straight to where it is wanted; a socket, or memory
that both share, costs two copies. A Unix socket carries the addresses, and one byte back for each
payload that was read. Whoever waits for the peer waits there, and is told of its death at once.
Small payloads go through the socket themselves.

A read gives the right bytes or none. While it runs the kernel keeps the memory of a sender that
dies; and what was read counts only if the socket still stands afterwards, for then the sender was
alive all along, its process number was not another's, and it had not let go of the payload.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from .rendezvous import Exchange
from .socket_meeting import meet_at_socket, read_exactly
from .socket_reader import limit, with_length
from .socket_wire import SocketWire

__all__ = ["DirectWire", "open_direct_wire"]

_SMALL_BYTES = 64 << 10
"""In sum: below that the socket costs less (measured at 64 KiB: 18 us, against 21)."""

_READ_BYTES = 64 << 20
"""At a time, since a read cannot be cut short: some 10 ms."""

_UNREAD_PAYLOADS = 2
"""That the receiver has yet to read when ``send`` returns: one to read, and one to go on with."""

_ADDRESS = struct.Struct("=Q")
_READ = b"."
_REFUSED = b"!"

_PROOF_BYTES = 16
_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = ctypes.c_ulong(-1)


class _Span(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


def open_direct_wire(
    rank: int, *, address: str, exchange: Exchange, timeout_s: float
) -> DirectWire | SocketWire:
    """Build one end; a plain socket if the peer's memory cannot be read.

    That is so if it is on another host or in another container, or if the system forbids it.

    Args:
        rank: 0 sends, 1 receives.
        address: numeric address of this host that the peer can reach.
        exchange: swaps rendezvous values with the peer.
        timeout_s: for the connection.

    Raises:
        OSError: it could not be built, or not in time (``TimeoutError``).
    """
    connection = meet_at_socket(rank, address=address, exchange=exchange, timeout_s=timeout_s)
    if connection.family != socket.AF_UNIX:
        return SocketWire(connection)
    try:
        connection.settimeout(timeout_s)
        pid = _pid_of_peer(connection)
        is_readable = _show(connection) if rank == 0 else _look(connection, pid, timeout_s)
    except BaseException:
        connection.close()
        raise
    return DirectWire(connection, pid) if is_readable else SocketWire(connection)


class DirectWire:
    """One end; see ``link.NotingWire``.

    Args:
        connection: a Unix socket.
        pid: of the peer.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._pid = pid
        self._socket_wire = SocketWire(connection)
        self._unread: deque[Sequence[Tensor]] = deque()
        self._end = select.poll()
        self._end.register(connection, select.POLLRDHUP)
        self._answer = select.poll()
        self._answer.register(connection, select.POLLIN)

    def send(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Offer the parts; keep them until they are read, which may be after this returns."""
        self._send(b"", parts, timeout_s)

    def send_noted(self, note: bytes, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Send the note and offer the parts."""
        self._send(with_length(note), parts, timeout_s)

    def leaves_at_once(self, parts: Sequence[Tensor]) -> bool:
        """Tell whether the parts are small, or few enough are unread."""
        if _is_small(parts):
            return self._socket_wire.leaves_at_once(parts)
        while self._unread and self._answer.poll(0):
            self._await_reading(time.monotonic() + 1)  # it is there
        return len(self._unread) < _UNREAD_PAYLOADS and self._socket_wire.is_idle()

    def receive(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Fill each part."""
        if _is_small(parts):
            self._socket_wire.receive(parts, timeout_s)
            return
        addresses = self._socket_wire.receive_bytes(len(parts) * _ADDRESS.size, timeout_s)
        for part, (address,) in zip(parts, _ADDRESS.iter_unpack(addresses), strict=True):
            _read(self._pid, address, part)
        if self._end.poll(0):
            raise ConnectionResetError("the peer closed the connection")
        self._connection.sendall(_READ)

    def receive_note(self, timeout_s: float) -> bytes:
        """Return the next note."""
        return self._socket_wire.receive_note(timeout_s)

    def _send(self, before: bytes, parts: Sequence[Tensor], timeout_s: float) -> None:
        if _is_small(parts):
            self._socket_wire.send_bytes(before, parts, timeout_s)
            return
        deadline_s = time.monotonic() + timeout_s
        while len(self._unread) >= _UNREAD_PAYLOADS:
            self._await_reading(deadline_s)
        self._unread.append(parts)
        limit(self._connection, timeout_s)
        addresses = (_ADDRESS.pack(part.data_ptr()) for part in parts)
        self._connection.sendall(b"".join((before, *addresses)))

    def _await_reading(self, deadline_s: float) -> None:
        read_exactly(self._connection, memoryview(bytearray(len(_READ))), deadline_s)
        self._unread.popleft()

    def abort(self) -> None:
        """Free a waiting thread; nothing is carried any more."""
        self._socket_wire.abort()

    def close(self) -> None:
        """Close the connection, and only then let go of what was not read."""
        self._socket_wire.close()
        self._unread.clear()


def _is_small(parts: Sequence[Tensor]) -> bool:
    return sum(part.numel() for part in parts) <= _SMALL_BYTES


def _read(pid: int, address: int, room: Tensor) -> None:
    """Fill ``room`` with what another process has at ``address``.

    Raises:
        OSError: it is gone, or may not be read.
    """
    for start in range(0, room.numel(), _READ_BYTES):
        size_bytes = min(_READ_BYTES, room.numel() - start)
        here = _Span(room.data_ptr() + start, size_bytes)
        there = _Span(address + start, size_bytes)
        count = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count != size_bytes:
            error = ctypes.get_errno()
            raise OSError(error, f"cannot read the memory of process {pid}: {os.strerror(error)}")


def _pid_of_peer(connection: socket.socket) -> int:
    """Return it as this process would call it; 0 if it has no name for it."""
    credentials = struct.Struct("=iII")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return credentials.unpack(raw)[0]


def _show(connection: socket.socket) -> bool:
    """Let the peer try to read something; return whether it could."""
    # Where only a parent may look at its child (Yama), others must be invited. EINVAL: no Yama.
    _libc.prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)
    proof = torch.frombuffer(bytearray(secrets.token_bytes(_PROOF_BYTES)), dtype=torch.uint8)
    connection.sendall(_ADDRESS.pack(proof.data_ptr()) + proof.numpy().tobytes())
    answer = connection.recv(1)
    if not answer:
        raise ConnectionResetError("the peer closed the connection")
    return answer == _READ


def _look(connection: socket.socket, pid: int, timeout_s: float) -> bool:
    """Try to read what the peer shows; tell it, and return, whether that succeeded."""
    shown = bytearray(_ADDRESS.size + _PROOF_BYTES)
    read_exactly(connection, memoryview(shown), time.monotonic() + timeout_s)
    seen = torch.zeros(_PROOF_BYTES, dtype=torch.uint8)
    with suppress(OSError):  # another container, seccomp, Yama
        _read(pid, _ADDRESS.unpack_from(shown)[0], seen)
    is_readable = seen.numpy().tobytes() == bytes(shown[_ADDRESS.size :])
    connection.sendall(_READ if is_readable else _REFUSED)
    return is_readable
