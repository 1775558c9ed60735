"""Raw bytes one way between two ranks by gloo, for tensors in host memory. No policy.

What gloo is like (torch 2.13): a send waits for its receive; completion cannot be polled; a
receive that is smaller than its send kills the process; a time-out breaks the connection.
"""

from __future__ import annotations

import logging
import socket
import stat
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from os import dup
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work

from .rendezvous import Exchange, Group, Met, meet

__all__ = ["GlooWire", "open_gloo_wire"]

logger = logging.getLogger(__name__)

# A peer that dies while the group is built costs five times this, since gloo multiplies it; waits
# on the finished group bring their own time-outs.
_BUILD_TIMEOUT = timedelta(seconds=1)

_SOCKADDR_BYTES = struct.pack("=Q", 136)  # precedes a socket address in a rendezvous value


def open_gloo_wire(rank: int, *, address: str, exchange: Exchange, timeout_s: float) -> GlooWire:
    """Build one end.

    Args:
        rank: 0 sends, 1 receives.
        address: numeric address of this host that the peer can reach.
        exchange: swaps rendezvous values with the peer.
        timeout_s: for each phase of the build.

    Raises:
        RuntimeError: it could not be built.
        TimeoutError: it was not built in time.
    """
    options = _options(address)

    def construct(store: Store) -> Group:
        return cast("Group", ProcessGroupGloo(store, rank, 2, options))

    group, met = meet(
        construct,
        publishes=f"0/{rank}",
        awaits=f"0/{1 - rank}",
        exchange=exchange,
        timeout_s=timeout_s,
    )
    return GlooWire(group, 1 - rank, met)


def _options(address: str) -> Any:
    # Only the private names can be given a network address; torch's stubs know none of them.
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001
    options._devices = [gloo.create_device(hostname=address)]  # noqa: SLF001
    options._timeout = _BUILD_TIMEOUT  # noqa: SLF001
    options._threads = 1  # noqa: SLF001
    return options


class GlooWire:
    """One end; see ``link.Wire``."""

    def __init__(self, group: Group, peer: int, met: Met) -> None:
        self._group: Group | None = group
        self._peer = peer
        self._met = met

    def send(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Send each part; return when the receiver has all."""
        group = self._open_group()
        _finish([group.send([part], self._peer, tag) for tag, part in enumerate(parts)], timeout_s)

    def receive(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Fill each part."""
        group = self._open_group()
        _finish([group.recv([part], self._peer, tag) for tag, part in enumerate(parts)], timeout_s)

    def abort(self) -> None:
        """Free a waiting thread.

        gloo's own abort does nothing, so the connection is cut under it: found among this
        process's sockets by the addresses in the rendezvous values.
        """
        own, peer = _listener(self._met.own), _listener(self._met.peer)
        if own is None or peer is None:
            logger.warning("cannot abort a gloo link: its rendezvous value has an unknown form")
            return
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # it was closed meanwhile
                if stat.S_ISSOCK(entry.stat().st_mode):
                    _cut_if_between(int(entry.name), own, peer)

    def close(self) -> None:
        """Let go of the group and its threads."""
        self._group = None

    def _open_group(self) -> Group:
        if self._group is None:
            raise RuntimeError("the link is closed")
        return self._group


def _finish(works: Sequence[Work], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for work in works:
        left_s = max(0.001, deadline_s - time.monotonic())  # 0 would mean the group's default
        work.wait(timedelta(seconds=left_s))


def _listener(value: bytes) -> tuple[str, int] | None:
    """Return the address in a rendezvous value: host name, size, ``sockaddr_storage``, ..."""
    start = value.find(_SOCKADDR_BYTES) + len(_SOCKADDR_BYTES)
    address = value[start : start + 28]
    family = int.from_bytes(address[:2], "little")
    port = int.from_bytes(address[2:4], "big")
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, address[4:8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, address[8:24]), port
    return None


def _cut_if_between(descriptor: int, own: tuple[str, int], peer: tuple[str, int]) -> None:
    with socket.socket(fileno=dup(descriptor)) as connection:
        remote = connection.getpeername()  # a listening socket has none, and is left alone
        if connection.getsockname()[:2] == own or remote[:2] == peer:
            connection.shutdown(socket.SHUT_RDWR)
