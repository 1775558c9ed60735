"""A link: carries tensors one way between two workers, whatever is underneath. No streams, no ops.

A link is a two-rank group of its own, rank 0 sends and rank 1 receives. It has no part in any
world and no open port for strangers. The receiver must know sizes beforehand: both ends always
agree what comes next (see ``stream``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ..protocol.errors import DeadlineError, LinkError, SettingsError
from .direct_wire import open_direct_wire
from .gloo_wire import open_gloo_wire
from .nccl_wire import open_nccl_wire
from .rendezvous import Exchange
from .socket_wire import open_socket_wire
from .strict_wire import open_strict_wire

__all__ = ["LINK_VARIABLE", "RECEIVER", "SENDER", "Link", "Wire", "default_backend", "open_link"]

SENDER, RECEIVER = 0, 1
"""Ranks."""

LINK_VARIABLE = "SPECTRAIN_LINK"
"""Environment variable that names the backend; the same on every host, meant for tests."""

T = TypeVar("T")

BACKENDS = ("direct", "socket", "gloo", "nccl", "strict")


class Wire(Protocol):
    """Raw bytes one way between two ranks, in order.

    One thread sends or receives, any thread may abort. A wire that has raised is broken.
    """

    def send(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Send contiguous, non-empty ``uint8`` tensors; raise RuntimeError or OSError.

        They may be read after this returns, so that nobody may write to them any more.
        """
        ...

    def receive(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Fill contiguous, non-empty ``uint8`` tensors; raise RuntimeError or OSError."""
        ...

    def abort(self) -> None:
        """Free the thread that waits in ``send`` or ``receive``, with an error."""
        ...

    def close(self) -> None:
        """Release everything; nobody waits any more."""
        ...


@runtime_checkable
class NotingWire(Wire, Protocol):
    """A wire that needs not know sizes beforehand: bytes of any number go before a payload."""

    def send_noted(self, note: bytes, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Send the note, then as ``send``; there may be no parts."""
        ...

    def leaves_at_once(self, parts: Sequence[Tensor]) -> bool:
        """Tell whether ``send_noted`` would not wait, with any short note."""
        ...

    def receive_note(self, timeout_s: float) -> bytes:
        """Return the next note; its payload is to be received next."""
        ...


def default_backend(device: torch.device) -> str:
    """Return the backend for stages on ``device``: NCCL between GPUs, else direct reads.

    Those become plain sockets between hosts. ``SPECTRAIN_LINK`` overrides: with ``direct``,
    ``socket`` and ``gloo`` several stages can share one GPU (tensors are staged through host
    memory); ``strict`` tests on CPU what NCCL would not forgive.

    Raises:
        SettingsError: the variable names no backend, or NCCL without a GPU.
    """
    backend = os.environ.get(LINK_VARIABLE) or ("nccl" if device.type == "cuda" else "direct")
    if backend not in BACKENDS:
        raise SettingsError(f"{LINK_VARIABLE}={backend!r}: must be one of {', '.join(BACKENDS)}")
    if backend == "nccl" and device.type != "cuda":
        raise SettingsError(f"{LINK_VARIABLE}=nccl links GPUs only; use direct with --device cpu")
    return backend


def open_link(
    backend: str,
    rank: int,
    *,
    peer: str,
    address: str,
    device: torch.device,
    exchange: Exchange,
    timeout_s: float,
) -> Link:
    """Build one end of a link while the peer builds the other.

    Args:
        backend: "direct", "socket", "gloo", "nccl" or "strict".
        rank: ``SENDER`` or ``RECEIVER``.
        peer: who is at the other end, for errors, such as "stage 1".
        address: numeric address of this host that the peer can reach.
        device: where the tensors are.
        exchange: called once, with our rendezvous value; returns the peer's.
        timeout_s: for each phase of the build: own value, connection.

    Raises:
        LinkError: it could not be built, or not in time.
    """
    try:
        if backend == "nccl":
            wire = open_nccl_wire(rank, device=device, exchange=exchange, timeout_s=timeout_s)
        else:
            wire = _BUILDERS[backend](rank, address=address, exchange=exchange, timeout_s=timeout_s)
    except (RuntimeError, OSError, FutureTimeoutError) as error:
        raise LinkError(f"no {backend} link with {peer}: {error or 'not in time'}") from error
    return Link(wire, peer, is_staged=device.type == "cuda" and backend != "nccl")


_BUILDERS: Mapping[str, Callable[..., Wire]] = {
    "direct": open_direct_wire,
    "socket": open_socket_wire,
    "gloo": open_gloo_wire,
    "strict": open_strict_wire,
}
"""Wires that know nothing of GPUs."""


class Link:
    """One end of a link. One thread sends or receives; any thread may ``abort``.

    After an error the link is of no more use: close it and build another.

    Args:
        wire: what carries the bytes.
        peer: who is at the other end, for errors.
        is_staged: whether tensors on a GPU go through host memory, for a wire that knows no GPU.
    """

    def __init__(self, wire: Wire, peer: str, *, is_staged: bool = False) -> None:
        self._wire = wire
        self._noting = wire if isinstance(wire, NotingWire) else None
        self._peer = peer
        self._is_staged = is_staged

    @property
    def carries_notes(self) -> bool:
        """Whether ``send`` takes a note, and ``receive_note`` returns it."""
        return self._noting is not None

    def send(
        self, tensors: Sequence[Tensor], *, what: str, timeout_s: float, note: bytes | None = None
    ) -> None:
        """Send contiguous tensors, which nobody writes to any more; they may leave later.

        A tensor without elements is not sent at all.

        Args:
            tensors: whose data is complete on their device.
            what: they are, for errors, such as "F17".
            timeout_s: until they are on their way.
            note: goes before them; only on a link that ``carries_notes``.

        Raises:
            LinkError: the link broke, nearly always because the peer died.
            DeadlineError: the time was up.
        """
        parts = _raw(tensors)
        if self._is_staged:
            parts = [part.cpu() for part in parts]
        if note is not None:
            assert self._noting is not None, "this link carries no notes"
            carry = partial(self._noting.send_noted, note, parts, timeout_s)
        elif parts:
            carry = partial(self._wire.send, parts, timeout_s)
        else:
            return
        self._carry(carry, f"send {what} to", timeout_s)

    def leaves_at_once(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether ``send`` with a note would not wait; never so without notes."""
        if self._noting is None or self._is_staged:
            return False
        try:
            return self._noting.leaves_at_once(_raw(tensors))
        except OSError:  # it is broken, which ``send`` is there to tell
            return False

    def receive_note(self, timeout_s: float) -> bytes:
        """Wait for the note of the next transfer.

        Raises:
            LinkError: the link broke, nearly always because the peer died.
            DeadlineError: the time was up.
        """
        assert self._noting is not None, "this link carries no notes"
        return self._carry(partial(self._noting.receive_note, timeout_s), "hear from", timeout_s)

    def receive(self, tensors: Sequence[Tensor], *, what: str, timeout_s: float) -> None:
        """Fill contiguous tensors of exactly the sizes that the peer sends.

        Args:
            tensors: to be filled; complete on their device when this returns.
            what: they are, for errors, such as "F17".
            timeout_s: until they are filled.

        Raises:
            LinkError: the link broke, nearly always because the peer died.
            DeadlineError: the time was up.
        """
        parts = _raw(tensors)
        room = (
            [torch.empty_like(part, device="cpu") for part in parts] if self._is_staged else parts
        )
        if room:
            self._carry(partial(self._wire.receive, room, timeout_s), f"get {what} from", timeout_s)
        if self._is_staged:
            for part, host in zip(parts, room, strict=True):
                part.copy_(host)
        if parts and parts[0].is_cuda:
            torch.cuda.current_stream(parts[0].device).synchronize()

    def abort(self) -> None:
        """Free the thread that waits here, with a ``LinkError``."""
        self._wire.abort()

    def close(self) -> None:
        """Release everything; nobody waits here any more."""
        self._wire.close()

    def _carry(self, carry: Callable[[], T], doing: str, timeout_s: float) -> T:
        start_s = time.monotonic()
        try:
            return carry()
        except (RuntimeError, OSError) as error:
            # Texts and types differ between backends and versions; the clock does not.
            if time.monotonic() - start_s >= timeout_s:
                raise DeadlineError(
                    f"could not {doing} {self._peer} within {timeout_s:g} s"
                ) from error
            raise LinkError(f"could not {doing} {self._peer}: {error}") from error


def _raw(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the bytes, which any backend carries, whatever the data type."""
    return [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
