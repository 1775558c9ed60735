"""What a job file does to let a run of ours train by turns and to note when batches end.

The first layer of the model lets as many batches pass as it is told through the pipe ``turns`` of
the run directory, then waits; so several runs share a machine without disturbing each other.
Every stage appends to its file ``updates-K`` the time of each update. None of it happens outside
the workers of a run.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["GRANT", "UPDATE", "note_updates", "turns_pipe", "updates_file", "wait_for_turns"]

GRANT = struct.Struct("i")
"""How many more batches may pass."""

UPDATE = struct.Struct("d")
"""``time.perf_counter()``, which is one clock for all processes of a host."""


def turns_pipe(run_dir: Path) -> Path:
    return run_dir / "turns"


def updates_file(run_dir: Path, stage: int) -> Path:
    return run_dir / f"updates-{stage}"


def wait_for_turns(model: nn.Sequential) -> nn.Sequential:
    """Let the model's first layer wait until it is this run's turn."""
    run_dir = os.environ.get("SPECTRAIN_RUN_DIR")
    if run_dir is not None:
        first = next(layer for layer in model.modules() if not isinstance(layer, nn.Sequential))
        first.register_forward_pre_hook(_Turnstile(turns_pipe(Path(run_dir))))
    return model


class _Turnstile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._pipe: int | None = None
        self._granted = 0

    def __call__(self, *_: Any) -> None:
        if self._pipe is None:
            self._pipe = os.open(self._path, os.O_RDONLY)
        while self._granted == 0:
            (self._granted,) = GRANT.unpack(os.read(self._pipe, GRANT.size))
        self._granted -= 1


def note_updates(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Note the end of every update of this stage."""
    run_dir = os.environ.get("SPECTRAIN_RUN_DIR")
    if run_dir is not None:
        path = updates_file(Path(run_dir), int(os.environ["SPECTRAIN_STAGE"]))
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def note(*_: Any) -> None:
            os.write(file, UPDATE.pack(time.perf_counter()))

        optimizer.register_step_post_hook(note)
    return optimizer
