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
from typing import Protocol

import torch
from torch import Tensor

from ..protocol.errors import DeadlineError, LinkError, SettingsError
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

BACKENDS = ("socket", "gloo", "nccl", "strict")


class Wire(Protocol):
    """Raw bytes one way between two ranks, in order.

    One thread sends or receives, any thread may abort. A wire that has raised is broken.
    """

    def send(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Send contiguous, non-empty ``uint8`` tensors; raise RuntimeError or OSError."""
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


def default_backend(device: torch.device) -> str:
    """Return the backend for stages on ``device``: NCCL between GPUs, else plain sockets.

    ``SPECTRAIN_LINK`` overrides: ``socket`` and ``gloo`` let several stages share one GPU (tensors
    are staged through host memory), ``strict`` tests on CPU what NCCL would not forgive.

    Raises:
        SettingsError: the variable names no backend, or NCCL without a GPU.
    """
    backend = os.environ.get(LINK_VARIABLE) or ("nccl" if device.type == "cuda" else "socket")
    if backend not in BACKENDS:
        raise SettingsError(f"{LINK_VARIABLE}={backend!r}: must be one of {', '.join(BACKENDS)}")
    if backend == "nccl" and device.type != "cuda":
        raise SettingsError(f"{LINK_VARIABLE}=nccl links GPUs only; use socket with --device cpu")
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
        backend: "socket", "gloo", "nccl" or "strict".
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
        self._peer = peer
        self._is_staged = is_staged

    def send(self, tensors: Sequence[Tensor], *, what: str, timeout_s: float) -> None:
        """Send contiguous tensors; their memory is free again when this returns.

        A tensor without elements is not sent at all.

        Args:
            tensors: whose data is complete on their device.
            what: they are, for errors, such as "F17".
            timeout_s: until the receiver has taken them.

        Raises:
            LinkError: the link broke, nearly always because the peer died.
            DeadlineError: the time was up.
        """
        parts = _raw(tensors)
        if self._is_staged:
            parts = [part.cpu() for part in parts]
        self._carry(self._wire.send, parts, f"send {what} to", timeout_s)

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
        self._carry(self._wire.receive, room, f"get {what} from", timeout_s)
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

    def _carry(
        self,
        carry: Callable[[Sequence[Tensor], float], None],
        parts: Sequence[Tensor],
        doing: str,
        timeout_s: float,
    ) -> None:
        if not parts:
            return
        start_s = time.monotonic()
        try:
            carry(parts, timeout_s)
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
