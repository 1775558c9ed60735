"""Builds a two-rank process group whose members meet through us instead of through an open port.

Each side has a store of its own. What a group writes there for its peer is carried over by
``exchange``, the caller's own (encrypted) channel; nothing here knows which.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store, Work

__all__ = ["Exchange", "Group", "Met", "meet"]

Exchange: TypeAlias = Callable[[bytes], bytes]
"""Sends our rendezvous value and returns the peer's; either may be empty."""

T = TypeVar("T")

_PREFIX = "L"


class Group(Protocol):
    """What we use of a process group; torch's own stubs do not tell."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work:
        """Begin to send one tensor."""
        ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work:
        """Begin to receive one tensor."""
        ...

    def abort(self) -> None:
        """Give up all that is under way; empty in gloo."""
        ...


class Met(NamedTuple):
    """Both rendezvous values, and the thing that was built with them."""

    own: bytes
    peer: bytes


def meet(
    construct: Callable[[Store], T],
    *,
    publishes: str | None,
    awaits: str | None,
    exchange: Exchange,
    timeout_s: float,
) -> tuple[T, Met]:
    """Run ``construct`` in a helper thread and carry its rendezvous values.

    Constructors of process groups cannot be cancelled. One that finds no peer is left behind; it
    ends by its own time-out, and what it may still build is dropped with it.

    Args:
        construct: builds the group over the store that it is given.
        publishes: key that the group writes for its peer; None: it writes none.
        awaits: key that the group reads of its peer; None: it reads none.
        exchange: called once, in the calling thread.
        timeout_s: for each phase: until our value is there, and until the group stands.

    Raises:
        RuntimeError: the group could not be built.
        TimeoutError: it was not built in time.
    """
    store = HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    built: Future[T] = Future()
    threading.Thread(
        target=_build, args=(built, construct, store), name="link build", daemon=True
    ).start()
    own = _read(store, f"{_PREFIX}/{publishes}") if publishes else b""
    peer = exchange(own)
    if awaits:
        store.set(f"{_PREFIX}/{awaits}", peer)  # pyright: ignore[reportArgumentType] # bytes will do
    return built.result(timeout_s), Met(own, peer)


def _build(built: Future[T], construct: Callable[[Store], T], store: Store) -> None:
    try:
        built.set_result(construct(PrefixStore(_PREFIX, store)))
    except Exception as error:  # noqa: BLE001 # travels to the caller in the future
        built.set_exception(error)


def _read(store: Store, key: str) -> bytes:
    store.wait([key])
    return store.get(key)
