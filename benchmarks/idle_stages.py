"""A job whose stages sleep and hand on next to nothing, and note what CPU time they have used."""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).with_name("peers")))
from device import emulated, score
from work import Samples, sgd

settings = {"batch_size": 32, "epochs": 1_000_000, "partition": "equal"}

KIBIBYTES = 4

CPU_S = struct.Struct("d")
"""``time.process_time()`` after an update."""


def cpu_file(run_dir: Path, stage: int) -> Path:
    return run_dir / f"cpu-{stage}"


def idle(stages: int, forward_ms: float) -> nn.Sequential:
    """Return stages that sleep, in a backward for twice as long, and hand on 4 KiB."""
    work = emulated(
        stages, forward_ms=forward_ms, backward_ms=2 * forward_ms, megabytes=KIBIBYTES / 1024
    )
    return nn.Sequential(*work.build_parts())


def model(devices: int = 4, forward_ms: float = 10.0) -> nn.Sequential:
    return idle(devices, forward_ms)


def datasets() -> tuple[Samples, None]:
    return emulated(1, forward_ms=0, backward_ms=0, megabytes=0).build_samples(), None


def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


loss = score


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = sgd(params)
    run_dir = os.environ.get("SPECTRAIN_RUN_DIR")
    if run_dir is not None:
        path = cpu_file(Path(run_dir), int(os.environ["SPECTRAIN_STAGE"]))
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def note(*_: Any) -> None:
            os.write(file, CPU_S.pack(time.process_time()))

        optimizer.register_step_post_hook(note)
    return optimizer
