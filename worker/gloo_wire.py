"""Raw bytes one way between two ranks by gloo, for tensors in host memory. No policy.

What gloo is like (torch 2.13): a send waits for its receive; completion cannot be polled; a
receive that is smaller than its send kills the process; a time-out breaks the connection. Whoever
waits for a message of which a part has come is told neither that the peer died nor that the
connection was cut. So waiting is done by a thread that may be left behind.
"""

from __future__ import annotations

import logging
import socket
import stat
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from datetime import timedelta
from os import dup
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work

from .rendezvous import Exchange, Group, Met, meet

__all__ = ["GlooWire", "open_gloo_wire"]

logger = logging.getLogger(__name__)

# A peer that dies while the group is built costs five times this, since gloo multiplies it; waits
# on the finished group bring their own time-outs.
_BUILD_TIMEOUT = timedelta(seconds=1)

_FREED_WITHIN_S = 0.1
"""How long a connection that is cut may take to free its waiter."""

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
        self._waiter = _Waiter()

    def send(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Send each part; return when the receiver has all."""
        group = self._open_group()
        works = [group.send([part], self._peer, tag) for tag, part in enumerate(parts)]
        self._waiter.wait(works, timeout_s)

    def receive(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Fill each part."""
        group = self._open_group()
        works = [group.recv([part], self._peer, tag) for tag, part in enumerate(parts)]
        self._waiter.wait(works, timeout_s)

    def abort(self) -> None:
        """Free a waiting thread.

        gloo's own abort does nothing, so the connection is cut under it: found among this
        process's sockets by the addresses in the rendezvous values. Where gloo does not notice,
        the thread that waits for it is left behind.
        """
        self._cut()
        self._waiter.give_up(after_s=_FREED_WITHIN_S)

    def close(self) -> None:
        """Let go of the group and its threads."""
        self._group = None
        self._waiter.close()

    def _cut(self) -> None:
        own, peer = _listener(self._met.own), _listener(self._met.peer)
        if own is None or peer is None:
            logger.warning("cannot abort a gloo link: its rendezvous value has an unknown form")
            return
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # it was closed meanwhile
                if stat.S_ISSOCK(entry.stat().st_mode):
                    _cut_if_between(int(entry.name), own, peer)

    def _open_group(self) -> Group:
        if self._group is None:
            raise RuntimeError("the link is closed")
        return self._group


class _Waiter:
    """Waits for gloo in a thread of its own, which can be given up.

    Such a thread stays until its time-out, and with it the memory of what was under way.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Sequence[Work], float, Future[None]] | None] = SimpleQueue()
        self._done: Future[None] = Future()
        self._done.set_result(None)
        self._given_up = False
        threading.Thread(target=_serve, args=(self._jobs,), name="gloo wait", daemon=True).start()

    def wait(self, works: Sequence[Work], timeout_s: float) -> None:
        """Wait until all is done, or raise RuntimeError."""
        self._done = done = Future[None]()
        if self._given_up:
            raise RuntimeError("the link was aborted")
        self._jobs.put((works, timeout_s, done))
        done.result()

    def give_up(self, *, after_s: float) -> None:
        """Make ``wait`` raise, now and whenever it is called; from any thread."""
        self._given_up = True
        done = self._done
        if wait([done], after_s).not_done:
            _settle(done, RuntimeError("the link was aborted"))

    def close(self) -> None:
        """End the thread when what it waits for has ended."""
        self._jobs.put(None)


def _serve(jobs: SimpleQueue[tuple[Sequence[Work], float, Future[None]] | None]) -> None:
    while (job := jobs.get()) is not None:
        works, timeout_s, done = job
        try:
            _finish(works, timeout_s)
        except Exception as error:  # noqa: BLE001  # travels to the caller in the future
            _settle(done, error)
        else:
            _settle(done, None)
        del job, works, done  # tensors are not to stay until the next job


def _settle(done: Future[None], error: Exception | None) -> None:
    with suppress(InvalidStateError):  # it was given up, or just ended
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


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
