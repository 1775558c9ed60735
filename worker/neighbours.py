"""The four stream ends of one stage: activations and gradients, in and out. Moves nothing itself.

A stage in the middle has all four; the first has no upstream, the last no downstream neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import zmq

from ..protocol.bootstrap import WorkerBirth
from ..protocol.keys import Authority
from ..protocol.messages import Connect, WorkerReady
from ..protocol.schedule import Op, Work
from ..protocol.settings import Settings
from .link import default_backend
from .receiving_stream import ReceivingStream
from .sending_stream import SendingStream

__all__ = ["Neighbours"]

_LOOPBACK = "127.0.0.1"
_SPARE_PARCELS = 2
"""Window beyond the micro-batches in flight: a forward's parcel may arrive before the parcels of
an evaluation round that are taken first."""


def _least_logged(settings: Settings, work: Work) -> int:
    """Return the parcels that are kept whatever the budget: fewer would never reach a round.

    The first rounds are four updates apart for each stage, and as many more may be under way until
    one is durable; two evaluation rounds may come in between.
    """
    return 8 * settings.stages * work.microbatches + 2 * work.evaluation_batches


class Neighbours:
    """Opens and closes the ends together.

    A broken link is no error here: the streams wait until ``connect`` names a new generation.

    Args:
        birth: who we are.
        context: the process's ZeroMQ context.
        authority: who may connect over tcp; None where all stages share this host.
        settings: the run's.
        work: how much there is to do.
        device: where the tensors are.
        is_wanted: whether the stage has yet to execute an op.
        on_link_lost: told which stream lost its link and why, in the stream's own thread.

    Attributes:
        activations_in: from upstream; None on the first stage.
        activations_out: to downstream; None on the last.
        gradients_in: from downstream; None on the last.
        gradients_out: to upstream; None on the first.
    """

    def __init__(
        self,
        birth: WorkerBirth,
        context: zmq.Context[zmq.Socket[bytes]],
        authority: Authority | None,
        settings: Settings,
        *,
        work: Work,
        device: torch.device,
        is_wanted: Callable[[Op], bool],
        on_link_lost: Callable[[str, str], None],
    ) -> None:
        self._birth = birth
        self._settings = settings
        same_host = birth.address is None
        keys = None if same_host else birth.keys
        ipc_dir = Path(birth.ipc_dir) if same_host else None
        window = settings.stages - birth.stage + _SPARE_PARCELS

        def receiving(name: str) -> ReceivingStream:
            return ReceivingStream(
                name,
                context=context,
                run_id=bytes.fromhex(birth.run_id),
                stage=birth.stage,
                incarnation=birth.incarnation,
                address=birth.address or _LOOPBACK,
                ipc_dir=ipc_dir,
                keys=keys,
                authority=authority,
                device=device,
                window=window,
                wait_timeout_s=settings.wait_timeout_s,
                epoch_batches=work.epoch_batches,
                backend=default_backend(device),
                is_wanted=is_wanted,
                on_link_lost=partial(on_link_lost, name),
                on_fault=self._fail,
            )

        def sending(name: str) -> SendingStream:
            return SendingStream(
                name,
                context=context,
                run_id=bytes.fromhex(birth.run_id),
                stage=birth.stage,
                incarnation=birth.incarnation,
                address=birth.address or _LOOPBACK,
                keys=keys,
                device=device,
                window=window,
                log_bytes=settings.log_memory_bytes if settings.repairs else None,
                least_parcels=_least_logged(settings, work),
                wait_timeout_s=settings.wait_timeout_s,
                epoch_batches=work.epoch_batches,
                backend=default_backend(device),
                on_link_lost=partial(on_link_lost, name),
                on_fault=self._fail,
            )

        has_upstream = birth.stage > 0
        has_downstream = birth.stage < settings.stages - 1
        self.activations_in = receiving("activations") if has_upstream else None
        self.gradients_out = sending("gradients") if has_upstream else None
        self.gradients_in = receiving("gradients") if has_downstream else None
        self.activations_out = sending("activations") if has_downstream else None

    @property
    def has_sent(self) -> bool:
        """Whether a neighbour got anything new; a stage alone has nobody to tell by."""
        outs = [end for end in (self.activations_out, self.gradients_out) if end is not None]
        return not outs or any(end.sent for end in outs)

    @property
    def suppressed(self) -> int:
        """Parcels that were made again, of the stream that has more of them."""
        outs = (self.activations_out, self.gradients_out)
        return max((end.suppressed for end in outs if end is not None), default=0)

    @property
    def log_bytes(self) -> int:
        """What is kept for neighbours that are restarted, of the stream that keeps more."""
        outs = (self.activations_out, self.gradients_out)
        return max((end.log_bytes_used for end in outs if end is not None), default=0)

    @property
    def peak_log_bytes(self) -> dict[str, int]:
        """The most that was ever kept of each stream, by the names that ``Progress`` has."""
        outs = {"activations": self.activations_out, "gradients": self.gradients_out}
        return {
            f"peak_{name}_log_bytes": end.peak_log_bytes
            for name, end in outs.items()
            if end is not None
        }

    def ready(self, parameters: int) -> WorkerReady:
        """Tell where neighbours may connect.

        Args:
            parameters: numbers in this stage's weights and buffers, for the user.
        """
        birth = self._birth
        return WorkerReady(
            stage=birth.stage,
            incarnation=birth.incarnation,
            parameters=parameters,
            activations_endpoint=self.activations_in.endpoint if self.activations_in else "",
            gradients_endpoint=self.gradients_in.endpoint if self.gradients_in else "",
            public_key=birth.keys.public,
        )

    def connect(self, message: Connect) -> None:
        """Begin to build the links that ``message`` names; others stay as they are."""
        if message.upstream is not None:
            assert self.activations_in is not None
            assert self.gradients_out is not None
            self.activations_in.expect(message.generation, message.upstream)
            self.gradients_out.connect(message.generation, message.upstream)
        if message.downstream is not None:
            assert self.activations_out is not None
            assert self.gradients_in is not None
            self.gradients_in.expect(message.generation, message.downstream)
            self.activations_out.connect(message.generation, message.downstream)

    def wait_connected(self) -> None:
        """Wait until all links stand for the first time.

        Raises:
            LinkError: a neighbour refuses.
            DeadlineError: it took too long.
        """
        for end in self._ends():
            end.wait_connected(self._settings.start_timeout_s)

    def trim(self, update: int) -> None:
        """Forget what only a restart from before ``update`` would need."""
        for end in self._ends():
            end.trim(update)

    def stop_before(self, batch: int) -> None:
        """Let nobody wait for activations of ``batch`` or later: they will never come."""
        if self.activations_in is not None:
            self.activations_in.stop_before(batch)

    def flush(self) -> None:
        """Wait until the neighbours have all that was put."""
        for end in (self.activations_out, self.gradients_out):
            if end is not None:
                end.flush(self._settings.wait_timeout_s)

    def _fail(self, error: Exception) -> None:
        """Let the loop hear of what ended one stream, whichever it waits for."""
        for end in self._ends():
            end.fail(error)

    def _ends(self) -> list[ReceivingStream | SendingStream]:
        ends = (self.activations_in, self.activations_out, self.gradients_in, self.gradients_out)
        return [end for end in ends if end is not None]
