"""Raw bytes one way between two ranks over a plain socket: the wire between CPU stages.

A Unix socket where both ranks share a host, else TCP. The meeting is arranged over the caller's
encrypted channel, and a token that came that way proves to the listener who connects; the bytes
themselves are not encrypted, as they are not with NCCL or gloo either.

Measured against gloo (torch 2.13), whose process groups this replaces on CPU: gloo does not tell
a waiter when its connection dies under a message, and cannot be made to let go of it, so every
such fault left a thread behind for ever. A socket reports both ends' death at once.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

from torch import Tensor

from .rendezvous import Exchange

__all__ = ["SocketWire", "open_socket_wire"]

_TOKEN_BYTES = 16
_BUFFER_BYTES = 4 << 20  # the system may give less


def open_socket_wire(
    rank: int, *, address: str, exchange: Exchange, timeout_s: float
) -> SocketWire:
    """Build one end.

    Args:
        rank: 0 sends and listens for its peer, 1 receives.
        address: numeric address of this host that the peer can reach; a loopback address means
            that the peer is on this host.
        exchange: swaps rendezvous values with the peer.
        timeout_s: for the connection.

    Raises:
        OSError: it could not be built, or not in time (``TimeoutError``).
    """
    if rank == 1:
        return _connect(exchange(b"").decode(), timeout_s)
    token = secrets.token_bytes(_TOKEN_BYTES)
    with _listen(address) as listener:
        exchange(f"{token.hex()} {_name_of(listener)}".encode())
        return _accept(listener, token, timeout_s)


class SocketWire:
    """One end; see ``link.Wire``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Send each part; return when the system has all of it."""
        self._connection.settimeout(timeout_s)
        for part in parts:
            self._connection.sendall(part.numpy().data)

    def receive(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Fill each part."""
        deadline_s = time.monotonic() + timeout_s
        for part in parts:
            _fill(self._connection, part.numpy().data, deadline_s)

    def abort(self) -> None:
        """Free a waiting thread; nothing is carried any more."""
        with suppress(OSError):  # the peer, or ``close``, was quicker
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _listen(address: str) -> socket.socket:
    if ip_address(address).is_loopback:
        listener = socket.socket(socket.AF_UNIX)
        # A name without a file: it is gone with the socket, however that ends.
        listener.bind(f"\0spectrain-{secrets.token_hex(_TOKEN_BYTES)}")
        listener.listen()
        return listener
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def _name_of(listener: socket.socket) -> str:
    """Return what a peer needs to connect: a Unix name, or address and port."""
    name = listener.getsockname()
    if isinstance(name, bytes):
        return name[1:].decode()
    return f"{name[0]} {name[1]}"


def _accept(listener: socket.socket, token: bytes, timeout_s: float) -> SocketWire:
    """Return the connection that knows the token; others are turned away."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        listener.settimeout(max(0.001, deadline_s - time.monotonic()))
        connection, _ = listener.accept()
        shown = bytearray(_TOKEN_BYTES)
        with suppress(OSError):
            _fill(connection, memoryview(shown), deadline_s)
        if hmac.compare_digest(shown, token):
            return SocketWire(_tuned(connection))
        connection.close()


def _connect(offer: str, timeout_s: float) -> SocketWire:
    token, *where = offer.split()
    if len(where) == 1:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        connection.connect(f"\0{where[0]}")
    else:
        connection = socket.create_connection((where[0], int(where[1])), timeout_s)
    connection.sendall(bytes.fromhex(token))
    return SocketWire(_tuned(connection))


def _tuned(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _fill(connection: socket.socket, room: memoryview, deadline_s: float) -> None:
    while room:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        count = connection.recv_into(room)
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        room = room[count:]
