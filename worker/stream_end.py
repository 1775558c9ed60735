"""What both ends of a stream share: a thread, and links by generation. Knows no parcels.

Links come and go with the processes at their ends. That is no fault: a link that breaks is
dropped and told of, whoever waits goes on waiting, and a newer generation takes its place.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..protocol.errors import LinkError
from ..protocol.messages import Peer
from ..protocol.sockets import Waker
from .link import Link, open_link
from .rendezvous import Exchange
from .stream_gate import Gate

__all__ = ["LINK_TIMEOUT_S", "StreamEnd", "Target", "stream_identity"]

logger = logging.getLogger(__name__)

LINK_TIMEOUT_S = 7 * 24 * 3600.0
"""Of a transfer: never the one to give up, deadlines are those of the stage that waits."""

_BUILD_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 10.0


def stream_identity(stage: int, incarnation: int, name: str) -> str:
    """Return the name that a sender's socket goes by."""
    return f"worker/{stage}/{incarnation}/{name}"


class Target(NamedTuple):
    """Which link is wanted: its generation, and with whom."""

    generation: int
    peer: Peer

    @property
    def name(self) -> str:
        """The neighbour's name in errors."""
        return f"stage {self.peer.stage}"


class StreamEnd(ABC):
    """One end of a stream.

    Subclasses say in ``_step`` what the thread does next. It starts with the first generation.

    Args:
        name: "activations" or "gradients".
        stage: ours.
        rank: ``link.SENDER`` or ``link.RECEIVER``.
        address: numeric address of this host that the peer can reach.
        device: where the tensors are.
        window: parcels this end holds before the caller or the peer must wait, at least 1.
        wait_timeout_s: how long the stage may wait here while the link stands.
        epoch_batches: mini-batches of one epoch.
        backend: of the link, see ``link.default_backend``.
        on_link_lost: told why, in the stream's own thread, once for each link that broke.
        on_fault: given what ended the stream, in its own thread; the stage may be waiting for
            another stream, which ``fail`` tells.
    """

    def __init__(
        self,
        name: str,
        *,
        stage: int,
        rank: int,
        address: str,
        device: torch.device,
        window: int,
        wait_timeout_s: float,
        epoch_batches: int,
        backend: str,
        on_link_lost: Callable[[str], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        assert window >= 1, f"a window of {window} parcels lets nothing through"
        self._name = name
        self._stage = stage
        self._rank = rank
        self._address = address
        self._device = device
        self._window = window
        self._epoch_batches = epoch_batches
        self._backend = backend
        self._on_link_lost = on_link_lost
        self._on_fault = on_fault
        self.waited_s = 0.0
        """Time that the stage has waited here in sum."""
        self._waker = Waker()
        self._gate = Gate(stage, wait_timeout_s)
        # Guarded by the gate: which link is wanted, and which stands.
        self._wanted: Target | None = None
        self._connected: Target | None = None
        self._is_closing = False
        # The thread's own; with the gate held others may use it, and abort it at any time.
        self._link: Link | None = None
        self._lost: Target | None = None  # the newest whose link stood and broke
        self._thread: threading.Thread | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the link of the newest generation asked for stands."""
        return self._wanted is not None and self._connected == self._wanted

    def wait_connected(self, timeout_s: float) -> None:
        """Wait until the link of the newest generation asked for stands.

        Raises:
            ProtocolError: the neighbour refuses the link.
            ReplayMismatchError: an end lacks what the other needs.
            DeadlineError: the time is up.
        """
        with self._gate:
            self._gate.wait(
                lambda: self.is_connected,
                lambda: f"the {self._name} link with {self._peer_name()}",
                timeout_s,
                counts_always=True,
            )

    def fail(self, error: Exception) -> None:
        """Let whoever waits here, now or later, hear of this fault; the first one stays."""
        self._gate.fail(error)

    def close(self) -> None:
        """End the thread, its socket and its link; parcels that are still here are lost."""
        with self._gate:
            self._is_closing = True
            self._gate.fail(LinkError(f"the {self._name} stream of stage {self._stage} is closed"))
        if self._thread is None:
            self._close_socket()
        else:
            self._interrupt()
            self._thread.join(_END_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("thread %r has not ended; left behind", self._thread.name)
                return
        self._waker.close()

    def _want(self, target: Target) -> None:
        """Replace the link by one of this generation, unless a newer one is wanted already."""
        with self._gate:
            if self._wanted is not None and target.generation <= self._wanted.generation:
                return
            self._wanted = target
            self._connected = None
            self._gate.stop_clock()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"stage {self._stage} {self._name}", daemon=True
            )
            self._thread.start()
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        """Get the thread out of whatever it waits for."""
        link = self._link
        if link is not None:
            # On a GPU the abort of one link may wait for the kernels of another, so that those
            # of a worker's links must not wait for each other.
            threading.Thread(target=link.abort, name=f"{self._name} abort", daemon=True).start()
        self._waker.wake()

    def _peer_name(self) -> str:
        return self._wanted.name if self._wanted else "its neighbour"

    # -- in the stream's own thread -----------------------------------------------------------

    @abstractmethod
    def _step(self, target: Target) -> None:
        """Do the next thing for ``target``, or wait until a message or the waker comes."""

    @abstractmethod
    def _close_socket(self) -> None:
        """Close what the thread talks through."""

    def _run(self) -> None:
        with _own_cuda_stream(self._device):
            try:
                while not self._is_closing:
                    self._run_link()
            except Exception as error:  # noqa: BLE001 # the stage must hear of any
                with self._gate:
                    self._connected = None
                    self._gate.fail(error)
                self._on_fault(error)
        self._drop_link()
        self._close_socket()

    def _run_link(self) -> None:
        """Work for one target until its link breaks or another one is wanted."""
        target = self._wanted
        assert target is not None, "the thread starts when there is a link to build"
        try:
            while not self._is_closing and self._wanted == target:
                self._step(target)
        except LinkError as error:
            self._lose_link(target, str(error))

    def _lose_link(self, target: Target, reason: str) -> None:
        self._drop_link()
        with self._gate:
            is_wanted = self._wanted == target and not self._is_closing
            if is_wanted:
                self._lost = target
                self._connected = None
                self._gate.stop_clock()
        logger.info("%s link lost: %s", self._name, reason)
        if is_wanted:  # else it was to be replaced anyhow
            self._on_link_lost(reason)

    def _stand(self, target: Target) -> None:
        """Take the link that was built into service; the gate is held."""
        if self._wanted == target:
            self._connected = target
            self._gate.start_clock()

    def _open_link(self, target: Target, exchange: Exchange) -> bool:
        """Try to build the link; return whether it stands."""
        self._drop_link()
        try:
            self._link = open_link(
                self._backend,
                self._rank,
                peer=target.name,
                address=self._address,
                device=self._device,
                exchange=exchange,
                timeout_s=_BUILD_TIMEOUT_S,
            )
        except LinkError as error:
            logger.info("%s link not built yet: %s", self._name, error)
            return False
        return True

    def _standing_link(self, target: Target) -> Link | None:
        return self._link if self._connected == target else None

    def _drop_link(self) -> None:
        with self._gate:  # the stage's thread may be sending on it
            link, self._link = self._link, None
        if link is not None:
            link.close()


def _own_cuda_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Keep transfers out of the compute stream's queue."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))
