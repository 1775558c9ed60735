"""Raw bytes one way between two ranks by NCCL, for tensors on this worker's GPU. No policy.

NCCL allows one stream of operations per communicator, so each direction has its own. It does not
notice that a peer has died: only ``abort`` frees the waiter. Torch's own watchdog would kill the
whole process on a fault of the neighbour, so it is switched off; faults are judged elsewhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import cast

import torch
from torch import Tensor
from torch.distributed import Store

from .rendezvous import Exchange, Group, meet

__all__ = ["NCCL_ENVIRONMENT", "NcclWire", "open_nccl_wire"]

NCCL_ENVIRONMENT: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # wait() blocks this thread, and there is no watchdog
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "20",  # seconds
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    "NCCL_NVLS_ENABLE": "0",
}
"""Set before the first group is made, unless the user has set them."""

_GROUP_TIMEOUT = timedelta(days=7)  # never the one to give up
_UNIQUE_ID = "0"  # key of the one value that rank 0 writes and rank 1 reads


def open_nccl_wire(
    rank: int, *, device: torch.device, exchange: Exchange, timeout_s: float
) -> NcclWire:
    """Build one end.

    Args:
        rank: 0 sends, 1 receives.
        device: the GPU, different from the peer's.
        exchange: swaps rendezvous values with the peer.
        timeout_s: for each phase of the build.

    Raises:
        RuntimeError: it could not be built.
        TimeoutError: it was not built in time.
    """
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from torch.distributed import ProcessGroupNCCL  # absent from CPU builds of torch

    options = ProcessGroupNCCL.Options()
    options.config.blocking = False  # a missing peer must not block the build for ever
    options._timeout = _GROUP_TIMEOUT  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] # has no public name

    def construct(store: Store) -> Group:
        group = ProcessGroupNCCL(store, rank, 2, options)
        group.eager_connect_single_device(device)
        return cast("Group", group)

    group, _ = meet(
        construct,
        publishes=_UNIQUE_ID if rank == 0 else None,
        awaits=_UNIQUE_ID if rank == 1 else None,
        exchange=exchange,
        timeout_s=timeout_s,
    )
    return NcclWire(group, 1 - rank)


class NcclWire:
    """One end; see ``link.Wire``."""

    def __init__(self, group: Group, peer: int) -> None:
        self._group: Group | None = group
        self._peer = peer

    def send(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Send each part; return when this GPU is done with it."""
        group = self._open_group()
        deadline_s = time.monotonic() + timeout_s
        for part in parts:
            group.send([part], self._peer, 0).wait(_until(deadline_s))

    def receive(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Fill each part."""
        group = self._open_group()
        deadline_s = time.monotonic() + timeout_s
        for part in parts:
            group.recv([part], self._peer, 0).wait(_until(deadline_s))

    def abort(self) -> None:
        """Free a waiting thread; the communicator is dead afterwards."""
        group = self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Let go of the communicator. Nothing is under way any more, so there is no wait."""
        self.abort()
        self._group = None

    def _open_group(self) -> Group:
        if self._group is None:
            raise RuntimeError("the link is closed")
        return self._group


def _until(deadline_s: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline_s - time.monotonic()))
